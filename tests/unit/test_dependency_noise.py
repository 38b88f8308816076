"""The S that rounding alone makes, measured on the embedded model: the floor lies above it and below real values."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from mtrl.algorithms.signals import DEPENDENCY_NOISE, visual_dependency
from mtrl.compose import algorithm
from mtrl.compose.policy import build_generator, build_policy
from mtrl.compose.task_source import validation_sampler
from mtrl.config import load_config
from mtrl.embedded.embedded_rows import CONFIG_FILE, SIZES
from mtrl.types import Needs

PROMPTS, TOKENS = 8, 16
NEEDS = Needs("old_logprobs", "perturbed_logprobs", "dependency")


def settings(dtype="fp32"):
    return load_config(CONFIG_FILE, {"worker.actor.fsdp.mixed_precision_dtype": dtype, "dataset.val_files": "zoo@test"})


@pytest.fixture(scope="module")
def rollouts():
    """Responses of the model, sampled so hot that many tokens are uncertain: those have the largest rounding errors."""
    config = settings()
    encoder, policy = build_policy(config)
    sampling = replace(algorithm.make_validation_sampling(config), n=1, max_new_tokens=TOKENS, temperature=2.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "test", PROMPTS)
        with validation_sampler(config, encoder) as sampler:
            prompts = next(iter(sampler.one_pass(PROMPTS)))
    with closing(build_generator(config, policy, encoder)) as generator, generator.resident():
        return generator.generate(prompts, sampling)


def same_image_passes(policy, rollouts):
    """[passes, tokens] log-probs that are equal but for rounding: as the first and as the second view of the same
    image, with all rows in one pass and with each row alone, where sums have another order."""
    whole = [rollouts]
    single = [rollouts.rows(torch.tensor([row])) for row in range(len(rollouts))]
    passes = []
    for parts in (whole, single):
        found = [
            policy.signals(part, NEEDS, {"perturbed": [prompt.media for prompt in part.prompts]}) for part in parts
        ]
        for name in ("old_logprobs", "perturbed_logprobs"):
            tokens = [getattr(each, name)[part.mask] for each, part in zip(found, parts, strict=True)]
            passes.append(torch.cat(tokens))
    return torch.stack(passes)


def measure(dtype, rollouts):
    config = settings(dtype)
    encoder, policy = build_policy(config)
    passes = same_image_passes(policy, rollouts)
    pairs = torch.combinations(torch.arange(len(passes)))
    noise = visual_dependency(passes[pairs[:, 0]], passes[pairs[:, 1]], torch.ones(len(pairs), passes.shape[1]).bool())
    view = algorithm.make_perturbation(config, encoder.image_settings.patch_size).view
    real = policy.signals(rollouts, NEEDS, {"perturbed": [view(prompt, 0) for prompt in rollouts.prompts]}).dependency
    print(
        f"\n{dtype}: noise {noise.max():.1e} at most, {noise.mean():.1e} on average; S of a response at most",
        *(f"{x:.1e}" for x in real.amax(1).sort().values),
        f"; {(real[rollouts.mask] > DEPENDENCY_NOISE).float().mean():.0%} of the tokens above the floor",
    )
    return passes[0], noise, real.amax(1)


def test_the_floor_of_s_is_above_rounding_and_below_real_values(rollouts):
    exact, noise, real = measure("fp32", rollouts)
    assert len(exact) > 4 * PROMPTS and exact.min() < -3, "tokens that the model was uncertain of"
    assert noise.max() < DEPENDENCY_NOISE / 1000
    assert real.median() > 1000 * DEPENDENCY_NOISE
    rounded, noise, real = measure("bf16", rollouts)
    assert (rounded - exact).abs().max() > 1e-3, "it computes in bf16"
    assert real.median() > 1000 * DEPENDENCY_NOISE
