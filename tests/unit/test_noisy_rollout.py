"""NoisyRollout: the noise against numpy, whose images each half of a group is sampled on, and what reads the flag."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch_ops as plain_ops
from helpers import close, fake_experience, fake_rollouts, same
from loop_helpers import FakeActor, FakeScorer, FakeSource, loop, spec
from tiny_models import fresh_backbone, get_encoder, prompt, prompts_for

from mtrl.algorithms.batches import assemble
from mtrl.algorithms.credit import assign
from mtrl.algorithms.filtering import GroupFilter
from mtrl.algorithms.losses import Loss, loss_weights, mismatch_correction, total_loss
from mtrl.algorithms.metrics import noised_metrics, step_metrics
from mtrl.compose.algorithm import make_algorithm
from mtrl.compose.memory_limits import make_limits
from mtrl.config import Config, load_config
from mtrl.distributed.generator_proxy import partition_prompts
from mtrl.models.forward import Forward
from mtrl.rollout.decode.engine import GraphGenerator
from mtrl.rollout.decode.step import Ops
from mtrl.rollout.local import LocalGenerator
from mtrl.rollout.sampling import first_sample_numbers
from mtrl.rollout.vllm.requests import make_requests
from mtrl.tracking.jsonl import read_rows
from mtrl.tracking.record import response_columns
from mtrl.tracking.run_files import RunFiles
from mtrl.training.clock import Clock
from mtrl.training.collect import RolloutCollector
from mtrl.training.dynamic_sampling import Filtering
from mtrl.training.noisy_rollout import SIGNAL_SHARES, NoisyRollout, add_noise
from mtrl.types import Experience, Needs, Rewards, Sampling, Signals, TrainBatch
from mtrl.utils.record_rows import map_tensors

FAMILY, N, STEP = "qwen2_5_vl", 4, 3
ENCODER = get_encoder(FAMILY)
NOISE = NoisyRollout(total_steps=60, seed=5)
SAMPLING = Sampling(n=N, max_new_tokens=6, seed=2)


def make_prompt(name="t:0", sizes=((3, 4),)):
    return prompt(ENCODER, name, "which colour", sizes)


# ------------------------------------------------------------------------------------------------------------ the noise
def test_the_shares_of_the_signal_by_a_plain_loop():
    left, expected = 1.0, []
    for i in range(1000):
        sigmoid = 1 / (1 + math.exp(6 - 12 * i / 999))
        left *= 1 - (sigmoid * (0.5e-2 - 1e-5) + 1e-5)
        expected.append(left)
    np.testing.assert_allclose(SIGNAL_SHARES, expected, rtol=1e-12)
    assert 1 - SIGNAL_SHARES[0] == pytest.approx(2.2e-5, rel=0.02), "level 0 still has noise"


@pytest.mark.parametrize(("t0", "c", "m", "total"), [(500, 30, 40, 60), (450, 60, 40, 120), (450, 30, 35, 60)])
def test_the_schedule_is_the_authors(t0, c, m, total):
    noise = NoisyRollout(total, t0, "sigmoid", c, m)
    expected = [int(t0 * (1 - 1 / (1 + math.exp(-c * (s / total - m / total))))) for s in range(1, total + 1)]
    assert [noise.level(step) for step in range(total)] == expected
    assert noise.level(m - 1) == t0 // 2 and expected[-1] < 5 and expected[0] == t0 - 1
    assert [NoisyRollout(total, t0, "none").level(step) for step in (0, total - 1)] == [t0, t0]


def test_no_schedule_overflows():
    steep = NoisyRollout(total_steps=10, noise_decay_coef=1e9, noise_mid_step=5)
    assert [steep.level(step) for step in range(8)] == [500] * 4 + [250] + [0] * 3


@pytest.mark.parametrize("level", [0, 250, 500, 999])
def test_noise_against_numpy(level):
    """In float64: the stored number is the next lower one, unless rounding in float32 decides which that is."""
    medium = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    found = add_noise(medium, SIGNAL_SHARES[level], np.random.default_rng(1))
    drawn = np.random.default_rng(1).standard_normal((40, 60, 3), dtype=np.float32).astype(np.float64)
    share = SIGNAL_SHARES[level]
    exact = np.clip(share**0.5 * (medium / 255) + (1 - share) ** 0.5 * drawn, 0, 1) * 255
    decided = (np.abs(exact - np.round(exact)) > 1e-3) | (exact == 0) | (exact == 255)
    assert found.dtype == np.uint8 and found.shape == medium.shape
    assert np.array_equal(found[decided], np.floor(exact[decided])) and decided.mean() > 0.9
    assert np.abs(found - exact).max() < 1.001


def test_a_noised_prompt_has_one_key():
    made = make_prompt()
    before, first = made.media[0].copy(), NOISE.noised(made, STEP).media[0]
    assert np.array_equal(first, NOISE.noised(made, STEP).media[0]), "all samples share it"
    others = [
        NOISE.noised(made, STEP + 1),
        NOISE.noised(make_prompt("t:1"), STEP),
        replace(NOISE, seed=6).noised(made, STEP),
    ]
    assert not any(np.array_equal(first, other.media[0]) for other in others)
    assert np.array_equal(before, made.media[0])
    later = NOISE.noised(made, 59).media[0].astype(float)
    assert np.abs(later - before).mean() < 2 < np.abs(first - before.astype(float)).mean(), "it decreases"


def test_frames_of_a_clip_share_their_noise_and_images_of_a_prompt_do_not():
    frames = np.full((3, 28, 28, 3), 120, dtype=np.uint8)
    noised = add_noise(frames, 0.8, np.random.default_rng(0))
    assert np.array_equal(noised[0], noised[1]) and np.array_equal(noised[0], noised[2]) and noised[0].std() > 10
    two = make_prompt(sizes=((2, 2), (2, 2)))
    two = replace(two, media=(two.media[0], two.media[0]))
    one, other = NOISE.noised(two, STEP).media
    assert not np.array_equal(one, other)


# ----------------------------------------------------------------------------------------------------------- the groups
def test_sample_numbers_go_on_from_half_to_half():
    """A task that a step takes twice, and that a refill takes again, has no number twice."""
    sampling = NOISE.sampling(replace(SAMPLING, times_sampled={"a": 1}))
    assert sampling.n == N // 2 and SAMPLING.times_sampled == {}
    tasks = ["a", "a", "b", "b", "a", "a"]  # of the prompts a, b, a: clean and noised in turn
    assert first_sample_numbers(tasks, sampling) == [4, 6, 0, 2, 8, 10]
    assert first_sample_numbers(["a", "b", "a"], replace(SAMPLING, times_sampled={"a": 1})) == [4, 0, 8]


def collect(noise, generator=None, prompts=None, **changes):
    """The responses of a step, by way of the loop's own code."""
    backbone = fresh_backbone(FAMILY)
    prompts = prompts_for(FAMILY) if prompts is None else prompts
    source = FakeSource([])
    source.take = lambda count: prompts
    generator = generator or LocalGenerator(backbone, ENCODER)
    rules = spec(sampling=SAMPLING, noise=noise, **changes)
    collector = RolloutCollector(source, generator, FakeScorer([]), [], rules, STEP, 0, Clock())
    collector.submit = lambda sampled: sampled
    return collector.begin_sampling(len(prompts))().rollouts, backbone


def halves(rollouts):
    """The rows of the first and of the second half of each group."""
    place = torch.arange(len(rollouts)) % N
    return place < N // 2, place >= N // 2


def test_the_first_half_is_that_of_a_run_without_noise():
    prompts = prompts_for(FAMILY)
    (plain, _), (noisy, _) = (collect(noise, prompts=prompts) for noise in (None, NOISE))
    assert plain.noised is None and noisy.group.tolist() == plain.group.tolist() and len(noisy) == 4 * N
    assert all(kept is given for kept, given in zip(noisy.prompts, prompts, strict=True)), "the clean ones"
    first, second = halves(noisy)
    width = min(noisy.tokens.shape[1], plain.tokens.shape[1])
    for name in ("tokens", "mask"):
        same(getattr(noisy, name)[first, :width], getattr(plain, name)[first, :width])
    close(noisy.rollout_logprobs[first, :width], plain.rollout_logprobs[first, :width], atol=1e-5)
    seen = second & noisy.visual
    assert noisy.noised.tolist() == seen.tolist() and 0 < seen.sum() < second.sum()
    changed = (noisy.tokens[seen, :width] != plain.tokens[seen, :width]).any(1)
    assert changed.float().mean() > 0.5, "the others have other images"


def test_a_prompt_without_an_image_is_sampled_as_ever():
    (plain, _), (noisy, _) = collect(None), collect(NOISE)
    text, width = ~noisy.visual, min(noisy.tokens.shape[1], plain.tokens.shape[1])
    assert text.sum() == N and not noisy.noised[text].any()
    same(noisy.tokens[text, :width], plain.tokens[text, :width])
    close(noisy.rollout_logprobs[text, :width], plain.rollout_logprobs[text, :width], atol=1e-5)
    assert len({tuple(row) for row in noisy.tokens[text].tolist()}) > 1, "the halves are no copies"


ENGINES = {
    "local": LocalGenerator,
    "decode": partial(GraphGenerator, ops=Ops(plain_ops, plain_ops), buckets=(16, 32, 64), poll=1),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_each_half_was_sampled_on_its_own_image_and_all_is_probed_on_the_clean_one(engine):
    rollouts, backbone = collect(NOISE, ENGINES[engine](fresh_backbone(FAMILY), ENCODER))
    forward, needs = Forward(backbone, ENCODER), Needs("old_logprobs")
    with torch.no_grad():
        clean = forward.signals(rollouts, needs).old_logprobs
        shown = replace(rollouts, prompts=tuple(NOISE.noised(each, STEP) for each in rollouts.prompts))
        noised = forward.signals(shown, needs).old_logprobs
    clean, noised = ((each - rollouts.rollout_logprobs).where(rollouts.mask, 0).abs() for each in (clean, noised))
    assert clean[~rollouts.noised].max() < 1e-4 and noised[rollouts.noised].max() < 1e-4
    assert clean[rollouts.noised].max() > 0.1, "the trainer's log-probs are those of the clean image"


def test_vllm_is_asked_for_the_seeds_of_a_run_without_noise():
    """Response i to a prompt has its seed + i."""
    prompts = prompts_for(FAMILY)
    plain = make_requests(prompts, SAMPLING)
    asked = make_requests(NOISE.prompts(prompts, STEP), NOISE.sampling(SAMPLING))
    assert [each.seed for each in asked[0::2]] == [each.seed for each in plain]
    assert [each.seed for each in asked[1::2]] == [each.seed + N // 2 for each in plain]
    for clean, noised, same_prompt in zip(asked[0::2], asked[1::2], plain, strict=True):
        assert clean.ids == noised.ids and clean.length == noised.length
        assert all(map(np.array_equal, clean.images, same_prompt.images))
        assert not any(map(np.array_equal, clean.images, noised.images))


def test_one_engine_gets_both_halves():
    """Of several engines: sample numbers go on within a call, and the rows come back in their order."""
    prompts = NOISE.prompts(prompts_for(FAMILY), STEP)
    for share in partition_prompts(prompts, 3):
        assert share == sorted(share) and {index ^ 1 for index in share} == set(share)


def test_greedy_responses_see_clean_images():
    calls = []

    class Engine(LocalGenerator):
        def generate(self, prompts, sampling):
            calls.append((len(prompts), sampling.n, sampling.temperature))
            return super().generate(prompts, sampling)

    collect(NOISE, Engine(fresh_backbone(FAMILY), ENCODER), greedy_baseline=True)
    assert calls == [(8, N // 2, 1.0), (4, 1, 0.0)]


def test_a_filter_drops_and_refills_whole_groups():
    """By the rewards of both halves; metrics describe both halves of all that was sampled."""
    accuracy = {f"p{number} response {row}": 1.0 for number in range(9) for row in range(2)}
    scorer = FakeScorer(None, accuracy=accuracy)

    def noised_is_wrong(rollouts, step):
        right = torch.ones(len(rollouts)) if scorer.calls == 0 else 1.0 - rollouts.noised.float()
        scorer.calls += 1
        rewards = Rewards(right, {"accuracy": right}, torch.zeros(len(rollouts), dtype=torch.bool))
        return type("Pending", (), {"result": lambda self, signals=None: rewards})()

    scorer.calls, scorer.submit = 0, noised_is_wrong
    actor = FakeActor(None)
    actor.probe = lambda rollouts, needs, step: Signals(old_logprobs=torch.full(rollouts.mask.shape, -1.0))
    one = loop(actor=actor, scorer=scorer, filtering=Filtering(GroupFilter("spread")), noise=NOISE)
    asked, generate = [], one.components.generator.generate
    one.components.generator.generate = lambda prompts, sampling: (
        asked.append((len(prompts), sampling.n, dict(sampling.times_sampled))) or generate(prompts, sampling)
    )
    one.run()
    assert asked == [(4, 1, {}), (4, 1, {"p0": 2, "p1": 2})]
    row = one.components.tracker.rows[1]
    assert row["reward/clean_half"] == 1.0 and row["reward/noised_half"] == pytest.approx(1 / 3)
    assert row["rollout/noise_level"] == 499 and row["filtering/prompts_dropped"] == 2
    ((batch,), _) = one.components.actor.updates[0]
    assert batch.rollouts.noised.tolist() == [False, True] * 2 and batch.rollouts.group.tolist() == [0, 0, 1, 1]
    close(batch.advantage[:, 0], [0.5, -0.5, 0.5, -0.5])


# ------------------------------------------------------------------------------------------------- what reads the flag
def marked():
    """Four responses, the third and the last on noised images: their gaps are large, and no fault of the sampler."""
    rollouts = fake_rollouts([3, 1, 2, 3], group=[0, 0, 0, 0])
    noised = torch.tensor([False, False, True, True])
    gap = torch.tensor([[0.1], [-0.3], [5.0], [-7.0]]).expand(4, 3)
    old = torch.full((4, 3), -1.0)
    return replace(rollouts, noised=noised, rollout_logprobs=old - gap), old


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("clip", [2.0, 0.5])
def test_noised_responses_are_not_corrected(level, clip):
    rollouts, old = marked()
    found = mismatch_correction(old, rollouts.rollout_logprobs, rollouts.comparable, clip, level)
    plain = mismatch_correction(old, rollouts.rollout_logprobs, rollouts.mask, clip, level)
    same(found[2:], torch.ones(2, 3))
    same(found[:2], plain[:2])
    assert (plain[2:] != 1).any()


@pytest.mark.parametrize("probed", [True, False])
def test_a_batch_carries_corrections_of_one_and_weights_without_them(probed):
    """Without a probe the update computes both, in any split of its rows."""
    rollouts, old = marked()
    signals = Signals(old_logprobs=old) if probed else Signals()
    rewards = Rewards(torch.tensor([1.0, 0.0, 1.0, 0.0]), {}, torch.zeros(4, dtype=torch.bool))
    experience = Experience(rollouts, rewards, signals, advantage=torch.ones(4, 3))
    experience = replace(experience, credit=assign((), experience, (0, 0)))
    (batch,) = assemble(spec(global_batch_size=1).batches, Loss(tis_clip=2.0), experience, (0, 0))
    close(batch.weights.gap.sum(1), [3 / 4, 1 / 4, 0, 0])
    assert (batch.correction is None) != probed
    if probed:
        same(batch.correction[2:], torch.ones(2, 3))
    zeros = map_tensors(batch.weights, torch.zeros_like)
    assert not zeros.gap.any() and zeros.comparable is not None


def test_the_update_without_a_probe_reports_and_corrects_clean_rows_alone():
    rollouts, logp = marked()
    mask, clean = rollouts.mask, rollouts.comparable
    weights = loss_weights(mask.float(), mask, "dapo", 8, noised=rollouts.noised)
    batch = TrainBatch(rollouts, None, torch.ones(4, 3), None, weights)
    gap = (logp - rollouts.rollout_logprobs)[clean]
    loss = Loss(tis_clip=2.0)
    halves = [total_loss(logp[rows], batch.rows(rows), loss) for rows in (torch.tensor([0, 2]), torch.tensor([1, 3]))]
    metrics = {name: sum(float(each[1][name]) for each in halves) for name in halves[0][1]}
    assert metrics["logprob_gap_mean"] == pytest.approx(float(gap.abs().mean()), rel=1e-5)
    assert metrics["logprob_gap_kl"] == pytest.approx(float(-gap.mean()), rel=1e-5)
    correction = torch.where(clean, (logp - rollouts.rollout_logprobs).exp().clamp(max=2), 1.0)
    assert float(sum(each[0] for each in halves)) == pytest.approx(float(-correction[mask].mean()), rel=1e-5)


def test_metrics_of_the_sampler_leave_noised_rows_out():
    rollouts, old = marked()
    experience = fake_experience(rollouts, Signals(old_logprobs=old, routing_mismatch=rollouts.noised[:, None] * 1.0))
    experience = replace(experience, signals=replace(
        experience.signals, routing_mismatch=experience.signals.routing_mismatch.expand(4, 3)))  # fmt: skip
    found = step_metrics(experience, cut=False)
    assert found["rollout/logprob_gap_max"] == pytest.approx(0.3, rel=1e-4)
    assert found["rollout/logprob_gap_mean"] == pytest.approx((3 * 0.1 + 0.3) / 4, rel=1e-4)
    assert found["rollout/logprob_gap_ess"] > 0.9 and found["rollout/routing_mismatch"] == 0


def test_the_halves_have_their_rewards():
    rollouts, _ = marked()
    rewards = Rewards(torch.tensor([1.0, 0.5, 0.25, 0.0]), {}, torch.zeros(4, dtype=torch.bool))
    assert noised_metrics(rewards, rollouts) == {"reward/clean_half": 0.75, "reward/noised_half": 0.125}
    text = replace(rollouts, noised=torch.zeros(4, dtype=torch.bool))
    assert noised_metrics(rewards, text) == {} == noised_metrics(rewards, replace(rollouts, noised=None))


def test_rows_and_joined_rows_keep_the_flag():
    rollouts, _ = marked()
    assert rollouts.rows(torch.tensor([3, 0])).noised.tolist() == [True, False]
    assert type(rollouts).join([rollouts, rollouts]).noised.tolist() == rollouts.noised.tolist() * 2


def test_records_mark_the_noised_rows(tmp_path):
    rollouts, _ = marked()
    files = RunFiles(tmp_path)
    for step, each in enumerate((rollouts, replace(rollouts, noised=None))):
        files.rollouts(step, fake_experience(each))
    files.close()
    found = [row.get("noised") for row in read_rows(tmp_path / "rollouts.jsonl")]
    assert found == [False, False, True, True] + [None] * 4
    columns = [response_columns(fake_experience(each)) for each in (rollouts, replace(rollouts, noised=None))]
    assert columns[0]["noised"] == found[:4] and "noised" not in columns[1]


# ------------------------------------------------------------------------------------------------------------------ off
def test_off_by_default_and_then_nothing_is_there():
    assert make_algorithm(Config(), 10).noise is None
    rollouts = fake_rollouts([2, 1])
    assert rollouts.noised is None and rollouts.comparable is rollouts.mask
    weights = loss_weights(rollouts.mask.float(), rollouts.mask, "dapo", 8)
    assert weights.comparable is None and weights.gap is weights.token


def test_keys_arrive():
    words = ["noisy_half=true", "noise_level=450", "noise_decay_coef=60", "noise_mid_step=35", "noise_decay=none"]
    config = load_config(None, [f"worker.rollout.{word}" for word in words] + ["dataset.seed=7"])
    assert make_algorithm(config, 10).noise == NoisyRollout(10, 450, "none", 60.0, 35, seed=7)
    limits = make_limits(config, Needs(), on_gpu=False, share_prefix=True)
    plain = make_limits(Config(), Needs(), on_gpu=False, share_prefix=True)
    assert limits.batch.sampling.n == plain.batch.sampling.n // 2 and limits.batch.rows == plain.batch.rows
