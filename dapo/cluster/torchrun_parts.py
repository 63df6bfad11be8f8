"""A run under torchrun: what each rank holds, and on rank 0 the learner and engine protocols over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dapo.cluster.run_parts import Parts
from dapo.cluster.torchrun import Channel
from dapo.config import Config
from dapo.engine.embedded.build import embedded_engine
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.errors import ConfigError
from dapo.policy.build import build_policy
from dapo.policy.protocol import UpdateResult
from dapo.policy.sharded import ShardedPolicy
from dapo.policy.sharding import emptied
from dapo.types import Group, Request, Rollout

_POLL_DIVISOR = 4  # `poll` returns when a quarter of a rank's responses is finished: all ranks wait for the slowest


class Member:
    """The policy shard and the engine of one rank. Every method is called on all ranks with the same arguments."""

    policy: ShardedPolicy
    engine: EmbeddedEngine
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]

    def open(self, options: str, saved: Path | None) -> None:
        config = Config.model_validate_json(options)
        loaded, policy = build_policy(config, saved)
        assert isinstance(policy, ShardedPolicy)
        self.policy, self.tokenizer, self.stop_ids = policy, loaded.tokenizer, loaded.stop_ids
        self.model = emptied(loaded.model, policy.device)
        self._copy_weights()
        reserved = policy.optimizer.bytes_to_come if not config.cluster.offload else 0
        self.engine = embedded_engine(config, replace(loaded, model=self.model), self.model, reserved)
        if config.rollout.mode == "strict":  # in flight the cache is never empty
            policy.cache_bytes = self.engine.cache_bytes

    def learn(self, name: str, *arguments: Any) -> Any:
        """Call a method of the policy, which communicates with the other ranks itself."""
        return getattr(self.policy, name)(*arguments)

    def needs_cache(self) -> bool:
        return self.policy.needs_cache

    def set_non_finite(self, value: int) -> None:
        self.policy.non_finite_in_a_row = value

    def submit(self, requests: Sequence[Request]) -> None:
        self.engine.submit([r for r in requests if r.serial % self.policy.ranks == self.policy.rank])

    def poll(self) -> list[Rollout]:
        """Decode until a quarter of this rank's responses is finished.

        Counts decide, never the clock: the order of results must not depend on the speed of a rank.
        """
        enough = (len(self.engine.active) + len(self.engine.waiting)) // _POLL_DIVISOR
        finished = self.engine.poll()
        while len(finished) < enough:
            finished += self.engine.poll()
        return finished

    def cancel(self, serials: Sequence[int]) -> int:
        return self.engine.cancel(serials)

    def sync_weights(self, version: int) -> None:
        self._copy_weights()
        self.engine.sync_weights(version)

    @torch.no_grad()
    def _copy_weights(self) -> None:
        """Gather the weights from all ranks' shards into the model that this rank samples from."""
        own = self.model.state_dict()
        for name, tensor in self.policy.weights():
            own[name].copy_(tensor)

    def figures(self) -> dict[str, float]:
        return self.engine.figures()

    def release_cache(self) -> None:
        self.engine.release_cache()

    def close(self) -> None:
        self.engine.close()


class RanksPolicy:
    """The learner protocol over all ranks."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.own: ShardedPolicy = channel.member.policy

    def update(self, groups: Sequence[Group], step: int, version: int) -> UpdateResult:
        return self._learn("update", groups, step, version)

    def reference_logprobs(self, groups: Sequence[Group]) -> list[tuple[np.ndarray, ...]]:
        return self._learn("reference_logprobs", groups)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return the copy that this rank samples from."""
        return iter(self.channel.member.model.named_parameters())

    def efficiency(self, batch: Sequence[Group], update: UpdateResult, seconds: float) -> dict[str, float]:
        return self.own.efficiency(batch, update, seconds)

    def memory_plan(self, cache_bytes: int) -> str | None:
        return self._learn("memory_plan", cache_bytes)

    @property
    def checkpoint_bytes(self) -> int:
        return self.own.checkpoint_bytes

    def save(self, folder: Path) -> None:
        self._learn("save", folder.absolute())

    def restore(self, folder: Path) -> None:
        self._learn("restore", folder.absolute())

    @property
    def needs_cache(self) -> bool:
        return self.channel.call("needs_cache")[0]

    @property
    def non_finite_in_a_row(self) -> int:
        return self.own.non_finite_in_a_row

    @non_finite_in_a_row.setter
    def non_finite_in_a_row(self, value: int) -> None:
        self.channel.call("set_non_finite", value)

    def _learn(self, name: str, *arguments: Any) -> Any:
        return self.channel.call("learn", name, *arguments)[0]


class RanksEngine:
    """The engine protocol over all ranks: rank r of n samples the groups whose serial mod n is r."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def submit(self, requests: Sequence[Request]) -> None:
        self.channel.call("submit", list(requests))

    def poll(self) -> list[Rollout]:
        return [rollout for rollouts in self.channel.call("poll") for rollout in rollouts]

    def cancel(self, serials: Iterable[int]) -> int:
        return sum(self.channel.call("cancel", list(serials)))

    def sync_weights(self, version: int) -> None:
        self.channel.call("sync_weights", version)

    def figures(self) -> dict[str, float]:
        """Return the mean of each metric over the ranks."""
        found = self.channel.call("figures")
        return {name: sum(metrics.get(name, 0.0) for metrics in found) / len(found) for name in found[0]}

    def release_cache(self) -> None:
        self.channel.call("release_cache")

    def close(self) -> None:
        if not self.channel.is_broken:
            self.channel.call("close")


def torchrun_parts(config: Config, saved: Path | None, channel: Channel) -> Parts:
    """Have every rank build its policy and engine. Called on rank 0."""
    world, asked = torch.distributed.get_world_size(), config.cluster.learners
    if asked not in (1, world):
        raise ConfigError(
            f"cluster.learners is {asked}, but torchrun has started {world} processes; remove it, or set it to {world}"
        )
    if config.rollout.engine != "embedded":
        raise ConfigError(
            f"rollout.engine is {config.rollout.engine}, but under torchrun every process samples with the embedded "
            "engine; remove it, or train on Ray"
        )
    channel.member = member = Member()
    channel.call("open", config.model_dump_json(), saved.absolute() if saved else None)
    engine = RanksEngine(channel)
    cache = member.engine.cache_bytes
    return Parts(RanksPolicy(channel), engine, member.tokenizer, member.stop_ids, cache, engine.release_cache)
