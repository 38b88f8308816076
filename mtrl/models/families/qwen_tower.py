"""The vision tower of Qwen's families, all images of a batch in one pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from mtrl.models import patches
from mtrl.models.device_copy import to_device
from mtrl.models.families.model_family import Features, ImageEncoder, ModelFamily
from mtrl.models.families.qwen_vl import QwenVLEncoder

Grid = tuple[int, int, int]
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
CACHED_IMAGES = 512  # entries of about 100 kB each for large images
CACHED_BATCHES = 16  # entries of about 10 MB each for hundreds of large images, on the device


class QwenImageEncoder(ImageEncoder):
    """`pixel_values` holds one row per patch, `image_grid_thw` the patches of each image in time, height and width."""

    def __init__(self, model: Any, tower: Any) -> None:
        super().__init__(model, tower)
        self.vision_indices = VisionIndices(tower)

    def encode(self, inputs: Sequence[dict[str, Tensor]], device: torch.device) -> list[Features]:
        grids = tuple(tuple(grid) for each in inputs for grid in each["image_grid_thw"].tolist())
        output = self.run_tower(torch.cat([each["pixel_values"] for each in inputs]).to(device), grids)
        merged = self.tower.spatial_merge_size**2
        sizes = [int(each["image_grid_thw"].prod(1).sum()) // merged for each in inputs]
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        by_prompt = zip(*(layer.split(sizes) for layer in layers), strict=True)
        return [Features(embeds, tuple(deepstack)) for embeds, *deepstack in by_prompt]

    def run_tower(self, pixels: Tensor, grids: tuple[Grid, ...]) -> Any:
        """Run the tower over all patches of images of these grids."""
        indices = self.vision_indices(grids, pixels.device)
        return self.tower(pixels.to(self.tower.dtype), grid_thw=torch.tensor(grids), **indices)

    def blank(self) -> dict[str, Tensor]:
        side, width = self.tower.spatial_merge_size, self.tower.patch_embed.proj.weight[0].numel()
        return {"pixel_values": torch.zeros(side * side, width), "image_grid_thw": torch.tensor([(1, side, side)])}

    def select(self, inputs: dict[str, Tensor], tokens: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The inputs of the images of a prompt that contain some of these image tokens, and the index of every image
        token of the prompt among the tokens of these images."""
        if not len(tokens):
            return {}, torch.empty(0, dtype=torch.long)
        grids = inputs["image_grid_thw"].cpu()
        sizes = grids.prod(1)
        images = torch.arange(len(sizes)).repeat_interleave(sizes // self.tower.spatial_merge_size**2)
        wanted = torch.zeros(len(sizes), dtype=torch.bool)
        wanted[images[tokens]] = True
        pixels = inputs["pixel_values"]
        selected = to_device(wanted.repeat_interleave(sizes), pixels.device)
        return {"pixel_values": pixels[selected], "image_grid_thw": grids[wanted]}, wanted[images].cumsum(0) - 1


class QwenVLFamily(ModelFamily):
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL. Models built like them may have another prompt encoder; for these nothing is
    known to be exact unless it is said."""

    encoder = QwenVLEncoder
    image_encoder = QwenImageEncoder
    vision_tower = "model.visual"
    vision_layers = "blocks"
    position_axes = 3
    shares_prefix = splits_sequences = True

    def prepare_tower(self, tower: Any, *, narrow_cuda: bool) -> None:
        patches.use_segment_attention(tower)
        patches.use_linear_patches(tower)
        if narrow_cuda:
            patches.use_padded_mlps(tower)


class QwenVLMoeFamily(QwenVLFamily):
    """Qwen3-VL with experts. vLLM reads their matrices as published, inputs first; transformers has outputs first."""

    runs_in_vllm = False


class Qwen35Family(QwenVLFamily):
    """Qwen3.5, dense and with experts. Three of four layers keep a recurrent state (`models/recurrent.py`), which is
    not split over ranks."""

    splits_sequences = False


class VisionIndices:
    """Caches indices that a vision tower would otherwise compute image by image in Python, at every call.

    Called with the grids of a batch (patches in time, height and width of each image) it returns keyword arguments for
    the tower. Boundaries stay on the CPU, where `segment_attention` reads them without waiting for the device.
    """

    def __init__(self, tower: Any) -> None:
        self.tower = tower
        self._batches: dict[tuple[tuple[Grid, ...], torch.device], dict[str, Any]] = {}
        self._images: dict[Grid, dict[str, Tensor]] = {}

    def __call__(self, grids: tuple[Grid, ...], device: torch.device) -> dict[str, Any]:
        return get_or_make(self._batches, (grids, device), partial(self._make_batch, grids, device), CACHED_BATCHES)

    def _make_batch(self, grids: tuple[Grid, ...], device: torch.device) -> dict[str, Any]:
        images = [get_or_make(self._images, grid, partial(self._make_image, grid), CACHED_IMAGES) for grid in grids]
        indices: dict[str, Any] = {
            name: to_device(torch.cat([image[name] for image in images]), device)
            for name in ("position_ids", "interp_indices", "interp_weights")
            if name in images[0]
        }
        frames = torch.tensor([height * width for time, height, width in grids for _ in range(time)])
        indices |= _boundaries("cu_seqlens", "max_seqlen", frames)
        if "window_index" in images[0]:
            start, shifted = 0, []
            for image in images:
                shifted.append(image["window_index"] + start)
                start += len(image["window_index"])
            indices["window_index"] = to_device(torch.cat(shifted), device)
            windows = torch.cat([image["cu_window_seqlens"].diff() for image in images])
            indices |= _boundaries("cu_window_seqlens", "max_window_seqlen", windows)
        return indices

    def _make_image(self, grid: Grid) -> dict[str, Tensor]:
        """The indices of one image, by the functions of transformers."""
        tower, grid_thw = self.tower, torch.tensor([grid])
        indices = {"position_ids": get_vision_position_ids(grid_thw, tower.spatial_merge_size)}
        if hasattr(tower, "window_size"):
            indices["window_index"], indices["cu_window_seqlens"] = get_vision_window_index(
                grid_thw, tower.spatial_merge_size, tower.window_size, tower.patch_size
            )
        if hasattr(tower, "num_grid_per_side"):
            indices["interp_indices"], indices["interp_weights"] = get_vision_interpolation_indices_and_weights(
                grid_thw,
                num_grid_per_side=tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=tower.spatial_merge_size,
            )
        return indices


def get_or_make(cache: dict[Key, Value], key: Key, make: Callable[[], Value], limit: int) -> Value:
    """The cached value of a key; beyond the limit the least recently used one is dropped."""
    value = cache.pop(key) if key in cache else make()
    cache[key] = value
    if len(cache) > limit:
        del cache[next(iter(cache))]
    return value


def _boundaries(name: str, maximum: str, lengths: Tensor) -> dict[str, Any]:
    ends = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
    return {name: ends, maximum: int(lengths.max())}
