"""Document masks, their block form for a kernel, and attention mass against whole matrices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from mtrl.models.masked_attention import BLOCK, DocumentMask, MassReader, attention, visible_blocks, whole_blocks
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
    some, whole = visible_blocks(sight.segment[0], sight.prompt[0])
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
    reader = MassReader(pool, sink, places, [range(1), range(2), range(1, 2)], mask)
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
        reader = MassReader(pool[corner], sink[corner], places, [range(1)], mask)
        reader.add = lambda layer, output, add=reader.add: read.append(output.shape[1]) or add(layer, output)
        attention(make_module(), *heads(512), sight.dense(), readers=[reader], scaling=0.5, dropout=0.0)
        totals.append(reader.total)
    torch.testing.assert_close(totals[0], totals[1], rtol=0, atol=1e-6)
    assert (totals[0] > 0.1).all() and read == [512, 256]


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
    reader = MassReader(pool, pool >= 0, (torch.zeros(1, dtype=torch.long), torch.tensor([3])), [range(1)], mask)
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
