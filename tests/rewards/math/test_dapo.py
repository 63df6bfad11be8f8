import pytest

from dapo.rewards.math.dapo import math_dapo_reward, normalize


def is_right(completion, gold="34"):
    outcome = math_dapo_reward(completion, gold)
    assert outcome["score"] == (1.0 if outcome["acc"] else -1.0)
    return outcome["acc"]


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("34", "34"),
        ("34", "$34$"),
        ("34", "\\boxed{34}"),
        ("34", "$\\boxed{34}$"),
        ("34", "x = 34"),
        ("34", "34 \\text{ cm}"),
        ("34", "\n34"),
        ("34", "34 degrees"),
        ("34", "34^\\circ"),
        ("34", "\\$34"),
        ("34", "a 34"),
        ("34", "it is $34$ now"),
        ("1034", "1,034"),
        ("1034", "1{,}034"),
        ("1034", "1,\\!034"),
        ("\\frac{1}{2}", "\\frac12"),
        ("\\sqrt{3}", "\\sqrt3"),
        ("\\frac{1}{2}", "y=\\frac{1}{2}"),
        ("AB", "\\overline{AB}"),
        ("A", "\\textbf{A}"),
    ],
)
def test_answers_that_the_published_rule_accepts(gold, response):
    assert is_right(f"So we are done.\nAnswer: {response}", gold)


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("34", "34."),
        ("34", "34.0"),
        ("34", "034"),
        ("34", "**34**"),
        ("34", "35"),
        ("34", "$35$"),
        ("34", "x = 35"),
        ("34", "34 = x"),
        ("1034", "1,035"),
        ("50", "50\\%"),
        ("\\frac{1}{2}", "0.5"),
        ("\\frac{1}{2}", "\\frac13"),
        ("0.5", "\\frac12"),
        ("34", ""),
    ],
)
def test_answers_that_the_published_rule_rejects_some_of_them_right(gold, response):
    assert not is_right(f"So we are done.\nAnswer: {response}", gold)


def test_markup_after_the_label_becomes_part_of_the_answer():
    assert not is_right("**Answer:** 34")


def test_only_the_last_300_characters_are_read():
    assert is_right("Answer: 34\n" + "." * 285)
    assert not is_right("Answer: 34\n" + "." * 400)
    assert is_right("x" * 1000 + "\nAnswer: 34")


def test_the_last_answer_counts_anywhere_in_a_line():
    assert is_right("Answer: 35\nAnswer: 34")
    assert not is_right("Answer: 34\nAnswer: 35")
    assert is_right("so ANSWER : 34")


def test_without_a_label_nothing_is_extracted_and_the_score_is_minus_one():
    for completion in ("", "34", "\\boxed{34}", "Answer 34"):
        assert math_dapo_reward(completion, "34") == {"score": -1.0, "acc": False, "extracted": None}
    assert math_dapo_reward("Answer: x = 35 cm", "34") == {"score": -1.0, "acc": False, "extracted": "35"}


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("an apple", "apple"),
        ("5 \\mbox{ inches}", "5"),
        ("12 square units", "12"),
        ("x\\text{ and }2", "x,2"),
        ("3\\text{m}", "3"),
        ("4\\text{ cm}^2", "4"),
        ("\\frac34x", "\\frac{3}{4}x"),
        ("\\sqrt{10}", "\\sqrt{10}"),
        ("1,2,x", "1,2,x"),
        ("the answer is $5.$", "5"),
        ("7\\mathrm{th}", "7"),
    ],
)
def test_the_normalization_of_a_final_answer(answer, normal):
    assert normalize(answer) == normal


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("so $5$ it is\nand $6$ too", "5\n6"),
        ("first\nit is $34$ now", "first\n34"),
        ("$3\n4$", "3\n4"),
        ("\\text{a\nb}", "\\text{a\nb}"),
        ("x = 1\ny = 2", "2"),
    ],
)
def test_each_line_of_an_answer_is_normalized_alone_as_published(answer, normal):
    assert normalize(answer) == normal


def test_gold_answers_may_be_numbers_but_not_empty():
    assert is_right("Answer: 34", 34)
    for gold in (None, "", [34], True):
        with pytest.raises(ValueError, match="the gold answer is"):
            math_dapo_reward("Answer: 34", gold)
