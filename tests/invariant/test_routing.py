"""Mixtures of experts: the experts that engine and trainer choose, the precision of routers, no auxiliary loss."""

from dataclasses import replace

import pytest
import torch
from helpers import fake_batch
from tiny_models import checkpoint, fresh_backbone, get_encoder, plain_inputs, plain_model, prompts_for, shared_backbone
from torch.utils._python_dispatch import TorchDispatchMode
from update_helpers import make_actor

from mtrl.algorithms.losses import Loss
from mtrl.algorithms.metrics import step_metrics
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.models.routing import ExpertRecorder, find_routers
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Experience, Needs, Rewards, Sampling

MOE, DENSE = "qwen3_5_moe", "qwen3_5"
SAMPLED = Sampling(n=3, max_new_tokens=6)
LAYERS, EXPERTS, CHOSEN = 6, 4, 2


@pytest.fixture(scope="module")
def rollouts():
    """By the local engine, with responses of unequal length."""
    encoder = get_encoder(MOE)
    stop, encoder.stop_ids = encoder.stop_ids, tuple(range(4, 512, 7))
    yield LocalGenerator(shared_backbone(MOE), encoder).generate(prompts_for(MOE), SAMPLED)
    encoder.stop_ids = stop


def actor_for(backbone, **settings):
    return make_actor(MOE, forward=Forward(backbone, get_encoder(MOE), **settings))


def metrics_of(rollouts, signals):
    none = torch.zeros(len(rollouts))
    return step_metrics(Experience(rollouts, Rewards(none, {}, none.bool()), signals), cut=False)


def fresh_update(actor, rollouts):
    """One optimizer step without probes."""
    batch = replace(fake_batch(rollouts, torch.zeros(rollouts.mask.shape), rollouts.mask.float()), old_logprobs=None)
    return actor.update([replace(batch, correction=None)], Loss())


# ---------------------------------------------------------------------------------------------------- engine, trainer
def test_the_engine_records_the_experts_of_transformers(rollouts):
    """Of the position that predicts a token, by a plain forward of each row."""
    recorded = rollouts.routed_experts
    assert recorded.dtype == torch.uint8 and recorded.shape == (*rollouts.mask.shape, LAYERS, CHOSEN)
    assert len(set(rollouts.mask.sum(1).tolist())) > 1
    model = plain_model(MOE)
    for row, group in enumerate(rollouts.group.tolist()):
        prompt, response = rollouts.prompts[group], rollouts.tokens[row][rollouts.mask[row]]
        with torch.no_grad(), ExpertRecorder(find_routers(model.model.language_model)) as recorder:
            model(**plain_inputs(get_encoder(MOE), prompt, response))
        expected = recorder.take(1, model.device)[0, len(prompt.ids) - 1 : -1]
        assert torch.equal(recorded[row][rollouts.mask[row]].sort(-1).values, expected.sort(-1).values)
    assert recorded[rollouts.mask].unique().tolist() == list(range(EXPERTS)), "routers choose differently"


@pytest.mark.parametrize("share_prefix", [True, False])
def test_engine_and_trainer_agree_in_float32(rollouts, share_prefix):
    actor = actor_for(shared_backbone(MOE), share_prefix=share_prefix)
    signals = actor.probe(rollouts, Needs("old_logprobs", "dependency"), 0)
    assert signals.routing_mismatch.shape == rollouts.mask.shape
    assert metrics_of(rollouts, signals)["rollout/routing_mismatch"] == 0


def test_a_perturbed_router_is_seen(rollouts):
    """By the probe and, if nothing is probed, by the update. Layers after it read other states."""
    backbone = fresh_backbone(MOE)
    with torch.no_grad():
        backbone.routers[2].weight.neg_()  # the least probable experts instead of the most
    actor = actor_for(backbone)
    signals = actor.probe(rollouts, Needs("old_logprobs"), 0)
    probed = metrics_of(rollouts, signals)["rollout/routing_mismatch"]
    assert 1 / LAYERS <= probed < 0.6
    assert float(fresh_update(actor, rollouts)["routing_mismatch"]) == pytest.approx(probed, rel=1e-5)


def test_probed_updates_report_nothing(rollouts):
    batch = fake_batch(rollouts, torch.zeros(rollouts.mask.shape), rollouts.mask.float())
    assert "routing_mismatch" not in actor_for(fresh_backbone(MOE)).update([batch], Loss())


def test_rows_keep_their_experts(rollouts):
    """Through joining, which pads, and selecting rows."""
    short, order = rollouts.rows(rollouts.mask.sum(1) <= 3), torch.arange(len(rollouts)).flip(0)
    joined = type(rollouts).join([short, rollouts]).rows(len(short) + order)
    assert torch.equal(joined.routed_experts, rollouts.routed_experts[order])
    assert type(rollouts).join([replace(short, routed_experts=None), rollouts]).routed_experts is None


def test_a_dense_model_has_no_metric():
    backbone, encoder = shared_backbone(DENSE), get_encoder(DENSE)
    rollouts = LocalGenerator(backbone, encoder).generate(prompts_for(DENSE)[1:2], SAMPLED)
    signals = Forward(backbone, encoder).signals(rollouts)
    assert backbone.routers == [] and rollouts.routed_experts is None and signals.routing_mismatch is None
    assert not any("routing" in name for name in metrics_of(rollouts, signals))


# ------------------------------------------------------------------------------------------------- precision and loss
class RouterPrecision(TorchDispatchMode):
    """Notes the dtypes of routers' softmaxes, the only ones over as many values as there are experts."""

    def __init__(self):
        super().__init__()
        self.softmaxes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._softmax.default and result.shape[-1] == EXPERTS:
            self.softmaxes.add((args[0].dtype, result.dtype))
        return result


@pytest.mark.parametrize("stored", ["bf16", "fp32"])
def test_router_precision_in_bf16(rollouts, stored):
    """With stored bf16 weights and with float32 ones under autocast: the product is bf16, the softmax float32, and
    the weights of the experts are bf16 again, as in transformers' own forward."""
    model = load_model(checkpoint(MOE), dtype=stored)
    backbone, few = Backbone(model, torch.bfloat16), rollouts.rows(torch.arange(3, 6))
    outputs = []
    hooks = [each.register_forward_hook(lambda *hook: outputs.append(hook[-1])) for each in backbone.routers]
    with RouterPrecision() as ours:
        Forward(backbone, get_encoder(MOE)).signals(few)
    dtypes = [{each.dtype for each in column} for column in zip(*outputs, strict=True)]
    row = plain_inputs(get_encoder(MOE), few.prompts[0], few.tokens[0][few.mask[0]])
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=stored == "fp32")
    outputs.clear()
    with RouterPrecision() as theirs, torch.no_grad(), autocast:
        model(**row)
    for hook in hooks:
        hook.remove()
    assert dtypes == [{each.dtype for each in column} for column in zip(*outputs, strict=True)]
    assert dtypes == [{torch.bfloat16}, {torch.bfloat16}, {torch.int64}]
    assert ours.softmaxes == theirs.softmaxes == {(torch.float32, torch.float32)}


def test_the_auxiliary_loss_never_enters(rollouts):
    """Though the checkpoint's config asks for it: transformers adds it to its own loss, and gradients here are bitwise
    the same."""

    def gradients(asked):
        backbone = fresh_backbone(MOE)
        config = backbone.model.config.text_config
        config.output_router_logits, config.router_aux_loss_coef = asked, 10.0
        Forward(backbone, get_encoder(MOE)).scores(few).logp.sum().backward()
        row = plain_inputs(get_encoder(MOE), few.prompts[0], few.tokens[0][few.mask[0]])
        with torch.no_grad():
            loss = backbone.model(**row, labels=row["input_ids"]).loss
        return float(loss), {name: each.grad for name, each in backbone.model.named_parameters()}

    few = rollouts.rows(torch.arange(3, 6))
    (with_it, ours), (without, plain) = gradients(True), gradients(False)
    assert with_it > without + 5, "transformers' loss has it"
    assert all(torch.equal(ours[name], plain[name]) for name in ours if ours[name] is not None)
    assert ours["model.language_model.layers.0.mlp.gate.weight"].abs().sum() > 0
