"""Cost of probes and updates with a prefix shared by the group, and with one padded row per response.

    python -m benchmarks.forward --size 3b --device cuda [--out benchmarks/results/forward.json]
    python -m benchmarks.forward                                   (a tiny model on the CPU, to try it)

The defaults of `3b` are 8 prompts x 8 responses x 256 tokens, 576 image tokens and 66 others, bf16 weights, gradient
checkpointing, as in `benchmarks.step`. One process takes all measurements one after the other:

routes     both views of all groups (old and perturbed log-probs, entropy, S), the same with attention masses or with
           full_kl, and one optimizer step on all groups; shared and packed against one padded row per response
unequal    responses of 32-256 tokens, prompts of three image sizes: seconds per token against the equal case, graphs
           compiled after the second batch, and the log-probs against the padded route
noise      log-probs of the routes against each other and against float32
scaling    groups of 4, 8 and 16 responses and three image sizes: seconds against tokens

The floor of the shared route is the time of its matrix products at the rate of a large one on this device.
The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import finish
from benchmarks.measure import alternating, compiled_graphs, peak_gb, seconds
from benchmarks.random_model import random_backbone, random_prompts, random_rollouts
from mtrl.algorithms.losses import Loss, loss_weights
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.perturb import Perturbation
from mtrl.types import Needs, Rollouts, TrainBatch
from mtrl.workers.actor import LocalActor
from mtrl.workers.learner import OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching

TEXT_TOKENS = 66
SHAPES = {"3b": (8, 256, 672), "tiny": (4, 16, 112)}  # prompts and responses, tokens, image side
SIDES = {"3b": (448, 672, 896), "tiny": (56, 112, 168)}
BUDGET = {"update": 32768, "probe": 65536}  # tokens per pass, the defaults on a GPU
ROWS = 8  # responses in one pass of the padded route


class Bench:
    """One model, and the passes that a step makes over rollouts."""

    def __init__(self, size: str, device: str, weights: str, compiled: bool) -> None:
        self.encoder, backbone = random_backbone(size, device, weights, "bf16" if device == "cuda" else weights)
        self.backbone = Backbone(backbone.model, backbone.compute_dtype, compiled=compiled)
        self.perturbation = Perturbation()
        self.routes = {
            "shared": Forward(self.backbone, self.encoder, packed=device == "cuda"),
            "padded": Forward(self.backbone, self.encoder, share_prefix=False),
        }

    def rollouts(self, prompts: int, responses: int, lengths: tuple[int, int], sides: Any, seed: int = 0) -> Rollouts:
        return random_rollouts(
            random_prompts(self.encoder, prompts, sides, TEXT_TOKENS, seed), responses, lengths, seed
        )

    def batching(self, route: str, phase: str = "probe") -> MicroBatching:
        shared = MicroBatching(at_least=BUDGET[phase])
        return shared if route == "shared" else MicroBatching(rows=ROWS, share_prefix=False)

    def probe(self, route: str, rollouts: Rollouts, *more: str, estimator: str = "low_var_kl") -> list[torch.Tensor]:
        """Old log-probs, pass by pass; also computes entropy, dependency and the signals in `more`. Makes the views
        here, since they are part of the cost."""
        needs, forward = (
            Needs("entropy", "dependency", *more),
            replace(self.routes[route], perception_estimator=estimator),
        )
        rows = self.batching(route).split(rollouts, views=2)
        found = []
        for part in (rollouts.rows(index) for index in rows):
            views = [self.perturbation.view(prompt, 0) for prompt in part.prompts]
            old = forward.signals(part, needs, {"perturbed": views}).old_logprobs
            assert old is not None
            found.append(old)
        return found

    def actor(self, route: str) -> LocalActor:
        batching = {f"{phase}_batching": self.batching(route, phase) for phase in BUDGET}
        settings = {"perturbation": self.perturbation, **batching}
        return LocalActor(self.routes[route], OptimizerSettings(lr=1e-9), encoder_files={}, **settings)  # type: ignore[arg-type]

    def batch(self, rollouts: Rollouts) -> TrainBatch:
        mask = rollouts.mask
        weights = loss_weights(mask.float(), mask, "dapo", mask.shape[1])
        advantage = torch.randn(len(mask), 1, generator=torch.Generator().manual_seed(0)).expand(mask.shape)
        return TrainBatch(rollouts, None, advantage, None, weights)

    def tokens(self, rollouts: Rollouts) -> int:
        return sum(len(prompt.ids) for prompt in rollouts.prompts) + int(rollouts.mask.sum())


def measure_routes(bench: Bench, rollouts: Rollouts, rounds: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for route in bench.routes:
        found: dict[str, float] = {}
        times = rounds if route == "shared" else 1  # the padded route is slow
        probes = {"two_views_s": partial(bench.probe, route, rollouts)}
        if route == "shared":
            probes["two_views_and_attention_s"] = partial(bench.probe, route, rollouts, "attention_mass")
            probes["two_views_full_kl_s"] = partial(bench.probe, route, rollouts, estimator="full_kl")
        for name, probe in probes.items():
            with peak_gb(found, name.replace("_s", "_peak_gb")):
                probe()
        found |= alternating(probes, times)
        actor, batch = bench.actor(route), bench.batch(rollouts)
        with peak_gb(found, "update_peak_gb"):
            found["update_s"] = seconds(lambda actor=actor, batch=batch: actor.update([batch], Loss()), times)
        del actor
        result[route] = found
        print(route, found, flush=True)
    shared, padded = result["shared"], result["padded"]
    result["speedup"] = {name: round(padded[name] / shared[name], 2) for name in ("two_views_s", "update_s")}
    result["attention_on_top"] = round(shared["two_views_and_attention_s"] / shared["two_views_s"] - 1, 3)
    return result


def measure_unequal(bench: Bench, size: str, equal_s_per_token: dict[str, float], rounds: int) -> dict[str, Any]:
    count, longest, _ = SHAPES[size]
    batches = [bench.rollouts(count, count, (longest // 8, longest), SIDES[size], seed) for seed in range(4)]
    graphs = []
    actor = bench.actor("shared")
    for rollouts in batches:
        shared = bench.probe("shared", rollouts, "attention_mass")
        actor.update([bench.batch(rollouts)], Loss())
        graphs.append(compiled_graphs())
        del shared
    first = batches[0]
    ours, theirs = (old_logprobs(bench, route, first)[first.mask] for route in ("shared", "padded"))
    again = old_logprobs(bench, "padded", first, rows=5)[first.mask]
    gap, noise, spread = float((ours - theirs).abs().mean()), float((again - theirs).abs().mean()), float(theirs.std())
    last = batches[-1]
    tokens = bench.tokens(last)
    probe = seconds(lambda: bench.probe("shared", last), rounds) / tokens
    update = seconds(lambda: actor.update([bench.batch(last)], Loss()), rounds) / tokens
    return {
        "tokens": tokens,
        "two_views_per_token": round(probe / equal_s_per_token["two_views_s"], 3),
        "update_per_token": round(update / equal_s_per_token["update_s"], 3),
        "graphs_after_each_batch": graphs,
        "recompiled_after_second": graphs[-1] - graphs[1],
        "logprob_gap_to_padded_mean": round(gap, 5),
        "padded_gap_to_itself_in_other_passes_mean": round(noise, 5),
        "logprob_std": round(spread, 3),
    }


def old_logprobs(bench: Bench, route: str, rollouts: Rollouts, rows: int | None = None) -> torch.Tensor:
    """Old log-probs of all rows, in order; `rows`: rows per pass."""
    batching = bench.batching(route) if rows is None else MicroBatching(rows=rows, share_prefix=False)
    index = batching.split(rollouts, views=2)
    found = [bench.routes[route].signals(rollouts.rows(each)).old_logprobs for each in index]
    return torch.cat([each for each in found if each is not None])[torch.cat(index).argsort()]


def measure_scaling(bench: Bench, size: str, rounds: int) -> list[dict[str, Any]]:
    count, length, _ = SHAPES[size]
    table = []
    actor = bench.actor("shared")
    for side in SIDES[size]:
        for responses in (4, 8, 16):
            rollouts = bench.rollouts(count, responses, (length, length), [side])
            probe = seconds(lambda r=rollouts: bench.probe("shared", r), rounds)
            batch = bench.batch(rollouts)
            update = seconds(lambda b=batch: actor.update([b], Loss()), rounds)
            image = len(rollouts.prompts[0].ids) - TEXT_TOKENS
            row = {"image_tokens": image, "responses": responses, "tokens": bench.tokens(rollouts)}
            table.append(row | {"two_views_s": probe, "update_s": update})
            print(table[-1], flush=True)
    return table


def measure_noise(bench: Bench, size: str) -> dict[str, float]:
    """Mean |difference| of log-probs between routes in bf16, and of each to float32; leaves the weights in float32."""
    _, longest, _ = SHAPES[size]
    rollouts = bench.rollouts(2, 4, (longest // 8, longest), SIDES[size][:2])

    # "masked": also the shared sequence, but with torch's own kernel
    routes = bench.routes | {"masked": Forward(bench.backbone, bench.encoder)}

    def logp(route: str) -> torch.Tensor:
        found = routes[route].signals(rollouts).old_logprobs
        assert found is not None
        return found[rollouts.mask]

    narrow = {route: logp(route) for route in routes}
    bench.backbone.model.float()
    bench.backbone.compute_dtype = torch.float32
    wide = {f"{route} in float32": logp(route) for route in routes}
    gaps = {
        f"{one} - {other}": round(float((a - b).abs().mean()), 5)
        for (one, a), (other, b) in combinations((narrow | wide).items(), 2)
    }
    return gaps | {"logprob_std": round(float(narrow["padded"].std()), 3)}


def floor(bench: Bench, rollouts: Rollouts) -> dict[str, float]:
    """Seconds of the shared route's products (language model, output matrix, tower) at the rate of a large one."""
    model = bench.backbone.model
    parameters = {name: p.numel() for name, p in model.named_parameters()}
    tower = sum(n for name, n in parameters.items() if ".visual." in name)
    head = bench.backbone.output_matrix.numel()
    body = sum(parameters.values()) - tower - head
    patches = sum(m.shape[0] * m.shape[1] // 14**2 for prompt in rollouts.prompts for m in prompt.media)
    operations = 2 * (bench.tokens(rollouts) * body + int(rollouts.mask.sum()) * head + patches * tower)
    side = 8192 if bench.backbone.device.type == "cuda" else 1024
    a = torch.randn(side, side, device=bench.backbone.device, dtype=bench.backbone.compute_dtype)
    rate = 2 * side**3 / seconds(lambda: a @ a, 10)
    found = {"rate_tflops": rate / 1e12, "two_views_s": 2 * operations / rate, "update_s": 4 * operations / rate}
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--weights", choices=["bf16", "fp32"], default=None, help="bf16 on cuda, fp32 on cpu")
    parser.add_argument("--no-compile", action="store_true", help="do not compile norms, MLPs and rotary positions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["routes", "unequal", "scaling", "noise"], default=None)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    size, device = arguments.size, arguments.device
    weights = arguments.weights or ("bf16" if device == "cuda" else "fp32")
    bench = Bench(size, device, weights, compiled=device == "cuda" and not arguments.no_compile)
    count, length, side = SHAPES[size]
    equal = bench.rollouts(count, count, (length, length), [side])
    given = {name: str(value) for name, value in vars(arguments).items() if name != "out"}
    result: dict[str, Any] = {"bench": "forward", "arguments": given}
    result |= {"tokens": bench.tokens(equal), "floor": floor(bench, equal)}
    if arguments.only in (None, "routes", "unequal"):
        result["routes"] = measure_routes(bench, equal, arguments.rounds)
    if arguments.only in (None, "unequal"):
        per_token = {name: result["routes"]["shared"][name] / result["tokens"] for name in ("two_views_s", "update_s")}
        result["unequal"] = measure_unequal(bench, size, per_token, arguments.rounds)
        print(result["unequal"], flush=True)
    if arguments.only in (None, "scaling"):
        result["scaling"] = measure_scaling(bench, size, arguments.rounds)
    if arguments.only in (None, "noise"):  # last, since it changes the weights' dtype
        result["noise"] = measure_noise(bench, size)
    finish(result, arguments.out)


if __name__ == "__main__":
    main()
