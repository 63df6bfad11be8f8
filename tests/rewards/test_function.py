import asyncio
import functools
import inspect
import re
import threading
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from dapo.config.functions import load_function
from dapo.errors import RewardError
from dapo.rewards.function import FunctionJudge, to_json, to_score
from dapo.types import Prompt
from tests import make

RECIPES = Path(__file__).parents[2] / "recipes"
PROMPT = Prompt("u", ({"role": "user", "content": "?"},), (1,), answer=5, data_source="mine", extra={"level": 3})


def judge_all(function, texts, prompt=PROMPT, timeout=10.0):
    judge = FunctionJudge(function, timeout)
    scores = judge.submit(prompt, [make.rollout([i, 9], text=text) for i, text in enumerate(texts)]).result(timeout=20)
    judge.close()
    return scores


def judge(function, text="5"):
    [score] = judge_all(function, [text])
    return score


def test_a_reward_gets_the_columns_that_it_names():
    assert judge(lambda completion: float(completion)).value == 5
    assert judge(lambda completion, answer: float(int(completion) == answer)).value == 1
    assert judge(lambda completion, answer, level: level).value == 3
    seen = {}
    judge(lambda completion, **row: seen.update(row) or 0.0)
    assert seen == {"answer": 5, "level": 3, "data_source": "mine", "prompt": [{"role": "user", "content": "?"}]}


def test_a_column_does_not_replace_an_argument_bound_by_partial():
    assert judge(functools.partial(lambda completion, level, **row: level, level=9)).value == 9
    assert judge(functools.partial(lambda completion, level: level, level=9)).value == 9


def test_a_dict_may_have_acc_and_extras_which_become_plain_values():
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
        ({"score": 1.0, "acc": 1.5}, "acc = 1.5; expected a number from 0 to 1"),
        ({"score": 1.0, "acc": float("nan")}, "acc = nan; expected a number from 0 to 1"),
        ({"score": 1.0, "acc": "yes"}, "acc = 'yes'; expected a number from 0 to 1"),
        (10**400, "an enormous number"),
        (-1e31, "-1e+31; expected a finite number of at most 1e+30"),
        ([1.0], "list, not a number"),
        ({"score": 1.0} | {str(i): i for i in range(100)}, "101 entries, more than 100"),
    ],
)
def test_a_result_that_is_not_a_finite_number_is_unjudged_and_not_zero(outcome, reason):
    score = to_score(outcome)
    assert score.value is None
    assert not score.judged
    assert reason in score.error


def test_an_exception_is_the_reason_of_an_unjudged_rollout():
    score = judge(lambda completion: 1 / 0)
    assert re.fullmatch(r"ZeroDivisionError: division by zero \(test_function\.py:\d+\)", score.error)


def test_every_number_type_is_accepted():
    for value in (1, True, 0.5, Fraction(1, 4), np.float64(0.25), np.int32(3), np.bool_(True), np.array(2.5), 1e30):
        score = to_score(value)
        assert score.value == float(value)
        assert type(score.value) is float


def test_extras_are_truncated_and_converted_for_storage():
    odd = {"nan": np.nan, "big": 10**5000, "text": "x" * 20_000, "half": "\ud800", 7: None, "flag": True, "n": 2**62}
    extras = to_score({"score": 1.0, **odd}).extras
    assert extras.pop("text") == "x" * 10_000 + "…"
    assert extras == {
        "nan": "nan", "big": "an integer of 16610 bits", "half": "?", "7": None, "flag": True, "n": 2**62
    }  # fmt: skip


def test_verls_signature_is_called_unchanged():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(solution_str == str(ground_truth)), "acc": True, "seen": f"{data_source} {extra_info}"}

    prompt = Prompt("u", PROMPT.messages, (1,), 5, "gsm8k", extra={"extra_info": {"index": 3}, "ability": "MATH"})
    first, second = judge_all(compute_score, ["5", "6"], prompt)
    assert (first.value, second.value, first.acc) == (1.0, 0.0, True)
    assert first.extras == {"seen": "gsm8k {'index': 3}"}
    assert judge_all(compute_score, ["5"])[0].extras == {"seen": "mine {}"}
    assert judge(lambda solution_str, **rest: len(rest)).value == 3  # data_source, ground_truth, extra_info


def test_trls_signature_gets_a_whole_group_as_lists_of_messages():
    calls = []

    def reward(prompts, completions, completion_ids, solution, level, trainer_state, **kwargs):
        calls.append((prompts, completions, completion_ids, solution, level, trainer_state, sorted(kwargs)))
        return [len(completion[0]["content"]) for completion in completions]

    assert [score.value for score in judge_all(reward, ["a", "bb", ""])] == [1.0, 2.0, 0.0]
    [(prompts, completions, ids, solution, level, state, rest)] = calls
    assert prompts == [[{"role": "user", "content": "?"}]] * 3
    assert completions[1] == [{"role": "assistant", "content": "bb"}]
    assert (ids, solution, level, state.global_step) == ([[0, 9], [1, 9], [2, 9]], [5, 5, 5], [3, 3, 3], 0)
    assert rest == ["answer", "data_source", "ground_truth", "log_extra", "log_metric"]


def test_trls_signature_gets_strings_where_the_row_held_text():
    prompt = Prompt("u", ({"role": "user", "content": "how?"},), (1,), 5, is_text=True)

    def reward_len(completions, **kwargs):
        return [-abs(3 - len(completion)) for completion in completions]

    assert [score.value for score in judge_all(reward_len, ["a", "bbb"], prompt)] == [-2.0, 0.0]
    scores = judge_all(lambda prompts, completions: [p == "how?" for p in prompts], ["a", "b"], prompt)
    assert [score.value for score in scores] == [1.0, 1.0]


def test_a_batched_function_may_return_none_or_an_array_but_not_another_number_of_scores():
    none, number = judge_all(lambda completions: [None, 0.5], "ab")
    assert (none.value, none.error) == (None, "the reward does not apply here: it returned None")
    assert number.value == 0.5
    assert [score.value for score in judge_all(lambda completions: np.array([0.5, 2.0]), "ab")] == [0.5, 2.0]


def test_a_batched_function_that_returns_the_wrong_number_of_scores_is_named_with_its_own_line():
    def one(completions):
        return [1.0]

    def number(completions, by=1.0):
        return by

    async def later(completions):
        return [1.0]

    for function, reason in (
        (one, "returned 1 scores for 2 completions; expected one per completion"),
        (functools.partial(number, by=2.0), "returned float; expected a list, one score per completion"),
        (later, "returned 1 scores for 2 completions; expected one per completion"),
    ):
        inner = getattr(function, "func", function)
        place = f"{inner.__name__} (test_function.py:{inner.__code__.co_firstlineno})"
        assert [score.error for score in judge_all(function, "ab")] == [f"{place} {reason}"] * 2

    class Judge:
        def __call__(self, completions):
            return [1.0]

    assert judge_all(Judge(), "ab")[0].error.startswith("Judge returned 1 scores")


def test_an_async_group_is_judged_concurrently_with_a_deadline_per_response():
    running, most = 0, 0

    async def reward(completion, answer):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(60 if completion == "late" else 0.1)
        running -= 1
        return float(completion == str(answer))

    late, right, wrong = judge_all(reward, ["late", "5", "6"], timeout=0.5)
    assert (late.error, right.value, wrong.value, most) == ("timed out after 0.5 s", 1.0, 0.0, 3)

    async def batched(completions):
        await asyncio.sleep(0)
        return [1.0 for _ in completions]

    assert [score.value for score in judge_all(batched, "abc")] == [1.0] * 3
    assert judge(functools.partial(batched)).value == 1.0


def test_a_timeout_error_raised_by_an_async_reward_is_reported_as_its_exception():
    async def reward(completion):
        raise TimeoutError("the database")

    assert judge(reward).error.startswith("TimeoutError: the database (test_function.py:")


def test_an_async_reward_keeps_one_loop_and_closing_completes_every_future():
    loops = set()

    async def reward(completion):
        loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(60 if completion == "late" else 0)
        return 1.0

    judge = FunctionJudge(reward, timeout=60.0)
    for _ in range(3):
        assert judge.submit(PROMPT, [make.rollout([1], text="x")]).result(timeout=10)[0].value == 1.0
    late = judge.submit(PROMPT, [make.rollout([1], text="late")])
    judge.close()
    judge.close()
    assert len(loops) == 1
    assert late.result(timeout=10)[0].error == "the judge was closed before it judged this response"
    assert judge.submit(PROMPT, [make.rollout([1])]).result(timeout=1)[0].error.startswith("the judge was closed")


def test_closing_abandons_an_async_reward_that_blocks_its_loop(monkeypatch):
    monkeypatch.setattr("dapo.rewards.function.CLOSE_LIMIT", 0.1)
    begun, over = threading.Event(), threading.Event()

    async def reward(completion):
        begun.set()
        over.wait(60)

    judge = FunctionJudge(reward, timeout=60.0)
    late = judge.submit(PROMPT, [make.rollout([1])])
    assert begun.wait(60)
    judge.close()
    assert not late.done()
    over.set()


def test_a_callable_object_is_a_reward():
    class Length:
        async def __call__(self, completion):
            return len(completion)

    assert judge(Length(), "four").value == 4


def test_sys_exit_makes_the_response_unjudged_and_ctrl_c_is_not_swallowed():
    def leave(completion):
        raise SystemExit(2)

    def interrupt(completion):
        raise KeyboardInterrupt

    assert judge(leave).error.startswith("SystemExit: 2 (test_function.py:")
    with pytest.raises(KeyboardInterrupt):
        judge(interrupt)


def test_rows_become_json_with_arrays_as_lists_and_the_rest_as_text():
    assert to_json({"a": np.arange(2), "b": np.float32(0.5), "c": Path("x")}) == '{"a": [0, 1], "b": 0.5, "c": "x"}'


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("reward.py", "expected path/to/file.py:function"),
        ("gone.py:reward", "there is no file gone.py"),
        ("{bad}:reward", "cannot be imported \\(SyntaxError"),
        ("{good}:rewrad", "no function or class 'rewrad'; available: other, reward"),
        ("{good}:number", "no function or class 'number'"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_refused_in_one_sentence(tmp_path, spec, sentence):
    (tmp_path / "bad.py").write_text("def reward(:")
    (tmp_path / "good.py").write_text("number = 3\ndef other(): ...\ndef reward(completion): return 1.0")
    with pytest.raises(RewardError, match=sentence):
        load_function(spec.format(bad=tmp_path / "bad.py", good=tmp_path / "good.py"), "reward.use", RewardError)


def test_a_reward_file_may_import_its_neighbors_and_define_dataclasses(tmp_path):
    (tmp_path / "neighbor_of_reward.py").write_text("VALUE = 0.5")
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from neighbor_of_reward import VALUE\n@dataclass\nclass Row:\n    x: int\n"
        "def reward(completion):\n    return VALUE"
    )
    assert load_function(f"{tmp_path / 'mine.py'}:reward", "reward.use")("x") == 0.5


def test_a_function_with_another_signature_is_refused():
    with pytest.raises(RewardError, match=r"takes \(text\); expected reward\(completion, answer"):
        FunctionJudge(lambda text: 1.0, timeout=1.0)
    with pytest.raises(RewardError, match="cannot be called as a function"):
        FunctionJudge(5, timeout=1.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("5", 1.0), (" 5\n", 1.0), ("0", 1 - 5 / 9), ("9", 1 - 4 / 9), ("14", 0.0), ("9" * 5000, 0.0), ("-1", 1 - 6 / 9),
     ("", 0.0), ("five", 0.0), ("5.", 0.0), ("5 5", 0.0), ("The number is 5", 0.0), ("５", 0.0)],
)  # fmt: skip
def test_the_reward_of_guess_five(text, value):
    function = load_function(f"{RECIPES / 'guess_five.py'}:reward", "reward.use")
    assert function(text, 5) == pytest.approx(value)


def test_files_of_two_folders_keep_their_own_functions_and_neighbors(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def reward(completion):\n    return '{folder}'\n")
    for folder in ("a", "b"):
        function = load_function(f"{tmp_path / folder / 'mine.py'}:reward", "reward.use")
        assert function("x") == folder
        assert inspect.getmodule(function) is not None
        assert inspect.getmodule(function).reward is function
    for folder in ("a", "b"):
        (tmp_path / folder / "shared_name.py").write_text(f"NAME = '{folder}'\n")
        (tmp_path / folder / "other.py").write_text(
            "from shared_name import NAME\n\n\ndef reward(completion):\n    return NAME\n"
        )
    assert load_function(f"{tmp_path / 'a' / 'other.py'}:reward", "reward.use")("x") == "a"
    with pytest.raises(RewardError, match=r"a/shared_name.py is imported already, and .*b/shared_name.py has the same"):
        load_function(f"{tmp_path / 'b' / 'other.py'}:reward", "reward.use", RewardError)
