"""A result as text for people: what was run, a table of the phases, and what its numbers mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtrl.bench.measure import MFU_KEYS
from mtrl.bench.peak_flops import find_peak
from mtrl.bench.random_run import step_settings
from mtrl.bench.shapes import SHAPES
from mtrl.bench.workload import DTYPE_KEY, count_tokens
from mtrl.config import read_overrides

Result = Mapping[str, Any]
Pair = tuple[float, float]  # with a prompt counted once per group, and once per response
COMPUTE_KEY = "worker.actor.fsdp.mixed_precision_dtype"
PHASE_KEYS = {"generation": "generation", "probe": "scoring_and_other_prep", "update": "training"}
HEADS = ("phase", "seconds", "share", "tokens/s", "MFU", "tokens/s*", "MFU*", "peak GiB")
NONE = "-"
NO_PASS = 1e-3  # seconds: a probe that reads nothing, since nothing is needed from it
SIZE_KEYS = frozenset(step_settings(1, 1, 1, 1, [1], 10**9))
SHOWN_ELSEWHERE = (DTYPE_KEY, COMPUTE_KEY, "training.logger")
DEFINITIONS = """\
seconds   medians of the steps after the first. generation: the responses are sampled. probe: they are read again for
          log-probs (of the perturbed view and the reference, too, if needed), and the rewards and the credit of the
          tokens are computed. update: gradients and optimizer steps. other: prompts, new weights for generation, logs
tokens/s  of generation: tokens of responses; else also those of prompts, each counted once, however often it is read:
          a prompt once per group, as it is computed; * once per response, as most frameworks count
MFU       {mfu}
peak GiB  {memory}
The weights are random and no token ends a response, so that all have full length: real responses differ, and so does
the time for them. The reward is trivial. One process, one device."""


@dataclass(frozen=True)
class Phase:
    """A line of the table; None where a number is not defined."""

    name: str
    seconds: float
    tokens: Pair | None = None  # a second
    mfu: Pair | None = None
    peak_gb: float | None = None

    def cells(self, wall: float) -> list[str]:
        tokens = [NONE, NONE] if self.tokens is None else [f"{rate:,.0f}" for rate in self.tokens]
        mfu = [NONE, NONE] if self.mfu is None else [f"{share:.1%}" for share in self.mfu]
        peak = NONE if self.peak_gb is None else f"{self.peak_gb:.1f}"
        share = f"{self.seconds / wall:.1%}"
        return [self.name, f"{self.seconds:.3f}", share, tokens[0], mfu[0], tokens[1], mfu[1], peak]


def make_phases(result: Result) -> list[Phase]:
    """The phases of a step, what is left of it, and the whole."""
    args, summary = result["args"], result["median_of_measured_steps"]
    generation, probe, update = (summary[key] for key in PHASE_KEYS.values())
    wall = summary["wall"]
    counts = count_tokens(args["prompts"], args["generations"], result["prompt_len"], args["completion"])
    sampled = args["prompts"] * args["generations"] * args["completion"]
    read = min(row["detail"]["probe"] for row in result["steps"]) > NO_PASS
    mfu = tuple(summary[key] for key in MFU_KEYS) if MFU_KEYS[0] in summary else None

    def rates(seconds: float) -> Pair:
        return counts[0] / seconds, counts[1] / seconds

    return [
        Phase("generation", generation, (sampled / generation, sampled / generation),
              peak_gb=result["peak_gb_generation"] + result["peak_gb_buffers"]),
        Phase("probe", probe, rates(probe) if read else None, peak_gb=result["peak_gb_probe"] or None),
        Phase("update", update, rates(update), mfu, result["peak_gb_update"]),
        Phase("other", max(0.0, wall - generation - probe - update)),
        Phase("step", wall, rates(wall), peak_gb=result["peak_gb"]),
    ]  # fmt: skip


def make_report(result: Result) -> str:
    """The result, with its environment, for a terminal."""
    wall = result["median_of_measured_steps"]["wall"]
    cells = [HEADS, *(phase.cells(wall) for phase in make_phases(result))]
    table = [f"{name:<12}" + "".join(f"{cell:>11}" for cell in rest) for name, *rest in cells]
    on_gpu = result["args"]["device"] == "cuda"
    memory = "of torch's allocator in the phase, with the buffers of generation" if on_gpu else "of the process so far"
    return "\n".join([*describe(result), "", *table, "", DEFINITIONS.format(mfu=define_mfu(result), memory=memory)])


def describe(result: Result) -> list[str]:
    """What was run, and the wait before the first step."""
    args, settings, hardware = result["args"], result["settings"], result["hardware"]
    on_gpu, text = args["device"] == "cuda", result["prompt_len"] - result["image_tokens"]
    device = hardware["gpu"] if on_gpu else f"{hardware['cpu']}, {hardware['cores']} cores"
    weights, products = settings.get(DTYPE_KEY, "fp32"), settings.get(COMPUTE_KEY, "bf16")
    own = read_overrides(args["overrides"])
    shown = {
        key: value for key, value in settings.items()
        if key not in SHOWN_ELSEWHERE and (key in own or key not in SIZE_KEYS)
    }  # fmt: skip
    start = result["seconds_before_the_first_step"]
    lines = [
        f"model     {args['size']}, the shape of {SHAPES[args['size']].title}: {result['params_m']:,} M parameters, "
        f"{result['vision_params_m']:,} M of them in the vision tower",
        f"device    {device}; weights in {weights}, products in {products}",
        f"a step    {args['prompts']} prompts x {args['generations']} responses x {args['completion']:,} tokens; "
        f"a prompt has {result['image_tokens']:,} image tokens and {text:,} others",
        f"settings  {', '.join(f'{key}={format_value(value)}' for key, value in shown.items()) or 'the defaults'}",
        f"start     {start['build']:.1f} s to build the run, {start['rehearsal']:.1f} s of preflight; the first step "
        f"took {max(0.0, start['more_in_the_first_step']):.1f} s more than the others",
    ]
    if result["halved"]:
        cut = ", ".join(f"{name.replace('_', ' ')}: {number:,}" for name, number in result["halved"].items())
        lines.append(f"memory    not everything fitted at once, and was halved until it did ({cut})")
    return lines


def format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def define_mfu(result: Result) -> str:
    """What MFU is, or why there is none."""
    gpu = result["hardware"].get("gpu") if result["args"]["device"] == "cuda" else None
    if gpu is None:
        return "not defined on a CPU"
    if (peak := find_peak(gpu)) is None:
        return f"left out, since the peak of a {gpu} is not known"
    if MFU_KEYS[0] not in result["median_of_measured_steps"]:
        return "left out, since frozen weights need no gradients"
    known = f"{peak / 1e12:,.0f} TFLOP/s in bf16 for a {gpu}"
    return f"6 x parameters without the vision tower x tokens / seconds / peak, which is {known}"
