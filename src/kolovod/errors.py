"""Every error that Kolovod raises, as one tree.

::

    KolovodError (RuntimeError)
    ├── InvalidArgumentError (also ValueError)    a value that can never work; nothing was sent
    │   ├── DuplicateNameError                    the name is still pending on this rank
    │   ├── SettingError                          of a variable, a flag or an argument of init()
    │   ├── CommandArgumentError                  of a command, of kolovod.run, of a cluster's run
    │   ├── FrontEndArgumentError                 of an optimizer, a compressor or a verb of one
    │   ├── ElasticArgumentError                  of an elastic job's state, sampler or limits
    │   ├── GroupArgumentError                    of a process group of torch.distributed
    │   └── HelperArgumentError                   of metrics, of data, of kolovod.testing
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
        ├── StartTimeoutError                     a rank did not come in time
        ├── HostError                             ranks could not be started on the hosts
        ├── ElasticBootstrapError                 an elastic job cannot form a world, or go on
        ├── ClusterError                          Ray or Spark has no room for the ranks
        └── DataServiceError                      TensorFlow's data service cannot be used

Catch ``CollectiveAbortedError`` to form a new world after a failure, and ``KolovodError`` for all.
Each class has one ``code``, which tracebacks show: ``kolovod explain CODE`` prints cause and cure.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import ClassVar

from kolovod import blame
from kolovod.documentation import link

__all__ = [
    "AuthenticationError",
    "BootstrapError",
    "ClusterError",
    "CollectiveAbortedError",
    "CollectiveError",
    "CommandArgumentError",
    "DataServiceError",
    "DuplicateNameError",
    "ElasticArgumentError",
    "ElasticBootstrapError",
    "FrontEndArgumentError",
    "GroupArgumentError",
    "HelperArgumentError",
    "HostError",
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
    "SettingError",
    "ShutDownError",
    "StartTimeoutError",
    "WaitTimeoutError",
    "from_engine",
    "text_with_code",
    "unreached_rank",
]


class KolovodError(RuntimeError):
    """Base of all errors of Kolovod."""

    code: ClassVar[str] = ""
    """The code for ``kolovod explain``, for example "K201"; a note in a traceback names it."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        if self.code:  # not in the text, which others match, and put into theirs
            address = link(f"errors.md#{self.code.lower()}")
            how = f"kolovod explain {self.code}" + (f", or {address}" if address else "")
            self.__notes__ = [f"[{self.code}] cause and cure: {how}"]


class CollectiveError(KolovodError):
    """An operation of several ranks failed, through no argument of this call."""

    code = "K307"


class NotInitializedError(CollectiveError, ValueError):
    """There is no world in this process."""

    code = "K109"


class InvalidArgumentError(KolovodError, ValueError):
    """An argument, an environment variable or a flag has a value that cannot work."""

    code = "K103"


class DuplicateNameError(InvalidArgumentError):
    """A tensor of this name is already pending on this rank."""

    code = "K108"


class SettingError(InvalidArgumentError):
    """An environment variable, a flag of ``kolovod run`` or an argument of ``init()`` is wrong."""

    code = "K101"


class CommandArgumentError(InvalidArgumentError):
    """An argument of a command, of ``kolovod.run`` or of its relatives for clusters is wrong."""

    code = "K102"


class FrontEndArgumentError(InvalidArgumentError):
    """A front end cannot do what an argument asks for, or not with this framework's release."""

    code = "K104"


class ElasticArgumentError(InvalidArgumentError):
    """An elastic job's state, sampler, steps or limits were given what they cannot keep."""

    code = "K105"


class GroupArgumentError(InvalidArgumentError):
    """A process group of torch.distributed has no such operation, option or kind of tensor."""

    code = "K106"


class HelperArgumentError(InvalidArgumentError):
    """Metrics, data or ranks for a test were given what they cannot use."""

    code = "K107"


class MismatchError(CollectiveError):
    """Ranks submitted different dtypes, shapes, operations, roots or scales under one name."""

    code = "K201"


class CollectiveAbortedError(CollectiveError):
    """The world came to an end; operations that were pending have no result.

    ``rank`` is the rank that caused it, in the numbering of the world that ended, or None when the
    cause is not one rank.
    """

    code = "K306"

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank if rank is not None else _leading_rank(message)

    def __reduce__(
        self,
    ) -> tuple[type[CollectiveAbortedError], tuple[str, int | None], dict[str, object]]:
        """Keep ``rank`` when the error is sent to another process."""
        return type(self), (str(self), self.rank), self.__dict__


class RankLostError(CollectiveAbortedError):
    """A rank's process ended without leaving the world. ``rank`` says which."""

    code = "K301"


class RankLeftError(CollectiveAbortedError):
    """The operation needs a rank that has left, by ``shutdown()`` or by ending normally."""

    code = "K302"


class LateRankError(CollectiveAbortedError):
    """A rank was alive but late for longer than KOLOVOD_LATE_FAILURE_S. ``rank`` says which."""

    code = "K303"


class ShutDownError(CollectiveAbortedError):
    """Shut down on this rank before the operation completed."""

    code = "K304"


class InterruptedByRankError(CollectiveAbortedError):
    """A rank gave up in the middle: it was interrupted, or its script raised an exception."""

    code = "K305"


class WaitTimeoutError(KolovodError, TimeoutError):
    """The operation was not complete in time. It is still pending."""

    code = "K202"


class JobOverError(KolovodError):
    """An elastic job ends, or goes on without this process; the message says why."""

    code = "K501"

    def __init__(self, message: str, has_left: bool = False) -> None:
        """``has_left``: the process has left in good order."""
        super().__init__(message)
        self.has_left = has_left


class BootstrapError(KolovodError):
    """The ranks could not form a world."""

    code = "K402"


class AuthenticationError(BootstrapError):
    """The other end of a connection did not prove that it knows the job's secret."""

    code = "K406"


class StartTimeoutError(BootstrapError):
    """Not all ranks came within the start timeout; the message names the missing ones."""

    code = "K407"


class HostError(BootstrapError):
    """The launcher could not start its ranks on the hosts, or what answers there is another."""

    code = "K401"


class ElasticBootstrapError(BootstrapError):
    """An elastic job could not form a world, or a process of it does not reach the others."""

    code = "K403"


class ClusterError(BootstrapError):
    """Ray or Spark has not started as many actors or tasks as there are to be ranks."""

    code = "K404"


class DataServiceError(BootstrapError):
    """TensorFlow's data service is not there in time, or does not answer."""

    code = "K405"


class InternalError(CollectiveError):
    """A defect of Kolovod, not of its use."""

    code = "K901"


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
    """Return the text of ``error`` and how to learn more, for places that show no traceback."""
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
