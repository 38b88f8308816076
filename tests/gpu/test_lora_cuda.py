"""LoRA on a GPU: a bf16 base that is held once, compiled pieces around layers of peft, graphs that follow the updates.
Skipped without a GPU."""

import pytest
import torch

from mtrl.compose.run import build, configure
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.embedded.task import make_question
from mtrl.models.adapters import AdapterSettings, adapter_parameters, add_adapters
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.rollout.decode.engine import GraphGenerator
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Needs, Sampling
from mtrl.workers.reference import Reference
from pretraining.evaluation import make_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
pytest.importorskip("peft")
DRAWS = 6  # random adapters


@pytest.fixture(scope="module")
def encoder():
    return load_encoder(MODEL_DIRECTORY)


@pytest.fixture(scope="module")
def rollouts(encoder):
    prompts = make_prompts([make_question("test", index) for index in range(6)], encoder)
    engine = LocalGenerator(Backbone(load_model(MODEL_DIRECTORY, dtype="bf16", device="cuda")), encoder)
    return engine.generate(prompts, Sampling(n=4, max_new_tokens=16))


def adapted(encoder, compiled=False, checkpointing=False, lora_vision_tower=False, dtype="bf16"):
    model = load_model(MODEL_DIRECTORY, dtype=dtype, device="cuda")
    add_adapters(model, AdapterSettings(lora_rank=8, lora_alpha=16, lora_vision_tower=lora_vision_tower))
    draw(model, 0)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    backbone = Backbone(model, torch.bfloat16 if dtype == "bf16" else None, compiled=compiled)
    return Forward(backbone, encoder, packed=compiled and backbone.can_pack)


def draw(model, seed):
    """Other adapters, without gradients."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
            parameter.grad = None


def test_kept_features_go_to_the_cpu_and_back(encoder, rollouts, monkeypatch):
    forward = adapted(encoder)
    forward.kept.begin(forward.backbone, 0)
    with torch.no_grad():
        first = forward.logp(rollouts)
    kept = forward.kept.find("features", forward.backbone, rollouts.prompts[0])
    assert kept.embeds.device.type == "cpu" and kept.embeds.is_pinned()
    monkeypatch.setattr(forward.backbone.images, "encode", None)
    with torch.no_grad():
        assert torch.equal(forward.logp(rollouts), first), "bitwise, without the tower"


def gradients(forward, rollouts):
    model = forward.backbone.model.train()
    forward.logp(rollouts).sum().backward()
    model.eval()
    return torch.cat([p.grad.flatten() for p in adapter_parameters(model).values()])


def distances(forward, rollouts, truth):
    """Relative distance of gradients and log-probs from those of float32."""
    found = gradients(forward, rollouts)
    assert found.dtype == torch.float32 and found.isfinite().all()
    logp = forward.signals(rollouts).old_logprobs[rollouts.mask]
    return [float((mine - exact).norm() / exact.norm()) for mine, exact in zip((found, logp), truth, strict=True)]


def mean_distances(forward, rollouts, truths):
    found = []
    for seed, truth in enumerate(truths):
        draw(forward.backbone.model, seed)
        found.append(distances(forward, rollouts, truth))
    return torch.tensor(found).mean(0).tolist()


@pytest.mark.parametrize("vision_tower", [False, True])
@pytest.mark.usefixtures("exact_products")
def test_compiled_and_checkpointed_passes_equal_plain_ones(encoder, rollouts, vision_tower):
    """Equal in float32; in bf16 as close to float32 as plain bf16 passes, on average over adapters. For single adapters
    either can be twice as far as the other."""
    plain = adapted(encoder, lora_vision_tower=vision_tower, dtype="fp32")
    truths = []
    for seed in range(DRAWS):
        draw(plain.backbone.model, seed)
        truths.append((gradients(plain, rollouts), plain.signals(rollouts).old_logprobs[rollouts.mask]))
    noise = mean_distances(adapted(encoder, lora_vision_tower=vision_tower), rollouts, truths)
    for compiled, checkpointing in ((True, False), (True, True), (False, True)):
        kinds = compiled, checkpointing, vision_tower
        exact = distances(adapted(encoder, *kinds, dtype="fp32"), rollouts, truths[0])
        assert max(exact) < 1e-3, (kinds, exact)
        rounded = mean_distances(adapted(encoder, *kinds), rollouts, truths)
        assert all(mine < 1.4 * plainly for mine, plainly in zip(rounded, noise, strict=True)), (kinds, rounded, noise)


def test_the_reference_is_the_base_in_compiled_passes_too(encoder, rollouts):
    forward = adapted(encoder, compiled=True)
    reference = Reference.under_adapters(forward)
    base = Forward(Backbone(load_model(MODEL_DIRECTORY, dtype="bf16", device="cuda")), encoder)
    said = forward.signals(rollouts).old_logprobs
    found = reference.start_signals(rollouts, Needs("ref_logprobs"), forward)().ref_logprobs
    noise = (found - base.signals(rollouts).old_logprobs)[rollouts.mask].abs().mean()
    apart = (found - said)[rollouts.mask].abs().mean()
    assert noise < 0.2 * apart, (noise, apart)
    assert torch.equal(forward.signals(rollouts).old_logprobs, said), "the adapters are back"


def test_a_run_holds_the_base_once_and_its_graphs_follow(tmp_path):
    lora = {"worker.actor.model.peft_type": "lora", "worker.actor.optim.lr": 1e-3}
    settings = {
        "training.output_dir": str(tmp_path), "training.max_steps": 3, "training.logger": (), "training.val_freq": -1,
        "training.val_before_train": False, "worker.actor.fsdp.mixed_precision_dtype": "bf16",
        "optimization.disable_divergence": False,
    }  # fmt: skip
    run = build(configure(None, settings | lora)[0])
    model, engine = run.loaded.model, run.loop.components.generator
    assert type(engine) is GraphGenerator
    run.train()
    frozen = model.model.language_model.layers[0].self_attn.q_proj.base_layer.weight
    assert frozen.dtype == torch.bfloat16 and engine.weights.layers[0].qkv.data_ptr() == frozen.data_ptr()
    assert {p.dtype for p in adapter_parameters(model).values()} == {torch.float32}
    low, up = (next(p for n, p in adapter_parameters(model).items() if part in n) for part in ("lora_A", "lora_B"))
    assert low.isfinite().all() and up.any(), "they have learnt"
