"""Try a judge on the gold answers of a dataset, before a run depends on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from typing import Any

from dapo.config import RewardConfig
from dapo.data.check import Judge, JudgeReport
from dapo.data.rows import Question
from dapo.errors import RewardError
from dapo.evaluation.judging import Judgment, Response, judge_all, summary
from dapo.rewards.judge import AUTO, check_columns, judge_kinds
from dapo.rewards.rules import RULES, can_read_gold

MOST_JUDGED = 1000  # a function may be slow, and an endpoint may cost money
_NONE_RIGHT = "no gold answer is right: the reward may not accept the gold answers as they are"


def gold_judge(options: RewardConfig, tokenizer: Any = None) -> Judge:
    """Return the check that fits the judge: a rule reads the answers, any other judge scores them as responses."""
    rule = "math" if options.use == AUTO else options.use

    def judge(questions: Sequence[Question]) -> JudgeReport | None:
        answered = [question for question in questions if question.answer is not None]
        if not answered:
            return _without_answers(questions, options)
        if isinstance(rule, str) and rule in RULES:
            return _read(rule, answered, options)
        return _score(answered, options, tokenizer)

    return judge


def _without_answers(questions: Sequence[Question], options: RewardConfig) -> JudgeReport | None:
    """Report that the judge needs a gold answer; None if it needs none."""
    columns = {"data_source"}.union(*(question.extra for question in questions))
    kinds = judge_kinds(options, None)
    try:
        check_columns(kinds, columns, has_answers=False)
    except RewardError as error:
        return JudgeReport(str(error), is_good=False)
    return None


def _read(rule: str, questions: Sequence[Question], options: RewardConfig) -> JudgeReport:
    unreadable = [question for question in questions if not can_read_gold(rule, question.answer, options)]
    readable, all_ = len(questions) - len(unreadable), len(questions)
    return JudgeReport(
        f"the rule {rule} can read {readable:,} of {all_:,} answers ({readable / all_:.1%})",
        tuple(f"{question.where}: {question.answer!r}" for question in unreadable),
        is_good=readable > 0,
    )


def _score(questions: Sequence[Question], options: RewardConfig, tokenizer: Any) -> JudgeReport:
    tried = list(islice(questions, MOST_JUDGED))
    judgments = list(judge_all([_response(question, tokenizer) for question in tried], options))
    which = "the" if len(tried) == len(questions) else f"the first {len(tried):,}"
    failed: dict[str, list[str]] = {}
    for question, judgment in zip(tried, judgments, strict=True):
        if judgment.error is not None:
            failed.setdefault(judgment.error, []).append(question.where)
    judged = [judgment for judgment in judgments if judgment.error is None]
    return JudgeReport(
        f"with {which} gold answers as responses, the judge gives: {summary(judgments)}",
        tuple(_failure(error, places) for error, places in sorted(failed.items(), key=lambda pair: -len(pair[1]))),
        warning=_NONE_RIGHT if judged and not any(map(_is_right, judged)) else "",
        is_good=bool(judged),
    )


def _is_right(judgment: Judgment) -> bool:
    value = judgment.score if judgment.acc is None else judgment.acc
    return value is not None and value > 0


def _failure(error: str, places: Sequence[str]) -> str:
    return f"{places[0]}: {error}" if len(places) == 1 else f"{len(places):,} x {error} (first: {places[0]})"


def _response(question: Question, tokenizer: Any) -> Response:
    answer = question.answer
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return Response(question.as_prompt(), text, None if tokenizer is None else tokenizer(text)["input_ids"])
