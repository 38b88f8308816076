"""`base:` in a YAML: what is inherited, what wins, what is reset, and what is refused."""

import pytest

from mtrl.cli import main
from mtrl.config import Config, ConfigError, load_config, to_yaml
from mtrl.config.load_config import find_origins


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def errors(path, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.errors


def test_keys_merge_lists_replace_and_overrides_win(write):
    write(
        "a.yaml",
        "dataset: {seed: 1, max_prompt_length: 10}\nworker: {reward: {functions: [accuracy, format], weights: [1, 2]}}",
    )
    file = write(
        "b.yaml", "base: a.yaml\ndataset: {seed: 2}\nworker: {reward: {functions: [accuracy], weights: [3]}}\n"
    )
    config = load_config(file, ["dataset.shuffle=false"])
    assert (config.dataset.seed, config.dataset.max_prompt_length, config.dataset.shuffle) == (2, 10, False)
    assert (config.worker.reward.functions, config.worker.reward.weights) == (("accuracy",), (3.0,))


def test_several_in_order_and_through_several_files(write):
    write("deep/first.yaml", "dataset: {seed: 1, val_batch_size: 1, video_max_frames: 1}")
    write("deep/second.yaml", "base: first.yaml\ndataset: {val_batch_size: 2, video_max_frames: 2}")
    write("third.yaml", "dataset: {video_max_frames: 3}")
    file = write("run.yaml", "base: [deep/second.yaml, third]\n")  # the suffix may be left out
    dataset = load_config(file).dataset
    assert (dataset.seed, dataset.val_batch_size, dataset.video_max_frames) == (1, 2, 3)


def test_a_file_inherited_twice_counts_once_at_its_first_place(write):
    write("root.yaml", "dataset: {seed: 1}")
    write("left.yaml", "base: root.yaml\ndataset: {seed: 2}")
    write("right.yaml", "base: root.yaml\ndataset: {shuffle: false}")
    dataset = load_config(write("run.yaml", "base: [left.yaml, right.yaml]")).dataset
    assert (dataset.seed, dataset.shuffle) == (2, False)


def test_free_form_mappings_merge_and_null_in_them_is_a_value(write):
    write("a.yaml", "worker: {rollout: {engine_kwargs: {x: 1, deep: {y: 2, z: 3}, dotted.name: 1}}}")
    file = write("b.yaml", "base: a.yaml\nworker: {rollout: {engine_kwargs: {deep: {z: 4}, w: null}}}")
    expected = {"x": 1, "deep": {"y": 2, "z": 4}, "dotted.name": 1, "w": None}
    assert load_config(file).worker.rollout.engine_kwargs == expected
    replaced = load_config(file, {"worker.rollout.engine_kwargs": {"only": 1}})  # an override replaces, as ever
    assert replaced.worker.rollout.engine_kwargs == {"only": 1}


def test_null_resets_a_key_a_section_and_a_mapping(write):
    write(
        "a.yaml",
        "dataset: {seed: 7, shuffle: false}\nworker: {actor: {optim: {lr: 0.5}}, rollout: {engine_kwargs: {x: 1}}}\n"
        "optimization: {trajectory_scaling_max: 3.0}\n",
    )
    file = write(
        "b.yaml",
        "base: a.yaml\ndataset:\n  seed: null\nworker:\n  actor: null\n  rollout: {engine_kwargs: ~}\n"
        "optimization: {trajectory_scaling_max: null}\n",
    )
    config = load_config(file)
    assert (config.dataset.seed, config.dataset.shuffle) == (Config().dataset.seed, False)
    assert config.worker.actor == Config().worker.actor and config.worker.rollout.engine_kwargs == {}
    assert config.optimization.trajectory_scaling_max is None, "null is a value of this key: no cap"


def test_an_empty_section_resets_nothing_and_an_empty_value_is_an_error(write):
    write("a.yaml", "worker: {actor: {optim: {lr: 0.5}}}")
    file = write("b.yaml", "base: a.yaml\nworker:\n  actor:\n    # all keys are commented out\n")
    assert load_config(file).worker.actor.optim.lr == 0.5
    assert "expected a whole number" in errors(write("c.yaml", "base: a.yaml\ndataset:\n  seed:\n"))[0]
    assert "expected a whole number" in errors(write("d.yaml", "dataset:\n  seed: null\n"))[0], "there is no base"


def test_paths_are_relative_to_the_file_that_sets_them(write, tmp_path):
    write("shared/rows.jsonl", "{}")
    write("shared/a.yaml", "dataset: {train_files: rows.jsonl}")
    config = load_config(write("b.yaml", "base: shared/a.yaml"))
    assert config.dataset.train_files == str(tmp_path / "shared/rows.jsonl")


@pytest.mark.parametrize("name", ["mtrl:zoo/dapo", "experiments/zoo/dapo.yaml", "experiments/zoo/dapo"])
def test_a_packaged_base(write, name):
    assert load_config(write("run.yaml", f"base: {name}\n")) == load_config("mtrl:zoo/dapo")


def test_a_neighbour_comes_before_a_packaged_file_but_not_with_the_prefix(write):
    write("zoo/dapo.yaml", "dataset: {seed: 123}")
    assert load_config(write("a.yaml", "base: zoo/dapo.yaml")).dataset.seed == 123
    assert load_config(write("b.yaml", "base: mtrl:zoo/dapo")).dataset.seed != 123


def test_cycles_name_the_file_the_line_and_the_way(write):
    write("a.yaml", "# one\nbase: b.yaml\n")
    file = write("b.yaml", "base: a.yaml\n")
    (error,) = errors(file)
    assert "a.yaml:2: base: the file inherits from itself: " in error and error.count("b.yaml") == 2
    (error,) = errors(write("self.yaml", "dataset: {seed: 1}\nbase: self.yaml"))
    assert "self.yaml:2: base: the file inherits from itself" in error


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("nowhere.yaml", "nowhere.yaml: no such file next to this one, nor a packaged one"),
        (300 * "x", "no such file next to this one, nor a packaged one"),
        ("~nobody-of-this-name/a.yaml", "no such file next to this one, nor a packaged one"),
        ("experiments/dapoo", "did you mean experiments/dapo.yaml"),
        ("7", "expected the name of a file, or a list of names; got"),
        ("[]", "expected the name of a file"),
        ("null", "expected the name of a file"),
        ("[a.yaml, 3]", "expected the name of a file"),
        ("{a: b}", "expected the name of a file"),
    ],
)
def test_a_base_that_is_none_is_an_error_with_its_line(write, base, message):
    write("a.yaml", "")
    (error,) = errors(write("run.yaml", f"dataset: {{seed: 1}}\nbase: {base}\n"))
    assert "run.yaml:2: base: " in error and message in error


def test_errors_of_a_base_name_its_own_file_and_line(write):
    write("a.yaml", "dataset:\n  sede: 1\n  shuffle: maybe\n")
    found = errors(write("run.yaml", "base: a.yaml\nworker: {rollout: {m: 1}}\n"))
    assert any("a.yaml:2: dataset.sede: unknown key; did you mean dataset.seed?" in error for error in found)
    assert any("a.yaml:3: dataset.shuffle: expected" in error for error in found)
    assert any("run.yaml:2: worker.rollout.m: unknown key" in error for error in found)


def test_a_run_saves_the_resolved_configuration(write):
    config = load_config(write("run.yaml", "base: mtrl:zoo/tprl_full\ndataset: {seed: 5}"))
    saved = write("saved.yaml", to_yaml(config))
    assert "base" not in saved.read_text() and load_config(saved, saved=True) == config


def test_origins_are_the_last_file_that_sets_a_key(write):
    write("a.yaml", "dataset:\n  seed: 1\n  shuffle: false\n  val_batch_size: 2\n")
    file = write("run.yaml", "base: a.yaml\ndataset:\n  seed: 2\n  val_batch_size: null\n")
    origins = find_origins(file, ["dataset.min_pixels=5"])
    assert origins.keys() == {"dataset.seed", "dataset.shuffle", "dataset.min_pixels"}
    assert origins["dataset.seed"].endswith("run.yaml:3") and origins["dataset.shuffle"].endswith("a.yaml:3")
    assert origins["dataset.min_pixels"] == "command line"


def test_the_command_prints_origins_as_a_file_that_loads(write, tmp_path, capsys):
    write("a.yaml", "dataset: {seed: 1}\nworker: {rollout: {engine_kwargs: {x: '\\${y}'}}}")
    file = write("run.yaml", "base: a.yaml\n")
    assert main(["config", str(file), "--origin", "dataset.shuffle=false"]) == 0
    lines = capsys.readouterr().out.splitlines()
    comments = dict(line.split(": ", 1) for line in lines)
    assert comments["dataset.seed"].split() == ["1", "#", f"{tmp_path / 'a.yaml'}:1"]
    assert comments["dataset.shuffle"].split() == ["false", "#", "command", "line"]
    assert comments["dataset.val_files"].split() == ["''", "#", "default"]
    printed = write("printed.yaml", "\n".join(lines))
    assert load_config(printed) == load_config(file, ["dataset.shuffle=false"])
