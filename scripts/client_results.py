"""What two trainings have come to, compared: for clients.py.

Each rank has written its numbers into a file, rank0.npz and so on. The names of arrays say what
they are: ``backend`` what the client says it communicates by, ``weights.*`` weights, ``rank.*``
what may differ between ranks; all else is the same on all ranks, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy

Arrays = dict[str, numpy.ndarray[Any, Any]]
SMALL = 0.01
"""Weights that are smaller than this part of the largest count as if they were as large: what has
no influence is nothing but rounding errors."""


class Expectations(Protocol):
    """What a row says about its files."""

    @property
    def files(self) -> int: ...
    @property
    def backends(self) -> tuple[str, str] | None: ...
    @property
    def limit(self) -> float: ...


class Found(NamedTuple):
    """For the table: what each came to, and how closely they agree, or why they do not."""

    ours: str = ""
    theirs: str = ""
    equal: str = ""
    problem: str = ""


def compared(ours: Path, theirs: Path, wanted: Expectations) -> Found:
    """Compare what lies in two folders."""
    backends = wanted.backends or ("", "")
    mine, problem = read(ours, wanted.files, backends[0])
    others, other_problem = read(theirs, wanted.files, backends[1])
    if problem or other_problem:
        return Found(problem=problem or f"the reference's: {other_problem}")
    said = summary(mine[0]), summary(others[0])
    worst, where = 0.0, ""
    for rank, (left, right) in enumerate(zip(mine, others, strict=True)):
        if left.keys() != right.keys():
            names = ", ".join(sorted(left.keys() ^ right.keys()))
            return Found(*said, problem=f"not in both: {names}")
        floor = SMALL * max(numpy.abs(right[name]).max() for name in right if is_weight(name))
        for name in left:
            found = distance(left[name], right[name], floor if is_weight(name) else 0.0)
            if found > worst:
                worst, where = found, f"{name} of rank {rank}"
    if worst > wanted.limit:
        text = f"no: {where} differs by {worst:.1e}, allowed is {wanted.limit:.0e}"
        return Found(*said, problem=text)
    if worst == 0:
        return Found(*said, equal=f"bit for bit, {len(mine[0])} arrays")
    return Found(*said, equal=f"to {worst:.0e} (limit {wanted.limit:.0e})")


def read(folder: Path, files: int, backend: str) -> tuple[list[Arrays], str]:
    """Return the arrays of each rank, and what is wrong with them."""
    found: list[Arrays] = []
    for rank in range(files):
        path = folder / f"rank{rank}.npz"
        if not path.exists():
            return [], f"rank {rank} has written nothing"
        with numpy.load(path) as held:
            arrays = {name: held[name] for name in held.files}
        said = str(arrays.pop("backend", ""))
        if backend and said != backend:
            return [], f"rank {rank} has used {said or 'no backend'}, not {backend}"
        if not any(map(is_weight, arrays)):
            return [], f"rank {rank} has written no weights"
        for name, array in arrays.items():
            if not numpy.isfinite(array).all():
                return [], f"{name} of rank {rank} is not finite"
            first = found[0].get(name) if found else array
            if not name.startswith("rank.") and (first is None or distance(array, first) > 0):
                return [], f"{name} of rank {rank} is not that of rank 0"
        found.append(arrays)
    return found, ""


def is_weight(name: str) -> bool:
    return name.startswith("weights.")


def distance(
    left: numpy.ndarray[Any, Any], right: numpy.ndarray[Any, Any], floor: float = 0.0
) -> float:
    """Return the largest difference, over the largest value; 0 only if the bits are the same.

    ``floor`` is the least that it is relative to.
    """
    if left.shape != right.shape or left.dtype != right.dtype:
        return float("inf")
    if left.tobytes() == right.tobytes():
        return 0.0
    difference = numpy.abs(left.astype(float) - right.astype(float)).max()
    scale = max(numpy.abs(right.astype(float)).max(), floor, numpy.finfo(float).tiny)
    return max(float(difference / scale), float(numpy.finfo(float).tiny))


def summary(arrays: Arrays) -> str:
    """Return its numbers, and the norm of its weights."""
    numbers = [f"{name} {array.item():.9g}" for name, array in arrays.items() if array.size == 1
               and not name.startswith(("weights.", "rank.", "verb.", "size"))]  # fmt: skip
    weights = [array for name, array in arrays.items() if is_weight(name)]
    norm = numpy.sqrt(sum(float((array.astype(float) ** 2).sum()) for array in weights))
    count = sum(array.size for array in weights)
    return ", ".join([*numbers, f"norm of {count} weights {norm:.12g}"])
