"""The files that a reader opens between the loop and the gradient of GRPO + TGF + TAS.

    python tests/reading_walk.py

Starts at `Loop.step` and follows every imported name that the code on the path uses, down to its definition. Three
things are chosen by the configuration, not by an import, and are given here: the estimator, the credit rules and the
class behind `Actor`. Modules for other algorithms or concerns are not followed; the reasons are below.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CHOSEN = (  # by `advantage_estimator: grpo`, `enable_perception_filtering`, `enable_trajectory_reweighting`
    "mtrl.training.loop:Loop.step",
    "mtrl.algorithms.advantages:Grpo",
    "mtrl.algorithms.signals:visual_dependency",
    "mtrl.algorithms.credit.perception_filter:PerceptionFilter",
    "mtrl.algorithms.credit.trajectory_scaling:TrajectoryScaling",
    "mtrl.workers.actor:LocalActor.update",
)
NOT_FOLLOWED = {
    "mtrl.protocols": "interfaces; the class behind Actor is given above",
    "mtrl.training.collect": "how responses are sampled, scored and probed",
    "mtrl.training.dynamic_sampling": "online filtering, off here",
    "mtrl.training.off_policy": "one-step off-policy rollouts, off here",
    "mtrl.training.replay_memory": "replay, off here",
    "mtrl.training.validation": "validation",
    "mtrl.training.clock": "timing",
    "mtrl.algorithms.metrics": "reporting",
    "mtrl.algorithms.value_loss": "critics, off here",
    "mtrl.algorithms.divergence": "divergence, off here",
    "mtrl.algorithms.replay": "replay, off here",
    "mtrl.algorithms.vocab": "kernels of the vocabulary",
    "mtrl.models": "the forward pass",
    "mtrl.checkpoint": "files",
    "mtrl.utils": "helpers",
    "mtrl.workers.offload": "offloading, off here",
    "mtrl.workers.optimizers": "8-bit optimizer state and bf16 weights, off here",
    "mtrl.workers.reference": "the reference, off here",
    "mtrl.workers.micro_batches": "how rows are split over passes, which only add",
}


class Definition(NamedTuple):
    module: str
    name: str  # a function or class, or Class.method


@cache
def parsed(module: str) -> tuple[Path, ast.Module]:
    path = ROOT / (module.replace(".", "/") + ".py")
    path = path if path.exists() else path.with_suffix("") / "__init__.py"
    return path, ast.parse(path.read_text())


@cache
def definitions(module: str) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for node in parsed(module)[1].body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
            for member in node.body:
                if isinstance(node, ast.ClassDef) and isinstance(member, ast.FunctionDef):
                    found[f"{node.name}.{member.name}"] = member
    return found


@cache
def imported(module: str) -> dict[str, Definition]:
    nodes = [node for node in ast.walk(parsed(module)[1]) if isinstance(node, ast.ImportFrom)]
    names = [(node.module or "", alias) for node in nodes for alias in node.names]
    return {
        alias.asname or alias.name: Definition(source, alias.name) for source, alias in names if source[:4] == "mtrl"
    }


def followed(module: str) -> bool:
    return not any(module == other or module.startswith(f"{other}.") for other in NOT_FOLLOWED)


def uses(definition: Definition) -> set[Definition]:
    """The definitions that the code of a definition refers to."""
    module, name = definition
    node, own = definitions(module)[name], definitions(module)
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            if each.id in imported(module):
                found.add(imported(module)[each.id])
            elif each.id in own and each.id != name.partition(".")[0]:
                found.add(Definition(module, each.id))
        elif isinstance(each, ast.Attribute) and isinstance(each.value, (ast.Name, ast.Attribute)):
            owner = each.value.id if isinstance(each.value, ast.Name) else each.value.attr
            if owner == "self" and f"{name.partition('.')[0]}.{each.attr}" in own:
                found.add(Definition(module, f"{name.partition('.')[0]}.{each.attr}"))
            elif owner == "learner":  # the actor's learner
                found.add(Definition("mtrl.workers.learner", f"Learner.{each.attr}"))
    return {each for each in found if followed(each.module) and each.name in definitions(each.module)}


def walk() -> dict[str, set[str]]:
    """The definitions on the path, by module in the order of their discovery."""
    queue = [Definition(*spec.split(":")) for spec in CHOSEN]
    reached: dict[str, set[str]] = {}
    while queue:
        definition = queue.pop(0)
        if definition.name not in reached.setdefault(definition.module, set()):
            reached[definition.module].add(definition.name)
            queue += sorted(uses(definition))
    return reached


def read_lines(module: str, names: set[str]) -> int:
    """Number of lines of these definitions; a method of a class that is also listed counts once."""
    spans = [definitions(module)[name] for name in names]
    return len({line for node in spans for line in range(node.lineno, (node.end_lineno or 0) + 1)})  # type: ignore[attr-defined]


def report() -> str:
    rows = [(parsed(module)[0], read_lines(module, names)) for module, names in walk().items()]
    lines = [f"{path.relative_to(ROOT / 'mtrl').as_posix():<42}{read:>5}" for path, read in rows]
    whole = sum(len(path.read_text().splitlines()) for path, _ in rows)
    return "\n".join([*lines, f"{len(rows)} files, {sum(read for _, read in rows)} lines on the path, {whole} in all"])


if __name__ == "__main__":
    print(report())
