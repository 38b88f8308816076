"""The record of a run, for `mtrl view`: some responses of each step with all that is known of each of their tokens, and
the images as the model saw them. It only looks: no signal is measured for its sake, so that no number of a run depends
on it. It is written in a thread of its own (see background.py)."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mtrl.algorithms.signals import TEXT, VISION, pool_sizes
from mtrl.protocols import Tracker
from mtrl.tracking.background import Background
from mtrl.tracking.blocks import BlockWriter
from mtrl.tracking.preview import DecodeTokens
from mtrl.tracking.streams import MAP_SCALE, MAPS, as_kept, pack_response
from mtrl.types import SEGMENTS, AttentionMap, Experience, Prompt
from mtrl.utils.record_rows import first_rows

SHOWN = SEGMENTS[:4]  # early, middle, late, all: the layers that token weights read are among them
HEAD_CHARS = 120  # of a response, for lists
LOSSLESS_PIXELS = 256 * 256  # a larger image is kept as JPEG, a tenth of the size and nothing to see of it
FRAMES = 4  # of a clip, side by side
REPLACEMENT = "\ufffd"  # what a decoder makes of a part of a character

Grid = tuple[int, int, int, list[int]]  # image tokens in time, height and width; at which times the frames shown stand
Perturb = Callable[[Prompt, int], Sequence[np.ndarray]]
DecodeText = Callable[[Sequence[int]], str]


class RolloutRecord(Tracker):
    """A tracker. `per_step`: how many responses of a step are kept (-1: all), whole groups first; `perturb` makes the
    other view of a prompt's images, as it was for the probes of a step; `token_size`: frames and pixels a side of what
    becomes one image token."""

    def __init__(
        self,
        directory: Path,
        decode: DecodeTokens,
        decode_text: DecodeText,
        perturb: Perturb,
        *,
        attempt: int = 1,
        per_step: int = 64,
        limit_bytes: int = 2**30,
        token_size: tuple[int, int] = (2, 28),
    ) -> None:
        self.token_size = token_size
        self.writer = BlockWriter(directory, limit_bytes)
        self.pieces = TokenPieces(decode, decode_text)
        self.perturb, self.attempt, self.per_step = perturb, attempt, per_step
        self._background = Background("record of the rollouts")

    def rollouts(self, step: int, experience: Experience) -> None:
        if len(experience) and self.per_step:  # a copy of these rows alone: the step itself must not wait in memory
            self._background.submit(partial(self._write, step, first_rows(experience, self.per_step)))

    def close(self) -> None:
        self._background.close()

    def _write(self, step: int, it: Experience) -> None:
        images: dict[str, Callable[[], bytes]] = {}
        table = {
            "step": step,
            "attempt": self.attempt,
            "time": round(time.time(), 3),
            "segments": SHOWN,
            "prompts": self._prompts(step, it, images),
            "rollouts": response_columns(it),
        }
        streams = {name: as_kept(name, values.numpy()) for name, values in token_streams(it).items()}
        lengths = it.rollouts.mask.sum(1).tolist()
        maps = it.signals.attention_maps or (None,) * len(it)
        responses = []
        for row, (text, length, looks) in enumerate(zip(it.rollouts.text, lengths, maps, strict=True)):
            own = {name: values[row, :length] for name, values in streams.items()} | map_streams(looks)
            responses.append(pack_response(text, self.pieces(own["ids"].tolist()), own))
        self.writer.append(step, self.attempt, table, responses, images)

    def _prompts(self, step: int, it: Experience, images: dict[str, Callable[[], bytes]]) -> list[dict[str, Any]]:
        """What was asked. The other view is that of this step, so that it is left out for groups of earlier ones."""
        rollouts, looked_twice = (
            it.rollouts,
            it.signals.dependency is not None or it.signals.perturbed_logprobs is not None,
        )
        versions, sizes = rollouts.version, pool_sizes(rollouts.prompts).tolist()
        rows = []
        for place, prompt in enumerate(rollouts.prompts):
            fresh = bool((versions[rollouts.group == place] == versions.max()).all())
            views = self.perturb(prompt, step - 1) if looked_twice and fresh and prompt.media else ()
            task = prompt.task
            answer = None if task.answer is None else str(task.answer)
            row = {"id": task.id, "text": task.text, "answer": answer, "pools": sizes[place]}
            row |= {"images": [add_image(images, medium) for medium in prompt.media]}
            if it.signals.attention_maps is not None:
                row |= {"grids": [image_grid(medium, *self.token_size) for medium in prompt.media]}
            rows.append(row | {"perturbed": [add_image(images, view) for view in views]})
        return rows


class TokenPieces:
    """The text of each token, remembered: a response repeats few of them. Tokens that are only a part of a character
    stand together; the last of them carries the text."""

    def __init__(self, decode: DecodeTokens, decode_text: DecodeText) -> None:
        self.decode, self.decode_text = decode, decode_text
        self._known: dict[int, str] = {}
        self._partial: set[int] = set()  # whose text is no whole character

    def __call__(self, ids: Sequence[int]) -> list[str]:
        new = sorted(i for i in set(ids) if i not in self._known)  # `-` would walk over all that is known
        self._known.update(zip(new, self.decode(new), strict=True))
        self._partial.update(i for i in new if REPLACEMENT in self._known[i])
        texts = [self._known[i] for i in ids]
        if self._partial.isdisjoint(ids):
            return texts
        start: int | None = None
        for place, text in enumerate([*texts, ""]):
            if REPLACEMENT in text:
                start = place if start is None else start
            elif start is not None:
                texts[start:place] = [""] * (place - 1 - start) + [self.decode_text(ids[start:place])]
                start = None
        return texts


# -------------------------------------------------------------------------------------------------------------- values
def token_streams(it: Experience) -> dict[str, Tensor]:
    """What is known of each token, [N, T] by name; `mass` is [N, T, segments, 2], text before vision."""
    signals, credit = it.signals, it.credit
    found: dict[str, Tensor | None] = {
        "ids": it.rollouts.tokens,
        "behaviour": it.rollouts.rollout_logprobs,
        "old": signals.old_logprobs,
        "perturbed": signals.perturbed_logprobs,
        "reference": signals.ref_logprobs,
        "dependency": signals.dependency,
        "entropy": signals.entropy,
        "values": signals.values,
        "group_advantage": it.advantage,
        "mass": None if signals.attention_mass is None else signals.attention_mass[:, :, : len(SHOWN)],
    }
    if credit is not None:
        weights = torch.ones_like(credit.advantage) if credit.weights is None else credit.weights
        found |= {
            "advantage": credit.advantage,
            "mask": credit.keep_mask,
            "weight": credit.response_weight[:, None] * weights,
        }
    return {name: values for name, values in found.items() if values is not None}


def map_streams(it: AttentionMap | None) -> dict[str, np.ndarray]:
    return {} if it is None else {MAPS: it.levels.numpy(), MAP_SCALE: it.scale.numpy()}


def response_columns(it: Experience) -> dict[str, Any]:
    """What lists show, sort and filter by: a value for each response."""
    rollouts, rewards, mask = it.rollouts, it.rewards, it.rollouts.mask
    streams = token_streams(it)
    lengths = mask.sum(1)

    def mean(values: Tensor | None) -> list[float | None] | None:
        return None if values is None else numbers(values.where(mask, 0.0).sum(1) / lengths.clamp(min=1))

    columns: dict[str, Any] = {
        "prompt": rollouts.group.tolist(),
        "reward": numbers(rewards.total),
        "parts": {name: numbers(part) for name, part in rewards.parts.items()},
        "failed": rewards.failed.tolist(),
        "tokens": lengths.tolist(),
        "finish": list(rollouts.finish_reason),
        "version": rollouts.version.tolist(),
        "dependency": mean(streams.get("dependency")),
        "entropy": mean(streams.get("entropy")),
        "advantage": mean(streams.get("group_advantage")),
        "head": [text[:HEAD_CHARS] for text in rollouts.text],
    }
    if (mass := streams.get("mass")) is not None:
        by_segment = [[mean(mass[:, :, s, pool]) for pool in (TEXT, VISION)] for s in range(len(SHOWN))]
        columns |= {"mass": by_segment, "vision": by_segment[SHOWN.index("all")][VISION]}
    if it.credit is not None:
        columns |= {"kept": (it.credit.keep_mask & mask).sum(1).tolist(), "scale": numbers(it.credit.response_weight)}
    return {name: values for name, values in columns.items() if values is not None}


def numbers(values: Tensor) -> list[float | None]:
    """Six digits, and None for what JSON cannot say."""
    return [float(f"{x:.6g}") if np.isfinite(x) else None for x in values.tolist()]


# -------------------------------------------------------------------------------------------------------------- images
def add_image(images: dict[str, Callable[[], bytes]], medium: np.ndarray) -> str:
    """The key of an image: by what it shows, so that it is kept once however often it is asked about."""
    seen = hashlib.blake2b(repr(medium.shape).encode(), digest_size=12)
    seen.update(np.ascontiguousarray(medium).data)
    key = seen.hexdigest()
    images[key] = partial(encoded, medium)
    return key


def image_grid(medium: np.ndarray, frames: int, pixels: int) -> Grid:
    """How an image or a clip becomes tokens, row by row, and which of them lie on the picture that is kept."""
    height, width = (side // pixels for side in medium.shape[-3:-1])
    if medium.ndim == 3:
        return 1, height, width, [0]
    return -(-len(medium) // frames), height, width, [frame // frames for frame in shown_frames(medium)]


def shown_frames(clip: np.ndarray) -> list[int]:
    return np.linspace(0, len(clip) - 1, min(FRAMES, len(clip))).round().astype(int).tolist()


def encoded(medium: np.ndarray) -> bytes:
    if medium.ndim == 4:
        medium = np.concatenate(list(medium[shown_frames(medium)]), axis=1)
    with tempfile.TemporaryFile() as file:  # into a file Pillow writes without the interpreter, which others wait for
        if medium.shape[0] * medium.shape[1] <= LOSSLESS_PIXELS:
            Image.fromarray(medium).save(file, "PNG", compress_level=4)
        else:
            Image.fromarray(medium).save(file, "JPEG", quality=92, subsampling=0)
        file.seek(0)
        return file.read()
