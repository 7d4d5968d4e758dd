"""What makes a script elastic: a state that all ranks have alike, and a function that goes on.

::

    state = kv.elastic.State(weights=weights, step=0)

    @kv.elastic.run
    def train(state):
        while state.step < 1000:
            ...
            state.step += 1
            state.commit()

    train(state)

When a rank is lost the others repeat the step that they were at, in the same call of the function.
Ranks join, and leave, where the others call ``commit``; who joins gets the state of rank 0 and
enters the function. So what the function needs besides the state must follow from it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from kolovod import lifecycle
from kolovod.config import Settings
from kolovod.core import world as worlds
from kolovod.core.objects import Objects
from kolovod.core.uncaught import first_line
from kolovod.elastic import record_file, steps
from kolovod.elastic.session import Session
from kolovod.elastic.state import State
from kolovod.elastic.table import first_world
from kolovod.errors import (
    BootstrapError,
    CollectiveAbortedError,
    InvalidArgumentError,
    JobOverError,
    NotInitializedError,
)
from kolovod.notices import report_to_stderr
from kolovod.rendezvous.rank_environment import RankEnvironment

__all__ = ["run"]

R = TypeVar("R")

_job: _Job | None = None
_handler: Callable[[int, Any], None] | None = None  # of SIGTERM


def run(function: Callable[..., R]) -> Callable[..., R]:
    """Make ``function(state, ...)`` go on when ranks are lost, join and leave.

    Where the job is not elastic it is called as it is. Raises what it raises, and JobOverError when
    the job ends: too few ranks are left, say. A process that is sent SIGTERM leaves after the step
    that it is at, as one does whose host is not wanted any more: SystemExit(0).
    """

    @functools.wraps(function)
    def elastic(state: State, *args: Any, **kwargs: Any) -> R:
        if not isinstance(state, State):
            raise InvalidArgumentError(
                f"the first argument is a {type(state).__name__}: give a kolovod.elastic.State"
            )
        lifecycle.init()
        if _job is None:
            return function(state, *args, **kwargs)
        session = _job.session
        has_come_later = session is None
        session = _job.enter()
        try:
            if has_come_later:  # from now on the others may wait for this process
                lifecycle.shutdown()
                lifecycle.init()
            ongoing = steps.Steps(_Worlds(session), worlds.current)
            steps.enter(ongoing)
            _meet(ongoing)
            ongoing.lacks_state = True  # as the job begins; who joins lacks it anyway
            _share(state, ongoing, session)
            deal = _Deal(state, ongoing)
            deal.follow()
            state._on_commit = partial(_commit, ongoing=ongoing, session=session, deal=deal)
            with _leaving_by_sigterm(session):
                return _finished(partial(function, state, *args, **kwargs), ongoing)
        except JobOverError as error:
            if not error.has_left:
                raise
            report_to_stderr(str(error))
            raise SystemExit(0) from None
        except BaseException as error:  # the others shall not wait until this process has ended
            session.resign(first_line(error))
            raise
        finally:
            state._on_commit = None
            steps.enter(None)

    return elastic


def _finished(call: Callable[[], R], ongoing: steps.Steps) -> R:
    """What ``call()`` returns, when its programs are over.

    An error that a step raises within one (of TensorFlow, of JAX) comes out of it as another one.
    """
    try:
        result = call()
        steps.settle()
        return result
    except Exception:
        if ongoing.over is None:
            raise
        raise ongoing.over from None


class _Worlds:
    """See ``steps.Recovery``."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def reform(self, error: CollectiveAbortedError) -> None:
        self._session.failed(str(error))
        lifecycle.shutdown()
        lifecycle.init()

    @property
    def wants_change(self) -> bool:
        return self._session.wants_change

    @property
    def has_state(self) -> bool:
        return self._session.has_state


class _Deal:
    """Who gets which samples: a state's samplers follow the steps, and the worlds."""

    def __init__(self, state: State, ongoing: steps.Steps) -> None:
        self._samplers = state.samplers()
        self._ongoing = ongoing
        self._epoch = 0  # of the world whose ranks they know

    def record(self) -> None:
        """A step is over."""
        counted, self._ongoing.counted = self._ongoing.counted, None
        world = worlds.current()
        if counted is None and world.size == 1:  # whose optimizer sends nothing
            counted = world.members
        if counted is None and self._samplers:
            raise InvalidArgumentError(
                "commit() after no step that uses samples: combine gradients by a "
                "DistributedOptimizer, or by elastic.exactly(..., counts=True)"
            )
        for sampler in self._samplers:
            sampler.record_step(counted)

    def follow(self) -> None:
        """Deal the samples anew if the ranks are others than before."""
        while self._samplers and self._epoch != worlds.current().epoch:
            world = worlds.current()
            self._epoch = world.epoch
            for sampler in self._samplers:
                sampler.changed(world.members[world.rank], self._gather)

    def _gather(self, value: Any) -> list[Any]:
        objects = Objects(worlds.current)
        return self._ongoing.exactly(lambda: objects.allgather_object(value, "elastic.samples"))


def _commit(state: State, *, ongoing: steps.Steps, session: Session, deal: _Deal) -> None:
    """All ranks are here, after the same step."""
    steps.settle()
    deal.record()
    size = worlds.current().size
    wants_change = ongoing.must_stop
    if size == 1:  # it passes no tickets
        wants_change = session.wants_change
    if wants_change or size < session.min_np:
        ongoing.must_stop = False
        _change(ongoing, session)
    _share(state, ongoing, session)
    deal.follow()


def _share(state: State, ongoing: steps.Steps, session: Session) -> None:
    """``sync`` as a step: who has passed its ticket knows that all ranks have the state."""
    while ongoing.lacks_state:
        ongoing.lacks_state = False
        ongoing.exactly(state.sync)
        session.got_state()


@contextlib.contextmanager
def _leaving_by_sigterm(session: Session) -> Iterator[None]:
    """Within this context SIGTERM asks this process to leave after the step that it is at."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    global _handler
    _handler = lambda number, frame: session.leave()  # noqa: E731
    signal.signal(signal.SIGTERM, _handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _handler = None


def _change(ongoing: steps.Steps, session: Session) -> None:
    """All ranks are here: the next world."""
    session.stop_for_next()
    lifecycle.shutdown()
    lifecycle.init()
    _meet(ongoing)


def _meet(ongoing: steps.Steps) -> None:
    try:
        ongoing.meet()
    except CollectiveAbortedError as error:
        ongoing.recover(error)


def _abort(reason: str) -> None:
    """On the session's thread; the script may leave its world meanwhile."""
    with contextlib.suppress(NotInitializedError):
        worlds.current().engine.abort(reason)


class _Alone:
    """A process that has come to a job that runs: before ``run`` nobody waits for it."""

    def next_world(self) -> lifecycle.Place:
        """One of its own: what the script does before ``run`` concerns nobody else."""
        return lifecycle.Place(0, 0, (0,))

    def failed(self, reason: str) -> None:
        """Nobody else can make it fail, so another try would not help."""
        raise BootstrapError(reason)


class _Job:
    """What the launcher has told a process of an elastic job."""

    def __init__(self, environment: RankEnvironment, settings: Settings) -> None:
        self._place = environment
        self._is_encrypted = settings.encrypt
        self.begins = bool(environment.first_hosts)
        """Whether this process is one of those that the job starts with."""
        self.session: Session | None = None

    def enter(self) -> Session:
        """Be a member from now on."""
        place = self._place
        if self.session is None:
            first = first_world(enumerate(place.first_hosts)) if self.begins else None
            self.session = Session(
                place.steward,
                place.secret,
                place.slot,
                place.host,
                first=None if first is None else (place.slot, first),
                record_path=os.environ.get(record_file.VARIABLE, ""),
                encrypted=self._is_encrypted,
                abort=_abort,
                min_np=place.min_np,
            )
        return self.session


def _find(environment: RankEnvironment, settings: Settings) -> lifecycle.Guide | None:
    """What finds the worlds of a process, if its launcher has told it of a steward."""
    global _job
    if not environment.steward:
        return None
    if _job is None:
        _job = _Job(environment, settings)
    return _job.enter() if _job.begins or _job.session is not None else _Alone()


def _after_fork_in_child() -> None:
    """The session is the parent's, and SIGTERM ends a child as always."""
    global _job, _handler
    if _handler is not None and signal.getsignal(signal.SIGTERM) is _handler:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _job, _handler = None, None
    steps.enter(None)


os.register_at_fork(after_in_child=_after_fork_in_child)
lifecycle.guided_by(_find)
