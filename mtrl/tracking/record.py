"""The record of a run, for `mtrl view`: some responses of each step with all signals of each of their tokens, and the
images as the model saw them. No signal is measured for its sake, so that the numbers of a run do not depend on it. A
separate thread writes it (see background.py)."""

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
from mtrl.report.conversation import DecodeText, describe_message
from mtrl.report.log_pages import DecodeTokens
from mtrl.tracking.background import Background
from mtrl.tracking.blocks import BlockWriter
from mtrl.tracking.streams import EXTRA, MAP_SCALE, MAPS, as_list, pack_response, to_stored_dtype
from mtrl.types import SEGMENTS, Experience, Observations, Prompt
from mtrl.utils.record_rows import first_rows

OF_SIGNALS = {  # streams that the viewer knows, by their signals; all others have a prefix
    "old": "old_logprobs", "perturbed": "perturbed_logprobs", "reference": "ref_logprobs", "dependency": "dependency",
    "entropy": "entropy", "values": "values",
}  # fmt: skip
STORED_SEGMENTS = SEGMENTS[:4]  # early, middle, late, all; they include the layers of "weight"
HEAD_CHARS = 120  # characters of a response in lists
LOSSLESS_PIXELS = 256 * 256  # larger images are stored as JPEG, at a tenth of the size and without visible loss
FRAMES = 4  # frames of a clip, side by side
REPLACEMENT = "\ufffd"  # decoders return it for a part of a character

Grid = tuple[int, int, int, list[int]]  # image tokens in time, height and width; times of the stored frames
Perturb = Callable[[Prompt, int], Sequence[np.ndarray]]
Images = dict[str, Callable[[], bytes]]  # by their keys


class RolloutRecord(Tracker):
    """A tracker. `per_step`: number of responses stored per step (-1: all); `perturb` makes the perturbed view of a
    prompt's images that the probes of a step used; `token_size`: frames, and pixels per side, of one image token;
    `pictures`: what the model sees of an image, which is stored."""

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
        pictures: Callable[[np.ndarray], Sequence[np.ndarray]] = lambda medium: [medium],
    ) -> None:
        self.writer = BlockWriter(directory, limit_bytes)
        self.pieces = TokenPieces(decode, decode_text)
        self.perturb, self.attempt, self.per_step, self.token_size = perturb, attempt, per_step, token_size
        self.pictures = pictures
        self._background = Background("record of the rollouts")

    def rollouts(self, step: int, experience: Experience) -> None:
        if len(experience) and self.per_step:  # a copy of these rows: the whole step must not stay in memory
            self._background.submit(partial(self._write, step, first_rows(experience, self.per_step)))

    def close(self) -> None:
        self._background.close()

    def _write(self, step: int, it: Experience) -> None:
        images: Images = {}
        table = {
            "step": step,
            "attempt": self.attempt,
            "time": round(time.time(), 3),
            "segments": STORED_SEGMENTS,
            "prompts": self._prompts(step, it, images),
            "rollouts": response_columns(it),
        }
        streams = {name: to_stored_dtype(name, values.numpy()) for name, values in token_streams(it).items()}
        lengths = it.rollouts.mask.sum(1).tolist()
        maps = it.signals.attention_maps or (None,) * len(it)
        responses = []
        columns = zip(it.rollouts.text, lengths, maps, it.rollouts.observed, strict=True)
        for row, (text, length, attention, observed) in enumerate(columns):
            own = {name: values[row, :length] for name, values in streams.items()}
            if attention is not None:
                own |= {MAPS: attention.levels.numpy(), MAP_SCALE: attention.scale.numpy()}
            pieces = self.pieces(own["ids"].tolist())
            responses.append(pack_response(text, pieces, own, self._messages(observed, images)))
        self.writer.append(step, self.attempt, table, responses, images)

    def _messages(self, observed: Observations | None, images: Images) -> list[dict[str, Any]]:
        """What the environment said during a response, each after so many of its tokens."""
        rows = []
        for turn in () if observed is None else observed.turns:
            media = [part for each in turn.message.media for part in self.pictures(each)]
            place = {"after": turn.after, "images": [add_image(images, medium) for medium in media]}
            rows.append(place | describe_message(turn))
        return rows

    def _prompts(self, step: int, it: Experience, images: Images) -> list[dict[str, Any]]:
        """The rows of the prompts. The perturbed view is that of this step: replayed groups of earlier steps get
        none."""
        rollouts, versions = it.rollouts, it.rollouts.version
        is_perturbed = it.signals.dependency is not None or it.signals.perturbed_logprobs is not None
        sizes = pool_sizes(rollouts.prompts).tolist()
        rows = []
        for index, prompt in enumerate(rollouts.prompts):
            is_fresh = bool((versions[rollouts.group == index] == versions.max()).all())
            views = self.perturb(prompt, step - 1) if is_perturbed and is_fresh and prompt.media else ()
            media, views = ([part for each in them for part in self.pictures(each)] for them in (prompt.media, views))
            task = prompt.task
            answer = None if task.answer is None else str(task.answer)
            row = {"id": task.id, "text": task.text, "answer": answer, "pools": sizes[index]}
            row |= {"images": [add_image(images, medium) for medium in media]}
            if it.signals.attention_maps is not None:
                row |= {"grids": [image_grid(medium, *self.token_size) for medium in media]}
            rows.append(row | {"perturbed": [add_image(images, view) for view in views]})
        return rows


class TokenPieces:
    """The text of each token, cached. Tokens that are only a part of a character are decoded together; the last of them
    gets the text."""

    def __init__(self, decode: DecodeTokens, decode_text: DecodeText) -> None:
        self.decode, self.decode_text = decode, decode_text
        self._known: dict[int, str] = {}
        self._partial: set[int] = set()  # tokens whose text is only a part of a character

    def __call__(self, ids: Sequence[int]) -> list[str]:
        new = sorted(i for i in set(ids) if i not in self._known)  # a set difference would walk over the whole cache
        self._known.update(zip(new, self.decode(new), strict=True))
        self._partial.update(i for i in new if REPLACEMENT in self._known[i])
        texts = [self._known[i] for i in ids]
        if self._partial.isdisjoint(ids):
            return texts
        start: int | None = None
        for index, text in enumerate([*texts, ""]):
            if REPLACEMENT in text:
                start = index if start is None else start
            elif start is not None:
                texts[start:index] = [""] * (index - 1 - start) + [self.decode_text(ids[start:index])]
                start = None
        return texts


# -------------------------------------------------------------------------------------------------------------- values
def token_streams(it: Experience) -> dict[str, Tensor]:
    """All per-token values, [N, T] by name; `mass` is [N, T, segments, 2], text before vision. Of users' signals and of
    those that single rules read, the ones with one number per token."""
    signals, credit = it.signals, it.credit
    streams: dict[str, Tensor | None] = {
        "ids": it.rollouts.tokens,
        "behaviour": it.rollouts.rollout_logprobs,
        **{stream: getattr(signals, name) for stream, name in OF_SIGNALS.items()},
        "group_advantage": it.advantage,
        "mass": None if signals.attention_mass is None else signals.attention_mass[:, :, : len(STORED_SEGMENTS)],
    }
    if credit is not None:
        weights = torch.ones_like(credit.advantage) if credit.weights is None else credit.weights
        streams |= {
            "advantage": credit.advantage,
            "mask": credit.keep_mask,
            "trained": credit.trained,
            "weight": credit.response_weight[:, None] * weights,
        }
    others: dict[str, Any] = {name: each for name, each in vars(signals).items() if name not in OF_SIGNALS.values()}
    others |= signals.extra
    streams |= {f"{EXTRA}{n}": each for n, each in others.items() if isinstance(each, Tensor) and each.ndim == 2}
    return {name: values for name, values in streams.items() if values is not None}


def response_columns(it: Experience) -> dict[str, Any]:
    """The values that lists show, sort and filter by, one per response."""
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
        by_segment = [[mean(mass[:, :, s, pool]) for pool in (TEXT, VISION)] for s in range(len(STORED_SEGMENTS))]
        columns |= {"mass": by_segment, "vision": by_segment[STORED_SEGMENTS.index("all")][VISION]}
    if rollouts.noised is not None:
        columns |= {"noised": rollouts.noised.tolist()}
    if it.credit is not None:
        counts = {"kept": it.credit.keep_mask & mask, "trained": it.credit.trained & mask}
        columns |= {name: tokens.sum(1).tolist() for name, tokens in counts.items()}
        columns |= {"scale": numbers(it.credit.response_weight)}
    return {name: values for name, values in columns.items() if values is not None}


def numbers(values: Tensor) -> list[float | None]:
    return as_list(values.numpy(), digits=6)


# -------------------------------------------------------------------------------------------------------------- images
def add_image(images: Images, medium: np.ndarray) -> str:
    """Add an image and return its key, a hash of its pixels: an image of several prompts is stored once."""
    pixels = hashlib.blake2b(repr(medium.shape).encode(), digest_size=12)
    pixels.update(np.ascontiguousarray(medium).data)
    key = pixels.hexdigest()
    images[key] = partial(encode_image, medium)
    return key


def image_grid(medium: np.ndarray, frames: int, pixels: int) -> Grid:
    """The token grid of an image or a clip, and the times of the stored frames."""
    height, width = (side // pixels for side in medium.shape[-3:-1])
    if medium.ndim == 3:
        return 1, height, width, [0]
    return -(-len(medium) // frames), height, width, [frame // frames for frame in stored_frames(medium)]


def stored_frames(clip: np.ndarray) -> list[int]:
    return np.linspace(0, len(clip) - 1, min(FRAMES, len(clip))).round().astype(int).tolist()


def encode_image(medium: np.ndarray) -> bytes:
    if medium.ndim == 4:
        medium = np.concatenate(list(medium[stored_frames(medium)]), axis=1)
    with tempfile.TemporaryFile() as file:  # Pillow releases the GIL while it writes to a real file
        if medium.shape[0] * medium.shape[1] <= LOSSLESS_PIXELS:
            Image.fromarray(medium).save(file, "PNG", compress_level=4)
        else:
            Image.fromarray(medium).save(file, "JPEG", quality=92, subsampling=0)
        file.seek(0)
        return file.read()
