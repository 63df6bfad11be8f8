"""The model that learns: one update per mini-batch, and the log-probabilities of an optional reference model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dapo.algorithm.correction import correction_weights
from dapo.algorithm.loss import policy_loss
from dapo.checkpoint import weights as files
from dapo.config import Config
from dapo.config.functions import CustomParts
from dapo.errors import ModelError
from dapo.model.attention import AttentionPlan
from dapo.model.features import prompt_features
from dapo.model.forward import (
    free_memory,
    head_weight,
    hidden_states,
    is_faster_in_bfloat16,
    is_slower_without_compiler,
    kernel_obstacle,
    packed_plan,
)
from dapo.model.joined import merge, separate_bases
from dapo.model.lora import causal_lm, merged, reference_mode
from dapo.model.meter import peak_flops, training_flops
from dapo.model.trunk import joined_weights, trunk_of
from dapo.policy.budget import Budget, division
from dapo.policy.captured import CapturedBackward
from dapo.policy.head import (
    ChunkLoss,
    HeadResult,
    after_all_logprobs,
    chunked_logprobs,
    fused_head_loss,
    gather_predictors,
)
from dapo.policy.offload import host_bytes
from dapo.policy.optimizer import Optimizer, held_bytes
from dapo.policy.packing import Batch, micro_batches, mini_batches, reference_batches
from dapo.policy.protocol import UpdateResult
from dapo.policy.rules import UpdateRules
from dapo.policy.tally import Tally, by_rollout
from dapo.system.machine import memory, size_text
from dapo.types import EventKind, Group, Prompt

MAX_NON_FINITE_STEPS = 3
Values = TypeVar("Values")

REFERENCE_TOKENS = 4096  # per micro-batch, where no gradient is needed
FASTER = (
    "a CPU with AVX-512 bf16, such as this one, may train faster in bfloat16 (an AMD EPYC: about 1.5 times as fast as "
    "in float32): add model.dtype=bfloat16 to a new run"
)
WITHOUT_COMPILER = (
    "PyTorch computes the model; the kernels in C sample about twice as fast on this kind of CPU, but are missing: {}"
)
WITHOUT_KERNELS = (
    "bfloat16 without the kernels in C: {}. The log-probabilities of sampler and trainer differ by about 0.02 on "
    "average; model.dtype=float32 is more exact"
)


class Policy:
    """Owns the trained weights and the optimizer.

    `reference` is a frozen model. With adapters it is None: the reference is the model with its adapters off.
    `parts` are functions of the user that were given as objects.
    """

    rank, ranks = 0, 1
    lends_memory = False  # whether gradients are freed after each update, to leave their memory to the sampler

    def __init__(
        self,
        model: Any,
        config: Config,
        reference: Any | None = None,
        *,
        share_prompts: bool = True,
        parts: CustomParts | None = None,
    ) -> None:
        self.model = model
        self.causal_lm = causal_lm(model)
        self.reference = reference
        self.config = config
        self.rules = UpdateRules.of(config, parts)
        self.share_prompts = share_prompts
        self.weight = head_weight(self.causal_lm)
        self.like = self.weight  # a tensor with the device and the dtype to compute in
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.trunk = trunk_of(self.causal_lm)
        if self.trunk.adapted and self.weight.is_cuda:
            separate_bases(self.trunk.adapted, free_memory(self.weight.device))
        joined = joined_weights(self.trunk, self.weight)
        self.optimizer = Optimizer(trainable, config.optim, joined)
        self.packed_ahead: tuple[list[Group], int, list[Batch]] | None = None  # groups, tokens at most, micro-batches
        self.cache_bytes = 0  # of the sampler's cache, which an update may use when memory is short
        self.sampler_bytes = 0  # of the sampler besides its cache
        self.reserved_bytes = 0  # that the sampler's cache must leave free
        self._divide_memory()
        self.captured: CapturedBackward | None = None
        can_capture = self.weight.is_cuda and not self.lends_memory  # a graph holds the gradients' addresses
        if joined and can_capture and not self.rules.is_custom_loss:  # a graph holds no Python code
            parameters = sum(parameter.numel() for parameter in model.parameters())
            self.captured = CapturedBackward(self._forward_backward, parameters, self.weight.device)
        self.non_finite_in_a_row = 0

    def _divide_memory(self) -> None:
        """Decide where the moments are, and whether sampler and update use the same memory in turns."""
        gradients, moments = self.optimizer.gradient_bytes, self.optimizer.pending_moment_bytes
        may_lend = self.config.rollout.mode == "strict"  # in flight, the cache is never empty
        longest = self.config.longest
        found = division(self.causal_lm, self.trunk, gradients, moments, may_lend=may_lend, longest=longest)
        self.optimizer.offloads, self.lends_memory, self.reserved_bytes = found.offloads, found.lends, found.reserved
        host, needed = memory()[1], host_bytes(self.optimizer.masters)
        if found.offloads and host is not None and host < needed:
            raise ModelError(
                f"AdamW's moments take {size_text(needed)}, but fit neither on the GPU nor into the host's memory, of "
                f"which {size_text(host)} are free; train adapters (model.lora.rank), or use a smaller model"
            )

    def notes(self, cache_bytes: int) -> list[tuple[EventKind, str]]:
        if self.weight.is_cuda:
            return [(EventKind.PLAN, self._memory_plan(cache_bytes))]
        if is_faster_in_bfloat16(self.causal_lm):
            return [(EventKind.PLAN, FASTER)]
        if self.weight.dtype == torch.bfloat16 and (reason := kernel_obstacle(self.causal_lm)) is not None:
            return [(EventKind.KERNELS, WITHOUT_KERNELS.format(reason))]
        if is_slower_without_compiler(self.causal_lm):
            return [(EventKind.PLAN, WITHOUT_COMPILER.format(kernel_obstacle(self.causal_lm)))]
        return []

    def _memory_plan(self, cache_bytes: int) -> str:
        held = [t.data.untyped_storage() for t in (*self.model.parameters(), *(w.value for w in self.trunk.adapted))]
        weights = sum({s.data_ptr(): s.nbytes() for s in held if s.device.type == "cuda"}.values())
        masters = sum(held_bytes(m) for m in self.optimizer.masters if m.dtype != self.weight.dtype)
        trained = self.optimizer.gradient_bytes
        state = masters + (1 if self.optimizer.offloads else 3) * trained
        remarks = ", activations are recomputed" if self.budget.recompute else ""
        if self.optimizer.offloads:
            moments = host_bytes(self.optimizer.masters)
            remarks += f", AdamW's moments take {moments / 2**30:.1f} GiB of the host's memory"
        remarks += ", the cache is freed for each update" * self.budget.needs_engine_memory
        remarks += ", the frozen base weights are in CPU memory" * any(s.device.type == "cpu" for s in held)
        return (
            f"weights {weights / 2**30:.1f} GiB, optimizer and gradients {state / 2**30:.1f} GiB, "
            f"key/value cache {cache_bytes / 2**30:.1f} GiB; up to {self.budget.max_tokens:,} tokens per "
            f"micro-batch{remarks}"
        )

    @cached_property
    def budget(self) -> Budget:
        """The memory budget of an update, computed from the free memory when it is first needed."""
        pending_bytes = self.optimizer.pending_bytes + (0 if self.lends_memory else self.sampler_bytes)
        found = Budget.of(
            self.causal_lm, self.trunk, self.config.optim, pending_bytes, self.cache_bytes, lends=self.lends_memory,
            graph_tokens=self.captured.sizes[-1] if self.captured is not None and self.captured.sizes else 0,
            most=self.config.update_tokens, longest=self.config.longest,
        )  # fmt: skip
        if self.captured is not None:
            self.captured.sizes = [size for size in self.captured.sizes if size <= found.graph_tokens]
        return found

    @property
    def needs_engine_memory(self) -> bool:
        return self.budget.needs_engine_memory

    def update(self, groups: Sequence[Group], step: int, version: int) -> UpdateResult:
        """Run all epochs and mini-batches over one batch, each mini-batch with one optimizer step."""
        tally = Tally()
        size, seed, batch_size = self.config.mini_batch_size, self.config.run.seed, self.config.data.train_batch_size
        parts = [
            (epoch, part)
            for epoch in range(self.config.optim.ppo_epochs)
            for part in mini_batches(groups, size, seed, step, epoch, batch_size=batch_size)
        ]
        if self.rules.correction != "none" and len(parts) > 1:  # the first update itself sees the weights of the start
            start = self._rollout_logprobs(self.causal_lm, groups, everywhere=True)
            started = {g.serial: tuple(start[g.serial, r.index] for r in g.rollouts) for g in groups}
            parts = [(epoch, [replace(g, start_logprobs=started[g.serial]) for g in part]) for epoch, part in parts]
        for index, (epoch, part) in enumerate(parts):
            following = parts[index + 1][1] if index + 1 < len(parts) else []
            self._update_mini_batch(part, following, step, version, tally, is_first=index == 0, record=epoch == 0)
            if tally.stop:
                break
        if self.lends_memory:
            self.optimizer.release_grad_buffers()
            torch.cuda.empty_cache()  # or the cache, which is one tensor, would find only pieces
        metrics = tally.metrics(self.rules.learning_rate(step))
        return UpdateResult(
            metrics,
            self._gather(tally.token_stats),
            updates=len(tally.norms),
            computed=tally.computed,
            pairs=tally.pairs,
            stop=tally.stop,
            notes=tuple(tally.notes),
        )

    def _update_mini_batch(
        self,
        groups: list[Group],
        following: list[Group],
        step: int,
        version: int,
        tally: Tally,
        *,
        is_first: bool,
        record: bool,
    ) -> None:
        """Make one optimizer step on a mini-batch, micro-batch by micro-batch."""
        results = self._gradients(groups, version, tally)
        # While the GPU computes, the host packs the next mini-batch. It reads results only after that, so that the GPU
        # runs all micro-batches without waiting for it.
        if following:
            batches = self._micro_batches(following, version)
            self.packed_ahead = following, self.budget.max_tokens, batches
        part = Tally()
        for batch, result in results:
            part.count(batch, result, is_first=is_first, record=record)
        self._reduce(part)
        tally.add(part)
        loss = part.loss
        if is_first and self._gap_is_too_wide(tally):
            self.optimizer.zero_grad()
            return
        norm = self.optimizer.step(self.rules.learning_rate(step)) if math.isfinite(loss) else math.nan
        self.optimizer.zero_grad()
        if not math.isfinite(norm):
            self._skip_non_finite(tally, loss, norm)
            return
        merge(self.trunk.adapted)
        self.non_finite_in_a_row = 0
        tally.losses.append(loss)
        tally.norms.append(norm)

    def _reduce(self, part: Tally) -> None:
        """Sum a tally over all ranks, so that all make the same decisions. Nothing to do for one process."""

    def _gather(
        self, found: dict[tuple[int, int], Values], *, everywhere: bool = False
    ) -> dict[tuple[int, int], Values]:
        """Gather the values per rollout of all ranks on rank 0, or on all ranks. Nothing to do for one process."""
        return found

    def _gradients(self, groups: list[Group], version: int, tally: Tally) -> list[tuple[Batch, HeadResult]]:
        """Compute the gradients of a mini-batch. On running out of memory, start over with half the tokens at once.

        The gradient does not depend on the split.
        """
        while True:
            self.optimizer.zero_grad()
            self.optimizer.zero_grad_buffers()
            batches = self._micro_batches(groups, version)
            largest = max(len(batch.tokens_T) for batch in batches)
            try:
                return [(batch, self._backward(batch)) for batch in batches]
            except torch.cuda.OutOfMemoryError as error:
                if all(len(batch.rollouts) == 1 for batch in batches):
                    raise ModelError(
                        f"a single response of {largest} tokens with its prompt does not fit into the GPU's memory; "
                        "lower rollout.kv_memory_fraction, or data.max_response_length"
                    ) from error
            # A response that is longer than the limit is never split. Half of it could be more than the limit.
            half = max(1, min(largest, self.budget.max_tokens) // 2)
            tally.notes.append(f"an update ran out of memory with {largest} tokens per micro-batch; now {half}")
            self.budget = replace(self.budget, max_tokens=half)
            torch.cuda.empty_cache()

    def _micro_batches(self, groups: list[Group], version: int) -> list[Batch]:
        ahead, self.packed_ahead = self.packed_ahead, None
        if ahead and ahead[0] is groups and ahead[1] == self.budget.max_tokens:
            return ahead[2]
        return micro_batches(
            groups,
            self.config.algorithm.loss_agg_mode,
            self.budget.max_tokens,
            version,
            self.like,
            share_prompts=self.share_prompts,
            rank=self.rank,
            ranks=self.ranks,
        )

    def _backward(self, batch: Batch) -> HeadResult:
        result = self.captured(batch) if self.captured is not None and not self.budget.recompute else None
        if result is None:
            result = self._forward_backward(batch, self._plan(self.causal_lm, batch))
        return result

    def _plan(self, model: Any, batch: Batch) -> AttentionPlan:
        return packed_plan(model, batch.families, batch.positions_T)

    def _forward_backward(self, batch: Batch, plan: AttentionPlan) -> HeadResult:
        """Run a micro-batch through trunk and head, and add the gradient of its weighted loss to every parameter's."""
        hidden_R = self._hidden(self.causal_lm, batch, plan)
        temperature, weight_grad = self.config.rollout.temperature, self.optimizer.grad_of(self.weight)
        loss = self._chunk_loss(batch, hidden_R, self.weight)
        result, grad_hidden_R = fused_head_loss(
            hidden_R, self.weight, batch.targets_R, temperature, loss, weight_grad, self.budget.head_bytes // 2
        )
        hidden_R.backward(grad_hidden_R)
        return result

    def _chunk_loss(self, batch: Batch, hidden_R: Tensor, weight: Tensor) -> ChunkLoss:
        """Return the weighted loss of a chunk of tokens. `hidden_R` and `weight` are those of the head."""
        loss, config, correction = self.rules.loss.function, self.rules.loss_config, self.rules.correction
        has_reference = config.kl_coef > 0 and batch.ref_logprobs_R is not None

        def loss_of(logprobs: Tensor, chunk: slice) -> tuple[Tensor, dict[str, Tensor]]:
            reference = batch.ref_logprobs_R[chunk] if has_reference and batch.ref_logprobs_R is not None else None
            old, advantages, responses = (
                values[chunk] for values in (batch.old_logprobs_R, batch.advantages_R, batch.responses_R)
            )
            weights, corrections = None, {}
            if correction != "none":
                start = logprobs.detach() if batch.start_logprobs_R is None else batch.start_logprobs_R[chunk]
                weights, corrections = correction_weights(start, old, responses, correction)
                old = start
            loss_T, metrics = policy_loss(logprobs, old, advantages, reference, config, responses, loss, weights)
            return loss_T * batch.weights_R[chunk], metrics | corrections

        if self.rules.per_token:
            return loss_of
        temperature, chunk_bytes = self.config.rollout.temperature, self.budget.head_bytes // 2
        return after_all_logprobs(hidden_R, weight, batch.targets_R, temperature, loss_of, chunk_bytes)

    def _hidden(self, model: Any, batch: Batch, plan: AttentionPlan) -> Tensor:
        hidden_T = hidden_states(model, batch.tokens_T, batch.positions_T, plan, recompute=self.budget.recompute)
        return gather_predictors(hidden_T, batch.predictors_R)

    @torch.no_grad()
    def _rollout_logprobs(
        self, model: Any, groups: Sequence[Group], *, everywhere: bool = False
    ) -> dict[tuple[int, int], np.ndarray]:
        """Return a model's log-probabilities of the tokens of each rollout, by (serial, index), as `_gather` does."""
        found: dict[tuple[int, int], np.ndarray] = {}
        for batch in reference_batches(groups, REFERENCE_TOKENS, self.like, rank=self.rank, ranks=self.ranks):
            logprobs_R = self._logprobs(model, batch)
            for rollout, values in by_rollout(batch.rollouts, logprobs_R) if batch.rollouts else ():
                found[rollout.serial, rollout.index] = values
        return self._gather(found, everywhere=everywhere)

    def reference_logprobs(self, groups: Sequence[Group]) -> list[tuple[np.ndarray, ...]]:
        with self._reference_model() as model:
            found = self._rollout_logprobs(model, groups)
        if self.rank > 0:
            return []
        return [tuple(found[group.serial, r.index] for r in group.rollouts) for group in groups]

    def prompt_features(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Return features [N, d] of prompts by the current weights, for the forecast of their pass rates."""
        return prompt_features(self.causal_lm, [prompt.tokens for prompt in prompts])

    def _logprobs(self, model: Any, batch: Batch) -> Tensor:
        hidden_R = self._hidden(model, batch, self._plan(model, batch))
        temperature, chunk_bytes = self.config.rollout.temperature, self.budget.head_bytes // 2
        return chunked_logprobs(hidden_R, head_weight(model), batch.targets_R, temperature, chunk_bytes)

    @contextmanager
    def _reference_model(self) -> Iterator[Any]:
        with nullcontext() if self.reference is not None else reference_mode(self.model):
            yield self.reference if self.reference is not None else self.causal_lm

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all current weights with adapters merged. Tied weights come once."""
        return files.without_tied(self.causal_lm, merged(self.model))

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of weights, moments and master copies. Tokenizer and trainer state are small in comparison."""
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        pairs = zip(self.optimizer.parameters, self.optimizer.masters, strict=True)
        return weights + sum(m.numel() * m.element_size() * (2 if m is p else 3) for p, m in pairs)

    def save(self, folder: Path) -> files.TensorFiles:
        return files.begin(self.model, self.optimizer.state_dict(), folder)

    def restore(self, folder: Path) -> None:
        self.optimizer.load_state_dict(files.read(self.model, folder, "cpu"))
        merge(self.trunk.adapted)

    def efficiency(self, batch: Sequence[Group], update: UpdateResult, seconds: float) -> dict[str, float]:
        if not self.like.is_cuda or not batch:
            return {}
        peak = peak_flops(torch.cuda.get_device_name(self.like.device), self.like.dtype.itemsize)
        if peak is None:
            return {}
        flops = training_flops(
            self.causal_lm.config.get_text_config(),
            update.computed,
            update.pairs,
            head_tokens=self.config.optim.ppo_epochs * sum(group.trained_tokens for group in batch),
            frozen=self.config.model.lora.rank > 0,
        )
        return {"throughput/mfu": flops / max(seconds, 1e-9) / (peak * self.ranks)}

    def _gap_is_too_wide(self, tally: Tally) -> bool:
        limit = self.config.algorithm.max_logprob_gap if self.rules.correction == "none" else math.inf
        if tally.gap > limit:
            tally.stop = (
                f"the sampler's log-probabilities differ from the trainer's by {tally.gap:.4f} on average, more than "
                f"algorithm.max_logprob_gap = {limit}: the importance ratios would be wrong from the start; if the "
                "sampler is another program, algorithm.importance_correction can correct for it"
            )
        return tally.gap > limit

    def _skip_non_finite(self, tally: Tally, loss: float, norm: float) -> None:
        tally.skipped += 1
        self.non_finite_in_a_row += 1
        if self.non_finite_in_a_row >= MAX_NON_FINITE_STEPS:
            tally.stop = (
                f"{MAX_NON_FINITE_STEPS} optimizer steps in a row had a loss or gradient that is not finite "
                f"(loss {loss}, gradient norm {norm}) and were skipped; "
                f"lower optim.lr, or check the rewards{' and algorithm.loss' * self.rules.is_custom_loss}"
            )
