"""The transaction in which a process's steps run: all ranks use a step's results, or none does.

In a job whose ranks stay, a step's results take effect as soon as they are there, and an error ends
the job: that is ``Transaction``. While an elastic job trains, ``elastic.steps.Steps`` stands in its
place, and repeats what the loss of a rank has interrupted. Front ends run what combines gradients
by ``transaction().run(...)``, and need not know which of the two it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ClassVar, Protocol, TypeVar

from kolovod.core.submission import WorldLike
from kolovod.errors import CollectiveAbortedError

__all__ = [
    "Forgets",
    "Transaction",
    "forget",
    "forgets",
    "settle",
    "settle_by",
    "transaction",
    "use_transaction",
]

T = TypeVar("T")


class Transaction:
    """The transaction of a job whose ranks stay: results take effect as they come."""

    is_elastic: ClassVar[bool] = False
    """True where a step of the training function is repeated if a rank is lost."""
    lacking: frozenset[int] = frozenset()
    """The ranks of this world that have come without the state."""
    recomputes: bool = False
    """True if what is interrupted is computed again from the last commit."""
    passed: int = 0
    """The number of steps that all ranks have completed."""

    @property
    def committed(self) -> int:
        """The number of steps that had been completed at the last commit."""
        return 0

    @property
    def keeps_gradients(self) -> bool:
        """True if a step is repeated from its gradients, which must stay as they are."""
        return False

    def run(
        self, attempt: Callable[[], T], *, counts: bool = False, is_repeatable: bool = True
    ) -> T:
        """Return what ``attempt()`` returns, when the results of all ranks take effect.

        ``counts`` and ``is_repeatable``: see ``elastic.exactly``. Raises what ``attempt`` raises.
        """
        return attempt()

    def run_in_program(self, attempt: Callable[[], T], *, counts: bool = False) -> T:
        """Do what ``run`` does, for a program of a framework that runs in a thread of its own."""
        return attempt()

    def counting(self, world: WorldLike) -> tuple[bool, int]:
        """Return whether this rank's gradients count, and over how many ranks a mean is taken.

        Those of all ranks of ``world`` do, except of ranks that are given the state meanwhile.
        """
        return True, world.size

    def follow(self) -> None:
        """Get into the next world if the present one has failed, in which nothing is going on."""

    def recover(self, error: CollectiveAbortedError) -> None:
        """Get into the world that follows the one that has failed by ``error``, or raise it."""
        raise error


_IMMEDIATE = Transaction()
_present: Transaction = _IMMEDIATE


def transaction() -> Transaction:
    """Return the transaction in which this process's steps run."""
    return _present


def use_transaction(new: Transaction | None) -> None:
    """Run this process's steps in ``new`` from now on; None: its job is not elastic."""
    global _present
    _present = _IMMEDIATE if new is None else new


class Forgets(Protocol):
    """An object that has something of a step that is under way."""

    def forget_step(self) -> None:
        """Forget the step: it is computed again from its beginning."""
        ...


_forgetting: weakref.WeakSet[Forgets] = weakref.WeakSet()


def forgets(holder: Forgets) -> None:
    """Have ``holder.forget_step()`` called, while it lives, where ranks go back to a commit."""
    _forgetting.add(holder)


def forget() -> None:
    """Have all holders forget the step that is under way."""
    for holder in list(_forgetting):
        holder.forget_step()


_settling: list[Callable[[], object]] = []


def settle_by(wait: Callable[[], object]) -> None:
    """Have ``wait()`` called before this process steps, or commits, outside of programs.

    It returns when the steps of all programs that were started before are over.
    """
    _settling.append(wait)


def settle() -> None:
    """Wait until the steps of all programs that were started before are over."""
    for wait in _settling:
        wait()
