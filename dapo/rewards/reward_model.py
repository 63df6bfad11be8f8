"""Judging by a reward model: a sequence classifier with one output, run in a thread of the training process."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dapo.config import RewardModelConfig
from dapo.errors import ModelError, RewardError
from dapo.model.template import limited_template
from dapo.model.weights import check_folder
from dapo.rewards.function import CLOSED, explain, to_score, unjudged
from dapo.types import Prompt, Rollout, Score


class _Closed(Exception):
    """The judge was closed in the middle of a batch."""


class RewardModelJudge:
    """The score is the model's one logit after prompt and response, in its own chat template where it has one.

    A conversation longer than the model can read is not judged: what is cut off might be the answer.
    """

    def __init__(self, path: str, options: RewardModelConfig) -> None:
        self.path = path
        self.tokenizer, self.model = _load(path, options.device)
        self.pad = self.model.config.get_text_config().pad_token_id
        self.batch_size = 1 if self.pad is None else options.batch_size  # without it, rows cannot be told from padding
        self.limit = _longest(self.tokenizer, self.model.config)
        self.closed = False
        # Minutes may pass in one forward pass of a large model on a CPU. Closing ends it at the next layer.
        for module in self.model.modules():
            module.register_forward_pre_hook(self._go_on)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="dapo-reward-model")

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        future: Future[list[Score]] = Future()
        future.set_running_or_notify_cancel()
        if self.closed:
            future.set_result([unjudged(CLOSED)] * len(rollouts))
        else:
            self.thread.submit(self._judge, prompt, rollouts, future)
        return future

    def close(self) -> None:
        self.closed = True
        self.thread.shutdown()

    def _go_on(self, *_: Any) -> None:
        if self.closed:
            raise _Closed

    def _judge(self, prompt: Prompt, rollouts: Sequence[Rollout], future: Future[list[Score]]) -> None:
        scores: list[Score] = []
        for start in range(0, len(rollouts), self.batch_size):
            batch = rollouts[start : start + self.batch_size]
            try:
                self._go_on()
                scores += self._score(prompt, batch)
            except _Closed:
                scores += [unjudged(CLOSED)] * len(batch)
            except Exception as error:  # out of memory, a template that refuses these messages: this batch, not the run
                scores += [unjudged(f"{self.path}: {explain(error)}")] * len(batch)
        future.set_result(scores)

    def _score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        rows = [self._tokens(prompt, rollout.text) for rollout in rollouts]
        fitting = [row for row in rows if len(row) <= self.limit]
        values = iter(self._values(fitting) if fitting else [])
        return [
            to_score(next(values))
            if len(row) <= self.limit
            else unjudged(f"{self.path}: reads at most {self.limit} tokens, and the conversation has {len(row)}")
            for row in rows
        ]

    def _tokens(self, prompt: Prompt, response: str) -> list[int]:
        if self.tokenizer.chat_template is None:
            return self.tokenizer("\n".join([*(m["content"] for m in prompt.messages), response]))["input_ids"]
        messages = [*prompt.messages, {"role": "assistant", "content": response}]
        with limited_template():
            return self.tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]

    def _values(self, rows: list[list[int]]) -> list[float]:
        import torch

        width = max(map(len, rows))
        tokens = torch.full((len(rows), width), self.pad or 0)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
            mask[i, : len(row)] = 1
        with torch.inference_mode():
            logits = self.model(tokens.to(self.model.device), attention_mask=mask.to(self.model.device)).logits
        return logits[:, 0].float().tolist()


def _load(path: str, device: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise RewardError(f"reward.model.device is '{device}'; expected cpu, cuda, cuda:N or auto")
    directory = _folder(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            directory,
            dtype=torch.float32 if device == "cpu" else "auto",
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model = model.to(device).eval().requires_grad_(False)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise RewardError(
            f"model:{path} cannot be loaded as a reward model ({type(error).__name__}: {reason}); expected the "
            "directory or hub id of a sequence classifier with its tokenizer, in .safetensors files"
        ) from error
    if found["missing_keys"]:  # transformers makes up what is not there: a head of random numbers would judge
        missing = ", ".join(sorted(found["missing_keys"])[:3])
        raise RewardError(f"model:{path} is no reward model: it has no weights for {missing}")
    if model.config.num_labels != 1:
        raise RewardError(f"model:{path} has {model.config.num_labels} outputs; expected a reward model with 1")
    return tokenizer, model


def _folder(path: str) -> Path:
    """The model on this machine, with nothing in it that would run code when it is loaded."""
    from dapo.model.loading import fetch_from_hub

    local = Path(os.path.expanduser(path))
    try:
        directory = local if local.exists() else fetch_from_hub(path)
        check_folder(directory, f"model:{path}")
    except ModelError as error:
        raise RewardError(f"reward.use: {error}") from error
    return directory


def _longest(tokenizer: Any, config: Any) -> int:
    """What the model was made for; tokenizers that do not know say something astronomical."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(tokenizer.model_max_length, positions or tokenizer.model_max_length)
