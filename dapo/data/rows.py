"""Convert dataset rows to questions. The layout of a row is recognized by its columns."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from dapo.data.prompt_format import PromptFormat
from dapo.data.readers import columns_hint
from dapo.errors import DataError
from dapo.types import Prompt

QUESTION_COLUMNS = ("prompt", "question", "problem")
_ANSWER_COLUMNS = ("answer", "ground_truth", "solution")
_JSON_SCALARS = (str, bool, int)
_MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True, slots=True)
class Question:
    """One row in a common form, not yet tokenized."""

    where: str  # file and line or row, for error messages
    messages: tuple[Mapping[str, str], ...]
    answer: Any
    data_source: str
    extra: Mapping[str, Any]
    is_text: bool
    has_one_answer: bool = True  # False: `answer` is one of several right ones, and not part of the uid
    variant: str = ""  # part of the uid: a key of the columns by which it differs from an earlier row

    def as_prompt(self) -> Prompt:
        """Return the question for a judge or an environment, which need neither its tokens nor its uid."""
        return Prompt("", self.messages, (), self.answer, self.data_source, self.extra, self.is_text)


def layout_of(row: Mapping[str, Any]) -> str:
    """Name the layout of a row: a `verl` row has its answer in `reward_model`, and only `prompt` needs no answer."""
    if row.get("reward_model") is not None:
        return "verl"
    if row.get("prompt") is not None:
        return "prompt and answer" if row.get("answer") is not None else "prompt only"
    return "question and answer"


def read_question(where: str, row: Mapping[str, Any], prompt_format: PromptFormat) -> Question:
    """Return the row's question and gold answer, with every other column as JSON values in `extra`."""
    question_column = next((name for name in QUESTION_COLUMNS if row.get(name) is not None), None)
    if question_column is None:
        raise DataError(
            f"{where}: {_missing(row, 'prompt')} (and there is no 'question' or 'problem'{columns_hint(row)}); "
            "data.columns maps other names"
        )
    for name in _MEDIA_COLUMNS:
        if row.get(name):
            raise DataError(f"{where}: column '{name}' is not empty, but only text is supported")
    text = row[question_column]
    is_text = isinstance(text, str)
    if is_text and not text.strip():
        raise DataError(f"{where}: column '{question_column}' is empty")
    answer_column, answer = _answer(where, row, question_column)
    return Question(
        where=where,
        messages=prompt_format.messages(text)
        if is_text
        else prompt_format.with_system(_messages(where, question_column, text)),
        answer=answer,
        data_source=_data_source(where, row),
        extra={
            name: _to_json(where, name, value)
            for name, value in row.items()
            if name not in (question_column, answer_column, "data_source")
        },
        is_text=is_text,
    )


def _answer(where: str, row: Mapping[str, Any], question_column: str) -> tuple[str | None, Any]:
    """Return the column that is only the gold answer, or None, and the gold answer."""
    if row.get("reward_model") is not None:
        judge = row["reward_model"]
        if not isinstance(judge, dict):
            raise DataError(
                f"{where}: column 'reward_model' must be a mapping with 'ground_truth', found {_type_name(judge)}"
            )
        if judge.get("ground_truth") is None:
            raise DataError(f"{where}: {_missing(judge, 'reward_model.ground_truth')}")
        return None, _gold(where, "reward_model.ground_truth", judge["ground_truth"])
    column = next((name for name in _ANSWER_COLUMNS if row.get(name) is not None), None)
    if column is not None:
        return column, _gold(where, column, row[column])
    if question_column != "prompt":
        hint = f" (and there is no 'ground_truth' or 'solution'{columns_hint(row)}); data.columns maps other names"
        raise DataError(f"{where}: {_missing(row, 'answer')}{'' if 'answer' in row else hint}")
    return None, None  # some reward functions need no gold answer


def _gold(where: str, column: str, value: Any) -> Any:
    """Return a gold answer as a JSON value; refuse empty ones."""
    if isinstance(value, str) and not value.strip():
        raise DataError(f"{where}: column '{column}' is empty")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{where}: column '{column}' is {value}, expected an answer")
    return _to_json(where, column, value)


def _data_source(where: str, row: Mapping[str, Any]) -> str:
    value = row.get("data_source")
    if value is None:
        return "default"
    if not isinstance(value, str):
        raise DataError(f"{where}: column 'data_source' must be text, found {_type_name(value)}")
    return value


def _messages(where: str, column: str, prompt: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(prompt, list) or not prompt:
        found = "an empty list" if prompt == [] else _type_name(prompt)
        raise DataError(
            f"{where}: column '{column}' must be text or a list of {{role, content}} messages, found {found}"
        )
    return tuple(_message(where, f"{column}[{place}]", message) for place, message in enumerate(prompt))


def _message(where: str, place: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise DataError(f"{where}: {place} must be a {{role, content}} message, found {_type_name(message)}")
    texts = {}
    for key in ("role", "content"):
        value = message.get(key)
        if key == "content" and isinstance(value, list):
            value = "".join(_text_part(where, place, part) for part in value)
        if value is None:
            raise DataError(f"{where}: {_missing(message, f'{place}.{key}')}")
        if not isinstance(value, str):
            raise DataError(f"{where}: {place}.{key} must be text, found {_type_name(value)}")
        texts[key] = value
    others = [key for key, value in message.items() if key not in texts and value]
    if others:
        raise DataError(f"{where}: {place} has '{others[0]}', but a message may have only role and content")
    return texts


def _text_part(where: str, place: str, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    found = f"a part of type '{part['type']}'" if isinstance(part, Mapping) and "type" in part else _type_name(part)
    raise DataError(f"{where}: {place}.content has {found}, but only text is supported")


def _to_json(where: str, column: str, value: Any) -> Any:
    """Convert to a JSON value, because judges get rows as JSON: dates become ISO text, bytes base64, NaN null."""
    if value is None or isinstance(value, _JSON_SCALARS):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _to_json(where, f"{column}.{key}", member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(where, column, member) for member in value]
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    raise DataError(f"{where}: column '{column}' has a value of type {_type_name(value)}, which has no JSON form")


def _missing(row: Mapping[str, Any], column: str) -> str:
    """Say that a column is null, or missing. `column` may be a path whose last part is a key of `row`."""
    return f"column '{column}' is {'null' if column.rpartition('.')[2] in row else 'missing'}"


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__
