"""Horovod's second implementation of elastic jobs in Ray; here there is one."""

from __future__ import annotations

from horovod.ray import elastic

__all__ = ["RayHostDiscovery", "TestDiscovery"]


class RayHostDiscovery(elastic.RayHostDiscovery):
    """A discovery by Ray, with other names for what a worker needs."""

    def __init__(
        self, use_gpu: bool = False, cpus_per_worker: int = 1, gpus_per_worker: int = 1
    ) -> None:
        """Set what a worker needs; ``gpus_per_worker`` counts with ``use_gpu`` only."""
        super().__init__(use_gpu, cpus_per_worker, gpus_per_worker)


class TestDiscovery(elastic.TestDiscovery):
    """The discovery for tests, with other names for what a worker needs."""

    __test__ = False  # no test of pytest's

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_worker: int = 1,
        gpus_per_worker: int = 1,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        """Make the discovery, like that of ``horovod.ray.elastic``."""
        super().__init__(
            min_hosts,
            max_hosts,
            change_frequency_s,
            use_gpu,
            cpus_per_worker,
            gpus_per_worker,
            verbose,
            _graceful,
        )
