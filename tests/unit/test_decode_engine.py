"""The engine for CUDA on a CPU: its kernels interpreted, on a tiny model, against the plain engine."""

import logging
from dataclasses import replace

import pytest
import torch
from decode_helpers import engine, same, stopping_encoder
from tiny_models import fresh_backbone, prompts_for

from mtrl.models.backbone import Backbone
from mtrl.rollout.decode.engine import GraphGenerator, explain_local_engine, make_fastest_generator
from mtrl.rollout.decode.explain import explain_unsupported
from mtrl.rollout.decode.fused_weights import DecodeWeights
from mtrl.rollout.decode.step import triton_ops
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling

FAMILY = "qwen2_5_vl"


@pytest.fixture
def encoder():
    return stopping_encoder(FAMILY)


SAMPLINGS = [
    Sampling(temperature=0, max_new_tokens=2),
    pytest.param(Sampling(n=5, max_new_tokens=4), marks=pytest.mark.slow),  # 20 rows: they begin in the larger bucket
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_interpreted_kernels_give_the_tokens_of_the_plain_engine(encoder, sampling):
    pytest.importorskip("triton")
    backbone, prompts = fresh_backbone(FAMILY), prompts_for(FAMILY)[: 2 * sampling.n]
    same(
        engine(backbone, encoder, triton_ops()).generate(prompts, sampling),
        LocalGenerator(backbone, encoder).generate(prompts, sampling),
    )


def test_a_batch_of_another_size_finds_room(encoder):
    """Small, large, small: buffers grow, and data of earlier batches has no effect."""
    backbone, prompts = fresh_backbone(FAMILY), prompts_for(FAMILY)
    decode, expected = engine(backbone, encoder), LocalGenerator(backbone, encoder)
    for part, sampling in (
        (prompts[1:2], Sampling(n=2, max_new_tokens=3)),
        (prompts, Sampling(n=6, max_new_tokens=8, top_k=20)),
        (prompts[2:], Sampling(n=3, max_new_tokens=5)),
        (prompts[:1], Sampling(temperature=0, max_new_tokens=6)),
    ):
        same(decode.generate(part, sampling), expected.generate(part, sampling))
        largest = decode.room
    with decode.resident():
        same(decode.generate(prompts, sampling), expected.generate(prompts, sampling))
    made = decode.buffers, decode.weights
    decode.generate(prompts[:1], sampling)
    assert (decode.buffers, decode.weights) == made and decode.buffers.room == largest, "they outlast a sleep"


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_weights_follow_an_update(compute):
    backbone = Backbone(fresh_backbone(FAMILY).model, compute)
    weights = DecodeWeights(backbone.model, compute)
    layer, fused = backbone.language_model.layers[1], weights.layers[1]
    matrices = [fused.mixer.qkv.weight, fused.mlp.down.weight, weights.head]
    places = [each.data_ptr() for each in matrices]
    parts = [getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv"]
    with torch.no_grad():
        for parameter in backbone.model.parameters():
            parameter.mul_(1.5).add_(0.25)
    assert weights.refresh()
    now = torch.cat(parts), layer.mlp.down_proj.weight, backbone.output_matrix
    for found, expected in zip(matrices, now, strict=True):
        assert torch.equal(found, expected.to(compute))
    assert places == [each.data_ptr() for each in matrices]
    assert bool(weights.copied) == (compute != torch.float32), "tensors of the right dtype are not copied"


def test_a_weight_that_moved_away_is_noticed(encoder):
    backbone, prompts = fresh_backbone(FAMILY), prompts_for(FAMILY)[1:]
    decode, greedy = engine(backbone, encoder), Sampling(temperature=0, max_new_tokens=4)
    before = decode.generate(prompts, greedy)
    weight = backbone.language_model.layers[0].self_attn.q_proj.weight
    weight.data = -weight.data
    after = decode.generate(prompts, greedy)
    assert not torch.equal(before.rollout_logprobs, after.rollout_logprobs)
    same(after, LocalGenerator(backbone, encoder).generate(prompts, greedy))


def test_unknown_layers_are_named():
    head = torch.nn.Linear(1, 1)
    assert explain_unsupported(fresh_backbone(FAMILY).language_model, head) is None
    for change, message in (
        (lambda lm: setattr(lm.config, "model_type", "gemma"), "family 'gemma'"),
        (lambda lm: setattr(lm.config, "hidden_act", "gelu"), "gelu"),
        (lambda lm: lm.config.rope_parameters.update(rope_type="dynamic"), "dynamic"),
        (lambda lm: setattr(lm.layers[1].mlp, "up_proj", torch.nn.Identity()), "up_proj is a Identity"),
        (lambda lm: setattr(lm.layers[2].self_attn.k_proj, "bias", None), "bias of k_proj"),
        (lambda lm: setattr(lm.layers[0].self_attn, "q_norm", torch.nn.Identity()), "norms of queries"),
    ):
        language_model = fresh_backbone(FAMILY).language_model
        change(language_model)
        assert message in explain_unsupported(language_model, head)


def test_without_a_gpu_the_plain_engine_decodes_without_a_message(encoder, caplog):
    backbone = fresh_backbone(FAMILY)
    if backbone.device.type == "cuda":
        pytest.skip("there is one")
    with caplog.at_level(logging.WARNING):
        assert type(make_fastest_generator(backbone, encoder)) is LocalGenerator
    assert explain_local_engine(backbone) == "no CUDA device" and not caplog.records


def test_draws_belong_to_the_row(encoder):
    """The same keys give the same tokens in any batch."""
    prompts, sampling = prompts_for(FAMILY), Sampling(n=3, max_new_tokens=6, seed=5, step=2)
    backbone = fresh_backbone(FAMILY)
    whole = engine(backbone, encoder).generate(prompts, sampling)
    alone = engine(backbone, encoder).generate(prompts[2:3], sampling)
    width = alone.tokens.shape[1]
    assert torch.equal(whole.tokens[6:9, :width], alone.tokens)
    other = engine(backbone, encoder).generate(prompts[2:3], replace(sampling, step=3))
    assert other.text != alone.text


class Graph:
    """A fake of a CUDA graph: a step that is run again."""

    def __init__(self, step):
        self.replay = step.run


@pytest.mark.parametrize("new", [1, 5])
def test_making_a_graph_leaves_the_rows_as_they_are(encoder, monkeypatch, new):
    """A step runs once before it is captured. If rows took part in it, full ones would sample their last token twice,
    the second time after the first. Without stop tokens, as all rows are full."""

    def capture(self, step):
        step.run()
        self.captures += 1
        return Graph(step)

    monkeypatch.setattr(GraphGenerator, "captures_graphs", True)
    monkeypatch.setattr(GraphGenerator, "_capture", capture)
    encoder.stop_ids = ()
    backbone, prompts = fresh_backbone(FAMILY), prompts_for(FAMILY)
    decode, expected = engine(backbone, encoder), LocalGenerator(backbone, encoder)
    for sampling in (Sampling(n=2, max_new_tokens=new), Sampling(n=5, max_new_tokens=new)):
        same(decode.generate(prompts, sampling), expected.generate(prompts, sampling))
    assert decode.captures == 2
