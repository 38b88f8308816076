"""How a chat template shows what an environment says in the middle of a response.

Its words are a message of the role `tool` if the template knows it and shows texts and images in it, otherwise one of
the user, between <tool_response> tags. The template writes the message after a made-up question and answer, and what
follows the answer is cut out. So nothing that the model wrote is written or tokenized again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mtrl.types import Prompt

BEGIN, END = "<tool_response>\n", "\n</tool_response>"  # around the blocks in a user message, as Qwen's templates do

# A made-up conversation. Its words have no meaning, and templates can only copy them.
QUESTION, THOUGHT, ANSWER = "probequestion", "probethought", "probeanswer"
NAME, CALL_ID = "probename", "probe0001"  # Mistral wants ids of nine letters and digits
FIRST, LAST = "probefirst", "probelast"
THOUGHTS = f"<think>\n{THOUGHT}\n</think>\n\n"
CALL = {"id": CALL_ID, "type": "function", "function": {"name": NAME, "arguments": {"probe": ANSWER}}}
NAMES_TOOL = re.compile(r"""["']tool["']""")

REMEDY = (
    "set dataset.override_chat_template to a template that keeps earlier turns as they are and shows texts and images "
    "in tool messages or in user messages"
)

Role = Literal["tool", "user"]
FORMS: tuple[tuple[Role, bool], ...] = (("tool", False), ("tool", True), ("user", False))  # whether after a call
Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]


@dataclass(frozen=True)
class MessageForm:
    """The role of a message, and whether the response before it must have `tool_calls` for the template.

    >>> MessageForm("tool").message(["image", " 1:", np.zeros((8, 8, 3), np.uint8)])["content"]
    [{'type': 'text', 'text': 'image 1:'}, {'type': 'image'}]
    """

    role: Role
    calls: bool = False
    closing: str = ""  # what the template writes after the answer that is still the response's own

    def message(self, content: Sequence[str | np.ndarray]) -> dict[str, Any]:
        """Texts beside each other become one part: some templates strip each of them."""
        parts: list[dict[str, Any]] = []
        for block in content if self.role == "tool" else (BEGIN, *content, END):
            if not isinstance(block, str):
                parts.append({"type": "image"})
            elif parts and parts[-1]["type"] == "text":
                parts[-1]["text"] += block
            else:
                parts.append({"type": "text", "text": block})
        return {"role": self.role, "content": parts}

    def split(self, render: Render, message: Message | None = None) -> tuple[str, str]:
        """What the template writes up to the end of the made-up answer, and from there to where the next response
        begins."""
        answer: dict[str, Any] = {"role": "assistant", "content": f"{THOUGHTS}{ANSWER}"}
        called: dict[str, str] = {}
        if self.calls:
            answer |= {"content": THOUGHTS, "tool_calls": [CALL]}
            called = {"name": NAME, "tool_call_id": CALL_ID}
        rest = [{**message, **called}] if message else []
        before, found, after = render([{"role": "user", "content": QUESTION}, answer, *rest]).partition(ANSWER)
        if not found or not after.startswith(self.closing):
            raise ValueError("it changes the response before it")
        return before, after.removeprefix(self.closing)

    def write(self, render: Render, message: Message, end: str) -> str:
        """What stands between a response that ended with the token `end` and the next one. Whitespace before the end
        of its turn is the response's own to write."""
        _, after = self.split(render, message)
        return after.lstrip() if after.lstrip().startswith(end) else after


def make_readable(content: Sequence[str | np.ndarray]) -> list[str | np.ndarray]:
    """A tool's text may have halves of surrogate pairs, which no tokenizer takes: as signs of replacement."""
    return [
        each.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(each, str) else each
        for each in content
    ]


def drop_first(prompt: Prompt, token: int) -> Prompt:
    """Without the first token if it is this one, which the response has written itself."""
    if prompt.ids[0] != token:
        return prompt
    rest: dict[str, Any] = {name: getattr(prompt, name)[1:] for name in ("ids", "engine_ids", "token_pool")}
    return replace(prompt, **rest)


def find_form(template: str | None, render: Render, image: str | None) -> MessageForm:
    """The form in which this template shows texts and images. `image` stands for an image in a rendered text; None for
    text models. Raises a ValueError if there is none."""
    if template is None:
        raise ValueError(f"the model has no chat template, so it knows no turns; {REMEDY}")
    refused = []
    for role, calls in FORMS if NAMES_TOOL.search(template) else FORMS[-1:]:
        try:
            return _try_form(render, role, calls, image)
        except ValueError as error:
            refused.append(f"a {role} message: {error}")
    reasons = "; ".join(dict.fromkeys(refused))
    raise ValueError(f"the chat template cannot show what an environment says ({reasons}); {REMEDY}")


def _try_form(render: Render, role: Role, calls: bool, image: str | None) -> MessageForm:
    form = MessageForm(role, calls, _find_closing(render) if calls else "")
    alone, _ = form.split(render)
    before, shown = form.split(render, form.message([FIRST, *(2 * [np.empty(0)] if image else []), LAST]))
    if f"{THOUGHT}\\n" in before:  # as Python or JSON writes a line break
        raise ValueError("it writes the response before it as program text")
    if before != alone:
        raise ValueError("it rewrites the response before it")
    if THOUGHT not in before:
        raise ValueError("it leaves out what the response before it thought")
    if FIRST not in shown or LAST not in shown:
        raise ValueError("it leaves out texts")
    if image and shown.count(image) != 2:
        raise ValueError("it leaves out images")
    if any(word in shown for word in (QUESTION, THOUGHT, ANSWER, NAME, CALL_ID)):
        raise ValueError("it repeats what was before it")
    return form


def _find_closing(render: Render) -> str:
    """What ends a call, without what ends a turn."""
    (_, ending), (_, after) = (MessageForm("tool", calls).split(render) for calls in (False, True))
    if not after.endswith(ending):
        raise ValueError("it ends a response with calls in another way")
    return after.removesuffix(ending)
