"""Responses of several turns sampled by vLLM: each turn is a prompt with all images so far."""

from functools import partial

import pytest
from conversation_helpers import SAMPLING, calls, check_log_probs, conversing
from tiny_models import prompts_for
from vllm_engines import INSTALLED, engine_on, in_process

__all__ = ["calls"]
pytestmark = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llama"])
def test_the_trainer_has_vllms_log_probs(family, calls, tmp_path):
    engine = partial(engine_on, in_process(family))
    with conversing(tmp_path, family, engine) as generator, generator.resident():
        rollouts = generator.generate(prompts_for(family)[:3], SAMPLING)
    check_log_probs(rollouts, family, 1e-4)
