"""Begin the episodes of questions: ask the environment for the messages that come before the model's first turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dapo.data.rows import Question
from dapo.environments.protocol import ROW_PROMPT, EnvironmentPool
from dapo.errors import DataError, EpisodeError

_BATCH = 512


def begin_episodes(questions: Sequence[Question], environment: EnvironmentPool) -> list[Question]:
    """Return the questions with the first messages of their episodes. The row's own messages become an extra column."""
    begun: list[Question] = []
    for start in range(0, len(questions), _BATCH):
        batch = questions[start : start + _BATCH]
        futures = [environment.first_messages(question.as_prompt()) for question in batch]
        for question, future in zip(batch, futures, strict=True):
            try:
                messages = future.result()
            except EpisodeError as error:
                raise DataError(f"{question.where}: {error}") from None
            if list(messages) != list(question.messages):
                extra = {**question.extra, ROW_PROMPT: [dict(message) for message in question.messages]}
                question = replace(question, messages=messages, extra=extra)
            begun.append(question)
    return begun
