"""`mtrl doctor` and `mtrl data run.yaml` try real rows through template and encoder."""

import pytest
from data_helpers import picture_bytes, write_jsonl

from mtrl.cli import main
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY

pytestmark = pytest.mark.usefixtures("fake_passes")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "cache"))

    def message(command, rows, template="{{ content }}", *overrides):
        write_jsonl(tmp_path / "train.jsonl", rows)
        (tmp_path / "format.jinja").write_text(template)
        (tmp_path / "run.yaml").write_text(
            "dataset: {train_files: train.jsonl, format_prompt: format.jinja, min_pixels: 1, max_pixels: 4096}\n"
            f"worker: {{actor: {{model: {{model_path: {MODEL_DIRECTORY}}}}}}}\n"
        )
        return main([command, "run.yaml", *overrides]), capsys.readouterr().out

    return message


GOOD = [{"prompt": f"question {i}", "answer": "A"} for i in range(9)]


def test_rows_that_are_fine(run):
    code, said = run("doctor", GOOD)
    assert code == 0 and "3 rows of train tried, up to their tokens" in said and "It can run here." in said
    code, said = run("data", GOOD)
    assert code == 0 and "to train on" in said and "question 4" in said and "Missing" not in said


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        (GOOD, "{{ content }} {{ hint.upper() }}", "the format prompt fails on it (UndefinedError: 'hint'"),
        ([*GOOD[:4], {"prompt": "<image>x", "images": "gone.png"}, *GOOD[5:]], "{{ content }}", "row 5: the image "),
        ([*GOOD[:4], {"prompt": "x", "photo": {"path": "a.png"}}, *GOOD[5:]], "{{ content }}", "image_key=photo"),
        ([{"prompt": "a", "truth": "A"}], "{{ content }}", "set dataset.answer_key to the column that holds it"),
        ([*GOOD[:4], {"prompt": "a <|image_pad|>"}, *GOOD[5:]], "{{ content }}", "row 5: "),
    ],
)  # fmt: skip
def test_rows_that_fail(run, rows, template, message):
    code, said = run("data", rows, template)
    assert code == 1 and message in said


def test_doctor_reports_rows_that_fail(run):
    code, said = run("doctor", GOOD, "{{ content }} {{ hint.upper() }}")
    assert code == 2 and "It can run here" not in said
    assert any("PROBLEM" in line and "the format prompt fails on it" in line for line in said.splitlines())


def test_rows_that_are_skipped_anyway_are_a_note(run):
    rows = [*GOOD[:4], {"prompt": ""}, *GOOD[5:]]
    code, said = run("doctor", rows, "{{ content }}", "dataset.on_bad_row=skip")
    assert code == 0 and "row 5: the prompt is empty" in said and "It can run here." in said


def test_a_damaged_image_is_decoded(run, tmp_path):
    """Its header and its end are whole, so the scan alone passes it."""
    whole = picture_bytes(64, 64)
    (tmp_path / "a.png").write_bytes(
        whole[:200] + b"\xff" * (len(whole) - 240) + whole[-40:]
    )  # header and end are whole
    code, said = run("doctor", [{"prompt": "x", "images": "a.png", "answer": "A"}])
    assert code == 2 and "a.png is truncated or damaged" in said


@pytest.mark.parametrize("name", ["run.yaml", "mtrl:zoo/tprl_full"])
def test_data_of_a_configuration(run, name, capsys, few_rows):
    run("data", GOOD)
    assert main(["data", name]) == 0
    assert "dataset.train_files: " in capsys.readouterr().out
