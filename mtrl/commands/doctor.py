"""Check this machine, and whether a configuration can run on it.

mtrl doctor [FILE] [--gpu GIB | --try] [a.b=c ...]
mtrl doctor MODEL --parity [--dtype fp32|bf16|fp16] [a.b=c ...]

Prints versions, devices, memory, optional features and the packages they lack; then missing files, disk space and a
memory estimate of the run, and what to change if it does not fit: here, or on one GPU of the size --gpu. Tries some
rows of the local data, through template and tokenizer. Loads no weights and downloads nothing. Exit status 2: the
configuration cannot run.
--try loads the weights, compares log-probs with transformers' own forward and does one whole step at the configured
sizes, with its times and peak memory, in a temporary directory.
--parity compares a model (a directory, a hub id, zoo, scenes, or that of FILE) with transformers, on built-in prompts:
tokens and pixels, log-probs, gradients, shared prompts, attention, greedy decoding, adapters, saved weights. In float32
if that fits, unless --dtype says otherwise. Exit status 1: a check failed.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtrl.commands import installed
from mtrl.commands.doctor_parity import run_parity
from mtrl.commands.doctor_rows import check_rows
from mtrl.commands.doctor_trial import run_trial
from mtrl.commands.installed import Device
from mtrl.commands.load_arguments import OptionParser
from mtrl.compose.critic_worker import critic_path
from mtrl.compose.memory_limits import is_sized_by_memory, make_plan
from mtrl.compose.policy import missing_model_hint, model_path, register_own_family
from mtrl.compose.run import configure, find_unknown_names
from mtrl.compose.task_source import EMBEDDED
from mtrl.compose.vllm_engine import explain_no_cpu_engine
from mtrl.config import Config, find_warnings, take_file
from mtrl.config.unsupported import find_unsupported
from mtrl.data.sources import HUB_ID
from mtrl.memory.estimate import MemoryEstimate, estimate, find_savings, shrink_to_fit
from mtrl.memory.fake_model import NotEstimated
from mtrl.memory.plan import Plan
from mtrl.memory.preflight import ADAM_STATES
from mtrl.models.checkpoint_files import check_weight_files
from mtrl.models.families import check_known_family, load_model_config
from mtrl.models.load_model import DTYPES
from mtrl.rewards.builtin_names import is_builtin_name
from mtrl.utils.machine import existing_parent, free_disk, is_writable

CANNOT_RUN = 2
GIB = 2**30


def parse_gpu(size: str) -> Device:
    """A GPU of so many GiB that this machine does not have."""
    if not size.isdecimal() or size == "0":
        raise ArgumentTypeError(f"{size} is no number of GiB; write --gpu 80")
    return Device(f"a GPU of {size} GiB", int(size) * GIB, int(size) * GIB, is_gpu=True)


OPTIONS = OptionParser(__doc__)
OPTIONS.add_argument("--gpu", type=parse_gpu)
OPTIONS.add_argument("--try", dest="is_trial", action="store_true")
OPTIONS.add_argument("--parity", action="store_true")
OPTIONS.add_argument("--dtype", choices=DTYPES)


def run(arguments: Sequence[str]) -> int:
    """Print the findings; the exit status is 0 if the configuration can run."""
    options, others = OPTIONS.parse_known_args(arguments)
    if options.is_trial and options.gpu is not None:
        OPTIONS.error("--try: the trial runs on this machine; leave out --gpu")
    if options.parity and (options.is_trial or options.gpu is not None):
        OPTIONS.error("--parity: it runs nothing else; leave out --try and --gpu")
    if options.parity:
        return run_parity(others, options.dtype)
    if options.dtype is not None:
        OPTIONS.error("--dtype: it is for --parity; a run has worker.actor.fsdp.mixed_precision_dtype")
    print(machine_report())
    file, overrides = take_file(others)
    config, embedded = configure(file, overrides)
    device = options.gpu or installed.devices()[0]
    print(f"\nThe run: {'the embedded task' if embedded else file or 'the overrides'}")
    verdict = "It can run here." if options.gpu is None else "It can run there, as far as can be seen from here."
    missing = [*find_missing_files(config)]
    problems = [*find_unsupported(config), *find_unknown_names(config), *find_missing_features(config)]
    problems += [*missing, *find_broken_weights(config)]
    is_model_known = True
    try:
        model = load_model_config(model_path(config), config.worker.actor.model.trust_remote_code)
        register_own_family(config)
        check_known_family(model, model_path(config))
        problems += check_engine(config, model, device)
        plan = make_plan(config, device.is_gpu, device.total)
        estimated = estimate(model, plan)
        if device.is_gpu and is_sized_by_memory(config):
            plan, estimated = shrink_to_fit(model, plan, estimated, device.total)
    except NotEstimated as error:
        _note(str(error))
    except ValueError as error:  # it names the model
        is_model_known = False
        message = f"{str(error).splitlines()[0]}; the memory is not estimated"
        if any(map(is_remote, (model_path(config), critic_path(config), config.worker.reward.model_path or ""))):
            _note(f"{message}, and nothing is downloaded now")
            verdict = "No problem was found, but the model was not seen."
        else:
            problems.append(message)
    else:
        print(memory_report(estimated, device, on_ranks=plan.split is not None))
        if estimated.no_graphs:
            print(f"    sampling by the plain engine, several times slower than CUDA graphs: {estimated.no_graphs}")
        if views := plan.limits.probe_needs.other_views:
            print(f"    probes read each response {1 + len(views)} times, with the views: original, {', '.join(views)}")
        if views := plan.limits.live_needs.other_views:
            print(f"    updates read it {1 + len(views)} times, with gradients: original, {', '.join(views)}")
        if tokens := plan.limits.update.tokens:
            print(f"    in passes of at most {tokens:,} tokens")
        if device.is_gpu and plan.checkpointing == "auto":
            print("    with all layers checkpointed; auto lets as many as fit keep their activations")
        saved = count_saved_parameters(estimated, plan) + estimated.critic_parameters
        if device.is_gpu:
            print(cpu_memory_report(config, estimated, count_checkpoint_bytes(config, saved)))
        problems += check_memory(estimated, device, partial(find_savings, model, plan, estimated))
        problems += check_vllm_share(config, estimated, plan)
        problems += check_disk(config, saved)
    if not missing:
        problems += check_rows(config, is_model_known, _note)
    for warning in find_warnings(config):
        _note(warning)
    if options.is_trial and not problems:
        problems += run_trial(config)
        verdict = "It runs here." if not problems else verdict
    print("\n".join(f"  PROBLEM  {problem}" for problem in problems) or f"  {verdict}")
    return CANNOT_RUN if problems else 0


def _note(text: str) -> None:
    print(f"  note     {text}")


# ------------------------------------------------------------------------------------------------------------- machine
def human_size(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


def machine_report() -> str:
    lines = ["This machine", *(f"  {line}" for line in installed.versions())]
    if reason := installed.why_no_gpu():
        lines.append(f"  no GPU: {reason}")
    lines += [f"  {d.name}: {human_size(d.total)}, {human_size(d.free)} free" for d in installed.devices()]
    lines += ["", "Optional features"]
    for feature in installed.FEATURES:
        missing = feature.missing()
        no = f"  no    {feature.name}: {feature.install} ({', '.join(missing)} missing)"
        lines.append(no if missing else f"  yes   {feature.name}")
    return "\n".join(lines)


def find_missing_features(config: Config) -> Iterator[str]:
    for feature in installed.FEATURES:
        if feature.is_wanted(config) and feature.missing():
            yield f"the configuration asks for {feature.name}: {feature.install}"


def check_engine(config: Config, model: Any, device: Device) -> Iterator[str]:
    own = config.engine_name == "vllm" and config.worker.rollout.mode != "server"  # a server may be on a GPU
    dtype = DTYPES[config.worker.actor.fsdp.mixed_precision_dtype]
    if own and not device.is_gpu and (problem := explain_no_cpu_engine(model, dtype, gets_weights=True)):
        yield problem


# --------------------------------------------------------------------------------------------------------------- files
def find_missing_files(config: Config) -> Iterator[str]:
    data, model = config.dataset, config.worker.actor.model
    if hint := missing_model_hint(config):
        yield hint
    for key, names in (("train_files", data.train_files), ("val_files", data.val_files)):
        for name in filter(None, map(str.strip, names.split(","))):
            path = name if os.path.exists(name) else name.rpartition("@")[0] or name
            needs_no_file = name.startswith(EMBEDDED) or (is_remote(path) and not Path(path).suffix)
            if not (needs_no_file or os.path.exists(os.path.expanduser(path))):
                yield f"dataset.{key}: {name} does not exist"
    named = {
        "dataset.image_dir": data.image_dir,
        "dataset.format_prompt": data.format_prompt,
        "worker.actor.model.tokenizer_path": model.tokenizer_path,
        "training.load_checkpoint_path": config.training.load_checkpoint_path,
    }
    for key, setting in named.items():
        if setting is None or (key.endswith("tokenizer_path") and is_remote(setting)):
            continue
        if not os.path.exists(os.path.expanduser(setting)):
            yield f"{key}: {setting} does not exist"
    for function in config.reward_functions:
        if not is_builtin_name(function) and not function.startswith("python:"):
            yield from check_function_exists(function.rpartition(":")[0] or function)


def find_broken_weights(config: Config) -> Iterator[str]:
    """Models on this machine whose weights cannot be loaded, by the headers of their files."""
    paths = (model_path(config), config.worker.critic.model.model_path, config.worker.reward.model_path)
    for path in filter(None, paths):
        try:
            if (Path(path) / "config.json").exists():  # a path without a model is reported anyway
                check_weight_files(path)
        except ValueError as error:  # it names the file
            yield str(error)


def is_remote(name: str) -> bool:
    """Whether the name can be an id on the hub and is no local path."""
    return HUB_ID.fullmatch(name) is not None and not name.startswith((".", "~")) and not os.path.exists(name)


def check_function_exists(source: str) -> Iterator[str]:
    """Check `file.py` or `package.module` without running its code."""
    if source.endswith(".py") or "/" in source:
        if not Path(source).expanduser().is_file():
            yield f"worker.reward.functions: {source} does not exist"
    elif find_spec(source.partition(".")[0]) is None:
        yield f"worker.reward.functions: there is no module {source}"


def count_saved_parameters(estimated: MemoryEstimate, plan: Plan) -> int:
    """Parameters of the actor in a checkpoint: only the adapters, if there are any."""
    if plan.adapters is None:
        return estimated.parameters
    shards = 1 if plan.split is None else plan.split.parts
    state = (estimated.held | estimated.in_cpu_memory).get("optimizer state", 0)
    return shards * state // (ADAM_STATES * plan.weight_bytes)


def count_checkpoint_bytes(config: Config, parameters: int) -> int:
    return (1 + ADAM_STATES) * parameters * DTYPES[config.worker.actor.fsdp.param_dtype].itemsize


def check_disk(config: Config, parameters: int) -> Iterator[str]:
    """A checkpoint holds weights and optimizer state; in addition to save_limit, there are the best one and the one
    being written."""
    training = config.training
    folder = existing_parent(Path(training.output_dir))
    if not is_writable(folder):
        yield f"training.output_dir: {folder} cannot be written to"
    checkpoint_bytes = count_checkpoint_bytes(config, parameters)
    count = max(1, training.save_limit) + 2
    free = free_disk(folder)
    print(f"  disk at {folder}: {human_size(free)} free; {count} checkpoints of {human_size(checkpoint_bytes)}")
    if free < count * checkpoint_bytes:
        needed = human_size(count * checkpoint_bytes)
        yield f"training.save_limit: {count} checkpoints need {needed} of disk at {folder}"


# -------------------------------------------------------------------------------------------------------------- memory
def memory_report(estimated: MemoryEstimate, device: Device, on_ranks: bool = False) -> str:
    millions, memory = f"{estimated.parameters / 1e6:,.1f} million", "memory of each device" if on_ranks else "memory"
    lines = [f"  {millions} parameters; {memory} at most, at the limits of the configuration:"]
    for title, sizes in {"held": estimated.held, **estimated.phases}.items():
        lines += [f"    {title:<8} {name:<36} {human_size(size):>12}" for name, size in sizes.items()]
        lines.append(f"    {title:<8} {'in all':<36} {human_size(sum(sizes.values())):>12}")
    peak = f"{human_size(estimated.peak_bytes):>12} of {human_size(device.total)} ({device.name})"
    lines.append(f"    {'peak: held and the largest phase':<45} {peak}")
    return "\n".join([*lines, f"    activations are {estimated.method}; all else is counted"])


def cpu_memory_report(config: Config, estimated: MemoryEstimate, checkpoint_bytes: int) -> str:
    """What a machine of the run holds in CPU memory, besides programs and data: a checkpoint is copied there while it
    is written, by all machines together."""
    training = config.training
    parts = {name: training.n_gpus_per_node * nbytes for name, nbytes in estimated.in_cpu_memory.items()}
    parts["a checkpoint while it is written"] = checkpoint_bytes // training.nnodes
    listed = ", ".join(f"{name} {human_size(nbytes)}" for name, nbytes in parts.items())
    return f"  CPU memory of a machine, besides programs and data: {human_size(sum(parts.values()))} ({listed})"


def check_vllm_share(config: Config, estimated: MemoryEstimate, plan: Plan) -> Iterator[str]:
    """The weights must fit into vLLM's share of the device, with some room for keys and values."""
    if plan.vllm is None:
        return
    weights = estimated.parameters * plan.compute_bytes // plan.vllm.tp_size
    if weights >= plan.vllm.nbytes:
        share = f"{config.worker.rollout.gpu_memory_utilization:g} of the device is {human_size(plan.vllm.nbytes)}"
        yield (
            f"worker.rollout.gpu_memory_utilization: {share}, and the weights of vLLM alone take "
            f"{human_size(weights)}; raise it, or worker.rollout.tensor_parallel_size"
        )


def check_memory(
    estimated: MemoryEstimate, device: Device, find_savings: Callable[[], Iterable[tuple[str, int]]]
) -> Iterator[str]:
    """`find_savings` gives settings that help, with the peak they leave. It runs only if the memory is too small, since
    each is an estimate by itself."""
    if estimated.peak_bytes <= device.total:
        return
    held_too_much = estimated.held_bytes > device.total
    what = "what is held all the time" if held_too_much else "the longest prompts and responses"
    savings = [f"{setting}: {human_size(peak)}" for setting, peak in find_savings()]
    advice = "".join(f"\n             {line}" for line in [*savings, "a smaller model, or a larger device"])
    yield f"memory: {what} will not fit into {human_size(device.total)}. What would help, and the peak then:{advice}"
