"""The README's picture: two answers to one question, and how much each of their tokens depends on the image.

    python -m benchmarks.token_picture --out docs/tokens.png

One step of the embedded model with token gradient filtering. A reward function reads S as any user's could, and the
perturbed image is the very one that S was measured with. Nothing in the picture is made up; it takes 20 seconds.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from transformers import AutoTokenizer

import mtrl
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.models.perturb import PERTURBATIONS

KEPT_SHARE = 0.2
WIDTH, MARGIN, GAP = 1720, 56, 12  # pixels, drawn for a display at half that size
SIDE, HEAD, BAR, PILL = 264, 84, 140, 58  # an image, the text below it, the highest bar, a token
PAPER, EDGE, INK, DIM, PALE = "#fcfcfa", "#d4d4cf", "#22262b", "#6a717a", "#eeeeea"
GOOD, BAD = ("#1f7a4d", "#d3efdf"), ("#b3362b", "#f8dcd8")  # bar and background of a token that is trained on


@dataclass(frozen=True)
class Answer:
    """One response with its tokens, S of each, and its advantage within the group."""

    tokens: tuple[str, ...]
    dependency: tuple[float, ...]
    reward: float
    advantage: float

    def kept(self) -> set[int]:
        """The tokens that filtering keeps: the ceil(share * n) with the highest S; ties go to the earlier token."""
        count = max(1, math.ceil(KEPT_SHARE * len(self.tokens) - 1e-6))
        return set(sorted(range(len(self.tokens)), key=lambda t: -self.dependency[t])[:count])


@dataclass(frozen=True)
class Scene:
    """One question, the two images that S compares, and a right and a wrong answer."""

    question: str
    image: Image.Image
    perturbed: Image.Image
    answers: tuple[Answer, Answer]


def watch_one_step() -> tuple[list[dict[str, Any]], dict[bytes, np.ndarray]]:
    """Every response of a step as a reward function sees it, and the perturbed view of each image."""
    samples: list[dict[str, Any]] = []
    views: dict[bytes, np.ndarray] = {}
    blacken = PERTURBATIONS["random_patch_blackening"]

    def remembered(clip: np.ndarray, random: np.random.Generator, settings: Any) -> np.ndarray:
        return views.setdefault(clip.tobytes(), blacken(clip, random, settings))

    def watch(data: dict[str, Any], signals: dict[str, Any]) -> None:
        if "dependency" in signals:  # validation does not measure it
            samples.append({**data, "S": signals["dependency"]})

    PERTURBATIONS["remembered"] = remembered
    with tempfile.TemporaryDirectory() as scratch:
        mtrl.Trainer(
            rewards=["accuracy", watch],
            max_steps=1,
            output_dir=scratch,
            perturbation="remembered",
            top_p_perception_tokens=KEPT_SHARE,
        ).train()
    return samples, views


def choose(samples: Sequence[dict[str, Any]], views: dict[bytes, np.ndarray]) -> Scene:
    """The first question about a colour with a right answer that depends on the image and a wrong one from habit."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    groups: dict[str, list[dict[str, Any]]] = {}
    for each in samples:
        groups.setdefault(each["prompt"] + str(each["images"][0].tobytes()), []).append(each)
    for group in groups.values():
        rewards = [float(f"<answer>{each['ground_truth']}</answer>" in each["response"]) for each in group]
        best = max(zip(rewards, group, strict=True), key=lambda pair: (pair[0], max(pair[1]["S"])))[1]
        worst = next((each for reward, each in zip(rewards, group, strict=True) if not reward), None)
        if group[0]["kind"] != "colour" or worst is None or not any(rewards) or max(best["S"]) < 1:
            continue

        def answer(each: dict[str, Any], reward: float, rewards: list[float] = rewards) -> Answer:
            tokens = tuple(tokenizer.decode([token]).strip() for token in each["response_token_ids"])
            advantage = (reward - mean(rewards)) / (stdev(rewards) + 1e-6)
            return Answer(tokens, tuple(each["S"]), reward, advantage)

        image = best["images"][0]
        view = views[np.asarray(image)[None].tobytes()][0]
        question = best["prompt"].replace("<image>", "")
        return Scene(question, image, Image.fromarray(view), (answer(best, 1.0), answer(worst, 0.0)))
    raise SystemExit("no such question in this step")


def draw(scene: Scene, path: Path) -> None:
    """Draws the picture on a light background, so that it is readable on a page of any colour."""
    highest = max(max(answer.dependency) for answer in scene.answers)
    bars = [max(36, round(BAR * max(answer.dependency) / highest)) for answer in scene.answers]
    height = MARGIN + SIDE + HEAD + sum(row_height(bar) for bar in bars)
    canvas = Image.new("RGBA", (WIDTH, height), (0, 0, 0, 0))
    pen = ImageDraw.Draw(canvas)
    pen.rounded_rectangle((0, 0, WIDTH - 1, height - 1), 28, fill=PAPER, outline=EDGE, width=2)
    draw_head(canvas, pen, scene)
    top = MARGIN + SIDE + HEAD
    for answer, bar in zip(scene.answers, bars, strict=True):
        draw_answer(pen, answer, top, bar, BAR / highest)
        top += row_height(bar)
    canvas.save(path, optimize=True)


def draw_head(canvas: Image.Image, pen: ImageDraw.ImageDraw, scene: Scene) -> None:
    left = MARGIN
    for picture, caption in ((scene.image, "the image"), (scene.perturbed, "perturbed: squares black")):
        canvas.paste(picture.resize((SIDE, SIDE), Image.Resampling.NEAREST), (left, MARGIN))
        pen.rectangle((left, MARGIN, left + SIDE, MARGIN + SIDE), outline=EDGE, width=2)
        pen.text((left + SIDE / 2, MARGIN + SIDE + 14), caption, fill=DIM, font=font(24), anchor="ma")
        left += SIDE + 32
    first, *options = scene.question.strip().splitlines()
    pen.text((left + 24, MARGIN - 6), first, fill=INK, font=font(44))
    pen.text((left + 24, MARGIN + 58), "     ".join(options), fill=DIM, font=font(30))
    notes = (
        "S   how much a token's probability changes without parts of the image",
        f"kept   the {KEPT_SHARE:.0%} of the tokens with the highest S: only they learn",
        "A   the advantage of an answer over the others to this question",
    )
    for line, note in enumerate(notes):
        name, meaning = note.split("   ")
        pen.text((left + 24, MARGIN + 138 + 44 * line), name, fill=INK, font=font(28))
        pen.text((left + 104, MARGIN + 138 + 44 * line), meaning, fill=DIM, font=font(28))


def row_height(bar: int) -> int:
    return 80 + bar + 12 + PILL + 40


def draw_answer(pen: ImageDraw.ImageDraw, answer: Answer, top: int, room: int, scale: float) -> None:
    """Bars of S over the tokens; kept tokens have a coloured background, green if A > 0 and red if A < 0."""
    strong, ground = GOOD if answer.advantage > 0 else BAD
    verdict = "right" if answer.reward else "wrong"
    pen.line((MARGIN, top, WIDTH - MARGIN, top), fill=EDGE, width=2)
    pen.text((MARGIN, top + 20), f"{verdict}, A = {answer.advantage:+.2f}", fill=strong, font=font(30))
    base, left, kept = top + 80 + room, float(MARGIN), answer.kept()
    widths = [max(44.0, font(28).getlength(token) + 24) for token in answer.tokens]
    for place, (token, value, width) in enumerate(zip(answer.tokens, answer.dependency, widths, strict=True)):
        learns, middle = place in kept, left + width / 2
        pen.rounded_rectangle((left, base + 12, left + width, base + 12 + PILL), 12, fill=ground if learns else PALE)
        pen.text((middle, base + 12 + PILL / 2), token, fill=INK if learns else DIM, font=font(28), anchor="mm")
        bar = max(3.0, scale * value)
        pen.rectangle((middle - 16, base - bar, middle + 16, base), fill=strong if learns else EDGE)
        if learns:
            pen.text((middle, base - bar - 8), rounded(value), fill=strong, font=font(24), anchor="ms")
        left += width + GAP


def rounded(value: float) -> str:
    return f"{value:.2f}" if value >= 0.005 else f"{value:.0e}".replace("e-0", "e-") if value else "0"


def font(size: int) -> Any:
    return ImageFont.load_default(size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/tokens.png"))
    draw(choose(*watch_one_step()), parser.parse_args().out)


if __name__ == "__main__":
    main()
