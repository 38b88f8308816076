"""Which letter a response chose, and which was right: SPEC 3, `accuracy`, case by case."""

import pytest
from more_phrasings import FURTHER
from phrasings import PHRASINGS

from mtrl.rewards.builtin import accuracy
from mtrl.rewards.choices import chosen_letter
from mtrl.rewards.truths import true_choices

COLOURS = ["red", "green", "blue", "a red circle"]

CHOSEN = [
    # ---- an answer tag wins over everything
    ("<answer>B</answer>", "B"),
    ("<answer>b</answer>", "B"),
    ("<answer> ( C ) </answer>", "C"),
    ("<answer>\nD\n</answer>", "D"),
    ("<answer>(B) red</answer>", "B"),
    ("<answer>B. red</answer>", "B"),
    ("<answer>B: red</answer>", "B"),
    ("<answer>B) red</answer>", "B"),
    ("<answer>a. red</answer>", "A"),
    ("<answer>B red</answer>", "B"),
    ("<answer>option b</answer>", "B"),
    ("<answer>The answer is A.</answer>", "A"),
    ("<answer>Answer: c</answer>", "C"),
    ("<answer>\\boxed{D}</answer>", "D"),
    ("<answer>**C**</answer>", "C"),
    ("<answer>J</answer>", "J"),
    ("<answer>K</answer>", None),
    ("<answer></answer>", None),
    ("<answer>Both</answer>", None),
    ("<answer>AB</answer>", None),
    ("<ANSWER>b</ANSWER>", "B"),
    ("<answer>A</answer> no, <answer>B</answer>", "B"),
    ("<answer>A<answer>B</answer>", "B"),
    ("<answer>C", "C"),
    ("Answer: D\n<answer>A</answer>", "A"),
    ("<answer>A</answer>\nAnswer: D", "A"),
    # ---- thoughts do not count
    ("<think>B or C?</think><answer>A</answer>", "A"),
    ("<think><answer>B</answer></think>\nC", "C"),
    ("<think>Answer: B</think>", None),
    ("<think>it must be B", None),
    ("<think>it must be <answer>B</answer>", None),
    ("<THINK>B</THINK> D", "D"),
    ("<think>A</think> B <think>C</think>", "B"),
    ("first A, then Answer: B </think> C", "C"),
    ("D <think>Answer: B", "D"),
    ("D <think>Answer: B</think>", "D"),
    ("<answer>A</answer><think><answer>B</answer></think>", "A"),
    ("<think>A</think><answer>「ｄ」</answer>", "D"),
    ("<think>答案：A</think>\n答案：B。", "B"),
    # ---- the last key word with a colon
    ("Answer: B", "B"),
    ("answer:b", "B"),
    ("Final answer: (C)", "C"),
    ("FINAL ANSWER: C", "C"),
    ("The answer is: D", "D"),
    ("Option: E", "E"),
    ("Choice: [F]", "F"),
    ("**Answer**: b", "B"),
    ("**Answer:** G", "G"),
    ("Answer: A because it is round", "A"),
    ("Final answer:\nB", "B"),
    ("Final answer:\n\n  **B**\n", "B"),
    ("Answer: A\nAnswer: B", "B"),
    ("Answer: A. Final answer: B", "B"),
    ("Answer: B\nThe letter A came first.", "B"),
    ("Answer: I", "I"),
    ("Answer: 42", None),
    ("Answer: Both of them", None),
    # ---- Chinese, full width
    ("答案：B", "B"),
    ("答案: c", "C"),
    ("答案是：D。", "D"),
    ("答案为：（A）", "A"),
    ("选项：Ｂ", "B"),
    ("正确答案：【C】", "C"),
    ("最终答案：b、蓝色", "B"),
    ("答案是B", "B"),
    ("答案是b", "B"),
    ("选B", "B"),
    ("我选择C。", "C"),
    ("所以应该选 A。", "A"),
    ("Ｂ", "B"),
    ("ｂ", "B"),
    ("（Ｃ）", "C"),
    ("「D」", "D"),
    ("图中有A、B两个物体，选B。", "B"),
    ("<think>选A</think>选B", "B"),
    ("没有答案", None),
    ("答案：Ａ；不对，答案：Ｂ", "B"),
    ("答案：B，因为A是错的。", "B"),
    ("选Ａ，不选Ｂ。最终答案：Ａ", "A"),
    ("故选：（ｃ）。", "C"),
    ("Answer：【ｂ】", "B"),
    ("Final Answer：（Ｄ）。", "D"),
    ("《C》", "C"),
    ("<answer>Ａ、红色</answer>", "A"),
    # ---- the last lone letter
    ("B", "B"),
    ("b", "B"),
    ("(b)", "B"),
    ("[C].", "C"),
    ("{d}", "D"),
    ('"B"', "B"),
    ("$C$", "C"),
    ("\\boxed{C}", "C"),
    ("B.", "B"),
    ("B) the red one", "B"),
    ("The answer is A.", "A"),
    ("The answer is A", "A"),
    ("the answer is b", "B"),
    ("The answer is A because it is red", "A"),
    ("A is correct.", "A"),
    ("I choose A", "A"),
    ("I pick c because of the colour", "C"),
    ("Option A is correct", "A"),
    ("Option I", "I"),
    ("Between A and C, C", "C"),
    ("It is not A, it is (b).", "B"),
    ("reasons\nb\n", "B"),
    ("C <i>because</i> it is round", "C"),
    # ---- letters that are not an answer
    ("A cat sits there.", None),
    ("I think so.", None),
    ("I do. A dog barks.", None),
    ("It is a cat", None),
    ("the answer is a cat", None),
    ("I'm sure it's a dog", None),
    ("I’d say it’s a dog", None),
    ("Because", None),
    ("Bär, Dégâts, É", None),
    ("ABBA", None),
    ("Abacus, Beach, Cab", None),
    ("B2 and 3D", None),
    ("e.g. nothing, i.e. none", None),
    ("", None),
    ("   \n", None),
    ("1", None),
]  # fmt: skip


FORMS = ["{}", "({})", "{}.", "<answer>{}</answer>", "Answer: {}", "The answer is {}.", "Option {} is right"]
FORMS += ["{} is correct", "答案：{}", "选{}", "\\boxed{{{}}}"]


def test_there_are_enough_cases():
    assert len(CHOSEN) >= 80 and len(dict(CHOSEN)) == len(CHOSEN)


@pytest.mark.parametrize(("response", "letter"), CHOSEN)
def test_the_chosen_letter(response, letter):
    assert chosen_letter(response) == letter


@pytest.mark.parametrize("letter", "ABCDEFGHIJ")
@pytest.mark.parametrize("form", FORMS)
def test_all_letters_are_treated_alike(form, letter):
    assert chosen_letter(form.format(letter)) == letter


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("<answer>green</answer>", "B"),
        ("<answer>GREEN.</answer>", "B"),
        ("Answer: blue", "C"),
        ("<answer>A red</answer>", "A"),
        ("<answer>a red</answer>", "A"),
        ("<answer>A red circle</answer>", "D"),
        ("<answer>A blue</answer>", None),  # says A, means C: neither
        ("<answer>B green</answer>", "B"),
        ("<answer>B</answer>", "B"),
        ("<answer>purple</answer>", None),
    ],
)
def test_an_option_in_its_own_words(response, letter):
    assert chosen_letter(response, COLOURS) == letter


@pytest.mark.parametrize(
    ("truth", "options", "letters"),
    [
        ("B", None, "B"),
        ("b", None, "B"),
        ("(B)", None, "B"),
        ("Ｂ", None, "B"),
        (" c. ", None, "C"),
        ("K", None, ""),
        (0, None, ""),  # a value
        (2.0, None, ""),
        (0, COLOURS, "A"),
        (3, COLOURS, "D"),
        (4, COLOURS, ""),
        (-1, COLOURS, ""),
        (2.0, COLOURS, "C"),
        (2.5, COLOURS, ""),
        (True, COLOURS, ""),
        (3, ["3", "4"], "A"),  # no such index, but an option's text
        (1, [], ""),  # an empty list is no options
        ("green", COLOURS, "B"),
        ("Green.", COLOURS, "B"),
        ("B. green", COLOURS, "B"),
        ("green", ["A. red", "B. green"], "B"),
        ("purple", COLOURS, ""),
        ("E", COLOURS, ""),
        ("green", None, ""),
        ("<answer>B</answer>", None, "B"),
        ("<answer>green</answer>", COLOURS, "B"),
        ("<answer>1</answer>", COLOURS, "B"),
        ("<answer>1</answer>", None, ""),
        ("2", ["1", "2", "3", "4"], "B"),  # an option's text before an index
        ("2", COLOURS, "C"),
        ("3", None, ""),  # an answer in digits, not the fourth option
        ("A", ["B", "A"], "A"),  # a letter before an option's text
        ("e", ["e", "f", "g", "h"], "A"),  # there is no option E
        ("C++", ["Java", "C++", "C"], "B"),
        ("green", {"A": "red", "B": "green"}, "B"),
        ("B", {"text": ["red", "green"], "label": ["A", "B"]}, "B"),  # an unknown form shows no options
        ("green", "A. red\nB. green", "B"),
        ("B", "red, green", "B"),
        # ---- sets
        (["A", "C"], None, "AC"),
        (("c", "a"), COLOURS, "AC"),
        ([0, 2], COLOURS, "AC"),
        ([0, 2], None, ""),  # values
        (["red", "C"], COLOURS, "AC"),
        (["B"], None, "B"),
        (["A", "E"], COLOURS, ""),
        (["Paris", "Rome"], None, ""),
        ("A, C", None, "AC"),
        ("A、C", COLOURS, "AC"),
        ("A and C", COLOURS, "AC"),
        ("A or C", None, ""),  # which?
        ("red, blue", COLOURS, "AC"),
        ("AC", COLOURS, "AC"),
        ("AC", None, ""),  # air conditioning, perhaps
        ("AE", COLOURS, ""),
        ("BAD", COLOURS, ""),
    ],
)
def test_the_true_choices(truth, options, letters):
    assert "".join(sorted(true_choices(truth, options))) == letters


def test_an_index_needs_no_options():
    assert true_choices(1, None, index=True) == true_choices("1", None, index=True) == {"B"}
    assert not true_choices(10, None, index=True)


@pytest.mark.parametrize(("response", "options", "truth", "score"), PHRASINGS)
def test_phrasings(response, options, truth, score):
    assert accuracy(sample(response, truth, options=options)) == score


def test_there_are_200_phrasings_for_both_scores():
    assert len({(response, str(truth)) for response, _, truth, _ in PHRASINGS}) >= 200
    assert min(sum(score == given for *_, given in PHRASINGS) for score in (0, 1)) >= 90


@pytest.mark.parametrize(("response", "letter", "before"), FURTHER)
def test_further_phrasings(response, letter, before):
    assert chosen_letter(response) == letter, f"it was {before}"


def test_there_are_a_hundred_further_phrasings():
    texts = [response for response, _, _ in FURTHER]
    assert len(set(texts)) == len(texts) >= 100
    assert sum(any("\u4e00" <= character <= "\u9fff" for character in text) for text in texts) >= 40, "Chinese"
    assert sum(letter != before for _, letter, before in FURTHER) >= 45, "which were wrong"


def test_a_letter_after_a_denied_one_is_chosen_once():
    """If the text names it again, it is denied there: nothing is chosen."""
    for response in ("Not A, B. Not B.", "Answer: not A, B. B is wrong", "I think neither A nor B, B"):
        assert chosen_letter(response) is None


@pytest.mark.parametrize(
    "response",
    ["A or B, I choose A over B", "A or B. The man holds B", "A or B, and B is second", "A and C. Look at D"],
)
def test_letters_stay_open_unless_the_last_word_decides(response):
    assert chosen_letter(f"Answer: {response}") is None


def sample(response, truth, **columns):
    return {"response": response, "ground_truth": truth, **columns}


@pytest.mark.parametrize(
    ("given", "score"),
    [
        (sample("B", "B"), 1.0),
        (sample("A", "B"), 0.0),
        (sample("nothing", "B"), 0.0),
        (sample("B", 1), 0.0),  # without options an integer is a value
        (sample("<answer>1</answer>", 1), 1.0),
        (sample("Answer: 1.", 1), 1.0),
        (sample("<think>2</think>1", 1), 1.0),
        (sample("<answer>1</answer>", 1.0), 1.0),
        (sample("B", 1, options=COLOURS), 1.0),
        (sample("green", "B", options=COLOURS), 0.0),  # no tag, no key word, no letter
        (sample("<answer>green</answer>", "B", options=COLOURS), 1.0),
        (sample("B", "green", options=COLOURS), 1.0),
        (sample("B", None, label_idx=1), 1.0),
        (sample("A", None, label_idx=1), 0.0),
        (sample("A", "A", label_idx=1), 1.0),  # the answer column wins
        (sample("B", "", label_idx=1), 1.0),
        (sample("B", None, label_idx=1, options=COLOURS), 1.0),
        (sample("B", None), None),
        (sample("", ""), None),
        (sample("B", []), None),
        (sample("B", float("nan")), None),
        (sample("<answer>e</answer>", "e", options=["e", "f", "g", "h"]), 1.0),
        (sample("<answer>3</answer>", "3"), 1.0),
        (sample("D", "3"), 0.0),
        (sample("<answer> Paris. </answer>", "paris"), 1.0),
        (sample("Paris", "paris"), 1.0),
        (sample("<answer>Rome</answer>", "paris"), 0.0),
    ],
)
def test_accuracy(given, score):
    assert accuracy(given) == score
