"""Try a judge on the gold answers of a dataset, before a run depends on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from typing import Any

from dapo.config import RewardConfig
from dapo.data.check import Judge, JudgeReport
from dapo.data.rows import Question
from dapo.evaluation.judging import Response, judge_all, summary
from dapo.rewards.judge import AUTO
from dapo.rewards.rules import RULES, can_read_gold
from dapo.types import Prompt

MOST_JUDGED = 1000  # a function may be slow, and an endpoint may cost money


def gold_judge(options: RewardConfig, tokenizer: Any = None) -> Judge:
    """Return the check that fits the judge: a rule reads the answers, any other judge scores them as responses."""
    rule = "math" if options.use == AUTO else options.use
    if isinstance(rule, str) and rule in RULES:
        return lambda questions: _read(rule, questions, options)
    return lambda questions: _score(questions, options, tokenizer)


def _read(rule: str, questions: Sequence[Question], options: RewardConfig) -> JudgeReport:
    unreadable = [question for question in questions if not can_read_gold(rule, question.answer, options)]
    readable, all_ = len(questions) - len(unreadable), len(questions)
    return JudgeReport(
        f"the rule {rule} can read {readable:,} of {all_:,} answers ({readable / all_:.1%})",
        tuple(f"{question.where}: {question.answer!r}" for question in unreadable),
    )


def _score(questions: Sequence[Question], options: RewardConfig, tokenizer: Any) -> JudgeReport:
    tried = list(islice(questions, MOST_JUDGED))
    judgments = list(judge_all([_response(question, tokenizer) for question in tried], options))
    which = "the" if len(tried) == len(questions) else f"the first {len(tried):,}"
    failed = [(q.where, j.error) for q, j in zip(tried, judgments, strict=True) if j.error is not None]
    return JudgeReport(
        f"with {which} gold answers as responses, the judge gives: {summary(judgments)}",
        tuple(f"{where}: {error}" for where, error in failed),
    )


def _response(question: Question, tokenizer: Any) -> Response:
    answer = question.answer
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    prompt = Prompt("", question.messages, (), answer, question.data_source, question.extra, question.is_text)
    return Response(prompt, text, None if tokenizer is None else tokenizer(text)["input_ids"])
