"""Generation by row count, group size, prefix and length: the engine of `mtrl train` against `model.generate`.

    python -m benchmarks.rollout [KEY=VALUE ..] --size 3b --device cuda [--only 64x256 512x256-drawn] [--profile FILE]
    python -m benchmarks.rollout [KEY=VALUE ..] --size 3b --device cuda --memory
    python -m benchmarks.rollout                                        (a tiny model on the CPU, to try it)

A random checkpoint and a YAML are written to a temporary folder. The code of `mtrl train` builds the policy from them
and, for each case, the engine: settings that the YAML omits have their defaults (--dtype chooses the dtype of the
weights; fp32 master weights are the default), and any KEY=VALUE is an override as for `mtrl train`. There is no stop
token, so that all responses have their full length; cases with uniformly drawn lengths have one (`drawn_lengths`).

A round is the generation of a step: the engine wakes, encodes the prompts and their pixels, samples and sleeps again.
Seconds are the median of the rounds after a warm-up. Before each round the weights of the policy are loaded, as after
an update, so that no engine finds a prompt of an earlier round in a cache; that is timed separately (`weights_s`).
Rounds with one new token are timed separately, too; the remaining time, divided by the number of the following decode
steps, is `ms_a_step`. Its floor is the time to read at 4.3 TB/s what every step must read: the language model's
weights, each prompt's keys and values once per group, and each row's own. Memory is measured while the engine is awake
and after it went to sleep; `captures` counts CUDA graphs, including the warm-up.

In the cases with peers, `model.generate` of the same checkpoint samples the same prompts once after a short warm-up, in
the compute dtype and with transformers' own attention. In those of other families the plain engine does, and the share
of their greedy tokens that are equal is reported: in float32
(`--dtype fp32 worker.actor.fsdp.mixed_precision_dtype=fp32 --only 64x64`) it says whether the engines agree.

--profile writes the kernels of one more round of the first case. --memory runs rounds of generation and update in a
real run instead (`rollout_rounds`). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.drawn_lengths import drawn_lengths
from benchmarks.environment import finish
from benchmarks.generate import model_generate
from benchmarks.kernels import profile
from benchmarks.measure import free_memory, held_gb, peak_gb, wait
from benchmarks.random_model import random_prompts
from benchmarks.rollout_rounds import ROUNDS, measure_rounds
from mtrl.bench.environment import commit, hardware
from mtrl.bench.random_run import PATHS, step_settings, write_run
from mtrl.bench.shapes import SHAPES
from mtrl.compose.algorithm import make_training_sampling
from mtrl.compose.policy import LoadedModel, build_generator, build_policy
from mtrl.compose.run import configure
from mtrl.config import Config, read_overrides
from mtrl.models.backbone import Backbone
from mtrl.models.state_dicts import exported_weights
from mtrl.protocols import Generator
from mtrl.rollout import local
from mtrl.rollout.decode.engine import GraphGenerator, bucket_size
from mtrl.rollout.decode.layers import decoder_shape
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Prompt, Rollouts, Sampling, Weights

BYTES_PER_SECOND = 4.3e12  # memory bandwidth of an H200
TEXT_TOKENS = {642: 66, 322: 66, 4096: 127, 44: 40, 64: 48}  # of a prompt of so many tokens, besides its picture's
STATE_BYTES = 2 * 4  # float32, read and written
BESIDE_SETTINGS = {"stop_ids": "none, and one where lengths are drawn: see benchmarks/drawn_lengths.py"}


@dataclass(frozen=True)
class Case:
    prompts: int
    n: int  # responses per prompt
    new: int  # maximum tokens of a response
    prefix: int = 642  # tokens of a prompt
    shortest: int | None = None  # minimum of drawn lengths; None: full length
    leave: bool = True  # whether ended rows leave the batch
    peers: bool = False  # whether `model.generate` samples it too
    plain: bool = False  # whether the plain engine does
    limit_s: float | None = None  # target on one H200


def family_cases(prefix: int) -> dict[str, Case]:
    return {
        "64x64": Case(8, 8, 64, prefix, plain=True),
        "64x256": Case(8, 8, 256, prefix, plain=True),
        "256x256": Case(32, 8, 256, prefix, plain=True),
    }


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
        "256x1024": Case(32, 8, 1024, limit_s=5.5),
        "256x1024-drawn": Case(32, 8, 1024, shortest=64),
        "256x1024-prefix-4096": Case(32, 8, 1024, prefix=4096),
        "1024x1024-drawn": Case(128, 8, 1024, shortest=64),
        "256x8192-drawn": Case(32, 8, 8192, shortest=256),
    },
    "qwen3.5-4b": family_cases(642),
    "gemma3-4b": family_cases(322),
    "internvl-2b": family_cases(322),
    "tiny": {
        "4x6": Case(2, 2, 6, prefix=44, peers=True, plain=True),
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
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="dtype of the master weights")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these cases")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds after a warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", type=Path, default=None, metavar="FILE", help="kernels of the first case, as text")
    parser.add_argument("--memory", type=int, nargs="?", const=ROUNDS, default=None, metavar="ROUNDS",
                        help=f"rounds of generation and update in a run instead of the cases ({ROUNDS})")  # fmt: skip
    parser.add_argument("--out", type=Path, default=None)
    a = parser.parse_intermixed_args(arguments)
    if unknown := sorted({*(a.only or ())} - CASES[a.size].keys()):
        parser.error(f"no case {', '.join(unknown)}; choose from {', '.join(CASES[a.size])}")
    return a


def precision(a: argparse.Namespace) -> dict[str, Any]:
    """Dtype settings of the YAML: none, unless a dtype is requested or there is no GPU."""
    chosen = {} if a.dtype == "fp32" else {"worker.actor.fsdp.param_dtype": a.dtype}
    slow = {"worker.actor.fsdp.mixed_precision_dtype": "fp32"}  # many CPUs compute bf16 products through fp32 anyway
    return chosen | (slow if a.device == "cpu" else {})


class Bench:
    """One policy, and a new engine for each case, so that no case holds the buffers of an earlier one. With vLLM there
    is one for all cases, as large as the largest: it has room for one engine that sleeps in a process."""

    def __init__(self, a: argparse.Namespace, folder: Path, cases: Sequence[Case]) -> None:
        self.a, self.longest = a, max(cases, key=lambda case: case.prefix + case.new)
        self.started, self.vllm = 0.0, None  # seconds that the last engine took to start
        self.sides = sorted({self.side(case) for case in cases})  # the shared encoder must accept all
        self.file = write_run(
            folder, a.size, a.device, 1, self.sides, TEXT_TOKENS[cases[0].prefix], a.seed, self.settings(cases[0])
        )
        free_memory()  # the checkpoint was made on the device
        config, _ = configure(self.file, a.overrides)
        self.loaded = LoadedModel(*build_policy(config))
        self.loaded.encoder.stop_ids = ()
        self.checkpoint = Path(config.worker.actor.model.model_path or "")

    def side(self, case: Case) -> int:
        """Of the picture of a prompt, in pixels."""
        return SHAPES[self.a.size].image_side(case.prefix - TEXT_TOKENS[case.prefix])

    def settings(self, case: Case) -> dict[str, Any]:
        """Settings of a run whose step samples this case."""
        return step_settings(case.prompts, case.n, case.new, 1, self.sides, case.prefix) | precision(self.a)

    @property
    def backbone(self) -> Backbone:
        return self.loaded.policy.backbone

    def prompts(self, case: Case) -> list[Prompt]:
        text_tokens = TEXT_TOKENS[case.prefix]
        return random_prompts(self.loaded.encoder, case.prompts, [self.side(case)], text_tokens, self.a.seed)

    @contextmanager
    def engine(self, case: Case) -> Iterator[tuple[Generator, Sampling]]:
        """The engine and the sampling of a run with the sizes of this case."""
        config = self.configure(case)
        generator = self.build_vllm() if config.engine_name == "vllm" else self.build(config)
        ends = nullcontext() if case.shortest is None else drawn_lengths(self.loaded.encoder, case.shortest)
        with ends, nullcontext() if case.leave else all_stay(generator, case.prompts * case.n):
            yield generator, make_training_sampling(config)

    def configure(self, case: Case) -> Config:
        return configure(self.file, self.settings(case) | read_overrides(self.a.overrides))[0]

    def build(self, config: Config) -> Generator:
        begin = time.perf_counter()
        generator = build_generator(config, self.loaded.policy, self.loaded.encoder)
        self.started = time.perf_counter() - begin
        return generator

    def build_vllm(self) -> Generator:
        self.vllm = self.vllm or self.build(self.configure(self.longest))
        return self.vllm

    def close(self) -> None:
        if self.vllm is not None:
            self.vllm.close()

    def publish(self, generator: Generator, version: int) -> float:
        """Seconds to load the weights of the policy into the engine."""
        wait()
        begin = time.perf_counter()
        with generator.resident():
            generator.load(Weights(version, exported_weights(self.loaded.model)))
        wait()
        return time.perf_counter() - begin

    # ------------------------------------------------------------------------------------------------------- measuring
    def measure(self, case: Case) -> dict[str, Any]:
        prompts = self.prompts(case)
        memory: dict[str, Any] = {"before": held_gb()}
        whole, first, loads = [], [], []
        with self.engine(case) as (generator, sampling):
            for number in range(self.a.rounds + 1):
                loads.append(self.publish(generator, number))
                with peak_gb(memory, "peak_gb"):
                    taken, rollouts = timed(generator, prompts, replace(sampling, step=number, version=number), memory)
                check(case, rollouts)
                whole.append(taken)
            memory["asleep"] = held_gb()
            engine = {"engine": type(generator).__name__, "captures": getattr(generator, "captures", 0)}
            one = replace(sampling, max_new_tokens=1)
            for number in range(self.a.rounds + 1):  # separate, since the steps of a run do not alternate between sizes
                self.publish(generator, number)
                taken, _ = timed(generator, prompts, replace(one, step=number, version=number))
                first.append(taken)
            sampling = replace(sampling, version=self.a.rounds)  # of the last weights
            greedy = generator.generate(prompts, greedy_sampling(sampling)) if case.plain else None
        del generator
        free_memory()
        fields = {key: value for key, value in asdict(case).items() if key not in ("peers", "plain")}
        starts = {"engine_start_s": round(self.started, 2), "weights_s": round(statistics.median(loads[1:]), 4)}
        found = fields | engine | starts | {"rows": len(rollouts), "memory": memory}
        found |= self.rates(rollouts, whole[1:], first[1:])  # the first of each is the warm-up
        if greedy is not None:
            found["plain"] = self.plain(prompts, sampling, greedy, found["seconds"])
        return found | ({"peers": self.peers(case, prompts, found["seconds"])} if case.peers else {})

    def rates(self, rollouts: Rollouts, whole: Sequence[float], first: Sequence[float]) -> dict[str, Any]:
        """Rates from the median seconds; tokens and floor are those of the last round."""
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
            "floor_ms_a_step": round(1000 * floor / BYTES_PER_SECOND, 3) if self.a.device == "cuda" else None,
            "tokens": tokens,
            "tokens_per_s": round(tokens / seconds),
        }

    def plain(self, prompts: Sequence[Prompt], sampling: Sampling, greedy: Rollouts, ours: float) -> dict[str, Any]:
        """The plain engine on the same policy: one generation after a short warm-up, and greedy tokens against ours."""
        engine = LocalGenerator(self.backbone, self.loaded.encoder, version=sampling.version)
        engine.generate(prompts, replace(sampling, max_new_tokens=2))
        taken, rollouts = timed(engine, prompts, sampling)
        same = engine.generate(prompts, greedy_sampling(sampling)).tokens == greedy.tokens
        return {
            "seconds": round(taken, 3),
            "tokens_per_s": round(int(rollouts.mask.sum()) / taken),
            "over_ours": round(taken / ours, 2),
            "equal_greedy_tokens": round(same.double().mean().item(), 6),
            "equal_greedy_responses": f"{int(same.all(1).sum())} of {len(same)}",
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
        free_memory()
        return {"model_generate_s": round(taken, 3), "model_generate_over_ours": round(taken / ours, 2)}

    def profile(self, name: str, case: Case) -> str:
        """A table of the kernels (on a CPU: operators) of one round, the slowest first."""
        prompts = self.prompts(case)
        with self.engine(case) as (generator, sampling):
            self.publish(generator, 0)
            timed(generator, prompts, sampling)
            (_, rollouts), table = profile(lambda: timed(generator, prompts, replace(sampling, step=1)), self.a.device)
        steps = rollouts.mask.shape[1] - 1
        where = f"{hardware()['gpu' if self.a.device == 'cuda' else 'cpu']}, {self.a.size}, {self.a.dtype} weights"
        title = (
            f"# {where}, commit {commit()}: {name}, {steps} steps after the first token, {type(generator).__name__}."
        )
        return f"{title}\n{table}"


def greedy_sampling(sampling: Sampling) -> Sampling:
    return replace(sampling, n=1, temperature=0.0, top_k=0, top_p=1.0, max_new_tokens=min(64, sampling.max_new_tokens))


def timed(
    generator: Generator, prompts: Sequence[Prompt], sampling: Sampling, memory: dict[str, Any] | None = None
) -> tuple[float, Rollouts]:
    """Seconds and rollouts of one generation. With `memory`, records the device memory before the engine sleeps, which
    takes microseconds."""
    wait()
    begin = time.perf_counter()
    with generator.resident():
        rollouts = generator.generate(prompts, sampling)
        if memory is not None:
            memory["awake"] = held_gb()
    wait()
    return time.perf_counter() - begin, rollouts


def check(case: Case, rollouts: Rollouts) -> None:
    """Asserts that prompts and responses have the lengths of the case."""
    lengths, prefixes = rollouts.mask.sum(1), {len(prompt.ids) for prompt in rollouts.prompts}
    assert prefixes == {case.prefix}, f"prompts of {prefixes} tokens"
    assert int(lengths.min()) >= (case.shortest or case.new) and int(lengths.max()) <= case.new, lengths.tolist()


@contextmanager
def all_stay(generator: Generator, rows: int) -> Iterator[None]:
    """Within the context, ended rows stay in the batch until all have ended."""
    whole = (
        patch.object(generator, "buckets", [bucket_size(rows)])
        if isinstance(generator, GraphGenerator)
        else nullcontext()
    )
    with whole, patch.object(local, "COMPACT_BELOW", 0.0):
        yield


def bytes_to_read(backbone: Backbone, rollouts: Rollouts) -> float:
    """Bytes that all steps after the first token must read: at each step the language model's weights, the keys and
    values of each unfinished row, and once per group those of its prompt, while the group has unfinished rows; of
    recurrent layers the state of each unfinished row, which is written, too. (All layers as if without windows.)"""
    language, shape = backbone.language_model, decoder_shape(backbone.language_model)
    numbers_per_token = sum(2 * each.key_heads * each.head_dim for each in shape.attentions.values())
    states = sum(each.value_heads * each.key_dim * each.value_dim for each in shape.recurrences.values())
    inputs = language.get_input_embeddings().weight
    weights = sum(p.numel() for p in language.parameters() if p is not inputs) + backbone.output_matrix.numel()
    steps = rollouts.mask.sum(1) - 1
    own = int((steps * (steps + 1) // 2).sum())
    group_steps = [int(steps[rollouts.group == group].max()) for group in range(len(rollouts.prompts))]
    shared = sum(len(prompt.ids) * each for prompt, each in zip(rollouts.prompts, group_steps, strict=True))
    read = backbone.compute_dtype.itemsize * (weights * int(steps.max()) + numbers_per_token * (own + shared))
    return read + STATE_BYTES * states * int(steps.sum())


def transformers_model(checkpoint: Path, backbone: Backbone) -> Any:
    """The same weights, loaded as for `model.generate`, without a stop token."""
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=backbone.compute_dtype)
    model.generation_config.eos_token_id = None
    return model.to(backbone.device).eval()


def format_line(name: str, found: dict[str, Any]) -> str:
    floor, memory = found["floor_ms_a_step"], found["memory"]
    fields = [
        f"{found['seconds']:.3f} s" + ("" if found["limit_s"] is None else f" (limit {found['limit_s']})"),
        f"first token {found['first_token_s']:.3f} s",
        f"weights {found['weights_s']:.3f} s",
        f"{found['ms_a_step']:.2f} ms per step" + ("" if floor is None else f" (floor {floor:.2f})"),
        f"{found['tokens_per_s']:,} tokens/s",
        f"{found['captures']} captures",
        *(f"{when} {held['allocated_gb']:.1f} GiB" for when, held in memory.items() if isinstance(held, dict) and held),
        *(f"{peer} {value}" for peer, value in found.get("peers", {}).items()),
        *(f"plain engine's {name} {value}" for name, value in found.get("plain", {}).items()),
    ]
    return f"{name}: " + ", ".join(fields)


def run(a: argparse.Namespace) -> dict[str, Any]:
    cases = {name: CASES[a.size][name] for name in a.only or CASES[a.size]}
    found = {}
    with tempfile.TemporaryDirectory(prefix="mtrl-rollout-") as folder:
        begin = time.perf_counter()
        with closing(Bench(a, Path(folder), list(cases.values()))) as bench:
            built = time.perf_counter() - begin
            for name, case in cases.items():
                found[name] = bench.measure(case)
                print(format_line(name, found[name]), flush=True)
                if a.out is not None:  # a time limit may end the run before the last case
                    a.out.write_text(json.dumps({"bench": "rollout", "unfinished": True, "cases": found}, indent=2))
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
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a run uses any visible GPU
    elif not torch.cuda.is_available():
        raise SystemExit("no CUDA device; use --device cpu")
    finish(run(a) if a.memory is None else measure_rounds(a, precision(a)), a.out)


if __name__ == "__main__":
    main()
