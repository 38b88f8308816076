"""From a configuration to the arguments of vLLM, and the error if it is not installed."""

import multiprocessing
import os
import shutil
import signal

import pytest
import torch
from helpers import GivenWeights
from safetensors.torch import load_file
from tiny_models import checkpoint, fresh_backbone, get_encoder

from mtrl.compose.policy import build_generator
from mtrl.compose.vllm_engine import build_host, explain_no_cpu_engine, make_engine_arguments
from mtrl.config import load_config
from mtrl.models.families import load_model_config
from mtrl.models.forward import Forward
from mtrl.rollout.local import LocalGenerator
from mtrl.rollout.vllm import settings
from mtrl.rollout.vllm import weight_files as handover
from mtrl.rollout.vllm.inprocess import (
    TORCH_SETTINGS,
    VllmInProcess,
    first_line,
    preserve_compile_settings,
)
from mtrl.rollout.vllm.process_engine import VllmProcess, current_gpu
from mtrl.utils.errors import StartError

WORDS = [
    "worker.rollout.name=vllm", "dataset.max_prompt_length=100", "worker.rollout.max_new_tokens=20",
    "worker.rollout.gpu_memory_utilization=0.25", "worker.rollout.enable_prefix_caching=false",
]  # fmt: skip


def test_keys_become_arguments():
    found = make_engine_arguments(load_config(None, WORDS), "some/model", torch.bfloat16, on_gpu=True)
    assert (found["model"], found["dtype"], found["max_model_len"]) == ("some/model", "bfloat16", 120)
    assert found["gpu_memory_utilization"] == 0.25 and found["enable_prefix_caching"] is False
    own = make_engine_arguments(
        load_config(None, [*WORDS, "worker.rollout.engine_kwargs={max_model_len: 64, swap: 1}"]),
        "m",
        torch.float32,
        False,
    )
    assert (own["max_model_len"], own["swap"], own["dtype"]) == (64, 1, "float32")


def test_an_engine_of_a_rank_lives_in_the_group_that_is_there():
    found = {
        (mode, ranked): make_engine_arguments(
            load_config(None, [*WORDS, f"worker.rollout.mode={mode}"]), "m", torch.float32, False, ranked
        )
        for mode in ("inprocess", "process")
        for ranked in (False, True)
    }
    among = {place for place, each in found.items() if each.get("distributed_executor_backend") == "external_launcher"}
    assert among == {("inprocess", True)}, "a child process has its own group"


def test_a_child_sees_the_gpu_of_its_rank_alone(monkeypatch):
    assert current_gpu() == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert current_gpu() == {"CUDA_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert current_gpu() == {"CUDA_VISIBLE_DEVICES": "6"}


def test_prompts_of_any_length_get_all_positions():
    words = [*WORDS, "dataset.filter_overlong_prompts=false"]
    assert make_engine_arguments(load_config(None, words), "m", torch.float32, on_gpu=False)["max_model_len"] is None


CPU_LIMITS = {  # family, dtype: what vLLM cannot do there
    ("qwen3_5", torch.float32): r"recurrent layers in bf16 alone; set worker\.rollout\.name=local, or .*_dtype=bf16$",
    ("qwen3_5_moe", torch.bfloat16): r"does not take new weights of experts; set worker\.rollout\.name=local$",
}


@pytest.mark.parametrize(("family", "dtype"), [*CPU_LIMITS])
def test_models_that_vllm_cannot_sample_from_on_a_cpu(family, dtype):
    """They are refused before it starts. A server may be elsewhere."""
    path, encoder = str(checkpoint(family)), get_encoder(family)
    with pytest.raises(StartError, match=r"^worker\.rollout\.name: on a CPU vLLM .*" + CPU_LIMITS[family, dtype]):
        build_host(load_config(None, WORDS), path, encoder, dtype, False, False, gets_weights=True)
    found = make_engine_arguments(load_config(None, WORDS[:-1]), path, dtype, on_gpu=False, recurrent=True)
    assert found["enable_prefix_caching"] is False
    assert make_engine_arguments(load_config(None, WORDS[:-1]), path, dtype, True, False, True)["enable_prefix_caching"]


def test_models_that_vllm_can_sample_from_on_a_cpu():
    for family, dtype, learns in (
        ("qwen3_5", torch.bfloat16, True), ("qwen3_5_moe", torch.bfloat16, False), ("qwen2", torch.float32, True),
    ):  # fmt: skip
        assert explain_no_cpu_engine(load_model_config(str(checkpoint(family))), dtype, learns) is None


@pytest.mark.parametrize("start", [lambda: VllmInProcess({}), lambda: VllmProcess({}, None, torch.float32)])
def test_what_to_install(start, monkeypatch):
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    with pytest.raises(StartError, match=r"vllm is not installed; pip install .*worker.rollout.name=local"):
        start()


def test_weights_on_their_way(tmp_path, monkeypatch):
    """Narrowed to the engine's dtype, tied ones under each name, and never half a file."""
    monkeypatch.setattr(handover, "SHARED_MEMORY", tmp_path)
    tied = torch.randn(4, 3)
    weights = {"a": tied, "b": tied, "turned": tied.T, "count": torch.tensor([3])}
    folder = handover.make_folder(handover.count_bytes(weights, torch.bfloat16))
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o077 == 0
    for factor in (1, 2):
        found = load_file(handover.write_weights(folder, {k: v * factor for k, v in weights.items()}, torch.bfloat16))
        assert found.keys() == weights.keys() and found["count"].item() == 3 * factor
        assert torch.equal(found["turned"], (tied.T * factor).bfloat16()) and torch.equal(found["a"], found["b"])
        assert {file.name for file in folder.iterdir()} == {handover.FILE, handover.LOCK}
    same = load_file(handover.write_weights(folder, {"a": tied, "b": tied}, torch.float32))
    assert torch.equal(same["a"], tied) and torch.equal(same["b"], tied)


class InTurn(GivenWeights):
    """Weights that are there one at a time, in their order, as they arrive from ranks."""

    def __init__(self, weights):
        super().__init__(weights)
        self.left = list(weights)

    def __getitem__(self, name):
        assert self.left.pop(0) == name, "each once, in order"
        return self.weights[name]


def test_each_weight_is_read_once_in_order(tmp_path):
    """Numbers of different widths stay aligned in the file."""
    weights = {"odd": torch.randn(3), "steps": torch.tensor([5, 7]), "flag": torch.tensor(True), "b": torch.randn(2, 5)}
    given = InTurn(weights)
    assert handover.count_bytes(given, torch.bfloat16) == 2 * 3 + 8 * 2 + 1 + 2 * 10
    places = handover.make_header(handover.stored_forms(weights, torch.bfloat16))[1]
    assert [places[name] % width for name, width in (("odd", 2), ("steps", 8), ("b", 2))] == [0, 0, 0]
    found = load_file(handover.write_weights(tmp_path, given, torch.bfloat16))
    assert not given.left and list(found) and found.keys() == weights.keys()
    for name, tensor in weights.items():
        same = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(found[name], same) and found[name].dtype == same.dtype


def test_a_weight_of_another_shape_than_announced_is_noticed(tmp_path):
    given = InTurn({"a": torch.ones(3)})
    given.form = lambda name: (torch.float32, (4,))
    with pytest.raises(AssertionError, match=r"a is \(3,\), not \(4,\)"):
        handover.write_weights(tmp_path, given, torch.float32)
    assert not (tmp_path / handover.FILE).exists()


def make_a_folder_and_die():
    handover.make_folder(1)
    os.kill(os.getpid(), signal.SIGKILL)


def test_only_leftovers_of_a_killed_run_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(handover, "SHARED_MEMORY", tmp_path)
    run = multiprocessing.get_context("fork").Process(target=make_a_folder_and_die)
    run.start()
    run.join()
    assert run.exitcode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    mine = handover.make_folder(1)
    assert not left.exists() and mine.exists()
    other = handover.make_folder(1)
    assert mine.exists() and other.exists(), "in use"


def test_little_shared_memory_means_a_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(handover, "SHARED_MEMORY", tmp_path)
    folder = handover.make_folder(10**18)
    assert folder.parent != tmp_path
    shutil.rmtree(folder)


def test_an_error_in_a_line():
    assert first_line(ValueError("\n  first\nsecond")) == "first" and first_line(ValueError()) == "ValueError"


@pytest.mark.parametrize("known", [True, False])
def test_auto_reports_that_it_is_local_and_when_vllm_would_be_faster(known, capfd):
    policy = Forward(fresh_backbone("qwen2_5_vl"), get_encoder("qwen2_5_vl"))
    if not known:
        policy.backbone.language_model.config.model_type = "gemma"
    for name, learns in (("auto", True), ("auto", False), ("local", True)):
        config = load_config(None, [f"worker.rollout.name={name}"])
        assert isinstance(build_generator(config, policy, policy.encoder, learns), LocalGenerator)
        said = capfd.readouterr().err
        assert ("worker.rollout.name=auto: the local engine samples" in said) is (name == "auto" and learns)
        assert ("'gemma' are not supported); worker.rollout.name=vllm" in said) is (
            name == "auto" and learns and not known
        )


@pytest.mark.parametrize("own", [None, "3"])
def test_the_trainer_compiles_as_before(own, monkeypatch):
    """With as many threads and into the same folder. What vLLM 0.32 does when it is imported and when it starts, before
    and after torch has read the variables."""
    from torch._inductor import config

    for name in TORCH_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "ours")
    if own is not None:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", own)
    before = {name: os.environ.get(name) for name in TORCH_SETTINGS}
    with config.patch(compile_threads=config.compile_threads):  # restored after the test
        with preserve_compile_settings():
            os.environ |= dict.fromkeys(TORCH_SETTINGS, "1")
            config.compile_threads = 1
        assert {name: os.environ.get(name) for name in TORCH_SETTINGS} == before
        assert config.compile_threads == (config.decide_compile_threads() if own is None else 3)
