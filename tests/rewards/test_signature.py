import functools

import pytest

from dapo.config import RewardConfig
from dapo.errors import RewardError
from dapo.rewards.function import FunctionJudge, Reward
from dapo.rewards.judge import check_columns, columns_seen, judge_kinds
from dapo.rewards.rules import make_rule
from dapo.rewards.signature import OURS, TRL, VERL, VERL_BATCHED, Kind, Signature
from dapo.types import Prompt
from tests import make

PROMPT = Prompt("u", ({"role": "user", "content": "?"},), (1,), "5", "gsm8k", {"level": 3, "extra_info": {"index": 7}})


def judge_all(function, texts, prompt=PROMPT):
    rollouts = [make.rollout([i] * (i + 1), text=text, version=4) for i, text in enumerate(texts)]
    return FunctionJudge(function, 10.0).submit(prompt, rollouts).result()


def values(function, texts, prompt=PROMPT):
    return [score.value for score in judge_all(function, texts, prompt)]


@pytest.mark.parametrize(
    ("function", "convention"),
    [
        (lambda completion: 0, OURS),
        (lambda completion, prompts: 0, OURS),
        (lambda solution_str, **kwargs: 0, VERL),
        (lambda solution_strs, ground_truths: 0, VERL_BATCHED),
        (lambda completions, completion=None: 0, TRL),
        (lambda completion_ids: 0, TRL),
        (lambda prompts: 0, TRL),
        (lambda **kwargs: 0, TRL),
        (lambda ground_truth, **kwargs: 0, TRL),
    ],
)
def test_the_parameter_names_tell_the_convention(function, convention):
    assert Signature.of(function).convention is convention


def test_trl_functions_may_take_only_tokens_only_prompts_or_only_keywords():
    assert values(lambda completion_ids, **kwargs: [len(ids) for ids in completion_ids], "ab") == [1.0, 2.0]
    assert values(lambda prompts, **kwargs: [len(prompts)] * 2, "ab") == [2.0, 2.0]
    assert values(lambda **kwargs: [len(c[0]["content"]) for c in kwargs["completions"]], ["a", "bb"]) == [1.0, 2.0]
    assert values(lambda completions, trainer_state: [trainer_state.global_step], "a") == [4.0]


def test_what_a_trl_function_logs_becomes_extras_and_nan_is_none():
    def reward(completions, log_extra, log_metric, **kwargs):
        log_extra("length", [len(c[0]["content"]) for c in completions])
        log_extra("acc", ["x", "y"])
        log_metric("share", 0.25)
        log_metric("share", 0.75)
        return [0.5, float("nan")]

    first, second = judge_all(reward, ["a", "bb"])
    assert first.extras == {"length": 1, "log/acc": "x", "metric/share": 0.5}
    assert first.components == {"length": 1.0}
    assert second.error == "the reward does not apply here: it returned None"
    [score] = judge_all(lambda completions, log_extra: log_extra("x", [1, 2]) or [1.0], "a")
    assert score.error.startswith("ValueError: log_extra('x') got 2 values for 1 completions")


def test_a_batched_verl_function_gets_lists_with_an_extra_info_of_its_own_for_each_response():
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.5):
        extra_infos[0]["seen"] = True
        assert extra_infos[1] == {"index": 7}
        assert (data_sources, ground_truths) == (["gsm8k"] * 2, ["5"] * 2)
        return [{"score": (text == "5") + bonus, "acc": 0.25} for text in solution_strs]

    scores = judge_all(compute_score, ["5", "6"])
    assert [(score.value, score.acc) for score in scores] == [(1.5, 0.25), (0.5, 0.25)]
    assert PROMPT.extra["extra_info"] == {"index": 7}


def test_a_verl_function_keeps_the_defaults_that_columns_are_named_like():
    def compute_score(solution_str, ground_truth, level="strict", score=1.0):
        return {"score": score, "acc": 1.0, "level": level}

    [score] = judge_all(compute_score, ["5"])
    assert (score.value, score.acc, score.extras) == (1.0, True, {"level": "strict"})


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda text: 0, r"takes \(text\); expected reward\(completion, answer, \*\*row\), compute_score"),
        (lambda solution_str, tokenizer: 0, "takes 'tokenizer', which verl's compute_score.* does not provide"),
        (lambda completion, /: 0, r"takes \(completion\); expected"),
        (lambda level, /, completion: 0, "'level' is positional-only"),
    ],
)
def test_a_signature_that_cannot_be_served_is_refused_when_it_is_loaded(function, sentence):
    with pytest.raises(RewardError, match=sentence):
        FunctionJudge(function, 1.0)


def kinds(function):
    return [("f", Reward(function).kind)]


def test_a_parameter_that_no_column_provides_is_named_with_the_columns_there_are():
    check_columns(kinds(lambda completions, level, log_extra, solution, **kwargs: 0), {"level"})
    check_columns(kinds(lambda completion, answer, other=1: 0), set())
    check_columns(kinds(functools.partial(lambda completion, other: 0, other=1)), set())
    with pytest.raises(
        RewardError, match=r"f takes 'lvl', which is not a column of the data \(columns: answer, id, level, prompt\)"
    ):
        check_columns(kinds(lambda completions, lvl, **kwargs: 0), {"level", "id"})
    with pytest.raises(RewardError, match="takes 'completion_ids'; give them, or name the --model"):
        check_columns(kinds(lambda completion_ids: 0), set(), has_tokens=False)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda completion, answer: 0, "answer"),
        (lambda solution_str, ground_truth: 0, "ground_truth"),
        (lambda data_sources, solution_strs, ground_truths: 0, "ground_truths"),
        (lambda completions, solution, **row: 0, "solution"),
    ],
)
def test_a_function_that_needs_a_gold_answer_is_refused_if_no_row_has_one(function, name):
    check_columns(kinds(function), {"data_source"})
    with pytest.raises(
        RewardError, match=rf"f takes the gold answer as '{name}', but no row has one \(columns: prompt"
    ):
        check_columns(kinds(function), {"data_source"}, has_answers=False)


def test_a_function_that_can_do_without_a_gold_answer_is_accepted_if_no_row_has_one():
    for function in (
        lambda completion: 0,
        lambda completion, answer=None: 0,
        lambda completion, **row: 0,
        functools.partial(lambda completion, answer: 0, answer=1),
        lambda completions, **row: 0,
        lambda solution_str, ground_truth=None: 0,
    ):
        check_columns(kinds(function), set(), has_answers=False)
    check_columns([("http://host", Kind(sees=None))], set(), has_answers=False)


def test_the_column_that_is_most_likely_the_gold_answer_is_suggested():
    for columns, hint in (
        (
            {"answr", "id"},
            r"\(columns: answr, id, prompt\); did you mean 'answr'\? data.columns='\{answer: answr\}' renames",
        ),
        ({"ground_truht", "data_source"}, "did you mean 'ground_truht'.*'{ground_truth: ground_truht}'"),
        ({"final"}, "; name its column answer, ground_truth or solution, or rename it with data.columns$"),
        ({"answer"}, r"\(columns: answer, prompt\)$"),  # null in every row
    ):
        with pytest.raises(RewardError, match=hint):
            check_columns(kinds(lambda completion, answer: 0), columns, has_answers=False)


@pytest.mark.parametrize(
    ("rule", "needs_gold"),
    [*((name, True) for name in ("math", "math_dapo", "exact", "integer", "choice")), ("code", False), ("gym", False)],
)
def test_rules_need_a_gold_answer_unless_it_can_be_elsewhere(rule, needs_gold):
    found = Reward(make_rule(rule, RewardConfig()), is_rule=True).kind.gold
    assert (found is not None) is needs_gold


def test_a_pattern_needs_a_gold_answer_if_it_has_a_group():
    for pattern, gold in (("ab", None), ("a(b)", "answer")):
        rule = make_rule("regex", RewardConfig(regex=pattern))
        assert Reward(rule, is_rule=True).kind.gold == gold


def test_a_row_without_a_column_that_others_have_is_unjudged():
    [score] = judge_all(lambda completion, other: 1.0, ["a"])
    assert score.error == "the row has no column 'other', which the reward function takes"


def test_the_columns_that_a_judge_sees_are_those_it_can_tell_rows_apart_by():
    assert columns_seen(kinds(lambda completion, answer, level=1: 0)) == {"completion", "answer", "level"}
    assert columns_seen(kinds(lambda completions, **kwargs: 0)) is None
    assert columns_seen(kinds(lambda solution_str, **kwargs: 0)) == {"data_source", "extra_info"}
    rule = [("math", Reward(lambda completion, answer, **row: 0, is_rule=True).kind)]
    assert columns_seen(rule) == {"completion", "answer"}
    judge = FunctionJudge(lambda completion, level: 0, 1.0)
    assert columns_seen(judge_kinds(None, judge)) == {"completion", "level"}
