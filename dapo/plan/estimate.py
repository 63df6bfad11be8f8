"""The estimate of one step on N GPUs of one model: memory, seconds by phase, and the bottleneck."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
    """One step of a recipe on a layout of GPUs. Times are in seconds."""

    shape: Shape
    gpu: Gpu
    layout: Layout
    work: Workload
    memory: Memory
    sampling: Generation
    learning: Learning
    rewards: float  # waiting for the judges after the last response
    reference: float  # log-probabilities under the reference model
    sync: float  # weights from learners to engines

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase, in the order of a step."""
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
        """Phases that a step waits for: all of them, or only the slower side's if both sides work at once."""
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
        """The resource that the bottleneck is bound by."""
        limits = {
            "sampling": self.sampling.limit,
            "the longest responses": "empty slots",
            "the driver": "groups per second",
            "rewards": "the judges",
            "reference": "compute",
            "update": self.learning.limit,
            "weight sync": "the network",
        }
        return limits[self.bottleneck]


def estimate(
    config: Config, work: Workload, gpu: Gpu, gpus: int, *, rollout_gpus: int = 0, tensor_parallel: int = 0
) -> Plan:
    """Return the fastest plan that fits. If none does, raise DoesNotFit with what would.

    tensor_parallel: 0 means the recipe's value, or else the fastest that fits.
    """
    if not tensor_parallel and config.rollout.tensor_parallel > 1:
        tensor_parallel = config.rollout.tensor_parallel
    _check(config, gpus, rollout_gpus, tensor_parallel)
    shape = model_shape(config.model.path)
    found = _plans(config, work, shape, gpu, gpus, rollout_gpus, tensor_parallel)
    plans = [plan for plan in found if isinstance(plan, Plan)]
    if plans:
        return min(plans, key=lambda plan: plan.seconds)
    reason = next(error for error in reversed(found) if isinstance(error, DoesNotFit))
    raise DoesNotFit(f"{reason}{_remedy(config, work, shape, gpu, gpus, rollout_gpus, tensor_parallel)}")


def _check(config: Config, gpus: int, rollout_gpus: int, tensor_parallel: int) -> None:
    if gpus < 1:
        raise ConfigError(f"--gpus is {gpus}, but must be at least 1")
    if not 0 <= rollout_gpus < gpus:
        raise ConfigError(f"{rollout_gpus} of {gpus} GPUs would only sample, which leaves none to train")
    if config.model.dtype == "float32":
        raise ConfigError("model.dtype is float32, but plans are for bfloat16 only, which is what was measured")
    most = min(NODE, rollout_gpus or gpus) if config.uses_vllm else 1
    if tensor_parallel and tensor_parallel not in powers_of_two(most):
        what = f"a power of two from 1 to {most}" if config.uses_vllm else "1 unless rollout.engine is vllm"
        raise ConfigError(f"--tensor-parallel is {tensor_parallel}, but must be {what}")


def _plans(
    config: Config, work: Workload, shape: Shape, gpu: Gpu, gpus: int, rollout_gpus: int, tensor_parallel: int
) -> list[Plan | DoesNotFit]:
    """Return a plan, or why it does not fit, for each degree of tensor parallelism, in ascending order."""
    # An engine on several GPUs needs dedicated ones. Colocated, several are planned only on request.
    most = min(NODE, rollout_gpus) if config.uses_vllm and rollout_gpus else 1
    ways = [tensor_parallel] if tensor_parallel else powers_of_two(most)
    found: list[Plan | DoesNotFit] = []
    for way in ways:
        try:
            layout = Layout(gpus, rollout_gpus, way, config.uses_vllm)
            found.append(_plan(config, work, shape, gpu, layout))
        except DoesNotFit as error:
            found.append(error)
    return found


def _plan(config: Config, work: Workload, shape: Shape, gpu: Gpu, layout: Layout) -> Plan:
    room = memory(config, shape, gpu, layout, work)
    sampler = Sampler(shape, gpu, layout.is_vllm, layout.tensor_parallel, room.slots)
    learner = Learner(
        shape, gpu, layout.learners, room.micro_tokens, room.recomputes, config.cluster.offload, room.offloaded
    )
    sampling = generation(sampler, work, layout.engines)
    # A KL penalty in the reward needs the reference's log-probabilities of every group, one in the loss only of those
    # that are trained on.
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
    """Return how long a step waits for judges after sampling. They judge while others are sampled.

    The wait is their backlog, and at least the last group of each round, which nothing overlaps.
    """
    one = work.judge_seconds / work.judges
    last = len(work.rounds) * work.n * one
    return max(last, sum(work.rounds) * work.n * one - sampling_seconds)


def _remedy(
    config: Config, work: Workload, shape: Shape, gpu: Gpu, gpus: int, rollout_gpus: int, tensor_parallel: int
) -> str:
    """Name what would make the recipe fit: more GPUs (tried by doubling), or optimizer state in the host's memory."""

    def fits(config: Config, count: int, work: Workload = work) -> bool:
        share = rollout_gpus * count // gpus
        return any(isinstance(p, Plan) for p in _plans(config, work, shape, gpu, count, share, tensor_parallel))

    more = next((count for count in _doubled(gpus) if fits(config, count)), None)
    ways = [] if more is None else [f"{more:,} such GPUs"]
    offloaded = config.cluster.model_copy(update={"offload": True})
    if gpus > 1 and fits(config.model_copy(update={"cluster": offloaded}), gpus):
        ways.append("cluster.offload=true")
    adapters = config.model.model_copy(update={"lora": config.model.lora.model_copy(update={"rank": 16})})
    if gpus == 1 and config.model.lora.rank == 0 and fits(config.model_copy(update={"model": adapters}), gpus):
        ways.append("adapters (model.lora.rank=16, with optim.lr near 1e-4)")
    if ways:
        return f"; {' or '.join(ways)} would be enough"
    others = "GPUs with more memory may"
    if fits(config, gpus, replace(work, longest=1)):
        others = f"a smaller data.max_response_length or {others}"
    if not config.uses_vllm:
        others += ", and so may rollout.engine=vllm on dedicated GPUs (--rollout-share)"
    return f"; more such GPUs would not help, but {others}"


def _doubled(gpus: int) -> Iterator[int]:
    while (gpus := 2 * gpus) <= _MOST_GPUS:
        yield gpus
