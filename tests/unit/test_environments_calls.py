"""Tool calls in the text of a response: which are read, and what is said of the others."""

import pytest
from transformers.utils.chat_parsing import parse_response
from trl import chat_template_utils as trl_templates

from mtrl.environments.records import ToolCall
from mtrl.environments.tool_calls import parse_tool_calls

ZOOM = ToolCall("zoom", {"box": [0, 0, 56, 28]})
SCHEMAS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {
    "code": {"type": "string"}, "count": {"type": "integer"}, "box": {"type": "array", "items": {"type": "number"}},
    "deep": {"type": "boolean"}, "note": {"type": "string", "nullable": True}}}}}]  # fmt: skip


def json_call(body):
    return f"<tool_call>\n{body}\n</tool_call>"


GOOD = json_call('{"name": "zoom", "arguments": {"box": [0, 0, 56, 28]}}')
NESTED = '{"name": "run", "arguments": {"code": "if a { b }</tool_call>", "more": {"x": {"y": [{}]}}}}'
READ = {
    "none": ("I see a red circle.", []),
    "one": (f"Let me look. {GOOD}", [ZOOM]),
    "several": (f"{GOOD}\n{GOOD} and {GOOD}", [ZOOM] * 3),
    "no spaces": ('<tool_call>{"name":"zoom","arguments":{"box":[0,0,56,28]}}</tool_call>', [ZOOM]),
    "nested braces, and the end tag in a text": (json_call(NESTED), [ToolCall(
        "run", {"code": "if a { b }</tool_call>", "more": {"x": {"y": [{}]}}})]),
    "unicode": (json_call('{"name": "suche", "arguments": {"wort": "größe \\u56fe 图"}}'),
                [ToolCall("suche", {"wort": "größe 图 图"})]),
    "no arguments": (json_call('{"name": "look"}'), [ToolCall("look", {})]),
    "in a code fence": (f"Write it so:\n```json\n{GOOD}\n```\nDone.", []),
    "after a code fence": (f"```\n{GOOD}\n```\n{GOOD}", [ZOOM]),
    "in a fence that does not end": (f"~~~\n{GOOD}", []),
    "a longer fence holds a shorter one": (f"````\n```\n{GOOD}\n```\n{GOOD}\n````\n{GOOD}", [ZOOM]),
    "a fence in a value": (json_call('{"name": "run", "arguments": {"code": "\\n```\\n"}}') + GOOD,
                           [ToolCall("run", {"code": "\n```\n"}), ZOOM]),
    "thinking calls nothing": (f"<think>I could {GOOD}</think>\n{GOOD}", [ZOOM]),
    "thinking that the prompt began": (f"I could {GOOD}\n</think>\n\nB", []),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_calls_are_read(case):
    text, calls = READ[case]
    assert parse_tool_calls(text) == calls


MALFORMED = {
    "no JSON": (json_call("zoom(0, 0)"), "is no valid JSON"),
    "a missing brace": (json_call('{"name": "zoom", "arguments": {"box": [0, 0, 56, 28]}'), "is no valid JSON"),
    "the response ended": ('<tool_call>{"name": "zoom", "argum', "is no valid JSON: Unterminated string"),
    "nothing": ("<tool_call>", "where the response ends"),
    "no end": (GOOD.removesuffix("</tool_call>"), "does not end with </tool_call>"),
    "more after it": (json_call('{"name": "zoom"} {"name": "zoom"}'), "does not end with </tool_call>"),
    "no name": (json_call('{"arguments": {}}'), "has no name"),
    "a name of another type": (json_call('{"name": 7}'), "has no name"),
    "a list": (json_call('[{"name": "zoom"}]'), "has no name"),
    "arguments as a text": (json_call('{"name": "zoom", "arguments": "box"}'), "arguments of zoom are no JSON object"),
    "very deep": (json_call("[" * 100_000), "recursion"),
    "XML without an end": ("<tool_call>\n<function=look>\n<parameter=a>\n1\n</tool_call>", "cannot be read after 0"),
    "XML twice the same": ("<tool_call><function=look><parameter=a>1</parameter><parameter=a>2</parameter></function>"
                           "</tool_call>", "the parameter a twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_call_is_an_error_and_the_next_call_is_read(case):
    text, message = MALFORMED[case]
    first, *others = parse_tool_calls(text)
    assert message in first.error and not others
    if text.endswith("</tool_call>"):
        assert parse_tool_calls(text + "\n" + GOOD)[1:] == [ZOOM]


def xml_call(name, **values):
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def test_the_xml_form_reads_values_by_the_schema():
    text = xml_call("look", code="75001", count="3", box="[0, 1.5]", deep="true", note="a\n```\nb")
    (call,) = parse_tool_calls(text, SCHEMAS)
    assert call == ToolCall("look", {"code": "75001", "count": 3, "box": [0, 1.5], "deep": True, "note": "a\n```\nb"})
    (call,) = parse_tool_calls(xml_call("look", note="null", count="None", deep="False", code="null"), SCHEMAS)
    assert call.arguments == {"note": None, "count": None, "deep": False, "code": "null"}
    (call,) = parse_tool_calls(xml_call("unknown", a="75001", b="Lille"), SCHEMAS)
    assert call.arguments == {"a": 75001, "b": "Lille"}
    assert parse_tool_calls(xml_call("look"), SCHEMAS) == [ToolCall("look", {})]


def by_trl(text, template):
    found = parse_response(text, template, prefix="", tools=SCHEMAS).get("tool_calls", [])
    return [ToolCall(call["function"]["name"], call["function"]["arguments"]) for call in found]


@pytest.mark.parametrize("case", ["none", "one", "several", "no spaces", "unicode"])
def test_json_calls_are_those_that_trl_reads(case):
    text = READ[case][0]
    assert by_trl(text, trl_templates.qwen3_template) == parse_tool_calls(text)


@pytest.mark.parametrize(
    "values",
    [{"code": "75001", "count": "3"}, {"box": "[0, 1.5]", "deep": "true"}, {"note": "two\n  lines"}, {"code": "null"}],
)
def test_xml_calls_are_those_that_trl_reads(values):
    text = "<think>\nWell.\n</think>\n\nI look." + 2 * xml_call("look", **values)
    assert by_trl(text, trl_templates.qwen3_5_template) == parse_tool_calls(text, SCHEMAS)


def test_what_a_chat_template_writes_is_read_again():
    """Both forms, by the templates of TRL's package: a call in a message, rendered, and parsed."""
    from transformers.utils.chat_template_utils import render_jinja_template

    arguments = {"code": "print('</x>')\nwhile True: {}", "count": 2, "box": [1, 2.5], "deep": False}
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Hm.", "tool_calls": [call, call]}]
    for template in (trl_templates.qwen3_chat_template, trl_templates.qwen3_5_nothink_chat_template):
        (text,), _ = render_jinja_template([chat], tools=SCHEMAS, chat_template=template)
        response = text[text.rindex("Hm.") :]
        assert parse_tool_calls(response, SCHEMAS) == [ToolCall("look", arguments)] * 2
