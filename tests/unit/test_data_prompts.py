"""Rows become messages: marks, chats, system prompts, format prompts, and errors."""

from pathlib import Path

import pytest

from mtrl.config.packaged import CONFIG_DIR
from mtrl.data import DataError, DataSettings, RowList
from mtrl.data.prompts import TaskBuilder
from mtrl.data.row_settings import RowError
from mtrl.types import Medium

IMAGE, DATA = {"type": "image"}, Path("/data")


def text(value):
    return {"type": "text", "text": value}


def user(*parts):
    return {"role": "user", "content": parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)}


def task(row, **settings):
    return TaskBuilder.from_settings(DataSettings(**settings)).build(RowList([row], "train.json", DATA), 0)


@pytest.mark.parametrize(
    ("prompt", "images", "content"),
    [
        ("hi", None, "hi"),
        ("hi", ["a"], [IMAGE, text("hi")]),
        ("hi", ["a", "b"], [IMAGE, IMAGE, text("hi")]),
        ("<image>hi", "a", [IMAGE, text("hi")]),
        ("see <image>\nand <image>", ["a", "b"], [text("see "), IMAGE, text("\nand "), IMAGE]),
        ("<image><image>?", ["a", "b"], [IMAGE, IMAGE, text("?")]),
        ([{"role": "user", "content": "hi"}], [], "hi"),
        ([user(text("see "), {"type": "image", "text": None}, text("?"))], ["a"], [text("see "), IMAGE, text("?")]),
    ],
)
def test_marks_and_chats(prompt, images, content):
    found = task({"prompt": prompt, "images": images})
    assert found.messages == ({"role": "user", "content": content},)
    names = [images] if isinstance(images, str) else images or []
    assert found.media == tuple(Medium("image", f"/data/{name}") for name in names)


def test_without_marks_media_come_first_in_the_first_user_message():
    chat = [{"role": "system", "content": "s"}, user("one"), {"role": "assistant", "content": "two"}, user("three")]
    found = task({"prompt": chat, "images": ["a"]}).messages
    assert found == (chat[0], user(IMAGE, text("one")), chat[2], user("three"))


def test_marks_in_several_messages():
    chat = [user("<image>one"), {"role": "assistant", "content": "two"}, user("three<image>")]
    found = task({"prompt": chat, "images": ["a", "b"]}).messages
    assert found == (user(IMAGE, text("one")), chat[1], user(text("three"), IMAGE))


def test_columns_that_the_reward_gets():
    row = {"prompt": "hi", "answer": "B", "images": None, "videos": None, "choices": ["x", "y"], "level": 2}
    found = task(row, options_key="choices")
    assert found.answer == "B" and found.columns == {"choices": ["x", "y"], "options": ["x", "y"], "level": 2}
    assert found.origin == "train.json, row 1" and found.id.endswith(":0")
    assert task({"prompt": "hi"}).answer is None


def test_keys_and_image_dir():
    row = {"q": "hi", "a": 1, "pic": "x/1.png"}
    found = task(row, prompt_key="q", answer_key="a", image_key="pic", image_dir="/pictures")
    assert found.answer == 1 and found.media == (Medium("image", "/pictures/x/1.png"),) and found.columns == {}
    assert task({"prompt": "hi", "images": "/abs.png"}, image_dir="/pictures").media[0].source == "/abs.png"


def test_system_prompt():
    assert task({"prompt": "hi"}, system_prompt="be kind").messages == (
        {"role": "system", "content": "be kind"}, user("hi"))  # fmt: skip
    own = [{"role": "system", "content": "mine"}, user("hi")]
    assert task({"prompt": own}, system_prompt="be kind").messages == tuple(own)


def test_format_prompt(tmp_path):
    file = tmp_path / "format.jinja"
    file.write_text("{{ content }} {% for o in options %}({{ o }}){% endfor %} level {{ level }}\n")
    row = {"prompt": "<image>hi", "options": ["x", "y"], "level": 3, "images": "a", "content": "a column of that name"}
    assert task(row, format_prompt=str(file)).messages == (user(IMAGE, text("hi (x)(y) level 3")),)
    chat = [user("<image>one"), {"role": "assistant", "content": "two"}, user("three")]
    found = task(row | {"prompt": chat}, format_prompt=str(file)).messages
    assert found[0] == user(IMAGE, text("one")) and found[-1] == user("three (x)(y) level 3")
    file.write_text("{{ content }} {{ level.upper() }}")
    with pytest.raises(RowError, match=r"format prompt.*'level' is undefined"):
        task({"prompt": "hi", "options": []}, format_prompt=str(file))
    file.write_text("{{ content ")
    with pytest.raises(DataError, match="not a Jinja template"):
        task(row, format_prompt=str(file))
    with pytest.raises(DataError, match="cannot be read"):
        task(row, format_prompt=str(tmp_path / "gone"))


THINK = str(CONFIG_DIR / "experiments/think_answer.jinja")


@pytest.mark.parametrize("absent", [{}, {"options": None}, {"options": []}])
def test_a_template_takes_an_absent_column_for_false(tmp_path, absent):
    (message,) = task({"prompt": "hi", **absent}, format_prompt=THINK).messages
    assert message["content"].startswith("hi\n\nLook at the image")
    (message,) = task({"prompt": "hi", "choices": ["x", "y"]}, format_prompt=THINK, options_key="choices").messages
    assert "A. x\nB. y\n" in message["content"], "options have this name for any name of the column"
    file = tmp_path / "format.jinja"
    file.write_text("{{ content }}{% for o in options %}({{ o }}){% endfor %}{% if hint %} hint{% endif %}{{ level }}!")
    assert task({"prompt": "hi", "level": None, **absent}, format_prompt=str(file)).messages == (user("hi!"),)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no column 'prompt'"),
        ({"question": "hi"}, "it has question"),
        ({"prompt": None}, "NoneType"),
        ({"prompt": 3}, "int"),
        ({"prompt": {"role": "user"}}, "dict"),
        ({"prompt": ""}, "empty"),
        ({"prompt": " \n"}, "empty"),
        ({"prompt": []}, "empty"),
        ({"prompt": "<image>", "images": ["a"]}, "empty"),
        ({"prompt": [user("")]}, "empty"),
        ({"prompt": [{"role": "system", "content": "s"}]}, "empty"),
        ({"prompt": ["hi"]}, "role and content"),
        ({"prompt": [{"role": "user"}]}, "role and content"),
        ({"prompt": [{"role": "king", "content": "hi"}]}, "role 'king'"),
        ({"prompt": [{"role": ["user"], "content": "hi"}]}, "role"),
        ({"prompt": [{"role": "user", "content": 5}]}, "int, not text"),
        ({"prompt": [user("hi"), {"role": "assistant", "content": "yes"}]}, "ends with"),
        ({"prompt": [user({"type": "sound"}, text("hi"))]}, "neither text nor an image or video"),
        ({"prompt": [user({"type": "image", "image": "a.png"}, text("hi"))]}, "column of images"),
        ({"prompt": "<image>hi"}, "1 image mark for 0 images"),
        ({"prompt": "<image>hi<image>", "images": ["a"]}, "2 image marks for 1 image"),
        ({"prompt": "<image>hi", "images": ["a", "b"]}, "1 image mark for 2 images"),
        ({"prompt": "<video>hi"}, "1 video mark for 0 videos"),
        ({"prompt": "<video>hi", "videos": ["a.mp4", "b.mp4"]}, "1 video mark for 2 videos"),
        ({"prompt": "<image>hi", "videos": ["a.mp4"]}, "1 image mark for 0 images"),
        ({"prompt": "hi", "videos": ["https://a/b.mp4"]}, "a video is a web address"),
        ({"prompt": "hi", "videos": 5}, "a video is a int"),
        ({"prompt": "hi", "images": [["a"]]}, "an image is a list"),
        ({"prompt": "hi", "images": 5}, "an image is a int"),
        ({"prompt": "hi \ud800"}, "not valid Unicode"),
        ({"prompt": "hi", "options": 5}, "options are a int"),
    ],
)
def test_bad_rows_are_errors(row, reason):
    with pytest.raises(RowError, match=reason):
        task(row)


# ---------------------------------------------------------------------------------------------- what a template may not
@pytest.mark.parametrize(
    "template",
    [
        "{{ content.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ options.append('x') }}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in content %}{% for b in content %}{% for c in content %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'x' * 10000000000 }}",
        "{{ [content] * 10000000000 }}",
        "{{ 10 ** 10000000 }}",
        "{{ content.rjust(10000000000) }}",
        "{{ content | center(10000000000) }}",
        "{% for a in range(100000) %}{{ content }}{% endfor %}",
    ],
)  # fmt: skip
def test_a_template_is_in_a_sandbox(tmp_path, template, monkeypatch):
    monkeypatch.setattr("mtrl.data.templates.MAX_OPERATIONS", 100_000)  # a million take seconds
    file = tmp_path / "format.jinja"
    file.write_text(template)
    with pytest.raises(DataError, match=rf"dataset\.format_prompt {file} does what a template may not: ") as caught:
        task({"prompt": "what is it? " * 50, "options": ["x"]}, format_prompt=str(file))
    assert "\n" not in str(caught.value)


def test_a_template_may_do_all_that_writes_text(tmp_path):
    file = tmp_path / "format.jinja"
    file.write_text(
        "{% set seen = namespace(n=0) %}{% for o in options %}{% set seen.n = seen.n + 1 %}"
        "{{ loop.index }}/{{ loop.length }}"
        "{{ '. ' ~ o.upper() | trim }}{% if not loop.last %}, {% endif %}{% else %}none{% endfor %} {{ seen.n * 2 }} "
        "{{ '%s-%05d' % ('a', 7) }} {{ '-' * 3 }} {{ options | join('+') }} {{ 2 ** 10 }} "
        "{{ content | replace('a', 'b') }}"
        "{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(1) }}{{ 'a' | center(5) }}{{ dict(a=1).a }}"
    )  # fmt: skip
    found = task({"prompt": "aha", "options": ["x", "y"]}, format_prompt=str(file)).messages[0]["content"]
    assert found == "1/2. X, 2/2. Y 4 a-00007 --- x+y 1024 bhb[1]  a  1"


def test_a_huge_row_is_a_bad_row(tmp_path):
    file = tmp_path / "format.jinja"
    file.write_text("{{ content }}{% for o in options %}{{ o }}{% endfor %}{{ 'x' * level }}")
    for row in (
        {"prompt": "x" * 5_000_000},
        {"prompt": "x", "options": ["y"] * 1_100_000},
        {"prompt": "x", "level": 1e9},
        {"prompt": "x", "level": 10**400},
    ):
        with pytest.raises(RowError, match=r"the format prompt fails on it .*the row is too large for it"):
            task({"level": 1, **row}, format_prompt=str(file))


def test_the_count_restarts_with_each_row(tmp_path):
    file = tmp_path / "format.jinja"
    file.write_text("{% for a in range(40000) %}{% endfor %}{{ content }}")
    builder = TaskBuilder.from_settings(DataSettings(format_prompt=str(file)))
    rows = RowList([{"prompt": "x"}] * 30, "train.json", DATA)
    assert all(builder.build(rows, index).messages[0]["content"] == "x" for index in range(30))
