"""Families with prompts of their own, and text models: vLLM reads the trainer's tokens and pixels, and its weights.

`benchmarks/vllm_parity.py` measures the same; Qwen's families have the whole suite of engines.
"""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from helpers import slow_but
from tiny_models import TEXT_FAMILIES, checkpoint, get_encoder, plain_log_probs, plain_model_at, shared_backbone
from vllm_engines import INSTALLED, engine_on, in_process

from benchmarks.vllm_parity import make_prompt
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.forward import Forward
from mtrl.models.state_dicts import exported_weights
from mtrl.types import Sampling, Weights

pytestmark = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")

DIFFERENT = 1e-2  # nats
TOLERANCE = defaultdict(lambda: 1e-4, glm4v=3e-4)  # after images GLM's log-probs are three times as far as others'
VISION = ["internvl", "idefics3", "smolvlm", "llava_onevision", "glm4v"]
QUICK_VISION = [each for each in VISION if each != "smolvlm"]  # Idefics3 under another name
TEXT = ["qwen3", "llama"]
SOFTER = {"gemma3_text": 0.25}  # its large weights make it certain of one token, whatever it reads


@pytest.fixture
def family(request):
    if request.param == "smolvlm":
        pytest.importorskip("num2words")  # vLLM loads the processor of SmolVLM2
    return request.param


def prompts_of(family, encoder=None):
    counts = [0, 0] if family in TEXT_FAMILIES else [0, 1, 3]  # images of each prompt
    return [make_prompt(encoder or get_encoder(family), f"t:{i}", count) for i, count in enumerate(counts)]


def gap(family, rollouts, backbone=None, encoder=None):
    """The largest distance of a log-prob to the trainer's."""
    forward = Forward(backbone or shared_backbone(family), encoder or get_encoder(family))
    old = forward.signals(rollouts).old_logprobs
    return float((old - rollouts.rollout_logprobs)[rollouts.mask].abs().max())


@pytest.fixture
def read(monkeypatch):
    """The tokens of the prompts that an engine has read."""
    seen = []

    def watch(host):
        generate = host.llm.generate

        def watched(*arguments, **options):
            results = generate(*arguments, **options)
            seen[:] = [list(result.prompt_token_ids) for result in results]
            return results

        monkeypatch.setattr(host.llm, "generate", watched)
        return seen

    return watch


@pytest.mark.parametrize("family", slow_but([*VISION, *TEXT], *QUICK_VISION, *TEXT), indirect=True)
def test_vllm_samples_from_the_trainers_distribution(family, read):
    host = in_process(family)
    seen, engine, prompts = read(host), engine_on(host, family), prompts_of(family)
    rollouts = engine.generate(prompts, Sampling(n=3, max_new_tokens=12))
    assert seen == [prompt.ids.tolist() for prompt in prompts]
    assert gap(family, rollouts) < TOLERANCE[family]
    greedy = engine.generate(prompts, Sampling(temperature=0, max_new_tokens=12))
    for row, prompt in enumerate(prompts):  # near ties, which rounding decides, count as equal
        said = greedy.tokens[row][greedy.mask[row]]
        with torch.no_grad():
            log_probs = plain_log_probs(family, prompt, said)
        assert (log_probs.amax(-1) - log_probs.gather(-1, said[:, None])[:, 0]).max() < TOLERANCE[family]


@pytest.mark.parametrize("family", slow_but(VISION, *QUICK_VISION), indirect=True)
def test_another_image_makes_the_difference(family):
    engine, prompt = engine_on(in_process(family), family), prompts_of(family)[1]
    turned = get_encoder(family).encode(prompt.task, [255 - prompt.media[0]])
    for shown, other in ((prompt, turned), (turned, prompt)):
        rollouts = engine.generate([shown], Sampling(n=3, max_new_tokens=12))
        assert gap(family, rollouts) < TOLERANCE[family]
        assert gap(family, replace(rollouts, prompts=(other,))) > DIFFERENT


@pytest.mark.parametrize("family", slow_but(VISION, *QUICK_VISION), indirect=True)
def test_limits_of_pixels_reach_the_engine(family, read, monkeypatch):
    host = in_process(family)
    most = int(get_encoder(family).image_settings.max_pixels // 2.5)
    encoder = load_encoder(checkpoint(family), max_pixels=20 * 28**2 if family == "glm4v" else most)
    monkeypatch.setattr(host, "image_arguments", encoder.engine_image_arguments())
    seen, prompts = read(host), [large_prompt(encoder), *prompts_of(family, encoder)]
    assert len(prompts[0].ids) < len(large_prompt(get_encoder(family)).ids)
    rollouts = engine_on(host, family, encoder).generate(prompts, Sampling(n=2, max_new_tokens=8))
    assert seen == [prompt.ids.tolist() for prompt in prompts]
    assert gap(family, rollouts, encoder=encoder) < TOLERANCE[family]


def large_prompt(encoder):
    return make_prompt(encoder, "large", 1, side=280)


@pytest.mark.parametrize(
    "family", slow_but([*VISION, *TEXT, "gemma3_text"], *QUICK_VISION, "qwen3", "gemma3_text"), indirect=True
)
def test_new_weights_arrive(family):
    engine, model = engine_on(in_process(family), family, may_change=True), plain_model_at(checkpoint(family), family)
    before = shared_backbone(family)
    for version in (1, 2):
        noise = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(SOFTER.get(family, 1.0) if version == 1 and parameter.dim() > 1 else 1.0)
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
        engine.load(Weights(version, exported_weights(model)))
        rollouts = engine.generate(prompts_of(family), Sampling(n=3, max_new_tokens=12, version=version))
        assert gap(family, rollouts, Backbone(model)) < TOLERANCE[family]
        assert gap(family, rollouts, before) > DIFFERENT, "the earlier weights would respond differently"
