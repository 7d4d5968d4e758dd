"""Every error that Kolovod raises, as one tree.

::

    KolovodError (RuntimeError)
    ├── InvalidArgumentError (also ValueError)    a value that can never work; nothing was sent
    │   └── DuplicateNameError                    the name is still pending on this rank
    ├── CollectiveError                           an operation of the ranks together failed
    │   ├── NotInitializedError (also ValueError) init() has not been called, or in another process
    │   ├── MismatchError                         the ranks disagree; the world stays usable
    │   ├── CollectiveAbortedError                the world is over: shutdown(), then init() again
    │   │   ├── RankLostError (.rank)             a rank's process ended without leaving
    │   │   ├── RankLeftError (.rank)             a rank left before this operation
    │   │   ├── LateRankError (.rank)             a rank kept the others waiting for too long
    │   │   ├── ShutDownError                     this rank shut down before it completed
    │   │   └── InterruptedByRankError (.rank)    a rank gave up: Ctrl-C, or an uncaught exception
    │   └── InternalError                         a defect of Kolovod: please report it
    ├── WaitTimeoutError (also TimeoutError)      still pending; wait again, or shut down
    ├── JobOverError                              an elastic job ends, or goes on without this rank
    └── BootstrapError                            the world could not be formed
        ├── AuthenticationError                   the other end does not know the job's secret
        └── StartTimeoutError                     a rank did not come in time

Catch ``CollectiveAbortedError`` to form a new world after a failure, and ``KolovodError`` for all.
``kolovod explain CODE`` prints cause and cure of an error by its ``code``, which tracebacks show.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache

from kolovod import blame
from kolovod.documentation import link
from kolovod.explanations import code_of

__all__ = [
    "AuthenticationError",
    "BootstrapError",
    "CollectiveAbortedError",
    "CollectiveError",
    "DuplicateNameError",
    "InternalError",
    "InterruptedByRankError",
    "InvalidArgumentError",
    "JobOverError",
    "KolovodError",
    "LateRankError",
    "MismatchError",
    "NotInitializedError",
    "RankLeftError",
    "RankLostError",
    "ShutDownError",
    "StartTimeoutError",
    "WaitTimeoutError",
    "from_engine",
    "text_with_code",
    "unreached_rank",
]


class KolovodError(RuntimeError):
    """Base of all errors of Kolovod."""

    code = ""
    """For ``kolovod explain``, for example "K201"; a note in a traceback names it."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        frame = sys._getframe(1)  # of who raises it, behind the constructors of subclasses
        while frame.f_code.co_name == "__init__" and frame.f_back is not None:
            frame = frame.f_back
        kinds = tuple(kind.__name__ for kind in type(self).__mro__)
        self.code = code_of(kinds, frame.f_globals.get("__name__", ""))
        if self.code:  # not in the text, which others match, and put into theirs
            address = link(f"errors.md#{self.code.lower()}")
            how = f"kolovod explain {self.code}" + (f", or {address}" if address else "")
            self.__notes__ = [f"[{self.code}] cause and cure: {how}"]


class CollectiveError(KolovodError):
    """An operation of several ranks failed, through no argument of this call."""


class NotInitializedError(CollectiveError, ValueError):
    """There is no world in this process."""


class InvalidArgumentError(KolovodError, ValueError):
    """An argument, an environment variable or a flag has a value that cannot work."""


class DuplicateNameError(InvalidArgumentError):
    """A tensor of this name is already pending on this rank."""


class MismatchError(CollectiveError):
    """Ranks submitted different dtypes, shapes, operations, roots or scales under one name."""


class CollectiveAbortedError(CollectiveError):
    """The world came to an end; operations that were pending have no result.

    ``rank`` is the rank that caused it, in the numbering of the world that ended, or None when the
    cause is not one rank.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank if rank is not None else _leading_rank(message)

    def __reduce__(
        self,
    ) -> tuple[type[CollectiveAbortedError], tuple[str, int | None], dict[str, object]]:
        """Keep ``rank`` and ``code`` when the error is sent to another process."""
        return type(self), (str(self), self.rank), self.__dict__


class RankLostError(CollectiveAbortedError):
    """A rank's process ended without leaving the world. ``rank`` says which."""


class RankLeftError(CollectiveAbortedError):
    """The operation needs a rank that has left, by ``shutdown()`` or by ending normally."""


class LateRankError(CollectiveAbortedError):
    """A rank was alive but late for longer than KOLOVOD_LATE_FAILURE_S. ``rank`` says which."""


class ShutDownError(CollectiveAbortedError):
    """Shut down on this rank before the operation completed."""


class InterruptedByRankError(CollectiveAbortedError):
    """A rank gave up in the middle: it was interrupted, or its script raised an exception."""


class WaitTimeoutError(KolovodError, TimeoutError):
    """The operation was not complete in time. It is still pending."""


class JobOverError(KolovodError):
    """An elastic job ends, or goes on without this process; the message says why."""

    def __init__(self, message: str, has_left: bool = False) -> None:
        """``has_left``: the process has left in good order."""
        super().__init__(message)
        self.has_left = has_left


class BootstrapError(KolovodError):
    """The ranks could not form a world."""


class AuthenticationError(BootstrapError):
    """The other end of a connection did not prove that it knows the job's secret."""


class StartTimeoutError(BootstrapError):
    """Not all ranks came within the start timeout; the message names the missing ones."""


class InternalError(CollectiveError):
    """A defect of Kolovod, not of its use."""


_BY_STATUS: dict[str, type[KolovodError]] = {
    "invalid_argument": InvalidArgumentError,
    "duplicate_name": DuplicateNameError,
    "mismatch": MismatchError,
    "rank_lost": RankLostError,
    "rank_left": RankLeftError,
    "shut_down": ShutDownError,
    "timeout": WaitTimeoutError,
    "interrupted": InterruptedByRankError,
    "internal": InternalError,
    "late": LateRankError,
}

_LEADING_RANK = re.compile(r"(?:the host of )?rank (\d{1,9})\b")


def unreached_rank(error: BaseException) -> int | None:
    """The rank that others could not reach, or waited for in vain; None: ``error`` is another one.

    In the numbering of the world that has ended, or could not be formed.
    """
    if isinstance(error, (RankLostError, LateRankError)):
        return error.rank
    return _leading_rank(str(error)) if isinstance(error, BootstrapError) else None


def text_with_code(error: BaseException) -> str:
    """What ``error`` says, and how to learn more, for where no traceback is shown."""
    code = error.code if isinstance(error, KolovodError) else ""
    return f"{error} (kolovod explain {code})" if code else str(error)


def _leading_rank(message: str) -> int | None:
    match = _LEADING_RANK.match(message)
    return int(match.group(1)) if match else None


@lru_cache(maxsize=1)
def _by_code() -> dict[int, type[KolovodError]]:
    from kolovod import _native  # here, so that this module needs no compiled code

    return {code: _BY_STATUS[name] for name, code in _native.STATUS.items() if name != "ok"}


def from_engine(exc: BaseException) -> KolovodError:
    """Return the error of this tree for an ``EngineError`` (``args``: code and message)."""
    code, message = exc.args if len(exc.args) == 2 else (None, str(exc))
    kind = _by_code().get(code) if isinstance(code, int) else None
    if kind is None:
        return InternalError(f"the engine failed with the unknown code {code!r}: {message}")
    error = kind(str(message))
    if isinstance(error, CollectiveAbortedError) and kind is not LateRankError:
        blame.note_member(error.rank)  # who may catch this, and end by sys.exit
    return error
