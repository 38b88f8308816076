"""Pieces are compiled once for all lengths, with the sizes of the model known: by a backend that counts its graphs."""

from functools import partial

import pytest
import torch
from tiny_models import fresh_backbone

from mtrl.models import patches


@pytest.fixture
def seen(monkeypatch):
    from torch._dynamo.testing import CompileCounter  # here, since it takes a second

    counter, real = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", partial(real, backend=counter))
    patches.compile_function.cache_clear()
    torch._dynamo.reset()
    yield counter
    patches.compile_function.cache_clear()
    torch._dynamo.reset()


def rotary(query, key, cos, sin):
    return query * cos[:, None] + key.mean(1, keepdim=True) * sin[:, None]


def test_one_graph_serves_all_lengths_and_knows_the_heads(seen):
    piece = patches.compile_function(rotary, patches.find_rotary_dims)
    for rows, length in ((2, 5), (2, 7), (3, 9), (4, 6)):
        cos = torch.randn(rows, length, 8)
        given = torch.randn(rows, 6, length, 8), torch.randn(rows, 2, length, 8), cos, cos + 1
        assert torch.equal(piece(*given), rotary(*given))
    assert seen.frame_count == 1
    piece(given[0][:, :5], *given[1:])
    assert seen.frame_count == 2, "another number of heads is another model"


def test_all_layers_of_a_model_share_their_graphs(seen):
    backbone = fresh_backbone("qwen2_5_vl")
    patches.use_compiled_pieces(backbone.model)
    graphs = []
    with torch.no_grad():
        for length in (5, 8, 13):
            ids, positions = torch.randint(10, 200, (2, length)), torch.arange(length).expand(3, 2, -1)
            read = backbone.forward_text(ids, positions)
            graphs.append(seen.frame_count)
        plain = fresh_backbone("qwen2_5_vl").forward_text(ids, positions)
    assert graphs == [3, 3, 3], "norm, MLP, rotary positions"
    torch.testing.assert_close(read, plain, rtol=1e-5, atol=1e-5)
