"""Vision-language models that nobody described, each with its own Processor: which run, and which are refused."""

import copy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import close
from PIL import Image
from tiny_vlms import make_tiny_vlm, train_one_step
from transformers import AutoProcessor

from mtrl.compose.family_checks import make_check_rollouts
from mtrl.compose.policy import build_encoder
from mtrl.config import ConfigError, load_config
from mtrl.models.adapters import AdapterSettings, adapter_parameters, add_adapters
from mtrl.models.backbone import Backbone
from mtrl.models.families import FAMILIES, load_encoder
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.models.plain_check import start_plain_check
from mtrl.rollout.local import LocalGenerator
from mtrl.types import VISION_POOL, Sampling

needs_torchvision = pytest.mark.skipif(find_spec("torchvision") is None, reason="its Processor takes videos")
WITH_VIDEOS = [pytest.param(name, marks=needs_torchvision) for name in ("internvl", "llava_onevision")]
REFUSED = {
    "gemma3": "'gemma3_text' are not supported: sliding attention",
    "gemma3_full": "its image tokens attend to later ones",
    "paligemma": "its Processor makes other tokens of a prompt",
}


@pytest.fixture(autouse=True)
def without_descriptions(monkeypatch):
    """As if nobody had described these: the masks of Gemma 3 are those that the check must notice."""
    for family in ("gemma3", "idefics3", "internvl", "llava_onevision"):
        monkeypatch.delitem(FAMILIES, family)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            made[name] = make_tiny_vlm(tmp_path_factory.mktemp(name), name)
        return made[name]

    return make


def check(path, dtype="fp32"):
    model, encoder = load_model(path, dtype=dtype), load_encoder(path)
    started = start_plain_check(model, encoder, make_check_rollouts)
    forward = Forward(Backbone(model), encoder, share_prefix=False)
    return started.finish(forward), forward


@pytest.mark.parametrize("name", ["llava_next", "idefics3", *WITH_VIDEOS])
def test_it_runs_within_rounding_and_says_what_is_not_available(checkpoint, name):
    said, forward = check(checkpoint(name))
    assert f"the family {name!r} is not described" in said and "several processes, vLLM, attention maps" in said
    encoder, rollouts = forward.encoder, make_check_rollouts(forward.encoder)
    assert not forward.backbone.can_share_prefix
    prompt = rollouts.prompts[2]
    processor, text = AutoProcessor.from_pretrained(checkpoint(name)), encoder.render(prompt.task.messages)
    given = processor(text=text, images=[Image.fromarray(each) for each in prompt.media], return_tensors="pt")
    assert torch.equal(prompt.ids, given["input_ids"][0])
    assert encoder.length(prompt.task, [each.shape[:2] for each in prompt.media]) == len(prompt.ids)
    image = prompt.ids == forward.backbone.model.config.image_token_id
    assert torch.equal(prompt.token_pool == VISION_POOL, image)
    forward.logp(rollouts).sum().backward()
    tower = forward.backbone.vision_tower
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in tower.parameters())


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_the_page_that_says_how_to_add_it(checkpoint, name):
    with pytest.raises(ValueError, match=f"is not described, and it cannot .*{REFUSED[name]}.*docs/extending.md"):
        check(checkpoint(name))


def test_a_wrong_mask_is_seen_in_16_bits(checkpoint):
    """Its log-probs differ by 0.003 nats per token, those of a right one by 0.0004: rounding would hide it."""
    with pytest.raises(ValueError, match="its image tokens attend to later ones"):
        check(checkpoint("gemma3_full"), "bf16")
    assert "is not described" in check(checkpoint("idefics3"), "bf16")[0]


def test_a_model_that_pictures_do_not_change_is_refused(checkpoint):
    """Nothing could be seen of a wrong feature or mask."""
    path = checkpoint("idefics3")
    model, encoder = load_model(path), load_encoder(path)
    with torch.no_grad():
        model.model.connector.modality_projection.proj.weight.zero_()
    with pytest.raises(ValueError, match="pictures do not change its log-probs"):
        start_plain_check(model, encoder, make_check_rollouts)


def test_what_was_sampled_has_these_log_probs(checkpoint):
    _, forward = check(checkpoint("idefics3"))
    generator = LocalGenerator(forward.backbone, forward.encoder)
    with generator.resident():
        rollouts = generator.generate(make_check_rollouts(forward.encoder).prompts, Sampling(n=2, max_new_tokens=6))
    close(rollouts.rollout_logprobs, forward.signals(rollouts).old_logprobs, atol=1e-5)


def test_adapters_reach_the_tower(checkpoint):
    model = copy.deepcopy(load_model(checkpoint("idefics3")))
    add_adapters(model, AdapterSettings(lora_rank=2, lora_vision_tower=True))
    assert any("vision_model" in name for name in adapter_parameters(model))


def test_a_processor_that_cannot_be_loaded_is_one_line(checkpoint, tmp_path):
    for file in checkpoint("llava_next").iterdir():
        if "processor" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=r"not described, and its Processor cannot be loaded \(.*extending") as error:
        load_encoder(tmp_path)
    assert "\n" not in str(error.value)


def test_what_it_has_not_is_refused_by_its_keys(checkpoint):
    keys = ["training.n_gpus_per_node=2", "training.record_attention_maps=true", "worker.rollout.name=vllm"]
    with pytest.raises(ConfigError) as error:
        build_encoder(load_config(None, [f"worker.actor.model.model_path={checkpoint('llava_next')}", *keys]))
    assert {line.split(":")[0] for line in error.value.errors} == {key.split("=")[0] for key in keys}


@pytest.mark.usefixtures("no_curves")
@pytest.mark.slow  # 6 s
@pytest.mark.parametrize(("name", "status"), [("llava_next", 0), ("gemma3_full", 2)])
def test_training(checkpoint, name, status, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert train_one_step(checkpoint(name), "dataset.max_response_length=4", "worker.rollout.n=2") == status
    said = "".join(capfd.readouterr())
    assert said.count(f"the family '{'gemma3' if status else name}' is not described") == 1 and "Traceback" not in said
    assert "worker.rollout.name=vllm" not in said, "it is refused"
    assert Path("outputs/mtrl/run/checkpoints/step_1/model.safetensors").is_file() == (status == 0)
