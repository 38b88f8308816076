"""Document masks, their block form for a kernel, and attention mass against whole matrices."""

from dataclasses import replace

import pytest
import torch
from helpers import fake_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import random_rollouts
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from transformers import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask

from mtrl.models.document_mask import BLOCK, DocumentMask, MaskRule, find_image_runs, visible_blocks, whole_blocks
from mtrl.models.layout import lay_out
from mtrl.models.masked_attention import MassReader, attention
from mtrl.types import NO_POOL, TEXT_POOL, VISION_POOL

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # on a CPU, on purpose


def make_document_mask(documents, size):
    """`documents`: for each the lengths of its prompt and responses; padded to `size`."""
    segment, prompt, name = [], [], 0
    for lengths in documents:
        first = name
        for length in lengths:
            segment += [name] * length
            prompt += [first] * length
            name += 1
    rest = [-1] * (size - len(segment))
    return DocumentMask(torch.tensor([segment + rest]), torch.tensor([prompt + rest]))


def test_the_mask_by_hand():
    """A prompt of two tokens with responses of two and one; a prompt of one with a response; a padding token."""
    dense = make_document_mask([[2, 2, 1], [1, 1]], 8).dense()[0, 0].int().tolist()
    assert dense == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]


LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=4), st.integers(0, 200))
def test_blocks_equal_the_matrix(documents, padding):
    tokens = sum(map(sum, documents)) + padding
    sight = make_document_mask(documents, tokens + -tokens % BLOCK)
    dense = sight.dense()[0, 0]
    size = len(dense) // BLOCK
    by_block = dense.view(size, BLOCK, size, BLOCK).transpose(1, 2).flatten(2)
    some, whole = visible_blocks(sight.map(lambda each: each[0]))
    assert torch.equal(some, by_block.any(-1))
    assert torch.equal(whole, by_block.all(-1))


def test_the_block_mask_equals_torchs():
    sight = make_document_mask([[300, 70, 1, 200], [128, 128]], 1024)
    ours = sight.blocks(torch.device("cpu"))
    rule = ours.mask_mod
    assert torch.equal(create_mask(rule, 1, 1, 1024, 1024, device="cpu"), sight.dense())
    theirs = create_block_mask(rule, 1, 1, 1024, 1024, device="cpu", BLOCK_SIZE=BLOCK)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def heads(size, columns=16, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, n, size, columns, generator=draw) for n in (4, 2, 2))


def make_module():
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal, module.layer_idx = 2, True, 0
    return module


def matrix(query, key, mask, scaling):
    """Attention [1, heads, S, S], written out."""
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * scaling
    return scores.masked_fill(~mask, -torch.inf).softmax(-1)


@pytest.mark.parametrize("kind", ["blocks", "matrix"])
def test_attention_and_mass_equal_the_matrix(kind):
    sight = make_document_mask([[100, 30, 50], [40, 20]], 256)
    query, key, value = heads(256)
    dense = sight.dense()
    mask = dense if kind == "matrix" else sight.blocks(torch.device("cpu"))
    pool = torch.full((1, 256), -1)
    pool[0, :100] = torch.tensor([NO_POOL, TEXT_POOL, *[VISION_POOL] * 50, *[TEXT_POOL] * 40, *[NO_POOL] * 8])
    pool[0, 180:220] = TEXT_POOL
    sink = torch.zeros(1, 256, dtype=torch.bool)
    sink[0, [0, 180]] = True
    places = (torch.zeros(4, dtype=torch.long), torch.tensor([99, 120, 160, 230]))
    reader = MassReader(pool, sink, places, [range(1), range(2), range(1, 2)], [mask])
    output, _ = attention(make_module(), query, key, value, mask, readers=[reader], scaling=0.5, dropout=0.0)
    weights = matrix(query, key, dense, 0.5)
    expected = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
    mean = weights.mean(1)[0]  # heads first
    for place, found in zip(places[1].tolist(), reader.total, strict=True):
        own = slice(0, 100) if place < 180 else slice(180, 220)
        row = mean[place, own].clone()
        row[0] = 0  # the sink
        row /= row.sum()
        parts = [float(row[pool[0, own] == which].sum()) for which in (TEXT_POOL, VISION_POOL)]
        torch.testing.assert_close(found[0], torch.tensor(parts), rtol=0, atol=1e-5)
        torch.testing.assert_close(found[1], torch.tensor(parts) / 2, rtol=0, atol=1e-5)  # one of its two layers so far
        assert (found[2] == 0).all()
    assert reader.total[3, 0, 1] == 0, "the second prompt has no image"


@pytest.mark.parametrize("kind", ["blocks", "matrix"])
def test_the_mass_of_a_corner_is_that_of_the_whole(kind):
    """The second document is another view, for which no attention is read."""
    sight = make_document_mask([[100, 30, 50], [300, 20]], 512)
    pool = torch.full((1, 512), -1)
    pool[0, :100] = torch.tensor([TEXT_POOL, *[VISION_POOL] * 50, *[TEXT_POOL] * 49])
    sink = torch.arange(512)[None] == 0
    places = (torch.zeros(3, dtype=torch.long), torch.tensor([99, 120, 178]))
    totals, read = [], []
    for corner in (slice(1), slice(512)), (slice(1), slice(whole_blocks(179))):
        seen = sight[corner]
        mask = seen.dense() if kind == "matrix" else seen.blocks(torch.device("cpu"))
        reader = MassReader(pool[corner], sink[corner], places, [range(1)], [mask])
        reader.attend = lambda *given, attend=reader.attend: read.append(attend(*given)) or read[-1]
        attention(make_module(), *heads(512), sight.dense(), readers=[reader], scaling=0.5, dropout=0.0)
        totals.append(reader.total)
    torch.testing.assert_close(totals[0], totals[1], rtol=0, atol=1e-6)
    assert (totals[0] > 0.1).all() and [each.shape[1] for each in read] == [512, 256]


@pytest.mark.parametrize(("size", "rounded"), [(1, 256), (128, 256), (256, 256), (257, 384)])
def test_there_are_at_least_two_blocks(size, rounded):
    assert whole_blocks(size) == rounded


def test_one_graph_of_flex_attention_serves_all_lengths():
    """For any number of documents, or a single short one, nothing is compiled again."""
    torch._dynamo.reset()
    counters.clear()
    traced = torch.compile(flex_attention, dynamic=True, backend="eager")  # no C++ compiler is needed to see it
    for documents in [[60, *[20] * 8]] * 4, [[50, *[20] * 7]] * 3, [[100, 60]], [[9, 2]]:
        size = whole_blocks(sum(map(sum, documents)))
        blocks = make_document_mask(documents, size).blocks(torch.device("cpu"))
        with torch.no_grad():
            traced(*heads(size), block_mask=blocks, scale=0.5, enable_gqa=True)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_prompt_with_only_the_sink_has_no_mass():
    query, key, value = heads(4)
    pool = torch.tensor([[TEXT_POOL, -1, -1, -1]])
    mask = make_document_mask([[1, 3]], 4).dense()
    reader = MassReader(pool, pool >= 0, (torch.zeros(1, dtype=torch.long), torch.tensor([3])), [range(1)], [mask])
    attention(make_module(), query, key, value, mask, readers=[reader], scaling=1.0, dropout=0.0)
    assert (reader.total == 0).all()


def test_blocks_go_to_flex_attention(monkeypatch):
    """On a CPU it is slow and without gradients, yet it is the kernel of the GPU route: the same numbers."""
    calls = []
    monkeypatch.setattr(
        "mtrl.models.masked_attention.flex_attention", lambda *x, **y: calls.append(1) or flex_attention(*x, **y)
    )
    sight = make_document_mask([[100, 28]], 128)
    attention(make_module(), *heads(128), sight.blocks(torch.device("cpu")), scaling=1.0, dropout=0.0)
    assert calls


# ---------------------------------------------------------------------------------------------- windows, image blocks
def transformers_masks(is_image, window):
    """What transformers makes for a Gemma 3 that reads one row: with a window, and without."""
    config = Gemma3TextConfig(sliding_window=window, num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    blocks = get_block_sequence_ids_for_mask(is_image.long())
    embeds = torch.zeros(*is_image.shape, 1)
    masks = create_masks_for_vision_model(config, embeds, None, None, None, blocks)
    return masks["sliding_attention"][0, 0], masks["full_attention"][0, 0]


IMAGES = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0]]).bool()


@pytest.mark.parametrize("window", [1, 2, 3, 5, 15, 16, 40])
def test_rows_equal_those_of_transformers(window):
    rows = DocumentMask.from_rows(IMAGES)
    sliding, full = transformers_masks(IMAGES, window)
    assert torch.equal(rows.dense(MaskRule(window, image_blocks=True))[0, 0], sliding)
    assert torch.equal(rows.dense(MaskRule(None, image_blocks=True))[0, 0], full)
    text, _ = transformers_masks(torch.zeros_like(IMAGES), window)
    assert torch.equal(rows.dense(MaskRule(window))[0, 0], text)


@pytest.mark.parametrize("window", [1, 3, 7, 14])
@pytest.mark.parametrize("packed", [False, True])
def test_each_response_sees_what_it_sees_alone(window, packed):
    """The rows of its own columns are the mask of prompt and response alone; it sees nothing else."""
    pool = IMAGES[0, :10] * VISION_POOL
    prompt = replace(fake_prompt("two images"), ids=torch.arange(10), token_pool=pool)
    rollouts = random_rollouts([prompt, prompt], [0, 0, 0, 1, 1], [9, 3, 0, 5, 2])
    layout = lay_out(rollouts, [torch.arange(10).expand(3, -1)] * 2, packed=packed)
    documents, rule = layout.document_mask, MaskRule(window, image_blocks=True)
    dense = documents.dense(rule)[:, 0]
    for segment in (each for each in documents.segment.unique().tolist() if each >= 0):
        sequence, columns = (documents.segment == segment).nonzero().unbind(1)
        first = int(documents.prompt[sequence[0], columns[0]])
        own = ((documents.segment[sequence[0]] == first) | (documents.segment[sequence[0]] == segment)).nonzero()[:, 0]
        alone, _ = transformers_masks(layout.is_vision[sequence[0], own][None], window)
        found = dense[sequence[0], columns]
        assert torch.equal(found[:, own], alone[-len(columns) :])
        assert found.sum() == found[:, own].sum(), "nothing else"
        assert torch.equal(documents.rows((sequence, columns), rule), found)


@settings(max_examples=10, deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=3), st.integers(1, 300), st.integers(0, 99))
def test_blocks_with_windows_and_images_equal_the_matrix(documents, window, seed):
    tokens = sum(map(sum, documents))
    sight = make_document_mask(documents, whole_blocks(tokens))
    path = torch.cat([torch.arange(sum(each[:1]) * (i > 0), sum(each[:1]) * (i > 0) + n)
                      for each in documents for i, n in enumerate(each)])  # fmt: skip
    path = torch.nn.functional.pad(path, (0, whole_blocks(tokens) - tokens))[None]
    noise = torch.rand(path.shape[1] // 16 + 1, generator=torch.Generator().manual_seed(seed)) < 0.3
    is_image = noise.repeat_interleave(16)[None, : path.shape[1]] & (sight.segment == sight.prompt)
    sight = DocumentMask(sight.segment, sight.prompt, path, find_image_runs(is_image))
    for rule in (MaskRule(window), MaskRule(None, True), MaskRule(window, True)):
        dense = sight.dense(rule)
        size = dense.shape[-1] // BLOCK
        by_block = dense.view(size, BLOCK, size, BLOCK).transpose(1, 2).flatten(2)
        some, whole = visible_blocks(sight.map(lambda each: each[0]), rule)
        assert (some | ~by_block.any(-1)).all() and (by_block.all(-1) | ~whole).all()
    mask = sight.blocks(torch.device("cpu"), rule)
    assert torch.equal(create_mask(mask.mask_mod, 1, 1, *dense.shape[-2:], device="cpu"), dense)


def test_one_graph_of_windows_and_image_blocks():
    """flex_attention is traced without a break, and once for all lengths."""
    torch._dynamo.reset()
    counters.clear()
    traced = torch.compile(flex_attention, dynamic=True, backend="eager", fullgraph=True)
    for size in (640, 896):  # no number of blocks is a number of heads, which would be one symbol
        rows = DocumentMask.from_rows(torch.arange(size)[None] % 50 < 20)
        with torch.no_grad():
            blocks = rows.blocks(torch.device("cpu"), MaskRule(40, image_blocks=True))
            traced(*heads(size), block_mask=blocks, scale=0.5, enable_gqa=True)
    assert counters["stats"]["unique_graphs"] == 1
