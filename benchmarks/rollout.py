"""Generation: rows, group sizes, prefixes and lengths, the engine of `mtrl train` against `model.generate`.

    python -m benchmarks.rollout [KEY=VALUE ..] --size 3b --device cuda [--only 64x256 512x256-drawn] [--profile FILE]
    python -m benchmarks.rollout [KEY=VALUE ..] --size 3b --device cuda --memory
    python -m benchmarks.rollout                                        (a tiny model on the CPU, to try it)

A random checkpoint and a YAML are written to a temporary folder. The policy and, for each case, the engine are built
from them by the code of `mtrl train`: what the YAML does not set is as users get it (--dtype chooses the dtype of the
weights; fp32 master weights are the default), and any KEY=VALUE is an override as of `mtrl train`. No token ends a
response, so that all have their full length; where lengths are drawn, uniformly, one token does (`drawn_lengths`).

A round is what a step does: the engine wakes, reads the prompts from their pixels on, samples and sleeps again. Seconds
are the median of the rounds after a warm-up. A round of one new token each stands beside it; the rest of the time,
shared among the steps that follow, is `ms_a_step`. The floor of that is what a step cannot do without reading: the
language model's weights, each prompt's keys and values once for its group and a row's own, at 4.3 TB/s. Memory is what
is held while the engine is awake and after it has gone to sleep; `captures` counts CUDA graphs, warm-up included.

In the cases with peers `model.generate` of the same checkpoint, in the dtype of the products and with transformers' own
attention, samples the same prompts once, after a short warm-up.

--profile writes the kernels of one more round of the first case. --memory makes rounds of generation and update in a
real run instead (`rollout_rounds`). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity

from benchmarks.drawn_lengths import drawn_lengths
from benchmarks.environment import commit, finish, hardware
from benchmarks.generate import model_generate
from benchmarks.measure import give_back, held_gb, peak_gb, wait
from benchmarks.random_model import random_prompts
from benchmarks.random_run import PATHS, step_settings, write_run
from benchmarks.rollout_rounds import ROUNDS, measure_rounds
from mtrl.compose.algorithm import make_training_sampling
from mtrl.compose.policy import LoadedModel, build_generator, build_policy
from mtrl.compose.run import configure
from mtrl.config import read_overrides
from mtrl.models.backbone import Backbone
from mtrl.protocols import Generator
from mtrl.rollout import local
from mtrl.rollout.decode.engine import GraphGenerator, bucket_size
from mtrl.types import Prompt, Rollouts, Sampling

BYTES_A_SECOND = 4.3e12  # what an H200 reads
PREFIXES = {642: (672, 66), 4096: (1764, 127), 44: (56, 40), 64: (112, 48)}  # tokens: the picture's side, other tokens
BESIDE_SETTINGS = {"stop_ids": "none, and one where lengths are drawn: see benchmarks/drawn_lengths.py"}
MOST_KERNELS = 40  # rows of a profile


@dataclass(frozen=True)
class Case:
    prompts: int
    n: int  # responses a prompt
    new: int  # tokens of a response, at most
    prefix: int = 642  # tokens of a prompt
    shortest: int | None = None  # drawn lengths begin here
    leave: bool = True  # whether rows that have ended leave the step
    peers: bool = False  # whether others sample it too
    limit_s: float | None = None  # what it is meant to take on one H200 at most


CASES = {
    "3b": {
        "64x256": Case(8, 8, 256, peers=True, limit_s=1.0),
        "64x256-groups-of-4": Case(16, 4, 256),
        "64x256-groups-of-16": Case(4, 16, 256),
        "64x256-prefix-4096": Case(8, 8, 256, prefix=4096),
        "128x256": Case(16, 8, 256),
        "256x256": Case(32, 8, 256),
        "512x256": Case(64, 8, 256, limit_s=3.3),
        "512x256-drawn": Case(64, 8, 256, shortest=32, limit_s=2.8),
        "512x256-drawn-all-stay": Case(64, 8, 256, shortest=32, leave=False),
        "64x2048": Case(8, 8, 2048, limit_s=9.0),
    },
    "tiny": {
        "4x6": Case(2, 2, 6, prefix=44, peers=True),
        "4x6-groups-of-4": Case(1, 4, 6, prefix=44),
        "4x6-prefix-64": Case(2, 2, 6, prefix=64),
        "8x12-drawn": Case(2, 4, 12, prefix=44, shortest=2),
        "8x12-drawn-all-stay": Case(2, 4, 12, prefix=44, shortest=2, leave=False),
    },
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="any other key of the run")
    parser.add_argument("--size", choices=CASES, default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the master weights")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases; all of them by default")
    parser.add_argument("--rounds", type=int, default=3, help="that are measured, after one that is not")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", type=Path, default=None, metavar="FILE", help="kernels of the first case, as text")
    parser.add_argument("--memory", type=int, nargs="?", const=ROUNDS, default=None, metavar="ROUNDS",
                        help=f"rounds of generation and update in a run instead of the cases ({ROUNDS})")  # fmt: skip
    parser.add_argument("--out", type=Path, default=None)
    a = parser.parse_intermixed_args(arguments)
    if unknown := sorted({*(a.only or ())} - CASES[a.size].keys()):
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES[a.size])}")
    return a


def precision(a: argparse.Namespace) -> dict[str, Any]:
    """What the YAML says of dtypes: nothing, unless a dtype is asked for or there is no GPU."""
    chosen = {} if a.dtype == "fp32" else {"worker.actor.fsdp.param_dtype": a.dtype}
    slow = {"worker.actor.fsdp.mixed_precision_dtype": "fp32"}  # many processors take bf16 products by way of it
    return chosen | (slow if a.device == "cpu" else {})


class Bench:
    """One policy, and an engine of its own for each case: room that one has made is not held in the next."""

    def __init__(self, a: argparse.Namespace, folder: Path, cases: Sequence[Case]) -> None:
        self.a = a
        self.sides = sorted({PREFIXES[case.prefix][0] for case in cases})  # all must fit in: cases share an encoder
        self.file = write_run(
            folder, a.size, a.device, 1, self.sides, PREFIXES[cases[0].prefix][1], a.seed, self.settings(cases[0])
        )
        give_back()  # the checkpoint was made on the device
        config, _ = configure(self.file, a.overrides)
        self.loaded = LoadedModel(*build_policy(config))
        self.loaded.encoder.stop_ids = ()
        self.checkpoint = Path(config.worker.actor.model.model_path or "")

    def settings(self, case: Case) -> dict[str, Any]:
        """The keys of a run whose step samples this."""
        return step_settings(case.prompts, case.n, case.new, 1, self.sides, case.prefix) | precision(self.a)

    @property
    def backbone(self) -> Backbone:
        return self.loaded.policy.backbone

    def prompts(self, case: Case) -> list[Prompt]:
        side, text_tokens = PREFIXES[case.prefix]
        return random_prompts(self.loaded.encoder, case.prompts, [side], text_tokens, self.a.seed)

    @contextmanager
    def engine(self, case: Case) -> Iterator[tuple[Generator, Sampling]]:
        """As a run with the sizes of this case has it, and how that would sample."""
        config, _ = configure(self.file, self.settings(case) | read_overrides(self.a.overrides))
        generator = build_generator(config, self.loaded.policy, self.loaded.encoder)
        ends = nullcontext() if case.shortest is None else drawn_lengths(self.loaded.encoder, case.shortest)
        with ends, nullcontext() if case.leave else all_stay(generator, case.prompts * case.n):
            yield generator, make_training_sampling(config)

    # ------------------------------------------------------------------------------------------------------- measuring
    def measure(self, case: Case) -> dict[str, Any]:
        prompts = self.prompts(case)
        memory: dict[str, Any] = {"before": held_gb()}
        whole, first = [], []
        with self.engine(case) as (generator, sampling):
            for number in range(self.a.rounds + 1):
                with peak_gb(memory, "peak_gb"):
                    taken, rollouts = timed(generator, prompts, replace(sampling, step=number), memory)
                check(case, rollouts)
                whole.append(taken)
            memory["asleep"] = held_gb()
            engine = {"engine": type(generator).__name__, "captures": getattr(generator, "captures", 0)}
            for number in range(self.a.rounds + 1):  # afterwards: steps of a run do not change their sizes in between
                taken, _ = timed(generator, prompts, replace(sampling, step=number, max_new_tokens=1))
                first.append(taken)
        del generator
        give_back()
        told = {key: value for key, value in asdict(case).items() if key != "peers"}
        found = told | engine | {"rows": len(rollouts), "memory": memory}
        found |= self.rates(rollouts, whole[1:], first[1:])  # the first of each is the warm-up
        return found | ({"peers": self.peers(case, prompts, found["seconds"])} if case.peers else {})

    def rates(self, rollouts: Rollouts, whole: Sequence[float], first: Sequence[float]) -> dict[str, Any]:
        """Of the medians; tokens and floor are those of the last round."""
        seconds, first_token_s = statistics.median(whole), statistics.median(first)
        lengths = rollouts.mask.sum(1)
        steps, tokens = int(lengths.max()) - 1, int(lengths.sum())
        floor = bytes_to_read(self.backbone, rollouts) / max(steps, 1)
        return {
            "seconds": round(seconds, 4),
            "seconds_of_rounds": [round(each, 4) for each in whole],
            "first_token_s": round(first_token_s, 4),
            "decoded_steps": steps,
            "ms_a_step": round(1000 * (seconds - first_token_s) / max(steps, 1), 3),
            "floor_gb_a_step": round(floor / 1e9, 4),
            "floor_ms_a_step": round(1000 * floor / BYTES_A_SECOND, 3) if self.a.device == "cuda" else None,
            "tokens": tokens,
            "tokens_per_s": round(tokens / seconds),
        }

    def peers(self, case: Case, prompts: Sequence[Prompt], ours: float) -> dict[str, Any]:
        encoder, model = self.loaded.encoder, transformers_model(self.checkpoint, self.backbone)
        model_generate(model, encoder, prompts, case.n, 2)
        wait()
        begin = time.perf_counter()
        output = model_generate(model, encoder, prompts, case.n, case.new)
        taken = time.perf_counter() - begin
        assert output.shape == (case.prompts * case.n, case.new), "it made fewer tokens than we did"
        del model
        give_back()
        return {"model_generate_s": round(taken, 3), "model_generate_over_ours": round(taken / ours, 2)}

    def profile(self, name: str, case: Case) -> str:
        """The kernels of one round, on a CPU the operators, those that took longest first."""
        prompts, on_gpu = self.prompts(case), self.a.device == "cuda"
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        with self.engine(case) as (generator, sampling):
            timed(generator, prompts, sampling)
            with torch.profiler.profile(activities=[activity]) as profiler:
                taken, rollouts = timed(generator, prompts, replace(sampling, step=1))
        kind = "self_device_time_total" if on_gpu else "self_cpu_time_total"  # in microseconds
        found = [(getattr(each, kind) / 1000, each.count, each.key) for each in profiler.key_averages()]
        rows = sorted((row for row in found if row[0] > 0), reverse=True)
        listed, steps = sum(ms for ms, _, _ in rows) / 1000, rollouts.mask.shape[1] - 1
        where = f"{hardware()['gpu' if on_gpu else 'cpu']}, {self.a.size}, {self.a.dtype} weights, commit {commit()}"
        lines = [
            f"# {where}: {name}, {steps} steps after the first token, {type(generator).__name__}.",
            f"# {taken:.3f} s with the profiler, {listed:.3f} s of it in what follows, the longest first.",
            *(f"{ms:9.2f} ms {calls:7d}  {key[:100]}" for ms, calls, key in rows[:MOST_KERNELS]),
        ]
        return "\n".join(lines) + "\n"


def timed(
    generator: Generator, prompts: Sequence[Prompt], sampling: Sampling, memory: dict[str, Any] | None = None
) -> tuple[float, Rollouts]:
    """Seconds of what a step does; with `memory` it looks at what is held before the engine goes to sleep, a matter of
    microseconds."""
    wait()
    begin = time.perf_counter()
    with generator.resident():
        rollouts = generator.generate(prompts, sampling)
        if memory is not None:
            memory["awake"] = held_gb()
    wait()
    return time.perf_counter() - begin, rollouts


def check(case: Case, rollouts: Rollouts) -> None:
    """That the work was done which the case promises."""
    lengths, prefixes = rollouts.mask.sum(1), {len(prompt.ids) for prompt in rollouts.prompts}
    assert prefixes == {case.prefix}, f"prompts of {prefixes} tokens"
    assert int(lengths.min()) >= (case.shortest or case.new) and int(lengths.max()) <= case.new, lengths.tolist()


@contextmanager
def all_stay(generator: Generator, rows: int) -> Iterator[None]:
    """Rows that have ended do not leave until all have."""
    whole = (
        patch.object(generator, "buckets", [bucket_size(rows)])
        if isinstance(generator, GraphGenerator)
        else nullcontext()
    )
    with whole, patch.object(local, "COMPACT_BELOW", 0.0):
        yield


def bytes_to_read(backbone: Backbone, rollouts: Rollouts) -> float:
    """What all steps after the first token cannot do without: the weights of the language model at each, a row's own
    keys and values while it goes on, and those of a prompt, once for its group, while one of its rows does."""
    config, language = backbone.language_model.config, backbone.language_model
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers_a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * width
    inputs = language.get_input_embeddings().weight
    weights = sum(p.numel() for p in language.parameters() if p is not inputs) + backbone.output_matrix.numel()
    steps = rollouts.mask.sum(1) - 1
    own = int((steps * (steps + 1) // 2).sum())
    of_group = [int(steps[rollouts.group == place].max()) for place in range(len(rollouts.prompts))]
    shared = sum(len(prompt.ids) * each for prompt, each in zip(rollouts.prompts, of_group, strict=True))
    return backbone.compute_dtype.itemsize * (weights * int(steps.max()) + numbers_a_token * (own + shared))


def transformers_model(checkpoint: Path, backbone: Backbone) -> Any:
    """The same weights as users of `model.generate` load them, with no token that ends a response."""
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=backbone.compute_dtype)
    model.generation_config.eos_token_id = None
    return model.to(backbone.device).eval()


def line_of(name: str, found: dict[str, Any]) -> str:
    floor, memory = found["floor_ms_a_step"], found["memory"]
    told = [
        f"{found['seconds']:.3f} s" + ("" if found["limit_s"] is None else f" (at most {found['limit_s']} wanted)"),
        f"first token {found['first_token_s']:.3f} s",
        f"{found['ms_a_step']:.2f} ms a step" + ("" if floor is None else f" (floor {floor:.2f})"),
        f"{found['tokens_per_s']:,} tokens/s",
        f"{found['captures']} captures",
        *(f"{when} {held['allocated_gb']:.1f} GiB" for when, held in memory.items() if isinstance(held, dict) and held),
        *(f"{peer} {value}" for peer, value in found.get("peers", {}).items()),
    ]
    return f"{name}: " + ", ".join(told)


def run(a: argparse.Namespace) -> dict[str, Any]:
    cases = {name: CASES[a.size][name] for name in a.only or CASES[a.size]}
    found = {}
    with tempfile.TemporaryDirectory(prefix="mtrl-rollout-") as folder:
        begin = time.perf_counter()
        bench = Bench(a, Path(folder), list(cases.values()))
        built = time.perf_counter() - begin
        for name, case in cases.items():
            found[name] = bench.measure(case)
            print(line_of(name, found[name]), flush=True)
        if a.profile is not None:
            name = next(iter(cases))
            a.profile.parent.mkdir(parents=True, exist_ok=True)
            a.profile.write_text(bench.profile(name, cases[name]))
        parameters = sum(each.numel() for each in bench.loaded.model.parameters())
    given = precision(a) | read_overrides(a.overrides)
    return {
        "bench": "rollout",
        "args": {name: value for name, value in vars(a).items() if name not in ("out", "profile")},
        "settings": {key: value for key, value in given.items() if key not in PATHS},
        "beside_settings": BESIDE_SETTINGS,
        "params_m": round(parameters / 1e6, 1),
        "seconds_before_the_first_case": round(built, 1),
        "cases": found,
    }


def main() -> None:
    a = parse()
    if a.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a run takes the GPU that it sees
    elif not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here")
    finish(run(a) if a.memory is None else measure_rounds(a, precision(a)), a.out)


if __name__ == "__main__":
    main()
