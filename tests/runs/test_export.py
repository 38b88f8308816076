"""`mtrl export`: other tools load exactly the trainer's model, and nothing else is changed."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants
from huggingface_hub.errors import LocalTokenNotFoundError
from tiny_models import checkpoint, get_encoder, plain_logp, prompt, prompts_for, random_rollouts
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

import mtrl
from mtrl.cli import main
from mtrl.commands import export_model as exporting
from mtrl.config import load_config
from mtrl.models import save_pretrained as models
from mtrl.models.parity import log_prob_gap

ROWS = [{"prompt": f"Say {name}.", "answer": name} for name in ("red", "blue", "green", "pink")]
KEYS = {"rollout_batch_size": 2, "global_batch_size": 2, "n": 2, "max_response_length": 6, "logger": [], "val_freq": 1}
KEYS |= {"mixed_precision_dtype": "fp32", "enable_gradient_checkpointing": False}


def trained(place, **keys):
    """A run of one step, in float32."""
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = str(place / "rows.jsonl")
    trainer = mtrl.Trainer(
        data=data, val_data=data, rewards=["accuracy", "format"], weights=[1.0, 0.25], max_steps=1, lr=1e-3,
        system_prompt="Answer briefly.", output_dir=str(place), experiment_name="short", **KEYS, **keys,
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("outputs"))


@pytest.fixture(scope="module")
def exported(trainer, tmp_path_factory):
    place = tmp_path_factory.mktemp("exported") / "model"
    assert main(["export", str(trainer.directory), "--to", str(place)]) == 0
    return place


@pytest.fixture
def no_network(monkeypatch):
    def refuse(address, timeout):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", refuse)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def damaged_copy(trainer, tmp_path):
    """The run's checkpoint with one byte of its weights changed."""
    copy = shutil.copytree(trainer.directory / "checkpoints" / "step_1", tmp_path / "step_1")
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    return copy


# ------------------------------------------------------------------------------------------------------- the weights
def gap_to_the_trainer(trainer, place, dtype):
    """Distance between the trainer's log-probs of some tokens, with an image, and those of plain transformers."""
    loaded = trainer._open()
    encoder, policy = loaded.encoder, loaded.policy
    prompts = [prompt(encoder, "t:0", "which colour is it", [(2, 2)]), prompt(encoder, "t:1", "how many")]
    rollouts = random_rollouts(prompts, [0, 0, 1], [7, 4, 5])
    ours = policy.signals(rollouts).old_logprobs
    model = AutoModelForImageTextToText.from_pretrained(place, dtype="auto").eval()
    assert model.dtype == dtype
    return log_prob_gap(ours, rollouts, model, encoder, temperature=policy.temperature, compute_dtype=dtype)


def test_transformers_loads_it_with_the_trainers_log_probs(trainer, exported):
    """The run computes in float32 and is exported in float32."""
    model = AutoModelForImageTextToText.from_pretrained(exported, dtype="auto")
    ours = trainer.model.state_dict()
    assert all(torch.equal(weight, ours[name]) for name, weight in model.state_dict().items())
    assert gap_to_the_trainer(trainer, exported, torch.float32).largest < 1e-4


def test_another_dtype_rounds_each_weight_once(trainer, tmp_path, capsys):
    assert main(["export", str(trainer.directory / "checkpoints" / "best_model"), "--to", str(tmp_path / "m"),
                 "--dtype=bf16"]) == 0  # fmt: skip
    message = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert message["dtype"] == "bf16" and message["checkpoint"].endswith("step_1") and message["pushed"] is None
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "m", dtype="auto")
    ours = trainer.model.state_dict()
    assert all(torch.equal(weight, ours[name].bfloat16()) for name, weight in model.state_dict().items())
    assert gap_to_the_trainer(trainer, tmp_path / "m", torch.bfloat16).within
    size = {place: sum(f.stat().st_size for f in place.glob("*.safetensors")) for place in tmp_path.iterdir()}
    assert size[tmp_path / "m"] < 0.6 * (trainer.directory / "checkpoints/step_1/model.safetensors").stat().st_size


def test_all_files_that_a_tool_needs_are_next_to_the_weights(trainer, exported):
    step = trainer.directory / "checkpoints" / "step_1"
    assert (exported / "preprocessor_config.json").read_bytes() == (step / "preprocessor_config.json").read_bytes()
    theirs, ours = AutoTokenizer.from_pretrained(exported), AutoTokenizer.from_pretrained(step)
    assert theirs.get_vocab() == ours.get_vocab() and theirs.chat_template == ours.chat_template
    stops = GenerationConfig.from_pretrained(exported).eos_token_id
    assert stops == GenerationConfig.from_pretrained(step).eos_token_id and stops is not None
    names = set(os.listdir(exported))
    assert not names & {"trainer", "trainer_state.json", "mtrl_manifest.json"}, (
        "files that only the trainer reads are not copied"
    )
    modes = {path.stat().st_mode & 0o777 for path in exported.iterdir()}
    assert modes == {(exported / "README.md").stat().st_mode & 0o777} and os.listdir(exported.parent) == ["model"]


def test_large_models_are_written_in_parts(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "MAX_SHARD_SIZE", "2MB")
    assert main(["export", str(trainer.directory), "--to", str(tmp_path / "m")]) == 0
    assert len(list((tmp_path / "m").glob("model-*.safetensors"))) > 3
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "m")
    assert all(torch.equal(weight, trainer.model.state_dict()[name]) for name, weight in model.state_dict().items())


def test_a_run_of_adapters_has_the_trainers_log_probs(tmp_path):
    pytest.importorskip("peft")
    trainer, learnt, later = trained(tmp_path, peft_type="lora", lora_rank=4), tmp_path / "learnt", tmp_path / "later"
    assert main(["export", str(trainer.directory), "--to", str(learnt)]) == 0
    assert gap_to_the_trainer(trainer, learnt, torch.float32).largest < 1e-4
    with torch.no_grad():  # as after many steps
        for name, weight in trainer.model.named_parameters():
            if ".lora_B." in name:
                weight.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    assert gap_to_the_trainer(trainer, learnt, torch.float32).largest > 0.1, "adapters make a difference"
    trainer.save(tmp_path / "adapters")
    assert main(["export", str(tmp_path / "adapters"), "--to", str(later), "--dtype", "fp32"]) == 0
    assert gap_to_the_trainer(trainer, later, torch.float32).largest < 1e-4
    for place in (learnt, later):
        assert "model.safetensors" in os.listdir(place) and not list(place.glob("adapter*"))
    assert "peft_type: lora" in (learnt / "README.md").read_text().replace("worker.actor.model.", "")


def test_adapters_are_merged(tmp_path):
    """An adapter as peft writes it: base and adapter give the log-probs of the merged model."""
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(checkpoint("qwen2"), dtype=torch.float32)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, settings).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    assert main(["export", str(tmp_path / "adapter"), "--to", str(tmp_path / "m"), "--dtype", "fp32"]) == 0
    rollouts = random_rollouts(prompts_for("qwen2")[:2], [0, 1], [6, 9])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto").eval()
    with torch.no_grad():
        theirs, before = plain_logp("qwen2", rollouts, model=adapted), plain_logp("qwen2", rollouts)
        ours = plain_logp("qwen2", rollouts, model=merged)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert (ours - before).abs().max() > 0.01, "the adapter does something"
    assert AutoTokenizer.from_pretrained(tmp_path / "m").get_vocab() == get_encoder("qwen2").tokenizer.get_vocab()


def test_the_template_that_a_run_trained_with_goes_along(tmp_path):
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    files = models.read_encoder_files(checkpoint("qwen2"), template)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    said = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False
    )
    assert said == "user: a"


# ----------------------------------------------------------------------------------------------------------- the card
def test_the_card_describes_the_run(trainer, exported):
    card = (exported / "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    assert yaml.safe_load(head)["pipeline_tag"] == "image-text-to-text" and "grpo" in yaml.safe_load(head)["tags"]
    assert "base_model" not in head, "the embedded model is on no hub"
    score = [row["val/reward_score"] for row in trainer.history.validations]
    (line,) = [line for line in text.splitlines() if line.startswith("| reward_score |")]
    assert line == f"| reward_score | {score[0]:.4g} | {score[-1]:.4g} |"
    assert "![" in text and (exported / "curve.png").stat().st_size > 5_000
    for expected in ("run `short`, step 1", "| training | rows.jsonl |", "Answer briefly.", "| format | 0.25 |",
                     "| accuracy | 1 |", "## Samples", "Say red."):  # fmt: skip
        assert expected in text, expected
    assert str(trainer.directory.parent) not in card, "paths of this machine must not be published"


def test_the_card_says_what_its_processor_needs(exported):
    assert "pip install torchvision" in (exported / "README.md").read_text()


def test_the_settings_of_the_card_are_a_configuration(trainer, exported, tmp_path):
    block = (exported / "README.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "run.yaml").write_text(block)
    config = load_config(tmp_path / "run.yaml")
    assert config.optimization == trainer.config.optimization and config.worker == trainer.config.worker


def test_a_bare_checkpoint_has_a_card_too(trainer, tmp_path):
    bare = shutil.copytree(trainer.directory / "checkpoints" / "step_1", tmp_path / "elsewhere" / "step_1")
    assert main(["export", str(bare), "--to", str(tmp_path / "m")]) == 0
    card = (tmp_path / "m" / "README.md").read_text()
    assert "from_pretrained" in card and "## Configuration" not in card


def test_a_base_of_the_hub_is_named_for_the_hub():
    config = load_config(None, {"worker.actor.model.model_path": "Qwen/Qwen2.5-VL-3B-Instruct"})
    message, named = exporting.base_model(exporting.ExportSource(Path("step_1"), Path("run"), config))
    assert named == "Qwen/Qwen2.5-VL-3B-Instruct" and named in message


# ----------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "which model? mtrl export RUN|CHECKPOINT --to DIR"),
        (["nowhere", "--to", "new"], "there is no checkpoint nowhere"),
        (["nowhere"], "--to: name a new directory; mtrl export RUN|CHECKPOINT --to DIR"),
        (["nowhere", "--to"], "--to: expected one argument; mtrl export RUN|CHECKPOINT --to DIR"),
        (["nowhere", "--to", "new", "--dtype", "fp8"], "--dtype: invalid choice: 'fp8' (choose from"),
        (["nowhere", "--into", "new", "--to", "new"], "there is no option --into; mtrl export"),
        (["one", "two", "--to", "new"], "two: name one model"),
        (["nowhere", "--to", "full"], "full exists and is not empty"),
        (["nowhere", "--to", "full/thesis.tex"], "full/thesis.tex exists"),
        (["nowhere", "--to", "new", "--push", "name"], "--push: name is not the name of a repository; write ORG/NAME"),
        (["empty", "--to", "new"], "empty is no checkpoint directory"),
    ],
)
def test_user_errors_are_reported_at_once(words, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    assert main(["export", *words]) == 2
    said = capsys.readouterr().err
    assert named in said and len(said.splitlines()) <= 2 and sorted(os.listdir(tmp_path)) == ["empty", "full"]


def test_a_damaged_checkpoint_is_an_error(trainer, tmp_path, capsys):
    copy = damaged_copy(trainer, tmp_path)
    assert main(["export", str(copy), "--to", str(tmp_path / "m")]) == 2
    assert "model.safetensors has changed since it was written" in capsys.readouterr().err
    (copy / "mtrl_manifest.json").unlink()
    assert main(["export", str(copy), "--to", str(tmp_path / "m")]) == 2
    assert "mtrl_manifest.json is missing" in capsys.readouterr().err and not (tmp_path / "m").exists()


def test_a_failed_export_leaves_no_files(trainer, tmp_path, monkeypatch, capsys):
    def full(card):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "model_card", full)
    assert main(["export", str(trainer.directory), "--to", str(tmp_path / "m")]) == 2
    assert "No space left on device" in capsys.readouterr().err and os.listdir(tmp_path) == []


def test_too_little_disk_space_is_reported_before_writing(trainer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10, 10, 0))
    assert main(["export", str(trainer.directory), "--to", str(tmp_path / "m")]) == 2
    assert "0.00 GB are free" in capsys.readouterr().err and os.listdir(tmp_path) == []


# ---------------------------------------------------------------------------------------------------------------- hub
class FakeHub:
    """A fake of `huggingface_hub.HfApi` that records its calls and has no network."""

    asked: list = []  # noqa: RUF012
    logged_in = True

    def create_repo(self, repository, **options):
        if not self.logged_in:
            raise LocalTokenNotFoundError("no token was found")
        self.asked.append((repository, options))
        return f"https://hub.invalid/{repository}"

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.asked.append((repo_id, sorted(os.listdir(folder_path))))


@pytest.fixture
def fake_hub(monkeypatch):
    monkeypatch.setattr(exporting, "HfApi", FakeHub)
    monkeypatch.setattr(exporting, "connection_error", lambda: None)
    monkeypatch.setattr(FakeHub, "asked", [])
    return FakeHub


def test_an_unreachable_hub_is_reported_at_once(trainer, tmp_path, no_network, capsys):
    assert main(["export", str(trainer.directory), "--to", str(tmp_path / "m"), "--push", "me/model"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "cannot be reached (huggingface.co: Name or service not known)" in line and "hf upload me/model" in line
    assert os.listdir(tmp_path) == [], "before anything is done"


def test_pushing_makes_a_private_repository_and_uploads_all(trainer, tmp_path, fake_hub, capsys):
    assert main(["export", str(trainer.directory), "--to", str(tmp_path / "m"), "--push", "me/model"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["pushed"] == "https://hub.invalid/me/model"
    made, uploaded = fake_hub.asked
    assert made == ("me/model", {"private": True, "exist_ok": True})
    assert uploaded == ("me/model", sorted(os.listdir(tmp_path / "m")))
    assert 'from_pretrained("me/model"' in (tmp_path / "m" / "README.md").read_text()


def test_a_push_that_fails_leaves_the_export(trainer, tmp_path, fake_hub, monkeypatch, capsys):
    monkeypatch.setattr(fake_hub, "logged_in", False)
    assert main(["export", str(trainer.directory), "--to", str(tmp_path / "m"), "--push", "me/model"]) == 1
    assert "is complete, but could not be pushed to me/model: no token was found" in capsys.readouterr().err
    assert (tmp_path / "m" / "config.json").is_file()
