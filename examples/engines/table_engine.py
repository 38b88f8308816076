"""Your own engine: it answers from a table, by question. Use it to try rewards and credit on responses you chose.

worker:
  rollout:
    name: {name: examples/engines/table_engine.py:TableEngine, answers: {Say red.: [red, It is blue.]}}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mtrl
from mtrl.rollout.responses import finish_reasons, make_rollouts
from mtrl.rollout.sampling import first_sample_numbers


@dataclass
class TableEngine(mtrl.Engine):
    """`answers`: {question: [response, ..]}, used in turn. mtrl.Engine provides `resident()`; an engine that holds
    device memory also implements `wake` and `sleep`."""

    encoder: Any  # given by the run, as are `policy` and `model_path` to an engine with such fields
    answers: Mapping[str, Any]
    version: int = 0

    def load(self, weights):
        """A real engine copies `weights.tensors` and refuses missing or unknown names."""
        self.version = weights.version

    def generate(self, prompts, sampling):
        if sampling.version != self.version:
            raise RuntimeError(f"asked to sample at version {sampling.version}, but the engine holds {self.version}")
        first = first_sample_numbers([prompt.task.id for prompt in prompts], sampling)
        group = [index for index in range(len(prompts)) for _ in range(sampling.n)]
        texts = [
            self.answer(prompt.task, 0 if sampling.temperature == 0 else start + sample)
            for prompt, start in zip(prompts, first, strict=True)
            for sample in range(sampling.n)
        ]
        tokens = [self.tokens(text)[: sampling.max_new_tokens] for text in texts]
        return make_rollouts(
            prompts,
            group,
            tokens,
            None,  # a sampler passes the log-prob of each token; a table is certain, and log(1) is 0
            text=[self.encoder.decode(row) for row in tokens],
            finish=finish_reasons(tokens, self.encoder.stop_ids),
            version=self.version,
            pad_id=self.encoder.pad_id,
        )

    def answer(self, task, number):
        if task.text not in self.answers:
            raise KeyError(f"the table has no answer to {task.text!r} ({task.origin}); add one")
        responses = self.answers[task.text]
        return responses[number % len(responses)]

    def tokens(self, text):
        """Includes the end token, which is sampled too."""
        return [*self.encoder.tokenizer.encode(text, add_special_tokens=False), self.encoder.stop_ids[0]]
