"""The cold start: supervised training of an embedded model on the flawed teacher of its task.

    python -m pretraining.pretrain zoo --out mtrl/embedded/model      # teacher.py, minutes on one GPU
    python -m pretraining.pretrain scenes                        # scene_teacher.py

Seeded; the same machine and libraries give the same weights. Without --out the model goes where its name finds it.
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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mtrl.algorithms.vocab import token_scores
from mtrl.embedded import scenes
from mtrl.embedded.embedded_rows import MODELS
from mtrl.embedded.scene_pictures import SIDE
from mtrl.embedded.task import IMAGE_SIDE, KINDS, TEST_QUESTIONS, VALUES, make_question
from mtrl.models.backbone import Backbone, Features, prompt_positions, vision_tokens
from mtrl.models.families import TextEncoder, load_encoder
from mtrl.models.layout import continue_positions
from mtrl.models.load_model import load_model
from mtrl.models.tiny import make_tiny_checkpoint
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling
from pretraining import scene_teacher
from pretraining.evaluation import examine
from pretraining.teacher import Demonstration, demonstrations

ADDED_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")
WAYS = 3  # most demonstrations of one question


class Example(NamedTuple):
    """A question ready to train on. Responses and probabilities of each way the teacher answers."""

    prompt: Tensor  # [L]
    positions: Tensor  # [3, L]
    is_vision: Tensor  # [L]
    pixels: Tensor  # [patches, D] float16
    responses: list[Tensor]
    probabilities: list[float]


class ExampleBatch(NamedTuple):
    """All lessons, padded, on the device."""

    ids: Tensor  # [N, WAYS, S] prompt and response
    positions: Tensor  # [N, 3, S]
    is_vision: Tensor  # [N, S]
    learn: Tensor  # [N, WAYS, S] positions that predict a response token
    pixels: Tensor  # [N, patches, D]
    probabilities: Tensor  # [N, WAYS]
    emphasis: Tensor  # [N] how often a lesson is shown


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
    kept = sorted(word.strip("?:") for word in words if "<" not in word)
    spaced = " ".join([*kept, "You are a helpful assistant. system user assistant"])
    return "\n".join([spaced, "it", "What", "Where", "How", "system", "assistant"])  # as they begin a line


@dataclass(frozen=True)
class Curriculum:
    """What is taught, to a model of which shape, and how it is examined."""

    make_question: Callable[[Any, int], Any]  # split, index
    demonstrations: Callable[[Any], list[Demonstration]]
    kinds: Sequence[str]
    words: Callable[[], str]
    side: int  # of a picture
    shape: Mapping[str, int]
    test_questions: int
    longest: int  # tokens of a response in the exam
    steps: int
    batch: int
    emphasis: Mapping[str, float] = field(default_factory=dict)  # kinds that are shown more often


COURSES = {
    "zoo": Curriculum(
        make_question, demonstrations, KINDS, vocabulary_text, IMAGE_SIDE,
        {"hidden": 192, "layers": 4, "heads": 6, "kv_heads": 2, "vision_hidden": 160, "vision_layers": 4},
        TEST_QUESTIONS, longest=32, steps=2500, batch=1024,
        emphasis={"position": 3.0},  # where things are is learnt last
    ),
    "scenes": Curriculum(
        scenes.make_question, scene_teacher.demonstrations, scenes.KINDS, scene_teacher.vocabulary_text, SIDE,
        {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 2, "vision_hidden": 192, "vision_layers": 4,
         "vocabulary": 1024},
        scenes.TEST_QUESTIONS, longest=208, steps=2400, batch=768,
    ),
}  # fmt: skip


def make_lesson(index: int, encoder: TextEncoder, course: Curriculum) -> Example:
    question = course.make_question("train", index)
    prompt = encoder.encode(question.task, [np.asarray(question.image)])
    inputs = encoder.inputs(prompt)
    ways = course.demonstrations(question)
    end = encoder.stop_ids[0]
    responses = [torch.tensor([*encoder.tokenizer(way.text)["input_ids"], end]) for way in ways]
    return Example(
        prompt.ids, prompt_positions(inputs), vision_tokens(prompt), inputs["pixel_values"].half(), responses,
        [way.probability for way in ways],
    )  # fmt: skip


def make_lessons(
    count: int, encoder: TextEncoder, device: torch.device, workers: int, course: Curriculum
) -> ExampleBatch:
    torch.set_num_threads(1)  # before forking: a pool of threads does not survive it
    torch.multiprocessing.set_sharing_strategy("file_system")
    with multiprocessing.get_context("fork").Pool(workers, _share, (encoder, course)) as pool:
        lessons = pool.map(_make_shared_lesson, range(count), chunksize=256)
    torch.set_num_threads(workers)
    return pad_lessons(lessons, device, course)


_SHARED: list[tuple[TextEncoder, Curriculum]] = []


def _share(encoder: TextEncoder, course: Curriculum) -> None:
    _SHARED.append((encoder, course))


def _make_shared_lesson(index: int) -> Example:
    torch.set_num_threads(1)
    return Example(*(x.numpy() if isinstance(x, Tensor) else x for x in make_lesson(index, *_SHARED[0])))  # type: ignore[arg-type]


def pad_lessons(lessons: list[Example], device: torch.device, course: Curriculum) -> ExampleBatch:
    ids, positions, learn = [], [], []
    for lesson in lessons:
        prompt = torch.as_tensor(lesson.prompt)
        longest = max(len(response) for response in lesson.responses)
        positions.append(continue_positions(torch.as_tensor(lesson.positions), [longest]).T)
        for way in range(WAYS):
            response = lesson.responses[way] if way < len(lesson.responses) else torch.zeros(0, dtype=torch.long)
            ids.append(torch.cat([prompt, torch.as_tensor(response)]))
            predicts = torch.zeros(len(prompt) + len(response), dtype=torch.bool)
            predicts[len(prompt) - 1 : -1] = True
            learn.append(predicts)
    size = max(len(row) for row in positions)

    def padded(rows: list[Tensor]) -> Tensor:
        rows = [*rows, torch.zeros(size, *rows[0].shape[1:], dtype=rows[0].dtype)]  # the width of the widest
        return pad_sequence(rows, batch_first=True)[:-1].to(device)

    emphasis = [course.emphasis.get(kind, 1.0) for kind in course.kinds]
    probabilities = [[*lesson.probabilities, *[0.0] * (WAYS - len(lesson.probabilities))] for lesson in lessons]
    return ExampleBatch(
        padded(ids).unflatten(0, (-1, WAYS)),
        padded(positions).transpose(1, 2),
        padded([torch.as_tensor(lesson.is_vision) for lesson in lessons]),
        padded(learn).unflatten(0, (-1, WAYS)),
        torch.stack([torch.as_tensor(lesson.pixels) for lesson in lessons]).to(device),
        torch.tensor(probabilities, device=device),
        torch.tensor([emphasis[index % len(emphasis)] for index in range(len(lessons))], device=device),
    )


def teacher_loss(backbone: Backbone, lessons: ExampleBatch, batch: Tensor, way: Tensor) -> Tensor:
    """Mean negative log-prob of the response tokens of the chosen demonstrations."""
    patches = math.isqrt(lessons.pixels.shape[1])  # a side
    grids = ((1, patches, patches),) * len(batch)
    seen = backbone.run_tower(lessons.pixels[batch].flatten(0, 1), grids).pooler_output
    ids, learn = lessons.ids[batch, way], lessons.learn[batch, way]
    hidden = backbone.forward_text(
        ids, lessons.positions[batch].transpose(0, 1), lessons.is_vision[batch], [Features(seen)]
    )
    targets = ids.roll(-1, 1)[learn]
    return -token_scores(hidden[learn], backbone.output_matrix, targets, chunk=1 << 20).logp.mean()


def train(backbone: Backbone, lessons: ExampleBatch, *, steps: int, batch_size: int, lr: float, seed: int) -> float:
    """AdamW, a warm-up of a tenth, then a cosine to zero. Returns the last loss."""
    device = lessons.ids.device
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
        batch = torch.multinomial(lessons.emphasis, batch_size, replacement=True, generator=generator)
        way = torch.multinomial(lessons.probabilities[batch], 1, generator=generator)[:, 0]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = teacher_loss(backbone, lessons, batch, way)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step + 1 == steps:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.perf_counter() - begin:.0f} s", flush=True)
    model.eval()
    return loss.item()


def examine_all(generator: LocalGenerator, encoder: TextEncoder, course: Curriculum, count: int) -> dict[str, Any]:
    """The grades on so many of the fixed test questions, as they stand beside the weights."""
    questions = [course.make_question("test", index) for index in range(count)]
    alone, eight = Sampling(temperature=0, max_new_tokens=course.longest), Sampling(n=8, max_new_tokens=course.longest)
    greedy = examine(generator, encoder, questions, alone)
    sampled = examine(generator, encoder, questions, eight)
    blind = examine(generator, encoder, questions, alone, blank=True)
    return {"greedy": asdict(greedy), "sampled at temperature 1, 8 times": asdict(sampled), "blank": asdict(blind)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=COURSES, nargs="?", default="zoo")
    parser.add_argument("--out", type=Path, help="default: where the model's name finds it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="default: as many as the shipped model took")
    parser.add_argument("--batch", type=int, help="default: as large as the shipped model's")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lessons", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=int, help="of the test, in the exam at the end; default: all")
    options = parser.parse_args(arguments)
    course, device, out = COURSES[options.task], torch.device(options.device), options.out or MODELS[options.task]
    steps, batch = options.steps or course.steps, options.batch or course.batch
    with tempfile.TemporaryDirectory() as scratch:
        start = make_tiny_checkpoint(
            scratch, "qwen2_5_vl", seed=options.seed, words=course.words(), added_tokens=ADDED_TOKENS,
            min_pixels=course.side**2, max_pixels=course.side**2, **course.shape,
        )  # fmt: skip
        encoder = load_encoder(start)
        backbone = Backbone(load_model(start, device=device))
        print(f"{sum(p.numel() for p in backbone.model.parameters()):,} parameters, {len(encoder.tokenizer)} tokens")
        lessons = make_lessons(options.lessons, encoder, device, os.cpu_count() or 1, course)
        loss = train(backbone, lessons, steps=steps, batch_size=batch, lr=options.lr, seed=options.seed)
        out.mkdir(parents=True, exist_ok=True)
        shutil.copy(start / "preprocessor_config.json", out)
        encoder.tokenizer.save_pretrained(out)
        backbone.model.bfloat16().save_pretrained(out)
        backbone.model.float()  # examined as it will be loaded: rounded to bf16, computed in float32
        count = options.questions or course.test_questions
        report = examine_all(LocalGenerator(backbone, encoder, rows_at_once=4096), encoder, course, count)
        print(json.dumps(report, indent=2))
        used = vars(options) | {"steps": steps, "batch": batch, "loss": round(loss, 4)}
        made_by = {key: value for key, value in used.items() if key not in ("task", "out", "device", "questions")}
        (out / "made_by.json").write_text(json.dumps(made_by | report, indent=2) + "\n")


if __name__ == "__main__":
    main()
