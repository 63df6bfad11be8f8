"""Questions to prompts: token ids with the model's chat template applied once; a base model gets the plain text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

from dapo.data.rows import Question
from dapo.errors import DataError
from dapo.model.template import limited_template
from dapo.types import Prompt

_BATCH = 512
Item = TypeVar("Item")


def progress(items: Iterable[Item], label: str) -> Iterable[Item]:
    """A bar on the terminal while a load takes its time, and no trace of it afterwards."""
    console = Console(stderr=True)
    return track(items, label, console=console, transient=True, disable=not console.is_terminal)


def encode(questions: Sequence[Question], tokenizer: Any, label: str = "Tokenising") -> list[Prompt]:
    prompts = []
    starts = range(0, len(questions), _BATCH)
    # Single questions are encoded during a run, which has the terminal to itself.
    for start in progress(starts, label) if len(starts) > 1 else starts:
        batch = questions[start : start + _BATCH]
        prompts += map(_prompt, batch, _batch_tokens(batch, tokenizer))
    return prompts


def _prompt(question: Question, tokens: Sequence[int]) -> Prompt:
    if not tokens:
        raise DataError(f"{question.where}: the prompt has no tokens")
    return Prompt(
        uid=_uid(question.messages, question.answer if question.has_one_answer else None),
        messages=question.messages,
        tokens=tuple(tokens),
        answer=question.answer,
        data_source=question.data_source,
        extra=question.extra,
        is_text=question.is_text,
    )


def _uid(messages: Sequence[Mapping[str, str]], answer: Any) -> str:
    identity = json.dumps([messages, answer], ensure_ascii=False, sort_keys=True)
    return hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _batch_tokens(questions: Sequence[Question], tokenizer: Any) -> list[list[int]]:
    try:
        return _tokens([list(question.messages) for question in questions], tokenizer)
    except Exception:  # a template or tokenizer raises what it likes, and does not say for which row: find it
        return [_tokens_of_one(question, tokenizer) for question in questions]


def _tokens_of_one(question: Question, tokenizer: Any) -> list[int]:
    try:
        return _tokens([list(question.messages)], tokenizer)[0]
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(
            f"{question.where}: the model's chat template or tokenizer refuses the messages ({reason})"
        ) from None


def _tokens(conversations: list[list[Mapping[str, str]]], tokenizer: Any) -> list[list[int]]:
    if tokenizer.chat_template is None:
        # A base model: the plain text is the prompt.
        texts = ["\n\n".join(message["content"] for message in messages) for messages in conversations]
        return tokenizer(texts)["input_ids"]
    with limited_template():
        return tokenizer.apply_chat_template(conversations, add_generation_prompt=True, return_dict=True)["input_ids"]
