"""Families with windows, other norms, recurrent layers, experts or neighbours that are rotated together in the engine
for CUDA, against the plain engine."""

from dataclasses import replace

import pytest
import torch
from decode_helpers import engine, same, stopping_encoder
from tiny_models import fresh_backbone, prompts_for, shared_backbone

from mtrl.models.tiny_families.gemma import WINDOW
from mtrl.rollout.decode.engine import explain_local_engine
from mtrl.rollout.decode.explain import explain_unsupported
from mtrl.rollout.decode.step import triton_ops
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling

FAMILIES = ["gemma3", "gemma3_text", "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe", "glm4v", "glm4v_moe"]
SAMPLED = Sampling(n=3, max_new_tokens=WINDOW + 4)
GREEDY = replace(SAMPLED, n=1, temperature=0)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def generate(family, sampling, prompts=None, encoder=None, **more):
    """What both engines say."""
    backbone, encoder = shared_backbone(family), encoder or stopping_encoder(family)
    prompts = prompts or prompts_for(family)
    found = engine(backbone, encoder, **more).generate(prompts, sampling)
    return found, LocalGenerator(backbone, encoder).generate(prompts, sampling)


def test_greedy_tokens_equal_the_plain_engine(family):
    """Prompts of unequal lengths, responses as long as a window and longer."""
    encoder = stopping_encoder(family)
    encoder.stop_ids = ()
    found, expected = generate(family, GREEDY, encoder=encoder)
    same(found, expected)
    lengths = {len(prompt.ids) for prompt in prompts_for(family)}
    assert found.mask.all() and len(lengths) == 4 and max(lengths) > WINDOW


def test_rows_that_stop_leave_their_slots_to_others(family):
    """12 responses of 4 prompts in 5 slots; a prompt's state and keys are those of its own rows."""
    found, expected = generate(family, SAMPLED, rows_at_once=5)
    same(found, expected)
    assert len(found.mask.sum(1).unique()) > 3, "they stop at different times"


@pytest.mark.parametrize("family", ["qwen2", "qwen3_5_moe", "qwen3_vl_moe", "glm4v_moe"])
def test_experts_are_those_of_the_plain_engine(family):
    """Token by token, the first one's from the prompt; nothing for a dense model."""
    found, expected = generate(family, replace(SAMPLED, n=2), prompts=prompts_for(family)[1:3])
    assert (found.routed_experts is None) == (not family.endswith("moe"))
    if found.routed_experts is not None:
        assert torch.equal(found.routed_experts.sort(-1).values, expected.routed_experts.sort(-1).values)


def test_corrections_and_factors_of_routers_are_those_of_the_plain_engine():
    """In a fresh model corrections are 0 and the factor 1."""
    backbone, encoder, prompts = fresh_backbone("glm4v_moe"), stopping_encoder("glm4v_moe"), prompts_for("glm4v_moe")
    before = LocalGenerator(backbone, encoder).generate(prompts[1:3], GREEDY)
    for router in backbone.routers:
        router.e_score_correction_bias.copy_(torch.tensor([0.5, -0.5, 0.25, -0.25]))
        router.routed_scaling_factor = 2.5
    expected = LocalGenerator(backbone, encoder).generate(prompts[1:3], GREEDY)
    found = engine(backbone, encoder).generate(prompts[1:3], GREEDY)
    same(found, expected)
    assert torch.equal(found.routed_experts.sort(-1).values, expected.routed_experts.sort(-1).values)
    first = [each.routed_experts[:, 0].sort(-1).values for each in (before, expected)]
    assert not torch.equal(*first), "the prompts' last tokens have other experts"


def test_top_k_and_another_batch(family):
    same(*generate(family, replace(SAMPLED, top_k=20, n=2), prompts=prompts_for(family)[1:3]))


@pytest.mark.slow  # minutes in the interpreter
def test_interpreted_kernels_give_the_tokens_of_the_plain_engine(family):
    pytest.importorskip("triton")
    same(*generate(family, replace(SAMPLED, n=2, max_new_tokens=4), prompts_for(family)[1:3], ops=triton_ops()))


def test_the_local_engine_decodes_it_on_a_gpu(family):
    backbone = shared_backbone(family)
    assert explain_unsupported(backbone.language_model, backbone.model.get_output_embeddings()) is None
    assert explain_local_engine(backbone) == (None if backbone.device.type == "cuda" else "no CUDA device")


REFUSED = [
    ("gemma3_text", lambda lm: lm.config.rope_parameters["full_attention"].update(rope_type="dynamic"), "'dynamic'"),
    ("gemma3_text", lambda lm: setattr(lm.config, "hidden_activation", "gelu"), "an MLP with gelu"),
    ("qwen3_5", lambda lm: setattr(lm.config, "linear_value_head_dim", 24), "heads of 24 numbers"),
    ("qwen3_5", lambda lm: setattr(lm.layers[0].linear_attn, "in_proj_z", torch.nn.Identity()), "in_proj_z is a Ident"),
    ("qwen3_vl_moe", lambda lm: setattr(lm.layers[0].mlp, "experts", torch.nn.Identity()), "the experts are a Ident"),
    ("glm4v", lambda lm: setattr(lm.layers[0].mlp, "gate_up_proj", torch.nn.Identity()), "gate_up_proj is a Ident"),
    ("glm4v_moe", lambda lm: setattr(lm.layers[1].mlp.gate, "num_group", 2), "a router that chooses groups"),
    ("glm4v_moe", lambda lm: setattr(lm.layers[1].mlp.gate, "norm_topk_prob", False), "not divided by their sum"),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_is_refused_is_named(family, change, message):
    backbone = fresh_backbone(family)
    change(backbone.language_model)
    assert message in explain_unsupported(backbone.language_model, backbone.model.get_output_embeddings())
