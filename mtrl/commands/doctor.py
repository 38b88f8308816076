"""`mtrl doctor`: what this machine has, and whether a configuration can run on it. Nothing is downloaded or started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from mtrl.build import recipe
from mtrl.build.data import EMBEDDED
from mtrl.build.model import model_path
from mtrl.build.run import configure, unknown_names
from mtrl.build.unbuilt import unbuilt
from mtrl.commands import installed
from mtrl.commands.installed import Device
from mtrl.commands.memory import Estimate, Plan, estimate
from mtrl.config import Config, take_file, warnings
from mtrl.data.sources import HUB_ID
from mtrl.machine import existing_parent, free_disk, may_write
from mtrl.models.size import ModelSize, judge_parameters, size_of
from mtrl.rewards.registry import is_bare
from mtrl.workers.micro_batches import MicroBatching

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
CANNOT_RUN = 2
GIB = 2**30


def run(words: Sequence[str]) -> int:
    """Prints what it finds; 0 when the configuration can run here."""
    print(machine_report())
    file, overrides = take_file(words)
    config, embedded = configure(file, overrides)
    device = installed.devices()[0]
    print(f"\nThe run: {'the embedded task' if embedded else file or 'the overrides'}")
    verdict = "It can run here."
    problems = [*unbuilt(config), *unknown_names(config), *missing_features(config), *missing_files(config)]
    try:
        size, plan = size_of(model_path(config), trusts(config)), plan_of(config, device.is_gpu)
    except ValueError as error:  # it names the model
        told = f"{str(error).splitlines()[0]}; the memory is not estimated"
        if any(map(of_hub, (model_path(config), config.worker.reward.model_path or ""))):
            _note(f"{told}, and nothing is downloaded now")
            verdict = "Nothing speaks against it, but the model was not seen."
        else:
            problems.append(told)
    else:
        print(memory_report(size, plan, device))
        problems += [*memory_problems(size, plan, device), *disk_problems(config, size)]
    for warning in warnings(config):
        _note(warning)
    print("\n".join(f"  PROBLEM  {problem}" for problem in problems) or f"  {verdict}")
    return CANNOT_RUN if problems else 0


def _note(text: str) -> None:
    print(f"  note     {text}")


# ------------------------------------------------------------------------------------------------------------- machine
def shown(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


def machine_report() -> str:
    lines = ["This machine", *(f"  {line}" for line in installed.versions())]
    found = installed.devices()
    if reason := installed.why_no_gpu():
        lines.append(f"  no GPU: {reason}")
    lines += [f"  {each.name}: {shown(each.total)}, {shown(each.free)} free" for each in found]
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


def disk_problems(config: Config, size: ModelSize) -> Iterator[str]:
    """A checkpoint holds the weights and Adam's moments; besides the kept ones, one is the best and one is written."""
    training, fsdp = config.training, config.worker.actor.fsdp
    place = existing_parent(Path(training.output_dir))
    if not may_write(place):
        yield f"training.output_dir: {place} cannot be written to"
    checkpoint = 3 * size.parameters * BYTES[fsdp.param_dtype]
    kept = max(1, training.save_limit) + 2
    free = free_disk(place)
    print(f"  disk at {place}: {shown(free)} free; {kept} checkpoints of {shown(checkpoint)}")
    if free < kept * checkpoint:
        yield f"training.save_limit: {kept} checkpoints need {shown(kept * checkpoint)} of disk at {place}"


# -------------------------------------------------------------------------------------------------------------- memory
def plan_of(config: Config, on_gpu: bool) -> Plan:
    data, actor, reward = config.dataset, config.worker.actor, config.worker.reward
    compiled = on_gpu and actor.use_torch_compile
    own_attention = actor.model.attn_implementation in ("auto", "sdpa")
    return Plan(
        weight_bytes=BYTES[actor.fsdp.param_dtype],
        compute_bytes=BYTES[actor.fsdp.mixed_precision_dtype],
        reference=recipe.divergence_of(config) is not None,
        train_vision=not actor.model.freeze_vision_tower,
        checkpointing=actor.model.enable_gradient_checkpointing,
        prompts_per_step=data.rollout_batch_size,
        responses_per_prompt=config.rollouts_per_prompt,
        prompt_tokens=data.max_prompt_length,
        response_tokens=config.max_new_tokens,
        max_pixels=data.max_pixels,
        update=recipe.update_batching(config, on_gpu, actor.share_prefix),
        probe=recipe.probe_batching(config, on_gpu, actor.share_prefix),
        views=recipe.recipe_of(config, 1).needs.views,
        on_gpu=on_gpu,
        packed=compiled and actor.padding_free and own_attention,
        compiled=compiled,
        judge_parameters=judge_parameters(reward.model_path, trusts(config)) if reward.model_path else 0,
    )


def trusts(config: Config) -> bool:
    return config.worker.actor.model.trust_remote_code


def memory_report(size: ModelSize, plan: Plan, device: Device) -> str:
    found = estimate(size, plan)
    lines = [f"  {size.parameters / 1e6:,.1f} million parameters; memory at most, at the limits of the configuration:"]
    for title, parts in {"held": found.held, **found.phases}.items():
        lines += [f"    {title:<8} {name:<36} {shown(part):>12}" for name, part in parts.items()]
        lines.append(f"    {title:<8} {'in all':<36} {shown(sum(parts.values())):>12}")
    peak = f"{shown(found.peak_bytes):>12} of {shown(device.total)} ({device.name})"
    return "\n".join([*lines, f"    {'peak: held and the largest phase':<45} {peak}"])


def memory_problems(size: ModelSize, plan: Plan, device: Device) -> Iterator[str]:
    found = estimate(size, plan)
    if found.peak_bytes <= device.total:
        return
    when = "what is held all the time" if found.held_bytes > device.total else "the longest prompts and responses"
    ways = [f"{way}: {shown(peak)}" for way, peak in smaller(size, plan, found)]
    advice = "".join(f"\n             {way}" for way in [*ways, "a smaller model, or a larger device"])
    yield f"memory: {when} will not fit into {shown(device.total)}. What would help, and the peak then:{advice}"


def smaller(size: ModelSize, plan: Plan, found: Estimate) -> Iterator[tuple[str, int]]:
    """Changes that lower the peak, the most helpful first."""
    fewer_prompts = max(1, plan.prompts_per_step // 4)
    half_pass = max(plan.prompt_tokens + plan.response_tokens, plan.pass_tokens(plan.update) // 2)
    halved = MicroBatching(half_pass, share_prefix=plan.update.share_prefix)
    changes = {
        "worker.actor.fsdp.param_dtype=bf16": replace(plan, weight_bytes=2),
        "optimization.disable_divergence=true (no reference)": replace(plan, reference=False),
        "worker.actor.model.freeze_vision_tower=true": replace(plan, train_vision=False),
        "worker.actor.model.enable_gradient_checkpointing=true": replace(plan, checkpointing=True),
        f"worker.actor.tokens_per_micro_batch={half_pass}": replace(plan, update=halved, probe=halved),
        f"dataset.max_pixels={plan.max_pixels // 4}": replace(plan, max_pixels=plan.max_pixels // 4),
        f"dataset.max_prompt_length={plan.prompt_tokens // 2}": replace(plan, prompt_tokens=plan.prompt_tokens // 2),
        f"dataset.max_response_length={plan.response_tokens // 2}": replace(
            plan, response_tokens=plan.response_tokens // 2
        ),
        f"dataset.rollout_batch_size={fewer_prompts}": replace(plan, prompts_per_step=fewer_prompts),
    }
    peaks = {way: estimate(size, changed).peak_bytes for way, changed in changes.items()}
    worth = [way for way, peak in peaks.items() if peak < 0.98 * found.peak_bytes]
    return ((way, peaks[way]) for way in sorted(worth, key=peaks.__getitem__))
