"""The settings of passes reach the workers: which passes run, over what, and in which direction."""

import copy
import logging

import pytest
import torch
from tiny_models import (
    checkpoint,
    fresh_backbone,
    get_encoder,
    plain_log_probs,
    plain_model,
    prompts_for,
    random_rollouts,
)

from mtrl.compose.algorithm import add_logprob_needs, make_algorithm, make_perturbation
from mtrl.compose.policy import build_actor, build_policy, build_reference
from mtrl.config import ConfigError, load_config
from mtrl.models.forward import Forward
from mtrl.types import Needs
from mtrl.workers.reference import Reference, SyncedReference

FAMILY = "qwen2"
OLD = Needs("old_logprobs", "entropy")


# ------------------------------------------------------------------------------------------------ the old policy's pass
@pytest.mark.parametrize(
    ("per_update", "epochs", "needs", "measured"),
    [
        (8, 1, Needs(), Needs()),  # one optimizer step: its own pass gives the old log-probs
        (8, 1, Needs("attention_mass"), Needs("attention_mass")),  # attention needs no pass over the vocabulary
        (8, 1, Needs("ref_logprobs"), OLD | Needs("ref_logprobs")),
        (2, 1, Needs(), OLD),  # from the second of four optimizer steps on the policy is another
        (8, 2, Needs(), OLD),
        (4, 3, Needs("attention_mass"), OLD | Needs("attention_mass")),
    ],
)
def test_old_log_probs_are_measured_unless_each_batch_is_learnt_from_once(per_update, epochs, needs, measured):
    sizes = {"dataset.rollout_batch_size": 8, "worker.actor.global_batch_size": per_update}
    config = load_config(None, sizes | {"worker.actor.ppo_epochs": epochs})
    assert add_logprob_needs(needs, config) == measured


@pytest.mark.parametrize("per_update", [2, 8])
def test_the_algorithm_needs_them(per_update):
    sizes = {"dataset.rollout_batch_size": 8, "worker.actor.global_batch_size": per_update}
    config = load_config(None, sizes | {"optimization.disable_divergence": True})
    assert ("old_logprobs" in make_algorithm(config, 1).needs) == (per_update < 8)


# ------------------------------------------------------------------------------------------------------- perturbations
def test_the_perturbation_has_the_keys_of_the_configuration():
    values = {
        "black_prob": 0.25,
        "noise_std": 7.0,
        "blur_radius": 3.0,
        "perturbation": "gaussian_noise",
        "patch_size": "auto",
    }
    overrides = {f"optimization.{name}": value for name, value in values.items()}
    config = load_config(None, overrides | {"dataset.seed": 7, "worker.rollout.seed": 9})
    found = make_perturbation(config, patch_size=16)
    assert (found.seed, found.patch_size, found.perturbation) == (7, 16, "gaussian_noise"), (
        "the data's seed, the model's patches"
    )
    assert (found.black_prob, found.noise_std, found.blur_radius) == (0.25, 7.0, 3.0)
    assert make_perturbation(load_config(None, {"optimization.patch_size": 8}), patch_size=16).patch_size == 8


# ------------------------------------------------------------------------------------------------------ shared prefixes
@pytest.mark.parametrize("share", [True, False])
def test_share_prefix_reaches_the_passes(share, caplog):
    path = str(checkpoint(FAMILY))
    config = load_config(None, {"worker.actor.model.model_path": path, "worker.actor.share_prefix": share})
    with caplog.at_level(logging.WARNING):
        encoder, forward = build_policy(config)
    actor = build_actor(config, forward, encoder, steps=1)
    assert forward.share_prefix is share and "share_prefix" not in caplog.text
    assert (actor.learner.batching.share_prefix, actor.probe_batching.share_prefix) == (share, share)


@pytest.mark.parametrize(("dtype", "is_reported"), [("bf16", True), ("fp32", False)])
def test_a_cpu_that_is_slow_in_bf16_is_reported(dtype, is_reported, caplog, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    keys = {"worker.actor.model.model_path": str(checkpoint(FAMILY)), "worker.actor.fsdp.mixed_precision_dtype": dtype}
    with caplog.at_level(logging.WARNING):
        build_policy(load_config(None, keys))
    assert ("set worker.actor.fsdp.mixed_precision_dtype=fp32" in caplog.text) is is_reported


# ------------------------------------------------------------------------------------------------------ the reference
def test_a_reference_stays_as_it_was_and_never_learns():
    policy = Forward(fresh_backbone(FAMILY), get_encoder(FAMILY))
    reference = Reference.frozen(policy)
    assert not any(weight.requires_grad for weight in reference.forward.backbone.model.parameters())
    assert all(weight.requires_grad for weight in policy.backbone.model.parameters())
    rollouts = random_rollouts(prompts_for(FAMILY), [0, 1], [4, 3])
    before = policy.signals(rollouts).old_logprobs
    with torch.no_grad():
        policy.backbone.output_matrix.mul_(2.0)
    found = reference.start_signals(rollouts, Needs("ref_logprobs"), policy)()
    torch.testing.assert_close(found.ref_logprobs, before)
    assert found.divergence is None and (policy.signals(rollouts).old_logprobs - before).abs().max() > 0.01
    assert reference.start_signals(rollouts, Needs("divergence"), policy)().ref_logprobs is None, "it is not read"


def test_a_snapshot_of_a_refreshed_reference_reads_the_live_weights():
    """Nothing is copied or gathered in one process."""
    policy = Forward(fresh_backbone(FAMILY), get_encoder(FAMILY))
    refreshed = SyncedReference(Reference.frozen(policy), policy)
    weights, live = refreshed.snapshot().weights, refreshed.model.state_dict()
    assert {name: weight.data_ptr() for name, weight in weights.items()} == {n: w.data_ptr() for n, w in live.items()}


# ---------------------------------------------------------------------------------------------------- full divergence
@pytest.mark.parametrize(
    ("overrides", "built"),
    [
        ({"optimization.disable_divergence": True}, False),
        ({"optimization.divergence_coef": 0.0}, False),
        ({}, True),
        ({"optimization.divergence_penalty": "full", "optimization.use_divergence_loss": True}, True),
    ],
    ids=["none", "worth nothing", "in the reward", "read by the update alone"],
)
def test_a_reference_is_built_where_somebody_reads_it(overrides, built):
    policy = Forward(fresh_backbone(FAMILY), get_encoder(FAMILY))
    rules = make_algorithm(load_config(None, overrides), steps=1)
    assert (build_reference(policy, rules) is not None) is built and rules.sync_ref_every == 0
    refreshed = make_algorithm(load_config(None, overrides | {"worker.ref.sync_every": 5}), steps=1)
    assert refreshed.sync_ref_every == 5
    if not built:
        with pytest.raises(ConfigError, match=r"worker\.ref\.sync_every: there is no reference to sync; set"):
            build_reference(policy, refreshed)


def test_full_divergence_is_that_of_the_policy_from_the_reference():
    """p (log p - log q), p the policy's, summed over the vocabulary: against plain forwards."""

    def moved(model):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(0.5)
        return model

    policy = Forward(fresh_backbone(FAMILY), get_encoder(FAMILY))
    reference = Reference.frozen(policy)
    moved(policy.backbone.model)
    rollouts = random_rollouts(prompts_for(FAMILY), [0, 1, 1], [4, 3, 5])
    found = reference.start_signals(rollouts, Needs("divergence"), policy)().divergence
    theirs, ours = plain_model(FAMILY), moved(copy.deepcopy(plain_model(FAMILY)))
    for row, (g, length) in enumerate(zip(rollouts.group.tolist(), rollouts.mask.sum(1).tolist(), strict=True)):
        given = FAMILY, rollouts.prompts[g], rollouts.tokens[row, :length]
        with torch.no_grad():
            p, q = (plain_log_probs(*given, model=model).double() for model in (ours, theirs))
        forward_kl, backward_kl = ((a.exp() * (a - b)).nan_to_num().sum(-1) for a, b in ((p, q), (q, p)))
        torch.testing.assert_close(found[row, :length].double(), forward_kl, rtol=1e-4, atol=1e-5)
        assert (forward_kl - backward_kl).abs().max() > 0.01, "they differ enough to test"
