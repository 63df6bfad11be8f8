"""A run under torchrun: the policy and engine of each rank, and rank 0's engine protocol over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dapo.cluster.remote_learner import LearnerRank, RemoteLearner
from dapo.cluster.run_parts import Parts
from dapo.cluster.torchrun import Channel
from dapo.config import Config
from dapo.config.functions import CustomParts, objects_for_learners
from dapo.engine.embedded.build import embedded_engine
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.errors import ConfigError
from dapo.policy.build import build_policy
from dapo.policy.sharding import uninitialized_copy
from dapo.types import Extension, Request, Rollout

_POLL_DIVISOR = 4  # `poll` returns when a rank has finished a quarter of its responses; all ranks wait for the slowest


class TorchrunRank(LearnerRank):
    """The policy shard and the engine of one rank. Every method is called on all ranks with the same arguments."""

    engine: EmbeddedEngine
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]

    def open(self, options: str, saved: Path | None) -> None:
        config = Config.model_validate_json(options)
        loaded, self.policy = build_policy(config, saved)
        self.tokenizer, self.stop_ids = loaded.tokenizer, loaded.stop_ids
        self.model = uninitialized_copy(loaded.model, self.policy.like.device)
        self._copy_weights()
        reserved = self.policy.optimizer.pending_bytes if not config.cluster.offload else 0
        self.engine = embedded_engine(config, replace(loaded, model=self.model), self.model, reserved)
        if config.rollout.mode == "strict":  # in flight the cache is never empty
            self.policy.cache_bytes = self.engine.cache_bytes

    def submit(self, requests: Sequence[Request]) -> None:
        self.engine.submit([request for request in requests if self._is_mine(request)])

    def extend(self, extensions: Sequence[Extension]) -> None:
        self.engine.extend([extension for extension in extensions if self._is_mine(extension.request)])

    def _is_mine(self, request: Request) -> bool:
        return request.serial % self.policy.ranks == self.policy.rank

    def poll(self, wait: bool) -> list[Rollout]:
        """Decode until a quarter of this rank's responses is finished. Without `wait`, decode only a few steps.

        Counts decide when to return, not the clock, so that the order of results does not depend on a rank's speed.
        """
        if not wait:
            return self.engine.poll(wait=False)
        enough = (len(self.engine.active) + len(self.engine.waiting)) // _POLL_DIVISOR
        finished = self.engine.poll()
        while len(finished) < enough:
            finished += self.engine.poll()
        return finished

    def sync_weights(self, version: int) -> None:
        self._copy_weights()
        self.engine.sync_weights(version)

    def sample(self, name: str, *arguments: Any) -> Any:
        """Call any other method of the engine."""
        return getattr(self.engine, name)(*arguments)

    @torch.no_grad()
    def _copy_weights(self) -> None:
        """Gather the weights from all ranks' shards into the model that this rank samples from."""
        own = self.model.state_dict()
        for name, tensor in self.policy.weights():
            own[name].copy_(tensor)


class TorchrunEngine:
    """The engine protocol over all ranks: rank r of n samples the groups whose serial mod n is r."""

    def __init__(self, channel: Channel, own: EmbeddedEngine) -> None:
        self.channel = channel
        self.cache_bytes, self.is_repeatable = own.cache_bytes, own.is_repeatable

    def submit(self, requests: Sequence[Request]) -> None:
        self.channel.call("submit", list(requests))

    def extend(self, extensions: Sequence[Extension]) -> None:
        self.channel.call("extend", list(extensions))

    def end(self, episodes: Iterable[tuple[int, int]]) -> None:
        self.channel.call("sample", "end", list(episodes))

    def poll(self, *, wait: bool = True) -> list[Rollout]:
        return [rollout for rollouts in self.channel.call_each("poll", wait) for rollout in rollouts]

    def cancel(self, serials: Iterable[int]) -> int:
        return sum(self.channel.call_each("sample", "cancel", list(serials)))

    def sync_weights(self, version: int) -> None:
        self.channel.call("sync_weights", version)

    def metrics(self) -> dict[str, float]:
        """Return the mean of each metric over the ranks."""
        found = self.channel.call_each("sample", "metrics")
        return {name: sum(metrics.get(name, 0.0) for metrics in found) / len(found) for name in found[0]}

    def suspend(self) -> None:
        self.channel.call("sample", "suspend")

    def close(self) -> None:
        if not self.channel.is_broken:
            self.channel.call("sample", "close")


def torchrun_parts(config: Config, saved: Path | None, channel: Channel, custom: CustomParts | None = None) -> Parts:
    """Let every rank build its policy and engine. Only rank 0 calls this."""
    if objects_for_learners(config, custom):
        raise ConfigError(
            "a loss or schedule that is given as a Python object cannot be sent to the processes of torchrun; name it "
            "as path/to/file.py:function"
        )
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
    if config.algorithm.ledger.lookahead > 1:
        raise ConfigError(
            "algorithm.ledger.lookahead reads the hidden states of a model that is whole in one process, but torchrun "
            "divides it; set it to 1, or start the run without torchrun"
        )
    channel.own = own = TorchrunRank()
    channel.call("open", config.model_dump_json(), saved.absolute() if saved else None)
    engine = TorchrunEngine(channel, own.engine)
    return Parts(RemoteLearner(channel), engine, own.tokenizer, own.stop_ids)
