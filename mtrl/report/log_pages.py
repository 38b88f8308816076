"""Pages of the Markdown logs: a step's rollouts, a validation, a step's attention and token weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mtrl.algorithms.metrics import success_rate
from mtrl.algorithms.signals import pool_sizes, segment, sequence_mass, vgr
from mtrl.report import attention_tables as tables
from mtrl.report.attention_tables import SHOWN_SEGMENTS, rows_over_range, summary_cells
from mtrl.report.conversation import DecodeText, Message, conversation, list_facts
from mtrl.report.markdown_text import escape_markup, fenced, number, table
from mtrl.types import Experience, ValidationSample
from mtrl.utils.terminal import sanitize

SAMPLES = 4  # responses shown of a step, from the lowest reward to the highest
TOKEN_SAMPLES = 2  # responses written token by token
HEAD_TOKENS = 32  # tokens shown in a preview
JSON_TOKENS = 256  # tokens of a response written as JSON, at most

DecodeTokens = Callable[[Sequence[int]], Sequence[str]]
Values = Mapping[str, float]


def rollout_page(step: int, it: Experience, decode: DecodeText) -> str:
    rollouts, rewards = it.rollouts, it.rewards
    lengths = rollouts.mask.sum(1)
    rows = [
        ["reward", *summary_cells(rewards.total)],
        *([name, *summary_cells(part)] for name, part in rewards.parts.items()),
        ["response length", *summary_cells(lengths.double())],
    ]
    if (rate := success_rate(rewards.parts)) is not None:
        rows.append(["success rate", number(rate), "", "", ""])
    parts = [
        f"# Step {step}",
        f"{len(rollouts)} responses to {len(rollouts.prompts)} prompts, {int(rollouts.truncated.sum())} cut at the "
        f"length limit, {int(rewards.failed.sum())} failed rewards.",
        table(["", "mean", "std", "min", "max"], rows),
    ]
    mass, sizes = response_mass(it), row_sizes(it)
    if mass is not None:
        parts += [tables.attention_table(mass, sizes), tables.BALANCE]
    for row in rows_over_range(rewards.total, SAMPLES):
        task = rollouts.prompts[int(rollouts.group[row])].task
        by_part = {name: float(part[row]) for name, part in rewards.parts.items()}
        facts = [list_rewards(float(rewards.total[row]), by_part)]
        facts.append(f"{int(lengths[row])} tokens, {rollouts.finish_reason[row]}")
        if mass is not None:
            facts.append(tables.row_attention(mass[row], sizes[row]))
        turns = conversation(rollouts, row, decode)
        parts += make_sample(task.id, task.text, rollouts.text[row], task.answer, "; ".join(facts), turns)
    return "\n\n".join(parts) + "\n\n"


def evaluation_page(step: int, values: Values, by: Mapping[str, Values], samples: Sequence[ValidationSample]) -> str:
    attention = {name: x for name, x in values.items() if "attention/" in name}
    rows = [[name, number(x)] for name, x in values.items() if name not in attention]
    parts = [f"# Validation at step {step}", table(["", "value"], rows)]
    if attention:
        parts.append(segment_table(attention))
    for column, rates in by.items():
        parts.append(table([f"by {column}", "success"], [[value, number(rate)] for value, rate in rates.items()]))
    for sample in samples:
        rewards = list_rewards(sample.reward, sample.rewards or {})
        parts += make_sample(sample.id, sample.prompt, sample.response, sample.answer, rewards)
    return "\n\n".join(parts) + "\n\n"


def attention_page(step: int, it: Experience, decode: DecodeTokens) -> str:
    """Attention by segment, while answering and while reading the prompt, and the first tokens of the responses with
    the lowest and the highest VGR."""
    mass, sizes = response_mass(it), row_sizes(it)
    assert mass is not None and it.signals.attention_mass is not None
    parts = [f"# Step {step}", "While answering:", tables.attention_table(mass, sizes)]
    if it.signals.prompt_attention_mass is not None:
        parts += ["While reading (the prompt's tokens after the image):"]
        parts += [tables.attention_table(it.signals.prompt_attention_mass, sizes)]
    ratio = vgr(segment(mass, "all"), sizes)
    known = (~ratio.isnan()).nonzero().flatten()
    for index in rows_over_range(ratio[known], 2):
        row = int(known[index])
        values = vgr(segment(it.signals.attention_mass[row], "all"), sizes[row])
        parts.append(f"Response with VGR {number(float(ratio[row]))}, token by token:")
        parts.append(fenced(preview(it, row, values, decode)))
    return "\n\n".join(parts) + "\n\n"


def weights_page(step: int, it: Experience, decode: DecodeTokens) -> str:
    assert it.credit is not None and it.credit.weights is not None
    weights, mask, mass = it.credit.weights, it.rollouts.mask, it.signals.attention_mass
    parts = [
        f"# Step {step}",
        table(["token weight", "mean", "std", "min", "max"], [["", *summary_cells(weights[mask])]]),
    ]
    for row in rows_over_range(it.rewards.total, TOKEN_SAMPLES):
        length = min(int(mask[row].sum()), JSON_TOKENS)
        texts = decode(it.rollouts.tokens[row, :length].tolist())
        tokens = [
            {"token": text, "weight": round(value, 4)}
            for text, value in zip(texts, weights[row, :length].tolist(), strict=True)
        ]
        if mass is not None:
            ratios = vgr(segment(mass[row, :length], "weight"), row_sizes(it)[row]).tolist()
            for token, ratio in zip(tokens, ratios, strict=True):
                token["vgr"] = None if ratio != ratio else round(ratio, 4)
        parts.append(f"Response of reward {number(float(it.rewards.total[row]))}, head:")
        parts.append(fenced(preview(it, row, weights[row], decode)))
        lines = ",\n".join(json.dumps(token, ensure_ascii=False) for token in tokens)
        parts.append(f"```json\n[\n{lines}\n]\n```")
    return "\n\n".join(parts) + "\n\n"


# -------------------------------------------------------------------------------------------------------------- pieces
def make_sample(
    name: str, prompt: str, response: str, answer: object, facts: str, turns: Sequence[Message] = ()
) -> list[str]:
    solution = "none" if answer is None else str(answer)
    parts = [f"### {sanitize(name)}", "prompt", fenced(prompt)]
    for turn in turns or [{"role": "assistant", "content": response}]:
        head = "completion" if turn["role"] == "assistant" else f"environment: {escape_markup(list_facts(turn))}"
        parts += [head, fenced(turn["content"])]
    return [*parts, "solution", fenced(solution), facts]


def list_rewards(total: float, parts: Values) -> str:
    return ", ".join([f"reward {number(total)}", *(f"{name} {number(x)}" for name, x in parts.items())])


def preview(it: Experience, row: int, values: Tensor, decode: DecodeTokens) -> str:
    """The first tokens of a response, each as token(value)."""
    length = min(int(it.rollouts.mask[row].sum()), HEAD_TOKENS)
    texts = decode(it.rollouts.tokens[row, :length].tolist())
    return " ".join(f"{text}({number(value)})" for text, value in zip(texts, values[:length].tolist(), strict=True))


def segment_table(values: Values) -> str:
    """A table of means by segment, from metrics such as `val/attention/vgr_late`."""

    def cell(kind: str, name: str) -> str:
        return next((number(x) for key, x in values.items() if key.endswith(f"attention/{kind}_{name}")), "n/a")

    kinds = ("vgr", "aei_text", "aei_vision")
    rows = [[name, *(cell(kind, name) for kind in kinds)] for name in SHOWN_SEGMENTS]
    return table(["layers", "VGR", "AEI text", "AEI vision"], rows)


def response_mass(it: Experience) -> Tensor | None:
    """The mean attention mass of each response, [N, len(SEGMENTS), 2]."""
    return None if it.signals.attention_mass is None else sequence_mass(it.signals.attention_mass, it.rollouts.mask)


def row_sizes(it: Experience) -> Tensor:
    """The pool sizes of each response's prompt, [N, 2]."""
    sizes = pool_sizes(it.rollouts.prompts)
    return sizes[it.rollouts.group] if len(sizes) else torch.zeros(0, 2, dtype=torch.long)
