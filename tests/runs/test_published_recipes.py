"""Every YAML of a published rule in docs/algorithms.md trains as it stands there, on rows with and without an image.
This file adds sizes, data, a reward and a model."""

import math
import re

import pytest
import torch
import yaml
from helpers import slow_but
from run_helpers import read_metrics
from sources import ROOT
from tiny_models import checkpoint

from mtrl.algorithms.credit import assign
from mtrl.compose.run import build, configure
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY, SIZES
from mtrl.protocols import Tracker
from mtrl.view.response_html import view_responses

PAGE = (ROOT / "docs/algorithms.md").read_text()
SMALL = (
    "training.max_steps=3", "training.val_freq=-1", "training.logger=[]", "dataset.rollout_batch_size=2",
    "dataset.min_pixels=3136", "dataset.max_pixels=3136", "dataset.max_prompt_length=96",
    "dataset.max_response_length=8", "worker.rollout.n=4", "worker.reward.num_cpus=1", "worker.reward.timeout_s=300",
    "worker.actor.global_batch_size=1", "worker.actor.fsdp.mixed_precision_dtype=fp32",
)  # fmt: skip
REWARD = '''def score(data):
    """Nearly always differs within a group, and is 0 for some of it."""
    return max(0, sum(data["response_token_ids"]) % 5 - 1) / 3
'''
NAMES = ("advantage", "keep_mask", "token_weight", "response_weight")


def subject(recipe):
    """The rule, loss term or key that a YAML of the page is about; None if it is about nothing published."""
    optimization = recipe.get("optimization", {})
    for spec in (*optimization.get("credit", ()), *optimization.get("loss_terms", ())):
        return spec if isinstance(spec, str) else spec["name"]
    return "noisy_half" if recipe.get("worker", {}).get("rollout", {}).get("noisy_half") else None


BLOCKS = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
RECIPES = {name: text for text in BLOCKS if (name := subject(yaml.safe_load(text)))}


def section(title):
    return re.split(r"\n##+ ", PAGE.split(f"# {title}\n")[1])[0]


def test_every_published_rule_has_a_recipe():
    rules = re.findall(r"^\| [\w-]+, `(?:worker\.rollout\.)?(\w+)` \|", section("Published rules"), re.MULTILINE)
    terms = re.findall(r"^\| `(\w+)` \(", section("Loss terms"), re.MULTILINE)
    assert len(rules) > 5 and terms and {*rules, *terms} == RECIPES.keys()


class Watch(Tracker):
    """Keeps the responses of every step, with their credit."""

    def __init__(self):
        self.steps = []

    def rollouts(self, step, experience):
        self.steps.append(experience)


@pytest.fixture
def mixed_data(tmp_path, monkeypatch):
    """A question about a picture and one without: both in every step, unless a filter replaces one."""
    monkeypatch.setitem(SIZES, "train", 1)
    (tmp_path / "text.jsonl").write_text('{"prompt": "Say red.", "answer": "red"}\n')
    (tmp_path / "rewards.py").write_text(REWARD)
    files = f"dataset.train_files='zoo@train,{tmp_path / 'text.jsonl'}'"
    return files, f"worker.reward.functions=[{tmp_path / 'rewards.py'}:score]", f"training.output_dir={tmp_path}"


def is_plain(experience, rows):
    """Whether these responses have the credit that they have without any rule."""
    credit, plain = experience.credit, assign((), experience, (0, 0))
    return all(torch.equal(getattr(credit, name)[rows], getattr(plain, name)[rows]) for name in NAMES)


@pytest.mark.parametrize("model", slow_but(["zoo", "qwen3_vl", "qwen3_5", "qwen2_5_vl"], "zoo", "qwen3_vl", "qwen3_5"))
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains(name, model, mixed_data, tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPES[name])
    folder = MODEL_DIRECTORY if model == "zoo" else checkpoint(model)
    words = (*SMALL, *mixed_data, f"worker.actor.model.model_path={folder}")
    config, _ = configure(tmp_path / "recipe.yaml", words)
    watch = Watch()
    run = build(config, trackers=[watch])
    before = {key: weight.clone() for key, weight in run.loaded.model.state_dict().items()}
    run.train()

    rows = [row for (_, validated), row in read_metrics(run.directory).items() if not validated]
    assert [row["step"] for row in rows] == [1, 2, 3] and any(row["actor/grad_norm"] > 0 for row in rows)
    losses = {"pg_loss", *(f"{term.name}_loss" for term in run.loop.spec.loss.terms)}
    losses |= {"divergence_loss"} if config.optimization.use_divergence_loss else set()
    assert all({f"actor/{each}" for each in losses} < row.keys() for row in rows)
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    after = run.loaded.model.state_dict()
    assert all(weight.isfinite().all() for weight in after.values())
    assert any(not torch.equal(weight, before[key]) for key, weight in after.items())

    rules, steps = run.loop.spec.credit, watch.steps
    assert len(rules) == len(config.optimization.credit), "no other rule takes part"
    visual = torch.cat([step.rollouts.visual for step in steps])
    assert visual.any() and not visual.all(), "rows with and without an image"
    if rules:
        (rule,) = rules
        for signal in rule.needs.names:
            assert view_responses(run.directory, signal=signal).signal, "it is recorded, and a colour of the viewer"
        measured = {*rule.needs.names} - {"old_logprobs", "entropy"}
        assert {f"signal/{signal}" for signal in measured} < rows[0].keys(), "what it measured has metrics"
        assert not all(is_plain(step, slice(None)) for step in steps), "the rule takes effect"
    if not rules or rule.needs:  # ktae reads no image, so that it holds for all rows
        assert all(is_plain(step, ~step.rollouts.visual) for step in steps)
    if name == "noisy_half":
        assert all(torch.equal(step.rollouts.noised.sum(), step.rollouts.visual.sum() // 2) for step in steps)
        assert not any((step.rollouts.noised & ~step.rollouts.visual).any() for step in steps)
