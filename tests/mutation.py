"""Mutation run: is every operator of the core pinned down by a test?

    python tests/mutation.py [credit losses learner ..]

Each operator, constant, branch and flag of the modules and packages of MODULES is changed in turn, and the unit tests
run against the change. A change that no test notices is a survivor: a missing test, or a change that changes nothing.
The latter are listed in EQUIVALENT with the reason. Exit status 1: a survivor that is not listed, or a line of that
table that no longer matches a survivor.

torch and TRL are imported once; each mutant runs in a fork of this process, at most JOBS at a time. A finder in front
of `sys.meta_path` hands out the changed module, so every import of it gets the change. Two forks show that this works
before any other is trusted: the unchanged module must pass, and one whose functions all raise must fail by their raise.
"""

from __future__ import annotations

import ast
import copy
import gc
import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutation_equivalents import EQUIVALENT

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    "credit": "mtrl.algorithms.credit",
    "contingency": "mtrl.algorithms.contingency",
    "cfpo": "mtrl.algorithms.loss_terms.cfpo",
    "papo": "mtrl.algorithms.loss_terms.papo",
    "groups": "mtrl.algorithms.groups",
    "losses": "mtrl.algorithms.losses",
    "value_loss": "mtrl.algorithms.value_loss",
    "algorithm": "mtrl.compose.algorithm",
    "algorithm_spec": "mtrl.training.algorithm_spec",
    "learner": "mtrl.workers.learner",
    "actor": "mtrl.workers.actor",
    "reference": "mtrl.workers.reference",
    "micro_batches": "mtrl.workers.micro_batches",
    "filtering": "mtrl.algorithms.filtering",
    "dynamic_sampling": "mtrl.training.dynamic_sampling",
    "replay": "mtrl.algorithms.replay",
    "collect": "mtrl.training.collect",
}
JOBS = 2
SECONDS_PER_MUTANT = 90
CANARY = "the canary sings"
SURVIVED, KILLED, TIMED_OUT, BROKEN = "survived", "killed", "timed out", "broken"
OUTCOMES = {0: SURVIVED, 1: KILLED, 2: KILLED}  # of pytest's exit statuses; 2: it could not even be imported
# Only what the tests need, no cache shared between mutants; failing examples are not shrunk: that they fail is enough.
PYTEST_OPTIONS = ["-xq", "--tb=line", "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin"]
PYTEST_OPTIONS += ["--hypothesis-profile=mutation", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
PYTEST_OPTIONS += ["-p", "no:unraisableexception"]  # which collects garbage at the end of each file for a second

# Cheap tests first: with -x most mutants die in the first file.
PROPERTIES = ["tests/unit/test_properties_parts.py", "tests/unit/test_properties.py"]
TESTS = {
    "credit": [
        "tests/unit/test_credit.py",
        "tests/unit/test_credit_rules.py",
        "tests/unit/test_published_rules.py",
        "tests/unit/test_oracle.py",
        "tests/unit/test_registry.py",
        "tests/unit/test_metrics.py",
        "tests/unit/test_mutants.py",
        "tests/unit/test_rules_of_papers.py",
        *PROPERTIES,
    ],
    "contingency": ["tests/unit/test_contingency.py"],
    "cfpo": ["tests/unit/test_cfpo.py"],
    "papo": ["tests/unit/test_loss_terms.py"],
    "groups": [
        "tests/unit/test_groups.py",
        "tests/unit/test_credit.py",
        "tests/unit/test_mutants.py",
        "tests/unit/test_rules_of_papers.py",
        *PROPERTIES,
    ],
    "losses": [
        "tests/unit/test_losses.py",
        "tests/unit/test_loss_weights.py",
        "tests/unit/test_loss_terms.py",
        "tests/unit/test_divergence.py",
        "tests/unit/test_mutants.py",
        "tests/unit/test_doors.py",
        "tests/conformance/test_trl_agreement.py",
        *PROPERTIES,
    ],
    "value_loss": ["tests/unit/test_values.py"],
    "algorithm": [
        "tests/unit/test_recipe.py",
        "tests/unit/test_build_critic.py",
        "tests/unit/test_own_signals.py",
        "tests/unit/test_doors.py",
    ],
    "algorithm_spec": ["tests/unit/test_recipe.py", "tests/unit/test_loop.py"],
    "learner": ["tests/unit/test_learner.py"],
    "actor": ["tests/unit/test_actor.py"],
    "reference": ["tests/unit/test_workers_from_config.py", "tests/unit/test_own_signals.py"],
    "micro_batches": ["tests/unit/test_micro_batches.py"],
    "filtering": ["tests/unit/test_filtering.py"],
    "dynamic_sampling": ["tests/unit/test_filtering.py", "tests/unit/test_loop_gather.py"],
    "replay": ["tests/unit/test_replay.py", "tests/unit/test_replay_memory.py"],
    "collect": ["tests/unit/test_loop_gather.py", "tests/unit/test_loop.py", "tests/unit/test_loop_ahead.py"],
}

NAMES_AND_MESSAGES = {"credit.registry"}  # files without arithmetic, left out


@dataclass(frozen=True)
class Mutant:
    module: str  # a name of MODULES, or that and a file of the package there
    function: str  # dotted name within the module, or "<module>"
    line: int
    before: str  # the statement, or what of it fits a line
    after: str
    tree: ast.Module

    @property
    def key(self) -> tuple[str, str]:
        return f"{self.module}.{self.function}", self.after

    def __str__(self) -> str:
        return f"{self.module}.{self.function}, line {self.line}\n    - {self.before}\n    + {self.after}"


# ---- changes -------------------------------------------------------------------------------------------------------

OPERATORS: dict[type[ast.AST], list[type[ast.AST]]] = {
    ast.Add: [ast.Sub],
    ast.Sub: [ast.Add],
    ast.Mult: [ast.Div],
    ast.Div: [ast.Mult],
    ast.Pow: [ast.Mult],
    ast.BitAnd: [ast.BitOr],
    ast.BitOr: [ast.BitAnd],
    ast.Lt: [ast.LtE, ast.Gt],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.Lt],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.And: [ast.Or],
    ast.Or: [ast.And],
}
NAMES = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "any": "all",
    "all": "any",
    "ceil": "floor",
    "sum": "mean",
    "mean": "sum",
    "zeros": "ones",
    "ones": "zeros",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
}
DROPPED = {"clamp", "where", "detach", "exp", "ceil", "minimum", "double", "float", "abs"}  # x.clamp(..) becomes x


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in place of this node."""
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)):
        for other in OPERATORS.get(type(node.op), []):
            yield changed(node, op=other())
    if isinstance(node, ast.Compare):
        for other in OPERATORS.get(type(node.ops[0]), []):
            yield changed(node, ops=[other(), *node.ops[1:]])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not, ast.Invert)):
        yield node.operand
    if isinstance(node, ast.Constant):
        for value in other_constants(node.value):
            yield changed(node, value=value)
    if isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield changed(node, attr=NAMES[node.attr])
    if isinstance(node, ast.Name) and node.id in NAMES:
        yield changed(node, id=NAMES[node.id])
    if isinstance(node, ast.Call):
        yield from changed_calls(node)
    if isinstance(node, ast.IfExp):
        yield changed(node, body=node.orelse, orelse=node.body)
    if isinstance(node, ast.If) and not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
        yield changed(node, test=ast.UnaryOp(ast.Not(), node.test))


def changed_calls(node: ast.Call) -> Iterator[ast.AST]:
    method = node.func.attr if isinstance(node.func, ast.Attribute) else None
    library = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", None) in ("torch", "math")
    if isinstance(node.func, ast.Attribute) and method in DROPPED and not library:
        yield node.func.value
    if method == "where" and library:
        condition, yes, no = node.args
        yield changed(node, args=[condition, no, yes])
    elif method == "where":  # x.where(condition, y): y where the condition holds
        inverted = ast.Call(ast.Attribute(ast.Name("torch"), "logical_not"), [node.args[0]], [])
        yield changed(node, args=[inverted, *node.args[1:]])
    for index, keyword in enumerate(node.keywords):  # clamp(min=..) and clamp(max=..)
        if keyword.arg in ("min", "max"):
            other = changed(keyword, arg=NAMES[keyword.arg])
            yield changed(node, keywords=[*node.keywords[:index], other, *node.keywords[index + 1 :]])


def other_constants(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1]
    if isinstance(value, float):
        return [value * 1.5, value / 1.5] if value else [1.0, -1.0]
    return [value + "?"] if isinstance(value, str) else []


def changed(node: Any, **fields: Any) -> Any:
    twin = copy.copy(node)
    for name, value in fields.items():
        setattr(twin, name, value)
    return twin


# ---- where they apply ----------------------------------------------------------------------------------------------


def find_nodes(node: ast.AST, path: tuple = (), function: str = "", statement: tuple = ()) -> Iterator[tuple]:
    """(path, node, function, path of its statement) of all that runs: no docstrings, annotations, imports, messages."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        function = f"{function}.{node.name}".lstrip(".")
    if isinstance(node, ast.stmt):
        statement = path
    yield path, node, function or "<module>", statement
    skipped = {"annotation", "returns", "decorator_list", "msg", "ctx"}
    if isinstance(node, ast.Raise):
        return
    for name, value in ast.iter_fields(node):
        if name in skipped:
            continue
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if not isinstance(child, ast.AST) or isinstance(child, (ast.Import, ast.ImportFrom)):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):  # a docstring
                continue
            if isinstance(child, ast.Assign) and not function and declares_types_or_names(child):
                continue
            if isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant):  # the words of a message
                continue
            step = (name, index if isinstance(value, list) else None)
            yield from find_nodes(child, (*path, step), function, statement)


def declares_types_or_names(node: ast.Assign) -> bool:
    """A type alias, a type variable, or __all__."""
    alias = isinstance(node.value, ast.Subscript) or ast.unparse(node.value).startswith("TypeVar(")
    return alias or ast.unparse(node.targets[0]) == "__all__"


def reach(tree: Any, path: tuple) -> Any:
    for name, index in path:
        tree = getattr(tree, name) if index is None else getattr(tree, name)[index]
    return tree


def put(tree: ast.Module, path: tuple, node: ast.AST) -> None:
    *way, (name, index) = path
    parent = reach(tree, tuple(way))
    if index is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[index] = node


def mutants(module: str, source: str) -> Iterator[Mutant]:
    original = ast.parse(source)
    for path, node, function, statement in list(find_nodes(original)):
        for replacement in changes(node):
            tree = copy.deepcopy(original)
            put(tree, path, copy.deepcopy(replacement))
            ast.fix_missing_locations(tree)
            before, after = render(original, path, statement), render(tree, path, statement)
            yield Mutant(module, function, getattr(node, "lineno", 0), before, after, tree)


def render(tree: ast.Module, path: tuple, statement: tuple) -> str:
    """The statement around the node at `path`, without its body; of a long one the largest part that fits a line."""
    for length in range(len(statement), len(path) + 1):
        around = reach(tree, path[:length])
        text = ast.unparse(around)
        text = text.splitlines()[0] if isinstance(around, ast.stmt) and hasattr(around, "body") else text
        in_it = not isinstance(around, (ast.FunctionDef, ast.ClassDef))  # whose first line need not hold the default
        if in_it and len(text) <= 110:
            break
    return text


def canary(source: str) -> ast.Module:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = ast.parse(f"raise AssertionError({CANARY!r})").body
    return tree


# ---- running them --------------------------------------------------------------------------------------------------


def module_files(name: str) -> dict[str, Path]:
    """Modules by their dotted names, and where each stands: one, or all of a package."""
    package = source_path(name)
    if not package.is_dir():
        return {name: package.with_suffix(".py")}
    inner = {f"{name}.{path.stem}": path for path in sorted(package.glob("*.py")) if path.stem != "__init__"}
    return {name: package / "__init__.py"} | {k: path for k, path in inner.items() if k not in NAMES_AND_MESSAGES}


def full_name(module: str) -> str:
    name, *inner = module.split(".")
    return ".".join([MODULES[name], *inner])


def source_path(module: str) -> Path:
    """Without the suffix of a file."""
    return ROOT.joinpath(*full_name(module).split("."))


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Hands out one module from a tree in place of its file; the other files of a package stay as they are."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        self.name, self.tree, self.package = full_name(module), tree, source_path(module)

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=self.package.is_dir())
        if self.package.is_dir():
            spec.submodule_search_locations = [str(self.package)]
        return spec

    def exec_module(self, module: Any) -> None:
        exec(compile(self.tree, f"<changed {self.name}>", "exec"), module.__dict__)


def tests_of(module: str) -> list[str]:
    """Those first that name the module: it is there that most of its mutants die."""
    package, _, name = module.partition(".")
    return sorted(TESTS[package], key=lambda path: name not in Path(ROOT, path).read_text())


def start(module: str, tree: ast.Module, output: Path) -> int:
    """Runs the tests of `module` on `tree` in a fork; its process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    gc.freeze()  # pytest collects garbage at its end, and need not look through torch and all mutants for it
    try:
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        assert not any(name == "mtrl" or name.startswith("mtrl.") for name in sys.modules), "mtrl is loaded already"
        sys.meta_path.insert(0, Changed(module, tree))
        import pytest

        for test in tests_of(module):  # a file at a time: later ones are not even collected once a mutant is dead
            status = pytest.main([test, *PYTEST_OPTIONS])
            if status:
                break
    finally:
        sys.stdout.flush()
        os._exit(int(status))


def outcomes(trees: list[tuple[str, ast.Module]]) -> Iterator[tuple[int, str, str]]:
    """(index, outcome, output) of each tree, as they end."""
    waiting, running = list(enumerate(trees)), {}
    with tempfile.TemporaryDirectory() as directory:
        while waiting or running:
            while waiting and len(running) < JOBS:
                index, (module, tree) = waiting.pop(0)
                output = Path(directory, str(index))
                running[start(module, tree, output)] = (index, output, time.monotonic() + SECONDS_PER_MUTANT)
            for pid, (index, output, deadline) in list(running.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                late = not done and time.monotonic() > deadline
                if late:
                    os.kill(pid, 9)
                    os.waitpid(pid, 0)
                if done or late:
                    del running[pid]
                    code = os.waitstatus_to_exitcode(status)
                    yield index, TIMED_OUT if late else OUTCOMES.get(code, BROKEN), output.read_text()
            time.sleep(0.01)


def prepare() -> None:
    """Loads once what every fork needs, and nothing of mtrl."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    import _hypothesis_pytestplugin  # noqa: F401
    import hypothesis
    import pytest  # noqa: F401
    import torch
    from trl.trainer import grpo_trainer  # noqa: F401

    torch.set_num_threads(1)
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "mutation", derandomize=True, deadline=None, database=None, max_examples=15, phases=phases
    )


def main(modules: list[str]) -> int:
    began = time.monotonic()
    prepare()
    sources = {module: path.read_text() for name in modules for module, path in module_files(name).items()}

    for module, source in sources.items():
        trees = [(module, ast.parse(source)), (module, canary(source))]
        (passes, output), (dies, song) = (result for _, *result in sorted(outcomes(trees)))
        if passes != SURVIVED:
            print(f"{module}: the tests fail on the module as it is\n{output}")
            return 1
        if dies != KILLED or CANARY not in song:
            print(f"{module}: the tests do not see a changed module\n{song}")
            return 1

    all_mutants = [mutant for module, source in sources.items() for mutant in mutants(module, source)]
    # Last the modules as they are, once more: a test that began to fail meanwhile would have killed everything.
    trees = [(mutant.module, mutant.tree) for mutant in all_mutants]
    trees += [(module, ast.parse(source)) for module, source in sources.items()]
    counts, explained = Counter[str](), set()
    for index, outcome, output in outcomes(trees):
        if index >= len(all_mutants):
            if outcome != SURVIVED:
                print(f"the tests fail on a module as it is by now; nothing above counts\n{output}")
                return 1
            continue
        mutant = all_mutants[index]
        if outcome == SURVIVED and mutant.key in EQUIVALENT:
            outcome = "equivalent"
            explained.add(mutant.key)
        elif outcome not in (KILLED, TIMED_OUT):
            print(f"{outcome.upper()}  {mutant}", flush=True)
        counts[outcome] += 1
    stale = [key for key in EQUIVALENT if key[0].split(".")[0] in modules and key not in explained]
    for function, after in stale:
        print(f"STALE     {function}: no survivor reads\n    + {after}")
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    print(f"{len(all_mutants)} mutants of {', '.join(modules)}: {summary}; {time.monotonic() - began:.0f} s")
    return 1 if stale or counts[SURVIVED] or counts[BROKEN] else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:] or list(TESTS)))
