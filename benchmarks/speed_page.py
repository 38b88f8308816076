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


MEASURED = (
    Measured("step_defaults.json"),
    Measured("step_bf16.json"),
    Measured("step_tprl.json", note="two passes per update"),
    Measured("step_ahead.json", "3b, 8 x 8 x 256"),
    Measured("step_ahead.json", "3b, 32 x 8 x 1,024", note="one step after the first"),
    Measured("step_precision.json", "bf16", note="one step after the first"),
    Measured("step_precision.json", "fp32", note="one step after the first"),
    Measured("step_7b.json", "before", note="one step after the first, at commit c3e6691"),
    Measured("step_7b.json", "now", note="one step after the first"),
    Measured("step_qwen3_5.json", "qwen3.5-4b", note="generation by the plain engine"),
    Measured(
        "step_qwen3_5.json",
        f"qwen3.5-4b, {SHARE}=false",
        note="a prompt read for each response: here \\* is what was computed",
    ),
)
BESIDE_TRL = "step_tprl.json"

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

Next to TRL {trl}, plain GRPO without a second view and without a reference, bf16 weights, one after the other on one
GPU ([{beside}](../benchmarks/results/{beside})):

{next_to_trl}

## What speaks against these numbers

- The weights are random and no token ends a response: all responses have full length. In real training they differ,
  generation waits for the longest, and the update has fewer tokens.
- One process on one GPU, and MTRL's own engine. Several GPUs and vLLM were not measured.
- Hosts differ by a fifth, and a GPU becomes slower under load: compare within one run. More comparisons, and what a
  step consists of: [benchmarks](../benchmarks/README.md).
- The first start on a machine compiles kernels, about a minute; they are cached.
"""


def make_page() -> str:
    beside = Measured(BESIDE_TRL).read()
    notes = [f"{number}) {note}." for note, number in number_notes().items()]
    return PAGE.format(
        shapes=describe_shapes(),
        peaks=describe_peaks(),
        measured=measured_table(),
        notes=" ".join(notes),
        trl=beside["trl"]["env"]["trl"],
        beside=BESIDE_TRL,
        next_to_trl=trl_table(beside),
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
    words = [f"{settings.get(DTYPE_KEY, 'fp32')} weights"]
    words += ["TPRL"] if TPRL.items() <= settings.items() else []
    words += ["attention"] if settings.get("optimization.compute_attention_metrics") is True else []
    words += [] if settings.get("optimization.disable_divergence") else ["reference"]
    words += [settings[ADAPTERS]] if ADAPTERS in settings else []
    return ", ".join(words)


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


def trl_table(result: Mapping[str, Any]) -> str:
    ours, theirs = result["median_of_measured_steps"], result["trl"]["median_of_measured_steps"]
    names = {"generation": "generation", "scoring_and_other_prep": "probe, rewards, credit", "training": "update",
             "wall": "the whole step"}  # fmt: skip
    rows = [[title, format_seconds(theirs[name]), format_seconds(ours[name])] for name, title in names.items()]
    rows.append(["peak memory, GiB", f"{result['trl']['peak_gb']:.0f}", f"{result['peak_gb']:.0f}"])
    return table(["seconds", "TRL, plain GRPO", "MTRL, TPRL and a reference"], rows)


if __name__ == "__main__":
    print(make_page(), end="")
