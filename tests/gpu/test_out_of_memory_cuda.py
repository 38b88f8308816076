"""Sampling on a GPU whose memory is in use: fewer responses at a time, and the same tokens. Skipped without a GPU."""

import copy
import gc
import logging

import pytest
import torch

from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.embedded.task import make_question
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.load_model import load_model
from mtrl.rollout.decode.engine import GraphGenerator
from mtrl.rollout.decode.step import triton_ops
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling
from pretraining.evaluation import make_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("exact_products"),
]

ENGINES = {
    "plain": (LocalGenerator, Sampling(n=8, max_new_tokens=512)),
    "graphs": (
        lambda backbone, encoder: GraphGenerator(backbone, encoder, ops=triton_ops()),
        Sampling(n=8, max_new_tokens=4096),
    ),
}


def free() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("name", ENGINES)
def test_a_full_device_changes_no_tokens(name, caplog):
    make, sampling = ENGINES[name]
    encoder = copy.copy(load_encoder(MODEL_DIRECTORY))
    encoder.stop_ids = () if name == "plain" else encoder.stop_ids  # buffers have room for all tokens, sampled or not
    prompts = make_prompts([make_question("test", index) for index in range(64)], encoder)
    backbone = Backbone(load_model(MODEL_DIRECTORY, device="cuda"))
    whole = make(backbone, encoder)
    before, held = free(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with whole.resident():
        expected = whole.generate(prompts, sampling)
        past = before - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()  # torch's allocator
        taken = torch.cuda.max_memory_allocated() - held + max(0, past)
    del whole
    assert taken > 2**28, "too little to be worth a test"
    hog = torch.empty(free() - int(0.6 * taken), dtype=torch.uint8, device="cuda")
    engine = make(backbone, encoder)
    with caplog.at_level(logging.WARNING), engine.resident():
        found = engine.generate(prompts, sampling)
    del hog
    said = [record.getMessage() for record in caplog.records if "from now on" in record.getMessage()]
    assert engine.rows_at_once in (64, 128, 256) and len(said) == (512 // engine.rows_at_once).bit_length() - 1, said
    same = sum(a == b for a, b in zip(found.text, expected.text, strict=True))
    assert same >= 0.98 * len(found), f"{same} of {len(found)}: batches of other sizes have other products"
    del engine
    assert free() >= before - 2**28, "and no memory is held"
