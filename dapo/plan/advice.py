"""Advice on what to change in a recipe, derived from the bottleneck of its plan."""

from __future__ import annotations

from dapo.model.memory import GIB
from dapo.plan.estimate import Plan
from dapo.plan.hardware import is_latency_bound
from dapo.plan.learn import exchange_size


def advice(plan: Plan) -> list[str]:
    """Return sentences: the bottleneck and its remedy first, then other ways in which GPUs are wasted."""
    share = 100 * plan.critical[plan.bottleneck] / plan.seconds
    first = f"The bottleneck is {plan.bottleneck} ({share:.0f}%), bound by {plan.limit}: {_remedy(plan)}."
    return [first, *_host(plan), *_idle(plan)]


def _host(plan: Plan) -> list[str]:
    """Name what the host's memory and disk must have room for."""
    memory = plan.memory
    sizes = {
        "AdamW's moments ({}) are in the host's memory, and visit the GPU in each update.": memory.offloaded,
        "The frozen weights beneath the adapters ({}) are in the host's memory.": memory.offloaded_base,
        "Masters, gradients and moments ({} of each learner) are in the host's memory.": memory.offloaded_shard,
        "A checkpoint takes {} of disk{}.": memory.checkpoint,
    }
    # Learners in other processes write their checkpoints themselves.
    copied = (
        ", and a copy of it as much of the host's memory. If less than twice that is free, nothing is copied, and "
        "training waits until the checkpoint is written"
        if plan.layout.gpus == 1
        else ""
    )
    return [sentence.format(f"{size / GIB:.1f} GiB", copied) for sentence, size in sizes.items() if size]


def _remedy(plan: Plan) -> str:
    fuller = "decode more responses at once per engine, with more groups per round or fewer engines"
    slots, concurrent = plan.memory.slots, plan.work.concurrent
    responses = max(plan.work.rounds) * plan.work.n / plan.layout.engines  # of one engine
    if concurrent <= slots and concurrent < responses:
        fuller = f"decode more responses at once, with a larger rollout.max_concurrent (now {concurrent:,})"
    elif slots < min(concurrent, responses):
        larger = "more tensor parallelism" if plan.layout.is_vllm else "a larger rollout.kv_memory_fraction"
        fuller = f"decode more responses at once; the cache has room for {slots:,.0f}, and {larger} makes room for more"
    tail = "rollout.mode=inflight fills the empty slots with other responses"
    if plan.work.is_inflight:
        tail = "a larger algorithm.max_staleness gives long responses more time"
    remedies = {
        "empty slots": f"{tail}; a smaller data.max_response_length or an overlong penalty makes responses shorter; "
        "more GPUs do not help",
        "reading weights": fuller,
        "reading keys and values": "use more GPUs, or a model with fewer key/value heads",
        "compute": f"use more GPUs, or fewer tokens: {_fewer_tokens(plan)}",
        "fixed cost of a step": fuller,
        "groups per second": "use fewer and larger groups; a single driver dispatches all of them",
        "the judges": "use more reward.workers",
        "the network": "use larger mini-batches (optim.ppo_mini_batch_size), which exchange less often, fewer "
        "learners, or a faster network (--network)",
        "the host": "use larger mini-batches, so that the host launches fewer and fuller micro-batches",
        "the host's memory": "use cluster.offload=false with more GPUs, or larger mini-batches",
        "the longest response": "use larger mini-batches: all ranks wait for the one with the longest response",
    }
    return remedies[plan.limit]


def _fewer_tokens(plan: Plan) -> str:
    ways = {
        "shorter responses": True,
        "algorithm.ledger.enable": not plan.work.uses_ledger,
        "fewer optim.ppo_epochs": plan.work.epochs > 1,
    }
    return ", ".join(way for way, is_open in ways.items() if is_open)


def _idle(plan: Plan) -> list[str]:
    """Name engines and learners that have nothing to do."""
    sentences = []
    work, layout = plan.work, plan.layout
    groups = max(work.rounds)
    if layout.engines > groups:
        sentences.append(
            f"Only {groups:,.0f} of {layout.engines:,} engines have a group: data.gen_batch_size is too small."
        )
    responses = work.trained_groups / work.updates * work.n
    if layout.learners > responses:
        sentences.append(
            f"Only {responses:,.0f} of {layout.learners:,} learners have a response to train on in each update: "
            "optim.ppo_mini_batch_size is too small."
        )
    if is_latency_bound(plan.gpu, layout.learners, *exchange_size(plan.shape)):
        sentences.append(
            f"The network: exchanges among {layout.learners:,} learners are bound by latency, not by bandwidth; more "
            "learners make them slower."
        )
    return [*sentences, *_sides(plan)]


def _sides(plan: Plan) -> list[str]:
    """Name what the split into GPUs that sample and GPUs that train wastes."""
    layout = plan.layout
    if not layout.rollout_gpus:
        dedicated = "An engine on several GPUs needs dedicated ones: --rollout-share sets the share that only samples."
        return [dedicated] if layout.tensor_parallel > 1 else []
    if not plan.work.is_inflight:
        return ["Engines and learners wait for each other: rollout.mode=inflight keeps both busy."]
    sampling, training = plan.sampling.seconds + plan.rewards, plan.reference + plan.learning.seconds
    faster = "learners" if sampling > training else "engines"
    idle = 1 - min(sampling, training) / max(sampling, training)
    return [f"The {faster} are idle {100 * idle:.0f}% of the time: --rollout-share balances the two sides."]
