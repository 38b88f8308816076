"""Recorded responses as HTML for a notebook."""

import re

import pytest
from view_helpers import make_step, recorded, replace_text

from mtrl.tracking.blocks import RECORD_DIR
from mtrl.view.response_html import view_responses


@pytest.fixture
def run(tmp_path):
    """Rewards 1.5 and 0.5 for the first prompt; S of the tokens is 0, 0.25 and 0.5, and the first ones are trained."""
    recorded(tmp_path / RECORD_DIR, replace_text(make_step(), "red", prompt="<script>a</script>"), make_step())
    return tmp_path


def test_tokens_are_coloured_on_one_scale_and_trained_ones_underlined(run):
    view = view_responses(run, step=1)
    html = view._repr_html_()
    assert [one["reward"] for one in view.responses] == [1.5, 0.5] and "up to 0.5" in html
    opacities = [float(x) for x in re.findall(r"rgba\(236, 112, 20, ([\d.]+)\)", html)]
    assert opacities == pytest.approx([0.0, 0.58, 0.82]), "0.82 times the root of 0, 0.25 and 0.5 over 0.5"
    assert re.findall(r"2px solid( transparent)?", html) == ["", " transparent", ""]
    assert html.count("<img") == 2, "the image and its perturbed view"
    assert "dependency 0.25" in html, "a token says its numbers"


def test_values_around_a_centre_have_two_colours(run):
    html = view_responses(run, step=1, signal="advantage")._repr_html_()
    assert "rgba(221, 92, 34" in html and "rgba(20, 130, 190" not in html, "all advantages are negative"


def test_texts_cannot_be_markup(run):
    view = view_responses(run, step=1)
    assert "<script>" not in view._repr_html_() and "&lt;script&gt;a" in view._repr_html_()
    assert "row 0, reward 1.500: red" in repr(view)


def test_the_last_step_and_a_prompt_whose_rewards_differ_are_the_default(run):
    view = view_responses(run)
    assert {(one["step"], one["group"]) for one in view.responses} == {(2, 0)}
    assert len(view_responses(run, row=2).responses) == 1, "the only response to the second prompt"
    assert [one["reward"] for one in view_responses(run, most=1).responses] == [1.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 5}, "step 5 is not recorded; there are 1 to 2"),
        ({"row": 3}, "row 3: step 2 has the rows 0 to 2"),
        ({"signal": "dependancy"}, "signal 'dependancy' is not recorded; there are .*dependency"),
    ],
)
def test_what_there_is_not_is_an_error_that_says_what_there_is(run, arguments, message):
    with pytest.raises(ValueError, match=message):
        view_responses(run, **arguments)


def test_a_run_without_a_record(tmp_path):
    with pytest.raises(ValueError, match=r"no responses are recorded in .* record_rollouts_per_step"):
        view_responses(tmp_path)
