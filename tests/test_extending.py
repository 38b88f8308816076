"""Runs every example of docs/extending.md as the page describes, and compares its quotes with the files."""

import csv
import json
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers import close, fake_rollouts, make_mask
from PIL import Image
from run_helpers import read_metrics, tiny_arguments, train_arguments
from safetensors.torch import load_file
from tiny_llava import make_tiny_llava
from tiny_models import SHARPER, plain_inputs, prompt, random_rollouts
from transformers import AutoConfig, AutoModelForImageTextToText

from mtrl.cli import main
from mtrl.compose import run as run_module
from mtrl.compose.algorithm import make_credit_rules
from mtrl.config import load_config
from mtrl.embedded.embedded_rows import CONFIG_FILE, MODEL_DIRECTORY
from mtrl.models.backbone import Backbone
from mtrl.models.families import FAMILIES, QwenVLEncoder, load_encoder, register_family
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.tracking.jsonl import read_rows
from mtrl.types import VISION_POOL, Experience, Rewards, Sampling, Signals, Weights
from mtrl.utils.plugins import load_plugin
from pretraining.tiny_checkpoints import make_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("no_curves")

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/extending.md").read_text()
QUOTES = dict(re.findall(r"```python (\S+)\n(.*?)```", PAGE, re.DOTALL))
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^mtrl train .*", PAGE.replace("\\\n", ""), re.MULTILINE)
REPORTED = [  # a metric of each command
    "actor/my_mean_weight", "actor/brevity_bonus", "signal/margin", "reward/ten_lines", "reward/mean_entropy",
    "actor/pg_loss", "actor/clipfrac_low", "actor/blind_loss", "reward/overall",
]  # fmt: skip


@pytest.fixture(autouse=True)
def without_the_example():
    """As if nobody had described the page's example; what a test registers is gone after it."""
    before = dict(FAMILIES)
    del FAMILIES["qwen3_vl_moe"]
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.fixture
def workplace(tmp_path, monkeypatch, few_rows):
    """A working directory with examples/ and the files that its scripts import."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    for folder in ("loggers", "engines", "families"):
        monkeypatch.syspath_prepend(ROOT / "examples" / folder)
    yield tmp_path
    for name in {Path(path).stem for path in QUOTES} & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.fixture
def embedded(workplace, monkeypatch):
    """Writes the configuration of the embedded model, in small sizes and with changes."""

    def write(**changes):
        values = yaml.safe_load(CONFIG_FILE.read_text())
        values["dataset"]["rollout_batch_size"] = values["worker"]["actor"]["global_batch_size"] = 2
        values["training"]["logger"] = []
        for block, settings in changes.items():
            values[block] |= settings
        (workplace / "zoo.yaml").write_text(yaml.safe_dump(values))
        monkeypatch.setattr(run_module, "CONFIG_FILE", workplace / "zoo.yaml")

    return write


def run_snippet(example: str) -> dict:
    """Runs the page's Python block that names this file; returns its definitions."""
    (code,) = [code for code in SNIPPETS if re.search(rf"\b{example}\b", code)]
    names: dict = {}
    exec(compile(code, "extending.md", "exec"), names)
    return names


def responses(name: str) -> dict[int, list[dict]]:
    """The metrics of a run, by step."""
    steps: dict[int, list[dict]] = {}
    for row in read_rows(Path("outputs/mtrl", name, "rollouts.jsonl")):
        steps.setdefault(row["step"], []).append(row)
    return steps


# -------------------------------------------------------------------------------------------------------- the page
OTHER_PAGES = ("rewards", "environments")


@pytest.mark.parametrize("path", QUOTES)
def test_quotes_are_the_files(path):
    assert QUOTES[path] == (ROOT / path).read_text(), f"docs/extending.md quotes another version of {path}"


def test_every_example_is_quoted():
    """But for those of rewards and environments, which have pages of their own."""
    examples = [path for path in (ROOT / "examples").glob("*/*.py") if path.parent.name not in OTHER_PAGES]
    there = {str(path.relative_to(ROOT)) for path in examples}
    assert there < QUOTES.keys() and len(QUOTES) == len(there) + 2, "and two of the rewards"


def test_the_sections_in_their_order():
    assert re.findall(r"^## (.*)", PAGE, re.MULTILINE) == [
        "A credit rule", "A signal", "A reward", "An advantage estimator", "A policy loss", "A loss term", "A logger",
        "An engine", "A model family",
    ]  # fmt: skip


@pytest.mark.parametrize(("command", "reported"), [*zip(COMMANDS, REPORTED, strict=True)], ids=REPORTED)
def test_commands_train(command, reported, workplace):
    """Where the command brings no reward of its own, the tiny model is enough."""
    overrides = shlex.split(command)[2:]
    arguments = train_arguments if "worker.reward." in command else tiny_arguments
    assert main([*arguments(workplace), *overrides, "training.val_freq=-1"]) == 0
    (name,) = [word.partition("=")[2] for word in overrides if word.startswith("training.experiment_name=")]
    rows = read_metrics(workplace / "mtrl" / name)
    assert all(reported in rows[step, False] and rows[step, False]["actor/grad_norm"] > 0 for step in (1, 2))


def test_the_yaml_names_rules(workplace):
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    Path("run.yaml").write_text(text)
    rules = make_credit_rules(load_config("run.yaml", []))
    assert [type(rule).__name__ for rule in rules] == ["EntropyChange", "EntropyChange", "Brevity"]
    assert [rules[0].strength, rules[1].strength, rules[2].strength] == [1.0, 0.5, 0.1]


# ----------------------------------------------------------------------------------------------------------- the rules
def rule(name):
    return load_plugin(f"{ROOT}/examples/credit/filter_and_bonus.py:{name}", "credit rule")


def make_experience(lengths, group=None, width=None):
    rollouts = fake_rollouts(lengths, group=group, width=width)
    rewards = Rewards(torch.zeros(len(lengths)), {}, torch.zeros(len(lengths), dtype=torch.bool))
    return Experience(rollouts, rewards, Signals())


def test_random_filter_keeps_as_many_and_draws_by_its_key():
    keeps = rule("RandomFilter")(top_p=0.4)
    kept = keeps.apply(make_experience([10, 3, 1]), (1, 7))
    assert kept.sum(1).tolist() == [4, 2, 1] and not (kept & ~make_mask(10, 3, 1)).any()  # ceil(0.4 * 3) = 2
    assert torch.equal(kept, keeps.apply(make_experience([10, 3, 1]), (1, 7)))
    assert torch.equal(kept, keeps.apply(make_experience([10, 3, 1], width=14), (1, 7))[:, :10])
    other = [keeps.apply(make_experience([10, 3, 1]), key) for key in ((1, 8), (2, 7))]
    assert not torch.equal(kept, other[0]) and not torch.equal(kept, other[1])


def test_brevity_by_hand():
    # Lengths 1 and 3, mean 2: 0.1 * (1 - 1/2) = 0.05 and 0.1 * (1 - 3/2) = -0.05. A group of one: 0.
    found = rule("Brevity")().apply(make_experience([1, 3, 2], group=[0, 0, 1]), (0, 0))
    close(found, [[0.05] * 3, [-0.05] * 3, [0.0] * 3])
    metrics = rule("Brevity")().metrics(make_experience([1, 3], group=[0, 0]))
    assert metrics == {"actor/brevity_bonus": pytest.approx(0.05)}


# ---------------------------------------------------------------------------------------------------------- the logger
@pytest.mark.parametrize("rules", [True, False], ids=["with rules", "without a rule that needs S"])
def test_the_logger_writes_each_step(rules, workplace, embedded):
    """Without a rule it is the logger alone that has S measured."""
    train_arguments(workplace)  # writes three questions to validate on
    embedded(
        dataset={"val_files": str(workplace / "val.jsonl")},
        optimization={"enable_perception_filtering": rules, "enable_trajectory_reweighting": rules},
    )
    config = run_snippet("csv_logger")["trainer"].config
    assert any("dependency" in rule.needs for rule in make_credit_rules(config)) == rules
    with Path("best.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    said, numbers = responses("logged"), read_metrics(Path("outputs/mtrl/logged"))
    assert [int(row["step"]) for row in rows] == [1, 2]
    for step, row in enumerate(rows, 1):
        best = max(said[step], key=lambda each: each["reward"])
        assert float(row["best_reward"]) == pytest.approx(best["reward"]) and row["best_response"] == best["response"]
        assert float(row["reward/overall"]) == pytest.approx(numbers[step, False]["reward/overall"])
        assert float(row["actor/grad_norm"]) > 0 and float(row["best_dependency"]) > 0


# ---------------------------------------------------------------------------------------------------------- the engine
def test_the_engine_answers_from_its_table(workplace, embedded):
    embedded()
    answers = run_snippet("table_engine")["answers"]
    assert set(responses("table")) == {1, 2}
    red, blue = ([row for row in responses("table")[1] if row["id"].endswith(f":{place}")] for place in (0, 1))
    assert [row["response"] for row in red] == [*answers["Say red."], "red"], "two answers for three samples"
    assert [row["response"] for row in blue] == answers["Say blue."]
    # ten_lines: 0.5 if the right word is anywhere in the response.
    assert [row["reward"] for row in red] == [row["reward"] for row in blue] == [0.5, 0, 0.5]
    assert read_metrics(Path("outputs/mtrl/table"))[1, False]["actor/grad_norm"] > 0


def test_the_engine_implements_the_protocol(workplace):
    from table_engine import TableEngine

    encoder = load_encoder(MODEL_DIRECTORY)
    prompts = [prompt(encoder, "t:0", "Say red."), prompt(encoder, "t:1", "Say blue.")]
    engine = TableEngine(encoder, {"Say red.": ["red", "blue", "green"], "Say blue.": ["blue"]})
    with engine.resident():
        assert engine.generate(prompts, Sampling(n=2)).text == ("red", "blue", "blue", "blue")
        assert engine.generate(prompts[:1], Sampling(n=2, times_sampled={"t:0": 1})).text == ("green", "red"), (
            "it counts on"
        )
        assert engine.generate(prompts[:1], Sampling(n=2, temperature=0, times_sampled={"t:0": 1})).text == (
            "red",
            "red",
        )
        whole, cut = (engine.generate(prompts[:1], Sampling(max_new_tokens=most)) for most in (64, 1))
        assert whole.finish_reason == ("stop",) and cut.finish_reason == ("length",) and cut.tokens.shape == (1, 1)
        assert whole.tokens[0, -1] == encoder.stop_ids[0] and whole.mask.all()
        with pytest.raises(RuntimeError, match="asked to sample at version 3, but the engine holds 0"):
            engine.generate(prompts, Sampling(version=3))
        engine.load(Weights(3, {}))
        assert engine.generate(prompts, Sampling(version=3)).version.tolist() == [3, 3]
        with pytest.raises(KeyError, match=r"no answer to 'Say pink\.'"):
            engine.generate([prompt(encoder, "t:2", "Say pink.")], Sampling(version=3))


# ---------------------------------------------------------------------------------------------------------- the family
@pytest.fixture
def experts(workplace):
    """A tiny Qwen3-VL with experts: the tiny Qwen3-VL's files, and another model."""
    directory = make_tiny_checkpoint(workplace / "my_checkpoint", "qwen3_vl")
    dense = AutoConfig.from_pretrained(directory)
    sparse = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "model_type": None}
    config = AutoConfig.for_model(
        "qwen3_vl_moe",
        text_config=dense.text_config.to_dict() | sparse,
        vision_config=dense.vision_config.to_dict() | {"model_type": None},
        tie_word_embeddings=True,
        **{f"{name}_token_id": getattr(dense, f"{name}_token_id") for name in MARKS},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SHARPER if parameter.dim() > 1 else 1)
    model.save_pretrained(directory)
    return directory


MARKS = ("image", "video", "vision_start", "vision_end")


def test_a_family_is_not_described_until_it_is_registered(experts):
    with pytest.raises(ValueError, match="'qwen3_vl_moe', which is not described, and its Processor cannot be loaded"):
        load_encoder(experts)
    encoder = known(experts)
    found = prompt(encoder, "t:0", "which is red?", [(2, 3), (2, 2)])
    text = "".join(encoder.decode_tokens(found.engine_ids))
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"user\nPicture 1: {mark} andPicture 2: {mark} andwhich is red?" in text
    assert int((found.token_pool == VISION_POOL).sum()) == 2 * 3 + 2 * 2 == len(found.ids) - len(found.engine_ids) + 2
    sizes = [array.shape[:2] for array in found.media]
    assert encoder.length(found.task, sizes) == len(found.ids)
    plain = QwenVLEncoder(encoder.tokenizer, AutoConfig.from_pretrained(experts), encoder.image_settings)
    assert encoder.fingerprint() != plain.fingerprint(), "or caches would mix the two"


def test_the_seams_agree_with_transformers_on_it(experts):
    encoder = known(experts)
    prompts = [
        prompt(encoder, f"t:{i}", "which colour", sizes) for i, sizes in enumerate([[(3, 5)], [], [(2, 2), (1, 3)]])
    ]
    rollouts = random_rollouts(prompts, [0, 0, 1, 2], [3, 5, 4, 2])
    forward = Forward(Backbone(load_model(experts)), encoder)
    assert not forward.backbone.can_share_prefix, "not verified for the family"
    found, plain = forward.signals(rollouts).old_logprobs, AutoModelForImageTextToText.from_pretrained(experts).eval()
    for row, place in enumerate(rollouts.group.tolist()):
        response = rollouts.tokens[row, rollouts.mask[row]]
        with torch.no_grad():
            logits = plain(**plain_inputs(encoder, prompts[place], response)).logits[
                0, len(prompts[place].ids) - 1 : -1
            ]
        logits[:, list(encoder.forbidden_ids)] = -torch.inf
        expected = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        close(found[row, : len(response)], expected, atol=1e-5)


def write_red_rows():
    Image.fromarray(np.full((64, 80, 3), (200, 30, 30), np.uint8)).save("red.png")
    row = {"prompt": "<image>which colour?", "images": ["red.png"], "answer": "red"}
    Path("train.jsonl").write_text(2 * (json.dumps(row) + "\n"))


def test_the_family_trains(experts, workplace):
    write_red_rows()
    config = {
        "dataset": {"rollout_batch_size": 2, "max_response_length": 8, "min_pixels": 4096, "max_pixels": 4096},
        "training": {"max_steps": 2, "logger": []},
        "optimization": {"enable_perception_filtering": True},
        "worker": {
            "actor": {"global_batch_size": 2, "fsdp": {"mixed_precision_dtype": "fp32"}},
            "rollout": {"n": 2},
            "reward": {"functions": ["examples/rewards/ten_lines.py"], "num_cpus": 1},
        },
    }
    Path("run.yaml").write_text(json.dumps(config))
    run_snippet("qwen3_vl_moe")
    trained = Path("outputs/mtrl/run/checkpoints/step_2")
    _, report = AutoModelForImageTextToText.from_pretrained(trained, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert type(load_encoder(trained)).__name__ == "NumberedEncoder"


def known(checkpoint):
    register_family(str(checkpoint), import_module("qwen3_vl_moe").NumberedEncoder)
    return load_encoder(checkpoint)


# -------------------------------------------------------------------------------------------- a family in one file
@pytest.mark.slow  # 6 s
def test_llava_trains_with_a_frozen_tower_through_the_key(workplace):
    """The YAML of the example's docstring, with a tiny checkpoint. The projector learns, the tower stays."""
    before = load_file(make_tiny_llava(workplace / "llava", layers=2, hidden=32) / "model.safetensors")
    write_red_rows()
    (text,) = re.findall(r"\n(worker:\n.*?)\"\"\"", (ROOT / "examples/families/llava.py").read_text(), re.DOTALL)
    Path("run.yaml").write_text(text.replace("llava-hf/llava-1.5-7b-hf", "llava"))
    words = (
        "dataset.train_files=train.jsonl dataset.rollout_batch_size=2 dataset.max_response_length=8 training.logger=[] "
        "training.max_steps=2 worker.actor.global_batch_size=2 worker.actor.fsdp.mixed_precision_dtype=fp32 "
        "worker.rollout.n=2 worker.reward.functions=[examples/rewards/ten_lines.py,mean_length.py] "
        "worker.reward.num_cpus=1 optimization.enable_perception_filtering=true training.record_attention_maps=true "
        "worker.actor.model.freeze_vision_tower=true worker.actor.optim.lr=1e-3 worker.actor.optim.warmup_steps=0"
    )
    Path("mean_length.py").write_text("def mean_length(data):\n    return sum(data['response_token_ids']) % 7 / 7\n")
    assert main(["train", "run.yaml", *words.split()]) == 0
    trained = Path("outputs/mtrl/run/checkpoints/step_2")
    after = load_file(trained / "model.safetensors")
    changed = {name.split(".layers.")[0] for name in before if not torch.equal(before[name], after[name])}
    print(changed, sorted(before)[:5])
    assert not any("vision_tower" in name for name in changed)
    assert any("multi_modal_projector" in name for name in changed), "it is no part of the tower"
    assert type(load_encoder(trained)).__name__ == "LlavaEncoder"
