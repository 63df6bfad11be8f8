"""Rows of a dataset file to Prompts; a bad row is refused with its file, line and column."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dapo.errors import DataError
from dapo.types import Prompt

_RESERVED = ("prompt", "answer", "data_source")


def load_prompts(
    path: str | Path, tokenizer: Any, max_prompt_length: int, system_prompt: str | None = None
) -> list[Prompt]:
    """Every row of a JSONL file `{prompt, answer, ...}` with its chat template applied, once."""
    path = Path(path)
    prompts = [_prompt(row, where, tokenizer, system_prompt) for where, row in _read_jsonl(path)]
    if not prompts:
        raise DataError(f"{path}: no rows; expected one JSON object with `prompt` and `answer` per line")
    for (where, _), prompt in zip(_read_jsonl(path), prompts, strict=True):
        if len(prompt.tokens) > max_prompt_length:
            raise DataError(
                f"{where}: the prompt has {len(prompt.tokens)} tokens, "
                f"more than data.max_prompt_length = {max_prompt_length}"
            )
    return prompts


def _read_jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}); relative paths start at the working directory"
        ) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
        yield where, row


def _prompt(row: Mapping[str, Any], where: str, tokenizer: Any, system_prompt: str | None) -> Prompt:
    messages = _messages(row, where)
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": system_prompt}, *messages)
    if "answer" not in row:
        raise DataError(f"{where}: column 'answer' is missing")
    source = row.get("data_source", "default")
    if not isinstance(source, str):
        raise DataError(f"{where}: column 'data_source' must be text, found {type(source).__name__}")
    identity = json.dumps([messages, row["answer"]], ensure_ascii=False, sort_keys=True)
    return Prompt(
        uid=hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest(),
        messages=messages,
        tokens=_encode(messages, tokenizer, where),
        answer=row["answer"],
        data_source=source,
        extra={key: value for key, value in row.items() if key not in _RESERVED},
    )


def _messages(row: Mapping[str, Any], where: str) -> tuple[Mapping[str, str], ...]:
    if "prompt" not in row:
        raise DataError(f"{where}: column 'prompt' is missing")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt or not all(_is_message(message) for message in prompt):
        raise DataError(f"{where}: column 'prompt' must be text or a list of {{role, content}} messages")
    return tuple(prompt)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _encode(messages: tuple[Mapping[str, str], ...], tokenizer: Any, where: str) -> tuple[int, ...]:
    if tokenizer.chat_template is None:
        # A base model: the plain text is the prompt.
        tokens = tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    else:
        try:
            tokens = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        except Exception as error:  # templates raise what they like: it is a fault of this row's messages
            raise DataError(f"{where}: the model's chat template refuses the messages ({error})") from None
    if not tokens:
        raise DataError(f"{where}: the prompt is empty")
    return tuple(tokens)
