"""The checks of every family on tiny models, as a page: `python -m benchmarks.model_checks > docs/models.md`.

Twice: with weights as transformers initializes them, and with weights eight times as large, where attention is far from
uniform and rounding is amplified.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from mtrl.compose.family_checks import make_candidate, run_check
from mtrl.models.check_candidate import Finding
from mtrl.models.families import FAMILIES, ModelFamily, load_encoder
from mtrl.models.families.model_family import SHARED_PREFIX_TEXT_FAMILIES, TextFamily
from mtrl.models.family_checks import CHECKS
from mtrl.models.load_model import load_model
from mtrl.report.markdown_text import table
from pretraining.tiny_checkpoints import CHECKED_FAMILIES, make_tiny_checkpoint, model_type

LARGER = 8
HYBRID = "qwen3_5"
Findings = Mapping[str, Mapping[str, Finding]]  # by family and check


@dataclass(frozen=True)
class Facts:
    """What the code cannot say of a family."""

    title: str
    engines: str
    traps: str


GRAPHS = "the plain engine, CUDA graphs ([generation.md](generation.md))"
ALL_ENGINES = f"{GRAPHS}, vLLM ([vllm_parity.md](vllm_parity.md))"
OTHERS = "vLLM ([vllm.md](vllm.md#other-families))"
TEXT_ENGINES = f"{GRAPHS}, {OTHERS}"
NO_VLLM = "vLLM is refused ([vllm.md](vllm.md#refused-families))"
QWEN35_ENGINE = f"{GRAPHS}. vLLM: [vllm.md](vllm.md#qwen35)"
TILES = (
    "the tower reads tiles and a small copy of the image. Perturbations act on the image at the size of all tiles, and "
    "the copy is made from that. The viewer draws maps over tiles and copy, one below the other. No videos."
)
SOURCES = "The chat format and the names of the marks are those of transformers' code alone."
FACTS = {
    "qwen2_vl": Facts("Qwen2-VL", ALL_ENGINES, "its chat template adds a system message if the chat has none."),
    "qwen2_5_vl": Facts(
        "Qwen2.5-VL",
        ALL_ENGINES,
        "its chat template adds a system message, too.",
    ),
    "qwen3_vl": Facts(
        "Qwen3-VL",
        ALL_ENGINES,
        "features of the image enter the first layers of the language model as well (deepstack). Videos have a "
        "timestamp in the text before each pair of frames.",
    ),
    "qwen3_5": Facts(
        "Qwen3.5, dense",
        QWEN35_ENGINE,
        "three of four layers keep a state (a gated delta net) and have no attention: thirds and last layers of "
        "attention metrics count the other ones. Gradients of the decay (`A_log`, `dt_bias`) are small and lose most "
        "of their digits in float32, in transformers' forward as in ours. The recurrence is compiled torch code; the "
        "kernels of fla-core are not used, whose backward refuses Hopper GPUs with Triton below 3.7.1. What a step "
        "costs: [benchmarks](../benchmarks/README.md#one-prompt-its-group-one-pass). A tiny "
        "one, pretrained on the embedded task, learns it by GRPO, and not from grey squares "
        "([result](../benchmarks/results/family_learning_qwen3_5.json)).",
    ),
    "qwen3_5_moe": Facts(
        "Qwen3.5 with experts",
        QWEN35_ENGINE,
        "as Qwen3.5. In addition, other responses in a batch may move the last bits of a gradient, since an expert "
        "multiplies all its tokens in one group. Adapters leave the experts alone, which are no `Linear` modules. "
        "Rounding may flip a router between two experts: `rollout/routing_mismatch` counts it. In bf16 a router's "
        "product is bf16 and its softmax float32, as in transformers. The load-balancing loss never enters.",
    ),
    "qwen3_vl_moe": Facts(
        "Qwen3-VL with experts",
        f"{GRAPHS}. {NO_VLLM}",
        "as Qwen3-VL, and of the experts what is said of Qwen3.5's.",
    ),
    "internvl": Facts(
        "InternVL 3 and 3.5 (-hf)",
        f"{GRAPHS}, {OTHERS}",
        f"{TILES} Their number is transformers', from the shape of the image. {SOURCES}",
    ),
    "idefics3": Facts(
        "Idefics3",
        f"{GRAPHS}, {OTHERS}",
        f"{TILES} The settings' `size` must be a multiple of the tile. transformers enlarges an image twice, to this "
        f"size and to whole tiles; here it is resized once. {SOURCES}",
    ),
    "smolvlm": Facts(
        "SmolVLM",
        "as Idefics3; vLLM needs num2words",
        "as Idefics3. Tiles whose values are all 0 are padding for transformers, which drops them; here none is "
        "dropped. The processor of SmolVLM2 needs num2words; that of SmolVLM, which was compared, is Idefics3's. A "
        "tiny one, pretrained on the embedded task, learns it by GRPO, and not from grey squares "
        "([result](../benchmarks/results/family_learning_smolvlm.json)).",
    ),
    "llava_onevision": Facts(
        "LLaVA-OneVision (-hf)",
        f"the plain engine, CUDA graphs (by its language model, Qwen2; not run on a GPU), {OTHERS}",
        "the tower reads a small copy of the image, then its tiles. An image is resized to fit into the best of the "
        "canvases in `image_grid_pinpoints`; how many tokens it has depends on its shape, since padding is left out, "
        "and more than about nine tiles of them are interpolated. Perturbations act on the image at this size, and the "
        "copy is made from that; transformers makes it from the original. One size in fifty is one pixel less than "
        "transformers', which rounds up: so the tokens are those of the original in any case. `dataset.max_pixels` "
        "counts the squares of a canvas and of the copy: 4194304 leaves out canvases of more than 27 tiles, 5455872 "
        "leaves out none; there is no lower limit. Every image of a prompt is tiled, as transformers does with a list "
        "of images; with a list for each prompt it shows several images of one prompt without tiles. The viewer draws "
        "maps over the copy and over the lines of tokens, with black for the ends of lines. No videos: how their "
        "frames are pooled is not described here. Only all features of a layer (`full`) and `anyres_max_N` are "
        f"supported. `mtrl doctor` does not estimate its memory; the preflight measures it. {SOURCES}",
    ),
    "glm4v": Facts(
        "GLM-4.1V",
        f"{GRAPHS}, {OTHERS}. Its graphs were not run on a GPU",
        "a checkpoint's limits of pixels count both frames of a patch, so an image has half of them; "
        f"`dataset.max_pixels` counts those of the image. No videos. {SOURCES}",
    ),
    "glm4v_moe": Facts(
        "GLM-4.5V",
        f"{GRAPHS}. Its graphs were not run on a GPU. {NO_VLLM}",
        "as GLM-4.1V, and of the experts what is said of Qwen3.5's. Adapters are added to attention, to the dense "
        "first layers and to shared experts. peft itself takes these names for those of all experts: its "
        "`PeftModel.from_pretrained` loads the adapters of attention alone, with a warning, while `mtrl` and merged "
        "exports have all of them (peft 0.21).",
    ),
    "gemma3": Facts(
        "Gemma 3",
        f"{GRAPHS}. {NO_VLLM}",
        "most layers see the last tokens only, and the tokens of an image see one another in all layers. Every picture "
        "is resized to one square, whatever its shape, so limits of pixels do not apply; it is resized by a bicubic "
        "filter, by transformers' processor with a bilinear one. The line breaks around an image merge with those of "
        "the template. Pan and scan (crops of long pictures) is off, as in transformers, and refused if the "
        "checkpoint's image settings ask for it. It takes no videos. Embeddings are multiplied by the root of the "
        "width, rounded to the dtype of the computation, image features are not. The gradients that differ most are "
        "those of the tower's key biases, which are 0 but for rounding. `mtrl doctor` and the preflight count keys and "
        "values as if no layer had a window. A tiny one, pretrained on the embedded task, learns it by GRPO; one "
        "trained on grey squares learns a part of it ([result](../benchmarks/results/family_learning_gemma3.json)).",
    ),
    "gemma4": Facts(
        "Gemma 4, as small ones are (E2B, E4B)",
        f"the plain engine. The CUDA graph engine refuses it. {NO_VLLM}. No packed sequences: no kernel was tried with "
        "heads of 512 numbers.",
        "every image is scaled, up or down, to the most tokens that its shape allows within a budget, the checkpoint's "
        "`max_soft_tokens` or less by `dataset.max_pixels`; limits below 70 tokens do not apply. Every token has an "
        "embedding for every layer (an image has those of padding), and the last layers read the keys and values of "
        "earlier ones: attention metrics count them as layers. Logits are capped. Heads and rotary positions differ "
        "between layers with a window and without. Pixels are 0 to 1, so `noised` views are twice as strong as in "
        "families that normalize them. Scores are products of normalized queries and keys without a factor, which "
        "amplifies rounding in gradients. No videos; a tower for sounds is kept, not run. `mtrl doctor` does not "
        f"estimate its memory; the preflight measures it. {SOURCES}",
    ),
    "gemma4_bidirectional": Facts(
        "Gemma 4, as large ones are (26B-A4B, 31B)",
        f"as the small ones. {NO_VLLM}",
        "as the small ones, without embeddings for every layer and shared keys. Tokens of an image see one another in "
        "layers with a window, not in the others, whose keys are their values. Models with experts are refused.",
    ),
    "gemma3_text": Facts(
        "Gemma 3, text",
        f"{GRAPHS}, {OTHERS}",
        "as Gemma 3, without images. Models that read in both directions (`use_bidirectional_attention`) are refused.",
    ),
    "qwen2": Facts(
        "Text models: Qwen2, Qwen2.5",
        ALL_ENGINES,
        f"prompts are shared for {', '.join(SHARED_PREFIX_TEXT_FAMILIES)}; other text models read a prompt for each "
        "response, and sliding attention is refused in them. Soft-capped or scaled logits are refused.",
    ),
    "qwen3": Facts("Text models: Qwen3", TEXT_ENGINES, "queries and keys are normalized, head by head."),
    "llama": Facts("Text models: Llama 3, SmolLM2", TEXT_ENGINES, "none of its own."),
}

HEAD = """\
# Model families

<!-- `make models` writes this page: python -m benchmarks.model_checks > docs/models.md -->

Every family passes the same checks: our passes against those of transformers over the same weights.
`mtrl doctor MODEL --parity` runs them on your own weights ([watching.md](watching.md#before-a-run-mtrl-doctor)), and
`mtrl.compose.family_checks.run_checks(path)` from Python; [extending.md](extending.md) shows how to add a family.

**No published weights or vocabularies were available** where these numbers were measured. The models are tiny and
random, with the layers of their family; tokens were compared over a small tokenizer with the special tokens and the
chat format of the family, by transformers' own processor class. So run the checks once on the weights that you train.

Numbers are the worst differences of float32 models on a CPU, with {versions}:
of log-probs in nats, of gradients relative to the largest gradient of the same weight (at least a thousandth of the
largest of all), of attention masses as shares, of pixels after normalization. 0 means equal in every bit.
A dash means that it does not apply.
"""


def make_page(small: Findings, large: Findings, in_float64: float) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    meanings = [[name, (check.__doc__ or "").split("\n\n")[0].replace("\n   ", "")] for name, check in CHECKS.items()]
    parts = [
        HEAD.format(versions=versions),
        "## The checks\n",
        table(["check", "what must hold"], meanings) + "\n",
        "No prompt is a multiple of 64 tokens long; responses have 1 to 67 tokens, three of them to one prompt.\n",
        "## Measured\n",
        "Weights as transformers initializes them:\n",
        make_table(small) + "\n",
        f"The gradients of {HYBRID} are the decay's, as below: in float64 those with shared and with separate prompts "
        f"differ by {in_float64:.0e}.\n",
        f"Weights {LARGER} times as large:\n",
        make_table(large) + "\n",
        "## By family\n",
        *(describe_family(name) for name in CHECKED_FAMILIES),
    ]
    return "\n".join(parts)


def make_table(findings: Findings) -> str:
    rows = [[check, *(format_worst(findings[family][check]) for family in CHECKED_FAMILIES)] for check in CHECKS]
    return table(["check", *CHECKED_FAMILIES], rows)


def format_worst(finding: Finding) -> str:
    if finding.skipped:
        return "-"
    return ("0" if finding.worst == 0 else f"{finding.worst:.0e}") + ("" if finding.passed else " FAILED")


def find_by_name(name: str) -> ModelFamily:
    return FAMILIES.get(model_type(name)) or TextFamily(name)


def describe_family(name: str) -> str:
    family, facts = find_by_name(name), FACTS[name]
    lines = [
        f"### {facts.title} (`{name}`)\n",
        f"- shared prompts: {'exact' if family.shares_prefix else 'no'}",
        f"- sequence parallelism: {'yes' if family.splits_sequences else 'no'}",
        f"- engines: {facts.engines}",
        f"- traps: {facts.traps}\n",
    ]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------ measuring
def measure(path: Path, model: Any) -> dict[str, Finding]:
    candidate = make_candidate(str(path), model, load_encoder(path))
    return {name: run_check(name, candidate) for name in CHECKS}


@torch.no_grad()
def enlarge(model: Any) -> Any:
    for parameter in (each for each in model.parameters() if each.dim() > 1):
        parameter.mul_(LARGER)
    return model


def measure_families(families: Sequence[str] = CHECKED_FAMILIES) -> tuple[Findings, Findings, float]:
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: make_tiny_checkpoint(Path(folder, name), name, layers=3) for name in families}
        small = {name: measure(path, load_model(path)) for name, path in paths.items()}
        large = {name: measure(path, enlarge(load_model(path))) for name, path in paths.items()}
        path = paths[HYBRID]
        double = make_candidate(str(path), load_model(path).double(), load_encoder(path))
        return small, large, run_check("sharing gradients", double).worst


if __name__ == "__main__":
    print(make_page(*measure_families()), end="")
