"""Kolovod as what Ray Train's workers communicate by.

A trainer takes it as its backend::

    trainer = DataParallelTrainer(
        train_loop,
        backend_config=KolovodConfig(),
        scaling_config=ScalingConfig(num_workers=4),
    )

Train starts the workers, and all of them anew when one fails; ``kolovod.init()`` in the loop finds
the others, with Train's ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from kolovod.ray.workers import environments, new_meeting

__all__ = ["KolovodConfig"]

_START_S = 60.0


class KolovodConfig(BackendConfig):
    """For ``DataParallelTrainer(backend_config=...)``; it takes no arguments.

    Train raises what its workers raise, and what ``kolovod.init()`` does there.
    """

    @property
    def backend_cls(self) -> type[Backend]:
        """What Train asks for."""
        return _KolovodBackend


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


def _host() -> str:
    node_id = ray.get_runtime_context().get_node_id()
    return f"{ray.util.get_node_ip_address()}-{node_id[:6]}"


def _tell(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
