"""New weights copied straight to their places in a real vLLM: bitwise what its own loader makes of them."""

import re
import shutil
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers import GivenWeights
from tiny_models import checkpoint, get_encoder, plain_model, plain_model_at, prompts_for
from torch import nn
from vllm_engines import INSTALLED, ON_GPU, arguments

from mtrl.models.state_dicts import exported_weights, weight_forms
from mtrl.rollout.vllm import direct_weights
from mtrl.rollout.vllm.direct_weights import DirectWeights, Unexplained, learn_places
from mtrl.rollout.vllm.generator import VllmGenerator
from mtrl.rollout.vllm.inprocess import VllmInProcess
from mtrl.types import Sampling, Weights
from mtrl.utils.errors import RunError

pytestmark = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")

GREEDY = Sampling(temperature=0, max_new_tokens=12)
MODELS = [("qwen2_5_vl", True), ("qwen2_5_vl", False), ("qwen3_vl", True), ("qwen3_vl", False), ("qwen2", True)]


@pytest.fixture(scope="module")
def unpacked():
    """Linear layers keep their weights as they are loaded, as on a GPU: the CPU build packs them for oneDNN."""
    from vllm.model_executor.layers import utils

    def stay(layer, remove_weight):
        layer.cpu_linear = nn.functional.linear

    with pytest.MonkeyPatch.context() as patch:
        pack = utils.dispatch_cpu_unquantized_gemm
        patch.setattr(utils, "dispatch_cpu_unquantized_gemm", stay)
        yield lambda own: own.setattr(utils, "dispatch_cpu_unquantized_gemm", pack)


def untied(family, folder):
    """A checkpoint whose output matrix is not the embedding."""
    shutil.copytree(checkpoint(family), folder, dirs_exist_ok=True)
    model = plain_model_at(checkpoint(family), family)
    model.lm_head.weight = nn.Parameter(model.get_input_embeddings().weight.detach().flip(0).clone())
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=MODELS, ids=lambda each: f"{each[0]}-{'tied' if each[1] else 'untied'}")
def case(request, unpacked, tmp_path_factory):
    yield from make_case(*request.param, tmp_path_factory)


def make_case(family, tied, tmp_path_factory):
    """An engine, its family and checkpoint."""
    folder = checkpoint(family) if tied else untied(family, tmp_path_factory.mktemp("untied"))
    settings, images = arguments(family)
    host = VllmInProcess(settings | {"model": str(folder)}, images)
    yield host, family, folder
    host.close()


def changed(family, folder, seed):
    """The weights of a model whose every parameter has changed."""
    model, dice = plain_model_at(folder, family), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=dice))
    return exported_weights(model)


def parameters(host):
    return {name: p.detach().clone() for name, p in worker_of(host).get_model().named_parameters()}


def worker_of(host):
    return host.llm.collective_rpc(lambda worker: worker)[0]


def is_direct(host):
    return isinstance(host._direct, DirectWeights)


@pytest.mark.parametrize("device", ["cpu", "cuda"] if ON_GPU else ["cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_bits_are_those_of_the_loader(case, dtype, device):
    host, family, folder = case
    for seed in (1, 2):
        weights = {name: tensor.to(device, dtype) for name, tensor in changed(family, folder, seed).items()}
        host.load(str(seed), weights)
        assert is_direct(host)
        direct = parameters(host)
        for parameter in worker_of(host).get_model().parameters():
            parameter.data.fill_(torch.nan)
        host._reload(weights)
        loaded = parameters(host)
        assert direct.keys() == loaded.keys() and len(direct) > 20
        assert all(torch.equal(direct[name], loaded[name]) for name in loaded)


def test_it_responds_as_after_the_loader(case):
    host, family, folder = case
    first, second = (changed(family, folder, seed) for seed in (3, 4))
    engine = VllmGenerator(host, get_encoder(family), first.keys())
    engine.load(Weights(1, first))
    engine.load(Weights(2, second))
    direct = engine.generate(prompts_for(family), Sampling(temperature=0, max_new_tokens=12, version=2))
    host._reload(second)
    host._reset_caches()
    loaded = engine.generate(prompts_for(family), Sampling(temperature=0, max_new_tokens=12, version=2))
    assert torch.equal(direct.tokens, loaded.tokens) and torch.equal(direct.rollout_logprobs, loaded.rollout_logprobs)
    engine.load(Weights(3, first))
    other = engine.generate(prompts_for(family), Sampling(temperature=0, max_new_tokens=12, version=3))
    assert not torch.equal(other.tokens, direct.tokens), "other weights respond differently"


class MadeOnAccess(GivenWeights):
    """Like weights that are gathered or merged; notes the order of accesses, and how many are alive at once."""

    def __init__(self, weights):
        super().__init__(weights)
        self.read, self.made, self.most = [], [], 0

    def __getitem__(self, name):
        self.read.append(name)
        made = self.weights[name].clone()
        self.made.append(weakref.ref(made))
        self.most = max(self.most, sum(each() is not None for each in self.made))
        return made


def test_each_weight_is_read_once_and_none_is_kept(case):
    """Also by the first load, in which the places are learnt."""
    host, family, folder = case
    host._direct, host._knows_places = None, False
    for _ in range(2):
        weights = MadeOnAccess(changed(family, folder, 5))
        host.load("5", weights)
        assert is_direct(host) and weights.read == list(weights.weights)
        assert weights.most <= 2 and not any(each() is not None for each in weights.made)


def test_other_weights_than_before_are_refused(case):
    host, family, folder = case
    weights = dict(changed(family, folder, 6))
    host.load("6", weights)
    name = next(iter(weights))
    with pytest.raises(RunError, match=f"{name} has the shape"):
        host.load("7", weights | {name: weights[name][:1]})
    del weights[name]
    with pytest.raises(RunError, match=f"other weights than before: .*{name}"):
        host.load("7", weights)


# -------------------------------------------------------------------------------------------------- what is unexplained
@pytest.fixture
def noticed(caplog):
    caplog.set_level("INFO", logger="mtrl")
    return lambda: [each.getMessage() for each in caplog.records if "loader" in each.getMessage()]


def test_packed_weights_go_through_the_loader(unpacked, monkeypatch, noticed):
    """As the CPU build packs them; it is said once, with the first such weight."""
    if ON_GPU:
        pytest.skip("nothing is packed there")
    unpacked(monkeypatch)
    host = VllmInProcess(*arguments("qwen2_5_vl"))
    engine = VllmGenerator(host, get_encoder("qwen2_5_vl"), exported_weights(plain_model("qwen2_5_vl")).keys())
    before = engine.generate(prompts_for("qwen2_5_vl"), GREEDY)
    for version in (1, 2):
        engine.load(Weights(version, exported_weights(plain_model("qwen2_5_vl"))))
        after = engine.generate(prompts_for("qwen2_5_vl"), Sampling(temperature=0, max_new_tokens=12, version=version))
        assert not is_direct(host) and torch.equal(before.tokens, after.tokens)
    host.close()
    (said,) = noticed()
    assert "takes longer" in said and "blocks.0.attn.qkv.weight cannot be loaded in place" in said


def doubled(layer):
    layer.weight.data.mul_(2)


def squared(layer):
    layer.square = layer.weight.data.square()


@pytest.mark.parametrize(
    "after_loading, reason", [(doubled, r"\.weight is changed after it was loaded"), (squared, r"\.square depends on")]
)
def test_weights_that_are_processed_go_through_the_loader(unpacked, monkeypatch, noticed, after_loading, reason):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    def process(method, layer):
        layer.cpu_linear = nn.functional.linear
        after_loading(layer)

    monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", process)
    host, weights = VllmInProcess(*arguments("qwen2")), exported_weights(plain_model("qwen2"))
    started = parameters(host)
    host.load("1", weights)
    assert host._knows_places and not is_direct(host)
    assert all(torch.equal(started[name], now) for name, now in parameters(host).items()), "they arrive all the same"
    host.close()
    (said,) = noticed()
    assert re.search(reason, said), said


class TinyModel(nn.Module):
    """Two matrices in one, and rows of zeros."""

    def __init__(self, how):
        super().__init__()
        self.joined, self.scale = nn.Parameter(torch.ones(7, 3)), nn.Parameter(torch.ones(3))
        self.how = how

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "scale":
                self.how(self.scale.data, tensor)
            else:
                start = 3 * (name == "second")
                self.joined.data[start : start + len(tensor)].copy_(tensor)
        self.joined.data[5:].fill_(0)


def as_worker(model):
    return SimpleNamespace(
        get_model=lambda: model, vllm_config=None, reload_weights=lambda weights_iterator: load(model, weights_iterator)
    )


def load(model, weights):
    with torch.no_grad():
        model.load_weights(weights)


WEIGHTS = {"first": torch.randn(3, 3), "second": torch.randn(2, 3), "scale": torch.randn(3)}


@pytest.fixture
def no_settings(monkeypatch):
    import vllm.config

    monkeypatch.setattr(vllm.config, "set_current_vllm_config", nullcontext)


def test_places_of_a_model(no_settings):
    model, same = TinyModel(torch.Tensor.copy_), TinyModel(torch.Tensor.copy_)
    direct = learn_places(as_worker(model), weight_forms(WEIGHTS))
    direct.update({name: tensor.t().contiguous().t() for name, tensor in WEIGHTS.items()})  # other strides
    load(same, WEIGHTS.items())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


def test_what_is_written_twice_holds_what_came_last(no_settings):
    """As tied weights in a loader that does not know of them."""
    first, last = torch.randn(3), torch.randn(3)
    model = TinyModel(torch.Tensor.copy_)
    model.load_weights = lambda weights: TinyModel.load_weights(model, ((n.split(".")[-1], w) for n, w in weights))
    given = WEIGHTS | {"scale": first, "twin.scale": last}
    learn_places(as_worker(model), weight_forms(given)).update(given)
    assert torch.equal(model.scale, last)


@pytest.mark.parametrize(
    "how, reason",
    [
        (lambda target, given: target.copy_(given + 1), r"scale is read by aten\.add"),
        (lambda target, given: target.copy_(given.flip(0)), r"scale is read by aten\.flip"),
        (lambda target, given: target.mul_(2), r"scale is written by aten\.mul_"),
        (lambda target, given: target.copy_(torch.ones(3)), r"scale is written by aten\.copy_"),
        (lambda target, given: target.view(torch.int32).copy_(given.view(torch.int32)), "scale is changed after"),
        (lambda target, given: target.view(torch.int16).copy_(given.view(torch.int16)), "scale is read by aten.view"),
        (lambda target, given: target.fill_(given[0].item()), r"scale is read by aten\._local_scalar_dense"),
        (lambda target, given: None, r"scale does not come from a checkpoint alone"),
        (lambda target, given: target[:2].copy_(given[:2]), r"scale does not come from a checkpoint alone"),
        (lambda target, given: given.view(7), r"scale cannot be loaded in place: .*shape"),
    ],
    ids=["computed", "turned", "scaled", "constant", "integers", "halves", "number", "left", "partly", "another shape"],
)  # fmt: skip
def test_a_loader_that_does_more_than_copy(no_settings, how, reason):
    model = TinyModel(how)
    with pytest.raises(Unexplained, match=reason):
        learn_places(as_worker(model), weight_forms(WEIGHTS))
    assert (model.joined == 1).all() or "changed" in reason, "nothing was loaded"


def test_numbers_that_verify_are_distinct():
    """Of two weights of the same shape, too."""
    forms = {"a": (torch.bfloat16, (4, 4)), "b": (torch.bfloat16, (4, 4))}
    a, b = (tensor for _, tensor in direct_weights.random_weights(forms, torch.device("cpu")))
    assert not torch.equal(a, b) and len(a.unique()) > 10
