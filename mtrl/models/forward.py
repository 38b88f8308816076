"""Score sampled tokens with the model, under any view of the image.

Log-prob, entropy, visual dependency, attention and similarity to the image of every response token; with gradients for
the update, without for the probes. A prompt and its images are computed once for the whole group; all views share one
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mtrl.algorithms.signals import (
    ATTENTION,
    bounded_dependency,
    layer_segments,
    measure_signal,
    visual_dependency,
)
from mtrl.algorithms.vocab import (
    CHUNK_POSITIONS,
    TokenScores,
    compare_distributions,
    full_kl,
    map_log_probs,
    support_mass,
    token_scores,
)
from mtrl.models import patches
from mtrl.models.attention_signals import AttentionSignals, Segments, check_attention
from mtrl.models.backbone import Backbone, Masks, prompt_positions, vision_tokens
from mtrl.models.counterfactual import CounterfactualEditor, make_editor
from mtrl.models.device_copy import queue_cpu_copy, to_device, unpack, unpack_rows
from mtrl.models.families.model_family import Features
from mtrl.models.image_similarity import ImageSimilarity
from mtrl.models.layout import Layout, lay_out
from mtrl.models.masked_attention import AttentionReader, MapReader
from mtrl.models.parallel.sequence import SequenceParallelGroup
from mtrl.models.recurrent import StateForks
from mtrl.models.routing import RoutingReader
from mtrl.models.step_inputs import StepInputs
from mtrl.models.turns import conversation, encoded_prompts, rows_with_turns
from mtrl.models.views import standard_deviations
from mtrl.protocols import PromptEncoder
from mtrl.types import PERTURBED, Needs, Prompt, Rollouts, Signal, Signals, TokenStates

OLD_LOGPROBS = Needs("old_logprobs")
FUSED_CHUNK = 2048  # positions; every chunk reads and writes the gradient of the output matrix
Media = Sequence[tuple[np.ndarray, ...] | None]  # of `encoded_prompts` as a view shows them; None: no image tokens
Views = Mapping[str, Media]  # other views by name
NO_VIEWS: Views = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class PreparedPass:
    """The beginning of a pass over some rollouts: their layout, the features of each document's images, and what
    changes the attention of some documents."""

    layout: Layout
    features: list[Features | None]
    editor: CounterfactualEditor | None = None


@dataclass(frozen=True)
class Forward:
    """Scores rollouts under the model's current weights, at the rollout temperature.

    `packed`: all documents in one sequence without padding, for kernels that skip masked blocks (CUDA). `last_k` and
    `weight_last_k` restrict the layers of the segments `all` and `weight` of the attention. `dependency` estimates S.
    `top_p` and `top_k` are the sampler's: scores are of the full distribution; `support` is the mass that these leave.
    The ranks of a sequence-parallel group (`backbone.ranks`) make every pass together, over the same rollouts. `kept`
    holds what the passes of a step have in common, also those of a reference and a critic.
    """

    backbone: Backbone
    encoder: PromptEncoder
    temperature: float = 1.0
    share_prefix: bool = True
    packed: bool = False
    chunk: int = CHUNK_POSITIONS
    attention_last_k_layers: int | None = None
    token_weight_last_k_layers: int | None = None
    perception_estimator: Literal["low_var_kl", "full_kl"] = "low_var_kl"
    top_p: float = 1.0
    top_k: int = -1
    kept: StepInputs = field(default_factory=StepInputs, compare=False)

    @property
    def sp_group(self) -> SequenceParallelGroup:
        return self.backbone.sp_group

    def logp(self, rollouts: Rollouts) -> Tensor:
        """[N, T] log-probs with gradients, on the model's device; 0 off the mask."""
        return unpack(self.scores(rollouts).logp, rollouts.mask)

    def scores(
        self,
        rollouts: Rollouts,
        entropy: bool = False,
        routing: RoutingReader | None = None,
        prepared: PreparedPass | None = None,
    ) -> TokenScores:
        """[M] log-probs with gradients; with `entropy` also entropies and the support mass, without gradients."""
        return self.score_tokens(self.response_hidden(rollouts, routing, prepared), rollouts, entropy)

    def values(self, rollouts: Rollouts, prepared: PreparedPass | None = None) -> Tensor:
        """[M] with gradients: the value of the state before each token, the one that predicts it."""
        hidden = self.response_hidden(rollouts, prepared=prepared)
        return self.gather_tokens(hidden.float() @ self.backbone.output_matrix[0].float(), rollouts)

    def signals(self, rollouts: Rollouts, needs: Needs = OLD_LOGPROBS, views: Views | None = None) -> Signals:
        """The signals in `needs` for every token, under the original image and, for comparisons, other `views`. If only
        attention is needed, the vocabulary is skipped."""
        return self.start_signals(rollouts, needs, views)()

    @torch.no_grad()
    def start_signals(
        self, rollouts: Rollouts, needs: Needs = OLD_LOGPROBS, views: Views | None = None
    ) -> Callable[[], Signals]:
        """Queue the pass of `signals`, and return a function that waits for it: meanwhile the device gets the next."""
        prepared = self.prepare(rollouts, {name: (views or {})[name] for name in needs.other_views})
        layout = prepared.layout
        attention = AttentionSignals(needs, layout, rollouts, self.backbone, self._segments())
        routing = self.make_routing_reader(rollouts) if "old_logprobs" in needs else None
        with ImageSimilarity(needs, layout, self.backbone, self.chunk) as similarity:
            states = self._last_states(prepared, attention.readers, routing)
        original, *others = self._select_predictors(states, layout)
        similar = similarity.measure(states, original)
        del states  # frees memory for the vocabulary
        hidden = dict(zip(needs.other_views, others, strict=True))
        scored = self._score_views(original, hidden, rollouts, needs) if needs.without(*ATTENTION) else {}
        measured = self._measure_custom(original, hidden, rollouts, needs.custom)
        measured |= self.compare_views(original, others, rollouts, needs)
        scored |= {name: self.gather_tokens(values, rollouts) for name, values in similar.items()}
        if routing is not None:
            scored["routing_mismatch"] = self.gather_mismatch(routing, rollouts)

        def collect() -> Signals:
            signals: dict[str, Any] = self._unpack_scored(scored, rollouts, needs)
            extra = {name: unpack_rows(values.cpu(), rollouts.mask) for name, values in measured.items()}
            return Signals(**signals | attention.collect(), extra=extra)

        return collect

    def _unpack_scored(self, scored: dict[str, Tensor], rollouts: Rollouts, needs: Needs) -> dict[str, Tensor]:
        """[N, T] each, on the CPU, and the dependency on the image from the log-probs of both views."""
        signals = {name: unpack(values.cpu(), rollouts.mask) for name, values in scored.items()}
        if "dependency" in signals:
            signals["dependency"] = bounded_dependency(signals["dependency"], rollouts.mask)
        elif "dependency" in needs:
            old, perturbed = signals["old_logprobs"], signals["perturbed_logprobs"]
            signals["dependency"] = visual_dependency(old, perturbed, rollouts.mask)
        return signals

    def _score_views(
        self, original: Tensor, others: Mapping[str, Tensor], rollouts: Rollouts, needs: Needs
    ) -> dict[str, Tensor]:
        """Each signal of the vocabulary as [M], on the device, so nothing waits for the device in between. A new signal
        of this kind belongs here."""
        changes, perturbed_hidden = "entropy_change" in needs, others.get(PERTURBED)
        clean = self.score_tokens(original, rollouts, entropy=changes or "entropy" in needs or "support" in needs)
        signals = {"old_logprobs": clean.logp}
        if clean.entropy is not None:
            signals["entropy"] = clean.entropy
        if clean.support is not None:
            signals["support"] = clean.support
        if perturbed_hidden is not None:
            perturbed = self.score_tokens(perturbed_hidden, rollouts, entropy=changes)
            signals["perturbed_logprobs"] = perturbed.logp
            if clean.entropy is not None and perturbed.entropy is not None:
                signals["entropy_change"] = perturbed.entropy - clean.entropy
            if "dependency" in needs and self.perception_estimator == "full_kl":
                kl = full_kl(original, perturbed_hidden, self.backbone.output_matrix, **self.distribution())
                signals["dependency"] = self.gather_tokens(kl, rollouts)
        return signals

    def compare_views(
        self, original: Tensor, others: Sequence[Tensor], rollouts: Rollouts, needs: Needs
    ) -> dict[str, Tensor]:
        """[M] on the device by name, with gradients where they are on: the needed ones of `OF_A_VIEW`, from the states
        of `needs.other_views`."""
        found: dict[str, Tensor | None] = {}
        for view, other in zip(needs.other_views, others, strict=True):
            quantities = needs.of_view(view)
            values = self._compare_view(original, other, rollouts, quantities)
            found |= {f"{name}@{view}": values[name] for name in quantities}
        return {name: values for name, values in found.items() if values is not None}

    def _compare_view(
        self, original: Tensor, other: Tensor, rollouts: Rollouts, quantities: Sequence[str]
    ) -> dict[str, Tensor | None]:
        scored = {"logprobs"} if torch.is_grad_enabled() else {"logprobs", "entropy"}  # entropies without gradients
        found: dict[str, Tensor | None] = {}
        if scored & {*quantities}:
            scores = self.score_tokens(other, rollouts, entropy="entropy" in scored & {*quantities})
            found |= {"logprobs": scores.logp, "entropy": scores.entropy}
        if compared := [each for each in quantities if each not in scored]:
            matrix, rules = self.backbone.output_matrix, self.distribution()
            values = compare_distributions(original, other, matrix, compared, **rules)
            found |= {name: self.gather_tokens(each, rollouts) for name, each in values.items()}
        return found

    def _measure_custom(
        self, original: Tensor, others: Mapping[str, Tensor], rollouts: Rollouts, signals: Iterable[Signal]
    ) -> dict[str, Tensor]:
        """[M, *shape] on the device by name: the signals of users' classes."""
        extra = {}
        for signal in sorted(signals, key=lambda each: each.name):
            seen = [original] if signal.views == 1 else [original, others[signal.view]]
            values = measure_signal(signal, *(self._token_states(each, rollouts) for each in seen))
            extra[signal.name] = self.gather_tokens(values, rollouts)
        return extra

    def _token_states(self, hidden: Tensor, rollouts: Rollouts) -> TokenStates:
        tokens = self._local_tokens(rollouts, hidden.device)
        return TokenStates(
            tokens, hidden, partial(map_log_probs, hidden, self.backbone.output_matrix, tokens, **self.distribution())
        )

    @torch.no_grad()
    def maps(self, rollouts: Rollouts, tokens: Sequence[int]) -> Tensor:
        """[tokens, len(SEGMENTS), L]: the attention of chosen tokens of one response on each prompt token."""
        assert len(rollouts) == 1, "maps are for one response at a time"
        check_attention(self.backbone)
        prepared = self.prepare(rollouts)
        layout = prepared.layout
        chosen, device = torch.tensor(tokens, dtype=torch.long), self.backbone.device
        sequence, column = (each[chosen].to(device) for each in layout.predictors[0])
        pool, sink = layout.pool.to(device), layout.sink.to(device)
        documents, index, rules = layout.document_mask.to(device), (sequence, column), self.backbone.mask_rules
        masks = self.backbone.by_layer({kind: documents.rows(index, rule) for kind, rule in rules.items()})
        reader = MapReader(pool, sink, masks, index, self._segments())
        self._last_states(prepared, [reader])
        return reader.total[:, :, : len(rollouts.prompts[0].ids)].cpu()

    def response_hidden(
        self, rollouts: Rollouts, routing: RoutingReader | None = None, prepared: PreparedPass | None = None
    ) -> Tensor:  # fmt: skip
        """[M, H]: for every valid response token, row by row, the hidden state of the position that predicts it; in a
        sequence-parallel group those of this rank's tokens. The pass may have been `prepared`."""
        return self.view_states(rollouts, routing, prepared)[0]

    def view_states(
        self, rollouts: Rollouts, routing: RoutingReader | None = None, prepared: PreparedPass | None = None
    ) -> list[Tensor]:
        """The `response_hidden` of each view of the prepared pass."""
        prepared = prepared or self.prepare(rollouts)
        return self._select_predictors(self._last_states(prepared, routing=routing), prepared.layout)

    def score_tokens(self, hidden: Tensor, rollouts: Rollouts, entropy: bool = False) -> TokenScores:
        """The `scores` of `response_hidden`."""
        targets = self._local_tokens(rollouts, hidden.device)
        matrix, rules = self.backbone.output_matrix, self.distribution()
        scores = token_scores(hidden, matrix, targets, entropy=entropy, **rules | self._fusion())
        if entropy and (self.top_p < 1 or self.top_k > 0):
            support = support_mass(hidden, matrix, targets, top_p=self.top_p, top_k=self.top_k, **rules)
            scores = scores._replace(support=support)
        others = (scores.entropy, scores.support)
        gathered = (None if each is None else self.gather_tokens(each, rollouts) for each in others)
        return TokenScores(self.gather_tokens(scores.logp, rollouts), *gathered)

    def _local_tokens(self, rollouts: Rollouts, device: torch.device) -> Tensor:
        """The ids of this rank's response tokens."""
        tokens = rollouts.tokens[rollouts.mask]
        return to_device(tokens[self.sp_group.local_tokens(len(tokens))], device)

    def gather_tokens(self, values: Tensor, rollouts: Rollouts) -> Tensor:
        """[M, ..]: the numbers of every token, gathered from the ranks that each computed some of them."""
        return self.sp_group.gather_tokens(values, int(rollouts.mask.sum()))

    def distribution(self) -> dict[str, Any]:
        """The arguments of `algorithms.vocab` that define the distribution."""
        forbidden = to_device(torch.tensor(self.encoder.forbidden_ids, dtype=torch.long), self.backbone.device)
        rules: dict[str, Any] = {"temperature": self.temperature, "forbidden": forbidden}
        return rules | {"softcap": self.backbone.softcap, "chunk": self.chunk}

    def _fusion(self) -> dict[str, Any]:
        """How `token_scores` handles a chunk, where pieces of the model are compiled."""
        if not self.backbone.compiled:
            return {}
        return {
            "chunk": max(self.chunk, FUSED_CHUNK),
            "fuse": lambda function: patches.compile_function(function, find_row_dims),
        }

    # ------------------------------------------------------------------------------------------------------- one pass
    def prepare(self, rollouts: Rollouts, others: Views = NO_VIEWS) -> PreparedPass:
        """Lay out a pass over the original view and `others`, and encode the images, with gradients where they are
        on."""
        kept, device = self.kept, self.backbone.device
        encoded, tower = [kept.first_equal(each) for each in encoded_prompts(rollouts)], kept.tower_of(self.backbone)
        known: dict[tuple[int, int], Features] = {
            (0, g): features.map(lambda each: to_device(each, device))
            for g, prompt in enumerate(encoded)
            if (features := kept.find("features", tower, prompt)) is not None
        }
        read = [self._read_prompt(prompt, (0, g) in known, tower) for g, prompt in enumerate(encoded)]
        layout = self._lay_out(rollouts, encoded, [positions for _, positions in read], others)
        inputs = {(0, g): each for g, (each, _) in enumerate(read)} | {
            (number, g): self.encoder.inputs(encoded[g], media, device)
            for number, (name, view) in enumerate(others.items(), 1)
            for g, media in enumerate(view)
            if media and standard_deviations(name) is None
        }
        editor = make_editor(layout, rollouts, self.backbone.by_layer(self.backbone.mask_rules), device)
        if editor is not None:
            check_attention(self.backbone)
        if self.sp_group.size > 1 and self.backbone.images is not None:
            return PreparedPass(layout, self._own_features(layout, inputs, rollouts), editor)
        images = self.backbone.encode_images(list(inputs.values()))
        features = dict(zip(inputs, images, strict=True)) | known
        if tower is not None:
            for g in (g for g, prompt in enumerate(encoded) if prompt.task.visual):
                copy = lambda each: each.map(queue_cpu_copy)  # noqa: E731
                kept.keep("features", tower, encoded[g], value=features[0, g], copy=copy)
        return PreparedPass(layout, [features.get(key) for key in layout.feature_keys(rollouts)], editor)

    def _read_prompt(
        self, prompt: Prompt, has_features: bool, tower: Backbone | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The inputs of the vision tower, empty if it has nothing to do, and the positions [3, L]."""
        positions, idle = self.kept.find("positions", prompt), has_features or not prompt.task.visual
        if idle and positions is not None:
            return {}, positions
        inputs = self.kept.find("inputs", prompt) or self.encoder.inputs(prompt, None, self.backbone.device)
        positions = prompt_positions(inputs)
        self.kept.keep("positions", prompt, value=positions)
        if tower is None and not idle:
            self.kept.keep("inputs", prompt, value=inputs, where="device")
        return {} if idle else inputs, positions

    def _lay_out(
        self, rollouts: Rollouts, encoded: Sequence[Prompt], positions: Sequence[Tensor], others: Views
    ) -> Layout:  # fmt: skip
        """The layout of these rows. One with several views is read by a single pass."""
        options: dict[str, Any] = {"share_prefix": self.share_prefix, "packed": self.packed}
        options |= {"sp_size": self.sp_group.size}
        if rollouts.observations is not None:
            options["observed_positions"] = self._observed_positions(rollouts)
        if others or not self.kept.is_open:
            blind = [number for number, view in enumerate(others.values(), 1) if None in view]
            found = {number: standard_deviations(name) for number, name in enumerate(others, 1)}
            options["counterfactual"] = {number: each for number, each in found.items() if each is not None}
            return lay_out(rollouts, positions, views=1 + len(others), without_images=blind, **options)
        rows = (rollouts.group, rollouts.mask.sum(1), rollouts.tokens[rollouts.mask])
        turns = tuple(turn.after for each in rows_with_turns(rollouts).values() for turn in each.turns)
        settings = (self.share_prefix, self.packed, self.sp_group.size)
        key = ("layout", *settings, *encoded, *turns, *(each.numpy().tobytes() for each in rows))
        layout = self.kept.find(*key) or lay_out(rollouts, positions, **options)
        self.kept.keep(*key, value=layout)
        return layout

    def _observed_positions(self, rollouts: Rollouts) -> dict[int, Tensor]:
        """[3, own and observed tokens] of each row with observations, by the family's rule for whole conversations."""
        found = {}
        for row, observed in rows_with_turns(rollouts).items():
            prompt, own = rollouts.prompts[int(rollouts.group[row])], rollouts.tokens[row][rollouts.mask[row]]
            whole = self.encoder.inputs(conversation(observed, prompt, own))
            found[row] = prompt_positions(whole)[:, len(prompt.ids) :]
        return found

    def _own_features(
        self, layout: Layout, inputs: dict[tuple[int, int], dict[str, Tensor]], rollouts: Rollouts
    ) -> list[Features | None]:
        """The features of image tokens in this rank's part of the sequences. Only images that reach into it are
        encoded."""
        keys, encoded = layout.feature_keys(rollouts), encoded_prompts(rollouts)
        sizes = [int(vision_tokens(encoded[index]).sum()) for _, index in keys]
        own = layout.vision_within(self.sp_group.local_columns(layout.ids.shape[1]), sizes)
        wanted = {key: [torch.empty(0, dtype=torch.long)] for key in inputs}  # by all documents of a prompt
        for key, tokens in zip(keys, own, strict=True):
            if key in inputs:
                wanted[key].append(tokens)
        selected = {key: self.backbone.images.select(inputs[key], torch.cat(wanted[key])) for key in inputs}
        parts = dict(zip(inputs, self.backbone.encode_images([each for each, _ in selected.values()]), strict=True))
        features: list[Features | None] = []
        for key, tokens in zip(keys, own, strict=True):
            images = parts.get(key)
            features.append(images and images.rows(to_device(selected[key][1][tokens], self.backbone.device)))
        return features

    def _select_predictors(self, states: Tensor, layout: Layout) -> list[Tensor]:
        """For each view the hidden states [M, H] that predict the response tokens of this rank."""
        return [self.sp_group.local_hidden(states, index) for index in layout.predictors]

    def _last_states(
        self, prepared: PreparedPass, readers: Sequence[AttentionReader] = (), routing: RoutingReader | None = None
    ) -> Tensor:
        """[B, S, H]: the last hidden states of this rank's part of the sequences."""
        sp_group, layout = self.sp_group, prepared.layout
        ids, positions, mask, states = self._read_layout(layout)
        with nullcontext() if routing is None else routing.recorder:
            hidden = self.backbone.forward_text(
                ids,
                positions,
                sp_group.local_part(layout.is_vision),
                prepared.features,
                attention_mask=mask,
                readers=readers,
                state_mask=states,
                editor=prepared.editor,
            )
        if routing is not None:
            routing.compare(
                sp_group.local_hidden(routing.recorder.take(len(hidden), hidden.device), layout.predictors[0])
            )
        return hidden

    def _read_layout(self, layout: Layout) -> tuple[Tensor, Tensor, Masks, StateForks | None]:
        """Ids, positions and masks on the device; of ids and positions this rank's part."""
        backbone, sp_group = self.backbone, self.sp_group
        key = ("masks", layout, backbone.device, backbone.mask_settings)
        if (found := self.kept.find(*key)) is not None:
            return found
        ids, positions = (to_device(sp_group.local_part(e), backbone.device) for e in (layout.ids, layout.positions))
        # A window counts image tokens that are left out, too, which the model would not do by itself.
        plain = layout.causal and (backbone.is_causal or all(document.images for document in layout.documents))
        masks = None if plain else backbone.make_masks(layout.document_mask, layout.packed)
        states = None if plain else backbone.make_state_forks(layout.document_mask)
        if len(layout.predictors) == 1:
            self.kept.keep(*key, value=(ids, positions, masks, states), where="device")
        return ids, positions, masks, states

    # -------------------------------------------------------------------------------------------------------- experts
    def make_routing_reader(self, rollouts: Rollouts) -> RoutingReader | None:
        """Compares this rank's tokens; None if the engine recorded no experts."""
        if rollouts.routed_experts is None:
            return None
        experts = rollouts.routed_experts[rollouts.mask]
        own = experts[self.sp_group.local_tokens(len(experts))]
        return RoutingReader(self.backbone.routers, to_device(own, self.backbone.device))

    def gather_mismatch(self, routing: RoutingReader, rollouts: Rollouts) -> Tensor:
        """[M]"""
        assert routing.mismatch is not None, "a pass has been read"
        return self.gather_tokens(routing.mismatch, rollouts)

    def _segments(self) -> Segments:
        """The layers of each segment, counted among those that have attention."""
        layers = self.backbone.attention_layers
        segments = layer_segments(len(layers), self.attention_last_k_layers, self.token_weight_last_k_layers)
        return [[layers[index] for index in segment] for segment in segments]


def find_row_dims(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """The dimension of the arguments of a chunk's functions (`algorithms/vocab.py`) that counts its positions."""
    hidden, _matrix, targets, *others = tensors
    return ((each, 0) for each in (hidden, targets, *(other for other in others if other.dim() == 2)))
