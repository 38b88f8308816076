"""See where a checkpoint, or a run's newest one, looks while it answers.

mtrl attention CHECKPOINT|RUN [--data FILE] [--samples 8] [--tokens orange,B,-1] [--out DIR] [a.b=c ...]

Writes a report in Markdown: VGR and AEI by layer segment, the tokens that look most and least, and pictures of the
attention over the image. --tokens chooses the tokens to draw, by word or by position (-1 is the last); the default is
the two extremes and the letter of the answer. The last line is JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from mtrl.algorithms.signals import pool_sizes, segment, vgr
from mtrl.commands.load_arguments import (
    OptionParser,
    check_call,
    find_run_and_checkpoint,
    load_evaluation_config,
    whole_number,
)
from mtrl.compose import algorithm
from mtrl.compose.policy import build_generator, build_policy, build_weights, model_path
from mtrl.compose.task_source import validation_sampler
from mtrl.config import Config, ConfigError
from mtrl.config.unsupported import check_supported
from mtrl.models.families import TextEncoder
from mtrl.models.forward import Forward
from mtrl.report.attention_page import AttentionSample, DrawnAttention, make_overview, write_report
from mtrl.report.attention_tables import SHOWN_SEGMENTS
from mtrl.report.heat_map import ImageAttention
from mtrl.rewards.choices import chosen_letter
from mtrl.types import SEGMENTS, VISION_POOL, Needs, Prompt, Rollouts
from mtrl.utils.embedded_models import MODELS
from mtrl.utils.errors import StartError
from mtrl.utils.machine import is_writable

MOST_DRAWN = 8  # most tokens of one response that get a picture
OPTIONS = OptionParser(__doc__, "--data", "--tokens", "--out")
OPTIONS.add_argument("--samples", type=whole_number(), default=8)


def is_of_embedded_task(path: str, config: Config) -> bool:
    """Whether this is an embedded model or a run on its task, which has validation data of its own."""
    if path in MODELS or Path(path).resolve() in MODELS.values():
        return True
    return not config.dataset.train_files and find_run_and_checkpoint(path)[0] is not None


def run(arguments: Sequence[str]) -> int:
    options, path, overrides = OPTIONS.parse_path(arguments, "which model?")
    config = load_evaluation_config(path, overrides, options.data)
    if not config.dataset.val_files and not is_of_embedded_task(path, config):
        raise ConfigError(["dataset.val_files: nothing to answer; name a file (--data F)"])
    checkpoint = Path(model_path(config))
    out = Path(options.out) if options.out else check_call(default_report_dir, Path(path), checkpoint)
    if not is_writable(out):  # better now than after the work
        raise StartError(f"the report cannot be written to {out}; name a directory (--out DIR)")
    words = [word for word in (options.tokens or "").split(",") if word]
    answers = check_call(measure_attention, config, options.samples, words)
    report = check_call(write_report, out, f"Attention of {checkpoint}", answers)
    print(make_overview(answers))
    print(json.dumps({"report": str(report), "samples": len(answers), **mean_vgr(answers)}))
    return 0


def default_report_dir(path: Path, checkpoint: Path) -> Path:
    """A directory in the run that the checkpoint belongs to, else in the working directory."""
    run_dir = next((each for each in (path, path.parent.parent) if (each / "config.yaml").is_file()), Path())
    return run_dir / f"attention_{checkpoint.name}"


def mean_vgr(answers: Sequence[AttentionSample]) -> dict[str, float | None]:
    """Mean VGR by segment, over the responses to an image."""
    means: dict[str, float | None] = {}
    for name in SHOWN_SEGMENTS:
        ratios = torch.stack([vgr(segment(answer.mean_mass, name), answer.sizes) for answer in answers])
        known = ratios[~ratios.isnan()]
        means[f"vgr_{name}"] = round(float(known.mean()), 4) if len(known) else None
    return means


# ---------------------------------------------------------------------------------------------------------- measurement
def measure_attention(config: Config, samples: int, words: Sequence[str]) -> list[AttentionSample]:
    """Sample responses to the first prompts of the validation data and measure their attention; `words`: see
    `choose_tokens`."""
    check_supported(config)
    encoder, policy = build_policy(config)
    if policy.backbone.vision_tower is None:
        raise StartError(f"{model_path(config)} is a text model: there is no image to look at")
    sampling = replace(algorithm.make_validation_sampling(config), n=1)
    answers = []
    weights = build_weights(config, policy)
    with closing(weights), closing(build_generator(config, policy, encoder, weights=weights)) as generator:
        for prompts in iterate_prompts(config, encoder, samples):
            with generator.resident():
                rollouts = generator.generate(prompts, sampling)
            weights.onload()
            for row, prompt in enumerate(prompts):
                letter = chosen_letter(rollouts.text[row], (prompt.task.columns or {}).get(config.dataset.options_key))
                response = rollouts.rows(torch.tensor([row]))
                answers.append(measure_response(policy, encoder, response, letter, words))
    if not any(answer.sizes.all() for answer in answers):
        raise StartError(f"none of the first {len(answers)} prompts has an image or a video; choose other --data")
    return answers


def iterate_prompts(config: Config, encoder: TextEncoder, samples: int) -> Iterator[list[Prompt]]:
    with validation_sampler(config, encoder) as sampler:
        size = min(samples, config.dataset.val_batch_size)
        prompts = (prompt for batch in sampler.one_pass(size) for prompt in batch)
        first = islice(prompts, samples)
        while batch := list(islice(first, size)):
            yield batch


def measure_response(
    policy: Forward, encoder: TextEncoder, rollouts: Rollouts, letter: str | None, words: Sequence[str]
) -> AttentionSample:
    """One response with the attention of its tokens, and maps for those that are drawn."""
    signals, prompt = policy.signals(rollouts, Needs("attention_mass")), rollouts.prompts[0]
    assert signals.attention_mass is not None and signals.prompt_attention_mass is not None
    answer = AttentionSample(
        id=prompt.task.id,
        prompt=prompt.task.text,
        response=rollouts.text[0],
        answer=prompt.task.answer,
        tokens=tuple(encoder.decode_tokens(rollouts.tokens[0, rollouts.mask[0]])),
        mass=signals.attention_mass[0, rollouts.mask[0]],
        prompt_mass=signals.prompt_attention_mass[0],
        sizes=pool_sizes(rollouts.prompts)[0],
        kinds=frozenset(medium.kind for medium in prompt.task.media),
    )
    chosen = choose_tokens(answer, letter, words) if answer.sizes.all() else {}
    if not chosen:
        return answer
    maps = policy.maps(rollouts, list(chosen))
    images = encoder.image_settings
    assert images is not None, "a prompt with an image was encoded"
    seen = replace(prompt, media=tuple(part for medium in prompt.media for part in encoder.pictures(medium)))
    drawn = [
        DrawnAttention(token, why, split_by_image(seen, each, images.factor, images.temporal_patch_size))
        for (token, why), each in zip(chosen.items(), maps, strict=True)
    ]
    return replace(answer, drawn=tuple(drawn))


def split_by_image(
    prompt: Prompt, attention: Tensor, token_side: int, frames_per_patch: int = 2
) -> tuple[ImageAttention, ...]:
    """Split attention [len(SEGMENTS), L] into one map per image, and per first frame of each patch of a clip.
    `token_side`: pixels per token."""
    on_images, begin, maps = attention[:, prompt.token_pool == VISION_POOL], 0, []
    frames = (each for m in prompt.media for each in (m[::frames_per_patch] if m.ndim == 4 else [m]))
    for image in frames:
        rows, columns = image.shape[0] // token_side, image.shape[1] // token_side
        segments = on_images[:, begin : begin + rows * columns].unflatten(1, (rows, columns))
        maps.append(ImageAttention(image, dict(zip(SEGMENTS, segments, strict=True))))
        begin += rows * columns
    return tuple(maps)


def choose_tokens(answer: AttentionSample, letter: str | None, words: Sequence[str]) -> dict[int, str]:
    """Indices of the tokens to draw, with the reason: the requested words, else the extremes and the answer."""
    if words:
        requested = {index: "asked for" for word in words for index in find_token(answer.tokens, word)}
        return dict(list(requested.items())[:MOST_DRAWN])
    ratio = answer.token_vgr()
    if not len(ratio):
        return {}
    chosen = {int(ratio.argmin()): "looks most, the lowest VGR", int(ratio.argmax()): "looks least, the highest VGR"}
    if letter is not None and (indices := find_token(answer.tokens, letter)):
        chosen.setdefault(indices[-1], "the answer")
    return chosen


def find_token(tokens: Sequence[str], word: str) -> list[int]:
    """Indices of the tokens that are the word, apart from spaces and brackets; a number is an index itself, counted
    from the end if negative.

    >>> find_token(["(", " B", ")", "b"], "B"), find_token(["a", "b"], "-1"), find_token(["a"], "7")
    ([1], [1], [])
    """
    if re.fullmatch(r"-?\d+", word):
        index = int(word) + (len(tokens) if word.startswith("-") else 0)
        return [index] if 0 <= index < len(tokens) else []
    return [index for index, token in enumerate(tokens) if re.sub(r"^\W+|\W+$", "", token) == word]
