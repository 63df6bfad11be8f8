import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.rewards.extract import extract

POLICIES = ["answer_line", "boxed", "tag", "last_number", "whole"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Answer: 34", "34"),
        ("answer : 34", "34"),
        ("ANSWER:34", "34"),
        ("**Answer:** 34", "34"),
        ("**Answer**: 34", "34"),
        ("**Answer: 34**", "34"),
        ("Final answer: 34", "34"),
        ("The final answer is: 34", "34"),
        ("### Answer: 34", "34"),
        ("> - Answer: 34", "34"),
        ("答案：34", "34"),
        ("最终答案: 34", "34"),
        ("Answer:\n34", "34"),
        ("Answer:\n\n34\nand more", "34"),
        ("Answer:\n$$\n34\n$$", "34"),
        ("Answer: \\[ \\frac{1}{2} \\]", "\\frac{1}{2}"),
        ("Answer: $34$", "$34$"),
        ("Answer: so it is \\boxed{34}.", "34"),
        ("### Answer\nSee below.\n### Answer:\nWe add 30 and 4.\n\nSo it is $\\boxed{34}$.", "34"),
        ("Answer: 34\n\nNext question: \\boxed{35}", "34"),
        ("Answer: $\\boxed{\n34\n}$", "34"),
        ("Answer: $\\boxed{34", "$\\boxed{34"),
        (
            "Answer:\n\\[\n\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}\n\\]",
            "\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}",
        ),
        ("Answer: \\begin{pmatrix}\n1", "\\begin{pmatrix}"),
        ("<answer>Answer: 34</answer>", "34"),
        ("Answer: <answer>34</answer>", "34"),
        ("Thus 34. Answer: 34 apples", "34 apples"),
        ("Answer: 1\nAnswer: 2", "2"),
        ("Answer: 34\nAnswer:", "34"),
        ("Answer: 34\n" + "more " * 500, "34"),
        ("Answer: 2**3", "2**3"),
        ('Answer: 34\nRemember to write it after "Answer:".', "34"),
        ('I will write it after "Answer:" as asked.', None),
        ("student Answer: 5", None),
        ("Answer 34", None),
        ("Answer:", None),
        ("Answer: \n\n\n\n\n\n34", None),
        ("the answers: 34", None),
        ("", None),
    ],
)
def test_answer_line_returns_the_text_after_the_last_label_that_has_any(text, found):
    assert extract(text, ["answer_line"]) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\boxed{34}", "34"),
        ("\\fbox{34}", "34"),
        ("\\boxed {34}", "34"),
        ("\\boxed 5", "5"),
        ("\\boxed 34. Done", "34"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{1} and \\boxed{2}", "2"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{34} and then \\boxed{3", "34"),
        ("\\boxed{a}b}", "a"),
        ("\\boxed{ 34 }", "34"),
        ("\\boxed{}", None),
        ("\\boxed", None),
        ("\\boxedx{5}", None),
        ("boxed{5}", None),
        ("34", None),
    ],
)
def test_boxed_returns_the_last_box_with_balanced_braces(text, found):
    assert extract(text, ["boxed"]) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<answer>34</answer>", "34"),
        ("<answer> 1 </answer><answer>\n2\n</answer>", "2"),
        ("<ANSWER>x</Answer>", "x"),
        ("İ<answer>34</answer>", "34"),
        ("<answer>1</answer> <answer>2", "1"),
        ("<answer></answer>", None),
        ("</answer><answer>", None),
        ("34", None),
    ],
)
def test_tag_returns_the_last_pair_of_tags(text, found):
    assert extract(text, ["tag"]) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is 5.", "5"),
        ("5, then 6,", "6"),
        ("a total of $1,034.50.", "1034.50"),
        ("-$3", "-3"),
        ("$-3$", "-3"),
        ("\\$40", "40"),
        ("= -3", "-3"),
        ("−7", "-7"),
        ("x-3", "3"),
        ("30-40", "40"),
        ("(1, -2)", "-2"),
        ("1/2", "1/2"),
        ("10 / 3 of it", "10/3"),
        ("\\frac{1}{2}", "1/2"),
        ("-\\dfrac{3}{4}", "-3/4"),
        ("1\\frac{1}{2}", "1 1/2"),
        ("50%", "50%"),
        ("50 \\%", "50%"),
        ("1.5e-3", "1.5e-3"),
        ("1.5 \\times 10^{3}", "1.5\\times10^{3}"),
        (".5", ".5"),
        ("1,2,3", "3"),
        ("1,000,000", "1000000"),
        ("**34**", "34"),
        ("34\nno more", "34"),
        ("x2 and a_1 and H2O", None),
        ("none", None),
    ],
)
def test_last_number_returns_the_number_in_plain_form(text, found):
    assert extract(text, ["last_number"]) == found


def test_the_first_policy_that_finds_something_decides():
    text = "<answer>1</answer> \\boxed{2}\nAnswer: 3\nor 4"
    assert [extract(text, [policy]) for policy in POLICIES] == ["3", "2", "1", "4", text]
    assert extract(text, ["tag", "boxed"]) == "1"
    assert extract("only 4", ["tag", "boxed", "last_number"]) == "4"
    assert extract(" \n", POLICIES) is None
    assert extract("  some text ", ["whole"]) == "some text"


@given(st.text(alphabet="\\{}boxed<>/answer: \n1,.-$%*", max_size=60))
def test_no_policy_raises_or_returns_a_blank_answer(text):
    for policy in POLICIES:
        found = extract(text, [policy])
        assert found is None or found.strip()


@pytest.mark.parametrize(
    "unit",
    [
        "\\",
        "9",
        "{",
        "}",
        "\\boxed{",
        "\\boxed ",
        "Answer:",
        "Answer:\n",
        "1,000,",
        "123,456,",
        "1/",
        "\n",
        " ",
        "<answer>",
        "$",
        "-",
        "*",
    ],
)
def test_every_policy_is_linear_in_the_length_of_the_text(unit):
    # A quadratic policy would take minutes on a megabyte. The bound leaves room for a busy machine.
    text = "Answer:" + unit * (1_000_000 // len(unit))
    for policy in POLICIES:
        start = time.process_time()
        extract(text, [policy])
        assert time.process_time() - start < 5
