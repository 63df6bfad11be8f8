"""Where the parts of a run live: room is reserved in Ray's cluster, and processes are put into it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dapo.config import Config
from dapo.errors import ClusterError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

Bundle = dict[str, float]  # resources of one process, all on one node


@dataclass(frozen=True, slots=True)
class Demand:
    """What a run asks of a cluster: a bundle for each learner, then one for each rollout worker.

    Without rollout workers every learner's bundle holds an engine too, and the two take turns.
    """

    learners: int
    rollout_workers: int
    gpus: int  # of a rollout worker; 0: nobody has one

    @classmethod
    def of(cls, config: Config, *, on_gpu: bool) -> Demand:
        gpus = config.rollout.tensor_parallel if on_gpu else 0
        if gpus > 1 and config.cluster.rollout_workers == 0:
            raise ClusterError(f"rollout.tensor_parallel = {gpus} needs GPUs of its own: set cluster.rollout_workers")
        return cls(config.cluster.learners, config.cluster.rollout_workers, gpus)

    @property
    def engines(self) -> int:
        return self.rollout_workers or self.learners

    @property
    def bundles(self) -> list[Bundle]:
        learner: Bundle = {"CPU": 1.0, "GPU": 1.0} if self.gpus else {"CPU": 1.0}
        worker: Bundle = {"CPU": 1.0, "GPU": float(self.gpus)} if self.gpus else {"CPU": 1.0}
        return [learner] * self.learners + [worker] * self.rollout_workers

    def learner(self, rank: int) -> tuple[int, Bundle]:
        """The bundle that it lives in, and its share of it."""
        return rank, self._share(rank)

    def engine(self, slot: int) -> tuple[int, Bundle]:
        index = self.learners + slot if self.rollout_workers else slot
        return index, self._share(index)

    def _share(self, index: int) -> Bundle:
        part = 1.0 if self.rollout_workers else 0.5
        return {name: part * amount for name, amount in self.bundles[index].items()}

    def check(self, nodes: Sequence[Bundle]) -> None:
        """Every bundle needs a node of its own size: the largest first, each where it fits."""
        left = [dict(node) for node in nodes]
        for bundle in sorted(self.bundles, key=lambda bundle: -bundle.get("GPU", 0.0)):
            place = next((node for node in left if all(node.get(k, 0.0) >= v for k, v in bundle.items())), None)
            if place is None:
                raise ClusterError(self._refusal(nodes))
            for name, amount in bundle.items():
                place[name] -= amount

    def _refusal(self, nodes: Sequence[Bundle]) -> str:
        needed, there = _total(self.bundles), _total(nodes)
        largest = max(nodes, key=lambda node: (node.get("GPU", 0.0), node.get("CPU", 0.0)))
        each = f", the largest with {words(largest)}" if len(nodes) > 1 else ""
        return (
            f"cluster.learners = {self.learners} and cluster.rollout_workers = {self.rollout_workers} need "
            f"{words(needed)}, each process on one node, but Ray has {words(there)} on "
            f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}{each}"
        )


class Placement:
    """Reserved room, a bundle per process."""

    def __init__(self, demand: Demand, timeout: float) -> None:
        from ray.util.placement_group import placement_group

        demand.check(_nodes())
        self.demand = demand
        # Close together: learners exchange every gradient, and one node's workers read the same copy of the weights.
        self.group: PlacementGroup = placement_group(demand.bundles, strategy="PACK")
        if not self.group.wait(timeout):
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


def wants_gpus(config: Config) -> bool:
    """Whether learners and rollout workers run on GPUs, by the configuration and what the cluster has."""
    import ray

    device = config.model.device
    if device not in ("cpu", "cuda", "auto"):
        raise ClusterError(f"model.device is {device}, but Ray chooses which GPU a process gets: set auto, cuda or cpu")
    return device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0.0) > 0)


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
