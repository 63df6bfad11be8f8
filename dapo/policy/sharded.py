"""A policy over several processes: FSDP2 shards the weights, and each rank computes its part of a batch.

There is one object per rank of an initialized `torch.distributed` group. Every method is collective: all ranks call it
with the same arguments, and the result of rank 0 is the one to use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from dapo.checkpoint import shards as shardfiles
from dapo.checkpoint import weights as files
from dapo.config import Config
from dapo.config.functions import CustomParts
from dapo.errors import ModelError
from dapo.model.export import save_dense
from dapo.model.forward import head_weight
from dapo.model.lora import adapter_state, causal_lm, load_adapter_state, merged
from dapo.model.trunk import use_plain_trunk
from dapo.policy.budget import Budget
from dapo.policy.dither import DitheredShards
from dapo.policy.head import HeadResult, head_loss
from dapo.policy.optimizer import held_bytes
from dapo.policy.packing import Batch
from dapo.policy.policy import Policy
from dapo.policy.sharding import Root, gather_full, shard
from dapo.policy.tally import Tally
from dapo.types import EventKind, Group

Values = TypeVar("Values")

_FIRST_DIVISOR = 4  # the first mini-batch is computed with the budget divided by this, to measure memory safely


class ShardedPolicy(Policy):
    """Shards `model` in place. Its dtype is the one to compute in.

    Weights come from rank 0. On other ranks only the shapes are used, so those models can be on the meta device.
    """

    def __init__(
        self,
        model: Any,
        config: Config,
        *,
        device: Any = "cpu",
        parts: CustomParts | None = None,
    ) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device, self.compute = torch.device(device), causal_lm(model).dtype
        asked = config.optim.recompute_activations
        self.recompute = asked == "always" or (asked == "auto" and self.device.type == "cuda")
        self.root = self._sharded(causal_lm(model), config, recompute=self.recompute)
        self.reference_root = self.root
        self.fixed_bytes: int | None = None  # memory of an update apart from its tokens, once measured
        super().__init__(model, config, parts=parts)
        self.like = torch.empty((), device=self.device, dtype=self.compute)
        if self.compute == torch.bfloat16 and not isinstance(model, PeftModel):  # adapters are rounded when merged
            self.optimizer.dithered = DitheredShards(self.optimizer.masters)

    def add_reference(self, reference: Any) -> None:
        """Shard the reference model in place, needed unless adapters can be switched off."""
        self.reference, self.reference_root = reference, self._sharded(reference, self.config, recompute=False)

    def _sharded(self, model: Any, config: Config, *, recompute: bool) -> Root:
        root = shard(model, self.device, self.compute, recompute=recompute, offload=config.cluster.offload)
        use_plain_trunk(model)  # rank 0 may have checked the whole model with fused modules
        return root

    def _divide_memory(self) -> None:
        """Leave everything where it is: shards are offloaded with cluster.offload."""

    @cached_property
    def budget(self) -> Budget:
        pending_bytes = self.optimizer.pending_bytes if self.weight.device.type == self.device.type else 0
        found = Budget.shared(
            self.causal_lm,
            self.trunk,
            self.config.optim,
            self.like,
            pending_bytes,
            self.cache_bytes,
            recompute=self.recompute,
            longest=self.config.longest,
        )
        # All ranks use the smallest budget, and free the cache if any of them needs it (max = -min of the negatives).
        fewest, needs_engine_memory = (
            self._min_over_ranks(found.max_tokens),
            -self._min_over_ranks(-int(found.needs_engine_memory)),
        )
        return replace(found, max_tokens=fewest, needs_engine_memory=bool(needs_engine_memory))

    def _min_over_ranks(self, value: int) -> int:
        box = torch.tensor(value, device=self.device)
        dist.all_reduce(box, dist.ReduceOp.MIN)
        return int(box)

    def _gradients(self, groups: list[Group], version: int, tally: Tally) -> list[tuple[Batch, HeadResult]]:
        """Compute the gradients of this rank's part of a mini-batch.

        A rank that runs out of memory cannot recover, because the others wait for it in the middle of a layer. So
        memory is measured in advance: the first mini-batch is computed in small parts, and the budget shrinks if they
        take more than estimated.
        """
        watches = self.like.is_cuda and not self.config.optim.max_tokens_per_micro_batch  # the same on all ranks
        is_first = watches and self.fixed_bytes is None
        if is_first:
            self.fixed_bytes = self._run_batches(self._cut(groups[:1], version, 1)[:1])[1]
        batches = self._cut(groups, version, self.budget.max_tokens // (_FIRST_DIVISOR if is_first else 1))
        results, used = self._run_batches(batches)
        if self.fixed_bytes is not None:
            self._shrink_budget(max(len(batch.tokens_T) for batch in batches), used - self.fixed_bytes, tally)
        return results

    def _cut(self, groups: list[Group], version: int, max_tokens: int) -> list[Batch]:
        """Pack micro-batches of at most `max_tokens`, whatever the budget."""
        budget = self.budget
        self.budget = replace(budget, max_tokens=max(1, max_tokens))
        try:
            return self._micro_batches(groups, version)
        finally:
            self.budget = budget

    def _run_batches(self, batches: list[Batch]) -> tuple[list[tuple[Batch, HeadResult]], int]:
        """Return the results, and the peak bytes of GPU memory that they took besides the gradients."""
        self.optimizer.zero_grad()
        on_gpu, before = self.like.is_cuda, 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        try:
            results = [(batch, self._backward(batch)) for batch in batches]
        except torch.cuda.OutOfMemoryError as error:
            largest = max(len(batch.tokens_T) for batch in batches)
            raise ModelError(
                f"an update ran out of GPU memory with {largest} tokens per micro-batch on rank {self.rank}; set "
                f"optim.max_tokens_per_micro_batch to {largest // 2}, or lower rollout.kv_memory_fraction"
            ) from error
        grads = (master.grad for master in self.optimizer.masters)
        kept = sum(held_bytes(grad) for grad in grads if grad is not None and grad.is_cuda)
        return results, torch.cuda.max_memory_allocated(self.device) - before - kept if on_gpu else 0

    def _shrink_budget(self, tokens: int, used: int, tally: Tally) -> None:
        """Lower the budget of all ranks if `tokens` took more memory than estimated on any of them."""
        fewest = self._min_over_ranks(self.budget.tokens_that_fit(tokens, used))
        if fewest < self.budget.max_tokens:
            tally.notes.append(
                f"an update takes more memory than estimated; micro-batches now have at most {fewest} tokens"
            )
            self.budget = replace(self.budget, max_tokens=fewest)

    def _backward(self, batch: Batch) -> HeadResult:
        def run() -> tuple[Tensor, HeadResult]:
            hidden_R = self._hidden(self.causal_lm, batch, self._plan(self.causal_lm, batch))
            temperature, weight = self.config.rollout.temperature, head_weight(self.causal_lm)
            loss = self._chunk_loss(batch, hidden_R, weight)
            return head_loss(hidden_R, weight, batch.targets_R, temperature, loss)

        # Inside the root's forward the weights outside of the layers are gathered, in the compute dtype.
        loss, result = self.root(run)
        loss.backward()
        return result

    def _logprobs(self, model: Any, batch: Batch) -> Tensor:
        root = self.reference_root if model is self.reference else self.root
        logprobs_R = root(partial(super()._logprobs, model, batch))
        assert isinstance(root, FSDPModule)
        root.reshard()  # without a backward pass nothing else does
        return logprobs_R

    def _reduce(self, part: Tally) -> None:
        names = sorted(part.sums)  # the same order on all ranks
        counters = [
            part.loss,
            part.tokens,
            part.computed,
            part.pairs,
            part.gap_sum,
            part.gap_tokens,
            *(part.sums[n] for n in names),
        ]
        sums, largest = (torch.tensor(v, dtype=torch.float64, device=self.device) for v in (counters, part.gap_max))
        dist.all_reduce(sums)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        part.loss, tokens, computed, pairs, part.gap_sum, gap_tokens, *totals = sums.tolist()
        part.tokens, part.computed, part.pairs, part.gap_tokens = map(int, (tokens, computed, pairs, gap_tokens))
        part.gap_max = float(largest)
        part.sums |= dict(zip(names, totals, strict=True))

    def _gather(
        self, found: dict[tuple[int, int], Values], *, everywhere: bool = False
    ) -> dict[tuple[int, int], Values]:
        parts: list[Any] | None = [None] * self.ranks if self.rank == 0 or everywhere else None
        if everywhere:
            assert parts is not None
            dist.all_gather_object(parts, found)
        else:
            dist.gather_object(found, parts)
        return {key: value for part in parts or () for key, value in part.items()}

    def notes(self, cache_bytes: int) -> list[tuple[EventKind, str]]:
        if not self.like.is_cuda:
            return []
        shards, rest = (sum(map(held_bytes, tensors)) for tensors in (self.model.parameters(), self.optimizer.masters))
        shards += self.optimizer.dithered.nbytes if self.optimizer.dithered is not None else 0
        where = "CPU memory" if self.config.cluster.offload else "memory"
        plan = (
            f"{self.ranks} ranks, each with {(shards + 3 * rest) / 2**30:.1f} GiB of weights, optimizer and gradients "
            f"in {where} and {cache_bytes / 2**30:.1f} GiB of key/value cache; up to "
            f"{self.budget.max_tokens:,} tokens per micro-batch on each"
        )
        return [(EventKind.PLAN, plan)]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full weights, one by one, on every rank and in the compute dtype."""
        for name, tensor in files.without_tied(self.causal_lm, merged(self.model)):
            yield name, gather_full(tensor, self.device, self.compute)

    def save(self, folder: Path) -> files.TensorFiles:
        """Write the model on rank 0, and each rank's shard of the optimizer. All ranks must see the same `folder`."""
        state: dict[str, Tensor] = {}
        for name, tensor in merged(self.model).items():
            full = gather_full(tensor, self.device, self.compute)
            if self.rank == 0:
                state[name] = full.cpu()
        adapters = {n: gather_full(t, self.device, t.dtype).cpu() for n, t in adapter_state(self.model).items()}
        if self.rank == 0:
            save_dense(self.causal_lm, state, folder)
            if adapters:
                save_file(adapters, folder / files.ADAPTERS)
        with self.optimizer.exact_masters():
            shardfiles.write(self._optimizer_state(), folder)
        return {}

    def _optimizer_state(self) -> dict[str, Tensor]:
        """Return the state that a single process would have: with bf16 weights it includes the float32 masters."""
        state = self.optimizer.state_dict()
        if self.compute == torch.bfloat16:
            named = zip(self.optimizer.names, self.optimizer.masters, strict=True)
            state |= {f"master/{name}": master.detach() for name, master in named}
        return state

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        if isinstance(self.model, PeftModel):
            self._restore_adapters(load_file(folder / files.ADAPTERS))
        saved = shardfiles.names(folder)
        state: dict[str, Tensor] = {}
        for name, master in zip(self.optimizer.names, self.optimizer.masters, strict=True):
            for key in ("exp_avg", "exp_avg_sq", "master"):
                if f"{key}/{name}" in saved:
                    state[f"{key}/{name}"] = torch.zeros_like(master.detach())
            if f"step/{name}" in saved:
                state[f"step/{name}"] = torch.zeros((), device=master.device)
        shardfiles.read_into(state, folder)
        with self.optimizer.exact_masters():
            for name, master in zip(self.optimizer.names, self.optimizer.masters, strict=True):
                if f"master/{name}" in state:
                    master.copy_(state[f"master/{name}"])
        self.optimizer.load_state_dict(state)

    def _restore_adapters(self, saved: dict[str, Tensor]) -> None:
        mesh = self.weight.device_mesh if isinstance(self.weight, DTensor) else None
        own = adapter_state(self.model)
        fitting = {
            name: distribute_tensor(tensor.to(self.device), mesh, like.placements).to(like.device)
            if isinstance(like := own.get(name), DTensor) else tensor
            for name, tensor in saved.items()
        }  # fmt: skip
        load_adapter_state(self.model, fitting)
