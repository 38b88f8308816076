"""`mtrl config explain`: explains one key, with its names in other projects, or one metric."""

import pytest

from mtrl.cli import main
from mtrl.config.explain import explain
from mtrl.config.foreign_keys import (
    SAME_NAMES,
    TABLES,
    foreign_names,
    iterate_same_names,
    rename_section,
    translate_key,
)
from mtrl.config.tree import known_leaves, known_sections
from mtrl.utils.metric_glossary import known_metrics


def test_a_key_in_full():
    assert explain("optimization.divergence_coef").splitlines() == [
        "optimization.divergence_coef",
        "  meaning      coefficient of the divergence",
        "  default      0.01",
        "  takes        a number of at least 0",
        "  on resuming  must stay the same; another value is another run",
        "  in EasyR1    algorithm.kl_coef",
        "  in verl      actor_rollout_ref.actor.kl_loss_coef",
        "               algorithm.kl_ctrl.kl_coef",
        "  in TRL       beta (TRL's KL is a loss term, set optimization.use_divergence_loss)",
    ]


@pytest.mark.parametrize("key, leaf", known_leaves().items())
def test_every_key_can_be_explained(key, leaf):
    lines = explain(key).splitlines()
    assert lines[0] == key and lines[1].endswith(f"  {leaf.meaning}")
    assert ("may be changed" in lines[4]) == leaf.may_change


def test_a_last_name_explains_every_key_that_has_it():
    assert explain("top_p_entropy_tokens") == explain("optimization.top_p_entropy_tokens")
    assert explain("lr") == f"{explain('worker.actor.optim.lr')}\n\n{explain('worker.critic.optim.lr')}"


def test_a_metric_in_full():
    assert explain("response_length/truncated").splitlines() == [
        "response_length/truncated",
        "  meaning  share of the responses that were cut at the length limit",
        "  unit     share",
        "  reading  Lower is better. Cut responses rarely contain an answer. Raise dataset.max_response_length, add "
        "the reward `length`, or set optimization.mask_truncated_responses.",
    ]
    assert explain("reward/brief").splitlines()[-1] == "  family   reward/{function}"


@pytest.mark.parametrize("name, entry", known_metrics().items())
def test_every_metric_can_be_explained(name, entry):
    lines = explain(name).splitlines()
    assert lines[0] == name and lines[1].endswith(f"  {entry.meaning}") and lines[3].endswith(f"  {entry.reading}")


@pytest.mark.parametrize("section", sorted(known_sections()))
def test_a_section_lists_its_keys_in_a_line_each(section):
    keys = [key for key in known_leaves() if key.startswith(f"{section}.")]
    lines = [line for line in explain(section).splitlines() if not line.endswith(":")]
    assert [line.split(":")[0].strip() for line in lines] == [key.rpartition(".")[2] for key in keys]
    assert all(known_leaves()[key].meaning in line for key, line in zip(keys, lines, strict=True))


@pytest.mark.parametrize(
    "words, message",
    [
        (["explain", "optimization.entropy_coef"], "optimization.entropy_coef: unknown key, a key of TRL"),
        (["explain", "worker.rollout.temprature"], "did you mean worker.rollout.temperature"),
        (["explain", "num_generations"], "a key of TRL; here it is worker.rollout.n"),
        (["explain", "dataset.seed", "dataset.shuffle"], "dataset.shuffle: one key at a time"),
        (["--help", "datset.seed"], "did you mean dataset.seed"),
        (["explain", "actor/entorpy"], "actor/entorpy: unknown metric; did you mean actor/entropy?"),
        (["explain", "clipfrac"], "clipfrac: unknown key; did you mean actor/clipfrac?"),
        (["explain", "grad_norm"], "did you mean worker.actor.max_grad_norm or actor/grad_norm or critic/grad_norm?"),
        (
            ["explain", "mine/weight"],
            "mine/weight: unknown metric; metrics begin with reward/, response_length/, tools/, val/",
        ),
    ],
)
def test_an_unknown_name_gets_the_nearest_ones(words, message, capsys):
    assert main(["config", *words]) == 2
    assert message in capsys.readouterr().err


def test_help_of_a_key_explains_it_and_help_alone_is_help(capsys):
    assert main(["config", "--help", "dataset.seed"]) == main(["config", "explain", "dataset.seed"]) == 0
    assert capsys.readouterr().out == f"{explain('dataset.seed')}\n" * 2
    assert main(["config", "run.yaml", "--help"]) == 0
    assert "mtrl config explain" in capsys.readouterr().out


# --- names elsewhere ---


def test_every_printed_name_is_in_the_tables():
    """And the way back leads to the same key."""
    for key in known_leaves():
        for project, names in foreign_names(key).items():
            assert len(names) == len(set(names))
            for name in (message.partition(" (")[0] for message in names):
                tabled = any(name in table for owner, table in TABLES.items() if project in owner)
                assert tabled or (project, name) in set(iterate_same_names()), name
                assert name == key or str(translate_key(name)).partition("here it is ")[2].startswith(key)


def test_every_entry_of_the_tables_is_printed_at_its_key():
    for owner, table in TABLES.items():
        for name, answer in table.items():
            if not answer.startswith("none: "):
                message = foreign_names(answer.partition(";")[0])
                assert all(name in "\n".join(message[project]) for project in owner.split(" and "))


def test_same_names_are_ours_in_another_section_at_most():
    names = list(iterate_same_names())
    assert len(names) == len(set(names)) and SAME_NAMES.keys() == {"EasyR1", "verl"}
    for project, name in names:
        assert rename_section(name) in known_leaves(), name
        assert not any(name in table for owner, table in TABLES.items() if project in owner), f"{name} stands twice"


@pytest.mark.parametrize(
    "key", ["optimization.enable_token_weights", "dataset.options_key", "worker.reward.mdi_balance_ratio"]
)
def test_keys_without_a_counterpart_have_no_name_elsewhere(key):
    assert foreign_names(key) == {} and "  in " not in explain(key)
