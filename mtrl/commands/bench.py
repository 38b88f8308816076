"""Measure how fast this machine trains: whole steps on a model of random weights, phase by phase.

mtrl bench [--shape tiny|3b|7b|qwen3.5-tiny|qwen3.5-4b] [--prompts P] [--responses N] [--response-tokens T]
           [--image-tokens I] [--text-tokens X] [--steps 4] [--dtype fp32|bf16] [--tprl] [--attention] [--out FILE]
           [a.b=c ...]

Needs no model and no data: both are made in a temporary directory, and the code of mtrl train runs the steps. Prints
seconds, tokens a second, MFU and peak memory of generation, probe and update, with definitions; the first step is left
out. Without --shape it is 3b on a GPU with enough memory, else tiny; a step has 8 prompts of 576 image and 66 other
tokens with 8 responses of 256 tokens each, less for tiny shapes. --dtype is that of the weights. --tprl turns on
perception filtering and trajectory reweighting, --attention measures attention at every step; a.b=c sets any other key
of a run. --out writes everything as JSON. For your own model and data: mtrl doctor run.yaml --try.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from mtrl.bench.environment import environment
from mtrl.bench.measure import make_result, open_run
from mtrl.bench.shapes import SHAPES, Shape
from mtrl.bench.table import COMPUTE_KEY, PHASE_KEYS, make_report
from mtrl.bench.workload import DTYPES, Workload
from mtrl.commands.load_arguments import OptionParser, check_call, check_new_file, log_line, whole_number
from mtrl.config import load_config, read_overrides, take_file
from mtrl.config.unsupported import shards_models
from mtrl.models.random_model import LONGEST
from mtrl.utils.errors import StartError
from mtrl.utils.files import write_file

GIB = 2**30
SIZES = {"prompts": 8, "responses": 8, "response_tokens": 256, "image_tokens": 576, "text_tokens": 66}
TINY_SIZES = {"prompts": 2, "responses": 4, "response_tokens": 16, "image_tokens": 4, "text_tokens": 64}
FITTING = ((76, "3b", "fp32"), (42, "3b", "bf16"))  # GiB of a GPU; a step of SIZES takes 72 and 38 (docs/speed.md)
OPTION_OF = {  # keys that the options set
    "dataset.rollout_batch_size": "use --prompts",
    "worker.rollout.n": "use --responses",
    "dataset.max_response_length": "use --response-tokens",
    "dataset.min_pixels": "use --image-tokens",
    "dataset.max_pixels": "use --image-tokens",
    "training.max_steps": "use --steps",
    "worker.actor.fsdp.param_dtype": "use --dtype",
    "worker.actor.model.model_path": "the model is made here, use --shape",
    "dataset.train_files": "the data are made here",
    "training.output_dir": "the run is in a temporary directory, use --out for the result",
}

OPTIONS = OptionParser(__doc__, "--out")
OPTIONS.add_argument("--shape", choices=SHAPES)
OPTIONS.add_argument("--dtype", choices=DTYPES)
OPTIONS.add_argument("--steps", type=whole_number(2), default=4)
for size in SIZES:
    OPTIONS.add_argument(f"--{size.replace('_', '-')}", type=whole_number())
for switch in ("--tprl", "--attention"):
    OPTIONS.add_argument(switch, action="store_true")


def run(arguments: Sequence[str]) -> int:
    options, others = OPTIONS.parse_known_args(arguments)
    file, overrides = take_file(others)
    if file is not None:
        OPTIONS.error(f"{file}: it takes no file, since model and data are made here; for yours mtrl doctor FILE --try")
    out = check_new_file(options.out) if options.out else None
    workload = make_workload(options, overrides)
    log_line(f"measuring {workload.size} on {workload.device}: {workload.steps} steps, the first is left out")
    try:
        result = measure(workload)
    except torch.OutOfMemoryError as error:
        raise StartError(
            f"{workload.size} does not fit into this GPU: {str(error).splitlines()[0]} Use a smaller --shape, "
            "--dtype bf16, or worker.actor.model.peft_type=lora"
        ) from error
    result |= environment()
    print(make_report(result), flush=True)
    if out is not None:
        write_file(out, json.dumps(result, indent=2) + "\n")
        log_line(f"result: {out}")
    return 0


def make_workload(options: Namespace, overrides: Sequence[str]) -> Workload:
    """The workload of the options; sizes that are not given fit the shape, and the shape fits the device."""
    check_overrides(overrides)
    on_gpu = torch.cuda.is_available()
    name, dtype = options.shape or "tiny", "fp32"
    if on_gpu and options.shape is None:
        name, dtype = choose_shape(torch.cuda.mem_get_info()[1] / GIB)
    shape, defaults = SHAPES[name], TINY_SIZES if name.endswith("tiny") else SIZES
    sizes = {size: getattr(options, size) or default for size, default in defaults.items()}
    own = ["training.logger=[]", *([] if on_gpu else [f"{COMPUTE_KEY}=fp32"])]  # progress is ours; few CPUs have bf16
    return Workload(
        size=name,
        prompts=sizes["prompts"],
        generations=sizes["responses"],
        image_side=fit_image(shape, sizes),
        completion=sizes["response_tokens"],
        steps=options.steps,
        device="cuda" if on_gpu else "cpu",
        dtype=options.dtype or dtype,
        text_tokens=sizes["text_tokens"],
        tprl=options.tprl,
        attention=options.attention,
        overrides=[*own, *overrides],
    )


def check_overrides(overrides: Sequence[str]) -> None:
    for key in read_overrides(overrides):
        if key in OPTION_OF:
            raise StartError(f"{key}: {OPTION_OF[key]}")
    config = load_config(None, overrides)
    if shards_models(config):
        reason = "measures one process on one device; leave out torchrun, cpu_offload and settings for several"
        raise StartError(f"mtrl bench {reason}")
    if config.engine_name == "vllm":  # it would need the weights on disk, and to ignore the end of a text
        raise StartError("worker.rollout.name: mtrl bench measures the local engine; leave it out")


def choose_shape(gib: float) -> tuple[str, str]:
    """The largest shape and dtype of a first measurement that fit into a GPU."""
    for needed, shape, dtype in FITTING:
        if gib >= needed:
            return shape, dtype
    log_line(f"3b needs {FITTING[-1][0]} GiB and this GPU has {gib:.0f}; --shape 3b with adapters may fit: "
             "worker.actor.model.peft_type=lora")  # fmt: skip
    return "tiny", "fp32"


def fit_image(shape: Shape, sizes: dict[str, int]) -> int:
    """Side of the picture, a square of whole tokens; raises if the text would be too long for the model."""
    asked = sizes["image_tokens"]
    side = shape.image_side(asked)
    used = shape.image_tokens(side)
    if (length := used + sizes["text_tokens"] + sizes["response_tokens"]) > LONGEST:
        raise StartError(f"a prompt and its response have {length:,} tokens, and the shapes at most {LONGEST:,}")
    if used != asked:
        log_line(f"--image-tokens {asked}: pictures are squares, so that they have {used} tokens")
    return side


def measure(workload: Workload) -> dict[str, Any]:
    """Run the steps, and report each as it ends."""
    rows = []
    with ExitStack() as opened:
        measured = check_call(opened.enter_context, open_run(workload))
        for number in range(workload.steps):
            rows.append(measured.step(number))
            phases = ", ".join(f"{name} {rows[-1][key]:.2f}" for name, key in PHASE_KEYS.items())
            log_line(f"step {number + 1} of {workload.steps}: {rows[-1]['wall']:.2f} s ({phases})")
        result = make_result(measured, rows)
    if (text := result["prompt_len"] - result["image_tokens"]) != workload.text_tokens:
        log_line(f"--text-tokens {workload.text_tokens}: a prompt has {text}, the fewest with its chat template")
    return result
