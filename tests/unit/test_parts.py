"""Which tensors go into which file of a checkpoint, and who writes it."""

import json

import pytest
import torch
from safetensors.torch import load_file

from mtrl.checkpoint.sharded_files import FilePlan


def test_files_are_filled_in_order_up_to_the_limit():
    plan = FilePlan.make("model", {"a": 4, "b": 5, "c": 2, "d": 30, "e": 1}, 10)
    assert plan.files == (("a", "b"), ("c",), ("d",), ("e",)), "a tensor over the limit has its own file"
    assert plan.nbytes == 42
    assert plan.file_name(1) == "model-00002-of-00004.safetensors"


def test_a_single_file_has_the_plain_name():
    plan = FilePlan.make("trainer/optimizer", {"a": 4, "b": 6}, 10)
    assert plan.is_single and plan.file_name(0) == "trainer/optimizer.safetensors"
    assert FilePlan.make("model", {}, 10).is_single, "before the first update an optimizer has no state"


@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
def test_ranks_write_every_tensor_once(ranks, tmp_path):
    tensors = {f"t{number}": torch.full((number + 1,), float(number)) for number in range(7)}
    plan = FilePlan.make("model", {name: tensor.nbytes for name, tensor in tensors.items()}, 40)
    owned = [plan.rank_tensors(rank, ranks) for rank in range(ranks)]
    assert sorted(name for own in owned for name in own) == sorted(tensors)
    for rank, own in enumerate(owned):
        plan.write({name: tensors[name] for name in own}, tmp_path, rank, ranks)
    plan.write_index(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])
    assert len(list(tmp_path.glob("model-*"))) == len(plan.files) > 2
