r"""`math`: equal in value, not in spelling; only <answer> and \boxed{} count; a hostile answer costs its own sample."""

import signal
from dataclasses import replace

import pytest
from helpers import NAN, close, fake_rollouts

from mtrl.algorithms.metrics import success_part
from mtrl.compose import reward_scorer as rewards
from mtrl.compose.reward_scorer import build_scorer
from mtrl.config import ConfigError, load_config
from mtrl.rewards.math_equality import extract_answer, extract_last_box, math

EQUAL = [  # truth, response
    ("1/2", r"\boxed{0.5}"),
    (r"\frac{1}{2}", r"\boxed{\dfrac{2}{4}}"),
    (r"\frac12", "<answer>1/2</answer>"),
    (r"1\frac{1}{2}", r"\boxed{1.5}"),
    ("1/3", r"\boxed{0.333333}"),
    (0.25, r"\boxed{\frac14}"),
    (7, "<answer>7.0</answer>"),
    (7, "<answer> 7. </answer>"),
    ("1,000", r"\boxed{1000}"),
    ("1e3", r"\boxed{1000}"),
    (1.5e-7, r"\boxed{0.00000015}"),
    ("1.6e-19", r"\boxed{1.6 \times 10^{-19}}"),
    ("0.00005", r"\boxed{\frac{1}{20000}}"),
    ("-1", "<answer>−1</answer>"),  # a minus sign, not a hyphen
    ("50%", r"\boxed{0.5}"),
    ("0.06", r"<answer>6\%</answer>"),
    ("[0,1)", r"\boxed{[0, 1)}"),
    (r"(-\infty,3]", r"\boxed{(-\infty, 3]}"),
    (r"x \le 3", r"\boxed{(-\infty, 3]}"),
    (r"\{1,2,3\}", r"\boxed{\{3, 2, 1\}}"),
    ("x=1 or x=2", r"\boxed{2, 1}"),
    ("(3, -2)", "<answer>(3,-2)</answer>"),
    (r"\sqrt{8}", r"\boxed{2\sqrt2}"),
    ("x^2-1", r"\boxed{(x-1)(x+1)}"),
    (r"\frac{\pi}{4}", r"\boxed{\pi/4}"),
    ("2x+3", "<answer>3+2x</answer>"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{bmatrix}1\\2\end{bmatrix}}"),
    ("5", r"\boxed{5\text{ cm}}"),
    ("5 cm", r"\boxed{5}"),
    ("90", r"\boxed{90^\circ}"),
    ("18", "<answer>$18</answer>"),
    ("5", r"\boxed{x = 5}"),
    ("3:4", r"\boxed{6:8}"),
    ("10:30 pm", "<answer>10:30 pm</answer>"),  # no formula: the same text
    (r"$\frac{1}{2}$", r"\boxed{0.5}"),
    (r"so it is \boxed{3}", r"\boxed{3}"),
    ("They have 9 * 2 = 18.\n#### 18", r"\boxed{18}"),
    ("5", r"\boxed{\boxed{5}}"),
    ("5", r"\boxed{4}? No: \boxed{5}"),
    ("5", r"<answer>\boxed{5}</answer>"),
    ("5", r"\boxed{7} <answer>5</answer>"),
    ("5", "<answer>4</answer> or rather <answer>5</answer>"),
    ("12", "<answer>The total is $12$.</answer>"),
    ("5", r"<think>\boxed{3}, no</think> \boxed{5}"),
    ("5", r"it must be 5</think><answer>5</answer>"),  # the template opened <think>
]
DIFFERENT = [
    ("1/2", r"\boxed{0.51}"),
    ("1/3", r"\boxed{0.3333}"),
    ("-3", r"\boxed{3}"),
    ("1.6e-19", r"\boxed{1.7 \times 10^{-19}}"),  # equal to six decimal places
    ("0.0000001", r"\boxed{0.0000002}"),
    ("1.6e-19", r"\boxed{0.0}"),
    ("3.14", r"\boxed{\pi}"),
    ("[0,1)", r"\boxed{[0,1]}"),
    ("(0,1)", r"\boxed{[0,1]}"),
    ("(1,2)", r"\boxed{(2,1)}"),
    (r"\{1,2,3\}", r"\boxed{\{1,2\}}"),
    ("5", r"\boxed{x > 5}"),
    ("5", r"\boxed{5, 6}"),
    ("3", "<answer>$3$ or $4$</answer>"),
    ("x^2", r"\boxed{x^3}"),
    ("Tuesday", "<answer>Monday</answer>"),
    ("5", "the answer is 5"),  # neither tag nor box
    ("5", ""),
    ("5", r"\boxed{}"),
    ("5", r"\boxed{5"),  # cut off
    ("5", "<answer></answer>"),
    ("5", r"<think>\boxed{5}</think>"),
    ("5", r"<think>it goes on \boxed{5}"),
    ("5", r"<answer>6</answer> \boxed{5}"),  # the tag wins
    ("2", r"\boxed{}}{{\frac}"),
]


@pytest.mark.parametrize(("truth", "response"), EQUAL)
def test_equal(truth, response):
    assert math({"ground_truth": truth, "response": response}) == 1.0


@pytest.mark.parametrize(("truth", "response"), DIFFERENT)
def test_different(truth, response):
    assert math({"ground_truth": truth, "response": response}) == 0.0


def test_without_a_truth_it_does_not_apply():
    assert math({"ground_truth": None, "response": r"\boxed{5}"}) is None


def test_the_position_of_the_answer():
    assert extract_answer(r"\boxed{\frac{1}{\sqrt{2}}} and more }") == r"\frac{1}{\sqrt{2}}"
    assert extract_last_box(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"  # escaped braces close nothing
    assert extract_last_box(r"\fbox{3} \boxed {4}") == "4"
    assert extract_last_box(r"\boxed{a \boxed{b} c}") == r"a \boxed{b} c"
    assert extract_last_box(r"\boxed{1} \boxed{2") == "1"
    assert extract_last_box(r"\boxed{a \boxed{b} c") == "b"  # the outer one never closes
    assert extract_last_box(r"{ } } \boxed{{1}") is None and extract_last_box(r"{ } } \boxed{1}") == "1"
    assert extract_last_box(r"\\boxed{5}") == "5"  # as JSON spells it
    assert extract_answer("<answer>1<answer>2</answer>") == "2"


def test_it_leaves_signals_alone():
    """math-verify's own time limit is an alarm; the sandbox owns time, and a user's handler stays."""
    before = signal.signal(signal.SIGALRM, handler := lambda *_: None)
    try:
        math({"ground_truth": "x^2-1", "response": r"\boxed{(x-1)(x+1)}"})
        assert signal.getsignal(signal.SIGALRM) is handler and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)


# ------------------------------------------------------------------------------------------------------ inside a run
def answered(texts, answers, group):
    """Rollouts with these texts; the answers are those of the prompts."""
    rollouts = fake_rollouts([2] * len(texts), group)
    prompts = [
        replace(prompt, task=replace(prompt.task, answer=answer))
        for prompt, answer in zip(rollouts.prompts, answers, strict=True)
    ]
    return replace(rollouts, text=tuple(texts), prompts=tuple(prompts))


@pytest.fixture(scope="module")
def scorer():
    limits = {"worker.reward.timeout_s": 4, "worker.reward.num_cpus": 1}
    overrides = {"worker.reward.functions": ("math", "format"), **limits}
    scorer = build_scorer(load_config(None, overrides), steps=1)
    yield scorer
    scorer.close()


@pytest.mark.slow  # 5 s
def test_a_hostile_answer_fails_alone_and_in_time(scorer):
    texts = [r"\boxed{0.5}", r"\boxed{9^{9^{9^{9^{9}}}}+1}", r"\boxed{1/3}", r"\boxed{1/2}"]
    rewards = scorer.submit(answered(texts, ["1/2", None], [0, 0, 1, 1]), step=0).result()
    close(rewards.parts["math"], [1, 0, NAN, NAN])
    assert rewards.failed.tolist() == [False, True, False, False]


def test_the_users_keyword_arguments_are_not_its_own():
    overrides = {"worker.reward.functions": ("math",), "worker.reward.reward_fn_kwargs": {"scale": 2}}
    scorer = build_scorer(load_config(None, {**overrides, "worker.reward.num_cpus": 1}), steps=1)
    rewards = scorer.submit(answered([r"\boxed{2}"], ["4/2"], [0]), step=0).result()
    scorer.close()
    assert rewards.parts["math"].tolist() == [1.0] and not rewards.failed.any()
    assert success_part(rewards.parts) is rewards.parts["math"], (
        "the share of correct answers is known without accuracy"
    )


def test_without_the_package_the_error_names_it(monkeypatch):
    monkeypatch.setattr(rewards, "find_spec", lambda name: None)  # as where it is not installed
    with pytest.raises(ConfigError, match=r"pip install 'mtrl\[math\]'"):
        build_scorer(load_config(None, {"worker.reward.functions": ("math",)}), steps=1)
