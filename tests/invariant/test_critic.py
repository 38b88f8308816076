"""The values and updates of a critic depend on the rows, not on how they are split or laid out; its snapshot restores
it bitwise."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from helpers import close, fake_batch, same, slow_but
from tiny_models import (
    TINY_FAMILIES,
    checkpoint,
    fresh_backbone,
    get_encoder,
    plain_inputs,
    plain_model,
    prompts_for,
    random_rollouts,
)
from update_helpers import (
    ALL_AT_ONCE,
    CLIP,
    GROUP,
    LAYOUTS,
    LENGTHS,
    LR,
    MASKED,
    MIXED,
    SMALL,
    check_equal,
    learn,
    noise,
    widened,
)

from mtrl.algorithms.value_loss import ValueLoss
from mtrl.models.families import encoder_files, load_encoder
from mtrl.models.forward import Forward
from mtrl.models.reward_model import load_reward_model
from mtrl.models.state_dicts import save_model
from mtrl.models.value_head import HEAD, attach_head, find_head, has_head, load_value_model
from mtrl.types import VIEWS, Needs
from mtrl.workers.critic import LocalCritic
from mtrl.workers.learner import OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching

pytestmark = pytest.mark.pairwise("family", "layout")
VALUES, LOSS = Needs("values"), ValueLoss(0.5)


def head_for(family):
    width = fresh_backbone(family).output_matrix.shape[1]
    return 0.1 * torch.randn(1, width, generator=torch.Generator().manual_seed(8))


def make_critic(family, batching=ALL_AT_ONCE, packed=False, files=None, **optimization):
    backbone = fresh_backbone(family)
    attach_head(backbone.model, head_for(family))
    settings = {"lr": LR, "warmup_steps": 0, "total_steps": 10, "max_grad_norm": CLIP} | optimization
    return LocalCritic(
        Forward(backbone, get_encoder(family), share_prefix=batching.share_prefix, packed=packed),
        OptimizerSettings(**settings),
        update_batching=batching,
        probe_batching=batching,
        encoder_files=files or {},
    )


@lru_cache
def make_rollouts(family):
    """Prompts with one image, none, several; one row is masked completely."""
    rollouts = random_rollouts(prompts_for(family), GROUP, LENGTHS)
    rollouts.mask[MASKED] = False
    return rollouts


@lru_cache
def probe_values(family):
    return make_critic(family).probe(make_rollouts(family), VALUES, 0).values


def make_batch(family):
    """Old values a bit off the current ones, so that some are clipped, and returns further off."""
    rollouts, values = make_rollouts(family), probe_values(family)
    zeros = torch.zeros(values.shape)
    old, returns = values + noise(values, 1, 0.7), values + noise(values, 2, 2.0)
    return replace(fake_batch(rollouts, zeros, zeros), values=old, returns=returns.where(rollouts.mask, 0.0))


@lru_cache
def compute_expected(family):
    found = learn(make_critic(family), [make_batch(family)], LOSS)
    assert 0.05 < found.metrics["value_clipfrac"] < 0.6, "both sides of the clip"
    return found


# -------------------------------------------------------------------------------------------------------------- probing
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_value_is_of_the_state_before_the_token(family):
    """By a plain forward of transformers, row by row: the hidden state of the position that predicts the token."""
    rollouts, head = make_rollouts(family), head_for(family)
    found = probe_values(family)
    for row in (0, 2, 4, 6):
        prompt, length = rollouts.prompts[GROUP[row]], LENGTHS[row]
        inputs = plain_inputs(get_encoder(family), prompt, rollouts.tokens[row, :length])
        with torch.no_grad():
            hidden = plain_model(family).model(**inputs).last_hidden_state[0]
        expected = hidden[len(prompt.ids) - 1 : len(prompt.ids) + length - 1] @ head[0]
        torch.testing.assert_close(found[row, :length], expected, rtol=1e-5, atol=2e-5)
        assert expected.std() > 0.05 or length == 1
    assert (found[~rollouts.mask] == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_values_do_not_depend_on_the_layout(family, layout, packed):
    found = make_critic(family, LAYOUTS[layout], packed).probe(make_rollouts(family).rows(MIXED), VALUES, 4)
    close(found.values, probe_values(family)[MIXED], rtol=1e-5, atol=2e-5)
    assert [name for name in VIEWS if getattr(found, name) is not None] == ["values"]


def test_only_where_somebody_reads_them(family, monkeypatch):
    critic = make_critic(family)
    monkeypatch.setattr(Forward, "values", None)
    assert critic.probe(make_rollouts(family), Needs("old_logprobs", "entropy"), 0).values is None


# ------------------------------------------------------------------------------------------------------------- learning
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_do_not_depend_on_the_layout(family, layout):
    check_equal(learn(make_critic(family, LAYOUTS[layout]), [make_batch(family)], LOSS), compute_expected(family))


@pytest.mark.parametrize("layout", ["small token budget", "large token budget", "token budget, prompts not shared"])
def test_weights_do_not_depend_on_packing(family, layout):
    check_equal(
        learn(make_critic(family, LAYOUTS[layout], packed=True), [make_batch(family)], LOSS), compute_expected(family)
    )


def test_weights_do_not_depend_on_padding(family):
    batch = make_batch(family)
    old, returns = (torch.nn.functional.pad(each, (0, 5), value=torch.nan) for each in (batch.values, batch.returns))
    wider = replace(widened(batch, 5), values=old, returns=returns)
    check_equal(learn(make_critic(family, LAYOUTS["three rows"]), [wider], LOSS), compute_expected(family))


def test_weights_do_not_depend_on_the_order_of_rows(family):
    found = learn(make_critic(family, MicroBatching(tokens=SMALL)), [make_batch(family).rows(MIXED)], LOSS)
    check_equal(found, compute_expected(family))


def test_the_masked_row_is_not_there(family):
    others = torch.tensor([row for row in range(len(GROUP)) if row != MASKED])
    check_equal(learn(make_critic(family), [make_batch(family).rows(others)], LOSS), compute_expected(family))


@pytest.mark.parametrize("fault", ["a mean for each micro-batch", "a row forgotten", "values of the tokens themselves"])
def test_the_comparison_sees_a_fault(family, fault):
    critic, batch = make_critic(family, MicroBatching(rows=3)), make_batch(family)
    if fault == "a row forgotten":
        batch = batch.rows(torch.arange(1, len(GROUP)))
    elif fault == "values of the tokens themselves":
        batch = replace(batch, returns=batch.returns.roll(1, 1).where(batch.rollouts.mask, 0.0))
    else:
        plain = critic._loss

        def renormalised(batch, loss, prepared):
            token = batch.weights.token / batch.weights.token.sum().clamp(min=1e-9)
            return plain(replace(batch, weights=replace(batch.weights, token=token)), loss, prepared)

        critic._loss = renormalised
    found = learn(critic, [batch], LOSS)
    with pytest.raises(AssertionError, match=r"(weights|gradients) differ"):
        check_equal(found, compute_expected(family))


def test_it_learns_the_returns():
    """With images and text-only rows in one batch, values approach the returns, from a head of zeros."""
    family, rollouts = "qwen2_5_vl", make_rollouts("qwen2_5_vl")
    critic = make_critic(family, lr=1e-2, max_grad_norm=1.0)
    with torch.no_grad():
        critic.forward.backbone.output_matrix.zero_()
    target = noise(rollouts.mask[:, :1], 3).expand(rollouts.mask.shape).where(rollouts.mask, 0.0)
    losses = []
    for _ in range(10):
        old = critic.probe(rollouts, VALUES, 0).values
        batch = replace(make_batch(family), values=old, returns=target)
        losses.append(critic.update([batch], LOSS)["value_loss"])
    assert losses[-1] < 0.5 * losses[0]
    learnt = critic.probe(rollouts, VALUES, 0).values
    for seen in (rollouts.visual, ~rollouts.visual):
        mask = rollouts.mask & seen[:, None]
        assert ((learnt - target)[mask] ** 2).mean() < 0.7 * (target[mask] ** 2).mean(), "each kind of row"


# ----------------------------------------------------------------------------------------------------- to disk and back
def writing_critic(family):
    """A critic whose next update depends on learning rate, optimizer state and step numbers."""
    files = encoder_files(get_encoder(family), checkpoint(family))
    return make_critic(family, files=files, lr=1e-3, warmup_steps=2, total_steps=6, lr_scheduler_type="cosine")


@pytest.mark.parametrize("family", slow_but(TINY_FAMILIES, "qwen2", "qwen2_5_vl", "qwen3_vl"))
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_restored_critic_continues_bitwise(family, tied, tmp_path):
    def critic():
        made = writing_critic(family)
        made.model.config.tie_word_embeddings = made.model.config.get_text_config().tie_word_embeddings = tied
        return made

    first = critic()
    first.update([make_batch(family)] * 2, LOSS)
    copy = first.snapshot().detached()
    said = first.probe(make_rollouts(family), VALUES, 0).values
    expected = first.update([make_batch(family)], LOSS)  # the copy does not change
    copy.write(tmp_path)

    restored = critic()
    restored.restore(tmp_path)
    same(restored.probe(make_rollouts(family), VALUES, 0).values, said)
    assert (restored.learner.version, restored.learner.optimizer_step) == (1, 2)
    assert restored.update([make_batch(family)], LOSS) == expected
    for mine, theirs in zip(restored.model.parameters(), first.model.parameters(), strict=True):
        same(mine, theirs)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl"])
def test_a_critic_is_a_checkpoint_like_others(family, tmp_path):
    """Another critic or a reward model may start from it; a plain model starts with a head of zeros."""
    critic = writing_critic(family)
    critic.update([make_batch(family)], LOSS)
    critic.snapshot().write(tmp_path)
    started = load_value_model(tmp_path)
    assert has_head(started) and load_encoder(tmp_path).fingerprint() == get_encoder(family).fingerprint()
    for name, weight in critic.model.state_dict().items():
        same(started.state_dict()[name], weight)
    load_reward_model(str(tmp_path))
    plain = load_value_model(checkpoint(family))
    assert find_head(str(checkpoint(family))) is None and (plain.lm_head.weight == 0).all()


def test_a_checkpoint_of_another_model_is_an_error(tmp_path):
    critic = writing_critic("qwen2_5_vl")
    with pytest.raises(ValueError, match="another model"):
        critic.restore(checkpoint("qwen2_5_vl"))  # a model without a head
    writing_critic("qwen3_vl").snapshot().write(tmp_path)
    with pytest.raises(ValueError, match="another model"):
        critic.restore(tmp_path)


def test_a_head_with_several_outputs_is_an_error(tmp_path):
    model = plain_model("qwen2")
    save_model(model, {**model.state_dict(), HEAD: torch.zeros(3, 64)}, tmp_path)
    with pytest.raises(ValueError, match=r"score\.weight is \[3, 64\]; a value is one number, so it must be \[1, 64\]"):
        load_value_model(tmp_path)
