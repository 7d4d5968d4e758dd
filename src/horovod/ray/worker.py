"""The actor that is a rank of ``RayExecutor``'s world."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod.ray import ray_logger
from kolovod.ray.workers import Worker

__all__ = ["BaseHorovodWorker"]


class BaseHorovodWorker(Worker):
    """A worker for ``ray.remote``; ``start_executable`` makes the object for ``execute``."""

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        """Set the numbers that hold until the executor tells others."""
        super().__init__()
        os.environ["HOROVOD_RANK"] = str(world_rank)
        os.environ["HOROVOD_SIZE"] = str(world_size)

    @property
    def executable(self) -> Any:
        """The object that ``start_executable`` has made; None before."""
        return self.subject

    def node_id(self) -> str:
        """Return Ray's id of the node that it is on."""
        return self.where()[0]

    def hostname(self) -> str:
        """The node's address."""
        return self.where()[1]

    def get_gpu_ids(self) -> list[str]:
        """The GPUs that Ray has given it."""
        return self.where()[2]

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Set these variables."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """The variables that it has, but the job's secret."""
        return {name: value for name, value in os.environ.items() if name != "KOLOVOD_SECRET"}

    def set_queue(self, queue: Any) -> None:
        """Set the queue into which ``ray_logger.log`` puts its values."""
        ray_logger.configure(queue)

    def start_executable(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Make ``executable_cls(*executable_args, **executable_kwargs)``; without a class None."""
        if executable_cls is not None:
            self.make(executable_cls, executable_args or (), executable_kwargs or {})
