"""``RayExecutor``: a world of actors in which functions are called, or an elastic job."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from horovod.ray import ray_logger
from horovod.ray.elastic import RayHostDiscovery, call_elastic
from horovod.ray.strategy import BaseStrategy, ColocatedStrategy, PGStrategy
from horovod.ray.worker import BaseHorovodWorker
from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.elastic.launch import elastic_options
from kolovod.launch.elastic_options import ElasticOptions
from kolovod.ray import workers

__all__ = ["Coordinator", "MiniSettings", "RayExecutor"]


@dataclass
class MiniSettings:
    """The settings of ``RayExecutor.create_settings``; ``discovery`` is that of elastic jobs."""

    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    discovery: HostDiscovery | None = None
    others: dict[str, Any] = field(default_factory=dict)
    """Further arguments, which are of no use."""


class Coordinator:
    """A coordinator for callers that start workers themselves: who they are, and where they meet.

    ``register`` all workers, set what ``finalize_registration`` says in each, and what
    ``establish_rendezvous`` says in all; then call ``hvd.init()`` in each.
    """

    def __init__(self, settings: Any) -> None:
        """``settings``: those of ``RayExecutor``."""
        self.settings = settings
        self.hostnames: set[str] = set()
        self._nodes: dict[int, tuple[str, str]] = {}  # by rank: its host's name, its node's id
        self._meeting: Any = None

    @property
    def world_size(self) -> int:
        """The number of workers that are registered."""
        return len(self._nodes)

    @property
    def hoststring(self) -> str:
        """The nodes with their workers, "id:2,id:1"."""
        counts = Counter(node for _, (_, node) in sorted(self._nodes.items()))
        return ",".join(f"{node}:{count}" for node, count in counts.items())

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """Note that the worker of this rank is on that node."""
        self.hostnames.add(hostname)
        self._nodes[world_rank] = hostname, node_id

    def finalize_registration(self) -> dict[int, dict[str, str]]:
        """The variables of each rank. Raises ValueError where a rank is missing."""
        if sorted(self._nodes) != list(range(self.world_size)):
            raise ValueError(f"ranks {sorted(self._nodes)} are registered: some are missing")
        hosts = [f"{name}-{node[:6]}" for _, (name, node) in sorted(self._nodes.items())]
        made = workers.environments(hosts, "", "")
        meets = ("KOLOVOD_STORE", "KOLOVOD_SECRET")
        return {
            rank: {name: text for name, text in own.variables().items() if name not in meets}
            for rank, own in enumerate(made)
        }

    def establish_rendezvous(self) -> dict[str, str]:
        """The variables of all ranks. They meet at an actor, which ends with the caller."""
        self._meeting = workers.new_meeting(self.world_size)
        address, secret = ray.get(self._meeting.told.remote())
        timeout_s = str(round(self.settings.timeout_s))
        return {
            "KOLOVOD_STORE": address,
            "KOLOVOD_SECRET": secret,
            "HOROVOD_START_TIMEOUT": timeout_s,
        }


class RayExecutor:
    """``start``, then call functions in all workers, then ``shutdown``.

    With ``min_workers`` each ``run`` is an elastic job, which starts its workers itself.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: str | None = None,
    ) -> MiniSettings:
        """``timeout_s``: seconds for ``hvd.init`` to find all workers.

        ``placement_group_timeout_s``: seconds for Ray to have room for them. What is about ssh and
        interfaces has no effect: Ray starts the workers.
        """
        return MiniSettings(timeout_s, placement_group_timeout_s)

    def __init__(
        self,
        settings: MiniSettings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        """``num_workers`` anywhere, ``num_workers_per_host`` on each of ``num_hosts``, or elastic.

        ``cpus_per_worker``, ``gpus_per_worker`` (with ``use_gpu``, by default one): of each.
        ``use_current_placement_group``: where this runs within one, the workers are in it, too.

        Elastic: ``min_workers`` to ``max_workers`` of them (by default as many as there is room
        for). ``reset_limit``: how often the world may change; ``cooldown_range``: the fewest and
        the most seconds for which a node is avoided where one has failed, by default for good;
        ``elastic_timeout``: seconds to wait until there are ``min_workers``;
        ``override_discovery``: Ray says which nodes there are, not ``settings.discovery``.

        Raises ValueError for arguments that contradict each other.
        """
        if num_workers is not None and num_hosts is not None:
            raise ValueError("Only one of num_workers and num_hosts should be set")
        if min_workers is not None and num_workers is not None:
            raise ValueError(
                "Both `min_workers` and `num_workers` provided. An elastic job has no fixed number "
                "of workers: leave num_workers out"
            )
        if min_workers is None and max_workers is not None:
            raise ValueError("max_workers is of elastic jobs: set min_workers, too")
        if num_workers is None and num_hosts is None and min_workers is None:
            raise ValueError("set num_workers, num_hosts or min_workers")
        for name, given in (("num_workers", num_workers), ("num_hosts", num_hosts)):
            if given is not None and given < 1:
                raise ValueError(f"{name}={given}: must be at least 1")
        if gpus_per_worker and not use_gpu:
            raise ValueError("gpus_per_worker is set, but use_gpu is False")
        if use_gpu and gpus_per_worker is not None and gpus_per_worker < 1:
            raise ValueError(f"gpus_per_worker={gpus_per_worker}: must be at least 1")
        self.settings = settings or MiniSettings()
        """The settings given, or the defaults; of elastic jobs with the discovery that is used."""
        self._elastic: ElasticOptions | None = None
        self._strategy: BaseStrategy | None = None
        self._cpus, self._gpus = cpus_per_worker, (gpus_per_worker or 1) if use_gpu else 0
        if min_workers is not None:
            if override_discovery or self.settings.discovery is None:
                self.settings.discovery = RayHostDiscovery(
                    use_gpu, cpus_per_worker, gpus_per_worker
                )
            self._limits: dict[str, Any] = {
                "num_proc": None,
                "min_num_proc": min_workers,
                "max_num_proc": max_workers,
                "elastic_timeout": elastic_timeout,
                "reset_limit": reset_limit,
                "cooldown_range": cooldown_range,
            }
            self._is_elastic = True
        else:
            self._is_elastic = False
            common: dict[str, Any] = {
                "settings": self.settings,
                "use_gpu": use_gpu,
                "cpus_per_worker": cpus_per_worker,
                "gpus_per_worker": gpus_per_worker,
            }
            self._strategy = (
                ColocatedStrategy(
                    num_hosts=num_hosts, num_workers_per_host=num_workers_per_host, **common
                )
                if num_hosts is not None
                else PGStrategy(
                    num_workers=num_workers or 0,
                    force_create_placement_group=not use_current_placement_group,
                    **common,
                )
            )
        self.workers: list[Any] = []
        """The actors by rank, from ``start`` to ``shutdown``; of an elastic job none."""
        self._env: dict[str, str] = {}
        self._meeting: Any = None
        self._executable: tuple[Any, Sequence[Any], Mapping[str, Any]] = (None, (), {})

    @property
    def num_workers(self) -> int:
        """The number of workers; the least one for an elastic job."""
        if self._strategy is None:
            least: int = self._limits["min_num_proc"]
            return least
        return self._strategy.num_workers

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the workers. Each has an ``executable_cls(...)``, if that is given.

        ``extra_env_vars``: variables for all. Raises TimeoutError if there is no room for the
        workers, what the class raises as Ray does, ValueError for limits of an elastic job that
        cannot be.
        """
        self._env = {name: str(value) for name, value in (extra_env_vars or {}).items()}
        self._executable = executable_cls, executable_args or (), executable_kwargs or {}
        if self._is_elastic:
            assert self.settings.discovery is not None
            self._elastic = elastic_options(self.settings.discovery, **self._limits)
            return
        assert self._strategy is not None
        try:
            made = self._strategy.create_workers(BaseHorovodWorker)
            self._meeting = workers.new_meeting(len(made))
            timeout_s = str(round(self.settings.timeout_s))
            variables = {"HOROVOD_START_TIMEOUT": timeout_s, **self._env}
            self.workers, _ = workers.form(made, self._meeting, variables)
            ray.get([worker.start_executable.remote(*self._executable) for worker in self.workers])
        except BaseException:
            self.shutdown()
            raise

    def execute(
        self,
        fn: Callable[[Any], Any],
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """``fn(executable)`` in each worker; the results by rank.

        ``executable``: what ``start`` was given the class of, else None. Otherwise as ``run``.
        """
        if self._is_elastic:
            cls, args, kwargs = self._executable
            return self._run_elastic(
                lambda: fn(None if cls is None else cls(*args, **kwargs)), callbacks
            )
        with ray_logger.passing_on(callbacks) as queue:
            ray.get([worker.set_queue.remote(queue) for worker in self._started()])
            results: list[Any] = ray.get(self._call(fn))
            return results

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """``fn(*args, **kwargs)`` in each worker; the results by rank.

        ``callbacks``: called here with each value that a rank gives to ``ray_logger.log``. Raises
        what ``fn`` has raised first, as Ray does; RuntimeError if an elastic job fails; ValueError
        before ``start``.
        """
        positional, keywords = tuple(args or ()), dict(kwargs or {})
        return self.execute(lambda executable: fn(*positional, **keywords), callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """``run`` without waiting: the results are for ``ray.get``.

        Raises ValueError before ``start``, and in an elastic job.
        """
        positional, keywords = tuple(args or ()), dict(kwargs or {})
        return self._call(lambda executable: fn(*positional, **keywords))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """``fn(executable)`` in rank 0 only. Raises as ``run_remote``, and what ``fn`` raises."""
        return ray.get(self._started()[0].execute.remote(fn))

    def shutdown(self) -> None:
        """End the workers. Idempotent."""
        if self._strategy is not None:
            self._strategy.shutdown()
        workers.end([self._meeting] if self._meeting is not None else [])
        self.workers, self._meeting = [], None

    def _call(self, fn: Callable[[Any], Any]) -> list[Any]:
        return [worker.execute.remote(fn) for worker in self._started()]

    def _started(self) -> list[Any]:
        if self._is_elastic:
            raise ValueError("an elastic job's workers are there in run() and execute() only")
        if not self.workers:
            raise ValueError("call start() first")
        return self.workers

    def _run_elastic(
        self,
        fn: Callable[[], Any],
        callbacks: Sequence[Callable[[Any], Any]] | None,
    ) -> list[Any]:
        if self._elastic is None:
            raise ValueError("call start() first")
        assert self.settings.discovery is not None
        resources = {"CPU": float(self._cpus), **({"GPU": float(self._gpus)} if self._gpus else {})}
        start_s = max(self.settings.timeout_s, float(os.environ.get("HOROVOD_START_TIMEOUT") or 0))
        discovery = self.settings.discovery
        return call_elastic(fn, self._elastic, discovery, resources, start_s, self._env, callbacks)
