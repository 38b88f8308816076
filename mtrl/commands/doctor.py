"""`mtrl doctor`: what this machine has, and whether a configuration can run on it. Nothing is downloaded or started,
unless --try asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from mtrl.commands import installed
from mtrl.commands.doctor_trial import trial_problems
from mtrl.commands.installed import Device
from mtrl.commands.load_arguments import take_option
from mtrl.commands.show_rows import row_problems
from mtrl.compose.critic_worker import critic_path
from mtrl.compose.memory_limits import make_plan, sized_by_memory
from mtrl.compose.policy import model_path, unmade
from mtrl.compose.run import configure, unknown_names
from mtrl.compose.task_source import EMBEDDED
from mtrl.compose.unsupported import unbuilt
from mtrl.config import Config, ConfigError, take_file, warnings
from mtrl.data.sources import HUB_ID
from mtrl.memory.estimate import MemoryEstimate, Plan, estimate, sized, smaller
from mtrl.memory.preflight import ADAM_STATES
from mtrl.models.checkpoint_files import check_weight_files
from mtrl.models.families import check_known_family, load_model_config
from mtrl.models.load_model import DTYPES
from mtrl.rewards.builtin_names import is_bare
from mtrl.utils.machine import existing_parent, free_disk, may_write

CANNOT_RUN = 2
TRY = "--try"
GIB = 2**30


def run(arguments: Sequence[str]) -> int:
    """Prints what it finds; 0 when the configuration can run here."""
    trying = TRY in arguments
    print(machine_report())
    size, arguments = take_option(arguments, "--gpu", "say how many GiB it has")
    if trying and size is not None:
        raise ConfigError([f"{TRY}: the trial runs on this machine; leave out --gpu"])
    arguments = [word for word in arguments if word != TRY]
    file, overrides = take_file(arguments)
    config, embedded = configure(file, overrides)
    device = installed.devices()[0] if size is None else another_gpu(size)
    print(f"\nThe run: {'the embedded task' if embedded else file or 'the overrides'}")
    verdict = "It can run here." if size is None else "It can run there, as far as can be seen from here."
    absent = [*missing_files(config)]
    problems = [*unbuilt(config), *unknown_names(config), *missing_features(config), *absent, *broken_weights(config)]
    model_seen = True
    try:
        model = load_model_config(model_path(config), config.worker.actor.model.trust_remote_code)
        check_known_family(model, model_path(config))
        plan = make_plan(config, device.is_gpu)
        found = estimate(model, plan)
        if device.is_gpu and sized_by_memory(config):
            plan, found = sized(model, plan, found, device.total)
    except ValueError as error:  # it names the model
        model_seen = False
        told = f"{str(error).splitlines()[0]}; the memory is not estimated"
        if any(map(of_hub, (model_path(config), critic_path(config), config.worker.reward.model_path or ""))):
            _note(f"{told}, and nothing is downloaded now")
            verdict = "Nothing speaks against it, but the model was not seen."
        else:
            problems.append(told)
    else:
        print(memory_report(found, device, on_ranks=plan.split is not None))
        if tokens := plan.limits.update.tokens:
            print(f"    in passes of at most {tokens:,} tokens")
        problems += [*memory_problems(found, device, partial(smaller, model, plan, found))]
        problems += disk_problems(config, saved_parameters(found, plan) + found.critic_parameters)
    if not absent:
        problems += row_problems(config, model_seen, _note)
    for warning in warnings(config):
        _note(warning)
    if trying and not problems:
        problems += trial_problems(config)
        verdict = "It runs here." if not problems else verdict
    print("\n".join(f"  PROBLEM  {problem}" for problem in problems) or f"  {verdict}")
    return CANNOT_RUN if problems else 0


def another_gpu(size: str) -> Device:
    """One that is not here."""
    if not size.isdecimal() or size == "0":
        raise ConfigError([f"--gpu: {size} is no number of GiB; say --gpu 80"])
    return Device(f"a GPU of {size} GiB", int(size) * GIB, int(size) * GIB, is_gpu=True)


def _note(text: str) -> None:
    print(f"  note     {text}")


# ------------------------------------------------------------------------------------------------------------- machine
def human_size(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


def machine_report() -> str:
    lines = ["This machine", *(f"  {line}" for line in installed.versions())]
    found = installed.devices()
    if reason := installed.why_no_gpu():
        lines.append(f"  no GPU: {reason}")
    lines += [f"  {each.name}: {human_size(each.total)}, {human_size(each.free)} free" for each in found]
    lines += ["", "Optional features"]
    for feature in installed.FEATURES:
        missing = feature.missing()
        told = f"  no    {feature.name}: {feature.install} ({', '.join(missing)} missing)"
        lines.append(told if missing else f"  yes   {feature.name}")
    return "\n".join(lines)


def missing_features(config: Config) -> Iterator[str]:
    for feature in installed.FEATURES:
        if feature.wanted(config) and feature.missing():
            yield f"the configuration asks for {feature.name}: {feature.install}"


# --------------------------------------------------------------------------------------------------------------- files
def missing_files(config: Config) -> Iterator[str]:
    data, model = config.dataset, config.worker.actor.model
    if told := unmade(config):
        yield told
    for key, names in (("train_files", data.train_files), ("val_files", data.val_files)):
        for name in filter(None, map(str.strip, names.split(","))):
            path = name if os.path.exists(name) else name.rpartition("@")[0] or name
            elsewhere = name.startswith(EMBEDDED) or (of_hub(path) and not Path(path).suffix)
            if not (elsewhere or os.path.exists(os.path.expanduser(path))):
                yield f"dataset.{key}: {name} does not exist"
    named = {
        "dataset.image_dir": data.image_dir,
        "dataset.format_prompt": data.format_prompt,
        "worker.actor.model.tokenizer_path": model.tokenizer_path,
        "training.load_checkpoint_path": config.training.load_checkpoint_path,
    }
    for key, place in named.items():
        if place is None or (key.endswith("tokenizer_path") and of_hub(place)):
            continue
        if not os.path.exists(os.path.expanduser(place)):
            yield f"{key}: {place} does not exist"
    for function in config.reward_functions:
        if not is_bare(function) and not function.startswith("python:"):
            yield from missing_function(function.rpartition(":")[0] or function)


def broken_weights(config: Config) -> Iterator[str]:
    """Models on this machine whose weights cannot be loaded; only where they say they stand is read."""
    for path in filter(
        None, (model_path(config), config.worker.critic.model.model_path, config.worker.reward.model_path)
    ):
        try:
            if (Path(path) / "config.json").exists():  # else it is no model at all, which is said anyway
                check_weight_files(path)
        except ValueError as error:  # it names the file
            yield str(error)


def of_hub(name: str) -> bool:
    """It may be there, though it is not here."""
    return HUB_ID.fullmatch(name) is not None and not name.startswith((".", "~")) and not os.path.exists(name)


def missing_function(place: str) -> Iterator[str]:
    """`file.py` or `package.module`; the code itself is not run."""
    if place.endswith(".py") or "/" in place:
        if not Path(place).expanduser().is_file():
            yield f"worker.reward.functions: {place} does not exist"
    elif find_spec(place.partition(".")[0]) is None:
        yield f"worker.reward.functions: there is no module {place}"


def saved_parameters(found: MemoryEstimate, plan: Plan) -> int:
    """How many of the actor's a checkpoint holds: of adapters those alone."""
    if plan.adapters is None:
        return found.parameters
    parts = 1 if plan.split is None else plan.split.parts
    return parts * found.held.get("optimizer state", 0) // (ADAM_STATES * plan.weight_bytes)


def disk_problems(config: Config, parameters: int) -> Iterator[str]:
    """A checkpoint holds weights and optimizer state; besides the kept ones, one is the best and one is written."""
    training, fsdp = config.training, config.worker.actor.fsdp
    place = existing_parent(Path(training.output_dir))
    if not may_write(place):
        yield f"training.output_dir: {place} cannot be written to"
    checkpoint = 3 * parameters * DTYPES[fsdp.param_dtype].itemsize
    kept = max(1, training.save_limit) + 2
    free = free_disk(place)
    print(f"  disk at {place}: {human_size(free)} free; {kept} checkpoints of {human_size(checkpoint)}")
    if free < kept * checkpoint:
        yield f"training.save_limit: {kept} checkpoints need {human_size(kept * checkpoint)} of disk at {place}"


# -------------------------------------------------------------------------------------------------------------- memory
def memory_report(found: MemoryEstimate, device: Device, on_ranks: bool = False) -> str:
    millions, whose = f"{found.parameters / 1e6:,.1f} million", "memory of each device" if on_ranks else "memory"
    lines = [f"  {millions} parameters; {whose} at most, at the limits of the configuration:"]
    for title, parts in {"held": found.held, **found.phases}.items():
        lines += [f"    {title:<8} {name:<36} {human_size(part):>12}" for name, part in parts.items()]
        lines.append(f"    {title:<8} {'in all':<36} {human_size(sum(parts.values())):>12}")
    peak = f"{human_size(found.peak_bytes):>12} of {human_size(device.total)} ({device.name})"
    lines.append(f"    {'peak: held and the largest phase':<45} {peak}")
    return "\n".join([*lines, f"    activations are {found.way}; all else is counted"])


def memory_problems(
    found: MemoryEstimate, device: Device, ways: Callable[[], Iterable[tuple[str, int]]]
) -> Iterator[str]:
    """`ways` that would help are asked for where it does not fit: each is an estimate of its own."""
    if found.peak_bytes <= device.total:
        return
    when = "what is held all the time" if found.held_bytes > device.total else "the longest prompts and responses"
    told = [*(f"{way}: {human_size(peak)}" for way, peak in ways()), "a smaller model, or a larger device"]
    advice = "".join(f"\n             {way}" for way in told)
    yield f"memory: {when} will not fit into {human_size(device.total)}. What would help, and the peak then:{advice}"
