"""Reads the arguments of `GRPOConfig(..)` and `GRPOTrainer(..)` from a Python file.

The file is parsed and never run: values must be literals, names of literals, or arithmetic with them.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from mtrl.config.yaml_io import BadYaml

_TRAINER = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")  # positional arguments
_LORA_DEFAULTS = {
    "lora_r": 8,
    "lora_alpha": 8,
    "lora_target_modules": ["q_proj", "v_proj"],
}  # those of peft for our model families
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules"}  # the other names are the same
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class Script(NamedTuple):
    """Values by TRL's names; unreadable arguments with the reason; remarks on arguments that are read incompletely."""

    values: dict[str, Any]
    unread: dict[str, str]
    remarks: dict[str, str]


class _NotLiteral(Exception):
    pass


def read_script(text: str, path: str) -> Script:
    """Read a script; raise `BadYaml` if it is not Python or does not use GRPO."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        message = getattr(error, "msg", None) or "it cannot be parsed"
        raise BadYaml(f"{f':{line}' if line else ''}: not valid Python: {message}") from None
    reader = _Reader(tree, path)
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
    return reader.script


class _Reader:
    def __init__(self, tree: ast.Module, path: str) -> None:
        self.tree, self.path = tree, path
        self.script = Script({}, {}, {})
        self.assigned: dict[str, list[ast.expr]] = {}
        self.imported: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.assigned.setdefault(node.targets[0].id, []).append(node.value)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self.imported |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}

    def calls(self, name: str) -> list[ast.Call]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and _name(node.func) == name]

    def take(self, keywords: Iterator[tuple[str, ast.expr]], renamed: Mapping[str, str] | None = None) -> None:
        for name, node in keywords:
            name = (renamed or {}).get(name, name)
            try:
                self.script.values[name] = self.literal(node)
            except _NotLiteral:
                self.script.unread[name] = f"`{ast.unparse(node)[:60]}` is not a literal value"

    def take_trainer(self, arguments: dict[str, ast.expr]) -> None:
        for name in ("args", "processing_class", "tokenizer", "optimizers"):
            arguments.pop(name, None)  # GRPOConfig itself, and objects made from the model
        readers = {"model": self._model, "reward_funcs": self._rewards, "train_dataset": self._dataset,
                   "eval_dataset": self._dataset, "peft_config": self._peft}  # fmt: skip
        names = {"model": "model_name_or_path"}
        for name, node in arguments.items():
            try:
                if name not in readers:
                    raise _NotLiteral
                readers[name](names.get(name, name), node)
            except _NotLiteral:
                self.script.unread[names.get(name, name)] = f"`{ast.unparse(node)[:60]}` cannot be read from the file"

    def literal(self, node: ast.expr, depth: int = 0) -> Any:
        if depth > 20:
            raise _NotLiteral
        if isinstance(node, ast.Name):
            return self.literal(self._only(node.id), depth + 1)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            left, right = self.literal(node.left, depth + 1), self.literal(node.right, depth + 1)
            if not all(isinstance(side, (int, float)) for side in (left, right)):
                raise _NotLiteral
            try:
                return _ARITHMETIC[type(node.op)](left, right)
            except (ArithmeticError, ValueError):
                raise _NotLiteral from None
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.literal(item, depth + 1) for item in node.elts]
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise _NotLiteral from None

    def _only(self, name: str) -> ast.expr:
        """The value of a name that is assigned once."""
        values = self.assigned.get(name, [])
        if len(values) != 1:
            raise _NotLiteral
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
                raise _NotLiteral
        self.script.values[name] = functions

    def _defines(self, name: str) -> bool:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return any(isinstance(node, kinds) and node.name == name for node in self.tree.body)

    def _dataset(self, name: str, node: ast.expr) -> None:
        """`load_dataset("id", split="train")` as `id@train`. Later changes to its rows are not converted."""
        steps: set[str] = set()
        call = self._find_load_call(node, steps, 0)
        arguments = dict(_keywords(call, ("path", "name")))
        has_files = "data_files" in arguments
        if "name" in arguments or (has_files and self.literal(arguments["path"]) not in ("json", "parquet")):
            raise _NotLiteral
        if has_files:
            files = self.literal(arguments["data_files"])
            self.script.values[name] = ",".join(files) if isinstance(files, list) else files
        else:
            split = self.literal(arguments["split"]) if "split" in arguments else "train"
            self.script.values[name] = f"{self.literal(arguments['path'])}@{split}"
        if steps:
            calls = ", ".join(f".{step}(..)" for step in sorted(steps))
            self.script.remarks[name] = f"the rows as stored; {calls} is not converted"

    def _find_load_call(self, node: ast.expr, steps: set[str], depth: int) -> ast.Call:
        if depth > 20:
            raise _NotLiteral
        if isinstance(node, ast.Call) and _name(node.func) == "load_dataset":
            return node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            steps.add(node.func.attr)
            return self._find_load_call(node.func.value, steps, depth + 1)
        if isinstance(node, ast.Name):
            for value in self.assigned.get(node.id, [])[1:]:  # `data = data.map(..)`
                calls = (part.func for part in ast.walk(value) if isinstance(part, ast.Call))
                steps |= {function.attr for function in calls if isinstance(function, ast.Attribute)}
            if node.id in self.assigned:
                return self._find_load_call(self.assigned[node.id][0], steps, depth + 1)
        raise _NotLiteral


def _keywords(call: ast.Call, positions: tuple[str, ...]) -> Iterator[tuple[str, ast.expr]]:
    yield from zip(positions, call.args, strict=False)
    yield from ((keyword.arg or f"**{ast.unparse(keyword.value)[:40]}", keyword.value) for keyword in call.keywords)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
