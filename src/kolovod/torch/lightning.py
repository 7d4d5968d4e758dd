"""Lightning over Kolovod: importing this module makes ``Trainer(strategy="kolovod")`` known.

    import kolovod.torch.lightning  # noqa: F401

    trainer = lightning.Trainer(accelerator="cpu", strategy="kolovod")

Started by ``kolovod run -np 4 python train.py``, the trainer has as many ranks as the job, on as
many hosts: ``devices`` and ``num_nodes`` need not be said. Under torchrun, or with no launcher,
Lightning counts and starts its ranks as it does for its own ``DDPStrategy``.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from kolovod.errors import FrontEndArgumentError
from kolovod.optional_dependencies import missing as _missing
from kolovod.rendezvous.rank_environment import RankEnvironment, read_rank_environment

if _error := _missing("lightning"):
    raise _error

from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

__all__ = ["KolovodEnvironment", "KolovodStrategy"]


class KolovodEnvironment(TorchElasticEnvironment):
    """Rank, size and hosts of a job of ``kolovod run``, for Lightning."""

    def __init__(self, place: RankEnvironment) -> None:
        super().__init__()
        self.place = place

    def world_size(self) -> int:
        """Ranks of the job."""
        return self.place.size

    def global_rank(self) -> int:
        """The number of this rank in the job."""
        return self.place.rank

    def local_rank(self) -> int:
        """The number of this rank on its host."""
        return self.place.local_rank

    def node_rank(self) -> int:
        """The number of this host."""
        return self.place.cross_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any: the job says how many ranks there are, and hosts may have unequally many."""


class KolovodStrategy(DDPStrategy):
    """``DDPStrategy`` whose process group is Kolovod's, and whose ranks are those of the job.

    Takes the arguments of ``DDPStrategy``. Raises InvalidArgumentError where ``devices`` of the
    trainer contradicts the number of ranks on this host.
    """

    def __init__(self, **options: Any) -> None:
        self._place = read_rank_environment(os.environ)
        if self._place is not None:
            options.setdefault("cluster_environment", KolovodEnvironment(self._place))
        super().__init__(**{"process_group_backend": "kolovod", **options})

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device of each rank of this host."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices and self._place is not None:
            devices = _one_for_each(devices, self._place.local_size)
        self._parallel_devices = devices

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments by which Lightning shards the data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}


def _one_for_each(devices: list[torch.device], ranks: int) -> list[torch.device]:
    """A device for each rank of this host; of CPUs Lightning names one where none was asked for."""
    if devices[0].type == "cpu" and len(devices) == 1:
        return devices * ranks
    if len(devices) < ranks or (devices[0].type == "cpu" and len(devices) > ranks):
        raise FrontEndArgumentError(
            f"the trainer has {len(devices)} devices, {devices[0].type}, but the job has {ranks} "
            "ranks on this host: leave devices out, or give as many to kolovod run (-np, -H)"
        )
    return devices


StrategyRegistry.register("kolovod", KolovodStrategy, description="DDP over Kolovod")
