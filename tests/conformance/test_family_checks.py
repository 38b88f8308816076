"""The checks that every family passes, and for each of them faults that it reports."""

import copy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from tiny_models import SHARPER, checkpoint

from mtrl.compose.family_checks import make_candidate, make_check_rollouts, run_check, run_checks
from mtrl.models import adapters, attention_signals, check_candidate, family_checks, recurrent
from mtrl.models import forward as forward_module
from mtrl.models.backbone import Backbone
from mtrl.models.check_candidate import Finding, check_lengths
from mtrl.models.document_mask import DocumentMask
from mtrl.models.families import load_encoder
from mtrl.models.family_checks import CHECKS, LARGE_CHECKS
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.models.masked_attention import MassReader
from mtrl.models.recurrent import StateForks
from mtrl.rollout.local import Decoding
from pretraining.tiny_checkpoints import CHECKED_FAMILIES, GEMMA4_FAMILIES, TEXT_FAMILIES, make_tiny_checkpoint

BAR = 1e-5  # of log-probs in nats, of gradients relative to the largest of a weight, of masses; in float32
AMPLIFIES = ("qwen3_5", "qwen3_5_moe", "gemma3", *GEMMA4_FAMILIES)  # rounding, in some gradients


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A candidate by its family, with weights as they are initialized."""
    root = tmp_path_factory.mktemp("tiny")

    @lru_cache
    def make(family):
        path = make_tiny_checkpoint(root / family, family, layers=3)
        return make_candidate(str(path), load_model(path), load_encoder(path))

    return make


@pytest.fixture(scope="module")
def sharp(tiny):
    """The same with larger weights, so that a fault moves log-probs by far more than rounding."""

    @lru_cache
    def make(family):
        model = load_model(tiny(family).path)
        with torch.no_grad():
            for parameter in (each for each in model.parameters() if each.dim() > 1):
                parameter.mul_(SHARPER)
        return make_candidate(tiny(family).path, model, tiny(family).encoder)

    return make


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each == "qwen3_5" else pytest.mark.slow) for each in CHECKED_FAMILIES]
)
@pytest.mark.parametrize("check", CHECKS)
def test_every_family_passes(tiny, family, check):
    finding = run_check(check, tiny(family))
    assert finding.passed, finding
    assert finding.skipped == (check == "perturbation" and family in TEXT_FAMILIES), finding
    in_float32 = family in AMPLIFIES and check.endswith("gradients")  # float64 below
    assert in_float32 or finding.worst <= BAR, finding
    if check == "greedy" or (check.startswith("isolation") and not family.endswith("moe")):
        assert finding.worst == 0, finding


@pytest.mark.parametrize(
    "family", ["qwen3_5", *(pytest.param(each, marks=pytest.mark.slow) for each in GEMMA4_FAMILIES)]
)
def test_gradients_are_exact_in_float64(tiny, family):
    """In float32 those of A_log and dt_bias lose most digits, in transformers' forward too; Gemma 4's attention has
    scores without a factor."""
    candidate = tiny(family)
    double = make_candidate(candidate.path, load_model(candidate.path).double(), candidate.encoder)
    finding = run_check("sharing gradients", double)
    assert finding.passed and finding.worst < 1e-6, finding


@pytest.mark.slow  # 2 s per family
@pytest.mark.parametrize("family", CHECKED_FAMILIES)
def test_every_family_passes_with_large_weights(family):
    """Eight times as large: rounding is amplified, and so is every fault."""
    findings = list(run_checks(str(checkpoint(family))))
    assert [each.check for each in findings] == list(CHECKS)
    assert all(each.passed for each in findings), findings


@pytest.mark.slow  # 2 s per family
@pytest.mark.parametrize("family", CHECKED_FAMILIES)
def test_every_family_passes_in_bf16(family):
    failed = [each for each in run_checks(str(checkpoint(family)), dtype="bf16") if not each.passed]
    if family == "gemma4":  # scores of its normed queries and keys are not scaled down, and rounded as they are
        failed = [each for each in failed if each.check != "masses" or each.worst > 0.1]
    assert not failed


# --------------------------------------------------------------------------------------------------------------- faults
def leak(monkeypatch):
    """Responses see the earlier ones of their group."""
    dense = DocumentMask.dense
    monkeypatch.setattr(DocumentMask, "dense", lambda mask, rule: torch.ones_like(dense(mask, rule)).tril())


def wrong_positions(monkeypatch):
    positions = forward_module.prompt_positions
    monkeypatch.setattr(forward_module, "prompt_positions", lambda inputs: 2 * positions(inputs))


def frozen_tower(monkeypatch):
    """Images give no gradients."""
    encode = Backbone.encode_images

    def detached(backbone, inputs):
        features = encode(backbone, inputs)
        return [each and replace(each, embeds=each.embeds.detach()) for each in features]

    monkeypatch.setattr(Backbone, "encode_images", detached)


def wrong_parent(monkeypatch):
    """Responses continue the state of another prompt."""
    make = StateForks.from_mask
    shifted = lambda *given: replace(forks := make(*given), parent=forks.parent.roll(1))  # noqa: E731
    monkeypatch.setattr(StateForks, "from_mask", shifted)


def wrong_tail(monkeypatch):
    """Responses continue no convolution."""
    make = StateForks.from_mask
    without = lambda *given: replace(forks := make(*given), tail=torch.full_like(forks.tail, -1))  # noqa: E731
    monkeypatch.setattr(StateForks, "from_mask", without)


def states_without_gradient(monkeypatch):
    run = recurrent.gated_delta_rule

    def detached(*given, **named):
        output, state = run(*given, **named)
        return output, None if state is None else state.detach()

    monkeypatch.setattr(recurrent, "gated_delta_rule", detached)


def ignored_views(monkeypatch):
    def show_originals(forward, rollouts, others=(), prepare=Forward.prepare):
        return prepare(forward, rollouts, {name: [prompt.media for prompt in rollouts.prompts] for name in others})

    monkeypatch.setattr(Forward, "prepare", show_originals)


def wrong_pool(monkeypatch):
    swapped = {0: 0, 1: 2, 2: 1, -1: -1}
    swap = lambda pool: pool.clone().cpu().apply_(swapped.get)  # noqa: E731
    monkeypatch.setattr(attention_signals, "MassReader", lambda pool, *others: MassReader(swap(pool), *others))


def wrong_layers(monkeypatch):
    """Segments count layers that have no attention."""
    find = Forward._segments
    earlier = lambda forward: [[layer - 1 for layer in each] for each in find(forward)]  # noqa: E731
    monkeypatch.setattr(Forward, "_segments", earlier)


def wrong_decoding(monkeypatch):
    step = Decoding._step
    later = lambda decoding, tokens, position, *others: step(decoding, tokens, position + 9, *others)  # noqa: E731
    monkeypatch.setattr(Decoding, "_step", later)


def fresh_adapters_are_random(monkeypatch):
    monkeypatch.setattr(adapters, "reset_adapters", lambda model, seed: None)
    inject = adapters.inject_adapters

    def random(model, settings):
        inject(model, settings)
        for layer in adapters.adapter_layers(model):
            torch.nn.init.normal_(layer.lora_B["default"].weight, generator=torch.Generator().manual_seed(1))

    monkeypatch.setattr(adapters, "inject_adapters", random)


def merged_halfway(monkeypatch):
    merge = adapters.MergedWeights.__getitem__
    monkeypatch.setattr(adapters.MergedWeights, "__getitem__", lambda weights, name: 0.99 * merge(weights, name))


def lost_weight(monkeypatch):
    export = family_checks.exported_weights

    def without(model):
        weights = dict(export(model))
        del weights[next(name for name in weights if name.endswith("q_proj.weight"))]
        return weights

    monkeypatch.setattr(family_checks, "exported_weights", without)


FAULTS = [
    ("forward", "qwen2", wrong_positions),
    ("forward", "qwen3_vl", wrong_positions),
    ("gradients", "qwen2_5_vl", frozen_tower),
    ("sharing", "qwen2", leak),
    ("sharing", "qwen3_5", wrong_parent),
    ("sharing", "qwen3_5", wrong_tail),
    ("sharing gradients", "qwen3_5", states_without_gradient),
    ("isolation", "qwen3_vl", leak),
    ("isolation gradients", "qwen3_vl", leak),
    ("perturbation", "qwen2_vl", ignored_views),
    ("masses", "qwen2_5_vl", wrong_pool),
    ("masses", "qwen3_5", wrong_layers),
    ("greedy", "qwen3_vl", wrong_decoding),
    ("adapters", "qwen2", fresh_adapters_are_random),
    ("adapters", "qwen2", merged_halfway),
    ("checkpoint", "qwen3_vl", lost_weight),
]


def each_fault(faults):
    names = [f"{check}-{family}-{fault.__name__}" for check, family, fault in faults]
    return pytest.mark.parametrize(("check", "family", "fault"), faults, ids=names)


def assert_reported(check, candidate, fault, monkeypatch):
    candidate = replace(candidate)  # without the log-probs that are kept
    fault(monkeypatch)
    finding = CHECKS[check](candidate)
    assert not finding.passed and finding.worst > 1.5 * max(finding.limit, 0), finding


@each_fault(FAULTS)
def test_a_fault_is_reported(sharp, monkeypatch, check, family, fault):
    assert_reported(check, sharp(family), fault, monkeypatch)


def test_other_pixels_are_reported(tiny):
    candidate, encoder = tiny("qwen2_vl"), copy.copy(tiny("qwen2_vl").encoder)
    encoder.image_settings = replace(encoder.image_settings, image_mean=(0.5, 0.5, 0.5))
    finding = run_check("prompt", replace(candidate, forward=replace(candidate.forward, encoder=encoder)))
    assert not finding.passed and finding.worst == pytest.approx(0.34, abs=0.01)


def test_other_tokens_are_reported(tiny):
    """Another template than the checkpoint's: the system message is missing."""
    candidate = tiny("qwen2_vl")
    encoder = load_encoder(candidate.path, chat_template=Path(tiny("qwen3_vl").path, "chat_template.jinja").read_text())
    forward = replace(candidate.forward, encoder=encoder)
    finding = run_check("prompt", replace(candidate, forward=forward, rollouts=make_check_rollouts(encoder)))
    assert not finding.passed and "input_ids has the shape" in finding.note


def test_every_check_has_a_fault():
    assert {check for check, *_ in FAULTS} | {"prompt"} == CHECKS.keys() >= set(LARGE_CHECKS)


# ------------------------------------------------------------------------------------------------------------ the list
def test_rows_are_those_in_which_faults_show(tiny):
    rollouts = tiny("qwen2").rollouts
    even = replace(rollouts, mask=torch.ones_like(rollouts.mask))
    with pytest.raises(AssertionError, match="short responses"):
        check_lengths(even)
    with pytest.raises(AssertionError, match="several groups"):
        check_lengths(rollouts.rows(torch.tensor([0, 3, 5])))


def test_a_family_that_does_not_share_is_not_compared(tiny):
    candidate = tiny("qwen2")
    alone = replace(candidate, forward=replace(candidate.forward, share_prefix=False))
    for check in ("sharing", "sharing gradients"):
        finding = run_check(check, alone)
        assert finding.skipped and finding.passed and "each response reads its own" in finding.note
    assert run_check("isolation", alone).worst == 0


def test_an_error_is_a_failure_with_its_message(tiny, monkeypatch):
    def broken(*_, **__):
        raise KeyError("pixel_values")

    monkeypatch.setattr(check_candidate, "log_probs", broken)
    finding = run_check("forward", replace(tiny("qwen2")))
    assert not finding.passed and finding.note == "KeyError: 'pixel_values'"


def test_nan_does_not_pass():
    assert not Finding("forward", float("nan"), 1e-3).passed


def test_large_checks_are_left_out_with_the_reason(tiny):
    some = ("forward", *LARGE_CHECKS)
    findings = {each.check: each for each in run_checks(tiny("qwen2").path, only=some, no_room="no memory")}
    assert findings.keys() == set(some) and not findings["forward"].skipped
    assert all(findings[name].skipped and findings[name].note == "no memory" for name in LARGE_CHECKS)
