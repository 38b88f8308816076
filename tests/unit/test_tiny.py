"""Tiny checkpoints: real Hugging Face directories, made in a moment, the same each time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from mtrl.models.tiny_tokenizer import SPECIAL_TOKENS, tiny_tokenizer
from pretraining.tiny_checkpoints import TEXT_FAMILIES, TINY_FAMILIES, make_tiny_checkpoint

HELLO = [{"role": "user", "content": "the cat"}]


def load(path, family):
    auto = AutoModelForCausalLM if family in TEXT_FAMILIES else AutoModelForImageTextToText
    return auto.from_pretrained(path)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_loads_with_the_auto_classes_and_generates(tmp_path, family):
    path = make_tiny_checkpoint(tmp_path / family, family)
    model, tokenizer = load(path, family), AutoTokenizer.from_pretrained(path)
    assert model.config.model_type == family
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert len(tokenizer) == model.get_input_embeddings().num_embeddings
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert model.generation_config.eos_token_id == ends
    ids = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert out.shape == (1, ids.shape[1] + 3)


def test_same_arguments_same_bytes_and_the_seed_matters(tmp_path):
    paths = [make_tiny_checkpoint(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    for file in paths[0].iterdir():
        assert file.read_bytes() == (paths[1] / file.name).read_bytes(), file.name
    weights = [(path / "model.safetensors").read_bytes() for path in paths]
    assert weights[0] != weights[2]


def test_leaves_the_callers_random_state_alone(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    make_tiny_checkpoint(tmp_path, "qwen2")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_sizes_can_be_chosen(tmp_path, family):
    options = {} if family in TEXT_FAMILIES else {"vision_hidden": 32, "vision_layers": 3, "max_pixels": 50176}
    depth = "num_hidden_layers" if family == "gemma3" else "depth"
    path = make_tiny_checkpoint(tmp_path, family, hidden=128, layers=3, heads=4, kv_heads=4, **options)
    config = load(path, family).config
    assert config.get_text_config().num_hidden_layers == (6 if family.startswith("qwen3_5") else 3)
    assert config.get_text_config().hidden_size == 128
    if options:
        assert getattr(config.vision_config, depth) == 3
        written = "50176" in (path / "preprocessor_config.json").read_text()
        assert written == (family != "gemma3"), "its images have one size"


def test_unknown_family_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"llava.*qwen2_vl, .*glm4v, glm4v_moe, .*qwen3, llama$"):
        make_tiny_checkpoint(tmp_path, "llava")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("family", "speaks_first"), [("qwen2_vl", True), ("qwen2_5_vl", True), ("qwen3_vl", False)])
def test_default_system_message_is_the_familys(tmp_path, family, speaks_first):
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_checkpoint(tmp_path, family))
    text = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    turn = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    assert text == (system + turn if speaks_first else turn)
    own = tokenizer.apply_chat_template([{"role": "system", "content": "be"}, *HELLO], tokenize=False)
    assert own == "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nthe cat<|im_end|>\n"


def test_special_tokens_are_one_token_each_and_skipped():
    tokenizer = tiny_tokenizer()
    assert [tokenizer.encode(token) for token in SPECIAL_TOKENS] == [[512 - 14 + i] for i in range(14)]
    assert tokenizer.decode(tokenizer.encode("".join(SPECIAL_TOKENS) + "cat"), skip_special_tokens=True) == "cat"


def test_the_vocabulary_can_be_chosen(tmp_path):
    path = make_tiny_checkpoint(tmp_path, "qwen2", words="zebra " * 9, added_tokens=["<think>", "</think>"])
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer.encode("<think> zebra</think><|im_end|>")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<think>", "Ġzebra", "</think>", "<|im_end|>"]
    assert max(ids) < load(path, "qwen2").get_input_embeddings().num_embeddings
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think> zebra</think>"  # not special: rewards read them


TOKENIZER = tiny_tokenizer()


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet=st.characters(max_codepoint=0x2FF, exclude_categories=["Cs"])))
def test_every_text_survives_the_tokenizer(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == TOKENIZER.backend_tokenizer.normalizer.normalize_str(text)
