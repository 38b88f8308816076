"""Sliding windows and image blocks: tiny models of transformers that have them pass the checks of a family, with
prompts and responses longer than the window, and faults of the masks are reported."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from helpers import close
from run_helpers import read_metrics
from test_family_checks import BAR, assert_reported, each_fault
from tiny_models import SHARPER, checkpoint, get_encoder
from tiny_vlms import train_one_step
from transformers import AutoConfig, AutoModelForCausalLM

from mtrl.compose.family_checks import make_candidate, run_check
from mtrl.models.backbone import Backbone, explain_no_sequence_parallel
from mtrl.models.document_mask import DocumentMask, MaskRule
from mtrl.models.families import load_encoder
from mtrl.models.family_checks import CHECKS
from mtrl.models.load_model import load_model
from mtrl.models.tiny_families.gemma import WINDOW
from mtrl.types import SEGMENTS, VISION_POOL, Needs

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
NOT_IN_THE_FIRST = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
TEXT = {"mistral": {"sliding_window": WINDOW}, "qwen2": NOT_IN_THE_FIRST, "qwen3": NOT_IN_THE_FIRST}


@pytest.fixture(scope="module")
def candidate():
    @lru_cache
    def make(family, dtype=torch.float32):
        if family == "gemma3":
            path = checkpoint(family)
            return make_candidate(str(path), load_model(path).to(dtype), load_encoder(path))
        encoder = get_encoder("qwen2")
        config = AutoConfig.for_model(family, vocab_size=len(encoder.tokenizer), **SIZES, **TEXT[family])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        with torch.no_grad():
            for parameter in (each for each in model.parameters() if each.dim() > 1):
                parameter.mul_(SHARPER)
        return make_candidate(str(checkpoint("qwen2")), model, encoder)

    return make


FAMILIES_WITH_RULES = ("gemma3", *(pytest.param(each, marks=pytest.mark.slow) for each in TEXT))


@pytest.mark.parametrize("family", FAMILIES_WITH_RULES)
@pytest.mark.parametrize("check", CHECKS)
def test_it_passes(candidate, family, check):
    in_double = family == "gemma3" and check.endswith("gradients")  # its tower amplifies rounding
    finding = run_check(check, candidate(family, torch.float64 if in_double else torch.float32))
    assert finding.passed and finding.skipped == (check == "perturbation" and family in TEXT), finding
    assert finding.worst <= BAR, finding
    if check == "greedy" or check.startswith("isolation"):
        assert finding.worst == 0, finding
    lengths = [len(prompt.ids) for prompt in candidate(family).rollouts.prompts]
    assert candidate(family).forward.share_prefix and min(lengths) > WINDOW


# --------------------------------------------------------------------------------------------------------------- faults
def change_rule(monkeypatch, **change):
    attends = MaskRule.attends
    monkeypatch.setattr(MaskRule, "attends", lambda rule, *given: attends(replace(rule, **change), *given))


def wider_window(monkeypatch):
    change_rule(monkeypatch, window=WINDOW + 1)


def narrower_window(monkeypatch):
    change_rule(monkeypatch, window=WINDOW - 1)


def causal_images(monkeypatch):
    change_rule(monkeypatch, image_blocks=False)


def window_of_columns(monkeypatch):
    """The window counts tokens of other responses."""
    dense = DocumentMask.dense
    columns = lambda mask: torch.arange(mask.path.shape[1]).expand_as(mask.path)  # noqa: E731
    monkeypatch.setattr(DocumentMask, "dense", lambda mask, rule: dense(replace(mask, path=columns(mask)), rule))


FAULTS = [
    ("forward", "gemma3", wider_window),
    ("forward", "qwen2", narrower_window),
    ("forward", "gemma3", causal_images),
    ("gradients", "gemma3", causal_images),
    ("sharing", "mistral", wider_window),
    ("sharing", "qwen2", window_of_columns),
    ("sharing gradients", "mistral", narrower_window),
    ("masses", "mistral", wider_window),
    ("greedy", "mistral", narrower_window),
]


@each_fault(FAULTS)
def test_a_fault_is_reported(candidate, monkeypatch, check, family, fault):
    assert_reported(check, candidate(family), fault, monkeypatch)


# --------------------------------------------------------------------------------------------------------- other routes
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # on a CPU, on purpose
@pytest.mark.parametrize("family", FAMILIES_WITH_RULES)
@pytest.mark.parametrize("kind", ["matrix", pytest.param("blocks", marks=pytest.mark.slow)])
def test_all_documents_in_one_sequence(candidate, family, kind, monkeypatch):
    check_one_sequence(candidate(family), kind, monkeypatch)


def check_one_sequence(given, kind, monkeypatch):
    """As a matrix, and as the blocks that a GPU gets, against a row for each response."""
    needs = Needs("old_logprobs", "attention_mass")
    expected = replace(given.forward, share_prefix=False).signals(given.rollouts, needs)
    if kind == "blocks":
        monkeypatch.setattr(Backbone, "make_mask", lambda _, documents, packed, rule: documents.blocks(CPU, rule))
    found = replace(given.forward, packed=True).signals(given.rollouts, needs)
    close(found.old_logprobs, expected.old_logprobs, rtol=0, atol=BAR)
    close(found.attention_mass, expected.attention_mass, rtol=0, atol=BAR)


def test_maps_add_up_to_masses(candidate):
    given = candidate("gemma3")
    forward = replace(given.forward, attention_last_k_layers=2)  # one with a window, one without
    signals = forward.signals(given.rollouts, Needs("attention_mass", "attention_maps"))
    segment = SEGMENTS.index("all")
    for row, (prompt, response) in enumerate(given.rows()):
        mass = signals.attention_mass[row, : len(response), segment]
        vision = prompt.token_pool == VISION_POOL
        if vision.any():
            found = signals.attention_maps[row]
            shares = (found.levels.float() / 255).square() * found.scale[:, None]
            close(shares.sum(1), mass[:, 1], rtol=0, atol=BAR)
        maps = forward.maps(given.rollouts.rows(torch.tensor([row])), list(range(len(response))))[:, segment]
        close(maps[:, vision].sum(1), mass[:, 1], rtol=0, atol=BAR)


def test_windows_that_nothing_reaches_change_nothing():
    rule = MaskRule(window=WINDOW, image_blocks=True)
    short = DocumentMask.from_rows(torch.zeros(2, WINDOW, dtype=torch.bool))
    assert rule.within(short) == MaskRule()
    assert rule.within(DocumentMask.from_rows(torch.zeros(2, WINDOW + 1, dtype=torch.bool))) == MaskRule(WINDOW)


def test_what_is_not_supported_is_one_line(candidate):
    backbone = candidate("mistral").forward.backbone
    assert "sliding windows or image blocks" in explain_no_sequence_parallel(backbone.model.config, 2)
    assert not backbone.is_causal and backbone.can_share_prefix


@pytest.mark.usefixtures("no_curves")
@pytest.mark.slow  # 6 s
def test_it_trains_with_shared_prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = checkpoint("gemma3")
    assert train_one_step(model, "dataset.max_response_length=12", "worker.rollout.n=3") == 0
    metrics = read_metrics(tmp_path / "outputs/mtrl/run")[1, False]
    assert metrics["actor/grad_norm"] > 0 and metrics["rollout/logprob_gap_mean"] < BAR
    assert Path("outputs/mtrl/run/checkpoints/step_1/model.safetensors").is_file()
