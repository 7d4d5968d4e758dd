"""The setup of foreign engines: on all ranks, or on none of them.

The native engine carries what they must tell each other. This goes in rounds: in each, every rank
sends what it has to send since the last one, whether its backend stands, and why it never will. A
rank that waits for an answer asks for a further round; a rank that is ready takes part until all
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from kolovod import _native
from kolovod.core.objects import Objects
from kolovod.core.world import World
from kolovod.errors import BootstrapError

_NAME = "kolovod.backend"


class RankGroup(NamedTuple):
    """The world, or the process set of it, among whose ranks a backend works."""

    world: World
    engine: _native.Engine
    rank: int
    size: int

    def objects(self) -> Objects:
        """Objects among these ranks."""
        return Objects(lambda: self)


class _Word(NamedTuple):
    """The message of one rank in one round."""

    news: dict[str, bytes]
    stands: bool
    error: str


class BackendSetup:
    """One rank's part in the setup of its backend."""

    def __init__(self, objects: Objects) -> None:
        """``objects``: over the native engine of a world in which nothing else goes on yet."""
        self._objects = objects
        self._known: dict[str, bytes] = {}
        self._news: dict[str, bytes] = {}
        self._over = False

    def put(self, key: str, value: bytes) -> None:
        """Tell every rank, in the next round. A key is put by one rank, once."""
        self._known[key] = self._news[key] = value

    def say(self, key: str, value: bytes) -> None:
        """``put``, and take part in that round: for who does not come back before all have heard.

        Raises as ``get`` does.
        """
        self.put(key, value)
        self._round(_Word(self._take_news(), False, ""))

    def get(self, key: str) -> bytes:
        """The value of ``key``, as soon as a rank has put it.

        Raises BootstrapError when another rank's backend failed or no rank will ever put the key,
        and what allgather raises when a rank is lost.
        """
        while key not in self._known:
            words = self._round(_Word(self._take_news(), False, ""))
            if not any(word.news for word in words):  # all others wait as well, or are ready
                raise BootstrapError(f"backend: no rank has said its '{key}'")
        return self._known[key]

    def finish(self) -> None:
        """Say that the backend stands; return once all do. Raises as ``get`` does."""
        while not all(word.stands for word in self._round(_Word(self._take_news(), True, ""))):
            pass

    def fail(self, error: BaseException) -> None:
        """Say that there is no backend: the others raise, naming this rank and the error.

        Returns if they know already. Raises RankLostError if a rank is lost, the better reason.
        """
        if not self._over:
            self._over = True
            self._objects.allgather_object(_Word({}, False, _one_line(error)), _NAME)

    def _take_news(self) -> dict[str, bytes]:
        news, self._news = self._news, {}
        return news

    def _round(self, word: _Word) -> list[_Word]:
        try:
            words: list[_Word] = self._objects.allgather_object(word, _NAME)
            for rank, other in enumerate(words):
                if other.error:
                    raise BootstrapError(f"rank {rank} has no backend: {other.error}")
                self._known.update(other.news)
        except BaseException:
            self._over = True
            raise
        return words


def make_store(base: Any, meeting: BackendSetup, *, says_at_once: bool = False) -> Any:
    """Return a key-value store for torch.distributed: it holds the ranks' addresses.

    ``base``: ``torch.distributed.Store``. ``says_at_once``: a rank that sets a key waits for the
    others by other means, with no ``get``; they get the key before.
    """
    put = meeting.say if says_at_once else meeting.put

    class MeetingStore(base):  # type: ignore[misc]
        def set(self, key: str, value: bytes) -> None:
            put(key, bytes(value))

        def get(self, key: str) -> bytes:
            return meeting.get(key)

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            for key in keys:
                meeting.get(key)

    return MeetingStore()


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")
