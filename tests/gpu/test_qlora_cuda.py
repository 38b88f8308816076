"""A base in 4 bits and 8-bit AdamW on a GPU: the same numbers as on a CPU, less memory, and a run that learns. Skipped
without a GPU, peft or bitsandbytes."""

import gc

import pytest
import torch
from tiny_models import checkpoint, get_encoder, prompts_for, random_rollouts
from torch import nn

import mtrl
from mtrl.models.adapters import AdapterSettings, adapter_parameters, add_adapters, quantize_base
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.models.quantized import BYTES, FourBitLinear
from mtrl.workers.optimizers import EightBitAdamW

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
CUDA = torch.device("cuda")


def test_a_weight_takes_a_quarter_of_the_room():
    gc.collect()
    before = torch.cuda.memory_allocated()
    packed = FourBitLinear(nn.Linear(4096, 8192, bias=False, dtype=torch.bfloat16), CUDA)
    gc.collect()
    taken = torch.cuda.memory_allocated() - before
    assert taken == pytest.approx(BYTES * 4096 * 8192, rel=0.01)
    x = torch.randn(300, 4096, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    packed(x).float().square().mean().backward()
    other = x.detach().clone().requires_grad_()
    nn.functional.linear(other, packed.weight).float().square().mean().backward()
    torch.testing.assert_close(x.grad, other.grad)
    one = packed(x[:1].detach())
    torch.testing.assert_close(one, nn.functional.linear(x[:1], packed.weight), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("compiled", [False, True])
def test_log_probs_equal_those_of_a_cpu(compiled):
    def logp(device, **options):
        model = load_model(checkpoint("qwen2_5_vl"))
        quantize_base(model, device)
        add_adapters(model, AdapterSettings(lora_rank=4))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in adapter_parameters(model).values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 16)
        rollouts = random_rollouts(prompts_for("qwen2_5_vl")[:2], [0, 0, 1], [6, 9, 4])
        forward = Forward(Backbone(model, **options), get_encoder("qwen2_5_vl"))
        return forward.signals(rollouts).old_logprobs[rollouts.mask]

    torch.testing.assert_close(logp(CUDA, compiled=compiled), logp(torch.device("cpu")), rtol=5e-3, atol=5e-3)


def test_eight_bit_steps_equal_those_of_a_cpu():
    def moved(device):
        weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        optimizer = EightBitAdamW([weight], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        for step in range(20):
            weight.grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(step)).to(device)
            optimizer.step()
        assert optimizer.state[weight]["exp_avg"].dtype == torch.uint8
        return weight.detach().cpu()

    start = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    ours, theirs = moved(CUDA), moved(torch.device("cpu"))
    assert (ours - theirs).norm() < 0.03 * (theirs - start).norm()


def test_a_run_of_the_embedded_model(tmp_path):
    rows = [{"prompt": f"Say {word}.", "answer": word} for word in ("red", "blue")]
    trainer = mtrl.Trainer(
        data=rows, rewards=lambda data: float(len(data["response"])), output_dir=str(tmp_path), experiment_name="q",
        max_steps=2, rollout_batch_size=2, global_batch_size=2, n=4, max_response_length=8, logger=[], lr=1e-3,
        peft_type="qlora", offload_optimizer=True, config={"worker.actor.optim.name": "adamw_8bit"},
    )  # fmt: skip
    trainer.train()
    assert [row["actor/grad_norm"] > 0 for row in trainer.history] == [True, True]
    assert all(parameter.device.type == "cuda" for parameter in trainer.model.parameters())
