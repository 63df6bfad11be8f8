import re
from pathlib import Path

import numpy as np
import pytest

from dapo.errors import RewardError
from dapo.rewards.function import FunctionJudge, load_function, to_score
from dapo.types import Prompt
from tests import make

RECIPES = Path(__file__).parents[2] / "recipes"
PROMPT = Prompt("u", ({"role": "user", "content": "?"},), (1,), answer=5, data_source="mine", extra={"level": 3})


def judge(function, text="5"):
    return FunctionJudge(function)(PROMPT, make.rollout([1], text=text))


def test_a_reward_gets_as_much_of_the_row_as_it_asks_for():
    assert judge(lambda completion: float(completion)).value == 5
    assert judge(lambda completion, answer: float(int(completion) == answer)).value == 1
    assert judge(lambda completion, answer, level: level).value == 3
    seen = {}
    judge(lambda completion, **row: seen.update(row) or 0.0)
    assert seen == {"answer": 5, "level": 3, "data_source": "mine", "prompt": [{"role": "user", "content": "?"}]}


def test_a_dict_may_carry_accuracy_and_extras_as_plain_values():
    score = judge(lambda completion: {"score": np.float32(0.5), "acc": np.bool_(True), "n": np.int64(2), "x": [1]})
    assert (score.value, score.acc) == (0.5, True)
    assert score.extras == {"n": 2.0, "x": "[1]"}
    assert type(score.extras["n"]) is float


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (None, "NoneType, not a number"),
        ("5", "str, not a number"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ({"acc": 1}, "without 'score'"),
        ({"score": None}, "NoneType"),
        ({"score": 1.0, "acc": 0.5}, "acc = 0.5, which must be 0 or 1"),
    ],
)
def test_what_is_no_finite_number_could_not_be_judged_and_is_not_zero(outcome, reason):
    score = to_score(outcome)
    assert score.value is None
    assert not score.judged
    assert reason in score.error


def test_an_exception_costs_this_rollout_and_names_itself():
    score = judge(lambda completion: 1 / 0)
    assert re.fullmatch(r"ZeroDivisionError: division by zero \(test_function\.py:\d+\)", score.error)


def test_numbers_of_every_kind_are_judged():
    for value in (1, True, 0.5, np.float64(0.25), np.int32(3)):
        assert to_score(value).value == float(value)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("reward.py", "expected path/to/file.py:function"),
        ("gone.py:reward", "there is no file gone.py"),
        ("{bad}:reward", "cannot be imported \\(SyntaxError"),
        ("{good}:rewrad", "no function 'rewrad'; there are: other, reward"),
        ("{good}:number", "no function 'number'"),
    ],
)
def test_a_reward_that_cannot_be_found_gets_one_sentence(tmp_path, spec, sentence):
    (tmp_path / "bad.py").write_text("def reward(:")
    (tmp_path / "good.py").write_text("number = 3\ndef other(): ...\ndef reward(completion): return 1.0")
    with pytest.raises(RewardError, match=sentence):
        load_function(spec.format(bad=tmp_path / "bad.py", good=tmp_path / "good.py"))


def test_a_reward_file_may_import_its_neighbours_and_define_dataclasses(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 0.5")
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from neighbour_of_reward import VALUE\n@dataclass\nclass Row:\n    x: int\n"
        "def reward(completion):\n    return VALUE"
    )
    assert load_function(f"{tmp_path / 'mine.py'}:reward")("x") == 0.5


def test_a_function_of_another_shape_is_refused_before_anything_is_sampled():
    with pytest.raises(RewardError, match=r"takes \(text\); expected reward\(completion, answer"):
        FunctionJudge(lambda text: 1.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("5", 1.0), (" 5\n", 1.0), ("0", 1 - 5 / 9), ("9", 1 - 4 / 9), ("14", 0.0), ("9" * 5000, 0.0), ("-1", 1 - 6 / 9),
     ("", 0.0), ("five", 0.0), ("5.", 0.0), ("5 5", 0.0), ("The number is 5", 0.0), ("５", 0.0)],
)  # fmt: skip
def test_the_reward_of_guess_five(text, value):
    function = load_function(f"{RECIPES / 'guess_five.py'}:reward")
    assert function(text, 5) == pytest.approx(value)
