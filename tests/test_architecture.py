"""Who may import whom, and no cycles. Reads the source with `ast`; runs nothing."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOM_MAY_IMPORT = {
    "utils": set(),
    "types": {"utils"},
    "config": {"utils"},
    "algorithms": {"types", "utils"},
    "protocols": {"types", "algorithms"},
    "models": {"types", "utils", "protocols", "algorithms"},
    "rollout": {"types", "utils", "protocols", "algorithms", "models"},
    "checkpoint": {"types", "utils", "protocols", "models"},
    "workers": {"types", "utils", "protocols", "algorithms", "models", "checkpoint"},
    "distributed": {"types", "utils", "protocols", "algorithms", "models", "workers", "rollout"},
    "memory": {"types", "utils", "protocols", "algorithms", "models", "rollout", "workers"},
    "rewards": {"types", "utils", "protocols", "algorithms"},
    "data": {"types", "utils", "protocols"},
    "prepare": {"types", "utils", "data"},
    "tracking": {"types", "utils", "protocols", "algorithms", "report"},
    "report": {"types", "utils", "protocols", "algorithms", "data", "rewards", "compare"},
    "view": {"utils", "tracking", "report"},
    "compare": {"utils", "tracking"},
    "embedded": {"types", "protocols", "utils"},
}
ROOM_MAY_IMPORT["training"] = {
    "types", "utils", "config", "protocols", "algorithms", "data", "checkpoint", "workers",
}  # fmt: skip
ROOM_MAY_IMPORT["compose"] = set(ROOM_MAY_IMPORT)  # it alone names concrete classes
ROOM_MAY_IMPORT["commands"] = set(ROOM_MAY_IMPORT)
MODULE_MAY_IMPORT = {  # where a module may do other things than its room
    "mtrl": {"training", "config", "utils", "protocols", "algorithms", "types"},
    "mtrl.__main__": {"cli"},
    "mtrl.cli": {"config", "utils", "commands"},
    "mtrl.training.training_main": {"cli"},
    "mtrl.training.trainer": {"config", "utils", "protocols", "compose"},
    "mtrl.training.loop": {"config", "protocols", "algorithms", "types"},
    "mtrl.training.validation": {"config", "protocols", "algorithms", "types"},
}
MAY_ALSO_IMPORT = {"mtrl.config.checks": {"mtrl.rewards.builtin_names"}}  # names alone: that module imports nothing
ALONE_IMPORTS = {"transformers": "models", "peft": "models", "ray": "distributed", "vllm": "rollout"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted((ROOT / "mtrl").rglob("*.py"))}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@cache
def imports(module: str) -> set[str]:
    """Every absolute module that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in submodules if name in SOURCES} or {node.module or ""}
    return found


@pytest.mark.parametrize("module", SOURCES)
def test_imports_only_what_its_room_may(module):
    allowed = MODULE_MAY_IMPORT.get(module, ROOM_MAY_IMPORT.get(room(module), set())) | {room(module)}
    named = imports(module) - MAY_ALSO_IMPORT.get(module, set())
    wrong = {name for name in named if name.split(".")[0] == "mtrl" and room(name) not in allowed}
    assert not wrong, f"{module} must not import {sorted(wrong)}"


@pytest.mark.parametrize("module", SOURCES)
def test_heavy_libraries_have_one_room(module):
    for library, home in ALONE_IMPORTS.items():
        used = any(name.split(".")[0] == library for name in imports(module))
        assert not used or room(module) == home, f"{module} imports {library}; only mtrl/{home} may"


CONCRETE = {  # what stands behind a seam, and its room
    "LocalGenerator": "rollout", "GraphGenerator": "rollout", "VllmGenerator": "rollout", "VllmInProcess": "rollout",
    "VllmProcess": "rollout", "VllmServer": "rollout", "LocalActor": "workers", "RayWorkerGroup": "distributed",
    "RewardModelWorker": "workers",
    "RewardScorer": "rewards", "Sandbox": "rewards", "InProcess": "rewards", "Sampler": "data",
    "FolderStore": "checkpoint",
    "Trackers": "tracking", "RunFiles": "tracking", "MarkdownLogs": "tracking", "Console": "tracking",
    "Watch": "tracking", "CurveFile": "tracking", "RolloutRecord": "tracking", "LoggerFeed": "tracking",
}  # fmt: skip

MEASURES = {"mtrl.memory.decode_footprint": {"LocalGenerator"}}  # it runs that engine on a model without numbers


def named_classes(module: str) -> set[str]:
    """Every name that a file uses, by itself or as an attribute of a module."""
    nodes = list(ast.walk(ast.parse(SOURCES[module].read_text())))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names | {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_concrete_classes_exist():
    defined = {node.name: room(name) for name in SOURCES for node in classes_of(name)}
    assert CONCRETE.items() <= defined.items()


def classes_of(module: str) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(SOURCES[module].read_text())) if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("module", [name for name in SOURCES if room(name) != "compose"])
def test_concrete_classes_are_named_in_compose_alone(module):
    foreign = {name for name, home in CONCRETE.items() if home != room(module)} - MEASURES.get(module, set())
    named = named_classes(module) & foreign
    assert not named, f"{module} names {sorted(named)}; only compose/ may choose what stands behind a seam"


def test_no_import_cycles():
    graph = {module: {name for name in imports(module) if name in SOURCES} for module in SOURCES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_files_stay_readable():
    long = {module: lines for module, path in SOURCES.items() if (lines := len(path.read_text().splitlines())) > 500}
    assert not long, f"over 500 lines: {long}"


def test_the_method_reads_in_one_sitting():
    core = [SOURCES[name] for name in ("mtrl.training.loop", "mtrl.types", "mtrl.algorithms.credit")]
    assert sum(len(path.read_text().splitlines()) for path in core) <= 600


def test_a_credit_rule_fits_on_a_page():
    names = [name for name in SOURCES if ".credit" in name and not name.endswith(".registry")]  # a line a rule
    rules = {name: len(SOURCES[name].read_text().splitlines()) for name in names}
    assert max(rules.values()) < 80, rules
