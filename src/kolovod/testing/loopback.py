"""Runs several ranks as threads of this process, over the real engine and segment code.

A fake world for tests: no launcher, sockets only between ``hosts``, and faults on request.

    with loopback(3) as world:
        sums = world.run(lambda kv: kv.allreduce(np.full(2, kv.world().rank), op=Sum))
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from kolovod import _native
from kolovod.core.collectives import Collectives
from kolovod.core.frontend import Frontend
from kolovod.core.numpy_frontend import NumpyFrontend
from kolovod.errors import CollectiveAbortedError, HelperArgumentError

T = TypeVar("T")
R = TypeVar("R")

_GRACE_S = 3.0  # for the other ranks to finish, once one has failed


class LoopbackRank(NamedTuple):
    """The world as one of its ranks sees it."""

    engine: _native.Engine
    rank: int
    size: int


class LoopbackSet:
    """A process set of a loopback world: what its verbs take as ``process_set``."""

    def __init__(self, ranks: list[int], members: Mapping[int, LoopbackRank]) -> None:
        """Use ``Loopback.process_set``."""
        self.ranks = ranks
        self._members = members

    @property
    def membership(self) -> Callable[[], LoopbackRank]:
        """A function that returns what the rank of this thread is, in other threads as well."""
        return partial(self._member, getattr(_thread, "rank", -1))

    def _member(self, rank: int) -> LoopbackRank:
        if rank not in self._members:
            raise HelperArgumentError(f"rank {rank} is not in the process set {self.ranks}")
        return self._members[rank]

    def position(self, rank: int) -> int:
        """Return the position of ``rank`` in the set."""
        if rank not in self.ranks:
            raise HelperArgumentError(f"rank {rank} is not in the process set {self.ranks}")
        return self.ranks.index(rank)


_thread = threading.local()  # .rank: the rank that the thread is


class Loopback(Generic[T]):
    """``size`` ranks; ``run`` lets each of them work in a thread of its own."""

    def __init__(
        self, hosts: Sequence[int], frontend: Frontend[T], config: Mapping[str, int]
    ) -> None:
        """Use ``loopback()``, which also shuts the engines down."""
        self.size = size = len(hosts)
        self._native = _native.LoopbackWorld(hosts, config)
        self._sets: list[list[LoopbackRank]] = []
        engines = _in_threads(size, self._native.engine, 60.0, lambda: None)
        self.ranks = [LoopbackRank(engine, r, size) for r, engine in enumerate(engines)]
        self.collectives = [Collectives(frontend, _returning(facts)) for facts in self.ranks]

    def run(self, work: Callable[[Collectives], R], timeout_s: float = 60.0) -> list[R]:
        """Call ``work`` for every rank, each in its own thread; return the results by rank.

        When a rank raises, the others have a few seconds to finish, then the world is aborted; the
        first error that is not merely a consequence is raised here. Raises TimeoutError naming the
        ranks that were still at work after ``timeout_s``.
        """
        return _in_threads(
            self.size, lambda rank: work(self.collectives[rank]), timeout_s, self._abort
        )

    def process_set(self, ranks: Sequence[int]) -> LoopbackSet:
        """Return a set of ranks of this world, usable within ``run``, on threads it starts."""
        members = sorted(ranks)
        native = self._native.make_set(members)
        engines = _in_threads(len(members), native.engine, 60.0, lambda: None)
        facts = {
            rank: LoopbackRank(engine, position, len(members))
            for position, (rank, engine) in enumerate(zip(members, engines, strict=True))
        }
        self._sets.append(list(facts.values()))
        return LoopbackSet(members, facts)

    def kill(self, rank: int) -> None:
        """From now on ``rank`` behaves like a process that was killed."""
        self._native.kill(rank)

    def delay(self, rank: int, delay_s: float) -> None:
        """Let ``rank`` sleep before each of its announcements and data flags; 0 ends it."""
        self._native.delay(rank, int(delay_s * 1e6))

    def drop(self, rank: int, count: int) -> None:
        """Lose the next ``count`` announcements of ``rank``."""
        self._native.drop(rank, count)

    def close(self) -> None:
        """Shut every engine down; operations still pending fail."""
        for ranks in (*self._sets, self.ranks):
            _in_threads(len(ranks), _shutting_down(ranks), 60.0, self._abort)

    def _abort(self) -> None:
        for facts in self.ranks:
            facts.engine.abort("another rank of the loopback world failed, or time is over")


@contextmanager
def loopback(
    size: int,
    frontend: Frontend[Any] | None = None,
    config: Mapping[str, int] | None = None,
    hosts: Sequence[int] | None = None,
) -> Iterator[Loopback[Any]]:
    """Make a Loopback of ``size`` ranks for the length of a ``with`` block.

    ``frontend`` says whose tensors the verbs take (NumPy arrays by default); ``config`` replaces
    fields of ``_native.config_defaults()``. ``hosts``: by rank a number for its host; those of
    different hosts are connected by sockets instead of shared memory. Raises InvalidArgumentError
    when ``size`` is not positive, or there is not one host for each rank.
    """
    if size < 1:
        raise HelperArgumentError(f"loopback size is {size}: need at least one rank")
    fields = {**_native.config_defaults(), **(config or {})}
    if hosts is not None and len(hosts) != size:
        raise HelperArgumentError(f"loopback: {len(hosts)} hosts for {size} ranks; give each one")
    world = Loopback(
        [0] * size if hosts is None else hosts,
        NumpyFrontend() if frontend is None else frontend,
        fields,
    )
    try:
        yield world
    finally:
        world.close()


def _shutting_down(ranks: Sequence[LoopbackRank]) -> Callable[[int], None]:
    return lambda index: ranks[index].engine.shutdown()


def _returning(facts: LoopbackRank) -> Callable[[], LoopbackRank]:
    return lambda: facts


def _in_threads(
    size: int, work: Callable[[int], R], timeout_s: float, abort: Callable[[], None]
) -> list[R]:
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}
    changed = threading.Condition()

    def body(rank: int) -> None:
        _thread.rank = rank
        try:
            result = work(rank)
        except BaseException as error:
            with changed:
                errors[rank] = error
                changed.notify_all()
        else:
            with changed:
                results[rank] = result
                changed.notify_all()

    threads = [
        threading.Thread(target=body, args=(r,), name=f"loopback-rank-{r}", daemon=True)
        for r in range(size)
    ]
    for thread in threads:
        thread.start()

    def all_done() -> bool:
        return len(results) + len(errors) == size

    deadline = time.monotonic() + timeout_s
    with changed:
        changed.wait_for(lambda: all_done() or bool(errors), timeout_s)
        changed.wait_for(all_done, min(_GRACE_S, max(0.0, deadline - time.monotonic())))
        late = sorted(set(range(size)) - results.keys() - errors.keys())
    if late:
        abort()
        with changed:
            changed.wait_for(all_done, _GRACE_S)
    _raise_first(errors)
    if late:
        raise TimeoutError(f"loopback ranks {late} were still at work after {timeout_s} s")
    for thread in threads:
        thread.join()
    return [results[r] for r in range(size)]


def _raise_first(errors: Mapping[int, BaseException]) -> None:
    """Raise the cause rather than what it led to on the other ranks."""
    by_rank = [errors[rank] for rank in sorted(errors)]
    causes = [error for error in by_rank if not isinstance(error, CollectiveAbortedError)]
    for error in causes or by_rank:
        raise error
