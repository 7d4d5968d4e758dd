"""Kolovod as a backend of ``torch.distributed``: ``init_process_group("kolovod")``.

The default group is this process's world; every further group has an engine of its own, as
process sets have. docs/torch-distributed.md says what works and what does not. The files:
``groups`` finds the engine for a group, ``flat`` sees tensors as c10d does, ``staging`` those on
GPUs and ``sparse`` those of indices and values, ``base``, ``moving`` and ``reducing`` are the
process group with its verbs, ``work`` is what they return. ``monitored`` is the barrier that names
who is missing. In elastic jobs ``elastic`` makes the default group anew in each world (``stores``),
``data_parallel`` lets DDP lose a rank, ``replicas`` what ``fully_shard`` has sharded within
replicas, and ``shards`` says that FSDP and ZeRO over all ranks cannot.
"""

from __future__ import annotations

from typing import Any

__all__ = ["DEVICE_TYPES", "register"]

DEVICE_TYPES = ["cpu", "cuda"]
"""The devices of the tensors that a group takes."""


def register() -> None:
    """Make ``init_process_group("kolovod")`` work. Idempotent.

    Done by importing ``kolovod.torch``, and, where Kolovod is installed, by importing ``torch``.
    """
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "KOLOVOD"):
        from kolovod.c10d import elastic, monitored

        dist.Backend.register_backend("kolovod", _create, extended_api=True, devices=DEVICE_TYPES)
        monitored.install()
        elastic.install()


def _create(options: Any, backend_options: Any) -> Any:
    """Make a group: called by torch.distributed on each of its members."""
    from kolovod.c10d.reducing import create  # not before it is needed

    return create(options)
