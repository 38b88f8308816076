"""Order, resuming, bounded prefetching, rows that turn out bad late, and a clean end."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest
from data_helpers import FakeEncoder, image_rows, picture_bytes, write_jsonl

import mtrl.data.sampler as sampler_module
from mtrl.data import BadRow, DataError, DataSettings, Sampler, open_dataset
from mtrl.data.media import decode
from mtrl.data.sampler import Prefetcher, PromptLoader, epoch_order


@pytest.fixture
def make(tmp_path):
    samplers = []

    def make(data=None, rows=10, encoder=None, settings=None, **options):
        path = data or image_rows(tmp_path, rows, every=2)
        encoder = encoder or FakeEncoder()
        begun = options.pop("begun", False)
        settings = settings or DataSettings()
        dataset = open_dataset(str(path), settings, encoder, cache_dir=tmp_path / "cache", resuming=begun)
        samplers.append(Sampler(dataset, encoder, **options))
        return samplers[-1]

    yield make
    for sampler in samplers:
        sampler.close()


def ids(prompts):
    return [prompt.task.id for prompt in prompts]


def answers(prompts):
    return [prompt.task.answer for prompt in prompts]


def test_every_epoch_has_every_row_once_in_its_own_order(make):
    sampler = make()
    epochs = [answers(sampler.take(10)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_depends_on_seed_and_epoch_alone(make):
    first = answers(make(seed=1).take(25))
    other = make(seed=1, threads=1, prompts_ahead=1)
    assert first == [answer for count in (1, 7, 17) for answer in answers(other.take(count))]
    assert first != answers(make(seed=2).take(25))


def test_the_order_is_the_same_for_ever():
    assert epoch_order(8, 42, 0).tolist() == ORDER_42_0
    assert epoch_order(8, 42, 1).tolist() == ORDER_42_1


ORDER_42_0 = [0, 1, 4, 2, 6, 5, 7, 3]
ORDER_42_1 = [7, 3, 4, 2, 5, 6, 0, 1]


def test_without_shuffling_files_keep_their_order(make):
    assert answers(make(shuffle=False).take(13)) == [*range(10), 0, 1, 2]


def test_one_pass_is_in_order_and_leaves_take_alone(make):
    sampler = make()
    expected = answers(make().take(8))
    begun = answers(sampler.take(4))
    batches = [answers(batch) for batch in sampler.one_pass(4)]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert begun + answers(sampler.take(4)) == expected


def test_a_pass_left_early_ends_its_threads(make):
    sampler = make()
    before = threading.active_count()
    for _ in sampler.one_pass(2):
        break
    time.sleep(0.05)
    assert threading.active_count() <= before


@pytest.mark.parametrize("taken", [0, 1, 9, 10, 11, 25])
def test_resumes_at_the_exact_next_prompt(make, taken):
    sampler = make()
    sampler.take(taken)
    state = json.loads(json.dumps(sampler.state()))
    expected = sampler.take(23)
    resumed = make()
    resumed.take(3)  # after any earlier draws
    resumed.restore(state)
    again = resumed.take(23)
    assert ids(again) == ids(expected) and resumed.state() == sampler.state()
    for a, b in zip(again, expected, strict=True):
        assert a.ids.equal(b.ids) and all(np.array_equal(x, y) for x, y in zip(a.media, b.media, strict=True))


def test_restore_rejects_other_data_and_other_orders(make, tmp_path):
    state = make().state()
    with pytest.raises(DataError, match=r"the data changed .*10 rows then, 9 now"):
        make(rows=9).restore(state)
    with pytest.raises(DataError, match=r"dataset\.seed was 42 .* is 7"):
        make(seed=7).restore(state)
    with pytest.raises(DataError, match=r"dataset\.shuffle"):
        make(shuffle=False).restore(state)


def test_get_by_id(make):
    sampler = make()
    taken = sampler.take(5)
    again = sampler.get(ids(taken)[::-1])
    assert ids(again) == ids(taken)[::-1]
    assert all(a.ids.equal(b.ids) for a, b in zip(again[::-1], taken, strict=True))
    for unknown in ("nothing:0", f"{ids(taken)[0].split(':')[0]}:99", "", "x"):
        with pytest.raises(DataError, match="no row of this dataset"):
            sampler.get([unknown])


def test_get_counts_only_rows_in_use(make, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["", {"prompt": "x" * 50}, "", {"prompt": "xy", "answer": 1}])
    sampler = make(path, settings=DataSettings(max_prompt_length=20))
    (prompt,) = sampler.take(1)
    assert prompt.task.id.endswith(":3") and answers(sampler.get([prompt.task.id])) == [1]
    with pytest.raises(DataError):
        sampler.get([prompt.task.id.replace(":3", ":1")])


def test_a_text_row_and_an_image_row_are_encoded_independently(make, tmp_path):
    sampler = make()
    for prompt in sampler.take(20):
        alone = FakeEncoder().encode(prompt.task, prompt.media)
        assert prompt.ids.equal(alone.ids) and prompt.task.visual == (prompt.task.answer % 2 == 0)
        assert [image.shape[:2] for image in prompt.media] == [(28 + 28 * (prompt.task.answer % 3), 56)] * len(
            prompt.media
        )


# ---------------------------------------------------------------------------------------------------------- ahead


class CountingLoader(PromptLoader):
    def __init__(self, dataset, encoder):
        super().__init__(dataset, encoder)
        self.loaded = []

    def load(self, position):
        self.loaded.append(position)
        return super().load(position)


@pytest.mark.parametrize(("prompts", "nbytes", "expected"), [(3, 10**9, 3), (100, 28 * 56 * 3 * 4, 4), (100, 1, 1)])
def test_prefetching_is_bounded(tmp_path, prompts, nbytes, expected):
    for i in range(20):
        (tmp_path / f"{i}.png").write_bytes(picture_bytes(28, 56, seed=i))
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "images": f"{i}.png"} for i in range(20)])
    dataset = open_dataset(str(path), DataSettings(), FakeEncoder(), cache_dir=tmp_path / "cache")
    loader = CountingLoader(dataset, FakeEncoder())
    ahead = Prefetcher(loader.load, dataset.pixels, iter(range(20)), threads=2, prompts=prompts, nbytes=nbytes)
    for taken in range(1, 6):
        assert ahead.next()[0] == taken - 1
        time.sleep(0.02)
        assert len(loader.loaded) <= taken + expected
    for _ in range(100):
        if len(loader.loaded) == 5 + expected:
            break
        time.sleep(0.01)
    assert len(loader.loaded) == 5 + expected  # it does work ahead
    ahead.close()


def test_an_image_is_held_once(make, tmp_path, monkeypatch):
    decoded = []
    monkeypatch.setattr(sampler_module, "decode_medium", lambda *call: decoded.append(call) or decode(*call))
    (tmp_path / "one.png").write_bytes(picture_bytes(28, 56))
    (tmp_path / "copy.png").write_bytes(picture_bytes(28, 56))
    names = ["one.png", "one.png", "copy.png"]
    sampler = make(
        write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "images": name} for name in names]), shuffle=False
    )
    a, b, c = sampler.take(3)
    assert a.media[0] is b.media[0] is not c.media[0]
    before = len(decoded)
    assert sampler.get([b.task.id])[0].media[0] is a.media[0] and len(decoded) == before


# ------------------------------------------------------------------------------------------------- bad rows found late


def break_image(tmp_path, row):
    """Damage that the header does not show: the pixels of a PNG, with its end mark intact."""
    path = tmp_path / f"images/{row}.png"
    data = bytearray(path.read_bytes())
    data[60:-12] = b"\0" * (len(data) - 72)
    path.write_bytes(bytes(data))


def test_a_row_broken_after_the_scan_is_an_error_with_file_and_row(make, tmp_path):
    sampler = make(shuffle=False, settings=DataSettings(on_bad_row="error"))
    break_image(tmp_path, 4)
    sampler.take(4)
    with pytest.raises(DataError, match=r"train\.jsonl, row 5: the image .*4\.png is truncated or damaged"):
        sampler.take(4)


def test_skip_replaces_it_by_the_next_row(make, tmp_path, caplog):
    listing = tmp_path / "run/bad_rows.jsonl"
    sampler = make(shuffle=False, settings=DataSettings(on_bad_row="skip"), bad_rows_path=listing)
    break_image(tmp_path, 4)
    (tmp_path / "images/6.png").unlink()
    assert answers(sampler.take(8)) == [0, 1, 2, 3, 5, 7, 8, 9]
    state = sampler.state()
    assert (state["epoch"], state["position"]) == (1, 0)
    assert answers(sampler.take(8)) == [0, 1, 2, 3, 5, 7, 8, 9]
    assert [json.loads(line)["row"] for line in listing.read_text().splitlines()] == [5, 7]
    assert len(sampler.bad_rows) == 2 and caplog.text.count("another row replaces it") == 2
    assert [answers(batch) for batch in sampler.one_pass(5)] == [[0, 1, 2, 3, 5], [7, 8, 9]]
    resumed = make(tmp_path / "train.jsonl", shuffle=False, settings=DataSettings(on_bad_row="skip"))
    # a start after the damage finds the missing file in its scan, so the rows in use are others
    with pytest.raises(DataError, match="the data changed"):
        resumed.restore(state)


def test_resume_with_rows_that_only_decoding_finds(make, tmp_path, monkeypatch):
    monkeypatch.setattr("mtrl.data.dataset.SAMPLED_ROWS", 0)
    image_rows(tmp_path, 10, every=2)
    break_image(tmp_path, 4)
    settings = DataSettings(on_bad_row="skip")
    sampler = make(tmp_path / "train.jsonl", settings=settings)
    sampler.take(5)
    state, expected = sampler.state(), ids(sampler.take(12))
    resumed = make(tmp_path / "train.jsonl", settings=settings)
    resumed.restore(state)
    assert ids(resumed.take(12)) == expected


def test_by_default_a_row_that_goes_bad_is_skipped_and_counted(make, tmp_path, caplog):
    sampler = make(shuffle=False)
    assert sampler.metrics() == {} and sampler.state()["skipped"] == []
    break_image(tmp_path, 4)
    assert answers(sampler.take(8)) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert sampler.metrics() == {"data/skipped_rows": 1} and sampler.state()["skipped"] == [4]
    for _ in range(3):  # a single row never ends a run, however often it is drawn
        sampler.take(9)
    assert sampler.metrics() == {"data/skipped_rows": 1} and caplog.text.count("another row replaces it") == 1


def test_more_than_one_percent_of_bad_rows_ends_it(make, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"question {i}", "answer": i} for i in range(300)])
    for bad, ends in ((3, False), (4, True)):
        sampler = make(path, shuffle=False)
        load = sampler.loader.load
        broken = range(10, 10 + bad)
        sampler.loader.load = lambda at, load=load, broken=broken: BadRow("a", at, "x") if at in broken else load(at)
        if ends:
            message = (
                r"4 of the 300 rows drawn so far could not be read, more than 1%; the last: a, row 13: x\. Repair the"
            )
            with pytest.raises(DataError, match=rf"{message} data, or set dataset\.on_bad_row=skip"):
                sampler.take(296)
        else:
            assert len(sampler.take(297)) == 297


def test_the_count_continues_after_a_resume(make, tmp_path):
    sampler = make(rows=40, shuffle=False, prompts_ahead=1)
    break_image(tmp_path, 4)
    sampler.take(10)
    state = json.loads(json.dumps(sampler.state()))
    break_image(tmp_path, 20)
    resumed = make(tmp_path / "train.jsonl", shuffle=False, begun=True)
    resumed.restore(state)
    assert resumed.metrics() == {"data/skipped_rows": 1}
    for each in (sampler, resumed):
        assert answers(each.take(5)) == [11, 12, 13, 14, 15]
        with pytest.raises(DataError, match=r"2 of the 22 rows drawn so far"):
            each.take(5)


def test_states_of_older_versions_count_nothing(make):
    sampler = make()
    sampler.take(3)
    state = sampler.state()
    del state["skipped"]
    resumed = make()
    resumed.restore(state)
    assert ids(resumed.take(3)) == ids(sampler.take(3)) and resumed.metrics() == {}


def test_a_validation_that_misses_many_rows_is_an_error(make, tmp_path):
    sampler = make(shuffle=False)
    break_image(tmp_path, 4)
    assert len([answer for batch in sampler.one_pass(4) for answer in answers(batch)]) == 9
    break_image(tmp_path, 2)
    with pytest.raises(DataError, match="2 of the 10 rows"):
        list(sampler.one_pass(4))


def test_when_no_row_can_be_decoded_skip_gives_up(make, tmp_path):
    image_rows(tmp_path, 4)
    sampler = make(tmp_path / "train.jsonl", settings=DataSettings(on_bad_row="skip"))
    for row in range(4):
        break_image(tmp_path, row)
    with pytest.raises(DataError, match="no row can be decoded any more"):
        sampler.take(1)


def test_an_image_that_grew_past_the_limit_is_an_error(make, tmp_path):
    sampler = make(rows=4, shuffle=False, settings=DataSettings(max_prompt_length=20, on_bad_row="error"))
    (tmp_path / "images/2.png").write_bytes(picture_bytes(280, 280))
    with pytest.raises(DataError, match=r"row 3: the image .*2\.png has changed since the run began"):
        sampler.take(4)


def test_an_encoder_that_breaks_is_heard_at_take(make):
    class Broken(FakeEncoder):
        def encode(self, task, media):
            raise RuntimeError("a bug in the encoder")

    with pytest.raises(RuntimeError, match="a bug in the encoder"):
        make(encoder=Broken()).take(1)


# -------------------------------------------------------------------------------------------------------------- the end


def test_close_ends_the_threads(make):
    before = Counter(thread.name.split("_")[0] for thread in threading.enumerate())["mtrl-data"]
    sampler = make()
    sampler.take(2)
    sampler.close()
    sampler.close()
    after = Counter(thread.name.split("_")[0] for thread in threading.enumerate())["mtrl-data"]
    assert after <= before


def test_close_cancels_pending_work(make):
    encoded = []

    class Slow(FakeEncoder):
        def encode(self, task, media):
            time.sleep(0.1)
            encoded.append(task)
            return super().encode(task, media)

    sampler = make(rows=40, encoder=Slow(), prompts_ahead=40)
    sampler.take(1)
    sampler.close()
    assert len(encoded) < 30


@pytest.mark.slow  # 5 s
def test_the_interpreter_ends_without_waiting(tmp_path):
    path = image_rows(tmp_path, 40)
    script = f"""
import sys, time
sys.path.insert(0, {str(__file__.rsplit("/", 1)[0])!r})
from data_helpers import FakeEncoder
from mtrl.data import DataSettings, Sampler, open_dataset
class Slow(FakeEncoder):
    def encode(self, task, media):
        time.sleep(0.5)
        print("encoded", flush=True)
        return super().encode(task, media)
dataset = open_dataset({str(path)!r}, DataSettings(), Slow(), cache_dir=__import__("pathlib").Path({str(tmp_path)!r}))
sampler = Sampler(dataset, Slow(), prompts_ahead=40)
sampler.take(1)
print("taken", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        lines = process.communicate(timeout=60)[0].splitlines()
        assert process.returncode == 0 and "taken" in lines and lines.count("encoded") < 30
