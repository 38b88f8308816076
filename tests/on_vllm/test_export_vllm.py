"""A folder that a run leaves behind is a model for vLLM as it is: the trainer's log-probs, without any handing over."""

import pytest
from run_helpers import run_of, train_arguments
from vllm_engines import INSTALLED, MAX_LENGTH

from mtrl import cli
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.forward import Forward
from mtrl.models.load import load_model
from mtrl.models.weights import exported_weights
from mtrl.rollout.vllm.generator import VllmGenerator
from mtrl.rollout.vllm.inprocess import VllmInProcess
from mtrl.rollout.vllm.settings import engine_arguments
from mtrl.types import Sampling
from mtrl.zoo.exam import prompts_of
from mtrl.zoo.rows import MODEL_DIRECTORY
from mtrl.zoo.task import make_question

pytestmark = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")

QUESTIONS = [make_question("test", index) for index in range(8)]
LARGE_STEPS = ("training.max_steps=1", "worker.actor.optim.lr=1e-3", "worker.actor.optim.warmup_steps=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The checkpoint of a run that has learnt something."""
    output = tmp_path_factory.mktemp("run")
    assert cli.main(train_arguments(output, *LARGE_STEPS)) == 0
    return run_of(output) / "checkpoints" / "step_1"


def test_a_checkpoint_of_a_run_is_a_model_of_vllm(folder):
    encoder, model = load_encoder(folder, min_pixels=3136, max_pixels=3136), load_model(folder)
    arguments = engine_arguments(
        str(folder), dtype="float32", max_length=MAX_LENGTH, extra={"kv_cache_memory_bytes": 2**26}
    )
    host = VllmInProcess(arguments, encoder.image_settings.processor_arguments())
    engine = VllmGenerator(host, encoder, exported_weights(model).keys())
    rollouts = engine.generate(prompts_of(QUESTIONS, encoder), Sampling(n=4, max_new_tokens=24))
    engine.close()
    trained, given = (
        Forward(Backbone(each), encoder).signals(rollouts).old for each in (model, load_model(MODEL_DIRECTORY))
    )
    assert (trained - rollouts.behaviour).abs().max() < 1e-4
    assert (given - rollouts.behaviour).abs().max() > 1e-2, "the model that the run began with would say otherwise"
