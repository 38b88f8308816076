"""The view `counterfactual(z)`: text does not see what it looks at most in the images, in any layer with attention.

By CFPO's code (loss_terms/cfpo.py has the source). A are the attention weights of a head; the cells of an image are
those of all later tokens, of prompt and response, on the tokens of this image:

    seen   cells with A > 1e-8, of all heads
    limit  mean(A over seen) + z std(A over seen), a number for each image and layer
    v'     mean of the values of a head over all image tokens and their numbers
    out_q  sum_k A_qk v_k + sum over seen cells with A_qk > limit of A_qk (v' - v_k)

A limit depends on the whole response: documents of this view hold one row each. It has no gradient; A and the values
have theirs. Cells are computed piece by piece, and again in the backward pass: they are never all in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mtrl.models.device_copy import to_device
from mtrl.models.document_mask import DocumentMask, MaskRule
from mtrl.models.layout import Document, Layout
from mtrl.models.masked_attention import AttentionLayer
from mtrl.types import Rollouts

LEAST_WEIGHT = 1e-8
CELLS_AT_ONCE = 2**24  # heads x tokens x keys, in float32


@dataclass(frozen=True, eq=False)
class EditedDocument:
    """A prompt and one response, with at least one image token."""

    sequence: int
    columns: slice
    first: int  # the first column after an image, counted from the beginning of the document
    z: float
    mask: DocumentMask  # [1, S] of the document alone
    vision: Tensor  # [V] columns of its image tokens, counted likewise
    image: Tensor  # [V] the number of each one's image
    after: Tensor  # [V] the first column after its image
    images: int

    @property
    def size(self) -> int:
        return self.columns.stop - self.columns.start

    def pieces(self, heads: int) -> Iterator[Tensor]:
        """Columns after the first image, few enough for CELLS_AT_ONCE."""
        step = max(1, CELLS_AT_ONCE // (heads * self.size))
        return iter(torch.arange(self.first, self.size, device=self.vision.device).split(step))


class CounterfactualEditor:
    """Changes the output of attention for the documents of counterfactual views, in one pass. `rules`: of each layer
    what its attention sees."""

    def __init__(self, documents: Sequence[EditedDocument], rules: Sequence[MaskRule | None]) -> None:
        self.documents, self.rules = documents, rules
        edited = [torch.arange(each.columns.start + each.first, each.columns.stop) for each in documents]
        sequences = [torch.full_like(columns, each.sequence) for columns, each in zip(edited, documents, strict=True)]
        device = documents[0].vision.device
        self.index = to_device(torch.cat(sequences), device), to_device(torch.cat(edited), device)

    def edit(self, layer: AttentionLayer, value: Tensor, output: Tensor) -> Tensor:
        """[B, S, heads, D]: `output`, the layer's attention to these values, as the views see it."""
        with torch.autocast(output.device.type, enabled=False):
            changes = [change for each in self.documents for change in self._changes(layer, value, each)]
        return output.index_put(self.index, torch.cat(changes).to(output.dtype), accumulate=True)

    def _changes(self, layer: AttentionLayer, value: Tensor, document: EditedDocument) -> Iterator[Tensor]:
        """[t, heads, D] of each piece of the document."""
        rule = self.rules[layer.module.layer_idx]
        assert rule is not None, "a layer with attention"
        query, key, own = (
            widen(each[document.sequence, :, document.columns]) for each in (layer.query, layer.key, value)
        )
        query = query.unflatten(0, (len(key), -1)) * layer.options["scaling"]  # [key heads, heads that share them, ..]
        shown = own[:, document.vision]
        moved = shown.mean((1, 2), keepdim=True) - shown  # [key heads, V, D]
        pieces = list(document.pieces(layer.query.shape[1]))
        with torch.no_grad():
            counted = [cell_sums(image_cells(query, key, each, document, rule), each, document) for each in pieces]
            sums = layer.sp_group.size * layer.sp_group.all_reduce_mean(torch.stack(counted).sum(0))
            limit = upper_limit(sums, document.z)[document.image]

        def change(query: Tensor, key: Tensor, moved: Tensor, columns: Tensor) -> Tensor:
            weights = image_cells(query, key, columns, document, rule)
            chosen = weights.where(seen(weights, columns, document) & (weights > limit), 0.0)
            return (chosen @ moved[:, None]).flatten(0, 1).transpose(0, 1)

        for columns in pieces:
            yield checkpoint(change, query, key, moved, columns, use_reentrant=False, preserve_rng_state=False)


def widen(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def image_cells(query: Tensor, key: Tensor, columns: Tensor, document: EditedDocument, rule: MaskRule) -> Tensor:
    """[key heads, sharing heads, t, V]: the attention of these columns on the image tokens. Queries are scaled."""
    scores = query[:, :, columns] @ key[:, None].transpose(2, 3)
    visible = document.mask.rows((torch.zeros_like(columns), columns), rule)
    return scores.masked_fill(~visible, -torch.inf).softmax(-1)[..., document.vision]


def seen(weights: Tensor, columns: Tensor, document: EditedDocument) -> Tensor:
    return (weights > LEAST_WEIGHT) & (columns[:, None] >= document.after)


def cell_sums(weights: Tensor, columns: Tensor, document: EditedDocument) -> Tensor:
    """[3, images] in float64: number, sum and sum of squares of the cells of each image."""
    counted = seen(weights, columns, document)
    wide = weights.double().where(counted, 0.0)
    by_token = torch.stack([each.sum((0, 1, 2)) for each in (counted.double(), wide, wide.square())])
    return by_token.new_zeros(3, document.images).index_add(1, document.image, by_token)


def upper_limit(sums: Tensor, z: float) -> Tensor:
    """[images]: mean + z standard deviations; NaN, above which nothing is, for fewer than two cells."""
    number, total, squares = sums
    mean = total / number
    return mean + z * ((squares - total * mean).clamp(min=0) / (number - 1)).sqrt()


def make_editor(
    layout: Layout, rollouts: Rollouts, rules: Sequence[MaskRule | None], device: torch.device
) -> CounterfactualEditor | None:
    """None if no document is of such a view."""
    lengths = rollouts.mask.sum(1).tolist()
    found = [edited_document(layout, rollouts, each, lengths, device) for each in layout.documents]
    edited = [each for each in found if each is not None]
    return CounterfactualEditor(edited, rules) if edited else None


def edited_document(
    layout: Layout, rollouts: Rollouts, document: Document, lengths: Sequence[int], device: torch.device
) -> EditedDocument | None:
    """None for documents of other views, and for those in which no token is read or comes after an image."""
    if document.counterfactual is None:
        return None
    (row,) = document.rows
    before = sum(lengths[:row])
    if not lengths[row]:
        return None
    sequence, end = (int(each[before]) for each in layout.predictors[document.view])  # the prompt's last position
    begin = end + 1 - len(rollouts.prompts[document.prompt].ids)
    columns = slice(begin, end + 1 + lengths[row])
    mask = layout.document_mask[slice(sequence, sequence + 1), columns]
    vision = layout.is_vision[sequence, columns].nonzero()[:, 0]
    if not len(vision):
        return None
    starts, image = (mask.image[0, vision] - begin).unique(return_inverse=True)
    after = (starts + image.bincount())[image]
    first, images = int(after.min()), len(starts)
    vision, image, after = (to_device(each, device) for each in (vision, image, after))
    z = document.counterfactual
    return EditedDocument(sequence, columns, first, z, mask.to(device), vision, image, after, images)
