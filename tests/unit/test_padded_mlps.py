"""MLPs of a vision tower at a width that fast kernels take: the same numbers, and which modules get it."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_models import QWEN_FAMILIES, checkpoint
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP

from mtrl.memory import fake_model as fake
from mtrl.memory.estimate import estimate
from mtrl.memory.fake_model import FakeModel
from mtrl.memory.plan import Plan
from mtrl.memory.preflight import Limits
from mtrl.models import patches
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_model_config
from mtrl.models.patches import MLP_MULTIPLE, padded_mlp, use_compiled_pieces, use_padded_mlps
from mtrl.types import Needs, Sampling
from mtrl.workers.micro_batches import MicroBatching

HIDDEN, ODD = 48, 100
LIMITS = Limits(
    prompts=1, prompts_per_update=1, sampling=Sampling(n=2, max_new_tokens=4), prompt_tokens=90, max_pixels=112**2,
    update=MicroBatching(at_least=1 << 20), probe=MicroBatching(at_least=1 << 20), needs=Needs("old_logprobs"),
)  # fmt: skip


def make_mlp(width=ODD, dtype=torch.float32, bias=True, act="silu", layers=1):
    torch.manual_seed(width)
    shape = SimpleNamespace(hidden_size=HIDDEN, intermediate_size=width, hidden_act=act)
    return nn.Sequential(*(Qwen2_5_VLMLP(shape, bias=bias) for _ in range(layers))).to(dtype)


def padded(plain):
    patched = copy.deepcopy(plain)
    use_padded_mlps(patched)
    assert all(type(module).forward is padded_mlp for module in patched)
    return patched


def run(module, hidden, autocast=False):
    """The output, and the gradients of the input and of all parameters, which must have the parameters' shapes."""
    hidden = hidden.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = module(hidden)
    output.double().square().sum().backward()
    for parameter in module.parameters():
        gradient = parameter.grad
        assert gradient.shape == parameter.shape and gradient.dtype == parameter.dtype and gradient.is_contiguous()
    return [output.detach(), hidden.grad, *(parameter.grad for parameter in module.parameters())]


def off(found, expected):
    return max(
        float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, expected, strict=True)
    )


@pytest.fixture
def products(monkeypatch):
    """Shapes of the matrices that something is multiplied with."""
    seen, linear = [], F.linear

    def watched(x, weight, bias=None):
        seen.append(tuple(weight.shape))
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", watched)
    return seen


# ------------------------------------------------------------------------------------------------------- same numbers
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("width", "wide"), [(100, 128), (63, 64), (129, 192), (3420, 3456)])
def test_it_is_the_module_in_values_and_gradients(width, wide, bias, products):
    plain = make_mlp(width, torch.float64, bias)
    hidden = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    found = run(padded(plain), hidden)
    assert products == [(wide, HIDDEN), (wide, HIDDEN), (HIDDEN, wide)]
    assert off(found, run(plain, hidden)) < 1e-13


def test_padding_adds_exact_zeros():
    """Whole numbers are summed exactly in any order: not a bit may differ."""
    plain = make_mlp(act="relu")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
    hidden = torch.randint(-2, 3, (7, HIDDEN)).float()
    for mine, theirs in zip(run(padded(plain), hidden), run(plain, hidden), strict=True):
        assert torch.equal(mine, theirs) and mine.abs().sum() > 0


@pytest.mark.parametrize(("weights", "autocast"), [(torch.float32, True), (torch.bfloat16, False)])
def test_in_bf16_it_is_as_close_as_the_module(weights, autocast, monkeypatch):
    padded_as, pad = [], F.pad
    monkeypatch.setattr(F, "pad", lambda x, by: padded_as.append(x.dtype) or pad(x, by))
    plain, hidden = make_mlp(dtype=weights), torch.randn(64, HIDDEN)
    exact = run(copy.deepcopy(plain).double(), hidden.to(weights).double())
    found = run(padded(plain), hidden.to(weights), autocast)
    assert padded_as == [torch.bfloat16] * 5, "narrowed before it is padded, which writes half as much"
    theirs = run(plain, hidden.to(weights), autocast)
    assert [x.dtype for x in found] == [x.dtype for x in theirs]
    assert off(found, exact) < 1.2 * off(theirs, exact) + 1e-3


def test_an_adapter_that_is_added_later_is_used():
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    module = padded(make_mlp())
    before = module(torch.ones(2, HIDDEN))
    weights = module[0].up_proj.state_dict()
    module[0].up_proj = Adapted(HIDDEN, ODD)
    module[0].up_proj.load_state_dict(weights)
    expected = Qwen2_5_VLMLP.forward(module[0], torch.ones(2, HIDDEN))
    assert torch.equal(module(torch.ones(2, HIDDEN)), expected) and not torch.allclose(expected, before)


# ------------------------------------------------------------------------------------------------------ which modules
def packaged_config(family):
    config = load_model_config(str(checkpoint(family)))
    if family != "qwen2_vl":  # which has a ratio
        config.vision_config.intermediate_size = ODD
    return config


def odd_model(family):
    return AutoModelForImageTextToText.from_config(packaged_config(family), dtype=torch.float32).eval()


def those_padded(model):
    return [name for name, module in model.named_modules() if type(module).forward is padded_mlp]


@pytest.mark.parametrize("family", QWEN_FAMILIES)
def test_gated_mlps_of_odd_width_alone_are_padded(family):
    model = odd_model(family)
    names, blocks = set(model.state_dict()), len(model.model.visual.blocks)
    use_padded_mlps(model.model.visual)
    use_padded_mlps(model.model.visual)  # twice is once
    ours = [f"model.visual.blocks.{i}.mlp" for i in range(blocks)] if family == "qwen2_5_vl" else []
    assert those_padded(model) == ours and set(model.state_dict()) == names


def test_a_tower_with_checkpointing_has_the_gradients_of_the_untouched_one(products):
    theirs = odd_model("qwen2_5_vl")
    ours = copy.deepcopy(theirs)
    use_padded_mlps(ours.model.visual)
    ours.train().gradient_checkpointing_enable({"use_reentrant": False})
    pixels, gradients = torch.randn(4 * 8, theirs.model.visual.patch_embed.proj.weight[0].numel()), []
    for model in (theirs, ours):
        products.clear()
        Backbone(model).images.run_tower(pixels, ((1, 4, 8),)).pooler_output.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.model.visual.parameters()])
    assert sum(128 in shape for shape in products) == 2 * 3 * len(ours.model.visual.blocks), "again in backward"
    assert off(gradients[1], gradients[0]) < 1e-5


def test_widths_that_are_fine_stay():
    tower = make_mlp(2 * MLP_MULTIPLE)
    use_padded_mlps(tower)
    assert not those_padded(tower) and type(tower[0]) is Qwen2_5_VLMLP


@pytest.mark.parametrize(
    ("device", "compute", "pads"),
    [("cpu", "bfloat16", False), ("cuda", "bfloat16", True), ("cuda", "float16", True), ("cuda", "float32", False)],
)
def test_it_is_for_narrow_products_on_cuda(device, compute, pads, monkeypatch):
    monkeypatch.setattr(Backbone, "device", torch.device(device))
    backbone = Backbone(odd_model("qwen2_5_vl"), getattr(torch, compute))
    assert bool(those_padded(backbone.model)) == pads


# ----------------------------------------------------------------------------------------------------------- compiled
def test_the_padded_function_is_compiled(monkeypatch):
    calls = []
    monkeypatch.setattr(
        patches, "compile_function", lambda function, _: lambda *x: calls.append(function) or function(*x)
    )
    module = padded(make_mlp(layers=2))
    use_compiled_pieces(module)
    module(torch.ones(2, HIDDEN))
    assert calls == [padded_mlp] * 2
    frozen = copy.deepcopy(module)
    use_padded_mlps(frozen)  # as another backbone over the copy does
    frozen(torch.ones(2, HIDDEN))
    assert calls == [padded_mlp] * 4, "a copy stays compiled"


@pytest.mark.slow  # 4 s
def test_it_compiles_as_one_graph_for_all_layers_and_lengths(monkeypatch):
    torch._dynamo.reset()
    from torch._dynamo.testing import CompileCounterWithBackend  # here, since it takes a second

    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(padded_mlp, backend=counter, dynamic=True, fullgraph=True)
    monkeypatch.setattr(patches, "compile_function", lambda *_: function)
    plain = make_mlp(layers=3)
    module = padded(plain)
    use_compiled_pieces(module)
    for rows in (5, 9, 12):
        hidden = torch.randn(rows, HIDDEN)
        for autocast, tolerance in ((False, 1e-5), (True, 2e-2)):
            module.zero_grad()
            plain.zero_grad()
            assert off(run(module, hidden, autocast), run(plain, hidden, autocast)) < tolerance
    assert counter.frame_count <= 4, "with and without autocast; the input of the first layer and of the others"


# ------------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize(
    ("on_gpu", "compute", "pads"), [(True, "bf16", True), (True, "fp32", False), (False, "bf16", False)]
)
def test_the_fake_model_pads_where_the_real_one_does(on_gpu, compute, pads):
    found = FakeModel(packaged_config("qwen2_5_vl"), Plan(LIMITS, compute=compute, on_gpu=on_gpu))
    assert bool(those_padded(found.model)) == pads


@pytest.mark.slow  # 3 s
def test_padded_copies_that_wait_for_backward_are_counted(monkeypatch):
    plan = Plan(LIMITS, "bf16", "bf16", on_gpu=True, packed=True, compiled=True)

    def taken(plan):
        return sum(estimate(packaged_config("qwen2_5_vl"), plan, ["update"]).phases["update"].values())

    counted = taken(plan)
    monkeypatch.setattr(fake, "use_padded_mlps", lambda _: None)
    vision = packaged_config("qwen2_5_vl").vision_config
    copies = vision.depth * 3 * 128 * vision.hidden_size * 2
    assert counted - taken(plan) > 0.9 * copies
