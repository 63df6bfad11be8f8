"""Where the parts of a run live: room is reserved in Ray's cluster, and processes are put into it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dapo.config import Config
from dapo.errors import ClusterError
from dapo.rewards.judge import names_model
from dapo.system.progress import progress

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

Bundle = dict[str, float]  # resources of one process, all on one node


def room(cpus: int = 1, gpus: int = 0) -> Bundle:
    return {"CPU": float(cpus), "GPU": float(gpus)} if gpus else {"CPU": float(cpus)}


@dataclass(frozen=True, slots=True)
class Demand:
    """What a run asks of a cluster: a bundle for each learner, each rollout worker and each reward worker.

    Without rollout workers every learner's bundle holds an engine too, and the two take turns.
    """

    learners: tuple[Bundle, ...]
    rollout_workers: tuple[Bundle, ...] = ()
    reward_workers: tuple[Bundle, ...] = ()

    @classmethod
    def of(cls, config: Config, *, on_gpu: bool) -> Demand:
        parallel = config.rollout.tensor_parallel
        if on_gpu and parallel > 1 and not config.rollout_gpus:
            raise ClusterError(
                f"rollout.tensor_parallel = {parallel} needs GPUs of its own: set cluster.rollout_workers"
            )
        judge = room(config.reward.workers or 1, _judge_gpus(config, on_gpu=on_gpu))
        return cls(
            (room(gpus=int(on_gpu)),) * config.cluster.learners,
            tuple(room(gpus=gpus if on_gpu else 0) for gpus in config.rollout_gpus),
            (judge,) * config.cluster.reward_workers,
        )

    @property
    def engines(self) -> int:
        return len(self.rollout_workers or self.learners)

    @property
    def bundles(self) -> list[Bundle]:
        return [*self.learners, *self.rollout_workers, *self.reward_workers]

    def learner(self, rank: int) -> tuple[int, Bundle]:
        """The bundle that it lives in, and its share of it."""
        part = 1.0 if self.rollout_workers else 0.5
        return rank, {name: part * amount for name, amount in self.learners[rank].items()}

    def engine(self, slot: int) -> tuple[int, Bundle]:
        if not self.rollout_workers:
            return self.learner(slot)
        return len(self.learners) + slot, self.rollout_workers[slot]

    def judge(self, slot: int) -> tuple[int, Bundle]:
        return len(self.learners) + len(self.rollout_workers) + slot, self.reward_workers[slot]

    def check(self, nodes: Sequence[Bundle]) -> None:
        """Every bundle needs a node of its own size: the largest first, each where it fits."""
        left = [dict(node) for node in nodes]
        for bundle in sorted(self.bundles, key=lambda bundle: (-bundle.get("GPU", 0.0), -bundle["CPU"])):
            place = next((node for node in left if all(node.get(k, 0.0) >= v for k, v in bundle.items())), None)
            if place is None:
                raise ClusterError(self._refusal(nodes))
            for name, amount in bundle.items():
                place[name] -= amount

    def _refusal(self, nodes: Sequence[Bundle]) -> str:
        needed, there = _total(self.bundles), _total(nodes)
        largest = max(nodes, key=lambda node: (node.get("GPU", 0.0), node.get("CPU", 0.0)))
        each = f", the largest with {words(largest)}" if len(nodes) > 1 else ""
        numbers = {"learners": self.learners, "rollout_workers": self.rollout_workers}
        if self.reward_workers:
            numbers["reward_workers"] = self.reward_workers
        *others, last = [f"cluster.{name} = {len(bundles)}" for name, bundles in numbers.items()]
        return (
            f"{', '.join(others)} and {last} need {words(needed)}, each process on one node, but "
            f"there are {words(there)} on {len(nodes)} node{'s' if len(nodes) > 1 else ''}{each}"
        )


class Placement:
    """Reserved room, a bundle per process."""

    def __init__(self, demand: Demand, timeout: float) -> None:
        from ray.util.placement_group import placement_group

        demand.check(_nodes())
        self.demand = demand
        # Close together: learners exchange every gradient, and one node's workers read the same copy of the weights.
        self.group: PlacementGroup = placement_group(demand.bundles, strategy="PACK")
        with progress(f"Waiting for room for {len(demand.bundles)} processes"):
            has_room = self.group.wait(timeout)
        if not has_room:
            self.remove()
            raise ClusterError(
                f"the cluster is large enough, but others use it: no room for {words(_total(demand.bundles))} "
                f"within {timeout:g} s (cluster.timeout)"
            )

    def options(self, place: tuple[int, Bundle]) -> dict[str, Any]:
        """For an actor that is to live there. It is never restarted by Ray: whoever made it knows how."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        index, share = place
        return {
            "num_cpus": share["CPU"],
            "num_gpus": share.get("GPU", 0.0),
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index),
        }

    def missing(self, places: Iterable[tuple[int, Bundle]]) -> str | None:
        """What those of these bundles need that have lost their node and found no other; None where all have one."""
        from ray.util.placement_group import placement_group_table

        table = placement_group_table(self.group)
        if table["state"] == "CREATED":
            return None
        nodes = table["bundles_to_node_id"]
        homeless = [self.demand.bundles[index] for index, _ in places if not nodes.get(index)]
        return f"{words(_total(homeless))} that left the cluster" if homeless else None

    def remove(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


def wants_gpus(config: Config, there: float | None = None) -> bool:
    """Whether learners and rollout workers run on GPUs, if so many are `there`; None: as many as Ray has."""
    device = config.model.device
    if device not in ("cpu", "cuda", "auto"):
        raise ClusterError(f"model.device is {device}, but Ray chooses which GPU a process gets: set auto, cuda or cpu")
    if there is None:
        import ray

        there = ray.cluster_resources().get("GPU", 0.0)
    return device == "cuda" or (device == "auto" and there > 0)


def _judge_gpus(config: Config, *, on_gpu: bool) -> int:
    """A reward model gets a GPU of its own, where others have theirs or it asks for one."""
    device = config.reward.model.device
    if not config.cluster.reward_workers or not names_model(config.reward):
        return 0
    if device not in ("cpu", "cuda", "auto"):
        raise ClusterError(f"reward.model.device is {device}, but Ray chooses the GPU: set auto, cuda or cpu")
    return int(device == "cuda" or (device == "auto" and on_gpu))


def words(resources: Bundle | Counter[str]) -> str:
    """CPUs and GPUs, in words."""
    amounts = {name: int(resources[name]) for name in ("CPU", "GPU") if name in resources}
    return " and ".join(f"{n} {name}{'s' if n != 1 else ''}" for name, n in amounts.items()) or "nothing"


def _nodes() -> list[Bundle]:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _total(bundles: Sequence[Bundle]) -> Counter[str]:
    total = Counter[str]()
    for bundle in bundles:
        total.update({name: int(bundle[name]) for name in ("CPU", "GPU") if name in bundle})
    return total
