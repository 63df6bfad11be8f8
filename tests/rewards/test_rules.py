import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.config import RewardConfig
from dapo.errors import RewardError
from dapo.rewards.rules import RULES, can_read_gold, make_rule

ROW = {"prompt": [{"role": "user", "content": "?"}], "data_source": "x", "policies": ("boxed",), "pattern": "no"}


def judge(name, completion, answer, **options):
    outcome = make_rule(name, RewardConfig(**options))(completion=completion, answer=answer, **ROW)
    assert set(outcome) == {"score", "acc", "extracted"}
    assert type(outcome["score"]) is float
    assert type(outcome["acc"]) is bool
    return outcome


def is_right(name, completion, answer, **options):
    return judge(name, completion, answer, **options)["acc"]


def test_exact_compares_text_without_surrounding_white_space():
    assert is_right("exact", " yes\n", "yes")
    assert is_right("exact", "5", 5)
    assert not is_right("exact", "Yes", "yes")
    assert not is_right("exact", "yes, yes", "yes")
    assert is_right("exact", "so\nAnswer: **yes**", " yes ", extract=("answer_line",))
    assert judge("exact", "", "yes") == {"score": 0.0, "acc": False, "extracted": None}
    assert judge("exact", "no", "yes") == {"score": 0.0, "acc": False, "extracted": "no"}


@pytest.mark.parametrize(
    "response", ["34", "034", "34.0", "34.", "$34$", "**34**", "+34", "Answer: 34", "\\boxed{34}", "35 then 34"]
)
def test_integers_are_compared_as_integers(response):
    assert is_right("integer", response, "34")
    assert is_right("integer", response, 34)
    assert is_right("integer", response, 34.0)
    assert not is_right("integer", response, "35")
    assert not is_right("integer", response, "-34")


@pytest.mark.parametrize(
    "response",
    ["", "none", "34.5", "Answer: 34 35", "Answer: 34, 35", "34%", "34/2", "Answer: 33+1", "3e1", "9" * 5000],
)
def test_a_response_without_that_integer_is_wrong(response):
    assert not is_right("integer", response, "34")


@given(st.integers(-(10**60), 10**60))
def test_no_digit_of_a_long_integer_is_lost(value):
    assert is_right("integer", f"Answer: {value:,}", str(value))
    assert not is_right("integer", f"Answer: {value + 1}", f"{value:,}")


CHOSEN = r"""A ¦ (A) ¦ A. ¦ A) ¦ [A] ¦ Answer: A ¦ Answer: (A) ¦ answer: a ¦ **A** ¦ **Answer: A** ¦ \boxed{A}
\text{A} ¦ \boxed{\text{A}} ¦ $\boxed{\textbf{(A)}}$ ¦ Answer: A. Paris ¦ Answer: (A) Paris ¦ <answer>A</answer>
The answer is A. ¦ The answer is (A). ¦ I think B is bad. The answer is **A** ¦ Answer: Option A ¦ Answer:A
The correct option is A"""
NOT_CHOSEN = r"""A train leaves at noon. ¦ Answer: A or B ¦ Answer: A, B ¦ Answer: A B ¦ A and B ¦ AB ¦ K
Answer: A train ¦ I like A lot of things ¦ Answer: apple ¦ The answer is A train. ¦ \boxed{AB}"""


@pytest.mark.parametrize("response", [*CHOSEN.replace("\n", " ¦ ").split(" ¦ "), "Answer: B\nAnswer: A"])
def test_a_choice_is_found_in_all_its_forms(response):
    assert judge("choice", response, "A") == {"score": 1.0, "acc": True, "extracted": "A"}
    assert is_right("choice", response, "(A)")
    assert not is_right("choice", response, "B")


@pytest.mark.parametrize("response", [*NOT_CHOSEN.replace("\n", " ¦ ").split(" ¦ "), ""])
def test_an_article_or_several_letters_are_not_a_choice(response):
    for gold in "AB":
        assert not is_right("choice", response, gold)


def test_a_pattern_without_a_group_only_has_to_be_found():
    assert judge("regex", "abc <done>", None, regex="<done>") == {"score": 1.0, "acc": True, "extracted": "<done>"}
    assert judge("regex", "abc", None, regex="<done>") == {"score": 0.0, "acc": False, "extracted": None}


def test_the_first_group_of_the_last_match_is_compared_with_the_answer():
    assert judge("regex", "x=1; x=2", "2", regex=r"x=(\d)(;?)") == {"score": 1.0, "acc": True, "extracted": "2"}
    assert not is_right("regex", "x=1; x=2", "1", regex=r"x=(\d)")
    assert not is_right("regex", "y=2", "2", regex=r"x=(\d)")
    assert not is_right("regex", "yx", "2", regex=r"y(\d)?")  # the group did not take part in the match


def test_math_and_math_dapo_differ_as_published():
    assert is_right("math", "**Answer:** 34.0", "34")
    assert judge("math_dapo", "Answer: 34.0", "34") == {"score": -1.0, "acc": False, "extracted": "34.0"}
    assert judge("math_dapo", "Answer: 34", "34") == {"score": 1.0, "acc": True, "extracted": "34"}


def test_the_extract_option_decides_where_the_answer_is_extracted():
    for name in ("math", "integer"):
        assert not is_right(name, "Answer: 34", "34", extract=("boxed",))
        assert is_right(name, "\\boxed{34} Answer: 35", "34", extract=("boxed", "answer_line"))
    assert not is_right("choice", "Answer: A", "A", extract=("tag",))


def test_an_unknown_rule_is_refused_with_the_nearest_name():
    with pytest.raises(RewardError, match=r"no rule 'integr', the rules are math, .*did you mean 'integer'\?"):
        make_rule("integr", RewardConfig())
    with pytest.raises(RewardError, match=r"no rule 'zzz', the rules are [a-z_, ]+$"):
        make_rule("zzz", RewardConfig())


def test_a_missing_or_invalid_pattern_is_refused():
    with pytest.raises(RewardError, match="regex is not set"):
        make_rule("regex", RewardConfig())
    with pytest.raises(RewardError, match=r"reward.regex is '\(a', which is not a regular expression: missing \)"):
        make_rule("regex", RewardConfig(regex="(a"))


UNREADABLE = {
    "math": [None, "", "$", [1], True, "1" * 2000],
    "math_dapo": [None, " ", [1]],
    "exact": [None, "", [1], {}],
    "integer": [None, "", "1.5", "abc", "1,23", 1.5, True, float("nan"), float("inf"), "1 or 2"],
    "choice": [None, "", "K", 1, "Paris", "AB"],
    "regex": [None, "", [1]],
}
READABLE = {
    "math": ["34", 34, 0.5, "\\frac12", "\\text{Monday}", "(A)", "x^2+1=0"],
    "math_dapo": ["34", 34, "\\frac12"],
    "exact": ["yes", 5, 0.5],
    "integer": ["34", 34, 34.0, "1,034", "-5", "$7$"],
    "choice": ["A", "(B)", "j", "C."],
    "regex": ["2", 2],
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_gold_answer_that_a_rule_cannot_read_raises(name):
    options = RewardConfig(regex="(x)")
    for gold in UNREADABLE[name]:
        assert not can_read_gold(name, gold, options), gold
        with pytest.raises(ValueError, match="the gold answer is"):
            make_rule(name, options)(completion="Answer: 34", answer=gold)


@pytest.mark.parametrize("name", READABLE)
def test_a_gold_answer_that_a_rule_can_read_is_judged(name):
    options = RewardConfig(regex="(x)")
    for gold in READABLE[name]:
        assert can_read_gold(name, gold, options), gold
        assert make_rule(name, options)(completion="Answer: nothing", answer=gold)["acc"] is False


def test_a_pattern_without_a_group_and_gym_need_no_gold_answer():
    assert can_read_gold("regex", None, RewardConfig(regex="x"))
    with pytest.raises(RewardError, match="no rule 'maths'"):
        can_read_gold("maths", "34", RewardConfig())


def test_the_configuration_text_names_every_rule():
    description = RewardConfig.model_fields["use"].description or ""
    assert all(f"`{name}`" in description for name in RULES)


def test_the_rules_import_neither_torch_nor_anything_heavy():
    script = (
        "import sys\nfrom dapo.config import RewardConfig\nfrom dapo.rewards.rules import RULES, make_rule\n"
        "[make_rule(name, RewardConfig(regex='x')) for name in RULES if name != 'gym']\n"
        "heavy = {'torch', 'transformers', 'sympy', 'mpmath', 'reasoning_gym'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_gold_answer_of_a_gsm8k_row_follows_its_mark():
    gold = "Ann has 3 + 2 = <<3+2=5>>5 apples.\n#### 5"
    for name in ("math", "integer"):
        rule = make_rule(name, RewardConfig())
        assert [rule(completion=f"Answer: {n}", answer=gold)["acc"] for n in (5, 3)] == [True, False]


def test_a_question_that_is_not_from_reasoning_gym_is_refused_with_the_remedy():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=r"not from reasoning-gym; with reward\.use: auto"):
        make_rule("gym", RewardConfig())(completion="5", answer="5")
