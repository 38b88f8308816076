"""How similar the hidden states of response tokens are to those of the image tokens in their prompt.

The mean of the cosines to many states is one product with the mean of these at length 1. So each layer is compared when
it has been computed, with one vector per prompt, and its states are not kept.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtrl.models.backbone import Backbone
from mtrl.models.device_copy import to_device
from mtrl.models.layout import Layout
from mtrl.types import Needs


class ImageSimilarity:
    """Measures these signals, [M] each, under the original view:

    similarity         the last state that predicts a token, to the mean of the image's unit states
    token_similarity   the last state of the token itself, to the plain mean of the image's states
    layer_similarity   the states of the token, to each of the image's in the same layer: the mean over image tokens and
                       over the embeddings and all layers, the last one after the final norm

    The first two are cosines to a mean, the third is a mean of cosines. All are 0 without an image. It is entered
    during the pass; without `layer_similarity` it does nothing there. The ranks of a sequence-parallel group each sum
    up their part of the image tokens and compare their part of the response tokens.
    """

    def __init__(self, needs: Needs, layout: Layout, backbone: Backbone, chunk: int) -> None:
        self.needs, self.layout, self.chunk = needs, layout, chunk
        self.layers, self.sp_group, self.device = backbone.language_model.layers, backbone.sp_group, backbone.device
        self._hooks: list[Any] = []
        self._by_layer: list[Tensor] = []  # of the response tokens in this rank's part

    def __enter__(self) -> ImageSimilarity:
        if "layer_similarity" in self.needs:
            self._hooks = [layer.register_forward_hook(self._add_output) for layer in self.layers[:-1]]
            self._hooks.append(self.layers[0].register_forward_pre_hook(self._add_input))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def measure(self, states: Tensor, predicting: Tensor) -> dict[str, Tensor]:
        """The needed signals by name, of this rank's tokens, after the pass: from its last `states` [B, S, H] and those
        that predict the tokens."""
        found = {}
        if "similarity" in self.needs:
            found["similarity"] = self._cosines(predicting, self._sum_images(states, unit=True))
        if "token_similarity" in self.needs:
            own = self.sp_group.local_hidden(states, self.layout.places)
            found["token_similarity"] = self._cosines(own, self._sum_images(states, unit=False))
        if "layer_similarity" in self.needs:
            self._add(states)
            assert len(self._by_layer) == len(self.layers) + 1, "one pass at a time"
            found["layer_similarity"] = self._exchange(torch.stack(self._by_layer).mean(0))
        return found

    # ---------------------------------------------------------------------------------------------------------- images
    @cached_property
    def _prompts(self) -> tuple[Tensor, Tensor]:
        """The prompts that have responses, and which of these each token [M] responds to."""
        return self.layout.document_mask.prompt[self.layout.places].unique(return_inverse=True)

    @cached_property
    def _image_places(self) -> list[tuple[Tensor, Tensor]]:
        """For each prompt sequence and column of its image tokens in this rank's part."""
        prompt_of, image = map(
            self.sp_group.local_part, (self.layout.document_mask.prompt, self.layout.is_prompt_vision)
        )
        places = (((prompt_of == prompt) & image).nonzero().T for prompt in self._prompts[0].tolist())
        return [(to_device(sequence, self.device), to_device(column, self.device)) for sequence, column in places]

    def _sum_images(self, states: Tensor, unit: bool) -> Tensor:
        """[prompts, H]: the sum of the image's states in a whole sequence, divided by the number of ranks."""
        total = states.new_zeros(len(self._image_places), states.shape[-1], dtype=torch.float32)
        for number, place in enumerate(self._image_places):
            image = states[place].float()
            total[number] = (F.normalize(image, dim=-1) if unit else image).sum(0)
        return self.sp_group.all_reduce_mean(total)

    def _cosines(self, own: Tensor, image: Tensor) -> Tensor:
        """[own tokens]: of these states to the image of their prompts, which may have any length."""
        prompt_of = to_device(self._prompts[1][self.sp_group.local_tokens(len(self._prompts[1]))], self.device)
        pieces = zip(own.split(self.chunk), prompt_of.split(self.chunk), strict=True)
        return torch.cat([torch.cosine_similarity(each.float(), image[i], dim=-1) for each, i in pieces])

    # ---------------------------------------------------------------------------------------------------------- layers
    def _add_input(self, _layer: Any, inputs: tuple[Tensor, ...]) -> None:
        self._add(inputs[0])

    def _add_output(self, _layer: Any, _inputs: Any, output: Tensor | tuple[Tensor, ...]) -> None:
        self._add(output[0] if isinstance(output, tuple) else output)

    def _add(self, states: Tensor) -> None:
        """Add the mean cosines of one layer, from the states [B, S, H] of this rank's part."""
        image = self._sum_images(states, unit=True) * self._per_image_token[:, None]
        (sequence, column), prompt_of = self._held
        pieces = zip(*(each.split(self.chunk) for each in (sequence, column, prompt_of)), strict=True)
        unit = ((F.normalize(states[b, s].float(), dim=-1), image[i]) for b, s, i in pieces)
        self._by_layer.append(torch.cat([(own * mean).sum(-1) for own, mean in unit]))

    @cached_property
    def _per_image_token(self) -> Tensor:
        """[prompts]: makes a mean of `_sum_images`."""
        prompt_of, image = self.layout.document_mask.prompt, self.layout.is_prompt_vision
        counts = (prompt_of[image] == self._prompts[0][:, None]).sum(1)
        return to_device(self.sp_group.size / counts.clamp(min=1).float(), self.device)

    @cached_property
    def _held(self) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Sequence and column of the response tokens in this rank's part, and their prompts."""
        sequence, column = self.layout.places
        part = self.sp_group.local_columns(self.layout.ids.shape[1])
        held = (part.start <= column) & (column < part.stop)
        place = sequence[held], column[held] - part.start
        sequence, column, prompt_of = (to_device(each, self.device) for each in (*place, self._prompts[1][held]))
        return (sequence, column), prompt_of

    def _exchange(self, held: Tensor) -> Tensor:
        """[own tokens]: from the numbers of the response tokens in each rank's part."""
        if self.sp_group.size == 1:
            return held
        rows, width = self.sp_group.local_part(self.layout.ids).shape
        placed = held.new_zeros(rows, width, 1)
        placed[(*self._held[0], 0)] = held
        return self.sp_group.local_hidden(placed, self.layout.places)[:, 0]
