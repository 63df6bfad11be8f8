"""What to change, from what a plan is bound by."""

from __future__ import annotations

from dapo.plan.estimate import Plan
from dapo.plan.hardware import waits_for_hops
from dapo.plan.learn import exchanged


def advice(plan: Plan) -> list[str]:
    """The bottleneck first, then what else wastes GPUs."""
    share = 100 * plan.critical[plan.bottleneck] / plan.seconds
    first = f"The bottleneck is {plan.bottleneck} ({share:.0f} %), bound by {plan.limit}: {_remedy(plan)}."
    return [first, *_idle(plan)]


def _remedy(plan: Plan) -> str:
    fuller = "more responses for each engine at once, with more groups a round or fewer engines"
    slots = plan.memory.slots
    if slots < min(plan.work.concurrent, max(plan.work.rounds) * plan.work.n / plan.layout.engines):
        room = "larger tensor parallelizm" if plan.layout.is_vllm else "a larger rollout.kv_memory_fraction"
        fuller = f"more responses at once; the cache has room for {slots:,.0f}, and {room} makes more"
    meanwhile = "rollout.mode=inflight lets others be sampled meanwhile"
    if plan.work.is_inflight:
        meanwhile = "a larger algorithm.max_staleness leaves them more time"
    remedies = {
        "empty slots": f"{meanwhile}; a smaller data.max_response_length or an overlong penalty makes them shorter; "
        "more GPUs do not help",
        "reading weights": fuller,
        "reading keys and values": "more GPUs, or a model with fewer key/value heads",
        "products": "more GPUs, or fewer tokens: shorter responses, the ledger, fewer epochs",
        "fixed cost of a step": fuller,
        "groups per second": "fewer and larger groups; one driver hands them all out",
        "the judges": "more reward.workers",
        "the network": "larger mini-batches (optim.ppo_mini_batch_size) for fewer exchanges, fewer learners, or a "
        "faster network (--network)",
        "the host": "larger mini-batches, so that fewer and fuller micro-batches are issued",
        "the host's memory": "cluster.offload=false with more GPUs, or larger mini-batches",
        "the longest response": "larger mini-batches: the rank with the longest response keeps the others waiting",
    }
    return remedies[plan.limit]


def _idle(plan: Plan) -> list[str]:
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
    if waits_for_hops(plan.gpu, layout.learners, *exchanged(plan.shape)):
        sentences.append(
            f"The network: exchanges among {layout.learners:,} learners wait for hops, not for bytes; more of "
            "them make it slower."
        )
    return [*sentences, *_sides(plan)]


def _sides(plan: Plan) -> list[str]:
    """What the division into GPUs that sample and GPUs that train wastes."""
    layout = plan.layout
    if not layout.rollout_gpus:
        own = "An engine on several GPUs needs them for itself: --rollout-share says how many only sample."
        return [own] if layout.tensor_parallel > 1 else []
    if not plan.work.is_inflight:
        return ["Engines and learners wait for each other: rollout.mode=inflight keeps both at work."]
    ahead = plan.sampling.seconds + plan.rewards, plan.reference + plan.learning.seconds
    side = "learners" if ahead[0] > ahead[1] else "engines"
    return [f"The {side} wait {100 * (1 - min(ahead) / max(ahead)):.0f} % of the time: --rollout-share balances them."]
