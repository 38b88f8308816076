"""Metrics of a step (SPEC 8). Means are over all tokens of the step, never over the last micro-batch.

Values that do not apply never enter a mean; a metric without any value is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mtrl.algorithms.groups import group_std, masked_mean, row_mean
from mtrl.algorithms.signals import LOG_RATIO_LIMIT, SHIFTS, aei, pool_sizes, segment, sequence_mass, vgr
from mtrl.types import SEGMENTS, Experience, Rewards, Rollouts, Signals

Metrics = dict[str, float]
OF_IMAGES = ("similarity", "token_similarity", "layer_similarity", *SHIFTS)  # 0 in responses without an image
SUCCESS = ("accuracy", "math")  # reward parts that are 1 for a correct answer; the first that applies counts


def step_metrics(experience: Experience, cut: bool) -> Metrics:
    """Metrics of the responses, besides credit and update. `cut`: top-p or top-k was on."""
    rollouts, signals, mask = experience.rollouts, experience.signals, experience.rollouts.mask
    comparable = rollouts.comparable
    values = reward_metrics(experience.rewards, rollouts.group) | noised_metrics(experience.rewards, rollouts)
    values |= sensitivity_metrics(signals, mask, rollouts.visual)
    values |= attention_metrics(signals, rollouts)
    values |= length_metrics(mask, rollouts.truncated) | tool_metrics(rollouts)
    if signals.old_logprobs is not None:
        values |= mismatch_metrics(signals.old_logprobs, rollouts.rollout_logprobs, comparable, cut)
        if signals.support is not None:
            values |= mismatch_metrics(
                signals.old_logprobs - signals.support, rollouts.rollout_logprobs, comparable, cut=False
            )
    if signals.routing_mismatch is not None:
        values["rollout/routing_mismatch"] = masked_mean(signals.routing_mismatch, comparable)
    if signals.entropy is not None:
        values["actor/entropy"] = masked_mean(signals.entropy, mask)
    return values | signal_metrics(signals, mask, rollouts.visual)


def signal_metrics(signals: Signals, mask: Tensor, visual: Tensor) -> Metrics:
    """Means of users' signals and of other views, and of what single rules read of responses with an image."""
    means = {name: masked_mean(each, mask) for name, each in signals.extra.items() if each.ndim == 2}
    seen = mask & visual[:, None]
    of_images = {name: each for name in OF_IMAGES if (each := getattr(signals, name)) is not None and seen.any()}
    means |= {name: masked_mean(each, seen) for name, each in of_images.items()}
    return {f"signal/{name}": value for name, value in means.items()}


def summary(name: str, x: Tensor) -> Metrics:
    """name/mean, name/min and name/max of the values that apply, if any."""
    values = x.double()[~x.isnan()]
    if not len(values):
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/min": float(values.min()),
        f"{name}/max": float(values.max()),
    }


def success_part(parts: Mapping[str, Tensor]) -> Tensor | None:
    """The reward part that is 1 for a correct answer; None if no such part applies."""
    there = [parts[name] for name in SUCCESS if name in parts and not parts[name].isnan().all()]
    return there[0] if there else None


def success_rate(parts: Mapping[str, Tensor]) -> float | None:
    """Share of correct answers among the responses that `success_part` applies to; None if there are none."""
    success = success_part(parts)
    return None if success is None else float((success[~success.isnan()] >= 1).double().mean())


def reward_metrics(rewards: Rewards, group: Tensor) -> Metrics:
    """The total, every part, the share of groups without reward variance, and the success rate."""
    metrics = {
        f"reward/{name}": float(part.double().nanmean())
        for name, part in rewards.parts.items()
        if not part.isnan().all()
    }
    metrics["reward/overall"] = float(rewards.total.double().mean())  # even if a part is named `overall`
    metrics["reward/failed"] = masked_rate(rewards.failed)
    metrics["reward/zero_std_groups"] = float((group_std(rewards.total, group) == 0).double().mean())
    if rewards.baseline is not None:
        metrics["reward/greedy_baseline"] = float(rewards.baseline.double().mean())
    rate = success_rate(rewards.parts)
    return metrics if rate is None else metrics | {"reward/success_rate": rate}


def noised_metrics(rewards: Rewards, rollouts: Rollouts) -> Metrics:
    """The total of either half of the groups with an image, if one half was sampled on noised images."""
    if rollouts.noised is None or not rollouts.noised.any():
        return {}
    total, clean = rewards.total.double(), rollouts.visual & ~rollouts.noised
    return {
        "reward/clean_half": float(total[clean].mean()),
        "reward/noised_half": float(total[rollouts.noised].mean()),
    }


def sensitivity_metrics(signals: Signals, mask: Tensor, visual: Tensor) -> Metrics:
    """Mean S of the responses with an image."""
    scored = visual & mask.any(1)
    if signals.dependency is None or not scored.any():
        return {}
    score = row_mean(signals.dependency, mask)[scored]
    return {
        "actor/sensitivity_score_mean": float(score.mean()),
        "actor/sensitivity_score_min": float(score.min()),
        "actor/sensitivity_score_max": float(score.max()),
    }


def mismatch_metrics(old: Tensor, rollout_logprobs: Tensor, mask: Tensor, cut: bool) -> Metrics:
    """Gap between the log-probs of sampler and trainer. With top-p or top-k the sampler renormalises, so its gap to the
    full distribution (`cut`) is expected and has a separate name; the gap on the renormalised support has the
    usual name."""
    name = gap_name(cut)
    gap = (old - rollout_logprobs).where(mask, 0.0)
    return {
        f"{name}_mean": masked_mean(gap.abs(), mask),
        f"{name}_max": float(gap.abs().max()) if mask.any() else 0.0,
        f"{name}_kl": -masked_mean(gap, mask),
        f"{name}_ess": effective_share(gap[mask]),
    }


def effective_share(log_ratios: Tensor) -> float:
    """Effective sample size per token under importance ratios: 1 if sampler and trainer agree, near 0 if a few tokens
    dominate.

    >>> effective_share(Tensor([0.0] * 5)), round(effective_share(Tensor([0.0, 0.0, 0.0, 12.0])), 3)
    (1.0, 0.25)
    """
    if not len(log_ratios):
        return 1.0
    ratios = log_ratios.double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()))


def gap_name(cut: bool) -> str:
    return "rollout/logprob_gap_cut" if cut else "rollout/logprob_gap"


def learnt_metrics(learnt: Metrics, cut: bool) -> Metrics:
    """Metrics of the actor's update by their full names."""
    gaps = {"logprob_gap": gap_name(cut), "support_gap": gap_name(False)}
    gaps |= {"routing_mismatch": "rollout/routing_mismatch"}
    names = {name: next((name.replace(gap, gaps[gap]) for gap in gaps if gap in name), name) for name in learnt}
    return {new if new != old else f"actor/{old}": learnt[old] for old, new in names.items()}


def length_metrics(mask: Tensor, truncated: Tensor) -> Metrics:
    return summary("response_length", mask.sum(1)) | {"response_length/truncated": masked_rate(truncated)}


def tool_metrics(rollouts: Rollouts) -> Metrics:
    """Means of `tool_values`, and the longest wait; none without an environment."""
    values = tool_values(rollouts)
    metrics = {name: sum(each) / len(each) for name, each in values.items() if each}
    waited = values.get("tools/waited_mean")
    return metrics | ({"tools/waited_max": max(waited)} if waited else {})


def tool_values(rollouts: Rollouts) -> dict[str, list[float]]:
    """The numbers whose means are metrics: one of each response, of each call (failures) or of each message (waits)."""
    if rollouts.observations is None:
        return {}
    by_response = [() if each is None else each.turns for each in rollouts.observations]
    messages = [turn for turns in by_response for turn in turns]
    lengths = rollouts.mask.sum(1).tolist()
    return {
        "tools/turns": [  # of the model itself: a response may end with a message
            1.0 + sum(turn.after < length for turn in turns) for turns, length in zip(by_response, lengths, strict=True)
        ],
        "tools/calls": [float(sum(len(turn.tools) for turn in turns)) for turns in by_response],
        "tools/failure_frequency": [float(call < turn.errors) for turn in messages for call in range(len(turn.tools))],
        "tools/images": [float(sum(len(turn.message.media) for turn in turns)) for turns in by_response],
        "tools/tokens": (rollouts.read_tokens - rollouts.mask.sum(1)).double().tolist(),
        "tools/waited_mean": [turn.waited for turn in messages],
    }


def attention_metrics(signals: Signals, rollouts: Rollouts) -> Metrics:
    """Mean VGR and AEI over the responses they apply to, by segment; `prompt_`: of the prompt's tokens."""
    values = attention_values(signals, rollouts)
    return {f"attention/{name}": float(x.double().nanmean()) for name, x in values.items() if not x.isnan().all()}


def attention_values(signals: Signals, rollouts: Rollouts) -> dict[str, Tensor]:
    """[N] each: VGR and AEI of every response by segment, NaN if not applicable, and |ln VGR| of the late segment."""
    if signals.attention_mass is None or signals.prompt_attention_mass is None:
        return {}
    sizes = pool_sizes(rollouts.prompts)[rollouts.group]
    phases = {"": sequence_mass(signals.attention_mass, rollouts.mask), "prompt_": signals.prompt_attention_mass}
    values: dict[str, Tensor] = {}
    for phase, mass in phases.items():
        for name in SEGMENTS[:-1]:  # "weight" is for token weights only
            chosen = segment(mass, name)
            text, vision = aei(chosen, sizes).unbind(-1)
            values |= {f"{phase}vgr_{name}": vgr(chosen, sizes)}
            values |= {f"{phase}aei_text_{name}": text, f"{phase}aei_vision_{name}": vision}
    return values | {"imbalance_late": values["vgr_late"].log().abs()}


def masked_rate(flags: Tensor) -> float:
    return float(flags.double().mean()) if len(flags) else 0.0
