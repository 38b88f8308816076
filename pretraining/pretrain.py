"""Supervised pretraining of an embedded model on the flawed teacher of its task.

    python -m pretraining.pretrain zoo         # teacher.py, minutes on one GPU
    python -m pretraining.pretrain scenes      # scene_teacher.py
    python -m pretraining.pretrain lookagain   # look_again_teacher.py
    python -m pretraining.pretrain zoo --family gemma3 --out MODEL      # or another one with images

It is seeded: the same machine and libraries give the same weights. Without --out it replaces the model of the package.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrl.algorithms.vocab import token_scores
from mtrl.embedded import look_again, scenes
from mtrl.embedded.pictures import CELL
from mtrl.embedded.scenes import SIDE
from mtrl.embedded.task import KINDS, TEST_QUESTIONS, VALUES, make_question
from mtrl.models.backbone import Backbone
from mtrl.models.families import TextEncoder, load_encoder
from mtrl.models.load_model import load_model
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling
from mtrl.utils.embedded_models import MODELS
from pretraining import look_again_teacher, scene_teacher
from pretraining.evaluation import evaluate
from pretraining.examples import Curriculum, ExampleBatch, make_examples
from pretraining.teacher import demonstrations
from pretraining.tiny_checkpoints import OTHER_VISION_FAMILIES, VISION_FAMILIES, make_tiny_checkpoint

PACKAGED_FAMILY = "qwen2_5_vl"
FAMILIES = (*VISION_FAMILIES, *OTHER_VISION_FAMILIES)


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


def evaluate_model(
    out: Path, backbone: Backbone, encoder: TextEncoder, curriculum: Curriculum, count: int
) -> dict[str, Any]:
    """The accuracy on the first `count` test questions, in the form of made_by.json."""
    generator = LocalGenerator(backbone, encoder, rows_at_once=4096)
    questions = [curriculum.make_question("test", index) for index in range(count)]
    limit = curriculum.max_new_tokens
    greedy, sampled = Sampling(temperature=0, max_new_tokens=limit), Sampling(n=8, max_new_tokens=limit)

    def grade(sampling: Sampling, blank: bool = False) -> dict[str, Any]:
        return asdict(evaluate(generator, encoder, questions, sampling, blank))

    samples = "sampled at temperature 1, 8 times"
    return {"greedy": grade(greedy), samples: grade(sampled), "blank": grade(greedy, blank=True)}


CURRICULA = {
    "zoo": Curriculum(
        make_question, demonstrations, KINDS, vocabulary_text, 2 * CELL,
        {"hidden": 192, "layers": 4, "heads": 6, "kv_heads": 2, "vision_hidden": 160, "vision_layers": 4},
        TEST_QUESTIONS, max_new_tokens=32, steps=2500, batch_size=1024, evaluate=evaluate_model,
        weights={"position": 3.0},  # positions are learned last
    ),
    "scenes": Curriculum(
        scenes.make_question, scene_teacher.demonstrations, scenes.KINDS, scene_teacher.vocabulary_text, SIDE,
        {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 2, "vision_hidden": 192, "vision_layers": 4,
         "vocabulary": 1024},
        scenes.TEST_QUESTIONS, max_new_tokens=208, steps=2400, batch_size=768, evaluate=evaluate_model,
    ),
    "lookagain": Curriculum(
        look_again.make_question, look_again_teacher.demonstrations, look_again.KINDS,
        look_again_teacher.vocabulary_text, look_again.HALF,
        {"hidden": 192, "layers": 4, "heads": 6, "kv_heads": 2, "vision_hidden": 160, "vision_layers": 4,
         "vocabulary": 1024},
        look_again.TEST_QUESTIONS, max_new_tokens=160, steps=2000, batch_size=1024,
        evaluate=look_again_teacher.evaluate, begin=look_again_teacher.begin,
        added_tokens=look_again_teacher.ADDED_TOKENS, chat_template=look_again_teacher.TEMPLATE,
    ),
}  # fmt: skip


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


def make_start(directory: str, family: str, curriculum: Curriculum, seed: int) -> Path:
    """A random model of the curriculum's shape, with as many tokens per image as the packaged one."""
    shape = dict(curriculum.model_shape)
    side = curriculum.image_side
    if family.startswith("qwen3"):
        side = side * 32 // 28  # their patches
    if family.startswith("qwen3_5"):
        shape["layers"] //= 2  # as many have no attention
    start = make_tiny_checkpoint(
        directory, family, seed=seed, words=curriculum.vocabulary_text(), added_tokens=curriculum.added_tokens,
        min_pixels=side**2, max_pixels=side**2, **shape,
    )  # fmt: skip
    if curriculum.chat_template is not None:
        (start / "chat_template.jinja").write_text(curriculum.chat_template)
    return start


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
        report = curriculum.evaluate(out, backbone, encoder, curriculum, count)
        print(json.dumps(report, indent=2))
        used = vars(options) | {"steps": steps, "batch": batch, "loss": round(loss, 4)}
        made_by = {key: value for key, value in used.items() if key not in ("task", "out", "device", "questions")}
        (out / "made_by.json").write_text(json.dumps(made_by | report, indent=2) + "\n")


if __name__ == "__main__":
    main()
