"""The kernel of attention masses, in Triton's interpreter, equals the sums of the attention matrix."""

import pytest
import torch
from test_cascade_attention import make_documents

from mtrl.models import prompt_masses as masses
from mtrl.models.prompt_masses import PromptRows, fill_blocks, prompt_masses

pytest.importorskip("triton")
CPU = torch.device("cpu")


@pytest.mark.parametrize("groups", [[(90, 70, 5)], [(3, 1, 40, 2), (150, 9)], [(1, 4)]], ids=str)
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 2, 16), (3, 1, 24)])
def test_masses_are_sums_of_the_matrix(groups, heads, key_heads, width):
    documents, draw = make_documents(groups, padding=3), torch.Generator().manual_seed(1)
    size = documents.segment.shape[1]
    query, key = (torch.randn(n, size, width, generator=draw) for n in (heads, key_heads))
    pools = torch.randint(2, (size, 3), generator=draw, dtype=torch.bool)
    scores = 0.3 * query.double() @ key.double().repeat_interleave(heads // key_heads, 0).transpose(1, 2)
    scores = scores.masked_fill(~documents.dense()[0], -torch.inf)
    column = torch.randperm(int((documents.segment >= 0).sum()), generator=draw)  # in any order
    of_prompt = documents.segment == documents.prompt[0][:, None]  # [rows, keys]
    expected = (scores.softmax(-1).mean(0) * of_prompt) @ pools.double()
    found = prompt_masses(query, key, scores.logsumexp(-1).float(), pools, PromptRows.of(documents, column, CPU), 0.3)
    torch.testing.assert_close(found.double(), expected[column], rtol=1e-5, atol=1e-6)


def test_a_block_has_rows_of_one_prompt(monkeypatch):
    monkeypatch.setattr(masses, "ROWS", 4)
    blocks = fill_blocks(torch.tensor([7, 0, 7, 0, 0, 0, 0, 9, 9, 9, 9]))
    assert blocks.tolist() == [[1, 3, 4, 5], [6, -1, -1, -1], [0, 2, -1, -1], [7, 8, 9, 10]]
