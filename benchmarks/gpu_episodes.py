"""python -m benchmarks.gpu_episodes: the cost of episodes of several turns, in bf16 with random weights.

An episode of four turns is compared with the same number of sampled tokens in one turn, plus the prefill of what the
environment gave. The environment replies at once, so only the engine is measured. `--only NAME` selects workloads.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from benchmarks.gpu_common import (
    QWEN2_1_5B,
    SMOLLM2_135M,
    Row,
    default_device,
    print_rows,
    random_model,
    random_prompts,
    timed,
    word_tokenizer,
)
from benchmarks.gpu_rollout import drain
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.types import Extension, Request, SamplingParams

MUST, AIM = 1.1, 1.0  # times the cost of one turn and of the prefill


@dataclass(frozen=True, slots=True)
class Workload:
    """`prompts` x `n` episodes of `turns` turns of `turn_tokens`, with `given_tokens` between two turns.

    With `spread`, the turns have random lengths between half and one and a half of `turn_tokens`, so that episodes end
    their turns at different times. With `slots`, so many are decoded at once and others take the places of those that
    wait for a reply; by default all are.
    """

    name: str
    shape: PretrainedConfig
    prompts: int
    n: int
    prompt_tokens: int
    turns: int
    turn_tokens: int
    given_tokens: int
    spread: bool = False
    slots: int = 0

    @property
    def what(self) -> str:
        length = f"{'about ' * self.spread}{self.turn_tokens}"
        slots = f" on {self.slots} slots" * bool(self.slots)
        return (
            f"{self.name}, {self.prompts} x {self.n}{slots}, {self.turns} turns of {length}, {self.given_tokens} given"
        )

    @property
    def max_length(self) -> int:
        return self.prompt_tokens + self.turns * 2 * self.turn_tokens + (self.turns - 1) * self.given_tokens

    def lengths(self) -> np.ndarray:
        """Return the lengths of the turns, [episodes, turns]."""
        half = self.turn_tokens // 2 if self.spread else 0
        shape = self.prompts * self.n, self.turns
        return np.random.default_rng(0).integers(self.turn_tokens - half, self.turn_tokens + half + 1, shape)

    def requests(self, limits: Iterable[int], *, turns: bool = False) -> list[Request]:
        """Return one request per episode, since a request has one limit for all its responses."""
        prompts = random_prompts(self.prompts, self.prompt_tokens, self.shape.vocab_size)
        return [
            Request(i, prompts[i // self.n], 1, SamplingParams(max_tokens=int(limit)), turns=turns)
            for i, limit in enumerate(limits)
        ]


WORKLOADS = (
    Workload("135m-small", SMOLLM2_135M, 4, 4, 64, 4, 12, 8, spread=True),  # small enough for a CPU
    Workload("135m", SMOLLM2_135M, 16, 16, 128, 4, 64, 32),
    Workload("135m-spread", SMOLLM2_135M, 64, 16, 128, 4, 64, 32, spread=True, slots=256),
    Workload("1.5b", QWEN2_1_5B, 16, 16, 128, 4, 64, 32),
    Workload("1.5b-spread", QWEN2_1_5B, 64, 16, 128, 4, 64, 32, spread=True, slots=256),
    Workload("1.5b-alone", QWEN2_1_5B, 16, 16, 128, 4, 64, 32, spread=True),
    Workload("1.5b-long", QWEN2_1_5B, 64, 16, 128, 4, 64, 256, spread=True, slots=256),
)


def play(engine: EmbeddedEngine, workload: Workload) -> int:
    """Play all episodes to their end, and return how many tokens they have."""
    lengths = workload.lengths()
    requests = workload.requests(lengths[:, 0], turns=True)
    given = random_prompts(1, workload.given_tokens, workload.shape.vocab_size, seed=1)[0]
    engine.submit(requests)
    tokens = 0
    while rollouts := engine.poll():
        extensions = []
        for rollout in rollouts:
            turn = len(rollout.given) + 1
            if turn == workload.turns:
                tokens += len(rollout)
                engine.end([(rollout.serial, rollout.index)])
            else:
                limit = len(rollout) + len(given) + int(lengths[rollout.serial, turn])
                extensions.append(Extension(requests[rollout.serial], rollout, given, limit))
        engine.extend(extensions)
    return tokens


def episode_row(workload: Workload, model: Any, repeats: int) -> Row:
    episodes = workload.prompts * workload.n
    tokenizer = word_tokenizer(workload.shape.vocab_size)
    slots = workload.slots or episodes
    engine = EmbeddedEngine(model, tokenizer, frozenset(), 0, slots, max_length=workload.max_length)
    sampled, given = workload.lengths().sum(1), (workload.turns - 1) * workload.given_tokens
    assert play(engine, workload) == int(sampled.sum()) + episodes * given
    one_turn = timed(lambda: drain(engine, workload.requests(sampled)), model.device, repeats).best
    # Every episode is given its own tokens, so they are prefilled as prompts of their own, with one decode step each.
    alone = Workload("", workload.shape, episodes, 1, given, 1, 1, 0)
    prefill = timed(lambda: drain(engine, alone.requests([1] * episodes)), model.device, repeats).best
    several = timed(lambda: play(engine, workload), model.device, repeats).best
    engine.close()
    note = f"{several:.3f} s, against {one_turn:.3f} s in one turn and {prefill:.3f} s of prefill"
    return Row(workload.what, several / (one_turn + prefill), "x", MUST, AIM, lower_is_better=True, note=note)


def measure(workloads: Sequence[Workload], device: torch.device, repeats: int) -> Iterator[Row]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for workload in workloads:
        yield episode_row(workload, random_model(workload.shape, device, dtype), repeats)
        gc.collect()  # engine and model refer to each other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=[workload.name for workload in WORKLOADS])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    workloads = [w for w in WORKLOADS if not arguments.only or w.name in arguments.only]
    rows = measure(workloads, default_device(), arguments.repeats)
    print_rows("episodes of several turns, bf16, random weights", rows)


if __name__ == "__main__":
    main()
