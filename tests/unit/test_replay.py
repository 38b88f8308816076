"""SPEC 4, replay."""

import math
from collections import Counter

import numpy as np
import torch
from helpers import NAN, close, make_mask, padded

from mtrl.algorithms.replay import ReplayBuffer, ReplayEntry, flat_groups, replay_scores


def entries(**scores):
    return [ReplayEntry(key, score, f"payload of {key}") for key, score in scores.items()]


def keys(buffer):
    return [entry.key for entry in buffer.entries]


# Group 0: rewards 0, 2: mean 1, std sqrt 2, |A| = 1 + 1. Group 1: rewards 0, 1, 2: mean 1, std 1, |A| = 3 + 0 + 3.
# Group 2: rewards 5, 5: std 0.
REWARDS = torch.tensor([0.0, 2.0, 0.0, 1.0, 2.0, 5.0, 5.0])
GROUP = torch.tensor([0, 0, 1, 1, 1, 2, 2])
MASK = make_mask(1, 3, 2, 2, 2, 1, 1)
ADVANTAGE = padded([[-1], [1, 1, 1], [-3, -3], [0, 0], [3, 3], [0], [0]], fill=NAN)


def test_scores_by_hand():
    # sum|A| * std: 2 * sqrt 2, 6 * 1, 0. A response counts once, however long it is.
    scores = replay_scores(REWARDS, ADVANTAGE, GROUP, MASK, var_epsilon=1e-6, min_reward=0.0)
    close(scores, [2 * math.sqrt(2), 6, 0])


def test_the_variance_must_exceed_epsilon():
    # std sqrt 2 > 1, std 1 is not > 1.
    close(replay_scores(REWARDS, ADVANTAGE, GROUP, MASK, 1.0, 0.0), [2 * math.sqrt(2), 0, 0])
    assert flat_groups(REWARDS, GROUP, 1e-6).tolist() == [2]
    assert flat_groups(REWARDS, GROUP, 1.0).tolist() == [1, 2]


def test_the_mean_must_reach_the_minimum():
    close(replay_scores(REWARDS, ADVANTAGE, GROUP, MASK, 1e-6, 1.0), [2 * math.sqrt(2), 6, 0])
    close(replay_scores(REWARDS, ADVANTAGE, GROUP, MASK, 1e-6, 1.001), [0, 0, 0])


def test_the_best_stay():
    buffer = ReplayBuffer(2).admit(entries(a=1.0, b=3.0))
    assert keys(buffer) == ["b", "a"]
    buffer = buffer.admit(entries(c=2.0, d=0.5))
    assert keys(buffer) == ["b", "c"]
    assert [entry.payload for entry in buffer.entries] == ["payload of b", "payload of c"]


def test_of_equal_scores_the_older_stays():
    assert keys(ReplayBuffer(2).admit(entries(a=1.0, b=1.0)).admit(entries(c=1.0))) == ["a", "b"]


def test_of_one_key_the_newer_stays():
    buffer = ReplayBuffer(3).admit(entries(a=5.0, b=3.0)).admit([ReplayEntry("a", 1.0, "new")])
    assert [(entry.key, entry.score, entry.payload) for entry in buffer.entries] == [
        ("b", 3.0, "payload of b"),
        ("a", 1.0, "new"),
    ]


def test_a_buffer_of_size_zero_holds_nothing():
    buffer = ReplayBuffer(0).admit(entries(a=1.0))
    assert keys(buffer) == []
    assert buffer.draw(3, np.random.default_rng(0)) == []


def test_admission_leaves_the_old_buffer_as_it_was():
    old = ReplayBuffer(2).admit(entries(a=1.0))
    old.admit(entries(b=2.0))
    assert keys(old) == ["a"]


def test_draws_are_in_proportion_to_score():
    # Scores 6, 3, 1: shares 0.6, 0.3, 0.1. Of 4000 draws the share of each is within 0.03 (4 standard errors).
    buffer = ReplayBuffer(3).admit(entries(a=6.0, b=3.0, c=1.0))
    random = np.random.default_rng(0)
    counts = Counter(buffer.draw(1, random)[0].key for _ in range(4000))
    for key, share in {"a": 0.6, "b": 0.3, "c": 0.1}.items():
        assert abs(counts[key] / 4000 - share) < 0.03


def test_draws_are_different_entries_with_a_score():
    buffer = ReplayBuffer(4).admit(entries(a=6.0, b=3.0, c=1.0, worthless=0.0))
    drawn = [entry.key for entry in buffer.draw(9, np.random.default_rng(0))]
    assert sorted(drawn) == ["a", "b", "c"]
    assert buffer.draw(0, np.random.default_rng(0)) == []
    assert len(buffer.draw(2, np.random.default_rng(0))) == 2


def test_draws_repeat_with_their_seed():
    buffer = ReplayBuffer(9).admit(entries(**{f"k{i}": 1.0 + i for i in range(9)}))
    first, again, other = (buffer.draw(4, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
