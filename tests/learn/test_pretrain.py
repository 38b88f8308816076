"""Pretraining: its examples are those of the shipped model, and the command makes a checkpoint that loads."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.embedded.task import make_question
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.load_model import load_model
from mtrl.models.parity import plain_inputs, row_log_probs
from pretraining import look_again_teacher, pretrain
from pretraining.evaluation import make_prompts
from pretraining.examples import make_example, pad_examples


def test_the_shipped_model_knows_its_lessons():
    encoder = load_encoder(MODEL_DIRECTORY)
    curriculum = pretrain.CURRICULA["zoo"]
    made = [make_example(i, encoder, curriculum) for i in range(40)]
    examples = pad_examples(made, torch.device("cpu"), curriculum)
    torch.testing.assert_close(examples.probabilities.sum(1), torch.ones(40))
    backbone = Backbone(load_model(MODEL_DIRECTORY))
    looking = torch.ones(40, dtype=torch.long)  # the teacher's second kind of answer: it looks and names what it sees
    with torch.no_grad():
        known = float(pretrain.teacher_loss(backbone, examples, torch.arange(40), looking))
        unseen = examples._replace(images=[*examples.images[1:], examples.images[0]])  # its neighbour's picture
        blind = float(pretrain.teacher_loss(backbone, unseen, torch.arange(40), looking))
    assert known < 0.2 < blind


def made(folder, *words):
    """What the command writes of itself."""
    threads = torch.get_num_threads()
    pretrain.main([*words, "--out", str(folder), "--device", "cpu"])
    torch.set_num_threads(threads)
    return json.loads((folder / "made_by.json").read_text())


TINY = {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "vision_hidden": 16, "vision_layers": 2}


@pytest.mark.parametrize("is_tiny", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tiny", "as shipped"])
def test_the_command_makes_a_checkpoint(is_tiny, tmp_path, monkeypatch):
    if is_tiny:
        tiny = replace(pretrain.CURRICULA["zoo"], model_shape=TINY, max_new_tokens=4)
        monkeypatch.setitem(pretrain.CURRICULA, "zoo", tiny)
        monkeypatch.setattr("os.cpu_count", lambda: 1)
    made_by = made(tmp_path, "--steps", "6", "--batch", "8", "--examples", "40", "--questions", "5")
    assert made_by["steps"] == 6
    assert is_tiny or made_by["loss"] < 6.2, "log(512) = 6.24 is the loss of a uniform model"
    assert set(made_by["greedy"]) == {"avg", "best", "form", "by_kind"}
    assert load_model(tmp_path, dtype="bf16").dtype == torch.bfloat16
    assert load_encoder(tmp_path).fingerprint() == load_encoder(MODEL_DIRECTORY).fingerprint()


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "smolvlm", "internvl", "glm4v"])
def test_the_loss_is_that_of_transformers(family, tmp_path):
    """By its own forward of each row, with the images, positions and masks of the family."""
    curriculum = replace(pretrain.CURRICULA["zoo"], model_shape=TINY)
    start = pretrain.make_start(tmp_path, family, curriculum, seed=0)
    encoder, plain = load_encoder(start), load_model(start)
    for weight in plain.parameters():  # a random model of this size hardly looks at the picture
        weight.data *= 5 if weight.dim() > 1 else 1
    backbone = Backbone(copy.deepcopy(plain))
    made = [make_example(index, encoder, curriculum) for index in range(3)]
    examples = pad_examples(made, torch.device("cpu"), curriculum)
    theirs = []
    for index, example in enumerate(made):
        (prompt,) = make_prompts([make_question("train", index)], encoder)
        row = plain_inputs(encoder.inputs(prompt), prompt, example.responses[1])
        theirs.append(row_log_probs(plain, row, example.responses[1], forbidden_ids=()))
    with torch.no_grad():
        loss = pretrain.teacher_loss(backbone, examples, torch.arange(3), torch.ones(3, dtype=torch.long))
        unseen = examples._replace(images=[*examples.images[1:], examples.images[0]])
        other = pretrain.teacher_loss(backbone, unseen, torch.arange(3), torch.ones(3, dtype=torch.long))
    torch.testing.assert_close(loss, -torch.cat(theirs).mean(), rtol=0, atol=5e-5)
    assert abs(other - loss) > 1e-3, "another picture changes it"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "smolvlm"])
def test_another_family(family, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(pretrain.CURRICULA, "zoo", replace(pretrain.CURRICULA["zoo"], model_shape=TINY))
    words = ("--family", family, "--steps", "2", "--batch", "4", "--examples", "20", "--questions", "2")
    made(tmp_path, *words)
    model, encoder = load_model(tmp_path, dtype="bf16"), load_encoder(tmp_path)
    assert model.config.model_type == family and model.config.text_config.num_hidden_layers == 2
    side = 64 if family == "qwen3_5" else 56
    assert encoder.target_size(56, 56) == (side, side)  # as many tokens as in the packaged model
    (blank,) = make_prompts([make_question("test", 0)], encoder, blank=True)
    assert len(Backbone(model).encode_images([encoder.inputs(blank)])[0].embeds) == 4, "grey is not padding"
    with pytest.raises(SystemExit):
        pretrain.main([*words, "--device", "cpu"])
    assert "give it a folder with --out" in capsys.readouterr().err


@pytest.mark.slow
def test_the_other_task_has_the_same_command(tmp_path, monkeypatch):
    """A curriculum with much shorter answers than the real one: the words are learnt first."""
    monkeypatch.setitem(pretrain.CURRICULA, "scenes", replace(pretrain.CURRICULA["scenes"], max_new_tokens=16))
    made_by = made(tmp_path, "scenes", "--steps", "12", "--batch", "4", "--examples", "40", "--questions", "2")
    assert made_by["steps"] == 12 and made_by["loss"] < 6.2, "log(700) = 6.6 is the loss of a uniform model"
    assert set(made_by["blank"]["by_kind"]) == {"colour", "shape"}, "of the first two questions"
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 15e6, "small enough to be shipped"
    model, encoder = load_model(tmp_path), load_encoder(tmp_path)
    assert model.get_input_embeddings().num_embeddings == len(encoder.tokenizer)


# ------------------------------------------------------------------------------------------- responses of several turns
LOOK_AGAIN = replace(pretrain.CURRICULA["lookagain"], model_shape=TINY | {"vocabulary": 1024}, max_new_tokens=4)


def test_the_loss_over_two_turns_is_that_of_transformers(tmp_path):
    """Of the teacher's own tokens in both turns, by one forward over the whole conversation with both images. The
    choice to zoom counts only where the teacher teaches it."""
    start = pretrain.make_start(tmp_path, "qwen2_5_vl", LOOK_AGAIN, seed=0)
    encoder, plain = load_encoder(start), load_model(start)
    looks = {
        index: look_again_teacher.demonstrations(LOOK_AGAIN.make_question("train", index))[0] for index in range(60)
    }
    chosen = [
        next(index for index, look in looks.items() if look.first and look.teaches_choice == taught)
        for taught in (True, False)
    ]
    made = [make_example(index, encoder, LOOK_AGAIN) for index in chosen]
    theirs = []
    for index, example in zip(chosen, made, strict=True):
        begun, is_taught = look_again_teacher.begin(LOOK_AGAIN.make_question("train", index), [looks[index]], encoder)
        assert example.inputs["image_grid_thw"].tolist() == 2 * [[1, 4, 4]]
        assert encoder.tokenizer.decode(begun.ids[is_taught]).endswith("</tool_call><|im_end|>")
        row = plain_inputs(encoder.inputs(begun), begun, example.responses[0])
        own = torch.cat([is_taught, torch.ones(len(example.responses[0]), dtype=torch.bool)])
        ids = row["input_ids"][0]
        with torch.no_grad():
            logp = plain(**row).logits[0].log_softmax(-1)
        theirs.append(logp[:-1].gather(1, ids[1:, None])[own[1:], 0])
    calls = [len(encoder.tokenizer(looks[index].first)["input_ids"]) + 1 for index in chosen]
    assert [int(example.is_taught.sum()) for example in made] == [calls[0], calls[1] - 1]
    examples = pad_examples(made, torch.device("cpu"), LOOK_AGAIN)
    with torch.no_grad():
        loss = pretrain.teacher_loss(Backbone(plain), examples, torch.arange(2), torch.zeros(2, dtype=torch.long))
    torch.testing.assert_close(loss, -torch.cat(theirs).mean(), rtol=0, atol=5e-5)


def test_a_model_with_a_tool(tmp_path, monkeypatch):
    """The command makes it, and measures what its tool is worth."""
    monkeypatch.setitem(pretrain.CURRICULA, "lookagain", LOOK_AGAIN)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    made_by = made(tmp_path, "lookagain", "--steps", "2", "--batch", "4", "--examples", "16", "--questions", "4")
    assert made_by["loss"] < 6.6, "log(531) = 6.3 is the loss of a uniform model"
    for name in ("greedy", "sampled at temperature 1, 8 times"):
        assert made_by[name]["questions"] == 4 and made_by[name]["with_tools"] < 1
    (look, *_), question = look_again_teacher.TOOLS[""], {"role": "user", "content": "?"}
    rendered = load_encoder(tmp_path).render([question], [look])
    assert rendered.startswith(
        "<|im_start|>system\nYou are a helpful assistant.\nzoom(box): Shows a part of the picture enlarged.<|im_end|>"
    )
