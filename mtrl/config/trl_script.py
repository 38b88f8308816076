"""Reads the arguments of `GRPOConfig(..)` and `GRPOTrainer(..)` from a Python file and its command line.

The file is parsed and never run: values must be literals, names of literals, arithmetic with them, or attributes of
parsed arguments (`model_args.model_name_or_path`), whose values are on the command line.
"""

import ast
import builtins
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from mtrl.config.foreign_keys import find_counterpart
from mtrl.config.plain_values import MAX_INT
from mtrl.config.yaml_io import BadYaml

_TRAINER = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")  # positional arguments
_LORA_DEFAULTS = {
    "lora_r": 8,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_target_modules": ["q_proj", "v_proj"],
}  # those of peft for our model families, not those of TRL's ModelConfig
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules"}  # the other names are the same
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


# Defaults of TRL's dataclasses that scripts read to load the data and the model.
_ARGUMENTS = {
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "dataset_config": None,
    "dataset_streaming": False,
    "eval_strategy": "no",
    "model_revision": None,
    "attn_implementation": None,
    "trust_remote_code": False,
    "dtype": "float32",
}
_MODEL_OPTIONS = {"revision": "model_revision", "torch_dtype": "dtype"}  # of from_pretrained; others are the same
_FROM_ARGUMENTS = ("get_peft_config", "get_quantization_config")  # made from ModelConfig, which is read anyway
_CHANGES = ("append", "extend", "insert", "remove", "pop", "clear", "update")
MAX_STEPS = 20_000  # names and operations: `b = a + a` and so on would double the work each time


class Script(NamedTuple):
    """Values by TRL's names; unreadable arguments with the reason; remarks on arguments that are read incompletely."""

    values: dict[str, Any]
    unread: dict[str, str]
    remarks: dict[str, str]


class _NotLiteral(Exception):
    """The message, if any, says more than that it is not a literal."""


def read_script(text: str, path: str, given: Mapping[str, Any] | None = None) -> Script:
    """Read a script that is started with the `given` arguments; raise `BadYaml` if it is not Python or not GRPO."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        message = getattr(error, "msg", None) or "it cannot be parsed"
        raise BadYaml(f"{f':{line}' if line else ''}: not valid Python: {message}") from None
    reader = _Reader(tree, path, given or {})
    configs, trainers = reader.calls("GRPOConfig"), reader.calls("GRPOTrainer")
    if not configs and not trainers:
        raise BadYaml(": it calls neither GRPOConfig(..) nor GRPOTrainer(..)")
    for calls in (configs, trainers):
        if len(calls) > 1:
            raise BadYaml(f":{calls[1].lineno}: a second {_name(calls[1].func)}(..); keep one of the two")
    for call in configs:
        reader.take(_keywords(call, ("output_dir",)))
    for call in trainers:
        reader.take_trainer(dict(_keywords(call, _TRAINER)))
    reader.take_changes()
    reader.take_given()
    return reader.script


class _Reader:
    def __init__(self, tree: ast.Module, path: str, given: Mapping[str, Any]) -> None:
        self.tree, self.path, self.given = tree, path, given
        self.script = Script({}, {}, {})
        self.assigned: dict[str, list[ast.expr]] = {}
        self.imported: dict[str, str] = {}
        self.fields: dict[str, ast.expr] = {}  # defaults of the dataclasses in the script
        self.changed: dict[str, str] = {}  # names of lists and the method that changes them
        self.read: set[str] = set()  # given arguments that the script itself reads
        self.steps = 0
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self.imported |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
            elif isinstance(node, ast.ClassDef):
                self.fields |= dict(_fields(node))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
                self.changed[_name(node.func.value)] = node.func.attr
            for name, value in _assignments(node):
                self.assigned.setdefault(name, []).append(value)

    def calls(self, name: str) -> list[ast.Call]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and _name(node.func) == name]

    def take(self, keywords: Iterator[tuple[str, ast.expr]], renamed: Mapping[str, str] | None = None) -> None:
        for name, node in keywords:
            name = (renamed or {}).get(name, name)
            try:
                if name == "model_init_kwargs" and (options := _dict_items(node)) is not None:
                    self.take(iter(options), _MODEL_OPTIONS)
                    continue
                self.script.values[name] = self.literal(node)
            except _NotLiteral as error:
                if not self._is_own_argument(name, node):
                    self.script.unread[name] = f"`{_source(node)}` {error if str(error) else 'is not a literal value'}"

    def take_trainer(self, arguments: dict[str, ast.expr]) -> None:
        for name in ("args", "processing_class", "tokenizer", "optimizers"):
            arguments.pop(name, None)  # GRPOConfig itself, and objects made from the model
        readers = {"model": self._model, "reward_funcs": self._rewards, "train_dataset": self._dataset,
                   "eval_dataset": self._dataset, "peft_config": self._peft}  # fmt: skip
        names = {"model": "model_name_or_path"}
        for name, node in arguments.items():
            if isinstance(node, ast.Call) and _name(node.func) in _FROM_ARGUMENTS:
                continue
            try:
                if name not in readers:
                    raise _NotLiteral
                readers[name](names.get(name, name), node)
            except _NotLiteral as error:
                why = error if str(error) else "cannot be read from the file"
                self.script.unread[names.get(name, name)] = f"`{_source(node)}` {why}"

    def take_changes(self) -> None:
        """`training_args.learning_rate = 1e-5` after the arguments are parsed or GRPOConfig(..) is built."""
        changed = [node for node in ast.walk(self.tree) if isinstance(node, ast.Assign)]
        for node in changed:
            target = node.targets[0]
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                holder = target.value.id
                built = [_name(value.func) for value in self.assigned.get(holder, []) if isinstance(value, ast.Call)]
                if "GRPOConfig" in built or self._holds_arguments(holder):
                    self.take(iter([(target.attr, node.value)]))

    def take_given(self) -> None:
        """The arguments of the command line that are fields of TRL's dataclasses, or that nothing has read."""
        for name, value in self.given.items():
            if name in self.script.values and self.script.values[name] != value:
                self.script.unread[f"--{name}"] = f"the script itself sets {name}"
            elif name == "dataset_name" and name in self.read and "train_dataset" in self.script.values:
                continue  # it is the name in train_dataset, which has the split too
            elif name not in self.read or find_counterpart("TRL", name) is not None:
                self.script.values.setdefault(name, value)
                self.script.unread.pop(name, None)
        own = self.script.values.get("train_dataset")
        if own is not None and "dataset_name" in self.given and "dataset_name" not in self.read:
            self.script.values.pop("train_dataset")
            self.script.remarks["dataset_name"] = f"the script itself loads {own}, whatever --dataset_name is"

    def literal(self, node: ast.expr, depth: int = 0) -> Any:
        self.steps += 1
        if depth > 20 or self.steps > MAX_STEPS:
            raise _NotLiteral("takes too many steps to compute")
        if isinstance(node, ast.Name):
            return self.literal(self._only(node.id), depth + 1)
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and self._holds_arguments(node.value.id)
        ):
            return self._argument(node.attr, depth)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            left, right = self.literal(node.left, depth + 1), self.literal(node.right, depth + 1)
            if not all(isinstance(side, (int, float)) for side in (left, right)):
                raise _NotLiteral
            try:
                return _bounded(_ARITHMETIC[type(node.op)](left, right))
            except (ArithmeticError, ValueError):
                raise _NotLiteral from None
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.literal(item, depth + 1) for item in node.elts]
        try:
            return _bounded(ast.literal_eval(node))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise _NotLiteral from None

    def _holds_arguments(self, name: str) -> bool:
        """Whether the name holds parsed arguments: `.. = parser.parse_args..()`, one of several of them, or a parameter
        of `main`."""
        values = self.assigned.get(name, [])
        if not values:
            return name not in self.imported and not hasattr(builtins, name)
        return all(isinstance(value, ast.Call) and _name(value.func).startswith("parse_") for value in values)

    def _argument(self, name: str, depth: int) -> Any:
        if name in self.given:
            self.read.add(name)
            return self.given[name]
        if name in self.fields:
            return self.literal(self.fields[name], depth + 1)
        if name in _ARGUMENTS:
            return _ARGUMENTS[name]
        raise _NotLiteral(f"comes from the command line; add -- --{name} VALUE to mtrl convert")

    def _is_own_argument(self, name: str, node: ast.expr) -> bool:
        """Whether the node computes a value from the argument of the same name, which is converted itself."""
        if isinstance(node, ast.Name) and len(self.assigned.get(node.id, [])) == 1:
            node = self.assigned[node.id][0]
        parts = [part for part in ast.walk(node) if isinstance(part, ast.Attribute) and part.attr == name]
        return any(isinstance(part.value, ast.Name) and self._holds_arguments(part.value.id) for part in parts)

    def _only(self, name: str) -> ast.expr:
        """The value of a name that is assigned once."""
        values = self.assigned.get(name, [])
        if len(values) != 1:
            raise _NotLiteral
        if name in self.changed:
            raise _NotLiteral(f"is changed later by .{self.changed[name]}(..)")
        return values[0]

    def _model(self, name: str, node: ast.expr) -> None:
        """A hub id, or the first argument of `from_pretrained`."""
        value = self._only(node.id) if isinstance(node, ast.Name) else node
        is_load = isinstance(value, ast.Call) and _name(value.func) == "from_pretrained" and value.args
        self.script.values[name] = self.literal(value.args[0] if is_load else node)  # type: ignore[attr-defined]

    def _peft(self, name: str, node: ast.expr) -> None:
        value = self._only(node.id) if isinstance(node, ast.Name) else node
        if isinstance(value, ast.Constant) and value.value is None:
            return
        if not isinstance(value, ast.Call) or _name(value.func) != "LoraConfig":
            raise _NotLiteral
        self.script.values.update(use_peft=True, **_LORA_DEFAULTS)
        self.take(_keywords(value, ("task_type", "r")), _LORA)

    def _rewards(self, name: str, node: ast.expr) -> None:
        """Functions as `file.py:name` or `package.module:name`; a string is a reward model."""
        if isinstance(node, ast.Name) and node.id in self.assigned:
            node = self._only(node.id)
        items = node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]
        functions = []
        for item in items:
            if isinstance(item, ast.Name) and item.id in self.imported:
                functions.append(self.imported[item.id])
            elif isinstance(item, ast.Name) and self._defines(item.id):
                functions.append(f"{self.path}:{item.id}")
                self.script.remarks[name] = (
                    f"importing {self.path} must not start training; otherwise move {item.id} to another file"
                )
            elif isinstance(item, ast.Constant) and isinstance(item.value, str) and len(items) == 1:
                self.script.values["reward_model_name_or_path"] = item.value
                return
            else:
                raise _NotLiteral(self._why_no_reward(item))
        self.script.values[name] = functions

    def _why_no_reward(self, item: ast.expr) -> str:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        defined = [node for node in ast.walk(self.tree) if isinstance(node, kinds) and node.name == _name(item)]
        if not defined:
            return ""
        return (
            f"contains {defined[0].name}, which is defined inside a block or function (line {defined[0].lineno}) and "
            "cannot be imported; move it to the top level of a file and list all functions in worker.reward.functions"
        )

    def _defines(self, name: str) -> bool:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return any(isinstance(node, kinds) and node.name == name for node in self.tree.body)

    def _dataset(self, name: str, node: ast.expr) -> None:
        """`load_dataset("id", split="train")` as `id@train`. Later changes to its rows are not converted."""
        node = self._chosen(node)
        if isinstance(node, ast.Constant) and node.value is None:
            return
        steps: set[str] = set()
        parts: list[str] = []  # of `dataset["train"]`
        call = self._find_load_call(node, steps, parts, 0)
        arguments = dict(_keywords(call, ("path", "name")))
        if "name" in arguments and self.literal(arguments["name"]) is not None:
            raise _NotLiteral("loads a subset of a dataset; store it as a file (to_json, to_parquet) and name that")
        if "data_files" in arguments:
            if self.literal(arguments["path"]) not in ("json", "parquet"):
                raise _NotLiteral
            files = self.literal(arguments["data_files"])
            self.script.values[name] = ",".join(files) if isinstance(files, list) else files
        else:
            if "train_test_split" in steps and "test" in parts:
                raise _NotLiteral("is cut off by .train_test_split(..); store these rows as a file and name that")
            split = self.literal(arguments["split"]) if "split" in arguments else (parts or ["train"])[0]
            self.script.values[name] = f"{self.literal(arguments['path'])}@{split}"
        if steps:
            calls = ", ".join(f".{step}(..)" for step in sorted(steps))
            self.script.remarks[name] = f"the rows as stored; {calls} is not converted"

    def _chosen(self, node: ast.expr) -> ast.expr:
        """The branch of `a if x.eval_strategy != "no" else b`, and of names that stand for one."""
        if isinstance(node, ast.Name) and len(self.assigned.get(node.id, [])) == 1:
            return self._chosen(self.assigned[node.id][0]) if isinstance(self._only(node.id), ast.IfExp) else node
        if not isinstance(node, ast.IfExp):
            return node
        test = node.test
        if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], (ast.Eq, ast.NotEq)):
            raise _NotLiteral
        equal = self.literal(test.left) == self.literal(test.comparators[0])
        return node.body if equal == isinstance(test.ops[0], ast.Eq) else node.orelse

    def _find_load_call(self, node: ast.expr, steps: set[str], parts: list[str], depth: int) -> ast.Call:
        if depth > 20:
            raise _NotLiteral
        if isinstance(node, ast.Call) and _name(node.func) == "load_dataset":
            return node
        if isinstance(node, ast.Subscript):
            parts.append(str(self.literal(node.slice)))
            return self._find_load_call(node.value, steps, parts, depth + 1)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            steps.add(node.func.attr)
            return self._find_load_call(node.func.value, steps, parts, depth + 1)
        if isinstance(node, ast.Name):
            for value in self.assigned.get(node.id, [])[1:]:  # `data = data.map(..)`
                calls = (part.func for part in ast.walk(value) if isinstance(part, ast.Call))
                steps |= {function.attr for function in calls if isinstance(function, ast.Attribute)}
            if node.id in self.assigned:
                return self._find_load_call(self.assigned[node.id][0], steps, parts, depth + 1)
        raise _NotLiteral


def _assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The names that a statement gives a value; a loop or `+=` counts as a further value."""
    if isinstance(node, ast.Assign):
        yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        if isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield from [(node.target.id, node.value)] * 2
    elif isinstance(node, ast.For) and isinstance(node.target, ast.Name):
        yield from [(node.target.id, node.iter)] * 2


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """The fields of a dataclass with a default: `name: str = "x"` or `name: str = field(default="x")`."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.value is not None:
            value = item.value
            if isinstance(value, ast.Call) and _name(value.func) == "field":
                value = dict(_keywords(value, ())).get("default", value)
            yield item.target.id, value


def _dict_items(node: ast.expr) -> list[tuple[str, ast.expr]] | None:
    """The items of `dict(a=1)` or `{"a": 1}`; None for other expressions."""
    if isinstance(node, ast.Call) and _name(node.func) == "dict" and not node.args:
        return list(_keywords(node, ()))
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return [(str(getattr(key, "value", None)), value) for key, value in zip(node.keys, node.values, strict=True)]
    return None


def _bounded(value: Any) -> Any:
    """Reject whole numbers that no key takes: multiplying them again and again would never end."""
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise _NotLiteral(f"is a whole number of {value.bit_length()} bits; no key takes more than 63")
    return value


def _source(node: ast.expr) -> str:
    try:
        return ast.unparse(node)[:60]
    except RecursionError:
        return f"line {node.lineno}"


def _keywords(call: ast.Call, positions: tuple[str, ...]) -> Iterator[tuple[str, ast.expr]]:
    yield from zip(positions, call.args, strict=False)
    yield from ((keyword.arg or f"**{_source(keyword.value)[:40]}", keyword.value) for keyword in call.keywords)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
