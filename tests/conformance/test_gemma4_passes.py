"""What Gemma 4 has of its own: faults are reported, kernels of a GPU get the same rule, unused weights stay.

That both kinds of models pass every check is in test_family_checks.py.
"""

import copy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from helpers import close
from run_helpers import read_metrics
from test_family_checks import BAR, assert_reported, each_fault
from test_mask_rules import check_one_sequence
from tiny_vlms import train_one_step
from transformers import AutoModelForImageTextToText

from mtrl.compose.family_checks import make_candidate
from mtrl.models.activation_checkpointing import enable_activation_checkpointing
from mtrl.models.backbone import Backbone, check_supported, explain_no_sequence_parallel
from mtrl.models.check_candidate import gradient_gap, gradients, token_weights
from mtrl.models.document_mask import MaskRule
from mtrl.models.families import load_encoder
from mtrl.models.families.gemma4 import Gemma4Family
from mtrl.models.layer_kinds import FULL, SLIDING
from mtrl.models.load_model import load_model
from mtrl.models.model_size import model_size
from mtrl.models.tiny_families.gemma4 import SHARERS, SOFTCAP, WINDOW
from mtrl.rollout.decode.explain import explain_unsupported
from mtrl.types import Sampling
from pretraining.tiny_checkpoints import GEMMA4_FAMILIES, make_tiny_checkpoint

CPU = torch.device("cpu")
SMALL, LARGE = GEMMA4_FAMILIES


@pytest.fixture(scope="module")
def candidate(tmp_path_factory):
    @lru_cache
    def make(family):
        path = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / family, family, layers=3)
        return make_candidate(str(path), load_model(path), load_encoder(path))

    return make


def test_the_tiny_models_have_the_parts(candidate):
    small, large = (candidate(each).forward.backbone for each in GEMMA4_FAMILIES)
    assert small.mask_rules == {FULL: MaskRule(), SLIDING: MaskRule(WINDOW)}
    assert large.mask_rules == {FULL: MaskRule(), SLIDING: MaskRule(WINDOW, image_blocks=True)}
    assert [layer.self_attn.is_kv_shared_layer for layer in small.language_model.layers] == [False] * 3 + [True] * 2
    assert {small.layer_kinds[-1], small.layer_kinds[-2]} == {FULL, SLIDING}, "both kinds share"
    assert all(layer.self_attn.v_proj is None for layer in large.language_model.layers[::2])
    assert small.head_widths == large.head_widths == {16, 32}
    assert small.softcap == large.softcap == SOFTCAP
    sizes = [model_size(each.model) for each in (small, large)]
    assert [each.layers for each in sizes] == [len(small.layer_kinds) - SHARERS, 3]
    assert [each.keys for each in sizes] == [2 * 32, 2 * 16], "the widest layer: two heads of 32, of 16"


# --------------------------------------------------------------------------------------------------------------- faults
def causal_images(monkeypatch):
    monkeypatch.setattr(Gemma4Family, "image_block_kinds", lambda *_: ())


def blocks_everywhere(monkeypatch):
    monkeypatch.setattr(Gemma4Family, "image_block_kinds", lambda *_: (FULL, SLIDING))


def wider_window(monkeypatch):
    attends = MaskRule.attends
    wider = lambda rule: rule if rule.window is None else replace(rule, window=rule.window + 1)  # noqa: E731
    monkeypatch.setattr(MaskRule, "attends", lambda rule, *given: attends(wider(rule), *given))


def own_layer_embeddings(monkeypatch):
    """Image tokens have those of their mark."""
    inputs = lambda _, model, ids: {"per_layer_inputs": model.model.language_model.get_per_layer_inputs(ids, None)}  # noqa: E731
    monkeypatch.setattr(Gemma4Family, "token_inputs", inputs)


def uncapped(monkeypatch):
    monkeypatch.setattr(Backbone, "softcap", None)


FAULTS = [
    ("forward", LARGE, causal_images),
    ("forward", LARGE, blocks_everywhere),
    ("gradients", LARGE, wider_window),
    ("masses", SMALL, wider_window),
    ("forward", SMALL, own_layer_embeddings),
    ("forward", SMALL, uncapped),
    ("gradients", SMALL, uncapped),
]


@each_fault(FAULTS)
def test_a_fault_is_reported(candidate, monkeypatch, check, family, fault):
    given = candidate(family)
    fault(monkeypatch)
    forward = replace(given.forward, backbone=Backbone(given.forward.backbone.model))  # it reads the rules once
    assert_reported(check, replace(given, forward=forward), lambda _: None, monkeypatch)


# --------------------------------------------------------------------------------------------------------- other routes
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # on a CPU, on purpose
@pytest.mark.parametrize("family", GEMMA4_FAMILIES)
@pytest.mark.parametrize("kind", ["matrix", pytest.param("blocks", marks=pytest.mark.slow)])
def test_all_documents_in_one_sequence(candidate, family, kind, monkeypatch):
    check_one_sequence(candidate(family), kind, monkeypatch)


@pytest.mark.parametrize("family", GEMMA4_FAMILIES)
def test_sampled_log_probs_are_those_of_the_pass(candidate, family):
    """With capped logits in both; responses longer than the window, prompts of unequal length in one batch."""
    given = candidate(family)
    sampling = Sampling(n=2, temperature=0.7, max_new_tokens=2 * WINDOW)
    rollouts = given.generator.generate(given.rollouts.prompts, sampling)
    found = replace(given.forward, temperature=0.7).signals(rollouts).old_logprobs
    assert rollouts.mask.sum(1).max() > WINDOW
    close(found, rollouts.rollout_logprobs, rtol=0, atol=BAR)


def test_gradients_of_shared_keys_where_layers_are_recomputed(candidate):
    """A layer that is recomputed stores its keys a second time; those that share them must not notice."""
    given = candidate(SMALL)
    weights = token_weights(given.rollouts)
    expected = gradients(given, given.forward, given.rollouts, weights)
    model = copy.deepcopy(given.plain)
    backbone, calls = Backbone(model), []
    enable_activation_checkpointing(model.train(), True)
    backbone.language_model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    found = gradients(replace(given, plain=model), replace(given.forward, backbone=backbone), given.rollouts, weights)
    assert len(calls) == 2 and gradient_gap(found, expected)[0] <= BAR


@pytest.mark.parametrize("family", GEMMA4_FAMILIES)
def test_a_blank_image_has_one_token(candidate, family):
    """For ranks without images, whose towers run as well."""
    backbone = candidate(family).forward.backbone
    assert len(backbone._run_tower([backbone.images.blank()])[0].embeds) == 1
    assert len(backbone.encode_blank_image().embeds) == 0


def test_what_is_not_supported_is_one_line(candidate, monkeypatch):
    backbone = candidate(SMALL).forward.backbone
    head = backbone.model.get_output_embeddings()
    assert "the layers of the family 'gemma4_text'" in explain_unsupported(backbone.language_model, head)
    assert "not known to be exact" in explain_no_sequence_parallel(backbone.model.config, 2)
    config, model = copy.deepcopy(backbone.model.config), backbone.model
    config.text_config.enable_moe_block, config.text_config.use_bidirectional_attention = True, "all"
    monkeypatch.setattr(model, "config", config)
    with pytest.raises(ValueError, match=r"not supported: experts, attention of text to later tokens$"):
        check_supported(model)


# ----------------------------------------------------------------------------------------------------------- whole runs
@pytest.mark.usefixtures("no_curves")
@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["worker.actor.model.peft_type=lora"]], ids=["full", "lora"])
@pytest.mark.parametrize("family", GEMMA4_FAMILIES)
def test_it_trains_with_tprl(tmp_path, monkeypatch, family, words):
    monkeypatch.chdir(tmp_path)
    path = make_tiny_checkpoint(tmp_path / "tiny", family)
    more = ["training.max_steps=2", "dataset.max_response_length=12", "worker.rollout.n=3"]
    more += ["optimization.enable_trajectory_reweighting=true", "worker.actor.optim.lr=1e-3"]
    assert train_one_step(path, *more, *words) == 0
    metrics = read_metrics(tmp_path / "outputs/mtrl/run")
    for step in (1, 2):
        assert metrics[step, False]["actor/grad_norm"] > 0
        assert metrics[step, False]["rollout/logprob_gap_mean"] < BAR
    saved = Path("outputs/mtrl/run/checkpoints/step_2")
    if not words:
        before, after = (AutoModelForImageTextToText.from_pretrained(each).state_dict() for each in (path, saved))
        same = {name for name in before if torch.equal(before[name], after[name])}
        assert before.keys() == after.keys()
        sounds = {name for name in before if "audio" in name}
        assert sounds <= same and bool(sounds) == (family == SMALL), "no pass runs it, and it is not lost"
        assert not any("q_proj" in name and name.endswith("weight") for name in same - sounds)
