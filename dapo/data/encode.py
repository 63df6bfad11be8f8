"""Tokenize questions: apply the model's chat template, or use the plain text if the model has none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

from dapo.data.rows import Question
from dapo.errors import DataError, one_line
from dapo.model.template import limited_template
from dapo.system.digest import text_digest
from dapo.types import Prompt

_BATCH = 512
Item = TypeVar("Item")


def progress(items: Iterable[Item], label: str) -> Iterable[Item]:
    """Show a transient progress bar on stderr if it is a terminal."""
    console = Console(stderr=True)
    return track(items, label, console=console, transient=True, disable=not console.is_terminal)


def encode(
    questions: Sequence[Question],
    tokenizer: Any,
    label: str = "Tokenizing",
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    opening: str | None = None,
) -> list[Prompt]:
    """Tokenize questions in batches; the prompts are in the same order.

    `template_kwargs` are variables for the chat template. `opening` is the tag that opens a thought.
    """
    prompts = []
    starts = range(0, len(questions), _BATCH)
    # No bar for a single batch: questions are also encoded one by one during a run, which has a display of its own.
    for start in progress(starts, label) if len(starts) > 1 else starts:
        batch = questions[start : start + _BATCH]
        for question, tokens in zip(batch, _batch_tokens(batch, tokenizer, template_kwargs or {}), strict=True):
            prompts.append(_prompt(question, tokens, opening is not None and _ends_with(tokens, opening, tokenizer)))
    return prompts


def _ends_with(tokens: Sequence[int], tag: str, tokenizer: Any) -> bool:
    """Return whether the text of the tokens ends with the tag, apart from whitespace."""
    tail = tokens[-len(tag.encode()) - 32 :]  # a token may be as little as a byte, and whitespace takes some more
    return tokenizer.decode(tail).rstrip().endswith(tag)


def _prompt(question: Question, tokens: Sequence[int], opens_thought: bool) -> Prompt:
    if not tokens:
        raise DataError(f"{question.where}: the prompt has no tokens")
    return Prompt(
        uid=_uid(question.messages, question.answer if question.has_one_answer else None, question.variant),
        messages=question.messages,
        tokens=tuple(tokens),
        answer=question.answer,
        data_source=question.data_source,
        extra=question.extra,
        is_text=question.is_text,
        opens_thought=opens_thought,
    )


def _uid(messages: Sequence[Mapping[str, str]], answer: Any, variant: str) -> str:
    """Return a hash of the messages and the answer, stable across runs and machines."""
    identity = json.dumps([messages, answer, *filter(None, [variant])], ensure_ascii=False, sort_keys=True)
    return text_digest(identity)


def _batch_tokens(questions: Sequence[Question], tokenizer: Any, kwargs: Mapping[str, Any]) -> list[list[int]]:
    try:
        return _tokens([list(question.messages) for question in questions], tokenizer, kwargs)
    except Exception:  # templates and tokenizers raise any exception, without naming the row; retry one by one
        return [_tokens_of_one(question, tokenizer, kwargs) for question in questions]


def _tokens_of_one(question: Question, tokenizer: Any, kwargs: Mapping[str, Any]) -> list[int]:
    try:
        return _tokens([list(question.messages)], tokenizer, kwargs)[0]
    except Exception as error:
        raise DataError(
            f"{question.where}: the model's chat template or tokenizer rejects the messages ({one_line(error)})"
        ) from None


def _tokens(conversations: list[list[Mapping[str, str]]], tokenizer: Any, kwargs: Mapping[str, Any]) -> list[list[int]]:
    if tokenizer.chat_template is None:
        # A base model gets the plain text.
        texts = ["\n\n".join(message["content"] for message in messages) for messages in conversations]
        return tokenizer(texts)["input_ids"]
    with limited_template():
        encoded = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, return_dict=True, **kwargs)
        return encoded["input_ids"]
