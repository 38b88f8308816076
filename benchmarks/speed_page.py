"""The measurements of `mtrl bench` and `benchmarks.step` as a page: `python -m benchmarks.speed_page > docs/speed.md`.

A new measurement is one line of MEASURED.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrl.bench.measure import MFU_KEYS
from mtrl.bench.peak_flops import PEAKS, find_peak, measure_mfu
from mtrl.bench.shapes import SHAPES
from mtrl.bench.workload import DTYPE_KEY, TPRL, count_tokens
from mtrl.commands.bench import FITTING
from mtrl.report.markdown_text import table

RESULTS = Path(__file__).parent / "results"
SHARE = "worker.actor.share_prefix"
NEXT_TO_TRL = "step_next_to_trl.json"
PLAIN, WHOLE = "MTRL, plain GRPO", "MTRL, TPRL and a reference"
ADAPTERS = "worker.actor.model.peft_type"


@dataclass(frozen=True)
class Measured:
    """A result in benchmarks/results, or a part of one."""

    file: str
    part: str | None = None
    note: str = ""

    def read(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((RESULTS / self.file).read_text())
        return result if self.part is None else result[self.part]


SHORT_TRL = Measured("step_tprl.json", note="two passes per update")
LONG_TRL = Measured(NEXT_TO_TRL, "3b, 8 x 8 x 1,024, plain GRPO")
LONG_TPRL = Measured(NEXT_TO_TRL, "3b, 8 x 8 x 1,024", note="one step after the first")
LARGE = Measured(NEXT_TO_TRL, "3b, 128 x 8 x 2,048", note="the first step")
SEVEN = Measured("step_7b.json", "now", note="one step after the first")
MEASURED = (
    Measured("step_defaults.json"),
    Measured("step_bf16.json"),
    SHORT_TRL,
    Measured("step_ahead.json", "3b, 8 x 8 x 256"),
    Measured("step_ahead.json", "3b, 32 x 8 x 1,024", note="one step after the first"),
    Measured("step_precision.json", "bf16", note="one step after the first"),
    Measured("step_precision.json", "fp32", note="one step after the first"),
    Measured("step_7b.json", "before", note="one step after the first, at commit c3e6691"),
    SEVEN,
    Measured(NEXT_TO_TRL, "3b, 8 x 8 x 256, plain GRPO"),
    LONG_TRL,
    LONG_TPRL,
    LARGE,
    Measured("step_qwen3_5.json", "qwen3.5-4b", note="generation by the plain engine"),
    Measured(
        "step_qwen3_5.json",
        f"qwen3.5-4b, {SHARE}=false",
        note="a prompt read for each response: here \\* is what was computed",
    ),
)
PHASES = {
    "generation": "generation",
    "scoring_and_other_prep": "probe, rewards, credit",
    "training": "update",
    "wall": "the whole step",
}


@dataclass(frozen=True)
class Unmeasured:
    """A step that was not measured, and a smaller one that bounds its seconds from below."""

    prompts: int
    completion: int
    smaller: Measured
    of_trl: bool = False


UNMEASURED = (
    Unmeasured(32, 1024, LONG_TRL, of_trl=True),
    Unmeasured(128, 2048, LONG_TRL, of_trl=True),
    Unmeasured(32, 1024, SEVEN),
    Unmeasured(128, 2048, SEVEN),
)

PAGE = """\
# Speed

<!-- `make speed` writes this page: python -m benchmarks.speed_page > docs/speed.md -->

How fast does your machine train? One command answers, without a model and without data:

```
mtrl bench
```

It makes a model of random weights in the shape of a published one, prompts with pictures of noise and a trivial reward,
runs whole steps by the code of `mtrl train`, and prints seconds, tokens a second, MFU and peak memory of each phase.
Choose your sizes, and add any key of a run; `--out` writes everything as JSON, with versions and hardware:

```
mtrl bench --shape 7b --prompts 32 --responses 8 --response-tokens 1024 --dtype bf16 --out result.json
mtrl bench --tprl --attention worker.actor.tokens_per_micro_batch=16384
```

{shapes}

`mtrl doctor run.yaml --try` does one step of your own run instead.

## What the numbers mean

- **Seconds** are medians of the steps after the first, which compiles and allocates. **Generation** samples the
  responses. **Probe** reads them again for log-probs, also of the perturbed view and of the reference if the algorithm
  needs them, and computes rewards and credit. **Update** is the gradients and the optimizer steps. A step has a little
  more: prompts, new weights for generation, logs.
- **Tokens a second**: of generation the tokens of the responses; of the other phases those of prompts and responses,
  each counted once, however often it is read. A prompt counts once per group, since MTRL reads it once for all its
  responses; marked with \\*, it counts once per response, as most frameworks count and compute.
- **MFU** is that of the update: 6 x parameters x tokens / seconds / peak. The parameters leave the vision tower out;
  the tokens are counted in both ways as above. Attention, and what gradient checkpointing computes again, are not
  counted. MFU\\* is not the load of the GPU, since it counts work that shared prompts save. Under adapters, where
  frozen weights need no gradients, on a CPU and on an unknown GPU there is no MFU.
{peaks}
- **Peak memory** is that of torch's allocator over a step, with the buffers of generation outside it.

## What was measured

{measured}

A step is prompts x responses x tokens of a response. TPRL is perception filtering and trajectory reweighting, which
need a second view of every response; "attention": its metrics at every step; "reference": a reference model
and a penalty for divergence from it.
{notes}

## Next to TRL

TRL {trl} trains by plain GRPO, without a second view and without a reference, and generates by transformers. Weights in
bf16; what is in one table ran on one GPU. The shape is `3b`.

8 x 8 x 256, medians of the steps after the first ([{short}](../benchmarks/results/{short})):

{short_table}

8 x 8 x 1,024, the same, of one step by TRL and with TPRL and of two by MTRL's plain GRPO
([{long}](../benchmarks/results/{long})):

{long_table}

TRL's first step, its warm-up, took {warm_up} s.

These steps were not measured, for lack of time on a GPU:

{unmeasured}

"At least" is arithmetic from the step of 8 x 8 x 1,024. Generation grows with the length of a response alone, however
many rows are decoded. TRL's update grows with the number of its passes of 8 responses, each counted as long as the
measured ones, even if its rows are longer; MTRL's probe and update grow with the tokens, a prompt counted once. By the
same arithmetic MTRL's step of 128 x 8 x 2,048 with `3b` takes at least {bound} s; it took {taken}.

## What speaks against these numbers

- The weights are random and no token ends a response: all responses have full length. In real training they differ,
  generation waits for the longest, and the update has fewer tokens.
- The advantage over TRL shrinks as responses grow: TPRL's step is {short_ratio} times as fast as TRL's plain one at 256
  tokens and {long_ratio} times at 1,024, where MTRL's plain one is {plain_ratio} times as fast. TRL's update at 1,024
  took less time on one machine than that at 256 on another, so much of it is not computation but waiting for the host.
- TRL was not tuned: passes of 8 responses with gradient checkpointing, in less memory than MTRL, which keeps the
  activations of as many layers as fit. It can generate by vLLM, which is faster and was not measured.
- One process on one GPU, and MTRL's own engine. Several GPUs were not measured; with vLLM: [vllm.md](vllm.md).
- Hosts differ by a fifth, and a GPU becomes slower under load: compare within one run. More comparisons, and what a
  step consists of: [benchmarks](../benchmarks/README.md).
- The first start on a machine compiles kernels, about a minute; they are cached.
"""


def make_page() -> str:
    short, plain, whole = (measured.read() for measured in (SHORT_TRL, LONG_TRL, LONG_TPRL))
    notes = [f"{number}) {note}." for note, number in number_notes().items()]
    return PAGE.format(
        shapes=describe_shapes(),
        peaks=describe_peaks(),
        measured=measured_table(),
        notes=" ".join(notes),
        trl=plain["trl"]["env"]["trl"],
        short=SHORT_TRL.file,
        short_table=trl_table(short["trl"], {WHOLE: short}),
        long=LONG_TRL.file,
        long_table=trl_table(plain["trl"], {PLAIN: plain, WHOLE: whole}),
        warm_up=format_seconds(plain["trl"]["warm_up"]),
        unmeasured=unmeasured_table(),
        bound=format_seconds(least_seconds(Unmeasured(128, 2048, LONG_TPRL))),
        taken=format_seconds(LARGE.read()["median_of_measured_steps"]["wall"]),
        short_ratio=compare_to_trl(short["trl"], short),
        long_ratio=compare_to_trl(plain["trl"], whole),
        plain_ratio=compare_to_trl(plain["trl"], plain),
    )


def describe_shapes() -> str:
    names = ", ".join(f"`{name}` ({shape.title})" for name, shape in SHAPES.items())
    (wide, shape, _), (narrow, _, _) = FITTING
    text = (
        f"Shapes: {names}. Without `--shape` it is `{shape}` on a GPU of at least {narrow} GiB (with weights in bf16; "
    )
    return textwrap.fill(f"{text}in float32 from {wide} GiB on), else `tiny`.", 120)


def describe_peaks() -> str:
    names = ", ".join(f"{name.split('|')[0].split('-')[0]} {tera:,}" for name, tera in PEAKS.items())
    text = f"Peaks in TFLOP/s of dense bf16 products, as the maker publishes them: {names}."
    return textwrap.fill(text, 120, initial_indent="  ", subsequent_indent="  ")


def number_notes() -> dict[str, int]:
    notes = dict.fromkeys(each.note for each in MEASURED if each.note)
    return {note: number for number, note in enumerate(notes, start=1)}


def measured_table() -> str:
    heads = ["shape", "GPU", "step", "settings", "generation, s", "probe, s", "update, s", "step, s",
             "generation, tokens/s", "update, tokens/s", "MFU", "peak, GiB", ""]  # fmt: skip
    return table(heads, [measured_row(each) for each in MEASURED])


def measured_row(measured: Measured) -> list[str]:
    result = measured.read()
    args, summary = result["args"], result["median_of_measured_steps"]
    phases = [summary[name] for name in ("generation", "scoring_and_other_prep", "training", "wall")]
    counts = count_tokens(args["prompts"], args["generations"], result["prompt_len"], args["completion"])
    numbers = [number_notes()[measured.note]] if measured.note else []
    return [
        f"`{args['size']}`",
        result["hardware"]["gpu"].removeprefix("NVIDIA "),
        f"{args['prompts']} x {args['generations']} x {args['completion']:,}, prompts of {result['prompt_len']:,}",
        describe_settings(result["settings"]) + "".join(f" {number})" for number in numbers),
        *map(format_seconds, phases),
        f"{summary['completion_tokens_per_s_generation']:,.0f}",
        "{:,.0f} ({:,.0f}\\*)".format(*(count / summary["training"] for count in counts)),
        "{:.0%} ({:.0%}\\*)".format(*read_mfu(result)),
        f"{result['peak_gb']:.0f}",
        f"[result](../benchmarks/results/{measured.file})",
    ]


def format_seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.1f}"


def describe_settings(settings: Mapping[str, Any]) -> str:
    words = ["TPRL"] if TPRL.items() <= settings.items() else []
    words += ["attention"] if settings.get("optimization.compute_attention_metrics") is True else []
    words += [] if settings.get("optimization.disable_divergence") else ["reference"]
    adapters = [settings[ADAPTERS]] if ADAPTERS in settings else []
    return ", ".join([f"{settings.get(DTYPE_KEY, 'fp32')} weights", *(words or ["plain GRPO"]), *adapters])


def read_mfu(result: Mapping[str, Any]) -> list[float]:
    """As recorded; results that are older than MFU have what it is computed from."""
    args, summary = result["args"], result["median_of_measured_steps"]
    if MFU_KEYS[0] in summary:
        return [summary[key] for key in MFU_KEYS]
    peak = find_peak(result["hardware"]["gpu"])
    assert peak is not None and ADAPTERS not in result["settings"], "MFU is not defined"
    parameters = round((result["params_m"] - result["vision_params_m"]) * 1e6)
    counts = count_tokens(args["prompts"], args["generations"], result["prompt_len"], args["completion"])
    return [measure_mfu(parameters, count, summary["training"], peak) for count in counts]


def trl_table(trl: Mapping[str, Any], ours: Mapping[str, Mapping[str, Any]]) -> str:
    columns = [trl, *ours.values()]
    rows = [
        [title, *(format_seconds(column["median_of_measured_steps"][name]) for column in columns)]
        for name, title in PHASES.items()
    ]
    rows.append(["peak memory, GiB", *(f"{column['peak_gb']:.0f}" for column in columns)])
    return table(["seconds", "TRL, plain GRPO", *ours], rows)


def compare_to_trl(trl: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    return f"{trl['median_of_measured_steps']['wall'] / ours['median_of_measured_steps']['wall']:.1f}"


def unmeasured_table() -> str:
    rows = []
    for step in UNMEASURED:
        args = step.smaller.read()["args"]
        size = f"{step.prompts} x {args['generations']} x {step.completion:,}"
        bound = f"{least_seconds(step) / 60:.1f}"
        rows.append([f"`{args['size']}`", "TRL, plain GRPO" if step.of_trl else WHOLE, size, "not measured", bound])
    return table(["shape", "", "step", "seconds", "at least, minutes"], rows)


def least_seconds(step: Unmeasured) -> float:
    """A lower bound of a step: the page says how it follows."""
    result = step.smaller.read()
    args, prompt = result["args"], result["prompt_len"]
    summary = (result["trl"] if step.of_trl else result)["median_of_measured_steps"]
    before, _ = count_tokens(args["prompts"], args["generations"], prompt, args["completion"])
    after, _ = count_tokens(step.prompts, args["generations"], prompt, step.completion)
    growth = step.prompts / args["prompts"] if step.of_trl else after / before
    passes = summary["training"] + (0.0 if step.of_trl else summary["scoring_and_other_prep"])
    return float(passes * growth + summary["generation"] * step.completion / args["completion"])


if __name__ == "__main__":
    print(make_page(), end="")
