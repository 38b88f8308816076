"""Runs whose adapters learn: they resume bitwise, and other commands accept their checkpoints."""

import json
import shutil

import pytest
import torch
from run_helpers import (
    SETTINGS,
    STEPS,
    get_run_dir,
    read_metrics,
    read_tensors,
    same_end,
    tiny_arguments,
    tiny_run_files,
)

import mtrl
from mtrl.checkpoint.folder_store import list_checkpoints, read_state
from mtrl.cli import main
from mtrl.models.load_model import load_model

pytest.importorskip("peft")

LORA = (
    "worker.actor.model.peft_type=lora",
    "worker.actor.model.lora_rank=4",
    "worker.actor.optim.lr=1e-3",
    "worker.actor.model.lora_dropout=0.1",
    "optimization.disable_divergence=false",
)
FILES = (
    "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "generation_config.json",
    "mtrl_manifest.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json",
    "trainer/optimizer.json", "trainer/optimizer.safetensors", "trainer_state.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    output = tmp_path_factory.mktemp("lora")
    assert main(tiny_arguments(output, *SETTINGS, *LORA)) == 0
    return output


def test_a_run_resumes_bitwise(whole, tmp_path, capsys):
    output = tmp_path / "copy"
    shutil.copytree(whole, output, symlinks=True)
    saves = get_run_dir(output) / "checkpoints"
    for path in list_checkpoints(saves):
        if int(path.name[5:]) > 2:
            shutil.rmtree(path)
    (saves / "best_model").unlink()
    assert main([*tiny_arguments(whole, *SETTINGS, *LORA), f"training.output_dir={output}"]) == 0
    assert "resuming after step 2" in capsys.readouterr().err
    same_end(get_run_dir(whole), get_run_dir(output), STEPS)
    steps = [row for row in read_metrics(get_run_dir(output)).values() if "actor/grad_norm" in row]
    assert all(row["actor/grad_norm"] > 0 for row in steps)
    kl = [row["actor/reference_kl"] for row in steps]
    assert abs(kl[0]) < 1e-5 < abs(kl[-1]), "up to rounding, the reference is the initial model"


def test_a_checkpoint_is_of_peft_and_small(whole):
    newest = get_run_dir(whole) / "checkpoints" / f"step_{STEPS}"
    assert {str(each.relative_to(newest)) for each in newest.rglob("*") if each.is_file()} == set(FILES)
    base = json.loads((newest / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(tiny_run_files() / "model")
    weights = {name: each for name, each in read_tensors(newest).items() if name.startswith("adapter_model")}
    assert {each.dtype for each in weights.values()} == {torch.float32}
    whole = sum(parameter.numel() for parameter in load_model(newest).parameters())
    assert 0 < sum(each.numel() for each in weights.values()) < 0.1 * whole


def test_eval_takes_a_checkpoint_with_its_run_and_alone(whole, tmp_path, capsys):
    best = get_run_dir(whole) / "checkpoints" / "best_model"
    assert main(["eval", str(best)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["val/reward_score"] == read_state(best)["score"]
    alone = tmp_path / "alone"
    shutil.copytree(best, alone)
    settings = [f"dataset.val_files={whole}/val.jsonl", "worker.actor.fsdp.mixed_precision_dtype=fp32"]
    assert main(["eval", str(alone), "dataset.max_response_length=24", *settings]) == 0
    assert "val/reward_score" in json.loads(capsys.readouterr().out.splitlines()[-1]), "merged, without its run"


def test_a_full_run_does_not_resume_from_adapters(whole, tmp_path, capsys):
    best = get_run_dir(whole) / "checkpoints" / "best_model"
    words = [*tiny_arguments(whole, *SETTINGS), f"training.output_dir={tmp_path}"]
    assert main([*words, f"training.load_checkpoint_path={best}", "training.max_steps=9"]) == 2
    assert "it holds adapters (worker.actor.model.peft_type)" in capsys.readouterr().err


def test_from_python(tmp_path):
    rows = [{"prompt": f"Say {word}.", "answer": word} for word in ("red", "blue")]
    sizes = {"rollout_batch_size": 2, "global_batch_size": 2, "n": 3, "max_response_length": 8, "logger": []}
    lora = {"peft_type": "lora", "lora_rank": 2, "lora_target_modules": ["q_proj", "v_proj"], "lr": 1e-3}
    trainer = mtrl.Trainer(
        data=rows, rewards=lambda data: float(len(data["response"])), output_dir=str(tmp_path / "run"),
        experiment_name="lora", max_steps=1, **sizes, **lora,
    )  # fmt: skip
    model, begun = trainer.model, {name: each.clone() for name, each in trainer.model.state_dict().items()}
    trainer.train()
    changed = {name for name, each in model.state_dict().items() if not torch.equal(each, begun[name])}
    assert changed and all(".lora_" in name for name in changed)
    saved = trainer.save(tmp_path / "saved")
    merged = load_model(saved).state_dict()
    name = next(name for name in changed if ".lora_B." in name).partition(".lora_B")[0]
    assert not torch.equal(merged[f"{name}.weight"], begun[f"{name}.base_layer.weight"])
