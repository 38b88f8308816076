"""What a run leaves behind is a model for vLLM: the trainer's log-probs, without any handing over."""

import pytest
from run_helpers import get_run_dir, train_arguments
from vllm_engines import INSTALLED, MAX_LENGTH

from mtrl import cli
from mtrl.compose.run import configure, open_model
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.embedded.task import make_question
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.models.state_dicts import exported_weights
from mtrl.rollout.vllm.generator import VllmGenerator
from mtrl.rollout.vllm.inprocess import VllmInProcess
from mtrl.rollout.vllm.settings import make_llm_arguments
from mtrl.types import Sampling
from pretraining.evaluation import make_prompts

pytestmark = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")

QUESTIONS = [make_question("test", index) for index in range(8)]
LARGE_STEPS = ("training.max_steps=1", "worker.actor.optim.lr=1e-3", "worker.actor.optim.warmup_steps=0")


LORA = ("worker.actor.model.peft_type=lora", "worker.actor.optim.lr=3e-2")


def log_probs_of_vllm(folder):
    """Texts that vLLM samples from the model of a folder."""
    encoder = load_encoder(folder, min_pixels=3136, max_pixels=3136)
    arguments = make_llm_arguments(
        str(folder), dtype="float32", max_length=MAX_LENGTH, extra={"kv_cache_memory_bytes": 2**26}
    )
    host = VllmInProcess(arguments, encoder.engine_image_arguments())
    engine = VllmGenerator(host, encoder, exported_weights(load_model(folder)).keys())
    rollouts = engine.generate(make_prompts(QUESTIONS, encoder), Sampling(n=4, max_new_tokens=24))
    engine.close()
    return rollouts


@pytest.mark.parametrize("adapters", [(), LORA], ids=["all weights", "adapters"])
def test_vllm_loads_the_models_of_a_run(tmp_path, adapters):
    """A checkpoint as it is; adapters once they are merged by `mtrl export`."""
    words = train_arguments(tmp_path / "out", *LARGE_STEPS, *adapters)
    assert cli.main(words) == 0
    folder = get_run_dir(tmp_path / "out") / "checkpoints" / "step_1"
    if adapters:
        folder = tmp_path / "exported"
        assert cli.main(["export", str(get_run_dir(tmp_path / "out")), "--to", str(folder)]) == 0
    rollouts = log_probs_of_vllm(folder)
    trained = open_model(configure(None, words[1:])[0]).policy.signals(rollouts).old_logprobs
    assert (trained - rollouts.rollout_logprobs).abs().max() < 1e-4
    given = Forward(Backbone(load_model(MODEL_DIRECTORY)), load_encoder(folder)).signals(rollouts).old_logprobs
    assert (given - rollouts.rollout_logprobs).abs().max() > 1e-2, "the initial model would respond differently"
