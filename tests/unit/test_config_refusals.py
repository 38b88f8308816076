"""Errors of the configuration and their messages: where, which key, what to do."""

import re

import pytest
import torch
from config_helpers import get_errors, only_error, write

from mtrl import cli
from mtrl.config import ConfigError, find_warnings, load_config
from mtrl.config.checks import MAX_VALUES
from mtrl.config.foreign_keys import TABLES, translate_key
from mtrl.config.tree import known_leaves

# --- the report ---


def test_all_errors_of_file_and_command_line_are_in_one_report(tmp_path):
    path = write(
        tmp_path,
        "dataset:\n  sed: 3\n  seed: 1\n  seed: 2\noptimization:\n  gamma: 2\n  filter_low: 0.5\ntrainer:\n"
        "  test_freq: 5\n  nnodes: 2\nworker: {rollout: 7}\n",
    )
    errors = get_errors(path, "worker.rolout.n=4", "optimization.online_filtering=true", "optimization.filter_high=0.2")
    assert errors == [
        f"{path}:4: dataset.seed: set twice; remove one of the two",
        f"{path}:2: dataset.sed: unknown key; did you mean dataset.seed?",
        f"{path}:9: trainer.test_freq: unknown key, a key of verl; here it is training.val_freq",
        f"{path}:10: trainer.nnodes: unknown key, a key of EasyR1 and verl; here it is training.nnodes",
        errors[4],
        "command line: worker.rolout.n: unknown key; did you mean worker.rollout.n or worker.rollout.val.n?",
        f"{path}:6: optimization.gamma: expected a number in [0, 1], got 2",
        f"{path}:7 and command line: optimization.filter_low = 0.5 with optimization.filter_high = 0.2: no group lies "
        "between them; filter_low must be below filter_high",
    ]
    assert errors[4].startswith(
        f"{path}:11: worker.rollout: this is a section, got 7; worker.rollout has the keys name, mode"
    )
    with pytest.raises(ValueError, match="8 errors in the configuration"):
        load_config(path, ["worker.rolout.n=4", "optimization.online_filtering=true", "optimization.filter_high=0.2"])


def test_a_bad_value_does_not_cause_a_second_error_about_its_combination():
    # If rollout_batch_size is invalid, its divisor cannot be checked.
    assert "expected" in only_error("dataset.rollout_batch_size=many", "worker.actor.global_batch_size=7")


@pytest.mark.parametrize(
    "text, message",
    [
        ("- a\n- b\n", "{path}:1: expected `key: value` lines, got a sequence"),
        ("just words\n", "{path}:1: expected `key: value` lines, got a scalar"),
        ("dataset:\n  seed: [1\n", "{path}:3: not valid YAML: "),
        ("dataset: &a {x: *a}\n", "{path}:1: not valid YAML: an anchor contains itself"),
        ("a: 1\n---\nb: 2\n", "{path}:2: not valid YAML: "),
        ("dataset: !!python/object:os.system {}\n", "{path}:1: not valid YAML: "),
    ],
)
def test_files_that_are_no_configuration(text, message, tmp_path):
    path = write(tmp_path, text)
    (error,) = get_errors(path)
    assert error.startswith(message.format(path=path))


def test_files_that_cannot_be_read(tmp_path):
    assert get_errors(tmp_path / "none.yaml") == [
        f"{tmp_path / 'none.yaml'}: cannot read the file: No such file or directory"
    ]
    assert get_errors(tmp_path) == [f"{tmp_path}: cannot read the file: Is a directory"]
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    assert get_errors(tmp_path / "binary") == [f"{tmp_path / 'binary'}: cannot read the file: it is not UTF-8 text"]


@pytest.mark.parametrize(
    "unknown, expected",
    [
        ("optimization.lr", "did you mean worker.actor.optim.lr or worker.critic.optim.lr?"),
        ("worker.actor.optim.learning_rte", None),
        ("training.rollout_batch_size", "did you mean dataset.rollout_batch_size?"),
        ("worker.actor.global_batchsize", "did you mean worker.actor.global_batch_size?"),
        ("datset.train_files", "did you mean dataset.train_files?"),
        ("optimization.temperature", "did you mean worker.rollout.temperature or worker.rollout.val.temperature?"),
        ("worker.ref.xyzzy", "worker.ref has the keys offload_params"),
        ("xyzzy", "the configuration has the keys dataset, training, optimization, worker"),
        ("dataset.seed.xyzzy", "dataset has the keys train_files, val_files"),
    ],
)
def test_unknown_keys_get_the_nearest_known_one(unknown, expected):
    error = only_error(f"{unknown}=1")
    assert error.startswith(f"command line: {unknown}: unknown key")
    assert expected is None or f"unknown key; {expected}" in error


# --- keys of other projects ---

FOREIGN = [(project, key, answer) for project, table in TABLES.items() for key, answer in table.items()]


def test_the_table_is_large_and_holds_no_key_of_ours():
    assert len({key for _, key, _ in FOREIGN}) == len(FOREIGN) >= 60
    assert not {key for _, key, _ in FOREIGN} & set(known_leaves())


@pytest.mark.parametrize("project, key, answer", FOREIGN)
def test_every_message_of_the_table_names_real_keys(project, key, answer):
    target = answer.partition(";")[0]
    assert target in known_leaves() or answer.startswith("none: ")
    for mentioned in re.findall(r"\b(?:dataset|training|optimization|worker)(?:\.\w+)+", answer):
        assert mentioned in known_leaves(), mentioned
    assert str(translate_key(key)).startswith(f"a key of {project}")


@pytest.mark.parametrize(
    "key, words",
    [
        ("algorithm.adv_estimator", "EasyR1 and verl; here it is optimization.advantage_estimator"),
        ("data.train_batch_size", "verl; here it is dataset.rollout_batch_size; both count prompts"),
        ("per_device_train_batch_size", "counts completions"),
        ("training.learning_rate", "TRL; here it is worker.actor.optim.lr"),
        ("rollout.collect_attentions", "here it is optimization.compute_attention_metrics"),
        ("actor_rollout_ref.rollout.top_p", "EasyR1 and verl; here it is worker.rollout.top_p"),
        ("repetition_penalty", "TRL without a counterpart: "),
    ],
)
def test_the_messages_for_foreign_keys(key, words):
    assert words in only_error(f"{key}=1")


def test_a_foreign_section_is_reported_key_by_key(tmp_path):
    path = write(tmp_path, "algorithm:\n  kl_ctrl:\n    type: fixed\n    horizon: 3\n")
    assert [error.split("; ")[1] for error in get_errors(path)] == [
        "here it is optimization.divergence_type",
        "here it is optimization.divergence_horizon",
    ]


def test_our_own_key_in_the_wrong_section_is_not_taken_for_a_foreign_one():
    assert translate_key("dataset.temperature") is None


# --- combinations that cannot work, and their neighbours that can ---

SCHEDULE = "worker.reward.weight_schedule"

IMPOSSIBLE = [
    (["worker.rollout.n=1"], ["worker.rollout.n = 1", "optimization.advantage_estimator = 'grpo' (default)"]),
    (["worker.rollout.n=1", "optimization.advantage_estimator=rloo"], ["rloo compares the responses"]),
    (
        ["dataset.rollout_batch_size=64"],
        ["worker.actor.global_batch_size = 256 (default)", "set worker.actor.global_batch_size to 64"],
    ),
    (["worker.actor.global_batch_size=100"], ["dataset.rollout_batch_size = 256 (default)"]),
    (["dataset.min_pixels=5000000"], ["dataset.min_pixels", "dataset.max_pixels"]),
    (["worker.rollout.max_new_tokens=513"], ["worker.rollout.max_new_tokens", "dataset.max_response_length"]),
    (["training.val_only=true", "dataset.train_files=a.jsonl"], ["training.val_only", "dataset.val_files"]),
    (
        ["worker.actor.ulysses_size=3", "training.n_gpus_per_node=4"],
        ["worker.actor.ulysses_size", "training.n_gpus_per_node"],
    ),
    (["worker.hybrid_engine=false"], ["worker.hybrid_engine", "worker.rollout.n_gpus"]),
    (["worker.rollout.n_gpus=2"], ["worker.hybrid_engine", "worker.rollout.n_gpus"]),
    (
        ["worker.rollout.noisy_half=true", "worker.rollout.n=7"],
        ["worker.rollout.noisy_half", "worker.rollout.n = 7", "set worker.rollout.n to an even number"],
    ),
    (
        ["worker.rollout.noisy_half=true", "optimization.advantage_estimator=reinforce_plus_plus"],
        ["worker.rollout.noisy_half", "worker.rollout.n = null (default)", "needs an even number of responses"],
    ),
    (
        ["worker.rollout.off_policy_steps=1", "optimization.tis_clip=null"],
        ["worker.rollout.off_policy_steps", "optimization.tis_clip"],
    ),
    (
        ["worker.actor.ulysses_size=2", "training.n_gpus_per_node=2", "worker.actor.model.attn_implementation=eager"],
        ["worker.actor.ulysses_size", "worker.actor.model.attn_implementation", "set auto"],
    ),
    (
        ["optimization.advantage_estimator=gae", "optimization.replay_buffer_size=64"],
        ["optimization.replay_buffer_size", "worker.rollout.n = null (default)"],
    ),
    (
        ["optimization.advantage_estimator=remax", "worker.reward.normalize=normalize_then_sum"],
        ["worker.reward.normalize", "worker.rollout.n"],
    ),
    (
        ["optimization.advantage_estimator=remax", "worker.reward.normalize=normalize_then_sum", "worker.rollout.n=4"],
        ["worker.reward.normalize", "optimization.advantage_estimator"],
    ),
    (
        ["optimization.disable_divergence=true", "optimization.use_divergence_loss=true"],
        ["optimization.disable_divergence", "optimization.use_divergence_loss"],
    ),
    (
        ["optimization.disable_divergence=true", "optimization.divergence_type=adaptive"],
        ["optimization.disable_divergence", "optimization.divergence_type"],
    ),
    (
        ["optimization.online_filtering=true", "optimization.filter_low=0.99"],
        ["optimization.filter_low", "optimization.filter_high"],
    ),
    (
        [
            "optimization.online_filtering=true",
            "optimization.filter_by=spread",
            "optimization.advantage_estimator=remax",
        ],
        ["optimization.filter_by", "worker.rollout.n"],
    ),
    (
        ["optimization.online_filtering=true", "optimization.filter_key=acuracy"],
        ["optimization.filter_key", "did you mean accuracy?"],
    ),
    (["optimization.token_weight_clip=[3.0,0.2]"], ["optimization.token_weight_clip"]),
    (
        ["optimization.enable_trajectory_reweighting=true", "optimization.trajectory_scaling_max=0.5"],
        ["optimization.trajectory_scaling_min", "optimization.trajectory_scaling_max"],
    ),
    (
        ["optimization.compute_attention_metrics=false", "worker.reward.functions=[accuracy,mdi]"],
        ["optimization.compute_attention_metrics", "worker.reward.functions", "mdi"],
    ),
    (
        ["optimization.compute_attention_metrics=false", "optimization.enable_token_weights=true"],
        ["optimization.compute_attention_metrics", "optimization.enable_token_weights"],
    ),
    (["worker.rollout.name=local", "worker.rollout.mode=process"], ["worker.rollout.name", "worker.rollout.mode"]),
    (["worker.rollout.mode=process"], ["worker.rollout.name = 'auto' (default)", "worker.rollout.mode"]),
    (
        ["worker.rollout.name=my.py:Engine", "worker.rollout.mode=server"],
        ["worker.rollout.name", "worker.rollout.mode"],
    ),
    (
        ["worker.rollout.name=local", "worker.rollout.tensor_parallel_size=2"],
        ["worker.rollout.name", "worker.rollout.tensor_parallel_size"],
    ),
    (
        ["worker.rollout.tensor_parallel_size=2", "training.n_gpus_per_node=2"],
        ["worker.rollout.name", "worker.rollout.tensor_parallel_size"],
    ),
    (["worker.rollout.name=vllm", "worker.rollout.mode=server"], ["worker.rollout.mode", "worker.rollout.address"]),
    (
        [
            "worker.rollout.name=vllm",
            "worker.rollout.mode=server",
            "worker.rollout.address=h:1",
            "worker.hybrid_engine=false",
            "worker.rollout.n_gpus=1",
        ],
        ["worker.rollout.mode", "worker.hybrid_engine", "a server has its own GPUs"],
    ),
    (
        ["worker.actor.fsdp.param_dtype=bf16", "worker.actor.fsdp.mixed_precision_dtype=fp32"],
        ["worker.actor.fsdp.param_dtype", "worker.actor.fsdp.mixed_precision_dtype"],
    ),
    (
        [
            "worker.actor.fsdp.param_dtype=bf16",
            "worker.actor.fsdp.param_rounding=kahan",
            "worker.actor.optim.name=adamw_8bit",
        ],
        ["worker.actor.fsdp.param_rounding", "worker.actor.optim.name"],
    ),
    (
        ["worker.actor.model.peft_type=lora", "worker.ref.sync_every=10"],
        ["worker.ref.sync_every", "worker.actor.model.peft_type"],
    ),
    (
        ["worker.rollout.name=vllm", "worker.rollout.tensor_parallel_size=2"],
        ["worker.rollout.tensor_parallel_size", "training.n_gpus_per_node"],
    ),
    (
        [
            "worker.rollout.name=vllm",
            "worker.hybrid_engine=false",
            "worker.rollout.n_gpus=3",
            "worker.rollout.tensor_parallel_size=2",
        ],
        ["worker.rollout.tensor_parallel_size", "worker.rollout.n_gpus"],
    ),
    (
        [
            "worker.rollout.name=vllm",
            "worker.rollout.mode=server",
            "worker.rollout.address=h:1",
            "worker.rollout.tensor_parallel_size=8",
        ],
        ["worker.rollout.mode", "worker.rollout.tensor_parallel_size"],
    ),
    (
        [
            "worker.actor.model.peft_type=lora",
            "worker.actor.model.freeze_vision_tower=true",
            "worker.actor.model.lora_vision_tower=true",
        ],
        ["worker.actor.model.freeze_vision_tower", "worker.actor.model.lora_vision_tower"],
    ),
    (
        ["training.record_attention_maps=true", "training.record_rollouts_per_step=0"],
        ["training.record_attention_maps", "training.record_rollouts_per_step"],
    ),
    (["worker.reward.reward_type=model"], ["worker.reward.reward_type", "worker.reward.model_path"]),
    (["worker.reward.functions=[]"], ["worker.reward.functions"]),
    (["worker.reward.functions=[accurcy]"], ["worker.reward.functions", "did you mean accuracy?"]),
    (
        ["worker.reward.functions=[accuracy]", "worker.reward.reward_fn_path=a.py"],
        ["worker.reward.functions", "worker.reward.reward_fn_path"],
    ),
    (["worker.reward.weights=[1,2,3]"], ["worker.reward.weights", "worker.reward.functions", "accuracy, format"]),
    (["worker.reward.early_weights=[1]"], ["worker.reward.early_weights", "worker.reward.functions"]),
    (["worker.reward.weights=[1,2]", "worker.reward.reward_fn_path=a.py"], ["worker.reward.weights", "(a.py)"]),
    ([f"{SCHEDULE}=[[0.0,[1,2]],[0.5,[1]]]"], [SCHEDULE, "worker.reward.functions"]),
    ([f"{SCHEDULE}=[[0.0,[1,2]]]", "worker.reward.early_weights=[1,2]"], [SCHEDULE, "worker.reward.early_weights"]),
    ([f"{SCHEDULE}=[[0.0,[1,2]]]", "worker.reward.weights=[1,2]"], [SCHEDULE, "worker.reward.weights"]),
    ([f"{SCHEDULE}=[]"], [SCHEDULE]),
    ([f"{SCHEDULE}=[[0.1,[1,2]]]"], [SCHEDULE]),
    ([f"{SCHEDULE}=[[0.0,[1,2]],[0.5,[1,2]],[0.5,[1,2]]]"], [SCHEDULE]),
    ([f"{SCHEDULE}=[[0.0,[1,2]],[1.5,[1,2]]]"], [SCHEDULE]),
]


@pytest.mark.parametrize("key", ["training.experiment_name", "training.project_name"])
@pytest.mark.parametrize("name", ["", " ", ".", "..", "../other", "a/../../b", "/tmp/run", "a\x1b[2J", "a\nb"])
def test_a_run_stays_in_its_folder(key, name):
    with pytest.raises(ConfigError) as raised:
        load_config(None, {key: name})
    assert key in str(raised.value) and "inside training.output_dir" in str(raised.value)
    assert load_config(None, {key: "a/b-1.2 c"})


@pytest.mark.parametrize("overrides, words", IMPOSSIBLE)
def test_combinations_that_cannot_work_name_the_keys(overrides, words):
    error = only_error(*overrides)
    assert error.startswith("command line: ")
    for word in words:
        assert word in error


@pytest.mark.parametrize(
    "overrides",
    [
        ["worker.rollout.n=2"],
        ["worker.rollout.noisy_half=true"],
        ["worker.rollout.noisy_half=true", "worker.rollout.off_policy_steps=1", "optimization.online_filtering=true"],
        ["worker.rollout.n=1", "optimization.advantage_estimator=gae"],
        ["dataset.rollout_batch_size=512"],
        ["worker.actor.global_batch_size=64"],
        ["dataset.min_pixels=4194304"],
        ["worker.rollout.max_new_tokens=512"],
        ["training.val_only=true"],  # the embedded task brings its own test questions
        ["optimization.advantage_estimator=gae", "optimization.replay_buffer_size=64", "worker.rollout.n=4"],
        ["optimization.disable_divergence=true"],
        ["optimization.filter_low=0.99"],  # not in use
        ["optimization.online_filtering=true", "optimization.filter_by=spread", "optimization.filter_low=0.99"],
        ["optimization.filter_key=acuracy"],
        ["optimization.online_filtering=true", "optimization.filter_key=format"],
        ["optimization.online_filtering=true", "optimization.filter_key=x", "worker.reward.reward_fn_path=mine.py"],
        ["optimization.token_weight_clip=[1,1]"],
        ["optimization.trajectory_scaling_max=0.5"],  # not in use
        ["optimization.enable_trajectory_reweighting=true", "optimization.trajectory_scaling_max=null"],
        ["optimization.policy_loss=gspo", "optimization.importance_sampling_level=token"],
        ["optimization.policy_loss=cispo", "optimization.importance_sampling_level=sequence"],
        ["optimization.compute_attention_metrics=auto", "worker.reward.functions=[accuracy,mdi]"],
        # A user's function may supply the token weights itself.
        [
            "optimization.compute_attention_metrics=false",
            "optimization.enable_token_weights=true",
            "worker.reward.reward_fn_path=a.py",
        ],
        ["worker.rollout.name=vllm", "worker.rollout.mode=server", "worker.rollout.address=localhost:8000"],
        ["worker.rollout.name=vllm", "worker.rollout.tensor_parallel_size=2", "training.n_gpus_per_node=4"],
        [
            "worker.rollout.name=vllm",
            "worker.hybrid_engine=false",
            "worker.rollout.n_gpus=2",
            "worker.rollout.tensor_parallel_size=2",
        ],
        ["worker.rollout.name=vllm", "worker.rollout.mode=process"],
        ["worker.actor.model.freeze_vision_tower=true", "worker.actor.model.lora_vision_tower=true"],  # no adapters
        ["worker.actor.model.peft_type=qlora", "training.n_gpus_per_node=8"],
        ["worker.reward.reward_type=model", "worker.reward.model_path=org/rm"],
        ["worker.reward.functions=[accuracy,my.module,mine.py:score]", "worker.reward.weights=[1,2,3]"],
        [f"{SCHEDULE}=[[0.0,[1,2]],[0.3,[2,1]],[1,[0,1]]]"],
        # The configuration does not check for switches that may not be supported yet.
        ["optimization.advantage_estimator=remax", "optimization.online_filtering=true", "worker.rollout.name=vllm"],
    ],
)
def test_neighbours_that_can_work_load(overrides):
    load_config(None, overrides)


def test_a_learning_rate_that_float32_cannot_hold_is_an_error():
    assert "expected a number in [0, 1e6], got 1e+38" in get_errors(None, "worker.actor.optim.lr=1e38")[0]
    assert load_config(None, ["worker.actor.optim.lr=30"]).worker.actor.optim.lr == 30


@pytest.mark.parametrize("key, largest", MAX_VALUES.items())
def test_absurd_sizes_are_errors_and_large_ones_are_not(key, largest):
    same = ["worker.actor.global_batch_size=1"] if key == "dataset.rollout_batch_size" else []
    same += ["dataset.max_pixels=1000000000"] if key == "dataset.min_pixels" else []
    assert f"the maximum is {largest:,}" in get_errors(None, f"{key}={largest + 1}", *same)[0]
    few = {"worker.rollout.n": "dataset.rollout_batch_size", "dataset.rollout_batch_size": "worker.rollout.n"}.get(key)
    rest = [f"{few}=2", "worker.actor.global_batch_size=1"] if few else []
    load_config(None, [f"{key}={largest}", *same, *rest])


@pytest.mark.parametrize(
    "overrides",
    [
        ["worker.rollout.n=1000000000"],
        ["training.max_steps=1000000000000000000"],
        ["worker.actor.ppo_epochs=1000000000"],
        ["dataset.val_batch_size=0"],
        ["dataset.val_batch_size=-1"],
        ["worker.actor.global_batch_size=0"],
        ["dataset.rollout_batch_size=1000000", "worker.actor.global_batch_size=1", "worker.rollout.n=1000"],
    ],
)
def test_a_run_that_never_ends_is_an_error(overrides):
    assert get_errors(None, *overrides)[0].startswith("command line: ")


@pytest.mark.parametrize(
    "overrides, count",
    [
        ([], 0),
        (["worker.rollout.val.n=4"], 1),
        (["worker.rollout.val.n=4", "worker.rollout.val.temperature=1.0"], 0),
        (["optimization.use_divergence_loss=true"], 1),
        (["optimization.use_divergence_loss=true", "optimization.divergence_penalty=low_var_kl"], 0),
        (["worker.actor.fsdp.param_dtype=bf16"], 1),
        (["worker.actor.fsdp.param_dtype=bf16", "worker.actor.optim.lr=9e-5"], 1),
        (["worker.actor.fsdp.param_dtype=bf16", "worker.actor.optim.lr=1e-4"], 0),
        (["worker.actor.fsdp.param_dtype=bf16", "worker.actor.optim.lr=0"], 0),
        (["worker.actor.optim.lr=1e-7"], 0),
        (["worker.actor.optim.lr=0.01"], 0),
        (["worker.actor.optim.lr=30"], 1),
        (["worker.actor.model.peft_type=lora"], 1),  # the default rate is for all weights
        (["worker.actor.model.peft_type=lora", "worker.actor.optim.lr=1e-5"], 0),
        (["worker.actor.model.peft_type=lora", "worker.actor.optim.lr=1e-5", "worker.actor.model.lora_dropout=0.1"], 1),
        (["worker.actor.model.lora_dropout=0.1"], 0),
    ],
)
def test_warnings(overrides, count):
    assert len(list(find_warnings(load_config(None, overrides)))) == count


def test_the_warning_about_small_steps_in_bf16_is_true():
    (said,) = find_warnings(load_config(None, ["worker.actor.fsdp.param_dtype=bf16"]))
    assert "1/512 of the weight is lost" in said and "weights over 0.0005 hardly learn" in said
    for size, changed in {0.02: False, 0.002: False, 0.0001: True}.items():
        weight = torch.full((1,), size, dtype=torch.bfloat16, requires_grad=True)
        before, optimizer = weight.item(), torch.optim.AdamW([weight], lr=1e-6)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert (weight.item() != before) == changed, size


@pytest.mark.usefixtures("fake_passes")
@pytest.mark.parametrize("command", ["train", "doctor"])
def test_commands_print_the_warnings(command, tmp_path, monkeypatch, capsys):
    """Before anything is built: here the run then fails, since the local engine does not support the setting."""
    monkeypatch.chdir(tmp_path)
    dtypes = [f"worker.actor.fsdp.{name}_dtype=bf16" for name in ("param", "mixed_precision")]
    words = [*dtypes, "worker.actor.optim.lr=1e-6", "worker.rollout.engine_kwargs={seed: 1}"]
    assert cli.main([command, *words]) == 2
    told = capsys.readouterr()
    assert (told.out + told.err).count("bf16 with worker.actor.optim.lr = 1e-06") == 1


@pytest.mark.parametrize("key", ["mixed_precision_dtype", "param_dtype"])
def test_fp16_is_answered_with_bf16(key):
    error = only_error(f"worker.actor.fsdp.{key}=fp16")
    assert "without a loss scaler small gradients vanish in fp16, set bf16" in error
