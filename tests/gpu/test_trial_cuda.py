"""First contact with real weights on a GPU, and numbers that are not finite there. Skipped without one."""

import re

import pytest
import torch

from mtrl import cli
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.embedded.task import make_question
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.load_model import load_model
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling
from mtrl.utils.errors import Diverged
from pretraining.evaluation import make_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_embedded_task_is_tried(dtype, compiled, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = [f"worker.actor.fsdp.mixed_precision_dtype={dtype}", f"worker.actor.use_torch_compile={compiled}"]
    assert cli.main(["doctor", "--try", *words]) == 0
    said = capfd.readouterr().out
    gap = re.search(rf"log-probs +(\S+) nats from .* (\S+) allowed in {dtype}", said)
    assert gap and float(gap[1]) < float(gap[2]), said
    assert "million parameters on cuda" in said and re.search(r"peak +\d+\.\d\d GiB, in \w+", said)
    assert said.splitlines()[-1] == "  It runs here." and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_from_nan_leaves_the_device_usable(temperature):
    """An index beyond the vocabulary would cause a device-side assertion, after which the device is unusable."""
    encoder = load_encoder(MODEL_DIRECTORY)
    backbone = Backbone(load_model(MODEL_DIRECTORY, device="cuda"))
    with torch.no_grad():
        backbone.output_matrix[7] = torch.nan
    prompts = make_prompts([make_question("test", index) for index in range(4)], encoder)
    with pytest.raises(Diverged, match="logits are NaN or infinite"):
        LocalGenerator(backbone, encoder).generate(prompts, Sampling(n=2, max_new_tokens=4, temperature=temperature))
    assert int(torch.ones(3, device="cuda").sum()) == 3
