"""Strategies by which ``RayExecutor`` places its actors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)

from kolovod.ray import workers

__all__ = ["BaseStrategy", "ColocatedStrategy", "PGStrategy", "create_placement_group"]


def create_placement_group(
    resources_per_bundle: Mapping[str, float],
    num_bundles: int,
    pg_timeout: float,
    pg_strategy: str,
) -> tuple[PlacementGroup, list[dict[str, float]]]:
    """Return a group of ``num_bundles`` equal bundles, which is there, and these.

    ``pg_strategy``: see Ray. Raises TimeoutError if it is not there in ``pg_timeout`` seconds.
    """
    bundles = [dict(resources_per_bundle) for _ in range(num_bundles)]
    group = placement_group(bundles, strategy=pg_strategy)
    try:
        ray.get(group.ready(), timeout=pg_timeout)
    except GetTimeoutError:
        remove_placement_group(group)
        raise TimeoutError(
            f"Placement group creation timed out: {num_bundles} bundles of "
            f"{dict(resources_per_bundle)} in {pg_timeout:g} s. The cluster has "
            f"{ray.cluster_resources()}, of which {ray.available_resources()} are free"
        ) from None
    return group, bundles


def _resources(cpus: float, gpus: float) -> dict[str, float]:
    return {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}


class BaseStrategy(ABC):
    """Makes the workers, and ends them."""

    def __init__(self, settings: Any, cpus: float, gpus: float) -> None:
        """``cpus``, ``gpus``: of each worker. ``settings``: those of ``RayExecutor``."""
        self.settings = settings
        self._each = _resources(cpus, gpus)
        self._own_group: PlacementGroup | None = None
        self.workers: list[Any] = []

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """The number of workers that are to be started."""

    @abstractmethod
    def _group_and_bundles(self) -> tuple[PlacementGroup, list[int]]:
        """The group, and the bundle of each worker."""

    def create_workers(self, worker_cls: type[Any]) -> list[Any]:
        """Start Ray actors of this class. Raises TimeoutError if there is no room."""
        group, bundles = self._group_and_bundles()
        size = self.num_workers
        self.workers = workers.start(worker_cls, group, bundles, self._each, args=(0, size))
        return self.workers

    def _make(self, bundle: Mapping[str, float], count: int, strategy: str) -> PlacementGroup:
        timeout = self.settings.placement_group_timeout_s
        group, _ = create_placement_group(bundle, count, timeout, strategy)
        self._own_group = group
        return group

    def shutdown(self) -> None:
        """End the workers, and the group if it is this strategy's own. Idempotent."""
        workers.end(self.workers)
        self.workers = []
        group, self._own_group = self._own_group, None
        if group is not None:
            remove_placement_group(group)


class ColocatedStrategy(BaseStrategy):
    """``num_workers_per_host`` workers on each of ``num_hosts`` nodes."""

    def __init__(
        self,
        *,
        settings: Any,
        num_hosts: int,
        num_workers_per_host: int,
        use_gpu: bool,
        cpus_per_worker: int,
        gpus_per_worker: int | None,
    ) -> None:
        """Take the arguments of ``RayExecutor``."""
        super().__init__(settings, cpus_per_worker, (gpus_per_worker or 1) if use_gpu else 0)
        self.num_hosts, self.num_workers_per_host = num_hosts, num_workers_per_host

    @property
    def num_workers(self) -> int:
        """The number of workers that are to be started."""
        return self.num_hosts * self.num_workers_per_host

    def _group_and_bundles(self) -> tuple[PlacementGroup, list[int]]:
        on_each = {name: n * self.num_workers_per_host for name, n in self._each.items()}
        group = self._make(on_each, self.num_hosts, "STRICT_SPREAD")
        hosts = range(self.num_hosts)
        return group, [host for host in hosts for _ in range(self.num_workers_per_host)]


class PGStrategy(BaseStrategy):
    """``num_workers`` workers where there is room, close together."""

    def __init__(
        self,
        *,
        settings: Any,
        num_workers: int,
        use_gpu: bool,
        cpus_per_worker: int,
        gpus_per_worker: int | None,
        placement_group: PlacementGroup | None = None,
        force_create_placement_group: bool = False,
    ) -> None:
        """Take the arguments of ``RayExecutor``.

        ``placement_group``: the caller's; None: the group that the caller is in.
        ``force_create_placement_group``: make a group in any case.
        """
        super().__init__(settings, cpus_per_worker, (gpus_per_worker or 1) if use_gpu else 0)
        self._num_workers = num_workers
        self._given = placement_group or get_current_placement_group()
        if force_create_placement_group:
            self._given = None

    @property
    def num_workers(self) -> int:
        """The number of workers that are to be started."""
        return self._num_workers

    def _group_and_bundles(self) -> tuple[PlacementGroup, list[int]]:
        if self._given is not None:  # Ray finds bundles that have room
            return self._given, [-1] * self._num_workers
        return self._make(self._each, self._num_workers, "PACK"), list(range(self._num_workers))
