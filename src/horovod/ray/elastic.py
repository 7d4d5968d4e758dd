"""Elastic jobs in Ray, in Horovod's way: a node where a worker fails is avoided."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from horovod.common.arguments import warn_of_old_names
from horovod.ray import ray_logger
from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.elastic.launch import elastic_options, failure_of, with_horovods_mark
from kolovod.clusters.calls import Call, packed
from kolovod.errors import JobOverError
from kolovod.launch.elastic_options import ElasticOptions
from kolovod.launch.function import RankFailed
from kolovod.notices import report_to_stderr
from kolovod.ray.launcher import Request, follow

__all__ = ["ElasticRayExecutor", "ElasticSettings", "RayHostDiscovery", "TestDiscovery"]


class RayHostDiscovery(HostDiscovery):
    """The nodes that Ray has, by address, each with the workers that it has resources for."""

    def __init__(
        self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int | None = None
    ) -> None:
        """Set what a worker needs; with ``use_gpu`` one GPU, or ``gpus_per_slot``."""
        self.use_gpu = use_gpu
        self.cpus_per_slot = cpus_per_slot
        self.gpus_per_slot = gpus_per_slot or 1

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Slots by address. What others use at the moment counts, too."""
        found: dict[str, int] = {}
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            resources = node["Resources"]
            slots = resources.get("CPU", 0) // self.cpus_per_slot
            if self.use_gpu:
                slots = min(slots, resources.get("GPU", 0) // self.gpus_per_slot)
            if slots >= 1:
                address = node["NodeManagerAddress"]
                found[address] = found.get(address, 0) + int(slots)
        return found


class TestDiscovery(RayHostDiscovery):
    """RayHostDiscovery of a cluster whose nodes come and go, to try a script with."""

    __test__ = False  # no test of pytest's

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        """``min_hosts`` to ``max_hosts`` are shown; each ``change_frequency_s`` seconds others.

        ``_graceful``: at most one host comes or goes at a time.
        """
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)
        self._least, self._most = min_hosts, max_hosts
        self._period_s = change_frequency_s
        self._verbose, self._graceful = verbose, _graceful
        self._shown: list[str] = []
        self._changed_s: float | None = None

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return some of the hosts that there are."""
        there = super().find_available_hosts_and_slots()
        self._shown = [host for host in self._shown if host in there]
        now = time.monotonic()
        if self._changed_s is None or now >= self._changed_s + self._period_s:
            self._changed_s = now
            self._change(there)
        return {host: there[host] for host in self._shown}

    def _change(self, there: Mapping[str, int]) -> None:
        hidden = [host for host in there if host not in self._shown]
        most = min(self._most, len(there))
        least = min(self._least, most)
        wanted = random.randint(least, most)
        if self._graceful and len(self._shown) >= least:
            now = len(self._shown)
            wanted = min(max(wanted, now - 1), now + 1)
        if wanted > len(self._shown):
            self._shown += random.sample(hidden, wanted - len(self._shown))
        else:
            self._shown = random.sample(self._shown, wanted)
        if self._verbose:
            print(f"TestDiscovery: {len(self._shown)} hosts of {len(there)}", flush=True)


@dataclass
class ElasticSettings:
    """The settings that ``ElasticRayExecutor.create_settings`` makes. ``others`` are of no use."""

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600
    timeout_s: float = 30
    discovery: HostDiscovery | None = None
    cooldown_range: Sequence[int] | None = None
    others: dict[str, Any] = field(default_factory=dict)


def call_elastic(
    fn: Callable[[], Any],
    elastic: ElasticOptions,
    discovery: HostDiscovery,
    resources: Mapping[str, float],
    start_timeout_s: float,
    env: Mapping[str, str],
    callbacks: Sequence[Callable[[Any], Any]] | None,
) -> list[Any]:
    """Run a job; return what ``fn()`` gives in its last ranks. Raises RuntimeError if it fails."""
    with ray_logger.passing_on(callbacks) as queue:

        def logging() -> Any:
            ray_logger.configure(queue)
            return fn()

        # The discovery does not go to the launcher, an actor: it stays here.
        without_discovery = replace(elastic, discover=None)
        request = Request(
            Call(
                packed(logging, (), None),
                elastic.min_np,
                without_discovery,
                with_horovods_mark(env),
            ),
            elastic.min_np,
            elastic.max_np,
            resources,
            placement_timeout_s=elastic.elastic_timeout_s,
            start_timeout_s=start_timeout_s,
            runtime_env={"env_vars": dict(env)} if env else {},
        )
        try:
            return follow(request, report_to_stderr, discovery.find_available_hosts_and_slots)
        except (RankFailed, JobOverError) as error:
            raise failure_of(error) from error.__cause__


class ElasticRayExecutor:
    """Calls a function made elastic by ``hvd.elastic.run`` on as many workers as there are."""

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: str | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> ElasticSettings:
        """``min_num_proc`` to ``max_num_proc`` ranks, by default as many as there is room for.

        ``reset_limit``: how often the world may change; ``elastic_timeout``: seconds to wait until
        there are ``min_num_proc``; ``timeout_s``: seconds for a worker to start. ``kwargs``:
        ``discovery``, which says what nodes there are, and ``cooldown_range``, the fewest and the
        most seconds for which a node is avoided where a worker has failed, by default for good;
        others have no effect. Nor has what is about ssh and interfaces: Ray starts the workers.
        """
        warn_of_old_names(min_np=min_np, max_np=max_np)
        return ElasticSettings(
            min_num_proc if min_np is None else min_np,
            max_num_proc if max_np is None else max_np,
            reset_limit,
            elastic_timeout,
            timeout_s,
            kwargs.pop("discovery", None),
            kwargs.pop("cooldown_range", None),
            kwargs,
        )

    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        """``cpus_per_slot``, ``gpus_per_slot`` (by default one, with ``use_gpu``): of each worker.

        ``env_vars``: further variables of the workers. ``override_discovery``: RayHostDiscovery
        says which nodes there are, not the settings'.

        Raises ValueError for GPUs without ``use_gpu``, or where there is no discovery.
        """
        if gpus_per_slot and not use_gpu:
            raise ValueError("gpus_per_slot is set, but use_gpu is False")
        if not override_discovery and settings.discovery is None:
            raise ValueError("override_discovery=False, but settings.discovery is not set")
        self.settings = settings
        """The settings given, with the discovery that is used."""
        self._resources: dict[str, float] = {"CPU": cpus_per_slot}
        if use_gpu:
            self._resources["GPU"] = gpus_per_slot or 1
        self._env = {name: str(value) for name, value in (env_vars or {}).items()}
        if override_discovery:
            settings.discovery = RayHostDiscovery(use_gpu, cpus_per_slot, gpus_per_slot)
        self._elastic: ElasticOptions | None = None

    def start(self) -> None:
        """Look which nodes there are. Raises ValueError for settings that cannot be."""
        settings = self.settings
        assert settings.discovery is not None
        self._elastic = elastic_options(
            settings.discovery,
            num_proc=None,
            min_num_proc=settings.min_num_proc,
            max_num_proc=settings.max_num_proc,
            elastic_timeout=settings.elastic_timeout,
            reset_limit=settings.reset_limit,
            cooldown_range=settings.cooldown_range,
        )

    def run(
        self,
        worker_fn: Callable[[], Any],
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """Run the job; return what ``worker_fn()`` returns in the ranks at its end.

        ``callbacks``: called here with each value that a rank gives to ``ray_logger.log``. Raises
        RuntimeError if the job fails, ValueError before ``start``. The settings' discovery is asked
        here, too, on a thread of its own.
        """
        if self._elastic is None:
            raise ValueError("call start() before run()")
        assert self.settings.discovery is not None
        return call_elastic(
            worker_fn,
            self._elastic,
            self.settings.discovery,
            self._resources,
            max(self.settings.timeout_s, float(os.environ.get("HOROVOD_START_TIMEOUT") or 0)),
            self._env,
            callbacks,
        )
