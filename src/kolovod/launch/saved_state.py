"""The things that a job needs to outlive its launcher, and the next launcher to go on with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

__all__ = ["SavedState", "Persistence", "Shown", "newest"]


class Shown(Protocol):
    """The interface that tells which output of the job somebody has seen; see ``Spool``."""

    def mark(self) -> int:
        """Return a mark of all that was written before now."""

    def is_shown(self, mark: int) -> bool:
        """Return whether all that was written before ``mark`` was shown."""


@dataclass
class SavedState:
    """The facts that the next launcher is told: this host's agent has them in memory (``agent``).

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
    coordinator: str = ""
    """The addresses at which both servers listen, and will again."""
    first_hosts: list[str] = field(default_factory=list)
    """The hosts of the ranks of the first world."""
    hosts: list[str] = field(default_factory=list)
    """The hosts that have agents of the job."""
    places: dict[str, int] = field(default_factory=dict)
    processes: list[list[Any]] = field(default_factory=list)
    """Slot, host, the number of the member that it is, local rank, and whether it has resigned, by
    number."""
    ended_well: bool = False
    left: list[list[Any]] = field(default_factory=list)
    """Slot and host of those that wanted to leave: nobody takes their places."""

    def as_json(self) -> dict[str, Any]:
        """Return the value for the agent of this host."""
        return asdict(self)

    def copy_as_json(self) -> dict[str, Any]:
        """Return the value for an agent on another host, which starts no launcher."""
        return asdict(replace(self, again=[]))


def newest(copies: Iterable[Any]) -> SavedState | None:
    """Return the last one of what agents have; None: they have nothing."""
    found = [SavedState(**copy) for copy in copies if copy is not None]
    return max(found, key=lambda kept: (kept.turn, kept.edition), default=None)


@dataclass(frozen=True)
class Persistence:
    """The way in which a job outlives its launcher: by agents of this name, and by ``again``.

    ``again`` starts the next launcher when this one is gone.
    """

    name: str
    again: Sequence[str]
    shown: Shown
    """Knows what users have seen: agents keep the rest, for the next launcher."""
    note_hosts: Callable[[Sequence[str]], None]
    """Is told which other hosts have agents."""
    hosts: Callable[[], Sequence[str]]
    """Returns the hosts that ``note_hosts`` was told last, by this launcher or an earlier one."""
    goes_on: bool = False
    """Whether an earlier launcher has begun it."""
