"""The record of who took part in each step of an elastic job, for a replay in one process.

`kolovod.testing.replay` makes the same steps again, and says which was the first that differs.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kolovod.errors import ElasticArgumentError

__all__ = ["LoggedStep", "MembershipLog", "checksums"]

_VERSION = 1
Tensors = Callable[[], Mapping[str, Any]]


class LoggedStep(NamedTuple):
    """A step that all ranks have used. Members are known by numbers that no two processes have."""

    used: tuple[int, ...]
    """The members whose gradients are in its result, in the order in which they were added."""
    sums: dict[str, int] | None
    """Checksums of the tensors after the step, by name. None: they were not taken."""


class MembershipLog:
    """A log, for the ``State`` of an elastic job, of who took part in each step.

    It makes a note at each ``commit``. A rank that joins gets what the log has so far from rank 0,
    as it gets the weights. Checksums are those of *this* process's weights. Commit after each step
    of the optimizer, since an entry is one step (in a state with a LocalSGD or DiLoCo one
    exchange); and for a replay let what a process computes in a step follow from the step's number
    and from ``member``, not from its rank, which may change while it computes.
    """

    def __init__(self, tensors: Tensors | None = None, every: int = 1) -> None:
        """``tensors()``: the weights by name, to take a checksum of each after every step.

        NumPy's arrays, PyTorch's tensors, and what NumPy can make arrays of; a gigabyte takes about
        a second. None: no checksums. ``every``: take them after each so many steps only. Raises
        InvalidArgumentError for an ``every`` below 1.
        """
        if every < 1:
            raise ElasticArgumentError(f"every is {every}: give at least 1")
        self.steps: list[LoggedStep] = []
        """One for each step, from the first one of the job."""
        self.hosts: dict[int, str] = {}
        """Where each member is, or was."""
        self._tensors, self._every = tensors, every
        self._members: tuple[int, ...] = ()
        self._member: int | None = None

    @property
    def member(self) -> int:
        """The process, by a number that no other one of the job has.

        Raises InvalidArgumentError before the function that ``elastic.run`` calls.
        """
        if self._member is None:
            raise ElasticArgumentError("this process has no number yet: ask within elastic.run")
        return self._member

    def follow(self, members: Sequence[int], hosts: Sequence[str], rank: int) -> None:
        """Note the members of this process's world, by rank; it is ``rank``. ``run`` calls it."""
        if self._members != tuple(members):
            self._members = tuple(members)
            self._member = members[rank]
            self.hosts.update(zip(members, hosts, strict=True))

    def record(self, used: Sequence[int], *, takes_sums: bool = True) -> None:
        """A step is over whose result has the gradients of ``used``. ``State.commit`` calls it.

        ``takes_sums``: False where the weights are not those after this step any more.
        """
        is_due = (len(self.steps) + 1) % self._every == 0
        sums = None
        if self._tensors is not None and is_due and takes_sums:
            sums = checksums(self._tensors())
        self.steps.append(LoggedStep(tuple(used), sums))

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, as what JSON can hold."""
        worlds: dict[tuple[int, ...], int] = {}
        steps = [[worlds.setdefault(s.used, len(worlds)), s.sums] for s in self.steps]
        hosts = [[member, host] for member, host in sorted(self.hosts.items())]
        listed = [list(members) for members in worlds]
        return {"version": _VERSION, "hosts": hosts, "worlds": listed, "steps": steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Be as the log was that ``state`` is of. Raises InvalidArgumentError if it is of none."""
        try:
            if state["version"] != _VERSION:
                raise ValueError(f"version {state['version']!r}")
            worlds = [tuple(map(int, members)) for members in state["worlds"]]
            hosts = {int(member): str(host) for member, host in state["hosts"]}
            steps = [
                LoggedStep(worlds[used], None if sums is None else dict(sums))
                for used, sums in state["steps"]
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ElasticArgumentError(
                f"this is no state of a MembershipLog of version {_VERSION}: {error!r}"
            ) from None
        self.steps, self.hosts = steps, hosts

    def save(self, path: str | Path) -> None:
        """Write it to a file, as JSON."""
        Path(path).write_text(json.dumps(self.state_dict(), separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> MembershipLog:
        """Return the log that ``save`` has written.

        Raises OSError, and InvalidArgumentError for other files.
        """
        log = cls()
        try:
            state = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ElasticArgumentError(f"{path} is no saved MembershipLog: {error}") from None
        log.load_state_dict(state)
        return log


def checksums(tensors: Mapping[str, Any]) -> dict[str, int]:
    """Return the CRC-32 of each tensor's bytes."""
    return {name: zlib.crc32(_bytes_of(value)) for name, value in tensors.items()}


def _bytes_of(value: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):  # whose dtypes NumPy may not have
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
