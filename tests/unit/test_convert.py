"""`mtrl convert`: files of EasyR1, verl and TRL become configurations that load, and every loss is reported."""

import shlex
from pathlib import Path

import pytest
import yaml
from config_helpers import only_error

from mtrl.cli import main
from mtrl.config import ConfigError, load_config
from mtrl.config.conversions import CONVERSIONS
from mtrl.config.foreign_config import DEFAULT, DIFFERS, LOST, MAPS, UNREAD, ConfigConverter, convert
from mtrl.config.foreign_defaults import DEFAULTS, IMPLIED
from mtrl.config.foreign_keys import TABLES, iterate_same_names, translate_key
from mtrl.config.nearest import find_nearest_keys
from mtrl.config.trl_script import read_script

OTHERS = Path(__file__).parents[1] / "data" / "others"
EASYR1, VERL, TRL = OTHERS / "easyr1.yaml", OTHERS / "verl_grpo.yaml", OTHERS / "trl_grpo.py"


def loaded(converted, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(converted.yaml())
    return load_config(path, saved=True)


def message(converted, *kinds):
    """{their key: message} of the lines of some kinds."""
    lines = [line.text for line in converted.lines if line.kind in kinds]
    return {line.split(" = ")[0].split(": ")[0]: line for line in lines}


def leaves(tree, prefix=""):
    for name, value in tree.items():
        inside = isinstance(value, dict) and value
        yield from leaves(value, f"{prefix}{name}.") if inside else [f"{prefix}{name}"]


# --- whole files ---


def test_the_example_of_easyr1(tmp_path):
    converted = convert(EASYR1)
    config = loaded(converted, tmp_path)
    assert message(converted, DIFFERS) == {}
    assert message(converted, LOST).keys() == {"worker.rollout.val_override_config.top_p"}
    said = {"worker.actor.optim.betas", "worker.actor.loss_avg_mode", "worker.rollout.name"}
    said |= {"no foreign key -> optimization.tis_clip"}  # save_limit is in the file
    assert message(converted, DEFAULT).keys() == said
    assert message(converted, MAPS, LOST).keys() == set(leaves(yaml.safe_load(EASYR1.read_text())))
    dataset, actor, rollout = config.dataset, config.worker.actor, config.worker.rollout
    assert (dataset.train_files, dataset.prompt_key, dataset.rollout_batch_size) == (
        "hiyouga/geometry3k@train", "problem", 512,
    )  # fmt: skip
    assert (actor.global_batch_size, actor.optim.lr, actor.optim.warmup_ratio) == (128, 1e-6, 0.0)
    assert (actor.optim.betas, actor.model.peft_type, actor.offload.offload_params) == ((0.9, 0.999), None, True)
    assert (config.optimization.divergence_penalty, config.optimization.tis_clip) == ("low_var_kl", None)
    assert config.optimization.use_divergence_loss and config.worker.ref.offload_params is True
    assert (rollout.name, rollout.n, rollout.val.temperature, rollout.tensor_parallel_size) == ("vllm", 5, 0.6, 2)
    assert rollout.engine_kwargs == {"enforce_eager": False, "enable_chunked_prefill": False}
    assert config.worker.reward.reward_fn_path == "./examples/reward_function/math.py:compute_score"
    assert config.training.logger == ("console", "wandb")


def test_a_grpo_run_of_verl_maps_in_full(tmp_path, capsys):
    converted = convert(VERL)
    config = loaded(converted, tmp_path)
    assert [str(line) for line in converted.lines if line.kind in (DIFFERS, LOST)] == []
    actor, rollout = config.worker.actor, config.worker.rollout
    assert config.dataset.train_files == "~/data/geo3k/train.parquet,~/data/extra/train.parquet"
    assert (config.dataset.rollout_batch_size, actor.global_batch_size, config.dataset.val_batch_size) == (512, 128, 64)
    assert actor.optim.warmup_steps == 5 * 4  # 5 steps of verl, each with four optimizer steps
    assert actor.optim.warmup_ratio is None  # 0.0 there leaves it to the steps
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_dual) == (0.2, 0.28, 3.0)
    assert (config.optimization.loss_type, config.optimization.scale_rewards) == ("dapo", "group")
    assert (config.optimization.divergence_coef, config.optimization.divergence_penalty) == (0.01, "low_var_kl")
    assert config.optimization.use_divergence_loss and not config.optimization.disable_divergence
    assert (rollout.n, rollout.name, rollout.val.temperature, rollout.tensor_parallel_size) == (5, "vllm", 0.0, 2)
    assert config.worker.reward.reward_fn_path == "examples/geo_reward.py:compute_score"
    assert (config.training.output_dir, config.training.val_freq) == ("checkpoints", 5)
    assert config.training.save_limit == -1  # null keeps all of them
    assert "used only with gae" in message(converted, MAPS)["critic.optim.lr"]
    assert main(["convert", str(VERL)]) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["worker"]["rollout"]["n"] == 5 and len(err.splitlines()) == len(converted.lines)


def test_groups_are_filtered_as_they_are_there(tmp_path):
    """EasyR1 keeps groups by their mean and verl by their spread; both end a run that stays short of prompts."""
    easyr1 = yaml.safe_load(EASYR1.read_text())
    easyr1["algorithm"] |= {"online_filtering": True, "filter_key": "accuracy", "filter_low": 0.1, "filter_high": 0.9}
    verl = yaml.safe_load(VERL.read_text())
    verl["algorithm"]["filter_groups"] = {"enable": True, "metric": "acc", "max_num_gen_batches": 10}
    found = {}
    for name, content in {"easyr1": easyr1, "verl": verl}.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
        found[name] = loaded(convert(tmp_path / f"{name}.yaml"), tmp_path).optimization
    keys = ("online_filtering", "filter_by", "filter_key", "max_refills", "on_short_batch")
    assert [getattr(found["easyr1"], key) for key in keys] == [True, "mean", "accuracy", 19, "stop"]
    assert (found["easyr1"].filter_low, found["easyr1"].filter_high) == (0.1, 0.9)
    assert [getattr(found["verl"], key) for key in keys] == [True, "spread", "accuracy", 9, "stop"]


def test_a_script_for_trl(tmp_path):
    converted = convert(TRL)
    config = loaded(converted, tmp_path)
    assert message(converted, LOST, UNREAD).keys() == {"use_bias_correction_kl"}
    assert "merged with other keys" in message(converted, MAPS)["gradient_accumulation_steps"]
    differs = {"output_dir", "max_prompt_length", "reward_funcs", "train_dataset", "vllm_importance_sampling_mode"}
    assert message(converted, DIFFERS).keys() == differs
    assert ".map(..) is not converted" in message(converted, DIFFERS)["train_dataset"]
    actor, optimization = config.worker.actor, config.optimization
    assert actor.model.model_path == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert config.dataset.train_files == "lmms-lab/multimodal-open-r1-8k-verified@train"
    # 8 x 8 completions a generation in groups of 8, 8 x 4 of them an optimizer step, each generation used twice.
    assert (config.dataset.rollout_batch_size, actor.global_batch_size, actor.ppo_epochs) == (8, 4, 2)
    assert (config.training.max_steps, config.training.save_freq) == (400 // 4, 100 // 4)
    assert (actor.optim.lr, actor.optim.lr_scheduler_type, actor.optim.warmup_ratio) == (1e-5, "cosine", 0.05)
    assert (actor.optim.betas, actor.optim.weight_decay, actor.clip_ratio_dual) == ((0.9, 0.999), 0.0, None)
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.28)
    assert (optimization.loss_type, optimization.scale_rewards) == ("dr_grpo", "none")
    assert (optimization.divergence_coef, optimization.divergence_penalty) == (0.04, "low_var_kl")
    assert optimization.use_divergence_loss and optimization.mask_truncated_responses
    assert config.worker.reward.functions == (f"{TRL}:accuracy_reward", "trl.rewards:think_format_reward")
    assert config.worker.reward.weights == (1.0, 0.5)
    assert (actor.model.peft_type, actor.model.lora_rank, actor.model.lora_alpha) == ("lora", 16, 32)
    assert (config.dataset.seed, config.worker.rollout.seed) == (7, 7)
    on_four = convert(TRL, devices=4).values
    assert (on_four["dataset.rollout_batch_size"], on_four["training.n_gpus_per_node"]) == (32, 4)
    with pytest.raises(ConfigError, match="is a file of EasyR1, which contains the number of GPUs"):
        convert(EASYR1, devices=4)


# --- scripts ---


def script(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_text(text)
    return convert(path)


def test_a_script_is_never_run(tmp_path):
    mark = tmp_path / "ran"
    text = f"open({str(mark)!r}, 'w')\nraise SystemExit\nGRPOConfig(beta=(lambda: 1)(), lr=__import__('os').getpid())\n"
    converted = script(tmp_path, text)
    assert not mark.exists()
    assert "not a literal value" in message(converted, UNREAD)["beta"]


def test_defaults_of_trl(tmp_path):
    """An empty GRPOConfig has no KL, clips at 0.2 on both sides, and so on."""
    config = loaded(script(tmp_path, "args = trl.GRPOConfig()\n"), tmp_path)
    assert config.optimization.disable_divergence and config.worker.actor.clip_ratio_high == 0.2
    assert (config.worker.actor.optim.lr_scheduler_type, config.worker.actor.optim.warmup_steps) == ("linear", 0)
    assert (config.dataset.rollout_batch_size, config.worker.actor.global_batch_size) == (1, 1)
    assert (config.optimization.tis_clip, config.training.save_limit) == (None, -1)


@pytest.mark.parametrize(
    "arguments, key, value",
    [
        ("loss_type='cispo', epsilon_high=5.0", "optimization.cispo_clip_high", 5.0),
        ("loss_type='cispo', epsilon_high=5.0", "optimization.policy_loss", "cispo"),
        ("loss_type='sapo'", "optimization.loss_type", "grpo"),
        ("scale_rewards='batch'", "optimization.scale_rewards", "batch"),
        ("top_k=0", "worker.rollout.top_k", -1),
        ("top_entropy_quantile=0.2", "optimization.enable_entropy_filtering", True),
        ("warmup_steps=0.1", "worker.actor.optim.warmup_ratio", 0.1),
        ("warmup_steps=5", "worker.actor.optim.warmup_steps", 5),
        ("optim='adamw_torch_fused'", "worker.actor.optim.name", "adamw"),
        ("save_strategy='no'", "training.save_freq", -1),
        ("report_to='none'", "training.logger", ("console",)),
        ("generation_batch_size=64", "dataset.rollout_batch_size", 8),
    ],
)
def test_values_of_trl(arguments, key, value, tmp_path):
    assert script(tmp_path, f"GRPOConfig({arguments})\n").values[key] == value


@pytest.mark.parametrize(
    "arguments, key, words",
    [
        ("loss_type='luspo'", "loss_type", "expected one of grpo, bnpo, dr_grpo, dapo"),
        (
            "num_generations=3",
            "per_device_train_batch_size",
            "8 completions are not a multiple of num_generations = 3",
        ),
        ("repetition_penalty=1.1", "repetition_penalty", "the sampled distribution would differ from the trained one"),
        ("importance_sampling_level='word'", "importance_sampling_level", "expected one of token, sequence"),
        (
            "learning_rate=args.lr",
            "learning_rate",
            "`args.lr` comes from the command line; add -- --lr VALUE to mtrl convert",
        ),
        ("learning_rate='high'", "learning_rate", "expected a number"),
        ("**more", "**more", "is not a literal value"),
        ("no_such_key=3", "no_such_key", "unknown key of TRL"),
        ("save_steps=0.1", "save_steps", "a fraction of the run"),
        ("max_steps='many'", "max_steps", "the value is unknown"),
    ],
)
def test_keys_without_a_counterpart_are_reported(arguments, key, words, tmp_path):
    converted = script(tmp_path, f"GRPOConfig({arguments})\n")
    assert words in message(converted, LOST, UNREAD)[key]
    loaded(converted, tmp_path)


def test_an_optimizer_step_that_splits_a_group_is_reported(tmp_path):
    converted = script(tmp_path, "GRPOConfig(per_device_train_batch_size=4, steps_per_generation=4)\n")
    assert "splits groups of 8" in message(converted, DIFFERS)["per_device_train_batch_size"]
    assert (converted.values["dataset.rollout_batch_size"], converted.values["worker.actor.global_batch_size"]) == (
        2,
        2,
    )


def test_arguments_of_a_trainer(tmp_path):
    text = (
        "from datasets import load_dataset\nfrom trl import GRPOTrainer\n"
        "data = load_dataset('json', data_files='train.jsonl', split='train')\n"
        "held_out = load_dataset('org/eval')\n"
        "GRPOTrainer('org/model', reward_funcs='org/reward', train_dataset=data, eval_dataset=held_out)\n"
    )
    config = loaded(script(tmp_path, text), tmp_path)
    assert (config.dataset.train_files, config.dataset.val_files) == ("train.jsonl", "org/eval@train")
    assert (config.worker.reward.reward_type, config.worker.reward.model_path) == ("model", "org/reward")
    assert config.worker.actor.model.model_path == "org/model"


# --- YAML ---


def convert_text(tmp_path, text):
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    return convert(path)


def test_yaml_for_trl_is_known_by_its_keys(tmp_path):
    converted = convert_text(
        tmp_path, "model_name_or_path: org/m\nlearning_rate: 1e-5\ndataset_name: org/d\nbeta: 0.1\n"
    )
    config = loaded(converted, tmp_path)
    assert (converted.project, config.dataset.train_files) == ("TRL", "org/d@train")


def test_references_of_hydra_are_followed_and_bad_ones_reported(tmp_path):
    text = (
        "actor_rollout_ref: {rollout: {n: '${oc.select:data.n,4}', temperature: '${data.heat}'}}\n"
        "data: {max_prompt_length: 7, max_response_length: '${data.max_prompt_length}'}\n"
    )
    converted = convert_text(tmp_path, text)
    assert converted.values["dataset.max_response_length"] == 7 and converted.values["worker.rollout.n"] == 4
    assert "cannot be resolved" in message(converted, UNREAD)["actor_rollout_ref.rollout.temperature"]


@pytest.mark.parametrize("rollout, heat", [("{n: 4}", 1.0), ("{n: 4, temperature: 0.7}", 0.7)])
def test_easyr1_validates_at_the_training_temperature_by_default(rollout, heat, tmp_path):
    text = f"algorithm: {{adv_estimator: grpo, disable_kl: true}}\nworker: {{rollout: {rollout}}}\n"
    assert convert_text(tmp_path, text).values["worker.rollout.val.temperature"] == heat


def test_both_divergences_of_verl_are_one_too_many(tmp_path):
    text = "algorithm: {use_kl_in_reward: true, adv_estimator: grpo}\nactor_rollout_ref: {actor: {use_kl_loss: true}}\n"
    assert "not in both" in message(convert_text(tmp_path, text), LOST)["algorithm.use_kl_in_reward"]


def test_without_either_divergence_of_verl_there_is_none(tmp_path):
    text = "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 4}}\n"
    assert loaded(convert_text(tmp_path, text), tmp_path).optimization.disable_divergence


def test_incompatible_settings_are_left_out(tmp_path):
    text = (
        "data: {rollout_batch_size: 100}\nalgorithm: {adv_estimator: grpo}\nworker: {actor: {global_batch_size: 64}}\n"
    )
    converted = convert_text(tmp_path, text)
    assert "both count prompts" in "".join(str(line) for line in converted.lines if line.kind == LOST)
    assert loaded(converted, tmp_path).dataset.rollout_batch_size == 256


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("a.yaml", "", "the file is empty"),
        ("a.yaml", "x: 1\n", "it contains no key of EasyR1, verl or TRL"),
        (
            "a.yaml",
            "dataset: {train_files: a, seed: 3}\noptimization: {gamma: 1}\n",
            "this is already a configuration of MTRL",
        ),
        ("a.yaml", "data: [\n", "not valid YAML"),
        ("a.yaml", "data: {seed: !!python/name:os.system ''}\n", "the tag !!python/name:os.system"),
        ("a.py", "def f(:\n", ":1: not valid Python"),
        ("a.py", "(" * 5000, "not valid Python"),
        ("a.py", "x = 1\n", "it calls neither GRPOConfig(..) nor GRPOTrainer(..)"),
        ("a.py", "GRPOConfig()\nGRPOConfig()\n", ":2: a second GRPOConfig(..)"),
    ],
)
def test_a_file_that_cannot_be_converted_is_one_line_and_status_2(name, text, words, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    assert main(["convert", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and len(err.splitlines()) == 2


@pytest.mark.parametrize("words", [[], ["a.yaml", "b.yaml"], ["a.yaml", "--gpus", "0"], ["a.yaml", "--gpus"]])
def test_wrong_arguments(words, capsys):
    assert main(["convert", *words]) == 2
    assert "mtrl convert FILE.yaml|FILE.py" in capsys.readouterr().err


def test_status_1_where_not_all_maps(tmp_path, capsys):
    assert main(["convert", str(EASYR1)]) == 1
    out, err = capsys.readouterr()
    assert "no counterpart: worker.rollout.val_override_config.top_p = 0.95" in err and out.startswith("# From")


# --- the tables ---

ODD = [None, True, False, 0, -1, 3, 0.5, 1e300, "x", "", [], ["a", 1], {"a": 1}]


@pytest.mark.parametrize("project", CONVERSIONS)
def test_every_key_with_every_odd_value_ends_in_a_configuration(project):
    """And each is reported in one line; settings that conflict with the rest are left out."""
    keys = {key for owner, table in TABLES.items() if project in owner.split(" and ") for key in table}
    keys |= {name for owner, name in iterate_same_names() if owner == project} | set(CONVERSIONS[project])
    for number, key in enumerate(sorted(keys)):
        value = ODD[number % len(ODD)]
        converted = ConfigConverter(project, {key: value}, {}, 1)
        said = [line for line in converted.lines if line.kind != DEFAULT and line.text.startswith(f"{key} = ")]
        assert len(said) == 1, key
        assert all("\n" not in str(line) for line in converted.lines)


def test_tables_of_conversions_name_keys_that_the_tables_know():
    for project, table in {**CONVERSIONS, **DEFAULTS}.items():
        for key in table:
            assert translate_key(key), f"{project}: {key}"
    assert {key for always in IMPLIED.values() for key in always} <= set(load_paths())


def load_paths():
    from mtrl.config.tree import known_leaves

    return known_leaves()


# --- suggestions ---


def test_a_known_key_of_others_gets_no_nearest_one():
    assert "val_only" not in only_error("trainer.save_model_only=true")
    assert "a key of EasyR1 without a counterpart" in only_error("trainer.save_model_only=true")
    assert "val_only" not in only_error("training.save_model_only=true")
    assert "leave it out" in only_error("trainer.balance_batch=true")


@pytest.mark.parametrize("key", ["training.vall_files", "worker.ref.gamm", "dataset.lamm", "training.tempratur"])
def test_almost_the_same_name_in_another_section_is_not_meant(key):
    assert find_nearest_keys(key) == []


def test_errors_are_of_the_configuration(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the file"):
        convert(tmp_path / "none.yaml")


def test_defaults_of_a_lora_config():
    """Our defaults are others: every projection, and twice the scale."""
    script = "GRPOTrainer(model='m', args=GRPOConfig('x'), peft_config=LoraConfig(r=4))"
    values = read_script(script, "train.py").values
    assert (values["lora_r"], values["lora_alpha"], values["lora_target_modules"]) == (4, 8, ["q_proj", "v_proj"])
    assert "lora_r" not in read_script("GRPOTrainer(model='m', peft_config=None)", "train.py").values


def test_fp16_of_trl_is_reported_as_lost(tmp_path):
    script = tmp_path / "grpo.py"
    script.write_text("from trl import GRPOConfig\n\nGRPOConfig(output_dir='out', fp16=True)\n")
    converted = convert(script)
    assert "fp16 would need loss scaling" in message(converted, LOST)["fp16"]
    assert loaded(converted, tmp_path).worker.actor.fsdp.mixed_precision_dtype == "bf16"


# --- the command line of the other program ---

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
