"""Examples for the training of an embedded model: questions with what its teacher answers, as tokens."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only

from mtrl.models.backbone import Backbone, prompt_positions, vision_tokens
from mtrl.models.families import TextEncoder
from mtrl.models.layout import continue_positions
from mtrl.types import Prompt
from pretraining.evaluation import make_prompts
from pretraining.teacher import Demonstration

Evaluate = Callable[[Path, Backbone, TextEncoder, "Curriculum", int], dict[str, Any]]
"""From the folder of the model, the model and the number of questions to what made_by.json says of it."""

ADDED_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")
MAX_DEMONSTRATIONS = 3  # per question


class Example(NamedTuple):
    """A tokenized question with the responses of the teacher and their probabilities. Of responses of several turns the
    prompt has all but the last one."""

    prompt: Tensor  # [L]
    is_taught: Tensor  # [L] tokens of the prompt that are the teacher's
    is_vision: Tensor  # [L]
    inputs: dict[str, Tensor]  # by the prompt encoder, with pixel values in float16
    responses: list[Tensor]
    probabilities: list[float]


class ExampleBatch(NamedTuple):
    """All examples, padded, on the device. D demonstrations per example, S tokens of prompt and response."""

    ids: Tensor  # [N, D, S]
    positions: Tensor  # [N, 3, S]
    is_vision: Tensor  # [N, S] on the CPU
    predicts: Tensor  # [N, D, S] positions that predict a token of the teacher
    images: list[dict[str, Tensor]]  # [N] the inputs of the image encoder; all but pixel values on the CPU
    probabilities: Tensor  # [N, D]
    weights: Tensor  # [N] how often an example is sampled


def make_example(index: int, encoder: TextEncoder, curriculum: Curriculum) -> Example:
    question = curriculum.make_question("train", index)
    taught = curriculum.demonstrations(question)
    prompt, is_taught = curriculum.begin(question, taught, encoder)
    inputs = encoder.inputs(prompt)
    inputs["pixel_values"] = inputs["pixel_values"].half()
    responses = [encode_turn(each.text, encoder) for each in taught]
    probabilities = [each.probability for each in taught]
    return Example(prompt.ids, is_taught, vision_tokens(prompt), inputs, responses, probabilities)


def begin_with_question(question: Any, taught: Sequence[Demonstration], encoder: TextEncoder) -> tuple[Prompt, Tensor]:
    """What all demonstrations continue, and which of its tokens are the teacher's: none."""
    (prompt,) = make_prompts([question], encoder)
    return prompt, torch.zeros(len(prompt.ids), dtype=torch.bool)


def encode_turn(text: str, encoder: TextEncoder) -> Tensor:
    """The tokens of a turn of the teacher, with its end."""
    return torch.tensor([*encoder.tokenizer(text)["input_ids"], encoder.stop_ids[0]])


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
            predicts.append(torch.cat([example.is_taught, torch.ones(len(response), dtype=torch.bool)]).roll(-1))
    size = max(len(row) for row in positions)

    def padded(rows: list[Tensor]) -> Tensor:
        rows = [*rows, torch.zeros(size, *rows[0].shape[1:], dtype=rows[0].dtype)]  # sets the width
        return pad_sequence(rows, batch_first=True)[:-1].to(device)

    patches = [example.inputs["pixel_values"] for example in examples]
    pixels = torch.cat(patches).to(device).split([len(each) for each in patches])
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


@dataclass(frozen=True)
class Curriculum:
    """The questions and demonstrations, the shape of the model, and the sizes of training and evaluation."""

    make_question: Callable[[Any, int], Any]  # split, index
    demonstrations: Callable[[Any], Sequence[Demonstration]]
    kinds: Sequence[str]
    vocabulary_text: Callable[[], str]
    image_side: int
    model_shape: Mapping[str, int]
    test_questions: int
    max_new_tokens: int  # in the evaluation
    steps: int
    batch_size: int
    evaluate: Evaluate
    begin: Callable[[Any, Sequence[Demonstration], TextEncoder], tuple[Prompt, Tensor]] = begin_with_question
    added_tokens: Sequence[str] = ADDED_TOKENS
    chat_template: str | None = None  # default: that of all tiny models
    weights: Mapping[str, float] = field(default_factory=dict)  # by kind: how often it is sampled; default 1
