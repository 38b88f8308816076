"""What the model says of sampled tokens, under any view of the image.

Log-prob, entropy, visual dependency, attention and likeness to the image of every response token; with gradients for
the update, without for the probes. A prompt is read once for its whole group, and its images are seen once; all views
go through in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mtrl.algorithms.signals import ATTENTION, bounded_dependency, layer_segments, visual_dependency
from mtrl.algorithms.vocab import CHUNK_POSITIONS, TokenScores, full_kl, support_mass, token_scores
from mtrl.models.attention_maps import PatchReader, SeveralReaders, onlookers
from mtrl.models.backbone import Backbone, Features, prompt_positions, vision_tokens
from mtrl.models.device_copy import to_device
from mtrl.models.layout import Layout, lay_out
from mtrl.models.masked_attention import AttentionReader, MapReader, MassReader
from mtrl.models.parallel.sequence import NO_SEQUENCE_PARALLEL, SequenceParallelGroup
from mtrl.protocols import PromptEncoder
from mtrl.types import SEGMENTS, Needs, Rollouts, Signals

OLD_LOGPROBS = Needs("old_logprobs")
Views = Sequence[tuple[np.ndarray, ...]]  # for each prompt its media, perturbed


@dataclass(frozen=True)
class Forward:
    """Scores rollouts under the model's current weights, at the rollout temperature.

    `packed`: everything in one sequence without padding, for kernels that skip what nobody sees (CUDA). `last_k` and
    `weight_last_k` restrict the layers of the segments `all` and `weight` of the attention. `dependency` estimates S.
    `top_p` and `top_k` are the sampler's: every score is of the whole distribution, beside the mass of what they leave.
    `sharers` are ranks that make every pass together, over the same rollouts.
    """

    backbone: Backbone
    encoder: PromptEncoder
    temperature: float = 1.0
    share_prefix: bool = True
    packed: bool = False
    chunk: int = CHUNK_POSITIONS
    last_k: int | None = None
    weight_last_k: int | None = None
    dependency: Literal["low_var_kl", "full_kl"] = "low_var_kl"
    top_p: float = 1.0
    top_k: int = -1
    sharers: SequenceParallelGroup = NO_SEQUENCE_PARALLEL

    def logp(self, rollouts: Rollouts) -> Tensor:
        """[N, T] log-probs with gradients, on the model's device; 0 off the mask."""
        return unpack(self.scores(rollouts).logp, rollouts.mask)

    def scores(self, rollouts: Rollouts, entropy: bool = False) -> TokenScores:
        """[M] log-probs with gradients, and entropies without, which bring the mass of what a cut leaves."""
        return self.score_tokens(self.response_hidden(rollouts), rollouts, entropy)

    def values(self, rollouts: Rollouts) -> Tensor:
        """[M] with gradients: what a value head says of the state before each token, the one that predicts it."""
        values = self.response_hidden(rollouts).float() @ self.backbone.output_matrix[0].float()
        return self.of_all(values, rollouts)

    @torch.no_grad()
    def signals(self, rollouts: Rollouts, needs: Needs = OLD_LOGPROBS, views: Views | None = None) -> Signals:
        """What is needed of every token, under the original image and, for what compares, the perturbed `views`.

        Where attention alone is asked for, the vocabulary is left alone."""
        assert needs.views == 1 or views is not None, "two views are compared"
        layout, features = self._prepare(rollouts, [None, views][: needs.views])
        reader = self._reader(layout) if "attention_mass" in needs else None
        patches = self._patch_reader(layout, rollouts) if "attention_maps" in needs else None
        readers = [each for each in (reader, patches) if each is not None]
        states = self._states(layout, features, SeveralReaders(readers) if readers else None)
        hidden = self._predicting(states, layout)
        similar = {"similarity": self._similarity(states, hidden[0], layout)} if "similarity" in needs else {}
        del states  # the vocabulary takes its room
        scored = self._score_views(hidden, rollouts, needs) if needs.without(*ATTENTION) else {}
        scored |= {name: self.of_all(values, rollouts) for name, values in similar.items()}
        found = {name: unpack(values.cpu(), rollouts.mask) for name, values in scored.items()}
        if "dependency" in found:
            found["dependency"] = bounded_dependency(found["dependency"], rollouts.mask)
        elif "dependency" in needs:
            found["dependency"] = visual_dependency(found["old_logprobs"], found["perturbed_logprobs"], rollouts.mask)
        mass = {} if reader is None else self._mass(reader, layout, rollouts)
        return Signals(**found, **mass, attention_maps=None if patches is None else patches.maps(len(rollouts)))

    def _score_views(self, hidden: list[Tensor], rollouts: Rollouts, needs: Needs) -> dict[str, Tensor]:
        """Each signal that comes from the vocabulary as [M], on the device, which is asked for everything before
        anything is waited for. A new signal of this kind has its place here."""
        changes = "entropy_change" in needs
        clean = self.score_tokens(hidden[0], rollouts, entropy=changes or "entropy" in needs or "support" in needs)
        found = {"old_logprobs": clean.logp}
        if clean.entropy is not None:
            found["entropy"] = clean.entropy
        if clean.support is not None:
            found["support"] = clean.support
        if needs.views == 2:
            perturbed = self.score_tokens(hidden[1], rollouts, entropy=changes)
            found["perturbed_logprobs"] = perturbed.logp
            if clean.entropy is not None and perturbed.entropy is not None:
                found["entropy_change"] = perturbed.entropy - clean.entropy
        if "dependency" in needs and self.dependency == "full_kl":
            kl = full_kl(hidden[0], hidden[1], self.backbone.output_matrix, **self.distribution())
            found["dependency"] = self.of_all(kl, rollouts)
        return found

    @torch.no_grad()
    def maps(self, rollouts: Rollouts, tokens: Sequence[int]) -> Tensor:
        """[tokens, len(SEGMENTS), L]: what chosen tokens of one response attend to, prompt token by token."""
        assert len(rollouts) == 1, "maps are for one response at a time"
        self._check_attention()
        layout, features = self._prepare(rollouts, [None])
        chosen, device = torch.tensor(tokens, dtype=torch.long), self.backbone.device
        sequence, place = (each[chosen].to(device) for each in layout.predicts[0])
        pool, sink = layout.pool.to(device), layout.sink.to(device)
        reader = MapReader(pool, sink, layout.sight.to(device), (sequence, place), self._segments(), self.sharers)
        self._read(layout, features, reader)
        return reader.total[:, :, : len(rollouts.prompts[0].ids)].cpu()

    def response_hidden(self, rollouts: Rollouts) -> Tensor:
        """[M, H]: for every valid response token, row by row, the hidden state of the position that predicts it. Of
        those that ranks share, this rank's own."""
        return self._read(*self._prepare(rollouts, [None]))[0]

    def score_tokens(self, hidden: Tensor, rollouts: Rollouts, entropy: bool = False) -> TokenScores:
        """The `scores` that follow from `response_hidden`."""
        tokens = rollouts.tokens[rollouts.mask]
        targets = to_device(tokens[self.sharers.tokens(len(tokens))], hidden.device)
        matrix, rules = self.backbone.output_matrix, self.distribution()
        scores = token_scores(hidden, matrix, targets, entropy=entropy, **rules)
        if entropy and (self.top_p < 1 or self.top_k > 0):
            support = support_mass(hidden, matrix, targets, top_p=self.top_p, top_k=self.top_k, **rules)
            scores = scores._replace(support=support)
        beside = (None if each is None else self.of_all(each, rollouts) for each in (scores.entropy, scores.support))
        return TokenScores(self.of_all(scores.logp, rollouts), *beside)

    def of_all(self, values: Tensor, rollouts: Rollouts) -> Tensor:
        """[M]: a number for each token, of those that this rank has made from `response_hidden`."""
        return self.sharers.of_all(values, int(rollouts.mask.sum()))

    def distribution(self) -> dict[str, Any]:
        """How hidden states become probabilities, for `algorithms.vocab`."""
        forbidden = to_device(torch.tensor(self.encoder.forbidden_ids, dtype=torch.long), self.backbone.device)
        return {"temperature": self.temperature, "forbidden": forbidden, "chunk": self.chunk}

    # --------------------------------------------------------------------------------------------------- the one pass
    def _prepare(self, rollouts: Rollouts, views: Sequence[Views | None]) -> tuple[Layout, list[Features | None]]:
        """Where everything stands, and what each of its documents looks at."""
        prompts, device = rollouts.prompts, self.backbone.device
        inputs = {
            (number, g): self.encoder.inputs(prompt, None if view is None else view[g], device)
            for number, view in enumerate(views)
            for g, prompt in enumerate(prompts)
            if view is None or prompt.task.visual
        }
        positions = [prompt_positions(inputs[0, g]) for g in range(len(prompts))]
        layout = lay_out(
            rollouts,
            positions,
            share_prefix=self.share_prefix,
            packed=self.packed,
            views=len(views),
            parts=self.sharers.size,
        )
        if self.sharers.size > 1:
            return layout, self._own_features(layout, inputs, [int(vision_tokens(each).sum()) for each in prompts])
        features = dict(zip(inputs, self.backbone.encode_images(list(inputs.values())), strict=True))
        return layout, [features[document.view, document.prompt] for document in layout.documents]

    def _own_features(
        self, layout: Layout, inputs: dict[tuple[int, int], dict[str, Tensor]], sizes: Sequence[int]
    ) -> list[Features | None]:
        """Of each document, whose prompt has so many image tokens, those in this rank's part of the sequences: it sees
        the images alone that reach into it."""
        keys = [(document.view, document.prompt) for document in layout.documents]
        own = layout.vision_within(self.sharers.columns(layout.ids.shape[1]), [sizes[g] for _, g in keys])
        wanted = {key: [torch.empty(0, dtype=torch.long)] for key in inputs}  # by all documents of a prompt
        for key, tokens in zip(keys, own, strict=True):
            wanted[key].append(tokens)
        kept = {key: self.backbone.select_images(inputs[key], torch.cat(wanted[key])) for key in inputs}
        seen = dict(zip(inputs, self.backbone.encode_images([given for given, _ in kept.values()]), strict=True))
        features: list[Features | None] = []
        for key, tokens in zip(keys, own, strict=True):
            found, numbers = seen[key], kept[key][1]
            features.append(found and found.rows(to_device(numbers[tokens], self.backbone.device)))
        return features

    def _read(
        self, layout: Layout, features: list[Features | None], reader: AttentionReader | None = None
    ) -> list[Tensor]:
        """For each view the hidden states [M, H] that predict the response tokens; of shared ones this rank's own."""
        return self._predicting(self._states(layout, features, reader), layout)

    def _predicting(self, states: Tensor, layout: Layout) -> list[Tensor]:
        return [self.sharers.local_hidden(states, places) for places in layout.predicts]

    def _states(self, layout: Layout, features: list[Features | None], reader: AttentionReader | None = None) -> Tensor:
        """[B, S, H]: the last hidden states; of shared sequences those of this rank's part."""
        device, sharers = self.backbone.device, self.sharers
        mask = None if layout.causal else self.backbone.sight_mask(layout.sight, layout.packed)
        return self.backbone.forward_text(
            to_device(sharers.part(layout.ids), device),
            to_device(sharers.part(layout.positions), device),
            to_device(sharers.part(layout.is_vision), device),
            features,
            attention_mask=mask,
            reader=reader,
            sharers=sharers,
        )

    def _similarity(self, states: Tensor, predicting: Tensor, layout: Layout) -> Tensor:
        """[M]: the cosine of the state that predicts each token, on the original image, to the mean of the unit states
        at the image's positions, which stand in its prompt; 0 without an image. Of shared tokens this rank's own."""
        sharers, device = self.sharers, states.device
        prompts, of_token = layout.sight.prompt[layout.predicts[0]].unique(return_inverse=True)
        own_prompt, own_vision = sharers.part(layout.sight.prompt), sharers.part(layout.is_vision)
        image = states.new_zeros(len(prompts), states.shape[-1], dtype=torch.float32)
        for number, prompt in enumerate(prompts.tolist()):
            sequence, place = ((own_prompt == prompt) & own_vision).nonzero(as_tuple=True)
            seen = states[to_device(sequence, device), to_device(place, device)]
            image[number] = torch.nn.functional.normalize(seen.float(), dim=-1).sum(0)
        image = sharers.mean(image)  # a cosine does not see by how much a sum is divided
        whose = to_device(of_token[sharers.tokens(len(of_token))], device)
        pieces = zip(predicting.split(self.chunk), whose.split(self.chunk), strict=True)
        return torch.cat([torch.cosine_similarity(each.float(), image[i], dim=-1) for each, i in pieces])

    # ------------------------------------------------------------------------------------------------------ attention
    def _reader(self, layout: Layout) -> MassReader:
        """Reads the positions that predict the responses, then those of the prompts' tails."""
        self._check_attention()
        device = self.backbone.device
        clean = [tail for tail, d in zip(layout.tails, layout.documents, strict=True) if d.view == 0]
        sequence, place = (torch.cat(each) for each in zip(layout.predicts[0], *clean, strict=True))
        corner = layout.corner((sequence, place))  # the first view's: views stand one after the other
        pool, sink = to_device(layout.pool[corner], device), to_device(layout.sink[corner], device)
        mask = None if layout.causal else self.backbone.sight_mask(layout.sight[corner], layout.packed)
        places = to_device(sequence, device), to_device(place, device)
        return MassReader(pool, sink, places, self._segments(), mask, self.sharers)

    def _patch_reader(self, layout: Layout, rollouts: Rollouts) -> PatchReader:
        self._check_attention()
        groups = onlookers(layout, rollouts, self.backbone.device)
        return PatchReader(groups, self._segments()[SEGMENTS.index("all")], self.sharers)

    def _segments(self) -> list[range]:
        return layer_segments(len(self.backbone.language_model.layers), self.last_k, self.weight_last_k)

    def _check_attention(self) -> None:
        if not self.backbone.own_attention:
            raise ValueError("attention metrics, rewards and token weights need attn_implementation auto or sdpa")

    def _mass(self, reader: MassReader, layout: Layout, rollouts: Rollouts) -> dict[str, Tensor]:
        clean = [(tail, d) for tail, d in zip(layout.tails, layout.documents, strict=True) if d.view == 0]
        tokens = int(rollouts.mask.sum())
        of_responses, *of_tails = reader.total.cpu().split([tokens, *(len(tail[1]) for tail, _ in clean)])
        mass = torch.zeros(*rollouts.mask.shape, *of_responses.shape[1:])
        mass[rollouts.mask] = of_responses
        prompt_mass = torch.zeros(len(rollouts), *of_responses.shape[1:])
        for values, (_, document) in zip(of_tails, clean, strict=True):
            prompt_mass[list(document.rows)] = values.mean(0)
        return {"attention_mass": mass, "prompt_attention_mass": prompt_mass}


def unpack(values: Tensor, mask: Tensor) -> Tensor:
    """Values [M] back to where the mask [N, T] is set, 0 elsewhere; gradients flow."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(
        to_device(mask, values.device), values
    )
