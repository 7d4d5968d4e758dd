"""Places for the ranks of a job in a Ray cluster: bundles of placement groups."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from kolovod.errors import ClusterError, CommandArgumentError

__all__ = [
    "Bundle",
    "Bundles",
    "NoPlacementError",
    "Nodes",
    "Places",
    "actor_options",
    "label_of",
    "on_node",
]

_SETTLE_S = 1.0
"""After so long without another bundle an elastic job begins with what there is."""
_LOOK_S = 0.1


class NoPlacementError(ClusterError):
    """A host has no place any more."""


class Places(Protocol):
    """An object that knows where ranks may be, and gives out these places. For several threads."""

    def count(self) -> Mapping[str, int]:
        """Return the number of all places on each host, by host."""

    def node_of(self, host: str) -> str:
        """Return its node's id. Raises NoPlacementError."""

    def take(self, host: str) -> Any:
        """Return a place there that is free. Raises NoPlacementError."""

    def options(self, place: Any) -> dict[str, Any]:
        """Return the options of the actor that is to be there."""

    def give_back(self, place: Any) -> None:
        """The process there has ended."""

    def close(self) -> None:
        """Nobody needs them any more."""


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return ``resources``, with Ray's names ("CPU", "GPU", "memory", ...), as actor options."""
    own = {name: amount for name, amount in resources.items() if name not in _OPTIONS}
    options: dict[str, Any] = {
        option: resources.get(name, 0) for name, option in _OPTIONS.items() if name != "memory"
    }
    if "memory" in resources:
        options["memory"] = resources["memory"]
    return {**options, "resources": own} if own else options


_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Return the strategy for an actor that is to be on this node, and nowhere else.

    If it were soft, Ray might take another node while this one lives, and the actor would die with
    that.
    """
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def label_of(node: Mapping[str, Any]) -> str:
    """Return a job's name for a node of ``ray.nodes()``; one that comes back has another name."""
    return f"{node['NodeManagerAddress']}-{node['NodeID'][:6]}"


@dataclass(frozen=True, eq=False)
class Bundle:
    """A bundle of a placement group."""

    group: PlacementGroup
    index: int


class Bundles:
    """The bundles of a job, one for each rank, wherever Ray has placed them; see Places."""

    def __init__(
        self, bundles: Sequence[Bundle], resources: Mapping[str, float], *, are_ours: bool
    ) -> None:
        """``are_ours``: whether the groups end with this."""
        self._bundles = list(bundles)
        self._resources = dict(resources)
        self._are_ours = are_ours
        self._lock = threading.Lock()
        self._taken: set[Bundle] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it for the launcher, whose copy gives places out, but leaves the groups alone.

        The groups end where they were asked for.
        """
        return partial(Bundles, are_ours=False), (self._bundles, self._resources)

    @classmethod
    def reserve(
        cls, least: int, most: int, resources: Mapping[str, float], timeout_s: float
    ) -> Bundles:
        """Ask Ray for ``most`` bundles, and wait for ``least``, ``timeout_s`` at the longest.

        Where both are the same they are given all at once or not at all; else each comes when there
        is room, also later. Raises BootstrapError if there is none.
        """
        if not resources or any(amount < 0 for amount in resources.values()):
            raise CommandArgumentError(f"resources={dict(resources)!r}: name what a rank needs")
        wanted = {name: amount for name, amount in resources.items() if amount}
        groups = [
            placement_group([wanted] * count, strategy="PACK")
            for count in ([most] if least == most else [1] * most)
        ]
        indices = range(most if least == most else 1)
        found = cls(
            [Bundle(group, index) for group in groups for index in indices],
            resources,
            are_ours=True,
        )
        try:
            found._wait(least, most, timeout_s)
        except BaseException:
            found.close()
            raise
        return found

    @classmethod
    def within(
        cls, group: PlacementGroup, count: int, resources: Mapping[str, float]
    ) -> Bundles | None:
        """Return ``count`` bundles of somebody else's group; None: it has not so many.

        In the first one is who asks (a trial of Tune's, say). It is left out where there are enough
        others, or that process takes so much of it that a rank would wait for ever.
        """
        taken = _taken_by_this_process()
        fit = [
            Bundle(group, index)
            for index, bundle in enumerate(group.bundle_specs)
            if all(
                bundle.get(name, 0) - (0 if index else taken.get(name, 0)) >= amount
                for name, amount in resources.items()
            )
        ]
        if len(fit) < count:
            return None
        return cls(fit[-count:], resources, are_ours=False)

    def _wait(self, least: int, most: int, timeout_s: float) -> None:
        started = changed_s = time.monotonic()
        before = 0
        while (count := sum(self.count().values())) < most:
            now = time.monotonic()
            if count != before:
                before, changed_s = count, now
            if count >= least and now >= changed_s + _SETTLE_S:
                return
            if now >= started + timeout_s:
                raise ClusterError(
                    f"Ray has found places for {count} of {least} ranks in {timeout_s:g} s, each "
                    f"with {self._resources}. The cluster has {ray.cluster_resources()}, of which "
                    f"{ray.available_resources()} are free: ask for fewer ranks or for less"
                )
            time.sleep(_LOOK_S)

    def _hosts(self) -> dict[Bundle, dict[str, Any]]:
        """Return the node of each bundle that has one which lives."""
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        tables = {
            group.id: placement_group_table(group)
            for group in {bundle.group.id: bundle.group for bundle in self._bundles}.values()
        }
        found: dict[Bundle, dict[str, Any]] = {}
        for bundle in self._bundles:
            table = tables[bundle.group.id]
            node = alive.get(table["bundles_to_node_id"].get(bundle.index, ""))
            if table["state"] == "CREATED" and node is not None:
                found[bundle] = node
        return found

    def count(self) -> dict[str, int]:
        """Implement ``Places.count``."""
        return dict(Counter(map(label_of, self._hosts().values())))

    def node_of(self, host: str) -> str:
        """Implement ``Places.node_of``."""
        for node in self._hosts().values():
            if label_of(node) == host:
                found: str = node["NodeID"]
                return found
        raise NoPlacementError(f"Ray has no place on {host} any more")

    def take(self, host: str) -> Bundle:
        """Implement ``Places.take``."""
        hosts = self._hosts()
        with self._lock:
            for bundle, node in hosts.items():
                if label_of(node) == host and bundle not in self._taken:
                    self._taken.add(bundle)
                    return bundle
        raise NoPlacementError(f"Ray has no free place on {host} any more")

    def options(self, place: Bundle) -> dict[str, Any]:
        """Implement ``Places.options``."""
        return {
            **actor_options(self._resources),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                place.group, placement_group_bundle_index=place.index
            ),
        }

    def give_back(self, place: Bundle) -> None:
        """Implement ``Places.give_back``."""
        with self._lock:
            self._taken.discard(place)

    def close(self) -> None:
        """Implement ``Places.close``."""
        if self._are_ours:
            for group in {bundle.group.id: bundle.group for bundle in self._bundles}.values():
                with contextlib.suppress(Exception):  # Ray is gone
                    remove_placement_group(group)


def _taken_by_this_process() -> Mapping[str, float]:
    """Return what Ray has given to this process, if that is a task or an actor."""
    context = ray.get_runtime_context()
    if context.worker.mode != ray.WORKER_MODE:
        return {}
    taken: Mapping[str, float] = context.get_assigned_resources()
    return taken


class Nodes:
    """Nodes by address, as the driver says which may be used; see Places."""

    def __init__(self, known: Mapping[str, int], resources: Mapping[str, float]) -> None:
        """``known``: the places of each address. ``resources``: what a rank needs of its node."""
        self._known = dict(known)
        self._resources = dict(resources)
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it for the launcher."""
        return Nodes, (self._known, self._resources)

    def learn(self, known: Mapping[str, int]) -> None:
        """The places have changed."""
        self._known = dict(known)

    def count(self) -> Mapping[str, int]:
        """Implement ``Places.count``."""
        return self._known

    @staticmethod
    def _ids(host: str) -> dict[str, float]:
        """Return the nodes that live at this address (in a cluster on one host, several), and CPUs.

        A node may have other names, too: resources "node:NAME", by which Horovod finds it.
        """
        found = {
            node["NodeID"]: node["Resources"].get("CPU", 0.0)
            for node in ray.nodes()
            if node["Alive"]
            and (
                host in (node["NodeManagerAddress"], node["NodeManagerHostname"])
                or f"node:{host}" in node["Resources"]
            )
        }
        if not found:
            raise NoPlacementError(f"Ray has no node {host}")
        return found

    def node_of(self, host: str) -> str:
        """Implement ``Places.node_of``."""
        return next(iter(self._ids(host)))

    def take(self, host: str) -> str:
        """Implement ``Places.take``: take the node with the most CPUs left by this job."""
        ids = self._ids(host)
        cpus = self._resources.get("CPU", 0)
        with self._lock:
            node_id = max(ids, key=lambda node_id: ids[node_id] - cpus * self._taken[node_id])
            self._taken[node_id] += 1
        return node_id

    def options(self, place: str) -> dict[str, Any]:
        """Implement ``Places.options``."""
        return {**actor_options(self._resources), "scheduling_strategy": on_node(place)}

    def give_back(self, place: str) -> None:
        """Implement ``Places.give_back``."""
        with self._lock:
            self._taken[place] -= 1

    def close(self) -> None:
        """Implement ``Places.close``."""
