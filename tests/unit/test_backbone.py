"""Seeing and reading: our vision tower against the untouched one, and rows of every kind in one batch."""

import copy
from collections import Counter

import pytest
import torch
from tiny_models import (
    QWEN_FAMILIES,
    checkpoint,
    fresh_backbone,
    get_encoder,
    picture,
    plain_model,
    prompt,
    prompts_for,
    shared_backbone,
)
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    Starcoder2Config,
    vision_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mtrl.models import masked_attention as attention
from mtrl.models import patches
from mtrl.models.backbone import Backbone, prompt_positions, vision_tokens
from mtrl.models.families import qwen_tower
from mtrl.models.families.vision import patchify
from mtrl.models.load_model import load_model

# rows and columns of tokens. Windows of Qwen2.5-VL are 4 x 4 tokens: most of these leave odd ones at the edges.
GRIDS = {
    "one window": [(4, 4)],
    "one token": [(1, 1)],
    "odd windows": [(5, 9)],
    "strip": [(1, 13)],
    "equal images": [(3, 5), (3, 5)],
    "other sizes": [(2, 3), (6, 4), (5, 9), (1, 1)],
    "same windows, other order": [(5, 4), (4, 5), (4, 4), (8, 8)],
}


@pytest.fixture(params=QWEN_FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def backbone(family):
    return shared_backbone(family)


def make_pixels(family, sizes):
    encoder = get_encoder(family)
    arrays = [picture(encoder, *size, seed=seed) for seed, size in enumerate(sizes)]
    merge = encoder.image_settings.merge_size
    grids = tuple((1, rows * merge, columns * merge) for rows, columns in sizes)
    return torch.cat([patchify(array, encoder.image_settings) for array in arrays]), grids


def outputs(tower_output):
    return [tower_output.pooler_output, *(getattr(tower_output, "deepstack_features", None) or ())]


def close(actual, expected, atol=2e-5):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=atol)


# ------------------------------------------------------------------------------------------------------ vision tower
@pytest.mark.parametrize("name", GRIDS)
def test_tower_equals_the_untouched_one(family, backbone, name):
    pixels, grids = make_pixels(family, GRIDS[name])
    with torch.no_grad():
        ours = outputs(backbone.images.run_tower(pixels, grids))
        plain = outputs(plain_model(family).model.visual(pixels, grid_thw=torch.tensor(grids)))
    assert len(ours) == len(plain) == (2 if family == "qwen3_vl" else 1)
    for mine, theirs in zip(ours, plain, strict=True):
        assert len(mine) == sum(rows * columns for rows, columns in GRIDS[name])
        close(mine, theirs)


@pytest.mark.parametrize("name", ["odd windows", "equal images", "other sizes"])
def test_gradients_of_the_tower_equal_the_untouched_one(family, backbone, name):
    pixels, grids = make_pixels(family, GRIDS[name])
    plain = plain_model(family).model.visual

    def gradients(tower, output):
        sum(x.square().mul(torch.linspace(-1, 1, x.shape[-1])).sum() for x in outputs(output)).backward()
        found = {name: parameter.grad.clone() for name, parameter in tower.named_parameters()}
        tower.zero_grad()
        return found

    backbone.vision_tower.zero_grad()
    ours = gradients(backbone.vision_tower, backbone.images.run_tower(pixels, grids))
    theirs = gradients(plain, plain(pixels, grid_thw=torch.tensor(grids)))
    assert ours.keys() == theirs.keys()
    for parameter, gradient in theirs.items():
        torch.testing.assert_close(ours[parameter], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


def test_an_image_does_not_see_its_neighbour(family, backbone):
    """Exact: neighbouring images do not change an image's features."""
    (one, other), grids = [make_pixels(family, [size])[0] for size in ((5, 4), (2, 3))], ((1, 10, 8), (1, 4, 6))
    with torch.no_grad():
        alone = outputs(backbone.images.run_tower(one, grids[:1]))
        together = outputs(backbone.images.run_tower(torch.cat([one, other]), grids))
        after = outputs(backbone.images.run_tower(torch.cat([other, one]), grids[::-1]))
    for x, y, z in zip(alone, together, after, strict=True):
        close(y[: len(x)], x, atol=1e-6)
        close(z[-len(x) :], x, atol=1e-6)


def test_one_call_for_all_windows_of_a_length(backbone, family, monkeypatch):
    """The reason for the patch: calls grow with distinct lengths, not with windows."""
    calls = []
    sdpa = patches.F.scaled_dot_product_attention
    monkeypatch.setattr(patches.F, "scaled_dot_product_attention", lambda *x, **y: calls.append(1) or sdpa(*x, **y))
    with torch.no_grad():
        backbone.images.run_tower(*make_pixels(family, [(8, 8)] * 3))  # 4 windows each
    assert len(calls) == len(backbone.vision_tower.blocks)


def test_saved_config_does_not_name_the_patch(backbone, tmp_path):
    """A checkpoint must load where MTRL is not installed."""
    backbone.model.config.save_pretrained(tmp_path)
    assert "mtrl" not in (tmp_path / "config.json").read_text()


# ------------------------------------------------------------------------------------------------- grouped attention
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("masked", [True, False])
def test_grouped_attention_equals_sdpa(queries, masked):
    """Six heads share two keys; one row has keys that are padding."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, n, s, 8, generator=draw) for n, s in ((6, queries), (2, 5), (2, 5)))
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 3, True
    mask = torch.ones(3, 1, queries, 5, dtype=torch.bool).tril(5 - queries)
    mask[1, :, :, 0] = queries > 1
    given = (module, query, key, value, mask if masked else None)
    ours, _ = attention.attention(*given, scaling=0.3, dropout=0.0)
    theirs, _ = sdpa_attention_forward(*given, scaling=0.3, dropout=0.0)
    assert ours.shape == theirs.shape == (3, queries, 6, 8)
    close(ours, theirs, atol=1e-6)


def test_only_sdpa_is_replaced(family):
    eager = Backbone(load_model(checkpoint(family), attn_implementation="eager"))
    assert eager.language_model.config._attn_implementation == "eager"


class OnGpu(Backbone):
    """Believes that it is on a GPU."""

    device = torch.device("cuda")


SMALL = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}


@pytest.mark.parametrize(
    ("config", "packs"),
    [
        (LlamaConfig(**SMALL), True),
        (LlamaConfig(**SMALL | {"num_attention_heads": 8}), False),  # heads of 8: flex_attention takes 16 or more
        (LlamaConfig(**SMALL, head_dim=8), False),
        (GemmaConfig(**SMALL, head_dim=16), False),  # not known to hear of its neighbours by the mask alone
    ],
)
def test_what_is_packed_on_a_gpu(config, packs):
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    assert OnGpu(model).can_pack is packs
    assert not Backbone(model).can_pack


def test_dropout_is_off_while_training(family):
    model = load_model(checkpoint(family)).train()
    for layer in (each for each in model.model.language_model.layers if hasattr(each, "self_attn")):
        layer.self_attn.attention_dropout = 0.5
        layer.self_attn.q_proj = torch.nn.Sequential(layer.self_attn.q_proj, torch.nn.Dropout(0.5))
    backbone, ids = Backbone(model), torch.arange(8)[None]
    positions = torch.arange(8).expand(3, 1, -1)
    assert torch.equal(backbone.forward_text(ids, positions), backbone.forward_text(ids, positions))


# --------------------------------------------------------------------------------------------------- compiled pieces
def test_each_piece_is_compiled_in_our_model_alone(family, monkeypatch):
    """Rotary positions are a function inside transformers: other models of the process must not change."""
    calls = Counter()

    def counted(function, _):
        return lambda *x, **y: calls.update([function.__qualname__]) or function(*x, **y)

    monkeypatch.setattr(patches, "compile_function", counted)
    monkeypatch.setattr(patches, "compile_rotary", patches.compile_rotary.__wrapped__)
    theirs, ours = load_model(checkpoint(family)), Backbone(load_model(checkpoint(family)), compiled=True)
    pixels, grids = make_pixels(family, [(4, 6)])
    ids, positions = torch.arange(8)[None], torch.arange(8).expand(3, 1, -1)
    with torch.no_grad():
        close(
            theirs.model.language_model(input_ids=ids, position_ids=positions).last_hidden_state,
            ours.forward_text(ids, positions),
        )
        assert outputs(theirs.model.visual(pixels, grid_thw=torch.tensor(grids)))
        before = dict(calls)
        ours.images.run_tower(pixels, grids)
    layers, blocks = len(ours.language_model.layers), len(ours.vision_tower.blocks)
    assert before["apply_rotary_pos_emb"] == len(ours.attention_layers), "once a layer, by our model alone"
    assert calls["apply_rotary_pos_emb_vision"] == blocks and "apply_rotary_pos_emb_vision" not in before
    norms_and_mlps = sum(n for name, n in before.items() if name.endswith(".forward"))
    assert norms_and_mlps >= 3 * layers + 1


def test_a_function_compile_rotary_positions_takes_the_same_arguments(monkeypatch):
    monkeypatch.setattr(patches, "compile_function", lambda function, _: function)

    def forward(self, hidden, mask=None, *, scale=2):
        return hidden * scale, mask

    assert patches.compile_rotary.__wrapped__(forward)(None, 3) == (6, None)


def test_a_copy_of_a_compiled_model_runs_on_its_own_weights(family, monkeypatch):
    """The frozen reference is a copy of the policy, which must not follow it."""
    monkeypatch.setattr(patches, "compile_function", lambda function, _: function)
    monkeypatch.setattr(patches, "compile_rotary", patches.compile_rotary.__wrapped__)
    ours = Backbone(load_model(checkpoint(family)), compiled=True)
    frozen = Backbone(copy.deepcopy(ours.model))
    ids, positions = torch.arange(8)[None], torch.arange(8).expand(3, 1, -1)
    pixels, grids = make_pixels(family, [(4, 6)])

    def read(backbone):
        with torch.no_grad():
            return [backbone.forward_text(ids, positions), *outputs(backbone.images.run_tower(pixels, grids))]

    before = read(ours)
    with torch.no_grad():
        for parameter in ours.model.parameters():
            parameter.mul_(1.1)
    for was, stays, moved in zip(before, read(frozen), read(ours), strict=True):
        assert torch.equal(was, stays) and not torch.equal(was, moved)


# ------------------------------------------------------------------------------------------------------------ caches
def test_index_caches_are_bounded_and_right_after_eviction(family, backbone, monkeypatch):
    monkeypatch.setattr(qwen_tower, "CACHED_BATCHES", 3)
    monkeypatch.setattr(qwen_tower, "CACHED_IMAGES", 4)
    indices, made = qwen_tower.VisionIndices(backbone.vision_tower), []
    build = indices._make_batch
    monkeypatch.setattr(indices, "_make_batch", lambda *batch: made.append(batch) or build(*batch))
    device = torch.device("cpu")
    mixed = [tuple((1, 2 * (a + k), 2 * a) for k in range(3)) for a in range(1, 8)]
    for _ in range(2):
        for grids in mixed:
            indices(grids, device)
            assert len(indices._batches) <= 3 and len(indices._images) <= 4
    assert len(made) == 14
    indices(mixed[-1], device)
    assert len(made) == 14, "the newest are cached"
    for grids in mixed:
        assert_as_upstream(indices(grids, device), grids, backbone.vision_tower)


def assert_as_upstream(indices, grids, tower):
    """Upstream's result for the whole batch."""
    grid_thw, merge = torch.tensor(grids), tower.spatial_merge_size
    assert torch.equal(indices["position_ids"], vision_utils.get_vision_position_ids(grid_thw, merge))
    ends = torch.tensor([0, *(height * width for _, height, width in grids)]).cumsum(0)
    assert indices["cu_seqlens"].tolist() == ends.tolist() and indices["max_seqlen"] == int(ends.diff().max())
    if hasattr(tower, "window_size"):
        window, ends = vision_utils.get_vision_window_index(grid_thw, merge, tower.window_size, tower.patch_size)
        assert torch.equal(indices["window_index"], window) and torch.equal(indices["cu_window_seqlens"], ends)
        assert indices["max_window_seqlen"] == int(ends.diff().max())


def test_the_batch_used_last_is_not_the_first_to_go():
    cache = {}
    for key in "abac":
        qwen_tower.get_or_make(cache, key, lambda key=key: key.upper(), limit=2)
    assert cache == {"a": "A", "c": "C"}


def test_segments_grouped_sort_by_length():
    sizes, order, back = patches._sort_by_length((2, 3, 2), torch.device("cpu"))
    assert sizes == {2: 4, 3: 3}
    assert order.tolist() == [0, 1, 5, 6, 2, 3, 4]
    assert order[back].tolist() == list(range(7))
    assert patches._sort_by_length((4, 4), torch.device("cpu")) == ({4: 8}, None, None)
    assert patches._sort_by_length.cache_info().maxsize is not None


# ----------------------------------------------------------------------------------------------------- see and read
def test_encode_images_returns_features_per_prompt(family, backbone):
    encoder = get_encoder(family)
    inputs = [encoder.inputs(each) for each in prompts_for(family)]
    with torch.no_grad():
        features = backbone.encode_images(inputs)
        alone = [backbone.encode_images([each])[0] for each in inputs]
    assert [None if f is None else len(f.embeds) for f in features] == [45, None, 37, 4]
    for together, single in zip(features, alone, strict=True):
        if single is not None:
            close(together.embeds, single.embeds)
            assert len(together.deepstack) == len(single.deepstack) == (family == "qwen3_vl")
            for x, y in zip(together.deepstack, single.deepstack, strict=True):
                close(x, y)


def test_text_alone_runs_no_tower(family, backbone, monkeypatch):
    monkeypatch.setattr(backbone, "images", None)
    encoder = get_encoder(family)
    assert backbone.encode_images([encoder.inputs(prompt(encoder, "t", "how many"))] * 2) == [None, None]


def read_right_padded(backbone, encoder, prompts):
    inputs = [encoder.inputs(each) for each in prompts]
    pad = torch.nn.utils.rnn.pad_sequence
    with torch.no_grad():
        return backbone.forward_text(
            pad([each.ids for each in prompts], batch_first=True),
            pad([prompt_positions(each).T for each in inputs], batch_first=True).permute(2, 0, 1),
            pad([vision_tokens(each) for each in prompts], batch_first=True),
            backbone.encode_images(inputs),
        )


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0), (3, 1, 2), (1, 1), (2, 0, 3, 1, 0)], ids=str)
def test_text_rows_and_image_rows_mix_in_any_order(family, backbone, order):
    encoder, prompts = get_encoder(family), prompts_for(family)
    together = read_right_padded(backbone, encoder, [prompts[i] for i in order])
    for row, i in enumerate(order):
        (alone,) = read_right_padded(backbone, encoder, [prompts[i]])
        close(together[row, : len(alone)], alone)


# --------------------------------------------------------------------------------------------- masks and precision
def test_a_mask_means_the_same_under_eager_attention(family):
    """Eager attention adds its mask to the scores: a bool mask would silently shift them by one."""
    encoder, (one, *_) = get_encoder(family), prompts_for(family)
    inputs = encoder.inputs(one)
    mask = torch.ones(len(one.ids), len(one.ids), dtype=torch.bool).tril()
    mask[3:, 1] = False
    read = []
    for implementation in ("sdpa", "eager"):
        backbone = Backbone(load_model(checkpoint(family), attn_implementation=implementation))
        features = backbone.encode_images([inputs])
        rows = one.ids[None], prompt_positions(inputs)[:, None], vision_tokens(one)[None], features
        read.append(backbone.forward_text(*rows, attention_mask=mask[None, None]).detach())
        assert (read[-1] - backbone.forward_text(*rows).detach()).abs().max() > 0.1, "the mask matters"
    close(*read)


def test_attention_without_mask_support_is_an_error(family):
    backbone = fresh_backbone(family)
    backbone.language_model.config._attn_implementation = "flash_attention_2"
    ids, mask = torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 1, 2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"'flash_attention_2'.*sdpa"):
        backbone.forward_text(ids, torch.zeros(3, 1, 2, dtype=torch.long), attention_mask=mask)


SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
ODD_MODELS = {
    "final_logit_softcapping, sliding attention": Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "a cap of attention scores": Gemma2Config(
        **SIZES, num_key_value_heads=2, head_dim=16, final_logit_softcapping=None, layer_types=2 * ["full_attention"]
    ),
    "logits_scaling": GraniteConfig(**SIZES, logits_scaling=4.0),
    "sliding attention": Starcoder2Config(**SIZES, num_key_value_heads=2, sliding_window=8),
    "an output layer with a bias": PhiConfig(**SIZES),
    "attention of text to later tokens": Gemma3TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=16, use_bidirectional_attention=True
    ),
    "its layout": GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64),
}


@pytest.mark.parametrize("reason", ODD_MODELS)
def test_models_that_would_be_scored_wrongly_are_an_error(reason):
    model = AutoModelForCausalLM.from_config(ODD_MODELS[reason])
    with pytest.raises(ValueError, match=f"not supported: .*{reason.split(',')[0]}"):
        Backbone(model)


@pytest.mark.parametrize("before", [True, False])
def test_an_adapter_of_the_first_vision_layer_is_seen(before):
    """Added before our product replaces the layer, or after."""
    peft = pytest.importorskip("peft")
    backbone = fresh_backbone("qwen2_5_vl")
    inputs = [get_encoder("qwen2_5_vl").inputs(prompts_for("qwen2_5_vl")[0])]
    with torch.no_grad():
        plain = backbone.encode_images(inputs)[0].embeds
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["patch_embed.proj"]), backbone.model)
        if before:
            backbone = Backbone(backbone.model)
        adapter = backbone.vision_tower.patch_embed.proj
        again = backbone.encode_images(inputs)[
            0
        ].embeds  # B is zero at first; peft's layer is a convolution, which sums otherwise
        torch.testing.assert_close(again, plain, rtol=0, atol=1e-5 * float(plain.abs().max()))
        adapter.lora_B.default.weight.fill_(0.5)
        assert not torch.allclose(backbone.encode_images(inputs)[0].embeds, plain, atol=1e-2)
