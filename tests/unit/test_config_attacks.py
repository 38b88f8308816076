"""Malicious configurations: each ends quickly with one clear line and never with a traceback."""

import os

import pytest
from config_helpers import get_errors, only_error, write
from helpers import cpu_seconds

from mtrl.cli import main
from mtrl.config import ConfigError, load_config, to_yaml
from mtrl.config.config_error import MAX_ERRORS_SHOWN

KWARGS = "worker.rollout.engine_kwargs"


def free(text: str) -> str:
    """The text as the value of a key that takes anything."""
    return f"worker: {{rollout: {{engine_kwargs: {text}}}}}\n"


def laughs(kind: str, levels: int = 12) -> str:
    """Each anchor contains the previous one nine times: 9^12 values in a kilobyte."""
    lines = ["a0: &a0 {x: 1}"]
    for level in range(levels):
        names = [f"*a{level}"] * 9
        inner = {
            "list": f"[{', '.join(names)}]",
            "mapping": "{" + ", ".join(f"k{i}: {name}" for i, name in enumerate(names)) + "}",
            "merge": f"{{<<: [{', '.join(names)}]}}",
        }
        lines.append(f"a{level + 1}: &a{level + 1} {inner[kind]}")
    return "\n".join(lines) + "\n"


HOSTILE = {
    "an open reference": ("dataset: {system_prompt: 'Pay ${ now'}", "dataset.system_prompt: cannot be used", "\\${"),
    "a path with a sign": ("dataset: {train_files: 'a/${x.jsonl'}", "dataset.train_files: cannot be used", "\\${"),
    "latex": ("dataset: {system_prompt: 'the square ${x}^2$'}", "'x' not found", "write \\${ for a literal ${"),
    "nested references": (f"dataset: {{system_prompt: '{'${' * 3000}a{'}' * 3000}'}}", "reference inside"),
    "an unknown resolver": ("dataset: {system_prompt: '${oc.create:[1]}'}", "oc.create:..} is unknown"),
    "infinity": ("worker: {actor: {optim: {lr: 1e400}}}", "worker.actor.optim.lr: expected a number", "got .inf"),
    "a giant whole number": (f"training: {{max_steps: 1{'0' * 5000}}}", ":1: not valid YAML: a number of 5001 char"),
    "a giant for a float": (f"worker: {{actor: {{optim: {{lr: 1{'0' * 90}}}}}}}", "optim.lr: cannot be used"),
    "a giant in base 16": (f"training: {{max_steps: 0x{'f' * 9000}}}", "a number of 9002 characters"),
    "a giant in base 60": (f"training: {{max_steps: {':'.join(['1'] * 9000)}}}", "a number of 17999 characters"),
    "more than 63 bits": ("training: {max_steps: 9223372036854775808}", "max_steps: cannot be used", "64 bits"),
    "a tag of python": ("dataset: {seed: !!python/object/apply:os.system [ls]}", "the tag !!python/object/"),
    "a tag of nobody": ("dataset: {seed: !foo 3}", "the tag !foo is not supported"),
    "a set": ("dataset: !!set {a}", "the tag !!set is not supported"),
    "a set above all": ("!!set {a}", "the tag !!set is not supported"),
    "a date": ("dataset: {val_files: !!timestamp x}", "the tag !!timestamp is not supported"),
    "no number": ("dataset: {seed: !!int abc}", ":1: not valid YAML: 'abc' cannot be read as !!int"),
    "an empty number": ("dataset: {seed: !!int ''}", ":1: not valid YAML: '' cannot be read as !!int"),
    "a long text for a list": (f"training: {{logger: '{'x' * 5000}'}}", "training.logger: expected a list"),
    "no truth": ("dataset: {shuffle: !!bool xx}", ":1: not valid YAML: 'xx' cannot be read as !!bool"),
    "no null": ("!!null {a: 1}", "not valid YAML: expected a scalar node, but found mapping"),
    "a mapping in itself": ("dataset: &a {x: *a}", ":1: not valid YAML: an anchor contains itself"),
    "a free mapping in itself": (free("&a {x: [*a]}"), "an anchor contains itself"),
    "a list in itself": ("training: {logger: &a [*a]}", "an anchor contains itself"),
    "a merge with itself": ("dataset: &a {<<: *a}", "an anchor contains itself"),
    "a key that is itself": ("dataset: {seed: '${dataset.seed}'}", "Recursive interpolation"),
    "deep lists": (f"dataset: {'[' * 10_000}{']' * 10_000}", "nested more than 50 levels deep"),
    "open lists": ("[" * 10_000, "nested more than 50 levels deep"),
    "deep mappings": ("{a: " * 10_000 + "}" * 10_000, "nested more than 50 levels deep"),
    "a long file": (f"dataset: {{seed: '{'a' * 300_000}'}}", "larger than 256 KiB"),
    "a long value": (f"dataset: {{seed: '{'a' * 3_000}'}}", "dataset.seed: expected a whole number", "aaa..."),
    "a null key": ("null: 3", ":1: not valid YAML: a key must be text, got null; put it in quotes"),
    "a null key inside": (free("{~: 3}"), "a key must be text, got ~; put it in quotes"),
    "a truth as key": ("dataset: {true: 1}", "a key must be text, got true; put it in quotes"),
    "a list as key": ("dataset: {[a]: 1}", "a key must be text, got a sequence"),
    "an empty key": ("'': 3", ":1: '': unknown key"),
    "a key twice": ("dataset: {seed: 1, seed: 2}", "dataset.seed: set twice"),
    "a free key twice": (free("{a: 1, a: 2}"), "engine_kwargs.a: set twice"),
    "a zero byte": ("dataset: {seed: 1}\0", "unacceptable character #x0000"),
    "a written zero byte": ('dataset: {train_files: "a\\0b"}', "train_files: cannot be used: the text contains a zero"),
    "half a character": ('dataset: {train_files: "\\ud800"}', "half a character"),
    "a key that colours": ('"\\x1b[31mred": 1', "'\\x1b[31mred': unknown key"),
    "a key of two lines": ('"a\\nb": 1', "'a\\nb': unknown key"),
    "lists that grow": (laughs("list"), "more than 10000 values with anchors expanded"),
    "mappings that grow": (laughs("mapping"), "more than 10000 values with anchors expanded"),
    "merges that grow": (laughs("merge"), "more than 10000 values with anchors expanded"),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain_seconds(tmp_path_factory):
    path = write(tmp_path_factory.mktemp("plain"), "training: {max_steps: 3}\n")
    return max(cpu_seconds(load_config, path) for _ in range(3))


@pytest.mark.parametrize("text, words", [(text, words) for text, *words in HOSTILE.values()], ids=list(HOSTILE))
def test_a_hostile_file_costs_one_line_and_no_time(text, words, plain_seconds, tmp_path):
    path, errors = write(tmp_path, text), []

    def is_quick():
        errors[:] = []
        return cpu_seconds(lambda: errors.extend(get_errors(path))) < 300 * plain_seconds

    # A slow case is timed again: the first time may collect the garbage of all earlier tests.
    assert is_quick() or is_quick(), "a few times as long as a plain file; these configurations once took hours"
    (error,) = errors
    assert error.startswith(str(path)) and "\n" not in error and len(error) < 600
    for word in words:
        assert word in error


@pytest.mark.parametrize(
    "override, words",
    [
        ("dataset.system_prompt=Pay ${ now", "write \\${ for a literal ${"),
        (f"training.max_steps=1{'0' * 5000}", "the value cannot be read: a number of 5001 characters"),
        ("dataset.seed=!!python/object/apply:os.system [ls]", "the tag !!python/object/apply:os.system"),
        (f"training.logger={'[' * 10_000}", "nested more than 50 levels deep"),
        ("training.logger=&a [*a]", "an anchor contains itself"),
        (f"{KWARGS}=&a {{b: *a}}", "an anchor contains itself"),
        (f"{KWARGS}={{a: 1, a: 2}}", "a: set twice"),
        (f"{KWARGS}={{null: 3}}", "a key must be text, got null"),
        (f"{KWARGS}={{{laughs('list').strip()}}}".replace("\n", ", "), "more than 10000 values"),
        (f"{KWARGS}..a=3", "unknown key"),
        (f"{KWARGS}.=3", "unknown key"),
        ("a" * 100_000 + "=3", "aaa...: unknown key"),
        ("worker." * 2000 + "a=3", "unknown key"),
        ("dataset.train_files=a\0b", "the text contains a zero byte"),
        ("dataset.train_files=\udc80", "half a character"),
        ("--", "command line: --: no value given"),
    ],
)
def test_a_hostile_override_costs_one_line(override, words):
    error = only_error(override)
    assert error.startswith("command line: ") and words in error and "\n" not in error and len(error) < 600


def in_itself(kind: type) -> object:
    value = kind()
    value.append(value) if kind is list else value.update(a=value)
    return value


@pytest.mark.parametrize(
    "overrides, words",
    [
        ({KWARGS: in_itself(dict)}, "or contains itself"),
        ({"training.logger": in_itself(list)}, "or contains itself"),
        ({"dataset": in_itself(dict)}, "unknown key"),
        ({3: 4}, "overrides: 3: a key must be text, got int"),
        ({None: 4}, "overrides: null: a key must be text"),
        ({KWARGS: {3: 4}}, "a key must be text"),
        ({"training.max_steps": 10**5000}, "a whole number of 16610 bits"),
        ({KWARGS: {"a": 10**5000}}, "a whole number of 16610 bits"),
        ({"dataset.seed": b"a"}, "a Python bytes cannot be stored in a configuration"),
        ({"dataset.seed": object()}, "a Python object cannot be stored in a configuration"),
    ],
)
def test_hostile_values_from_python(overrides, words):
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    (error,) = caught.value.errors
    assert words in error and len(error) < 600


@pytest.mark.parametrize("ways", ["${.a%d}${.a%d}", "${worker.rollout.engine_kwargs.a%d}${.a%d}"])
def test_references_that_double_are_not_written_out(ways):
    """Forty of them would be 2^40 values."""
    doubling = {f"{KWARGS}.a{i}": ways % (i + 1, i + 1) for i in range(40)}
    with pytest.raises(ConfigError, match="are too many"):
        load_config(None, {**doubling, f"{KWARGS}.a40": "x"})


def test_some_references_and_escapes_still_work():
    given = {
        f"{KWARGS}.a": {"b": "${..c}", "d": ["${worker.rollout.engine_kwargs.c}"]},
        f"{KWARGS}.c": "${dataset.seed}",
    }
    assert load_config(None, given).worker.rollout.engine_kwargs == {"a": {"b": 42, "d": [42]}, "c": 42}
    prompt = load_config(None, ["dataset.system_prompt=Pay \\${5}, not ${dataset.seed}."]).dataset.system_prompt
    assert prompt == "Pay ${5}, not 42."


def test_a_path_that_is_no_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "it is a pipe, not a file" in get_errors(tmp_path / "pipe.yaml")[0]
    assert "it is a device, not a file" in get_errors("/dev/zero")[0]
    assert get_errors("a\0b")[0].startswith("'a\\x00b': cannot read the file: ")


def test_two_thousand_errors_are_not_all_listed(tmp_path, capsys):
    """And the nearest key is searched only for the listed errors."""
    path = write(tmp_path, "".join(f"key{i}: 1\n" for i in range(2000)))
    assert len(get_errors(path)) == 2000
    assert main(["config", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == MAX_ERRORS_SHOWN + 2 and lines[-1] == f"  and {2000 - MAX_ERRORS_SHOWN} more"


def test_anchors_and_merges_of_a_sane_size_load(tmp_path):
    text = "worker:\n  rollout:\n    engine_kwargs:\n      a: &a {x: [1, 2]}\n      b: *a\n      c: {<<: *a, y: =}\n"
    config = load_config(write(tmp_path, text))
    assert config.worker.rollout.engine_kwargs == {"a": {"x": [1, 2]}, "b": {"x": [1, 2]}, "c": {"x": [1, 2], "y": "="}}
    assert load_config(write(tmp_path, to_yaml(config))) == config
