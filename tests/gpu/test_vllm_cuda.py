"""vLLM on a GPU, with tiny models. Skipped without a GPU or without vLLM.

The engine's own suites run here on CUDA, and what a CPU has not is added: sleep, graphs, the memory of an update, the
gap in bfloat16, and the end of a run. Numbers that are measured are printed, and written into the folder $OUT if any.
"""

import inspect
import json
import os
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() or find_spec("vllm") is None:
    pytest.skip("no CUDA device, or no vLLM", allow_module_level=True)

pytest.register_assert_rewrite("conformance.test_generator", "on_vllm.test_direct_weights", "on_vllm.test_weights")

from conformance import test_generator as suite  # noqa: E402
from conformance.test_generator import encoder  # noqa: E402, F401
from on_vllm import test_direct_weights as direct  # noqa: E402
from on_vllm import test_weights  # noqa: E402
from run_helpers import finish, get_run_dir, read_metrics, train_arguments  # noqa: E402
from tiny_models import checkpoint, get_encoder, plain_model, prompts_for  # noqa: E402
from vllm_engines import _in_process, arguments, child_process, end_in_process, engine_on, in_process  # noqa: E402

from mtrl.models.backbone import Backbone  # noqa: E402
from mtrl.models.forward import Forward  # noqa: E402
from mtrl.models.load_model import load_model  # noqa: E402
from mtrl.models.state_dicts import exported_weights  # noqa: E402
from mtrl.rollout.vllm.inprocess import VllmInProcess  # noqa: E402
from mtrl.rollout.vllm.process_engine import VllmProcess  # noqa: E402
from mtrl.types import Sampling, Weights  # noqa: E402

pytestmark = pytest.mark.gpu

FAMILY = "qwen2_5_vl"
TOLERANCE = 5e-4  # nats; the trainer of these comparisons computes on the CPU
GRAPHS = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}}
CACHE = {"kv_cache_memory_bytes": 2**30}  # not a share of what is free: other processes may use the GPU meanwhile
SLEEPER = {"enable_sleep_mode": True, **CACHE}
MEASURED = {}


@pytest.fixture(scope="module", autouse=True)
def on_cuda():
    """Float32 products in float32, also in vLLM's Triton kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_F32_DEFAULT", "ieee")
        for module in (suite, test_weights):
            patch.setattr(module, "TOLERANCE", TOLERANCE)
        # vLLM's top-p on a GPU leaves a few tokens more or less, of up to 0.3% of the probability
        patch.setattr(suite, "CUT_TOLERANCE", 0.01)
        patch.setattr(suite, "OUTSIDE", 0.01)
        yield
    end_in_process()
    if child_process.cache_info().currsize:
        child_process(FAMILY).close()
        child_process.cache_clear()


def report(**numbers):
    MEASURED.update(numbers)
    print(*(f"{name}: {value}" for name, value in numbers.items()), sep="\n")
    if folder := os.environ.get("OUT"):
        Path(folder, "vllm_cuda.json").write_text(json.dumps(MEASURED, indent=1))


# --------------------------------------------------------------------------------------- the suites of engines, on CUDA
def pick_tests(module, *fixtures):
    """Its tests that take one of these fixtures; here they find this module's."""
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_")}
    return {name: test for name, test in tests.items() if {*fixtures} & {*inspect.signature(test).parameters}}


globals().update(pick_tests(suite, "engine", "fresh_engine"))
globals().update(pick_tests(direct, "case"))


@pytest.fixture(params=[FAMILY, "qwen3_vl", "qwen2"])
def family(request):
    return request.param


@pytest.fixture
def engine(family, encoder):  # noqa: F811
    return suite.make_engine(suite.ENGINES, "vllm", family, encoder)


@pytest.fixture
def fresh_engine(family, encoder):  # noqa: F811
    return suite.make_engine(suite.FRESH_ENGINES, "vllm", family, encoder)


@pytest.fixture(scope="module", params=[(FAMILY, True), ("qwen3_vl", False)], ids=["tied", "untied"])
def case(request, tmp_path_factory):
    family, tied = request.param
    end_in_process()  # a closed engine makes earlier ones unusable
    yield from direct.make_case(family, tied, tmp_path_factory)


def test_adapters_arrive_merged():
    test_weights.test_adapters_arrive_merged("inprocess")


@pytest.mark.parametrize(
    "test",
    [suite.test_greedy_equals_generate_and_a_plain_forward, suite.test_loaded_weights_speak],
    ids=["greedy", "weights"],
)
@pytest.mark.parametrize("kind", ["process", "graphs"])
def test_a_child_process_and_graphs(kind, test):
    host = child_process(FAMILY) if kind == "process" else with_graphs()
    names = {"engine", "fresh_engine"} & {*inspect.signature(test).parameters}
    own = suite.make_encoder(FAMILY)
    test(FAMILY, own, engine_on(host, FAMILY, own, may_change="fresh_engine" in names))


def with_graphs():
    """Compiled and captured; it ends with the others of this process."""
    in_process(FAMILY)  # makes them anew if need be
    if "graphs" not in _in_process:
        _in_process["graphs"] = VllmInProcess(*arguments(FAMILY, **GRAPHS))
    return _in_process["graphs"]


# ------------------------------------------------------------------------------------------------- what a CPU has not
def free_mib():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] >> 20


@pytest.mark.parametrize("mode", ["inprocess", "process"])
def test_sleep_frees_memory_and_waking_restores_it(mode):
    before = free_mib()
    make = VllmInProcess if mode == "inprocess" else partial(VllmProcess, dtype=torch.float32)
    host = make(*arguments(FAMILY, **SLEEPER))
    engine = engine_on(host, FAMILY)
    asleep = free_mib()
    weights, greedy = exported_weights(plain_model(FAMILY)), Sampling(temperature=0, max_new_tokens=12, version=1)
    with engine.resident():
        engine.load(Weights(0, weights))  # the first ones need all memory, to learn their places
    with engine.resident():
        engine.load(Weights(1, {name: 1.5 * tensor for name, tensor in weights.items()}))
        loaded = free_mib()
        found = [engine.generate(prompts_for(FAMILY), greedy)]
        awake = free_mib()
    asleep_again = free_mib()
    for _ in range(2):  # naps without new weights
        with engine.resident():
            found.append(engine.generate(prompts_for(FAMILY), greedy))
            awake_again = free_mib()
    host.close()
    after = free_mib()
    rounds = {"before": before, "asleep": asleep, "with new weights": loaded, "awake": awake,
              "asleep again": asleep_again, "awake again": awake_again, "closed": after}  # fmt: skip
    report(**{f"free MiB, {mode}, {when}": mib for when, mib in rounds.items()})
    assert asleep - loaded < 512, "not the cache"
    for slept, woke in ((asleep, awake), (asleep_again, awake_again)):
        assert 1024 <= slept - woke < 1536, "the cache of 1 GiB and the weights of a tiny model"
    assert asleep - asleep_again < 512, "libraries and compiled kernels stay"
    assert after >= asleep_again - 64, "nothing else does"
    first, *later = found
    for each in later:
        assert torch.equal(first.tokens, each.tokens) and torch.equal(first.rollout_logprobs, each.rollout_logprobs)


def test_an_update_needs_no_second_copy(case):
    host, family, folder = case
    weights = {name: tensor.cuda() for name, tensor in direct.changed(family, folder, 1).items()}
    host.load("1", weights)
    assert direct.is_direct(host)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    began = time.monotonic()
    host.load("2", weights)
    seconds = time.monotonic() - began
    extra, whole = torch.cuda.max_memory_allocated() - held, sum(each.nbytes for each in weights.values())
    report(**{f"update of {family}, s": seconds, f"update of {family}, bytes": extra, "weights, bytes": whole})
    assert extra < whole / 4


def test_the_gap_in_bfloat16():
    """Of engine and trainer on the same GPU, each with its own kernels."""
    host = VllmInProcess(*arguments(FAMILY, dtype="bfloat16"))
    engine = engine_on(host, FAMILY)
    backbone = Backbone(load_model(checkpoint(FAMILY), device="cuda", dtype="bf16"))
    rollouts = engine.generate(prompts_for(FAMILY), Sampling(n=16, max_new_tokens=32))
    host.close()
    old = Forward(backbone, get_encoder(FAMILY)).signals(rollouts).old_logprobs.cpu()
    gap = (old - rollouts.rollout_logprobs)[rollouts.mask].abs()
    report(**{"bfloat16 gap, mean": float(gap.mean()), "bfloat16 gap, max": float(gap.max())})
    assert 0 < gap.mean() < 0.1


def train(folder, environment, *words, **engine):
    """A run of two steps with an engine that sleeps; what it says on stderr, and its seconds."""
    settings = ["worker.rollout.name=vllm", "worker.rollout.gpu_memory_utilization=0.1", "training.max_steps=2"]
    settings += [f"worker.rollout.engine_kwargs={json.dumps(CACHE | engine)}"]
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        status, said = finish(train_arguments(folder, *settings, *words))
    assert status == 0, said
    assert len([row for row in read_metrics(get_run_dir(folder)).values() if "rollout/logprob_gap_max" in row]) == 2
    return said, time.monotonic() - began


@pytest.mark.parametrize("mode", ["inprocess", pytest.param("process", marks=pytest.mark.slow)])
def test_a_run_ends_cleanly(mode, tmp_path):
    said, seconds = train(tmp_path, {}, f"worker.rollout.mode={mode}", enforce_eager=True)
    report(**{f"run of two steps, {mode}, s": round(seconds, 1)})
    for trouble in ("CUDA Error", "cumem", "pure virtual", "Traceback", "terminate called", "vLLM's loader"):
        assert trouble not in said, said


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path):
    """Two runs with vLLM's defaults, and its caches of compiled graphs in a new folder."""
    cache = {"VLLM_CACHE_ROOT": str(tmp_path / "vllm"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    found = []
    for number in (1, 2):
        said, seconds = train(tmp_path / str(number), cache)
        assert "CUDA Error" not in said, said
        report(**{f"run of two steps, compiled, start {number}, s": round(seconds, 1)})
        found.append({file for file in (tmp_path / "vllm").rglob("*") if file.is_file()})
    assert found[0] and found[0] == found[1]
