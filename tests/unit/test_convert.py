"""`mtrl convert`: files of EasyR1, verl and TRL become configurations that load, and every loss is reported."""

import pytest
import yaml
from config_helpers import only_error
from convert_helpers import EASYR1, TRL, VERL, convert_text, leaves, loaded, message, script

from mtrl.cli import main
from mtrl.config import ConfigError
from mtrl.config.conversions import CONVERSIONS
from mtrl.config.foreign_config import DEFAULT, DIFFERS, LOST, MAPS, UNREAD, ConfigConverter, convert
from mtrl.config.foreign_defaults import DEFAULTS, IMPLIED
from mtrl.config.foreign_keys import TABLES, iterate_same_names, translate_key
from mtrl.config.nearest import find_nearest_keys
from mtrl.config.trl_script import read_script

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
