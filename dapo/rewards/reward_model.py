"""Judge by a reward model: a sequence classifier with one output, run in a thread of the training process."""

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
from dapo.rewards.function import JUDGE_CLOSED, explain, to_score, unjudged
from dapo.types import Prompt, Rollout, Score


class _Closed(Exception):
    """The judge was closed in the middle of a batch."""


class RewardModelJudge:
    """Scores a response with the model's logit for prompt and response, in the model's chat template if it has one.

    A conversation longer than the model can read is unjudged, not truncated: the answer might be cut off.
    """

    def __init__(self, path: str, options: RewardModelConfig) -> None:
        self.path = path
        self.tokenizer, self.model = _load(path, options.device)
        self.pad = self.model.config.get_text_config().pad_token_id
        # Without a pad token, the model cannot find where a row ends.
        self.batch_size = 1 if self.pad is None else options.batch_size
        self.limit = _max_tokens(self.tokenizer, self.model.config)
        self.closed = False
        # One forward pass of a large model on a CPU can take minutes. Closing stops it at the next layer.
        for module in self.model.modules():
            module.register_forward_pre_hook(self._raise_if_closed)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="dapo-reward-model")

    def submit(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Future[list[Score]]:
        future: Future[list[Score]] = Future()
        future.set_running_or_notify_cancel()
        if self.closed:
            future.set_result([unjudged(JUDGE_CLOSED)] * len(rollouts))
        else:
            self.thread.submit(self._judge, prompt, rollouts, future)
        return future

    def close(self) -> None:
        self.closed = True
        self.thread.shutdown()

    def _raise_if_closed(self, *_: Any) -> None:
        if self.closed:
            raise _Closed

    def _judge(self, prompt: Prompt, rollouts: Sequence[Rollout], future: Future[list[Score]]) -> None:
        scores: list[Score] = []
        for start in range(0, len(rollouts), self.batch_size):
            batch = rollouts[start : start + self.batch_size]
            try:
                self._raise_if_closed()
                scores += self._score(prompt, batch)
            except _Closed:
                scores += [unjudged(JUDGE_CLOSED)] * len(batch)
            except Exception as error:  # e.g. out of memory or a template error: only this batch is unjudged
                scores += [unjudged(f"{self.path}: {explain(error)}")] * len(batch)
        future.set_result(scores)

    def _score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        rows = [self._tokens(prompt, rollout.text) for rollout in rollouts]
        fitting = [row for row in rows if len(row) <= self.limit]
        values = iter(self._values(fitting) if fitting else [])
        return [
            to_score(next(values))
            if len(row) <= self.limit
            else unjudged(f"{self.path}: the conversation has {len(row)} tokens; the model reads at most {self.limit}")
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
        tokens = torch.full((len(rows), width), self.pad or 0)  # [batch, width], padded on the right
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
    if found["missing_keys"]:  # transformers fills missing weights with random numbers
        missing = ", ".join(sorted(found["missing_keys"])[:3])
        raise RewardError(f"model:{path} is not a reward model: it has no weights for {missing}")
    if model.config.num_labels != 1:
        raise RewardError(f"model:{path} has {model.config.num_labels} outputs; expected a reward model with 1")
    return tokenizer, model


def _folder(path: str) -> Path:
    """Return the local directory of the model, downloaded if needed, and refuse files that run code when loaded."""
    from dapo.model.loading import fetch_from_hub

    local = Path(os.path.expanduser(path))
    try:
        directory = local if local.exists() else fetch_from_hub(path)
        check_folder(directory, f"model:{path}")
    except ModelError as error:
        raise RewardError(f"reward.use: {error}") from error
    return directory


def _max_tokens(tokenizer: Any, config: Any) -> int:
    """Return the longest input in tokens. Tokenizers without a limit report a huge number."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(tokenizer.model_max_length, positions or tokenizer.model_max_length)
