"""A video row, a two-image row, a text row and one of both kinds: whole steps with all of them in one batch."""

import math

import numpy as np
import pytest
import torch
from clip_helpers import mixed_prompts, mixed_rows
from helpers import slow_but
from tiny_models import checkpoint, get_encoder, plain_inputs, plain_model, shared_backbone

from mtrl.algorithms.signals import pool_sizes
from mtrl.compose.run import build
from mtrl.config import load_config
from mtrl.models.forward import Forward
from mtrl.models.perturb import Perturbation
from mtrl.protocols import Tracker
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Needs, Sampling

pytest.importorskip("av")
FAMILIES = ["qwen2_5_vl", "qwen3_vl"]
VIDEO, IMAGES, TEXT, BOTH = range(4)


class Spy(Tracker):
    needs = Needs("dependency", "attention_mass", "prompt_attention_mass")

    def __init__(self):
        self.steps = []

    def rollouts(self, step, experience):
        self.steps.append(experience)


def seen_media(data):
    """A reward that records its media."""
    return 1.0 + 10 * len(data["images"]) + 100 * len(data.get("videos", ())) + len(data["response"]) / 1000


@pytest.mark.parametrize("family", slow_but(FAMILIES, "qwen3_vl"))
def test_one_batch_of_all_kinds_goes_through_whole_steps(family, tmp_path):
    """Rollout, perturbation, reward, attention masses and update, by the run that `mtrl train` builds."""
    spy, rows = Spy(), mixed_rows(get_encoder(family), tmp_path)
    config = load_config(None, [
        f"worker.actor.model.model_path={checkpoint(family)}", "worker.actor.fsdp.mixed_precision_dtype=fp32",
        "worker.actor.global_batch_size=4", "worker.rollout.n=3", "worker.reward.num_cpus=1",
        "dataset.rollout_batch_size=4", "dataset.max_response_length=6", "dataset.shuffle=false",
        "dataset.min_pixels=1", "training.max_steps=2", "training.logger=[]", "training.val_freq=-1",
        "training.val_before_train=false", f"training.output_dir={tmp_path}",
        "optimization.enable_perception_filtering=true", "optimization.enable_token_weights=true",
    ])  # fmt: skip
    run = build(config, data=rows, rewards=[seen_media], trackers=[spy])
    tower = run.loaded.model.model.visual
    before = [weight.detach().clone() for weight in tower.parameters()]
    run.train()
    assert not all(map(torch.equal, before, tower.parameters()))
    assert len(spy.steps) == 2
    for it in spy.steps:
        kind = it.rollouts.group
        assert it.rollouts.visual.tolist() == (kind != TEXT).tolist()
        shown = {VIDEO: 100, IMAGES: 20, TEXT: 0, BOTH: 110}
        assert [int(total) - 1 for total in it.rewards.total] == [shown[each] for each in kind.tolist()]
        assert it.rollouts.mask.any(1).all() and it.credit is not None and it.credit.advantage.isfinite().all()
        depends = it.signals.dependency.where(it.rollouts.mask, 0.0).abs().sum(1)
        assert (depends[kind != TEXT] > 0).all() and (depends[kind == TEXT] == 0).all()
        vision = it.signals.attention_mass[..., 3, 1].where(it.rollouts.mask, 0.0).sum(1)
        assert (vision[kind != TEXT] > 0).all() and (vision[kind == TEXT] == 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_masses_are_the_attention_on_all_video_tokens(family, tmp_path):
    """By transformers' eager attention matrices: video tokens are the vision pool, times and marks are not."""
    prompts, encoder = mixed_prompts(family, tmp_path), get_encoder(family)
    rollouts = LocalGenerator(shared_backbone(family), encoder).generate(prompts, Sampling(n=1, max_new_tokens=4))
    found = Forward(shared_backbone(family), encoder).signals(rollouts, Needs("attention_mass")).attention_mass
    model = plain_model(family)
    model.set_attn_implementation("eager")
    try:
        for row in (VIDEO, BOTH):
            response = rollouts.tokens[row][rollouts.mask[row]]
            with torch.no_grad():
                inputs = plain_inputs(encoder, prompts[row], response)
                layers = model(**inputs, output_attentions=True).attentions
            size, pool = len(prompts[row].ids), prompts[row].token_pool
            heads = torch.stack(layers)[:, 0].mean(1)[:, size - 1 : -1, :size]  # [layers, T, L]
            heads[..., 0] = 0
            shares = (heads / heads.sum(-1, keepdim=True)).mean(0)
            expected = torch.stack([shares[:, pool == each].sum(-1) for each in (1, 2)], -1)
            torch.testing.assert_close(found[row, : len(response), 3], expected, atol=1e-5, rtol=0)
    finally:
        model.set_attn_implementation("sdpa")
    sizes, pads = pool_sizes(prompts), (prompts[VIDEO].ids == encoder._pad_ids["video"]).sum()
    assert (
        int(sizes[VIDEO, 1])
        == int(pads)
        == math.prod(prompts[VIDEO].media[0].shape[1:3])
        // (encoder.image_settings.factor**2)
        * -(-len(prompts[VIDEO].media[0]) // 2)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_responses_equal_those_of_generate(family, tmp_path):
    prompts, encoder = mixed_prompts(family, tmp_path), get_encoder(family)
    rollouts = LocalGenerator(shared_backbone(family), encoder).generate(
        prompts, Sampling(temperature=0, max_new_tokens=8)
    )  # fmt: skip
    for row, prompt in enumerate(prompts):
        expected = plain_model(family).generate(
            **plain_inputs(encoder, prompt, torch.zeros(0, dtype=torch.long)), do_sample=False, max_new_tokens=8,
            suppress_tokens=list(encoder.forbidden_ids), eos_token_id=list(encoder.stop_ids),
        )[0, len(prompt.ids) :]  # fmt: skip
        assert rollouts.tokens[row][rollouts.mask[row]].tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["random_patch_blackening", "gaussian_noise"])
def test_a_clip_is_perturbed_as_a_tube(kind, tmp_path):
    """The mask is the same in every frame; other images of the prompt have their own masks."""
    prompt = mixed_prompts("qwen2_5_vl", tmp_path)[BOTH]
    view = Perturbation(kind, black_prob=0.5).view(prompt, step=3)
    assert [each.shape for each in view] == [each.shape for each in prompt.media]
    if kind == "random_patch_blackening":
        black = (view[0] == 0).all(-1)
        assert (black == black[0]).all() and 0.2 < black[0].mean() < 0.8
        assert np.array_equal(view[0][~black], prompt.media[0][~black])
    again = Perturbation(kind, black_prob=0.5).view(prompt, step=3)
    assert all(np.array_equal(a, b) for a, b in zip(view, again, strict=True))
