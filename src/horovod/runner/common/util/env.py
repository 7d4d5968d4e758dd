"""A rank's numbers from the environment, whoever set them."""

from __future__ import annotations

import os
import re

__all__ = ["get_env_rank_and_size", "is_exportable"]

_PAIRS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
_KEPT_HERE = re.compile(r"BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|.*SECRET.*")


def is_exportable(v: str) -> bool:
    """Return whether a variable of that name is passed on to other hosts."""
    return _KEPT_HERE.fullmatch(v) is None


def get_env_rank_and_size() -> tuple[int, int]:
    """Return rank and size as the first launcher that sets them says; (0, 1) if none does.

    Raises RuntimeError if a launcher has set only one of them.
    """
    for rank_name, size_name in _PAIRS:
        rank, size = os.environ.get(rank_name), os.environ.get(size_name)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            raise RuntimeError(
                f"only one of {rank_name} and {size_name} is set: a launcher sets both"
            )
    return 0, 1
