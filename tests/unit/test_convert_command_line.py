"""`mtrl convert` with the command line of the other program, and settings that its releases have elsewhere."""

import shlex
from pathlib import Path

import pytest
from convert_helpers import EASYR1, OTHERS, convert_text, loaded, message, script

from mtrl.cli import main
from mtrl.config.foreign_config import LOST, UNREAD, convert

PARSED = OTHERS / "trl_vlm_parser.py"
FLAGS = shlex.split(
    "--model_name_or_path org/vlm --dataset_name org/data --learning-rate 1e-5 --gradient_checkpointing "
    "--dtype bfloat16 --use_vllm --use_peft --lora_target_modules q_proj, v_proj --max_steps=40"
)


def test_a_script_with_trl_parser_is_read_with_its_command_line(tmp_path):
    converted = convert(PARSED, words=FLAGS)
    config = loaded(converted, tmp_path)
    model, actor = config.worker.actor.model, config.worker.actor
    assert (model.model_path, config.dataset.train_files) == ("org/vlm", "org/data@train")
    assert (actor.optim.lr, actor.fsdp.param_dtype, config.training.max_steps) == (1e-5, "bf16", 40)
    # The adapters of TRL's ModelConfig, not of peft, and the correction that TRL has by default.
    assert (model.peft_type, model.lora_rank, model.lora_alpha, model.lora_dropout) == ("lora", 16, 32, 0.05)
    assert model.lora_target_modules == ("q_proj", "v_proj")
    assert (config.worker.rollout.name, config.worker.rollout.mode) == ("vllm", "inprocess")
    assert (config.optimization.tis_clip, config.optimization.tis_level) == (3.0, "sequence")
    assert message(converted, UNREAD).keys() == {"reward_funcs"}
    assert "accuracy_reward, which is defined inside a block" in message(converted, UNREAD)["reward_funcs"]


def test_a_file_without_model_or_data_is_not_written(tmp_path, capsys):
    """It would train the embedded model on the embedded data."""
    assert main(["convert", str(PARSED)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "no counterpart: model" not in err
    assert "could not be read: model_name_or_path: `model_args.model_name_or_path` comes from the command line" in err
    assert "no model could be read, so nothing is written; add -- --model_name_or_path PATH" in err
    assert "no training data could be read" in err
    assert main(["convert", str(PARSED), "--", *FLAGS]) == 1
    assert "model_path: org/vlm" in capsys.readouterr().out


def test_settings_of_hydra_replace_those_of_the_file(tmp_path, capsys):
    words = ["worker.actor.model.model_path=org/other", "+worker.rollout.name=vllm", "trainer.total_epochs=2"]
    values = convert(EASYR1, words=words).values
    assert (values["worker.actor.model.model_path"], values["training.total_epochs"]) == ("org/other", 2)
    for words, answer in {("--lr", "1"): "--lr: expected key=value", ("x",): "x: expected key=value"}.items():
        assert main(["convert", str(EASYR1), "--", *words]) == 2 and answer in capsys.readouterr().err
    assert main(["convert", str(PARSED), "--", "x"]) == 2 and "x: expected --name value" in capsys.readouterr().err


def test_flags_of_a_yaml_of_trl_and_of_its_config_file(tmp_path):
    (tmp_path / "grpo.yaml").write_text("model_name_or_path: org/m\nbeta: 0.1\n")
    converted = convert(tmp_path / "grpo.yaml", words=["--dataset_name", "org/d", "--beta", "0"])
    assert converted.values["dataset.train_files"] == "org/d@train"
    assert converted.values["optimization.disable_divergence"] is True
    from_file = convert(PARSED, words=["--config", str(tmp_path / "grpo.yaml"), "--dataset_name", "org/d"])
    assert from_file.values["worker.actor.model.model_path"] == "org/m"


@pytest.mark.parametrize(
    "text, key, words",
    [
        ("n = 4\nn += 4\nGRPOConfig(num_generations=n)\n", "num_generations", "is not a literal value"),
        ("f = []\nf.append(g)\nGRPOTrainer('m', f)\n", "reward_funcs", "is changed later by .append(..)"),
        (
            "d = load_dataset('a', 'subset')\nGRPOTrainer('m', train_dataset=d)\n",
            "train_dataset",
            "loads a subset of a dataset",
        ),
        ("d = make()\nGRPOTrainer('m', train_dataset=d)\n", "train_dataset", "cannot be read from the file"),
    ],
)
def test_what_a_script_computes_is_not_guessed(text, key, words, tmp_path):
    converted = script(tmp_path, text)
    assert words in message(converted, UNREAD)[key]


def test_changes_after_the_arguments_are_parsed(tmp_path):
    text = (
        "args = GRPOConfig(beta=0.1)\nargs.beta = 0.2\nd = load_dataset('a')\nGRPOTrainer('m', train_dataset=d['b'])\n"
    )
    values = script(tmp_path, text).values
    assert (values["optimization.divergence_coef"], values["dataset.train_files"]) == (0.2, "a@b")


def test_huge_numbers_and_endless_sums_end_at_once(tmp_path):
    digits = "9" * 4000
    squares = "".join(f"a{i + 1} = a{i} * a0\n" for i in range(9))
    converted = script(tmp_path, f"a0 = {digits}\n{squares}GRPOConfig(seed=a9, max_steps={digits})\n")
    assert "bits; no key takes more than 63" in message(converted, UNREAD)["seed"]
    assert "bits; no key takes more than 63" in message(converted, UNREAD)["max_steps"]
    sums = "".join(f"b{i + 1} = b{i} + b{i}\n" for i in range(19))
    converted = script(
        tmp_path, f"b0 = 0.5\n{sums}GRPOConfig(learning_rate=b19, generation_kwargs={{'a': {digits}}})\n"
    )
    assert "too many steps" in message(converted, UNREAD)["learning_rate"]
    assert "bits; no key takes more than 63" in message(converted, UNREAD)["generation_kwargs"]
    script(tmp_path, f"GRPOConfig(learning_rate={'+'.join(['1'] * 400)})\n")


def test_a_secret_of_the_environment_is_not_written_out(tmp_path, monkeypatch):
    monkeypatch.setenv("MTRL_TEST_SECRET", "hunter2")
    text = (
        "data: {train_files: 'https://u:${oc.env:MTRL_TEST_SECRET}@host/a.jsonl', val_files: '${data.train_files}'}\n"
        "trainer: {experiment_name: '${oc.env:MTRL_TEST_SECRET}', total_epochs: '${oc.env:MTRL_TEST_SECRET}'}\n"
        "algorithm: {adv_estimator: grpo}\n"
        "worker: {rollout: {n: 4, engine_kwargs: {token: '${oc.env:MTRL_TEST_SECRET}'}}}\n"
    )
    converted = convert_text(tmp_path, text)
    assert "hunter2" not in converted.yaml() + "".join(map(str, converted.lines))
    assert "the value is in the environment" in message(converted, LOST, UNREAD)["trainer.total_epochs"]
    config = loaded(converted, tmp_path)  # a run resolves it
    assert config.dataset.val_files == "https://u:hunter2@host/a.jsonl"
    assert config.training.experiment_name == "hunter2"


# --- verl 0.9 and EasyR1 in full ---


def test_verl_0_9_has_its_rewards_and_engine_settings_elsewhere(tmp_path):
    text = (
        "actor_rollout_ref: {rollout: {name: vllm, n: 4, engine_kwargs: {vllm: {seed: 3}, sglang: {}}}}\n"
        "algorithm: {adv_estimator: grpo, rollout_correction: {rollout_is: token}}\n"
        "reward: {custom_reward_function: {path: r.py, name: score}, reward_manager: {name: naive}}\n"
    )
    values = convert_text(tmp_path, text).values
    assert values["worker.rollout.engine_kwargs"] == {"seed": 3}
    assert values["worker.reward.reward_fn_path"] == "r.py:score"
    assert (values["optimization.tis_level"], values["optimization.tis_clip"]) == ("token", 2.0)


@pytest.mark.parametrize("steps, ratio, expected", [(-1, 0.0, (0, None)), (0, 0.1, (10, 0.1)), (3, 0.1, (12, None))])
def test_warmup_of_verl_by_steps_or_by_ratio(steps, ratio, expected, tmp_path):
    text = (
        f"actor_rollout_ref: {{rollout: {{n: 4}}, actor: {{optim: {{lr_warmup_steps: {steps}, "
        f"lr_warmup_steps_ratio: {ratio}}}}}}}\nalgorithm: {{adv_estimator: grpo}}\n"
    )
    optim = loaded(convert_text(tmp_path, text), tmp_path).worker.actor.optim
    assert (optim.warmup_steps, optim.warmup_ratio) == expected


@pytest.mark.parametrize("order", [1, -1])
def test_the_reference_of_easyr1_is_offloaded_by_either_key(order, tmp_path):
    parts = ["fsdp: {enable_cpu_offload: true}", "offload: {offload_params: false}"][::order]
    text = f"algorithm: {{adv_estimator: grpo}}\nworker: {{rollout: {{n: 4}}, ref: {{{', '.join(parts)}}}}}\n"
    assert convert_text(tmp_path, text).values["worker.ref.offload_params"] is True


def test_no_message_says_that_vllm_is_not_built():
    sources = Path(__file__).parents[2] / "mtrl"
    assert not [path.name for path in sources.rglob("*.py") if "not built yet" in path.read_text(encoding="utf-8")]
