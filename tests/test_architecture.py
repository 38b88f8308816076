"""Which modules may import which, and no cycles. Reads the source with `ast`; runs nothing."""

import ast
from functools import cache

from sources import SOURCES, count_lines, nodes

ROOM_MAY_IMPORT = {
    "utils": set(),
    "types": {"utils"},
    "config": {"utils"},
    "algorithms": {"types", "utils"},
    "protocols": {"types", "algorithms"},
    "models": {"types", "utils", "protocols", "algorithms"},
    "rollout": {"types", "utils", "protocols", "algorithms", "models", "environments"},
    "checkpoint": {"types", "utils", "protocols", "models"},
    "workers": {"types", "utils", "protocols", "algorithms", "models", "checkpoint"},
    "distributed": {"types", "utils", "protocols", "algorithms", "models", "workers", "rollout"},
    "memory": {"types", "utils", "protocols", "algorithms", "models", "rollout", "workers"},
    "sandbox": {"utils"},
    "rewards": {"types", "utils", "protocols", "algorithms", "sandbox"},
    "environments": {"types", "utils", "sandbox", "rewards"},
    "data": {"types", "utils", "protocols"},
    "prepare": {"types", "utils", "data"},
    "tracking": {"types", "utils", "protocols", "algorithms", "report"},
    "report": {"types", "utils", "protocols", "algorithms", "data", "rewards", "compare"},
    "view": {"utils", "tracking", "report"},
    "compare": {"utils", "tracking"},
    "embedded": {"types", "protocols", "utils", "environments"},
}
ROOM_MAY_IMPORT["training"] = {
    "types", "utils", "config", "protocols", "algorithms", "data", "checkpoint", "workers",
}  # fmt: skip
ROOM_MAY_IMPORT["compose"] = set(ROOM_MAY_IMPORT)  # it alone names concrete classes
ROOM_MAY_IMPORT["bench"] = set(ROOM_MAY_IMPORT)  # it measures what compose builds
ROOM_MAY_IMPORT["commands"] = set(ROOM_MAY_IMPORT)
MODULE_MAY_IMPORT = {  # where a module may do other things than its room
    "mtrl": {"training", "config", "utils", "protocols", "algorithms", "rollout", "types"},
    "mtrl.__main__": {"cli"},
    "mtrl.cli": {"config", "utils", "commands"},
    "mtrl.training.training_main": {"cli"},
    "mtrl.training.trainer": {"config", "utils", "protocols", "checkpoint", "compose", "compare", "report", "view"},
    "mtrl.training.loop": {"config", "protocols", "algorithms", "types"},
    "mtrl.training.validation": {"config", "protocols", "algorithms", "types"},
}
MAY_ALSO_IMPORT = {"mtrl.config.checks": {"mtrl.rewards.builtin_names"}}  # only names: that module imports nothing
ALONE_IMPORTS = {"transformers": "models", "peft": "models", "ray": "distributed", "vllm": "rollout"}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@cache
def imports(module: str) -> frozenset[str]:
    """Every absolute module that a file imports, anywhere in the file."""
    names: set[str] = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name for name in submodules if name in SOURCES} or {node.module or ""}
    return frozenset(names)


def test_modules_import_only_what_their_room_may():
    wrong = {}
    for module in SOURCES:
        allowed = MODULE_MAY_IMPORT.get(module, ROOM_MAY_IMPORT.get(room(module), set())) | {room(module)}
        own = {name for name in imports(module) - MAY_ALSO_IMPORT.get(module, set()) if name.split(".")[0] == "mtrl"}
        if forbidden := sorted(name for name in own if room(name) not in allowed):
            wrong[module] = forbidden
    assert not wrong, f"these modules must not import these: {wrong}"


def test_heavy_libraries_have_one_room():
    wrong = [
        f"{module} imports {library}; only mtrl/{home} may"
        for module in SOURCES
        for library, home in ALONE_IMPORTS.items()
        if room(module) != home and any(name.split(".")[0] == library for name in imports(module))
    ]
    assert not wrong, wrong


CONCRETE = {  # implementations of a protocol, and their package
    "LocalGenerator": "rollout", "GraphGenerator": "rollout", "VllmGenerator": "rollout", "VllmInProcess": "rollout",
    "VllmProcess": "rollout", "VllmServer": "rollout", "LocalActor": "workers", "RayWorkerGroup": "distributed",
    "RewardModelWorker": "workers",
    "RewardScorer": "rewards", "Sandbox": "rewards", "InProcess": "rewards", "Sampler": "data",
    "FolderStore": "checkpoint",
    "Trackers": "tracking", "RunFiles": "tracking", "MarkdownLogs": "tracking", "Console": "tracking",
    "NotebookProgress": "tracking",
    "RunAlerts": "tracking", "CurveFile": "tracking", "RolloutRecord": "tracking", "LoggerFeed": "tracking",
}  # fmt: skip

MEASURES = {"mtrl.memory.decode_footprint": {"LocalGenerator"}}  # it runs that engine on a model without numbers


def used_names(module: str) -> set[str]:
    """Every name that a file uses, by itself or as an attribute of a module."""
    names = {node.id for node in nodes(module) if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes(module) if isinstance(node, ast.Attribute)}
    return names | {alias.name for node in nodes(module) if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_concrete_classes_exist():
    defined = {
        node.name: room(module) for module in SOURCES for node in nodes(module) if isinstance(node, ast.ClassDef)
    }
    assert CONCRETE.items() <= defined.items()


def test_concrete_classes_are_named_in_compose_alone():
    wrong = {}
    for module in SOURCES:
        foreign = {name for name, home in CONCRETE.items() if home != room(module)} - MEASURES.get(module, set())
        if room(module) != "compose" and (named := used_names(module) & foreign):
            wrong[module] = sorted(named)
    assert not wrong, f"only compose/ may choose what stands behind a seam: {wrong}"


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
    long = {module: lines for module in SOURCES if (lines := count_lines(module)) > 500}
    assert not long, f"over 500 lines: {long}"


def test_a_credit_rule_fits_on_a_page():
    """Not counted: the base classes, and the registry with its line per rule."""
    names = [name for name in SOURCES if ".credit" in name and not name.endswith((".registry", ".rule"))]
    long = {name: lines for name in names if (lines := count_lines(name)) > 80}
    assert names and not long, long
