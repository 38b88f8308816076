"""The record of the rollouts: the stored values of each token, bounds, damage, and no effect on the run."""

import base64
import io
import logging
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from view_helpers import decode, make_step, opened, picture, recorded, with_maps

from mtrl.compose.algorithm import make_algorithm
from mtrl.compose.memory_limits import make_limits
from mtrl.compose.policy import check_signals_available
from mtrl.compose.run import build
from mtrl.config import ConfigError, load_config
from mtrl.embedded.embedded_rows import CONFIG_FILE
from mtrl.tracking import blocks, record
from mtrl.tracking.blocks import BlockWriter, DamagedRecord, PartReader, block_parts
from mtrl.tracking.record import RolloutRecord, TokenPieces
from mtrl.tracking.streams import EXTRA, pack_response, unpack_response
from mtrl.types import AttentionMap, Needs, Signals
from mtrl.view.rollout_store import image_grids


# -------------------------------------------------------------------------------------------------------- what is kept
def test_a_response_with_all_that_is_known_of_its_tokens(tmp_path):
    store = recorded(tmp_path, make_step())
    assert store.steps() == {1: 3} and store.skipped() == []
    first = store.response(1, 0)
    assert first["text"] == "row 0" and first["pieces"] == ["t0 ", "t1 "]
    streams = first["streams"]
    assert streams["ids"] == [0, 1] and streams["mask"] == [1, 0]
    assert streams["dependency"] == [0, 0.25] and streams["old"] == [-1, -1]
    assert streams["advantage"] == [-0.5, -0.5] and streams["group_advantage"] == [-0.4, -0.4]
    assert streams["weight"] == [1.25, 1.25], "w * v, and v is 1 where no rule weighs tokens"
    assert streams["vision_late"] == [0.75, 0.75] and streams["vision_early"] == [0, 0]
    assert "entropy" not in streams, "unmeasured signals are absent"
    assert (first["reward"], first["parts"], first["kept"], first["members"]) == (1.5, {"accuracy": 1.0}, 1, [0, 1])
    assert store.response(1, 2)["parts"] == {"accuracy": None} and store.response(1, 1)["tokens"] == 1
    assert store.columns(1)["dependency"].tolist() == [0.125, 0.5, 1.125], "means over the tokens of a response"


def test_signals_of_single_rules_are_kept_under_their_names(tmp_path):
    step = make_step()
    values = torch.tensor([[0.25, 0.5], [0.0, 0.0], [0.0, 0.75]])
    extra = {"kl@none": values, "wide": torch.zeros(3, 2, 4)}
    signals = replace(step.signals, token_similarity=values, entropy_change=-values, extra=extra)
    streams = recorded(tmp_path, replace(step, signals=signals)).response(1, 0)["streams"]
    assert streams[f"{EXTRA}token_similarity"] == streams[f"{EXTRA}kl@none"] == [0.25, 0.5]
    assert streams[f"{EXTRA}entropy_change"] == [-0.25, -0.5] and f"{EXTRA}wide" not in streams
    assert {name for name in streams if "dependency" in name or "logprobs" in name} == {"dependency"}


@pytest.mark.parametrize("earlier", [False, True])
def test_a_token_without_an_advantage_is_not_trained_on(tmp_path, earlier, monkeypatch):
    """Kept is what the filters say. The gradient of a kept token is 0 if its advantage is."""
    if earlier:  # a record that has no such numbers: they follow from the mask and the advantage
        for name in ("response_columns", "token_streams"):
            values = getattr(record, name)
            without = lambda it, values=values: {k: v for k, v in values(it).items() if k != "trained"}  # noqa: E731
            monkeypatch.setattr(record, name, without)
    step = make_step()
    advantage = torch.tensor([[0.5, 0.5], [0.0, 0.0], [0.0, -1.0]])
    store = recorded(tmp_path, replace(step, credit=replace(step.credit, advantage=advantage)))
    found = [store.response(1, row) for row in range(3)]
    assert [one["kept"] for one in found] == [1, 1, 1] and [one["trained"] for one in found] == [1, 0, 0]
    assert [one["streams"]["trained"] for one in found] == [[1, 0], [0], [0, 0]]
    assert found[2]["streams"]["mask"] == [1, 0], "the heat map of the mask stays"


def test_images_as_the_model_saw_them_and_perturbed(tmp_path):
    store = recorded(tmp_path, make_step())
    prompt = store.response(1, 2)["prompt"]
    shown = [np.asarray(Image.open(io.BytesIO(store.image(1, prompt[name][0])))) for name in ("images", "perturbed")]
    assert (shown[0] == picture(20)).all() and (shown[1] == picture(10)).all()
    with pytest.raises(KeyError):
        store.image(1, "../../config.yaml")


def test_an_image_is_stored_once(tmp_path):
    noise = np.random.default_rng(1).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    step = make_step()
    prompts = tuple(replace(prompt, media=(noise,)) for prompt in step.rollouts.prompts)
    step = replace(step, rollouts=replace(step.rollouts, prompts=prompts), signals=Signals())
    store = recorded(tmp_path, step, step, step)
    size = block_parts(tmp_path)[0].stat().st_size
    assert 12_000 < size < 2 * 12_000, "one such picture takes 12 kB, and six are shown"
    assert store.image(3, store.response(3, 2)["prompt"]["images"][0]) == store.image(1, store.response(1, 0)["image"])


def test_the_perturbed_view_is_left_out_if_it_was_not_used(tmp_path):
    assert recorded(tmp_path / "a", make_step(signals=Signals())).response(1, 0)["prompt"]["perturbed"] == []
    step = make_step()
    older = replace(step, rollouts=replace(step.rollouts, version=torch.tensor([0, 0, 3])))
    store = recorded(tmp_path / "b", older)
    assert store.response(1, 0)["prompt"]["perturbed"] == [], "its group was measured in an earlier step"
    assert len(store.response(1, 2)["prompt"]["perturbed"]) == 1


def test_the_configured_number_of_responses(tmp_path):
    assert recorded(tmp_path / "two", make_step(), per_step=2).steps() == {1: 2}
    assert recorded(tmp_path / "all", make_step(), per_step=-1).steps() == {1: 3}


def test_parts_of_a_character_are_shown_together():
    vocabulary = {1: "ab", 2: "\ufffd", 3: "\ufffd", 4: "c"}
    pieces = TokenPieces(lambda ids: [vocabulary[i] for i in ids], lambda ids: "é" if ids == [2, 3] else "?")
    assert pieces([1, 2, 3, 4]) == ["ab", "", "é", "c"] and pieces([2, 3]) == ["", "é"]


def test_a_response_costs_its_own_tokens_and_not_all_that_are_known():
    class Known(dict):
        def __iter__(self):
            raise AssertionError("walks over all tokens that were ever seen")

        keys = values = items = __iter__

    pieces = TokenPieces(lambda ids: [f"<{i}>" for i in ids], str)
    pieces._known = Known()
    assert pieces([7, 8]) == pieces([7, 8]) == ["<7>", "<8>"]


def test_numbers_without_an_end():
    kept = unpack_response(pack_response("x", ["x"], {"entropy": np.array([np.inf, np.nan, 1e9], dtype=np.float32)}))
    assert kept["streams"]["entropy"].tolist()[0] == 65504 and np.isnan(kept["streams"]["entropy"][1])


# ------------------------------------------------------------------------------------------------------ attention maps
def looked(levels, scale=0.5):
    levels = torch.tensor(levels, dtype=torch.uint8)
    return AttentionMap(levels, torch.full((len(levels),), scale))


def test_maps_lie_on_the_images_and_clips_that_they_are_about(tmp_path):
    """A picture of 4 x 6 pixels and a clip of five frames, two a token; a token is two pixels a side."""
    still, clip = np.zeros((4, 6, 3), np.uint8), np.zeros((5, 4, 4, 3), np.uint8)
    step = with_maps(make_step(), [looked([[9] * 18, [255] * 18]), None, looked([[1] * 18, [2] * 18])], (still, clip))
    store = recorded(tmp_path, step, token_size=(2, 2))
    one = store.response(1, 0)
    assert one["grids"] == [[1, 2, 3, [0]], [3, 2, 2, [0, 0, 1, 2]]], "frames 0, 1, 3 and 4 of the clip are shown"
    assert store.maps(1, 0) == {"levels": base64.b64encode(bytes([9] * 18 + [255] * 18)).decode(), "scale": [0.5, 0.5]}
    assert not {"maps", "map_scale"} & one["streams"].keys(), "a list of responses stays small"
    assert one["streams"]["vision_all"] == [0, 0], "measured signals stay"
    assert "grids" not in store.response(1, 1)
    with pytest.raises(KeyError):
        store.maps(1, 1)


@pytest.mark.parametrize("grids", [
    None, 7, [[1, 2, 2, [0]]], [[1, 1, 3, [1]]], [[1, 3, [0]]], [[1, -1, -3, [0]]], [[1, 1, 3.0, [0]]], [{"x": 1}],
    [[1, 1, 3, 0]], [[1, 1, 3, [0]], None],
])  # fmt: skip
def test_maps_that_do_not_fit_their_images_are_not_shown(grids):
    streams = {"maps": np.zeros((2, 3), np.uint8), "map_scale": np.zeros(2, np.float32)}
    assert image_grids(streams, {"grids": [[1, 1, 3, [0]]]}) == [[1, 1, 3, [0]]]
    assert image_grids(streams, {"grids": grids}) is None
    for name, wrong in (("maps", np.zeros(3, np.uint8)), ("map_scale", np.zeros(3, np.float32))):
        assert image_grids(streams | {name: wrong}, {"grids": [[1, 1, 3, [0]]]}) is None


# ------------------------------------------------------------------------------------------------------ growth, damage
def test_it_is_read_while_it_grows(tmp_path):
    store = recorded(tmp_path, make_step())
    whole = block_parts(tmp_path)[0].read_bytes()
    part = block_parts(tmp_path)[0]
    for length in (1, 40, len(blocks.MARK) + 70, len(whole) - 1):
        part.write_bytes(whole + whole[:length])
        store.refresh()
        assert store.steps() == {1: 3} and store.skipped() == []
    second = bytearray(whole)
    part.write_bytes(whole + bytes(second))
    store.refresh()
    assert len(list(PartReader(part).read_new())) == 2


@pytest.mark.parametrize("hurt", ["head", "body", "table", "cut", "garbage"])
def test_damage_costs_one_step_and_is_reported(tmp_path, hurt):
    recorded(tmp_path, make_step(), make_step(), make_step())
    part = block_parts(tmp_path)[0]
    _, second, _ = PartReader(part).read_new()
    data = bytearray(part.read_bytes())
    if hurt == "head":
        data[second.start + 10] ^= 1
    elif hurt == "body":
        data[second.start + blocks.HEAD.size + 2 : second.start + second.body_bytes] = bytes(second.body_bytes - 2 - 64)
    elif hurt == "table":
        data[second.end - 5] ^= 1
    elif hurt == "cut":
        del data[second.start + 100 : second.end]
    else:
        data[second.start : second.start] = os.urandom(1000)
    part.write_bytes(data)
    store = opened(tmp_path)
    assert store.response(1, 0)["text"] == store.response(3, 0)["text"] == "row 0"
    if hurt == "garbage":
        assert store.response(2, 0)["text"] == "row 0"
    else:
        with pytest.raises((DamagedRecord, KeyError)):
            store.response(2, 0)
    assert bool(store.skipped()) == (hurt != "body"), "a damaged response is detected when it is read"


def test_a_table_from_somebody_else_is_no_trap(tmp_path):
    writer = BlockWriter(tmp_path, 2**20)
    writer.append(1, 1, {"prompts": [{}], "rollouts": {"prompt": [7]}}, [b"x"], {})
    writer.append(2, 1, {"prompts": "no", "rollouts": []}, [b"x"], {})
    bomb = blocks.zlib.compress(b"0" * (blocks.MAX_PIECE_BYTES + 1))
    with pytest.raises(DamagedRecord):
        blocks.decompress(bomb)
    store = opened(tmp_path)
    for step in (1, 2):
        with pytest.raises(DamagedRecord):
            store.rows(step, [0])
    assert store.steps() == {} and len(store.skipped()) == 2


def test_it_stays_within_its_limit(tmp_path):
    steps = [make_step(shades=(number, number + 100)) for number in range(60)]
    store = recorded(tmp_path, *steps, limit_bytes=32_000)
    assert sum(part.stat().st_size for part in block_parts(tmp_path)) <= 32_000
    kept = list(store.steps())
    assert kept[-1] == 60 and kept == list(range(kept[0], 61)) and kept[0] > 1, "the oldest steps are removed"
    assert len(store.image(kept[0], store.response(kept[0], 0)["image"])) > 0, "with their images, and no others"


def test_the_last_attempt_counts(tmp_path):
    recorded(tmp_path, make_step(), make_step(), make_step())
    record = RolloutRecord(tmp_path, decode, str, lambda prompt, step: (), attempt=2)
    record.rollouts(2, make_step(signals=Signals()))
    record.close()
    store = opened(tmp_path)
    assert list(store.steps()) == [1, 2], "step 3 of the first attempt was undone"
    assert "dependency" not in store.response(2, 0)["streams"] and "dependency" in store.response(1, 0)["streams"]


def test_a_full_disk_is_reported_once_and_stops_nothing(tmp_path, monkeypatch, caplog):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blocks, "append_whole", full)
    with caplog.at_level(logging.WARNING):
        recorded(tmp_path, make_step(), make_step())
    assert caplog.text.count("No space left") == 1


# ------------------------------------------------------------------------------------------------------------ the run
def test_a_run_does_not_notice_it(tmp_path, few_rows, no_curves):
    """The weights are bitwise the same with a record, with attention maps, and without."""
    questions = tmp_path / "val.jsonl"
    questions.write_text('{"prompt": "Which letter?", "answer": "A", "options": ["x", "y"]}\n')
    ends = {}
    for kept in (0, 3):
        config = load_config(CONFIG_FILE, {
            "training.record_attention_maps": bool(kept),
            "training.output_dir": str(tmp_path / str(kept)), "training.max_steps": 2, "training.logger": (),
            "training.record_rollouts_per_step": kept, "training.val_before_train": False, "training.val_freq": -1,
            "dataset.val_files": str(questions), "dataset.rollout_batch_size": 2, "worker.rollout.n": 2,
            "worker.actor.global_batch_size": 2, "training.val_generations_to_log": 0, "training.best_metric": None,
        })  # fmt: skip
        training = build(config)
        training.train()
        record = training.directory / "record"
        assert record.is_dir() == bool(kept)
        (weights,) = sorted(training.directory.glob("checkpoints/step_2/**/*.safetensors"))[:1]
        ends[kept] = weights.read_bytes()
        if kept:
            store = opened(record)
            assert store.steps() == {1: 3, 2: 3}
            assert store.response(2, 0)["prompt"]["perturbed"], "the embedded recipe uses two views"
            shown = [store.response(2, row) for row in range(3)]
            assert all("vision_late" not in each["streams"] for each in shown), "attention is due at step 10"
            check_maps(store, shown[2])
    assert ends[0] == ends[3]


def check_maps(store, one):
    """A byte for each token and each of the 2 x 2 image tokens of the embedded model."""
    assert one["grids"] == [[1, 2, 2, [0]]]
    maps = store.maps(one["step"], one["row"])
    levels = np.frombuffer(base64.b64decode(maps["levels"]), np.uint8).reshape(-1, 4)
    assert len(levels) == len(maps["scale"]) == len(one["pieces"])
    assert levels.max(1).min() == 255 and levels.min() < 255
    sums = np.array(maps["scale"]) * np.square(levels / 255).sum(1)
    assert one["streams"]["vision_all"] == pytest.approx(sums, rel=1e-2)
    assert sums.min() > 0.01 and sums.max() < 1


def test_maps_without_readable_attention_are_an_error_at_the_start():
    config = load_config(CONFIG_FILE, {"training.record_attention_maps": True})
    rules = make_algorithm(config, 1)
    check_signals_available(config, rules, True)
    with pytest.raises(ConfigError, match="attn_implementation"):
        check_signals_available(config, rules, False)


def test_doctor_counts_the_memory_of_maps():
    needs = make_limits(
        load_config(CONFIG_FILE, {"training.record_attention_maps": True}), Needs("old_logprobs"), False, True
    ).needs
    assert "attention_maps" in needs and "attention_mass" in needs
