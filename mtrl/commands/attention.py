"""`mtrl attention`: where a checkpoint looks while it answers, without training it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from mtrl.algorithms.signals import pool_sizes, segment, vgr
from mtrl.commands.load_arguments import evaluation_config, started, take_option, take_path_and_data
from mtrl.compose import algorithm
from mtrl.compose.policy import build_generator, build_policy, model_path
from mtrl.compose.task_source import validation_sampler
from mtrl.compose.unsupported import check_supported
from mtrl.config import Config, ConfigError
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.models.families import TextEncoder
from mtrl.models.forward import Forward
from mtrl.report.attention_page import Answered, DrawnAttention, overview, write_report
from mtrl.report.heat_map import ImageAttention
from mtrl.report.markdown_pages import SHOWN_SEGMENTS
from mtrl.rewards.choices import chosen_letter
from mtrl.types import SEGMENTS, VISION_POOL, Needs, Prompt, Rollouts
from mtrl.utils.errors import StartError
from mtrl.utils.machine import may_write

SAMPLES = 8
MOST_DRAWN = 8  # most tokens of one response that get a picture


def run(arguments: Sequence[str]) -> int:
    options, rest = AttentionOptions.take(arguments)
    question = "which model? mtrl attention CHECKPOINT|RUN [--data F] [--samples 8] [--tokens ...] [--out DIR] [a.b=c]"
    path, data, overrides = take_path_and_data(rest, question)
    config = evaluation_config(path, [*overrides, *([f"dataset.val_files={data}"] if data else [])])
    checkpoint = Path(model_path(config))
    place = options.out or started(place_for, Path(path), checkpoint)
    if not may_write(place):  # an error is better told before the work than after it
        raise StartError(f"the report cannot be written to {place}; name a directory (--out DIR)")
    answers = started(look, config, options)
    report = started(write_report, place, f"Attention of {checkpoint}", answers)
    print(overview(answers))
    print(json.dumps({"report": str(report), "samples": len(answers), **summary(answers)}))
    return 0


@dataclass(frozen=True)
class AttentionOptions:
    samples: int = SAMPLES
    tokens: tuple[str, ...] = ()  # tokens to draw, by word or place; none given: the extremes and the answer
    out: Path | None = None

    @classmethod
    def take(cls, arguments: Sequence[str]) -> tuple[AttentionOptions, list[str]]:
        samples, rest = take_option(arguments, "--samples", "how many responses?")
        tokens, rest = take_option(rest, "--tokens", "arguments or places, with commas: orange,B,-1")
        out, rest = take_option(rest, "--out", "name a directory")
        if samples is not None and not (samples.isdecimal() and int(samples)):
            raise ConfigError([f"--samples: {samples}; give a number above 0"])
        chosen = tuple(word for word in (tokens or "").split(",") if word)
        return cls(int(samples or SAMPLES), chosen, None if out is None else Path(out)), rest


def place_for(asked: Path, checkpoint: Path) -> Path:
    """Where the report goes: into the run that the checkpoint belongs to, else into the working directory."""
    run = next((each for each in (asked, asked.parent.parent) if (each / "config.yaml").is_file()), Path())
    return run / f"attention_{checkpoint.name}"


def summary(answers: Sequence[Answered]) -> dict[str, float | None]:
    """Mean VGR by segment, over the responses to an image."""
    found: dict[str, float | None] = {}
    for name in SHOWN_SEGMENTS:
        ratios = torch.stack([vgr(segment(answer.mean_mass, name), answer.sizes) for answer in answers])
        known = ratios[~ratios.isnan()]
        found[f"vgr_{name}"] = round(float(known.mean()), 4) if len(known) else None
    return found


# -------------------------------------------------------------------------------------------------------------- looking
def look(config: Config, options: AttentionOptions) -> list[Answered]:
    """Responses to the first prompts of the validation data, and where they looked."""
    check_supported(config)
    encoder, policy = build_policy(config)
    if policy.backbone.vision_tower is None:
        raise StartError(f"{model_path(config)} is a text model: there is no image to look at")
    if not config.dataset.val_files and config.worker.actor.model.model_path != str(MODEL_DIRECTORY):
        raise ConfigError(["dataset.val_files: nothing to answer; name a file (--data F)"])
    sampling = replace(algorithm.validation_sampling(config), n=1)
    answers = []
    with closing(build_generator(config, policy, encoder)) as generator:
        for prompts in batches(config, encoder, options.samples):
            with generator.resident():
                rollouts = generator.generate(prompts, sampling)
            for row, prompt in enumerate(prompts):
                letter = chosen_letter(rollouts.text[row], (prompt.task.columns or {}).get(config.dataset.options_key))
                answers.append(answered(policy, encoder, rollouts.rows(torch.tensor([row])), letter, options.tokens))
    if not any(answer.sizes.all() for answer in answers):
        raise StartError(f"none of the first {len(answers)} prompts has an image; choose other --data")
    return answers


def batches(config: Config, encoder: TextEncoder, samples: int) -> Iterator[list[Prompt]]:
    with validation_sampler(config, encoder) as sampler:
        size = min(samples, config.dataset.val_batch_size)
        prompts = (prompt for batch in sampler.one_pass(size) for prompt in batch)
        first = islice(prompts, samples)
        while batch := list(islice(first, size)):
            yield batch


def answered(
    policy: Forward, encoder: TextEncoder, rollouts: Rollouts, letter: str | None, wanted: Sequence[str]
) -> Answered:
    """One response with the attention of its tokens, and maps for those that are drawn."""
    signals, prompt = policy.signals(rollouts, Needs("attention_mass")), rollouts.prompts[0]
    assert signals.attention_mass is not None and signals.prompt_attention_mass is not None
    answer = Answered(
        id=prompt.task.id,
        prompt=prompt.task.text,
        response=rollouts.text[0],
        answer=prompt.task.answer,
        tokens=tuple(encoder.decode_tokens(rollouts.tokens[0, rollouts.mask[0]])),
        mass=signals.attention_mass[0, rollouts.mask[0]],
        prompt_mass=signals.prompt_attention_mass[0],
        sizes=pool_sizes(rollouts.prompts)[0],
    )
    chosen = chosen_tokens(answer, letter, wanted) if answer.sizes.all() else {}
    if not chosen:
        return answer
    maps = policy.maps(rollouts, list(chosen))
    images = encoder.image_settings
    assert images is not None, "a prompt with an image was encoded"
    drawn = [
        DrawnAttention(token, why, prompt_images(prompt, each, images.factor, images.temporal_patch_size))
        for (token, why), each in zip(chosen.items(), maps, strict=True)
    ]
    return replace(answer, drawn=tuple(drawn))


def prompt_images(prompt: Prompt, attention: Tensor, side: int, deep: int = 2) -> tuple[ImageAttention, ...]:
    """The attention [len(SEGMENTS), L] cut into images, and into every first of the `deep` frames that are a patch of a
    clip; `side`: pixels of a token."""
    on_images, begin, found = attention[:, prompt.token_pool == VISION_POOL], 0, []
    for image in (frame for medium in prompt.media for frame in (medium[::deep] if medium.ndim == 4 else [medium])):
        rows, columns = image.shape[0] // side, image.shape[1] // side
        part = on_images[:, begin : begin + rows * columns].unflatten(1, (rows, columns))
        found.append(ImageAttention(image, dict(zip(SEGMENTS, part, strict=True))))
        begin += rows * columns
    return tuple(found)


def chosen_tokens(answer: Answered, letter: str | None, wanted: Sequence[str]) -> dict[int, str]:
    """The places of the tokens to draw, and why."""
    if wanted:
        found = {place: "asked for" for word in wanted for place in token_positions(answer.tokens, word)}
        return dict(list(found.items())[:MOST_DRAWN])
    ratio = answer.token_vgr()
    if not len(ratio):
        return {}
    chosen = {int(ratio.argmin()): "looks most, the lowest VGR", int(ratio.argmax()): "looks least, the highest VGR"}
    if letter is not None and (places := token_positions(answer.tokens, letter)):
        chosen.setdefault(places[-1], "the answer")
    return chosen


def token_positions(tokens: Sequence[str], word: str) -> list[int]:
    """Where a word stands, by itself but for space and brackets; a number is a place, from the end where negative.

    >>> places_of(["(", " B", ")", "b"], "B"), places_of(["a", "b"], "-1"), places_of(["a"], "7")
    ([1], [1], [])
    """
    if re.fullmatch(r"-?\d+", word):
        place = int(word) + (len(tokens) if word.startswith("-") else 0)
        return [place] if 0 <= place < len(tokens) else []
    return [place for place, token in enumerate(tokens) if re.sub(r"^\W+|\W+$", "", token) == word]
