"""The memory preflight on a GPU: it leaves no state behind, and reports settings that do not fit in one line. Skipped
without a GPU."""

import gc
from dataclasses import replace

import pytest
import torch

from mtrl.compose.run import build, configure
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.memory.decode_footprint import count_graph_engine
from mtrl.memory.estimate import estimate
from mtrl.memory.plan import Plan
from mtrl.memory.preflight import Limits, bytes_outside_allocator, preflight
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder, load_model_config
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.rollout.decode.engine import GraphGenerator, make_fastest_generator
from mtrl.types import Needs, Sampling
from mtrl.utils.errors import StartError
from mtrl.workers.micro_batches import MicroBatching

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GIB = 2**30
LIMITS = Limits(
    prompts=16, prompts_per_update=16, sampling=Sampling(n=8, max_new_tokens=512), prompt_tokens=64, max_pixels=56**2,
    update=MicroBatching(rows=8), probe=MicroBatching(rows=8), needs=Needs("old_logprobs", "entropy", "attention_mass"),
)  # fmt: skip


@pytest.fixture
def policy():
    model = load_model(MODEL_DIRECTORY, device="cuda")
    return Forward(Backbone(model), load_encoder(MODEL_DIRECTORY))


@pytest.fixture
def little_memory():
    """Two GiB more than is taken now."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2 * GIB) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_preflight_that_fits_leaves_no_state(policy):
    model = policy.backbone.model
    engine = make_fastest_generator(policy.backbone, policy.encoder)
    preflight(policy, policy.encoder, LIMITS, engine, has_states=False)  # workspaces of cuBLAS stay
    gc.collect()
    weights = {name: p.clone() for name, p in model.named_parameters()}
    before, held = torch.cuda.memory_allocated(), sum(p.nbytes for p in weights.values())
    past = bytes_outside_allocator(policy.backbone.device)
    random = torch.cuda.get_rng_state()
    peaks = preflight(policy, policy.encoder, LIMITS, engine, has_states=False)
    gc.collect()
    assert torch.cuda.memory_allocated() == before and torch.equal(random, torch.cuda.get_rng_state())
    assert bytes_outside_allocator(policy.backbone.device) <= past, "the engine sleeps"
    assert all(torch.equal(p, weights[name]) and p.grad is None for name, p in model.named_parameters())
    assert not model.training
    assert peaks["optimizer"] >= 2 * held and peaks["update"] > held and min(peaks.values()) > 0
    assert preflight(policy, policy.encoder, LIMITS, engine, has_states=True)["optimizer"] == 0


def test_the_peak_of_sampling_matches_doctor(policy):
    """Both include buffers from the driver; kernels are loaded before."""
    engine = make_fastest_generator(policy.backbone, policy.encoder)
    assert type(engine) is GraphGenerator
    preflight(policy, policy.encoder, LIMITS, engine, has_states=True)
    peak = preflight(policy, policy.encoder, LIMITS, engine, has_states=True)["sample"]
    parts = count_graph_engine(policy.backbone.model, policy.backbone.compute_dtype, LIMITS.batch)
    result = estimate(load_model_config(str(MODEL_DIRECTORY)), Plan(LIMITS, on_gpu=True, graphs=True), ["sample"])
    assert peak > parts["keys and values"] + parts["buffers of a step"]
    assert peak <= sum(result.phases["sample"].values()) + 2**26, "beyond CUDA's graphs"


def test_an_update_that_does_not_fit_is_an_error(policy, little_memory):
    """66,560 tokens in one pass with all activations: several GiB."""
    limits = replace(LIMITS, update=MicroBatching(at_least=1 << 20))
    engine, ways = make_fastest_generator(policy.backbone, policy.encoder), ["worker.actor.tokens_per_micro_batch=8192"]
    with pytest.raises(StartError) as result:
        preflight(policy, policy.encoder, limits, engine, has_states=False, savings=ways)
    said = str(result.value)
    assert said.startswith("memory: the update does not fit at the limits of the configuration, with ")
    assert "Tried to allocate" in said and "\n    worker.actor.tokens_per_micro_batch=8192\n" in said
    assert not policy.backbone.model.training and all(p.grad is None for p in policy.backbone.model.parameters())
    del result  # its frames hold tensors of the update
    gc.collect()
    preflight(policy, policy.encoder, LIMITS, engine, has_states=False)


def test_a_run_that_cannot_fit_does_not_start(tmp_path):
    """Keys and values of so many tokens for a single response, where somebody else holds the memory."""
    words = [
        "dataset.max_response_length=1000000", "worker.rollout.n=8", "dataset.rollout_batch_size=64",
        "worker.actor.global_batch_size=64", f"training.output_dir={tmp_path}", "training.logger=[]",
        "training.val_before_train=false", "training.max_steps=1", "worker.actor.use_torch_compile=false",
    ]  # fmt: skip
    run = build(configure(None, words)[0])
    torch.cuda.empty_cache()
    hog = torch.empty(torch.cuda.mem_get_info()[0] - 2**31, dtype=torch.uint8, device="cuda")
    with pytest.raises(StartError, match="memory: sampling does not fit at the limits of the configuration"):
        run.train()
    del hog
