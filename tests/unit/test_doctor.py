"""`mtrl doctor`: the memory formula against numbers by hand and a real process, and what it says of machine and run."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import checkpoint, plain_model

from mtrl import cli, machine
from mtrl.commands import doctor, installed
from mtrl.commands.doctor import GIB
from mtrl.commands.installed import Device, Feature
from mtrl.commands.memory import Plan, estimate
from mtrl.config import load_config
from mtrl.models.size import LayerSize, ModelSize, size_of
from mtrl.models.tiny import TINY_FAMILIES
from mtrl.workers.micro_batches import MicroBatching

ROOT = Path(__file__).resolve().parents[2]
MODEL = ModelSize(
    1000, 400, 10, LayerSize(3, 8, 16, 4, 2), LayerSize(2, 6, 12, 6, 3), patch=2, merge=2, patch_numbers=24,
    mlp_parameters=300, matrices=5,
)  # fmt: skip
PLAN = Plan(
    weight_bytes=4, compute_bytes=4, reference=False, train_vision=True, checkpointing=False, prompts_per_step=2,
    responses_per_prompt=3, prompt_tokens=5, response_tokens=7, max_pixels=40, update=MicroBatching(),
    probe=MicroBatching(),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- formula
def test_what_is_held():
    assert estimate(MODEL, PLAN).held == {"weights": 4000, "moments of Adam": 8000}
    frozen = estimate(MODEL, replace(PLAN, train_vision=False, reference=True, weight_bytes=2))
    judged = estimate(MODEL, replace(PLAN, judge_parameters=50, compute_bytes=2))
    assert judged.held["weights of the reward model"] == 100
    assert frozen.held == {"weights": 2000, "weights of the reference": 2000, "moments of Adam": 2 * 600 * 2}
    on_gpu = estimate(MODEL, replace(PLAN, on_gpu=True))  # a MiB for each matrix: of the weights and two moments
    assert on_gpu.held["rests of blocks, workspaces"] == (3 * 5 + 64) << 20
    assert on_gpu.phases["update"]["gradients"] == 4000 + (5 << 20)


TOKENS = 5 + 3 * 7  # of a group, which is a pass
INSIDE = 2 * 8 * 4 + (10 * 8 + 4 * 4 + 4 * 16) * 4  # kept for a token in a layer of the language model: 704
THROUGH = 8 * 4 * 4 + 8 * 8 * 4 + 2 * 2 * 4 + 6 * 8  # stream, rotation, sines and cosines, ids: 448
OF_TOWER = 6 * 4 * 4 + 6 * 8 * 4 + 2 * 3 * 4 + 6 * 8  # the same for a patch in the tower: 360


def test_sampling_by_hand():
    found = estimate(MODEL, PLAN)
    cached = 2 * 3 * 4 * 4  # keys and values, layers, width, bytes: 96
    assert found.phases["see"] == {  # 40 pixels are 10 patches
        "pixels": 2 * 10 * 24 * 8,
        "a layer of the vision tower": 2 * 10 * OF_TOWER,
    }
    assert found.phases["read"] == {
        "pixels": 2 * 10 * 24 * 4,
        "keys and values": 2 * 5 * cached,
        "who sees whom": 2 * 5 * 5 * 5,
        "features of images": 2 * 5 * 8 * 4,
        "a layer": 2 * 5 * THROUGH,
    }
    assert found.phases["decode"] == {
        "keys and values": 6 * 12 * cached,
        "a layer of them as it grows": 6 * 12 * cached // 3,
        "logits": 3 * 6 * 10 * 4,
    }


def test_a_probe_by_hand():
    one, two = (estimate(MODEL, replace(PLAN, views=views)).phases["probe"] for views in (1, 2))
    assert one == {
        "who sees whom": TOKENS * TOKENS * 5,
        "features of images": 2 * 2 * 8 * 4,
        "a layer": TOKENS * THROUGH,
    }
    assert two == {name: 2 * size for name, size in one.items()} | {"features of images": 2 * 5 * 8 * 4}
    of_blocks = estimate(MODEL, replace(PLAN, packed=True)).phases["probe"]
    assert of_blocks == {name: size for name, size in one.items() if name != "who sees whom"}
    words = estimate(replace(MODEL, vocabulary=1000), PLAN).phases["probe"]
    assert words == {"hidden states": TOKENS * 8 * 12, "logits of a chunk": 3 * 3 * 7 * 1000 * 4}


def test_an_update_by_hand():
    """Where the backward pass begins, in the second of two passes."""
    found = estimate(MODEL, PLAN)
    merger = 6 * (4 + 4 * 4)
    assert found.phases["update"] == {
        "gradients": 4000,
        "activations of the language model": TOKENS * 3 * INSIDE,
        "activations of the vision tower": 10 * (24 * 4 + 2 * (2 * 6 * 4 + (10 * 6 + 4 * 6 + 4 * 12) * 4) + merger),
        "who sees whom": TOKENS * TOKENS * (1 + 3 * 4),  # each layer makes numbers of it
        "the last norm, hidden states": TOKENS * 8 * 20,
        "gradient of the output matrix": 10 * 8 * 4,
        "a chunk of positions": 2 * 3 * 7 * 10 * 4,
    }
    assert found.peak_bytes == 12000 + sum(found.phases["update"].values())


def test_a_single_pass_has_gradients_only_at_its_end():
    alone = replace(PLAN, prompts_per_step=1)
    assert alone.later_tokens == 0 and "gradients" not in estimate(MODEL, alone).phases["update"]
    light = estimate(replace(MODEL, parameters=100_000), alone).phases["update"]
    assert set(light) == {
        "gradients", "gradient of the output matrix", "activations of the vision tower", "who sees whom", "a layer",
    }  # fmt: skip
    assert light["a layer"] == TOKENS * (INSIDE + 2 * 16 * 4)


def test_checkpointing_keeps_what_enters_the_layers():
    found = estimate(MODEL, replace(PLAN, checkpointing=True)).phases["update"]
    assert found["activations of the language model"] == TOKENS * 3 * 8 * 4
    assert found["a layer"] == TOKENS * (INSIDE + 2 * 16 * 4)
    assert found["who sees whom"] == TOKENS * TOKENS * 5
    assert found["gradient of the output matrix"] == 320  # it waits for that of the embeddings, which are the same
    apart = estimate(replace(MODEL, tied=False), replace(PLAN, checkpointing=True)).phases["update"]
    assert "gradient of the output matrix" not in apart


def test_narrow_products_keep_copies_of_the_weights():
    narrow = replace(PLAN, compute_bytes=2)
    found, compiled = (estimate(MODEL, each).phases for each in (narrow, replace(narrow, compiled=True)))
    name = "narrow copies of the weights"
    assert found["update"][name] == 2 * 1000
    assert (found["see"][name], found["read"][name]) == (2 * 400, 2 * (600 - 80))
    assert found["decode"][name] == 2 * (600 - 80) + 2 * 80, "and of the output matrix"
    assert compiled["read"][name] == 2 * (600 - 80 - 200), "of two of three feed-forward parts at a time none"
    assert all(name not in parts for parts in estimate(MODEL, PLAN).phases.values())


@pytest.mark.parametrize(
    ("batching", "tokens"),
    [
        (MicroBatching(), 26),
        (MicroBatching(at_least=40), 40),
        (MicroBatching(at_least=100), 52),  # the step has no more
        (MicroBatching(20, at_least=100), 20),
        (MicroBatching(3), 12),  # one response is never cut
        (MicroBatching(rows=2), 24),
    ],
)
def test_tokens_of_a_pass(batching, tokens):
    assert PLAN.pass_tokens(batching) == tokens


def test_tokens_of_two_views_and_of_rows_apart():
    assert PLAN.pass_tokens(MicroBatching(), views=2) == 52
    apart = replace(PLAN, update=MicroBatching(share_prefix=False))
    assert apart.group_tokens == apart.pass_tokens(apart.update) == 3 * 12
    assert "who sees whom" not in estimate(MODEL, apart).phases["update"], "attention is merely causal"


@pytest.mark.parametrize(("prompts", "later"), [(1, 0), (3, 0), (4, 50), (5, 76), (6, 80), (60, 80)])
def test_tokens_of_a_pass_beside_gradients(prompts, later):
    """80 tokens a pass: a group of up to 26 that did not fit into the first has found more than 54 there."""
    plan = replace(PLAN, prompts_per_step=prompts, update=MicroBatching(80))
    assert plan.later_tokens == later


def test_at_most_512_rows_decode_together():
    found = estimate(MODEL, replace(PLAN, prompts_per_step=10_000))
    assert found.phases["decode"]["keys and values"] == 512 * 12 * 96
    assert found.phases["read"]["keys and values"] == 171 * 5 * 96  # ceil(512 / 3) prompts


def test_a_text_model_sees_nothing():
    found = estimate(replace(MODEL, vision=None, vision_parameters=0), PLAN)
    assert found.phases["see"] == {} and "activations of the vision tower" not in found.phases["update"]


def test_a_frozen_tower_keeps_nothing():
    found = estimate(MODEL, replace(PLAN, train_vision=False)).phases["update"]
    assert found["gradients"] == 2400 and "activations of the vision tower" not in found


# ---------------------------------------------------------------------------------------------------------------- size
def is_of_mlp(name: str) -> bool:
    return ".mlp." in name and ".visual." not in name


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_sizes_without_weights(family):
    """Counted on the meta device against the loaded model."""
    size, model = size_of(str(checkpoint(family))), plain_model(family)
    assert size.parameters == sum(p.numel() for p in model.parameters())
    tower = getattr(model.model, "visual", None)
    assert size.vision_parameters == (0 if tower is None else sum(p.numel() for p in tower.parameters()))
    text = model.config.get_text_config()
    keys = model.get_submodule(next(name for name, _ in model.named_modules() if name.endswith("k_proj")))
    heads = keys.out_features // text.num_key_value_heads
    assert size.text == LayerSize(
        text.num_hidden_layers, text.hidden_size, text.intermediate_size, keys.out_features, heads
    )
    assert size.mlp_parameters == sum(p.numel() for name, p in model.named_parameters() if is_of_mlp(name))
    assert size.matrices == sum(p.dim() > 1 for p in model.parameters())
    assert size.tied == bool(text.tie_word_embeddings)
    if tower is not None:
        assert size.vision.layers == len(tower.blocks)
        attention = next(module for name, module in tower.named_modules() if name.endswith("qkv"))
        assert size.patch_numbers == model.config.vision_config.temporal_patch_size * 3 * size.patch**2
        assert size.vision.hidden == attention.in_features and size.vision.keys * 3 == attention.out_features


MEASURE = """
import resource, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from mtrl.build.run import build, configure
from mtrl.build.model import model_path
from mtrl.models.size import size_of
from mtrl.commands.doctor import plan_of
from mtrl.commands.memory import estimate

config, _ = configure(None, [
    "training.logger=[]", "training.max_steps=1", "training.val_before_train=false", "worker.rollout.n=4",
    "dataset.rollout_batch_size=48", "worker.actor.global_batch_size=48", "worker.actor.tokens_per_micro_batch=6000",
    f"training.output_dir={sys.argv[1]}",
])
size = size_of(model_path(config))
before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
build(config).loop.step(0)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(peak - before, estimate(size, plan_of(config, on_gpu=False)).peak_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_estimate_against_a_measured_peak(tmp_path):
    """A step of the embedded model, in a process of its own. What its resident memory grew by holds what the allocator
    keeps, too, so it is more than the tensors."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    grown, estimated = map(int, done.stdout.split())
    assert 0.75 < grown / estimated < 1.35, f"grew by {grown / GIB:.2f} GiB, estimated {estimated / GIB:.2f}"


# ------------------------------------------------------------------------------------------------------------- machine
def test_the_install_hints_name_extras_that_exist():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for feature in installed.FEATURES:
        if "mtrl[" in feature.install:
            extra = feature.install.partition("[")[2].partition("]")[0]
            packages = {name.replace("-", "_").partition(">")[0].partition("[")[0] for name in extras[extra]}
            assert set(feature.modules) <= packages, feature.name


def test_a_feature_that_lacks_something():
    feature = Feature("x", ("json", "no_such_module_here"), "pip install x", lambda config: True)
    assert feature.missing() == ["no_such_module_here"]


def test_memory_is_a_plausible_number():
    assert 0 < machine.free_memory() <= machine.main_memory()


def test_memory_of_a_container(tmp_path, monkeypatch):
    """A limit of 64 MiB, of which 48 are in use and 16 of these are files in the cache."""
    for name, text in {"limit": 64 << 20, "none": "max", "used": 48 << 20}.items():
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "memory.stat").write_text(f"anon {32 << 20}\ninactive_file {16 << 20}\n")
    containers = tuple((tmp_path / name, "used", "inactive_file") for name in ("none", "limit", "not there"))
    monkeypatch.setattr(machine, "CONTAINERS", containers)
    assert (machine.main_memory(), machine.free_memory()) == (64 << 20, 32 << 20)
    (tmp_path / "used").write_text(f"{90 << 20}\n")
    assert machine.free_memory() == 0


def test_the_disk_of_a_directory_that_is_not_there_yet(tmp_path):
    assert machine.existing_parent(tmp_path / "a" / "b") == tmp_path
    assert machine.free_disk(tmp_path / "a" / "b") > 0


# ----------------------------------------------------------------------------------------------------------------- run
def test_the_embedded_task_runs_here(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "transformers" in said and "Optional features" in said and "3.1 million parameters" in said
    assert "It can run here." in said and "PROBLEM" not in said
    assert list(tmp_path.iterdir()) == [], "it only looks"


def test_what_is_missing_is_told_all_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        "dataset.train_files=none.jsonl, org/name@train, zoo@train", "dataset.image_dir=nowhere/",
        "worker.reward.functions=[accuracy, rewards.py:f, no_such_package.module:f, json:loads]",
        "worker.reward.weights=null", "worker.hybrid_engine=false", "training.load_checkpoint_path=nothing_to_load",
        "optimization.perturbation=no_such", "training.logger=[console, no]",
    ]  # fmt: skip
    assert cli.main(["doctor", *words[:-1], "worker.actor.model.model_path=./nothing"]) == 2
    problems = [line for line in capsys.readouterr().out.splitlines() if "PROBLEM" in line]
    for told in (
        "worker.hybrid_engine", "none.jsonl does not exist", "nowhere/ does not exist", "rewards.py does not exist",
        "no module no_such_package.module", "./nothing is no checkpoint directory", "nothing_to_load does not exist",
        "optimization.perturbation: no_such; there are ",
    ):  # fmt: skip
        assert sum(told in line for line in problems) == 1, told
    assert len(problems) == 8
    assert cli.main(["doctor", words[-1]]) == 2, "a configuration that does not load"


def test_a_hub_model_that_is_not_here_is_no_fault(capsys):
    assert (
        cli.main(["doctor", "worker.actor.model.model_path=some-org/some-model", "dataset.train_files=org/data"]) == 0
    )
    said = capsys.readouterr().out
    assert "the memory is not estimated" in said and "the model was not seen" in said and "It can run" not in said


def test_a_wanted_feature_that_is_missing(monkeypatch):
    wanted = Feature("telepathy", ("no_such_module_here",), "pip install telepathy", lambda config: True)
    monkeypatch.setattr(installed, "FEATURES", (wanted,))
    assert list(doctor.missing_features(load_config(None, {}))) == [
        "the configuration asks for telepathy: pip install telepathy"
    ]


BIG = replace(MODEL, parameters=3_000_000_000, vision_parameters=0)
A_GPU = Device("GPU 0, a card", 40 * GIB, 39 * GIB)


def test_what_would_help_where_it_does_not_fit():
    """3 billion parameters: 33.5 GiB held, 44.7 with gradients."""
    (problem,) = doctor.memory_problems(BIG, PLAN, A_GPU)
    assert "the longest prompts and responses will not fit into 40.00 GiB" in problem
    assert "worker.actor.fsdp.param_dtype=bf16: 22.35 GiB" in problem and "freeze_vision" not in problem
    (problem,) = doctor.memory_problems(BIG, replace(PLAN, reference=True), A_GPU)
    assert "what is held all the time" in problem and "disable_divergence=true (no reference): 44.70 GiB" in problem
    assert list(doctor.memory_problems(BIG, replace(PLAN, weight_bytes=2, compute_bytes=2), A_GPU)) == []


def test_advice_names_keys_that_load():
    plan = replace(PLAN, reference=True, prompts_per_step=200, update=MicroBatching(4000))
    ways = [way.partition(" ")[0] for way, _ in doctor.smaller(BIG, plan, estimate(BIG, plan))]
    assert ways
    load_config(None, ways)


def test_advice_never_says_no_prompts_at_all():
    one = MicroBatching(1)
    plan = replace(PLAN, prompts_per_step=3, responses_per_prompt=100, update=one, probe=one, checkpointing=True)
    ways = [way for way, _ in doctor.smaller(MODEL, plan, estimate(MODEL, plan))]
    assert "dataset.rollout_batch_size=1" in ways


def test_checkpoints_must_fit_on_the_disk(tmp_path, monkeypatch, capsys):
    config = load_config(None, {"training.output_dir": str(tmp_path / "runs"), "training.save_limit": 3})
    monkeypatch.setattr(doctor, "free_disk", lambda path: 100 * GIB)
    (problem,) = doctor.disk_problems(config, BIG)  # three kept, the best, one on its way: 33.53 GiB each
    assert "5 checkpoints need 167.64 GiB" in problem
    monkeypatch.setattr(doctor, "free_disk", lambda path: 200 * GIB)
    assert list(doctor.disk_problems(config, BIG)) == []


@pytest.mark.slow
def test_nothing_is_asked_of_the_network(tmp_path):
    """The command sets the hub offline before anything is imported."""
    code = "import sys; from mtrl import cli; rc = cli.main(['doctor', 'worker.actor.model.model_path=org/none']); "
    code += "import huggingface_hub.constants as c; print(c.HF_HUB_OFFLINE); sys.exit(rc)"
    clean = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=tmp_path, env=clean
    )
    assert done.stdout.splitlines()[-1] == "True", done.stderr
