"""Placement: the resources that a run needs, and the Ray placement group that reserves them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dapo.config import Config
from dapo.errors import ClusterError
from dapo.rewards.judge import uses_reward_model
from dapo.system.progress import progress

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

Bundle = dict[str, float]  # resources by name that one process needs, all on one node


def room(cpus: int = 1, gpus: int = 0) -> Bundle:
    return {"CPU": float(cpus), "GPU": float(gpus)} if gpus else {"CPU": float(cpus)}


@dataclass(frozen=True, slots=True)
class Demand:
    """The resources of a run: a bundle for each learner, each rollout worker and each reward worker.

    Bundle indices follow that order. Without rollout workers, each learner shares its bundle with an engine, and the
    two take turns.
    """

    learners: tuple[Bundle, ...]
    rollout_workers: tuple[Bundle, ...] = ()
    reward_workers: tuple[Bundle, ...] = ()

    @classmethod
    def of(cls, config: Config, *, on_gpu: bool, has_learners: bool = True) -> Demand:
        parallel = config.rollout.tensor_parallel
        if on_gpu and parallel > 1 and not config.rollout_gpus:
            raise ClusterError(
                f"rollout.tensor_parallel = {parallel} needs GPUs of its own: set cluster.rollout_workers"
            )
        judge = room(config.reward.workers or 1, _judge_gpus(config, on_gpu=on_gpu))
        return cls(
            (room(gpus=int(on_gpu)),) * (config.cluster.learners if has_learners else 0),
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
        """Return the index of a learner's bundle, and its share of the bundle's resources."""
        part = 1.0 if self.rollout_workers else 0.5
        return rank, {name: part * amount for name, amount in self.learners[rank].items()}

    def engine(self, slot: int) -> tuple[int, Bundle]:
        if not self.rollout_workers:
            return self.learner(slot)
        return len(self.learners) + slot, self.rollout_workers[slot]

    def judge(self, slot: int) -> tuple[int, Bundle]:
        return len(self.learners) + len(self.rollout_workers) + slot, self.reward_workers[slot]

    def check(self, nodes: Sequence[Bundle]) -> None:
        """Refuse a cluster that is too small. Greedy: the largest bundle goes first, to the first node with room."""
        left = [dict(node) for node in nodes]
        for bundle in sorted(self.bundles, key=lambda bundle: (-bundle.get("GPU", 0.0), -bundle["CPU"])):
            home = next((node for node in left if all(node.get(k, 0.0) >= v for k, v in bundle.items())), None)
            if home is None:
                raise ClusterError(self._refusal(nodes))
            for name, amount in bundle.items():
                home[name] -= amount

    def _refusal(self, nodes: Sequence[Bundle]) -> str:
        needed, available = _total(self.bundles), _total(nodes)
        largest = max(nodes, key=lambda node: (node.get("GPU", 0.0), node.get("CPU", 0.0)))
        each = f", the largest with {describe(largest)}" if len(nodes) > 1 else ""
        numbers = {"learners": self.learners, "rollout_workers": self.rollout_workers}
        if self.reward_workers:
            numbers["reward_workers"] = self.reward_workers
        if not self.learners:
            del numbers["learners"]
        *others, last = [f"cluster.{name} = {len(bundles)}" for name, bundles in numbers.items()]
        first = f"{', '.join(others)} and " if others else ""
        return (
            f"{first}{last} need {describe(needed)}, each process on one node, but "
            f"there are {describe(available)} on {len(nodes)} node{'s' if len(nodes) > 1 else ''}{each}"
        )


class Placement:
    """Reserved resources on the cluster, one bundle per process."""

    def __init__(self, demand: Demand, timeout: float) -> None:
        from ray.util.placement_group import placement_group

        demand.check(alive_nodes())
        self.demand = demand
        # PACK uses as few nodes as possible: learners exchange gradients, and the workers of a node read one copy of
        # the weights from its object store.
        self.group: PlacementGroup = placement_group(demand.bundles, strategy="PACK")
        with progress(f"Waiting for room for {len(demand.bundles)} processes"):
            has_room = self.group.wait(timeout)
        if not has_room:
            self.remove()
            raise ClusterError(
                f"the cluster is large enough but busy: {describe(_total(demand.bundles))} did not become free within "
                f"{timeout:g} s (cluster.timeout); try again when other runs have ended"
            )

    def options(self, place: tuple[int, Bundle]) -> dict[str, Any]:
        """Return Ray's options for an actor in this bundle. Restarts are left to its supervisor."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        index, share = place
        return {
            "num_cpus": share["CPU"],
            "num_gpus": share.get("GPU", 0.0),
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index),
        }

    def missing(self, places: Iterable[tuple[int, Bundle]]) -> str | None:
        """Describe the resources still needed by bundles whose node died and that have not been rescheduled.

        Return None if all of these bundles have a node.
        """
        from ray.util.placement_group import placement_group_table

        table = placement_group_table(self.group)
        if table["state"] == "CREATED":
            return None
        nodes = table["bundles_to_node_id"]
        unplaced = [self.demand.bundles[index] for index, _ in places if not nodes.get(index)]
        return f"{describe(_total(unplaced))} that left the cluster" if unplaced else None

    def remove(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


def wants_gpus(config: Config, available: float | None = None) -> bool:
    """Return whether learners and rollout workers run on GPUs. `available`: number of GPUs; None: ask Ray."""
    device = config.model.device
    if device not in ("cpu", "cuda", "auto"):
        raise ClusterError(f"model.device is {device}, but Ray assigns GPUs to processes: set it to auto, cuda or cpu")
    if available is None:
        import ray

        available = ray.cluster_resources().get("GPU", 0.0)
    return device == "cuda" or (device == "auto" and available > 0)


def _judge_gpus(config: Config, *, on_gpu: bool) -> int:
    """Return 1 if a remote judge runs a reward model on a GPU: as configured, or by default if learners have GPUs."""
    device = config.reward.model.device
    if not config.cluster.reward_workers or not uses_reward_model(config.reward):
        return 0
    if device not in ("cpu", "cuda", "auto"):
        raise ClusterError(
            f"reward.model.device is {device}, but Ray assigns GPUs to processes: set it to auto, cuda or cpu"
        )
    return int(device == "cuda" or (device == "auto" and on_gpu))


def describe(resources: Bundle | Counter[str]) -> str:
    """Describe CPUs and GPUs in words, such as "3 CPUs and 1 GPU"."""
    amounts = {name: int(resources[name]) for name in ("CPU", "GPU") if name in resources}
    return " and ".join(f"{n} {name}{'s' if n != 1 else ''}" for name, n in amounts.items()) or "nothing"


def alive_nodes() -> list[Bundle]:
    """Return the resources of each node of the cluster, including those in use."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _total(bundles: Sequence[Bundle]) -> Counter[str]:
    total = Counter[str]()
    for bundle in bundles:
        total.update({name: int(bundle[name]) for name in ("CPU", "GPU") if name in bundle})
    return total
