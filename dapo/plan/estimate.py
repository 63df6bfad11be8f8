"""A step of a recipe on N GPUs of a kind: memory, seconds by phase, the bottleneck, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dapo.config import Config
from dapo.errors import ConfigError
from dapo.plan.decode import BYTES, Generation, Sampler, generation
from dapo.plan.hardware import NODE, Gpu, collective_seconds, powers_of_two
from dapo.plan.learn import Learner, Learning, forward_seconds, update
from dapo.plan.memory import DoesNotFit, Layout, Memory, memory
from dapo.plan.shapes import Shape, model_shape
from dapo.plan.workload import Workload

_MOST_GPUS = 1 << 14


@dataclass(frozen=True, slots=True)
class Plan:
    shape: Shape
    gpu: Gpu
    layout: Layout
    work: Workload
    memory: Memory
    sampling: Generation
    learning: Learning
    rewards: float  # waiting for the judge after the last response
    reference: float
    sync: float

    @property
    def phases(self) -> dict[str, float]:
        """Seconds, in the order in which a step goes through them."""
        return {
            "sampling": self.sampling.full,
            "the longest responses": self.sampling.tail,
            "the driver": self.sampling.driver,
            "rewards": self.rewards,
            "reference": self.reference,
            "update": self.learning.seconds,
            "weight sync": self.sync,
        }

    @property
    def critical(self) -> dict[str, float]:
        """The phases that a step waits for: all, or those of the slower side where both sides work all the time."""
        if not (self.layout.rollout_gpus and self.work.is_inflight):
            return self.phases
        sides = ("sampling", "the longest responses", "the driver", "rewards"), ("reference", "update")
        slower = max(sides, key=lambda side: sum(self.phases[name] for name in side))
        return {name: seconds for name, seconds in self.phases.items() if name in (*slower, "weight sync")}

    @property
    def seconds(self) -> float:
        return sum(self.critical.values())

    @property
    def bottleneck(self) -> str:
        return max(self.critical, key=lambda name: self.critical[name])

    @property
    def limit(self) -> str:
        """What the bottleneck is bound by."""
        limits = {
            "sampling": self.sampling.limit,
            "the longest responses": "empty slots",
            "the driver": "groups per second",
            "rewards": "the judges",
            "reference": "products",
            "update": self.learning.limit,
            "weight sync": "the network",
        }
        return limits[self.bottleneck]


def estimate(
    config: Config,
    work: Workload,
    gpu: Gpu,
    gpus: int,
    *,
    rollout_gpus: int = 0,
    tensor_parallel: int = 0,
) -> Plan:
    """`tensor_parallel` 0: the recipe's, or the fastest that fits. Refused with what would fit, where nothing does."""
    if not tensor_parallel and config.rollout.tensor_parallel > 1:
        tensor_parallel = config.rollout.tensor_parallel
    _check(config, gpus, rollout_gpus, tensor_parallel)
    shape = model_shape(config.model.path)
    found = _plans(config, work, shape, gpu, gpus, rollout_gpus, tensor_parallel)
    plans = [plan for plan in found if isinstance(plan, Plan)]
    if plans:
        return min(plans, key=lambda plan: plan.seconds)
    reason = next(fault for fault in reversed(found) if isinstance(fault, DoesNotFit))
    raise DoesNotFit(f"{reason}{_way_out(config, work, shape, gpu, gpus, rollout_gpus, tensor_parallel)}")


def is_vllm(config: Config) -> bool:
    return config.uses_vllm


def _check(config: Config, gpus: int, rollout_gpus: int, tensor_parallel: int) -> None:
    if gpus < 1:
        raise ConfigError(f"--gpus is {gpus}, but must be at least 1")
    if not 0 <= rollout_gpus < gpus:
        raise ConfigError(f"of {gpus} GPUs {rollout_gpus} would sample only, and none would be left to train")
    if config.model.dtype == "float32":
        raise ConfigError("model.dtype float32: a plan is made for bfloat16, which is what was measured")
    most = min(NODE, rollout_gpus or gpus) if is_vllm(config) else 1
    if tensor_parallel and tensor_parallel not in powers_of_two(most):
        what = f"1 to {most}, a power of two" if is_vllm(config) else "1 unless rollout.engine is vllm"
        raise ConfigError(f"--tensor-parallel is {tensor_parallel}, but must be {what}")


def _plans(
    config: Config, work: Workload, shape: Shape, gpu: Gpu, gpus: int, rollout_gpus: int, tensor_parallel: int
) -> list[Plan | DoesNotFit]:
    # An engine on several GPUs needs them for itself; colocated it is planned only where it is asked for.
    most = min(NODE, rollout_gpus) if is_vllm(config) and rollout_gpus else 1
    ways = [tensor_parallel] if tensor_parallel else powers_of_two(most)
    found: list[Plan | DoesNotFit] = []
    for way in ways:
        try:
            layout = Layout(gpus, rollout_gpus, way, is_vllm(config))
            found.append(_plan(config, work, shape, gpu, layout))
        except DoesNotFit as fault:
            found.append(fault)
    return found


def _plan(config: Config, work: Workload, shape: Shape, gpu: Gpu, layout: Layout) -> Plan:
    room = memory(config, shape, gpu, layout, work)
    sampler = Sampler(shape, gpu, layout.is_vllm, layout.tensor_parallel, room.slots)
    learner = Learner(shape, gpu, layout.learners, room.micro_tokens, room.recomputes, config.cluster.offload)
    sampling = generation(sampler, work, layout.engines)
    judged = sum(work.rounds) if config.algorithm.kl_reward_coef > 0 else work.trained_groups
    moved = 0.0 if layout.shares_weights else BYTES * shape.parameters
    return Plan(
        shape,
        gpu,
        layout,
        work,
        room,
        sampling,
        update(learner, work),
        rewards=_reward_wait(work, sampling.seconds),
        reference=forward_seconds(learner, work, judged) if config.needs_reference else 0.0,
        sync=collective_seconds(gpu, layout.gpus, moved, shape.num_hidden_layers + 1),
    )


def _reward_wait(work: Workload, sampling_seconds: float) -> float:
    """Judges work while others are sampled. A step waits for what they are behind, at least for each last group."""
    one = work.judge_seconds / work.judges
    last = len(work.rounds) * work.n * one
    return max(last, sum(work.rounds) * work.n * one - sampling_seconds)


def _way_out(
    config: Config, work: Workload, shape: Shape, gpu: Gpu, gpus: int, rollout_gpus: int, tensor_parallel: int
) -> str:
    """What would make it fit: the least number of GPUs, doubling; optimizer state in the host's memory."""

    def fits(config: Config, count: int) -> bool:
        share = rollout_gpus * count // gpus
        return any(isinstance(p, Plan) for p in _plans(config, work, shape, gpu, count, share, tensor_parallel))

    more = next((count for count in _doubled(gpus) if fits(config, count)), None)
    ways = [] if more is None else [f"{more:,} such GPUs"]
    resting = config.cluster.model_copy(update={"offload": True})
    if gpus > 1 and fits(config.model_copy(update={"cluster": resting}), gpus):
        ways.append("cluster.offload=true")
    if ways:
        return f"; {' or '.join(ways)} would do"
    more_ways = "a smaller data.max_response_length or GPUs with more memory may"
    if not is_vllm(config):
        more_ways += ", and so may rollout.engine=vllm on GPUs of its own (--rollout-share)"
    return f"; more such GPUs would not help, {more_ways}"


def _doubled(gpus: int) -> Iterator[int]:
    while (gpus := 2 * gpus) <= _MOST_GPUS:
        yield gpus
