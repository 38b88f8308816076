"""Numbers that are not finite end a run with one line: what happened and what to change."""

import pytest
import torch
from tiny_models import fresh_backbone, get_encoder, prompts_for

from mtrl import cli
from mtrl.compose.policy import warn_about_large_lr
from mtrl.rollout.local import LocalGenerator, explain_non_finite
from mtrl.types import Sampling
from mtrl.utils.errors import Diverged, RunError

FAMILY = "qwen2"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("version", "message"), [(0, "are broken. Use another"), (3, "has diverged by update 3")])
def test_sampling_from_nan_reports_what_to_change(version, message, temperature):
    generator = LocalGenerator(fresh_backbone(FAMILY), get_encoder(FAMILY), version=version)
    prompts = prompts_for(FAMILY)[:2]
    sampling = Sampling(n=2, max_new_tokens=4, temperature=temperature, version=version)
    generator.generate(prompts, sampling)
    with torch.no_grad():
        generator.backbone.output_matrix[7] = torch.nan
    with pytest.raises(Diverged, match="logits are NaN or infinite") as error:
        generator.generate(prompts, sampling)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_narrow_dtype_may_be_the_cause():
    assert "too large for bfloat16. Compute in fp32" in explain_non_finite(0, torch.bfloat16)


def test_one_row_of_many_is_enough():
    """A token's own embedding that is broken breaks only the rows that hold it."""
    generator = LocalGenerator(fresh_backbone(FAMILY), get_encoder(FAMILY))
    prompts = prompts_for(FAMILY)[:2]
    only = set(prompts[1].ids.tolist()) - set(prompts[0].ids.tolist())
    model = generator.backbone.model
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # no longer tied
    with torch.no_grad():
        model.get_input_embeddings().weight[min(only)] = torch.inf
    with pytest.raises(Diverged):
        generator.generate(prompts, Sampling(n=1, max_new_tokens=2))


def test_the_command_reports_it_in_one_line(monkeypatch, capsys):
    def train(_arguments):
        raise Diverged("the numbers are not finite")

    monkeypatch.setitem(cli.COMMANDS, "train", train)
    assert issubclass(Diverged, RunError) and cli.main(["train"]) == 1
    assert capsys.readouterr().err == "mtrl: the numbers are not finite\n"


@pytest.mark.parametrize(("lr", "warns"), [(30.0, True), (1e-3, False), (0.0, False)])
def test_a_learning_rate_as_large_as_the_weights_is_reported(lr, warns, caplog):
    """All numbers may stay finite, so nothing else would report it."""
    warn_about_large_lr("worker.actor.optim.lr", lr, fresh_backbone(FAMILY).model)
    assert ("worker.actor.optim.lr = 30 is larger than the weights themselves" in caplog.text) is warns
    assert bool(caplog.records) is warns
