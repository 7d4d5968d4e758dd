"""Kolovod as what Ray Train's workers communicate by.

A trainer takes it as its backend::

    trainer = DataParallelTrainer(
        train_loop,
        backend_config=KolovodConfig(),
        scaling_config=ScalingConfig(num_workers=4),
    )

Train starts the workers, and all of them anew when one fails; ``kolovod.init()`` in the loop finds
the others, with Train's ranks. With ``KolovodConfig(min_workers=2)`` the loop is elastic, and Train
replaces the worker that has failed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from kolovod.errors import CommandArgumentError
from kolovod.ray.train_elastic import ElasticGroup, as_rank
from kolovod.ray.workers import environments, new_meeting

__all__ = ["KolovodConfig"]

_START_S = 60.0


class KolovodConfig(BackendConfig):
    """The configuration of Kolovod for ``DataParallelTrainer(backend_config=...)``.

    Train raises what its workers raise, and what ``kolovod.init()`` does there.
    """

    def __init__(self, min_workers: int | None = None, elastic_timeout_s: float = 600.0) -> None:
        """``min_workers``: with how few workers the others go on when one fails.

        Then the loop is to call a function made by ``kolovod.elastic.run``, and Train's
        ``FailureConfig(max_failures=...)`` is to allow failures. ``elastic_timeout_s``: for how
        long fewer wait for others, in seconds. None: Train starts all workers anew.

        Raises InvalidArgumentError for a number below 1, and where Ray cannot do it.
        """
        if min_workers is not None and min_workers < 1:
            raise CommandArgumentError(f"min_workers={min_workers!r}: give a number from 1 on")
        if min_workers is not None and not hasattr(Backend, "has_replica_groups"):
            raise CommandArgumentError(
                f"min_workers={min_workers}: Ray {ray.__version__} replaces no single worker; take "
                "a newer Ray (2.60 does), or leave min_workers out"
            )
        self.min_workers = min_workers
        self.elastic_timeout_s = elastic_timeout_s

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend class that Train asks for."""
        return _KolovodBackend if self.min_workers is None else _ElasticBackend

    @property
    def train_func_context(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """The context in which Train calls the loop."""
        return contextlib.nullcontext if self.min_workers is None else as_rank


class _KolovodBackend(Backend):
    """Train has one in a process, for all groups of workers."""

    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._meetings: dict[int, Any] = {}

    def on_start(self, worker_group: Any, backend_config: KolovodConfig) -> None:
        """Tell the workers, which Train lists by rank, how they meet."""
        hosts = worker_group.execute(_host)
        meeting = self._meetings[id(worker_group)] = new_meeting(len(hosts))
        address, secret = ray.get(meeting.told.remote(), timeout=_START_S)
        for rank, environment in enumerate(environments(hosts, address, secret)):
            worker_group.execute_single(rank, _tell, environment.variables())

    def on_shutdown(self, worker_group: Any, backend_config: KolovodConfig) -> None:
        """Nobody of this group meets any more."""
        meeting = self._meetings.pop(id(worker_group), None)
        if meeting is not None:
            ray.kill(meeting)


class _ElasticBackend(Backend):
    """The backend of workers that Train replaces one by one: each is a replica group of its own."""

    has_replica_groups = True
    # Train tells a replacement of its own GPUs only, so nobody hears of others'.
    share_cuda_visible_devices = False

    def __init__(self) -> None:
        self._groups: dict[int, ElasticGroup] = {}

    def on_start(self, worker_group: Any, backend_config: KolovodConfig) -> None:
        """Start all workers, or one that takes the place of another one."""
        for group in self._groups.values():
            slot = group.slot_of(worker_group)
            if slot is not None:
                group.replace(slot, worker_group)
                return
        assert backend_config.min_workers is not None
        group = ElasticGroup(
            worker_group, backend_config.min_workers, backend_config.elastic_timeout_s
        )
        try:
            group.start()
        except BaseException:  # Train shuts down no group that has not started
            group.close()
            raise
        self._groups[id(worker_group)] = group

    def on_shutdown(self, worker_group: Any, backend_config: KolovodConfig) -> None:
        """End the group, or, if one worker is shut down, prepare the others for it.

        That worker is given up only when there is another one in its place.
        """
        whole = self._groups.pop(id(worker_group), None)
        if whole is not None:
            whole.close()
            return
        for group in self._groups.values():
            if group.slot_of(worker_group) is not None:
                group.sort_out(worker_group)


def _host() -> str:
    node_id = ray.get_runtime_context().get_node_id()
    return f"{ray.util.get_node_ip_address()}-{node_id[:6]}"


def _tell(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
