"""`mtrl doctor MODEL --parity`: the checks of a family on a user's weights."""

import re

import pytest

from mtrl import cli
from mtrl.commands import doctor_parity
from mtrl.commands.completion import candidates
from mtrl.models.families import FAMILIES
from mtrl.models.family_checks import CHECKS
from pretraining.tiny_checkpoints import make_tiny_checkpoint

CHEAP = ("prompt", "forward", "sharing", "adapters")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", layers=2)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(doctor_parity, "CHECKS", {name: CHECKS[name] for name in CHEAP})


@pytest.mark.usefixtures("few")
def test_each_check_has_a_row(model, capsys):
    assert cli.main(["doctor", str(model), "--parity"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"million parameters, in fp32 on (cpu|cuda)\n", said)
    assert re.findall(r"^  (\S+) +\d\.\de[+-]\d\d +\d\.\de-\d\d  ok", said, re.MULTILINE) == list(CHEAP)
    assert said.endswith("No check failed.\n")


@pytest.mark.slow  # all checks of an embedded model and a bf16 one: 20 s
def test_an_embedded_model_passes(capsys, model):
    assert cli.main(["doctor", "zoo", "--parity"]) == 0
    assert capsys.readouterr().out.count("  ok") == len(CHECKS)
    assert cli.main(["doctor", "--parity", "--dtype", "bf16", f"worker.actor.model.model_path={model}"]) == 0
    assert "in bf16 on" in capsys.readouterr().out


@pytest.mark.usefixtures("few")
def test_a_family_from_outside_that_reads_other_text_fails(tmp_path, monkeypatch, capsys):
    """The family is the user's file, and the status says that a check failed."""
    monkeypatch.setitem(FAMILIES, "qwen2_vl", FAMILIES["qwen2_vl"])  # puts it back afterwards
    model, file = make_tiny_checkpoint(tmp_path / "model", "qwen2_vl"), tmp_path / "family.py"
    file.write_text(
        "from mtrl.models.families import QwenVLEncoder, QwenVLFamily\n"
        "class Mirror(QwenVLEncoder):\n"
        "    def render(self, messages):\n"
        "        return super().render(messages).replace('left', 'right')\n"
        "class Own(QwenVLFamily):\n"
        "    encoder = Mirror\n"
        "    shares_prefix = False\n"
    )
    status = cli.main(["doctor", str(model), "--parity", f"worker.actor.model.encoder={file}:Own"])
    said = capsys.readouterr().out
    assert status == 1 and re.search(r"  prompt .*FAILED", said), said
    assert "skipped: the family does not share prompts" in said
    assert said.endswith("PROBLEM  this model differs from transformers: prompt\n")


@pytest.mark.usefixtures("few")
def test_checks_without_room_are_skipped(model, monkeypatch, capsys):
    monkeypatch.setattr(doctor_parity, "SPARE", 0.0)
    assert cli.main(["doctor", str(model), "--parity", "--dtype", "fp32"]) == 0
    assert re.search(r"  adapters +- +-  skipped: it needs 0\.0 GiB, 0\.0 are free", capsys.readouterr().out)


def test_float32_if_it_fits():
    assert doctor_parity.choose_dtype(10**9, 8 * 10**9, "bf16") == "fp32"
    assert doctor_parity.choose_dtype(10**9, 7 * 10**9, "bf16") == "bf16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/at/all", "--parity"], "nowhere/at/all is no"),
        (["zoo", "--parity", "--try"], "leave out --try and --gpu"),
        (["--dtype", "bf16"], "it is for --parity"),
        (["zoo", "--parity", "--dtype", "int8"], "invalid choice"),
    ],
)
def test_what_cannot_be_checked_is_said(arguments, message, capsys):
    assert cli.main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_options_complete():
    assert candidates("mtrl doctor zoo --pa") == ["--parity"]
    assert candidates("mtrl doctor zoo --parity --dtype ") == ["fp32", "bf16", "fp16"]
