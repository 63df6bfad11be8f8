import os
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.rewards.math import compare
from dapo.rewards.math.compare import math_reward
from tests.rewards.math import fuzz
from tests.rewards.math.cases import RIGHT, TOO_BIG, WRONG


def test_the_whole_table_is_read():
    assert len(RIGHT) > 450
    assert len(WRONG) > 580


def is_right(gold, response):
    outcome = math_reward(response if "Answer:" in response or "\\boxed" in response else f"Answer: {response}", gold)
    assert outcome["score"] == float(outcome["acc"])
    return outcome["acc"]


@pytest.mark.parametrize(("gold", "response"), RIGHT)
def test_a_right_answer_is_accepted_in_any_spelling(gold, response):
    assert is_right(gold, response)


@pytest.mark.parametrize(("gold", "response"), WRONG + TOO_BIG)
def test_a_near_miss_is_wrong(gold, response):
    assert not is_right(gold, response)


@pytest.mark.parametrize(
    ("gold", "completion", "right"),
    [
        ("34", "Answer: 35\nWait.\nAnswer: 34", True),
        ("35", "Answer: 35\nWait.\nAnswer: 34", False),
        ("34", "\\boxed{35} no, \\boxed{34}", True),
        ("35", "\\boxed{35} no, \\boxed{34}", False),
        ("34", "\\boxed{35}\n\nAnswer: 34", True),
        ("34", "Answer: 34\n" + "and so on. " * 100, True),
        ("34", "**Answer:** 34", True),
        ("34", "**Answer: 34**", True),
        ("34", "Answer:\n34", True),
        ("34", "Answer:\n\n$$\n34\n$$\n", True),
        ("34", "答案：34", True),
        ("34", "最终答案：$34$。", True),
        ("34", "答案：35", False),
        ("34", "Final answer: \\boxed{34}.", True),
        ("34", "We add 30 and 4 to get 34.", True),
        ("34", "We add 4 and 34 to get 38.", False),
        ("34", "The numbers are 33, 34, 35.", False),
        ("1/2", "Half of them, so \\frac{1}{2}.", True),
        ("34", "", False),
        ("34", "I do not know.", False),
        ("34", "Answer:", False),
        ("34", "Answer: $Answer", False),
        ("34", 'Answer: 34\nRemember to put your answer on its own line after "Answer:".', True),
        ("\\frac{1}{2}", "Thus $\\boxed{\\frac{1}{2}}$", True),
        ("\\frac{1}{2}", "Thus $\\boxed{\\dfrac12}$. Therefore, the answer is $\\dfrac12$.", True),
        ("34", "Question: what is 34? Answer: 33", False),
    ],
)
def test_the_last_answer_counts_anywhere_in_the_response(gold, completion, right):
    assert math_reward(completion, gold)["acc"] is right


def test_a_response_without_an_answer_has_nothing_extracted():
    assert math_reward("no idea", "34") == {"score": 0.0, "acc": False, "extracted": None}
    assert math_reward("it is 5.", "34") == {"score": 0.0, "acc": False, "extracted": "5"}


def test_the_policies_decide_where_the_answer_is_extracted():
    assert math_reward("<answer>34</answer> or 35", 34, policies=("tag",))["acc"]
    assert not math_reward("Answer: 34", 34, policies=("boxed",))["acc"]


def test_gold_answers_may_be_numbers():
    assert math_reward("Answer: 34", 34)["acc"]
    assert math_reward("Answer: 1/2", 0.5)["acc"]


@pytest.mark.parametrize("gold", [None, "", "  ", True, ["34"], {"a": 1}, "$", "1" * 1001])
def test_a_gold_answer_that_nothing_could_match_is_refused(gold):
    with pytest.raises(ValueError, match="the gold answer is"):
        math_reward("Answer: 34", gold)


def render_integer(value, style):
    sign, size = ("-" if value < 0 else ""), abs(value)
    return {
        "plain": f"{value}",
        "zeros": f"{sign}00{size}",
        "decimal": f"{value}.00",
        "commas": f"{value:,}",
        "latex": f"${value:,}$".replace(",", "{,}"),
        "named": f"$N = {value}$.",
        "unit": f"{value} \\text{{ apples}}",
        "bold": f"**{value}**",
        "boxed": f"\\boxed{{{value}}}",
        "dollar": f"{sign}\\${size}",
    }[style]


STYLES = ["plain", "zeros", "decimal", "commas", "latex", "named", "unit", "bold", "boxed", "dollar"]


@given(st.integers(-(10**30), 10**30), st.sampled_from(STYLES), st.sampled_from([-1, 1, 10]))
def test_an_integer_is_right_in_every_rendering_and_its_neighbors_are_not(value, style, step):
    response = f"So we are done.\nAnswer: {render_integer(value, style)}"
    assert math_reward(response, str(value))["acc"]
    assert not math_reward(response, str(value + step))["acc"]


@given(st.fractions(-1000, 1000, max_denominator=1000), st.integers(1, 9), st.sampled_from(["frac", "dfrac", "slash"]))
def test_a_fraction_is_right_in_every_rendering_and_its_neighbors_are_not(value, factor, style):
    top, bottom = value.numerator * factor, value.denominator * factor
    gold = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    response = f"Answer: {top}/{bottom}" if style == "slash" else f"\\boxed{{\\{style}{{{top}}}{{{bottom}}}}}"
    assert math_reward(response, gold)["acc"]
    neighbor = value + Fraction(1, value.denominator)
    assert not math_reward(response, f"\\frac{{{neighbor.numerator}}}{{{neighbor.denominator}}}")["acc"]


def test_generated_and_mutated_answers_raise_nothing_and_are_right_for_one_gold_answer_only():
    totals, _, faults = fuzz.run(seed=0, count=3_000)
    assert faults == []
    assert totals["judged"] >= 3_000
    assert totals["with a known verdict"] > 100


def test_no_two_gold_answers_of_the_fuzz_test_are_equal():
    for gold in fuzz.POOL:
        assert [other for other in fuzz.POOL if math_reward(f"\\boxed{{{other}}}", gold)["acc"]] == [gold]


def test_verdicts_depend_neither_on_the_order_nor_on_the_hash_seed():
    count, digest = 1_000, fuzz.run(seed=1, count=1_000)[1]
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "tests.rewards.math.fuzz", str(count), "1", "backward"]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        output = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True, env=environment)
        assert f"digest {digest}, 0 violations" in output.stdout


LONG_PRODUCT = "".join(f"\\sin({i}x)" for i in range(1, 20))
HARD = [
    ("length", "34", "9" * 1_001),
    ("length", "x+y", "x+" * 300 + "x"),
    ("depth", "x+y", "(" * 30 + "x" + ")" * 30),
    ("depth", "x+y", "\\sqrt" * 60 + "{x}"),
    ("size", "x+y", "(9!)!x"),
    ("size", "x+y", "x + 10^{4000}"),
    ("size", "\\sqrt{2}", "9^{9^{9^9}} + \\sqrt{2}"),
    ("size", "\\{" + ",".join(map(str, range(50))) + "\\}", "\\{" + ",".join(map(str, range(1, 51))) + "\\}"),
]


@pytest.mark.parametrize(("reason", "gold", "response"), HARD)
def test_an_answer_that_is_too_hard_to_compare_is_wrong_and_says_why(reason, gold, response):
    outcome = math_reward(f"Answer: {response}", gold)
    assert (outcome["score"], outcome["acc"], outcome["gave_up"]) == (0.0, False, reason)


EXPENSIVE = [
    ("\\sqrt{2}", "\\cot 0"),
    ("x+y", LONG_PRODUCT),
    ("y=2x+1", "y=" + "".join(f"(x+{i})" for i in range(1, 20))),
    ("\\begin{pmatrix} x+1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} " + LONG_PRODUCT + " \\\\ 2 \\end{pmatrix}"),
    ("\\sum_{n=1}^{\\infty} \\frac{1}{n^2}", "\\sum_{n=1}^{100000} n!"),
    ("x+y+z", "(x+y+z)^{20}(x-y)^{20}(y-z)^{20}(z-x)^{20}"),
]


@pytest.mark.parametrize(("gold", "response"), EXPENSIVE)
def test_an_answer_that_algebra_would_choke_on_is_compared_and_wrong(gold, response):
    outcome = math_reward(f"Answer: {response}", gold)
    assert outcome["acc"] is False
    assert "gave_up" not in outcome
    assert math_reward(f"Answer: {gold}", gold)["acc"] is True


def test_a_fault_of_the_comparison_is_a_wrong_answer_and_is_counted(monkeypatch):
    monkeypatch.setattr(compare, "is_equal", lambda gold, found: 1 / 0)
    assert math_reward("Answer: 34", "34") == {"score": 0.0, "acc": False, "extracted": "34", "gave_up": "error"}


@pytest.mark.parametrize("gold", sorted({gold for gold, _ in RIGHT + WRONG}))
def test_a_gold_answer_repeated_word_for_word_is_right(gold):
    for response in (f"Answer: {gold}", f"So \\boxed{{{gold}}}.", f"**Answer:** ${gold}$", f"Answer:\n{gold}."):
        assert math_reward(response, gold)["acc"]


def test_numbers_are_judged_without_algebra_and_nothing_needs_torch():
    script = (
        "import sys\nfrom dapo.config import RewardConfig\nfrom dapo.rewards.rules import make_rule\n"
        "rule = make_rule('math', RewardConfig())\n"
        "assert rule('Answer: 34', '34')['acc'] and not rule('Answer: 17*2', '34')['acc']\n"
        "assert not {'mpmath', 'torch'} & set(sys.modules)\n"
        "assert rule('Answer: 1+x', 'x+1')['acc']\n"
        "assert 'mpmath' in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_phrase_that_a_common_prompt_appends_to_the_answer_is_ignored():
    response = "Final Answer: The final answer is $34$. I hope it is correct."
    assert math_reward(response, "34")["acc"] is True
    assert math_reward(response, "35")["acc"] is False
