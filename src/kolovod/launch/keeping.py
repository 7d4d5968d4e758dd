"""What a job needs to outlive its launcher, and the launcher that comes next to go on with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

__all__ = ["Kept", "Keeping", "Shown", "newest"]


class Shown(Protocol):
    """Knows what of the job's output somebody has seen, see ``Spool``."""

    def mark(self) -> int:
        """All that was written before now."""

    def is_shown(self, mark: int) -> bool:
        """Whether that was shown."""


@dataclass
class Kept:
    """What the next launcher is told: the agent on this host has it in memory (``agent``).

    Two agents on other hosts have copies, for when that one is killed with the launcher.
    """

    again: list[str]
    """The command line that starts it; none for agents on other hosts."""
    turn: int = 0
    """How many launchers there were before."""
    edition: int = 0
    """How often this launcher has told it before: the last one counts."""
    secret: str = field(default="", repr=False)
    rendezvous: str = ""
    steward: str = ""
    """Where both servers listen, and will again."""
    first_hosts: list[str] = field(default_factory=list)
    """Of the ranks of the first world."""
    hosts: list[str] = field(default_factory=list)
    """That have agents of the job."""
    places: dict[str, int] = field(default_factory=dict)
    processes: list[list[Any]] = field(default_factory=list)
    """Slot, host, the number of the member that it is, local rank, and whether it has resigned, by
    number."""
    ended_well: bool = False
    left: list[list[Any]] = field(default_factory=list)
    """Slot and host of those that wanted to leave: nobody takes their places."""

    def as_json(self) -> dict[str, Any]:
        """For the agent of this host."""
        return asdict(self)

    def copy_as_json(self) -> dict[str, Any]:
        """For an agent on another host, which starts no launcher."""
        return asdict(replace(self, again=[]))


def newest(copies: Iterable[Any]) -> Kept | None:
    """The last one of what agents have; None: they have nothing."""
    found = [Kept(**copy) for copy in copies if copy is not None]
    return max(found, key=lambda kept: (kept.turn, kept.edition), default=None)


@dataclass(frozen=True)
class Keeping:
    """How a job is kept: by agents of this name, and by ``again`` when the launcher is gone."""

    name: str
    again: Sequence[str]
    shown: Shown
    """Agents keep what was not, for the next launcher."""
    note_hosts: Callable[[Sequence[str]], None]
    """Is told which other hosts have agents."""
    hosts: Callable[[], Sequence[str]]
    """What it was told last, by this launcher or an earlier one."""
    goes_on: bool = False
    """Whether an earlier launcher has begun it."""
