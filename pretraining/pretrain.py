"""Supervised pretraining of an embedded model on the flawed teacher of its task.

    python -m pretraining.pretrain zoo         # teacher.py, minutes on one GPU
    python -m pretraining.pretrain scenes      # scene_teacher.py
    python -m pretraining.pretrain zoo --family gemma3 --out MODEL      # or another one with images

It is seeded: the same machine and libraries give the same weights. Without --out it replaces the model of the package.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only

from mtrl.algorithms.vocab import token_scores
from mtrl.embedded import scenes
from mtrl.embedded.pictures import CELL
from mtrl.embedded.scenes import SIDE
from mtrl.embedded.task import KINDS, TEST_QUESTIONS, VALUES, make_question
from mtrl.models.backbone import Backbone, prompt_positions, vision_tokens
from mtrl.models.families import TextEncoder, load_encoder
from mtrl.models.layout import continue_positions
from mtrl.models.load_model import load_model
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling
from mtrl.utils.embedded_models import MODELS
from pretraining import scene_teacher
from pretraining.evaluation import evaluate, make_prompts
from pretraining.teacher import Demonstration, demonstrations
from pretraining.tiny_checkpoints import OTHER_VISION_FAMILIES, VISION_FAMILIES, make_tiny_checkpoint

ADDED_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")
PACKAGED_FAMILY = "qwen2_5_vl"
FAMILIES = (*VISION_FAMILIES, *OTHER_VISION_FAMILIES)
MAX_DEMONSTRATIONS = 3  # per question


class Example(NamedTuple):
    """A tokenized question with the responses of the teacher and their probabilities."""

    prompt: Tensor  # [L]
    is_vision: Tensor  # [L]
    inputs: dict[str, Tensor]  # by the prompt encoder, with pixel values in float16
    responses: list[Tensor]
    probabilities: list[float]


class ExampleBatch(NamedTuple):
    """All examples, padded, on the device. D demonstrations per example, S tokens of prompt and response."""

    ids: Tensor  # [N, D, S]
    positions: Tensor  # [N, 3, S]
    is_vision: Tensor  # [N, S] on the CPU
    predicts: Tensor  # [N, D, S] positions that predict a response token
    images: list[dict[str, Tensor]]  # [N] the inputs of the image encoder; all but pixel values on the CPU
    probabilities: Tensor  # [N, D]
    weights: Tensor  # [N] how often an example is sampled


def vocabulary_text() -> str:
    """Every word of the questions and answers of `zoo`, for the tokenizer."""
    words: set[str] = set()
    for index in range(200):
        question = make_question("train", index)
        words |= set(question.prompt.split())
        for demonstration in demonstrations(question):
            words |= set(demonstration.text.replace("<", " <").replace(">", "> ").split())
    for kind in KINDS:
        words |= {word for value in VALUES[kind] for word in value.split()}
    plain = sorted(word.strip("?:") for word in words if "<" not in word)
    spaced = " ".join([*plain, "You are a helpful assistant. system user assistant"])
    return "\n".join([spaced, "it", "What", "Where", "How", "system", "assistant"])  # as they begin a line


@dataclass(frozen=True)
class Curriculum:
    """The questions and demonstrations, the shape of the model, and the sizes of training and evaluation."""

    make_question: Callable[[Any, int], Any]  # split, index
    demonstrations: Callable[[Any], list[Demonstration]]
    kinds: Sequence[str]
    vocabulary_text: Callable[[], str]
    image_side: int
    model_shape: Mapping[str, int]
    test_questions: int
    max_new_tokens: int  # in the evaluation
    steps: int
    batch_size: int
    weights: Mapping[str, float] = field(default_factory=dict)  # by kind: how often it is sampled; default 1


CURRICULA = {
    "zoo": Curriculum(
        make_question, demonstrations, KINDS, vocabulary_text, 2 * CELL,
        {"hidden": 192, "layers": 4, "heads": 6, "kv_heads": 2, "vision_hidden": 160, "vision_layers": 4},
        TEST_QUESTIONS, max_new_tokens=32, steps=2500, batch_size=1024,
        weights={"position": 3.0},  # positions are learned last
    ),
    "scenes": Curriculum(
        scenes.make_question, scene_teacher.demonstrations, scenes.KINDS, scene_teacher.vocabulary_text, SIDE,
        {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 2, "vision_hidden": 192, "vision_layers": 4,
         "vocabulary": 1024},
        scenes.TEST_QUESTIONS, max_new_tokens=208, steps=2400, batch_size=768,
    ),
}  # fmt: skip


def make_example(index: int, encoder: TextEncoder, curriculum: Curriculum) -> Example:
    question = curriculum.make_question("train", index)
    (prompt,) = make_prompts([question], encoder)
    inputs = encoder.inputs(prompt)
    taught = curriculum.demonstrations(question)
    end = encoder.stop_ids[0]
    responses = [torch.tensor([*encoder.tokenizer(each.text)["input_ids"], end]) for each in taught]
    inputs["pixel_values"] = inputs["pixel_values"].half()
    return Example(prompt.ids, vision_tokens(prompt), inputs, responses, [each.probability for each in taught])


def make_examples(
    count: int, encoder: TextEncoder, device: torch.device, workers: int, curriculum: Curriculum
) -> ExampleBatch:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # before forking, which a pool of threads does not survive
    with multiprocessing.get_context("fork").Pool(workers, _share, (encoder, curriculum)) as pool:
        examples = pool.map(_make_shared_example, range(count), chunksize=256)
    torch.set_num_threads(threads)
    to_tensor = partial(tree_map_only, np.ndarray, torch.from_numpy)
    return pad_examples(list(map(to_tensor, examples)), device, curriculum)


_SHARED: list[tuple[TextEncoder, Curriculum]] = []


def _share(encoder: TextEncoder, curriculum: Curriculum) -> None:
    _SHARED.append((encoder, curriculum))


def _make_shared_example(index: int) -> Example:
    """With arrays in place of tensors, each of which would be a shared file."""
    torch.set_num_threads(1)
    return tree_map_only(Tensor, Tensor.numpy, make_example(index, *_SHARED[0]))


def pad_examples(examples: list[Example], device: torch.device, curriculum: Curriculum) -> ExampleBatch:
    ids, positions, predicts = [], [], []
    for example in examples:
        longest = max(len(response) for response in example.responses)
        positions.append(continue_positions(prompt_positions(example.inputs), [longest]).T)
        missing = MAX_DEMONSTRATIONS - len(example.responses)
        for response in [*example.responses, *[torch.zeros(0, dtype=torch.long)] * missing]:
            ids.append(torch.cat([example.prompt, response]))
            predicts.append(torch.zeros(len(ids[-1]), dtype=torch.bool))
            predicts[-1][len(example.prompt) - 1 : -1] = True
    size = max(len(row) for row in positions)

    def padded(rows: list[Tensor]) -> Tensor:
        rows = [*rows, torch.zeros(size, *rows[0].shape[1:], dtype=rows[0].dtype)]  # sets the width
        return pad_sequence(rows, batch_first=True)[:-1].to(device)

    pixels = torch.stack([example.inputs["pixel_values"] for example in examples]).to(device)
    weights = [curriculum.weights.get(kind, 1.0) for kind in curriculum.kinds]
    probabilities = [
        [*example.probabilities, *[0.0] * (MAX_DEMONSTRATIONS - len(example.probabilities))] for example in examples
    ]
    return ExampleBatch(
        padded(ids).unflatten(0, (-1, MAX_DEMONSTRATIONS)),
        padded(positions).transpose(1, 2),
        padded([example.is_vision for example in examples]).cpu(),
        padded(predicts).unflatten(0, (-1, MAX_DEMONSTRATIONS)),
        [example.inputs | {"pixel_values": each} for example, each in zip(examples, pixels, strict=True)],
        torch.tensor(probabilities, device=device),
        torch.tensor([weights[index % len(weights)] for index in range(len(examples))], device=device),
    )


def teacher_loss(backbone: Backbone, examples: ExampleBatch, batch: Tensor, demonstration: Tensor) -> Tensor:
    """Mean negative log-prob of the response tokens of one demonstration per example of the batch."""
    features = backbone.images.encode([examples.images[index] for index in batch.tolist()], batch.device)
    ids, predicts = examples.ids[batch, demonstration], examples.predicts[batch, demonstration]
    positions, is_vision = examples.positions[batch].transpose(0, 1), examples.is_vision[batch.cpu()]
    hidden = backbone.forward_text(ids, positions, is_vision, features)
    targets = ids.roll(-1, 1)[predicts]
    return -token_scores(hidden[predicts], backbone.output_matrix, targets, chunk=1 << 20).logp.mean()


def train(backbone: Backbone, examples: ExampleBatch, *, steps: int, batch_size: int, lr: float, seed: int) -> float:
    """AdamW, with warm-up over a tenth of the steps and a cosine decay to zero. Returns the last loss."""
    device = examples.ids.device
    model = backbone.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator(device=device).manual_seed(seed)
    begin = time.perf_counter()
    loss = torch.zeros(())
    for step in range(steps):
        progress = step / steps
        scale = min(1.0, progress * 10) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = lr * scale
        batch = torch.multinomial(examples.weights, batch_size, replacement=True, generator=generator)
        demonstration = torch.multinomial(examples.probabilities[batch], 1, generator=generator)[:, 0]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = teacher_loss(backbone, examples, batch, demonstration)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step + 1 == steps:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.perf_counter() - begin:.0f} s", flush=True)
    model.eval()
    return loss.item()


def evaluate_model(
    generator: LocalGenerator, encoder: TextEncoder, curriculum: Curriculum, count: int
) -> dict[str, Any]:
    """The accuracy on the first `count` test questions, in the form of made_by.json."""
    questions = [curriculum.make_question("test", index) for index in range(count)]
    limit = curriculum.max_new_tokens
    greedy, sampled = Sampling(temperature=0, max_new_tokens=limit), Sampling(n=8, max_new_tokens=limit)

    def grade(sampling: Sampling, blank: bool = False) -> dict[str, Any]:
        return asdict(evaluate(generator, encoder, questions, sampling, blank))

    samples = "sampled at temperature 1, 8 times"
    return {"greedy": grade(greedy), samples: grade(sampled), "blank": grade(greedy, blank=True)}


def make_start(directory: str, family: str, curriculum: Curriculum, seed: int) -> Path:
    """A random model of the curriculum's shape, with as many tokens per image as the packaged one."""
    shape = dict(curriculum.model_shape)
    side = curriculum.image_side
    if family.startswith("qwen3"):
        side = side * 32 // 28  # their patches
    if family.startswith("qwen3_5"):
        shape["layers"] //= 2  # as many have no attention
    return make_tiny_checkpoint(
        directory, family, seed=seed, words=curriculum.vocabulary_text(), added_tokens=ADDED_TOKENS,
        min_pixels=side**2, max_pixels=side**2, **shape,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m pretraining.pretrain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=CURRICULA, nargs="?", default="zoo")
    parser.add_argument("--out", type=Path, help="default: the folder of the packaged model")
    parser.add_argument("--family", choices=FAMILIES, default=PACKAGED_FAMILY, help="another one needs --out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="default: those of the packaged model")
    parser.add_argument("--batch", type=int, help="default: that of the packaged model")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--examples", "--lessons", dest="lessons", metavar="N", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=int, help="test questions of the evaluation at the end; default: all")
    options = parser.parse_args(arguments)
    if options.family != PACKAGED_FAMILY and options.out is None:
        parser.error("a model of another family does not replace the packaged one: give it a folder with --out")
    curriculum, device, out = CURRICULA[options.task], torch.device(options.device), options.out or MODELS[options.task]
    steps, batch = options.steps or curriculum.steps, options.batch or curriculum.batch_size
    with tempfile.TemporaryDirectory() as scratch:
        start = make_start(scratch, options.family, curriculum, options.seed)
        encoder = load_encoder(start)
        backbone = Backbone(load_model(start, device=device))
        print(f"{sum(p.numel() for p in backbone.model.parameters()):,} parameters, {len(encoder.tokenizer)} tokens")
        examples = make_examples(options.lessons, encoder, device, os.cpu_count() or 1, curriculum)
        loss = train(backbone, examples, steps=steps, batch_size=batch, lr=options.lr, seed=options.seed)
        out.mkdir(parents=True, exist_ok=True)
        shutil.copy(start / "preprocessor_config.json", out)
        encoder.tokenizer.save_pretrained(out)
        backbone.model.bfloat16().save_pretrained(out)
        backbone.model.float()  # evaluated as it will be loaded: rounded to bf16, computed in float32
        count = options.questions or curriculum.test_questions
        report = evaluate_model(LocalGenerator(backbone, encoder, rows_at_once=4096), encoder, curriculum, count)
        print(json.dumps(report, indent=2))
        used = vars(options) | {"steps": steps, "batch": batch, "loss": round(loss, 4)}
        made_by = {key: value for key, value in used.items() if key not in ("task", "out", "device", "questions")}
        (out / "made_by.json").write_text(json.dumps(made_by | report, indent=2) + "\n")


if __name__ == "__main__":
    main()
