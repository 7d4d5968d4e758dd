"""The part that makes a script elastic: a state that is alike on all ranks, and ``run``.

::

    state = elastic.State(weights=weights, step=0)

    @elastic.run
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
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar, overload

from kolovod import lifecycle
from kolovod.config import load
from kolovod.coordination.leaving import leaving_by_signals
from kolovod.core import deadlocks
from kolovod.core import world as worlds
from kolovod.core.objects import Objects
from kolovod.core.process_sets import add_process_set
from kolovod.core.transaction import settle, use_transaction
from kolovod.core.uncaught import bound_end, first_line
from kolovod.elastic import job_membership
from kolovod.elastic.each_world import then_in_each_world
from kolovod.elastic.handing_over import HandingOver, Portions
from kolovod.elastic.independent_training import check_independent
from kolovod.elastic.membership_client import MembershipClient
from kolovod.elastic.process_sets import KeptSets
from kolovod.elastic.state import State
from kolovod.elastic.steps import Steps
from kolovod.errors import (
    CollectiveAbortedError,
    CollectiveError,
    ElasticArgumentError,
    JobOverError,
    LateRankError,
    unreached_rank,
)
from kolovod.notices import report_to_stderr
from kolovod.rendezvous.rank_environment import read_rank_environment

__all__ = ["join", "resign", "run"]

R = TypeVar("R")
Redo = Literal["repeat", "recompute"]
Join = Literal["at_commit", "during_step"]

_END_S = 5.0
_LINGER_S = 30.0
"""How long a process whose script has ended by an exception may take to end."""
_CAUSE_S = 1.0
"""For the launcher to see who of a replica was killed, and to end the others."""


@overload
def run(
    function: Callable[..., R], *, redo: Redo = "repeat", join: Join = "at_commit"
) -> Callable[..., R]: ...


@overload
def run(
    *, redo: Redo = "repeat", join: Join = "at_commit"
) -> Callable[[Callable[..., R]], Callable[..., R]]: ...


def run(
    function: Callable[..., Any] | None = None,
    *,
    redo: Redo = "repeat",
    join: Join = "at_commit",
) -> Any:
    """Make ``function(state, ...)`` go on when ranks are lost, join and leave.

    ``redo``: what becomes of a step in which a rank is lost. "repeat": its reductions are repeated
    in the same call, for which the results need memory of their own. "recompute": gradients are
    reduced in place, and on all ranks the function is left by an exception and called again, with
    the state of the last ``commit``; so operations may be anywhere before the step's update, in
    forward, too (SyncBatchNorm).

    ``join``: when ranks that join are given the state. "at_commit": before their first step, and
    the others wait for that. "during_step": of PyTorch's modules and optimizers (those that
    ``DistributedOptimizer`` has wrapped) what is large is sent while all compute the next step;
    ranks that have joined compute it with the parameters that they have made themselves, and their
    gradients, and their samples of an ElasticSampler, do not count in it. For functions in which
    nothing else than the gradients depends on parameters before ``optimizer.step()``: a loss for a
    log is to be of rank 0. Only with ``redo`` "repeat".

    Where the job is not elastic it is called as it is. Raises what it raises, and JobOverError when
    the job ends: too few ranks are left, say. InvalidArgumentError for other arguments. A process
    that is sent SIGTERM or SIGUSR1 leaves at a ``commit``, as one does whose host is not wanted any
    more, when the others' world has formed beside the present one: SystemExit(0), or 143 where
    another launcher than ours has started it.
    """
    if redo not in ("repeat", "recompute"):
        raise ElasticArgumentError(f'redo is {redo!r}: need "repeat" or "recompute"')
    if join not in ("at_commit", "during_step"):
        raise ElasticArgumentError(f'join is {join!r}: need "at_commit" or "during_step"')
    if join == "during_step" and redo == "recompute":
        raise ElasticArgumentError(
            'join is "during_step" and redo "recompute": in forward operations would combine what '
            'comes of parameters that a rank does not have yet; use redo="repeat", or '
            'join="at_commit"'
        )
    if function is None:
        return functools.partial(run, redo=redo, join=join)
    return _elastic(
        function, recomputes=redo == "recompute", joins_during_step=join == "during_step"
    )


def _elastic(
    function: Callable[..., R], *, recomputes: bool, joins_during_step: bool
) -> Callable[..., R]:
    @functools.wraps(function)
    def elastic(state: State, *args: Any, **kwargs: Any) -> R:
        if not isinstance(state, State):
            raise ElasticArgumentError(
                f"the first argument is a {type(state).__name__}: give a kolovod.elastic.State"
            )
        check_independent(state.independent_trainings(), state.samplers(), recomputes=recomputes)
        lifecycle.init()
        membership = job_membership.current()
        if membership is None:
            for process_set in state.process_sets():
                if process_set.process_set_id is None:
                    add_process_set(process_set)
            return function(state, *args, **kwargs)
        has_come_later = membership.client is None
        client = membership.enter()
        hearing = contextlib.ExitStack()
        """Of signals that tell it to leave, until it has: one may come again at any time, by its
        launcher, and would end a process that has ceased to hear it."""
        try:
            if has_come_later:  # from now on the others may wait for this process
                lifecycle.shutdown()
                lifecycle.init()
            ongoing = Steps(
                _Worlds(client),
                worlds.current,
                recomputes=recomputes,
                entered=then_in_each_world(_first_in_a_world(state, membership.first_size)),
            )
            use_transaction(ongoing)
            ongoing.begin()
            # With those that a job begins with, too.
            handing_over = _share(state, ongoing, client, also=True)
            deal = _Deal(state, ongoing)
            deal.follow(takes_part=handing_over is None)
            state.has_size(ongoing.world.size)
            kept = _Kept(state, ongoing)
            state._on_commit = partial(
                _commit,
                ongoing=ongoing,
                client=client,
                deal=deal,
                kept=kept,
                joins_during_step=joins_during_step,
            )
            _hand_over(ongoing, handing_over)
            hearing.enter_context(leaving_by_signals(client.leave))
            with state.in_use():
                result = _settled(
                    partial(_call, partial(function, state, *args, **kwargs), ongoing, kept),
                    ongoing,
                )
            hearing.close()
            _finish(ongoing, client)
            return result
        except JobOverError as error:
            if not error.has_left:
                raise
            hearing.enter_context(leaving_by_signals(client.leave))  # it may have come before
            report_to_stderr(str(error))
            if client.leaves or membership.environment.replica:  # of which another one was told to
                state.has_left(client.last_rank)
            client.see_off()
            raise SystemExit(membership.leaving_code) from None
        except BaseException as error:  # the others shall not wait until this process has ended
            hearing.close()
            if membership.environment.replica:  # of which a rank may be killed, and the cause
                time.sleep(_CAUSE_S)
            resign(client, error)
            raise
        finally:
            hearing.close()
            state._on_commit = None
            use_transaction(None)

    return elastic


def _first_in_a_world(state: State, first_size: int | None) -> Callable[[], None]:
    """Return a function that readies values of the state in each world, when its ranks have met."""
    sets = KeptSets(state.process_sets(), first_size)

    def form() -> None:
        sets.form()
        for value in state.independent_trainings():
            value.enter_world()

    return form


def join() -> MembershipClient | None:
    """Make this process a member of its job before it comes to ``run``; None: it is not elastic.

    For what calls its function anew in each world, as Horovod's ``run`` does: the next ``init``
    returns in a world with the others.
    """
    membership = job_membership.find(read_rank_environment(os.environ), load(os.environ))
    return None if membership is None else membership.enter()


def resign(client: MembershipClient, error: BaseException) -> None:
    """Tell the others of an exception that leaves the function; they go on without this process.

    The launcher leaves it to finish, so it sees to its end itself if nobody catches the exception.
    """
    client.resign(first_line(error))
    bound_end(_LINGER_S)


def _settled(call: Callable[[], R], ongoing: Steps) -> R:
    """Return what ``call()`` returns, when its programs are over.

    An error that a step raises within one (of TensorFlow, of JAX) comes out of it as another one.
    """
    try:
        result = call()
        settle()
        return result
    except Exception:
        if ongoing.over is None:
            raise
        raise ongoing.over from None


class _Worlds:
    """The source of worlds for the steps, as ``steps.Recovery`` describes it."""

    def __init__(self, client: MembershipClient) -> None:
        self._client = client

    def reform(self, error: CollectiveAbortedError) -> None:
        is_late = isinstance(error, LateRankError)
        self._client.failed(str(error), unreached_rank(error), is_late=is_late)
        lifecycle.shutdown()
        lifecycle.init()

    @property
    def wants_change(self) -> bool:
        return self._client.wants_change

    @property
    def leaves(self) -> bool:
        return self._client.leaves

    @property
    def has_state(self) -> bool:
        return self._client.has_state

    @property
    def has_failed(self) -> bool:
        return self._client.has_failed


class _Deal:
    """The dealing of samples: a state's samplers and logs follow the steps and worlds."""

    def __init__(self, state: State, ongoing: Steps) -> None:
        self._samplers, self._logs = state.samplers(), state.logs()
        self._trains_independently = bool(state.independent_trainings())
        self._ongoing = ongoing
        self._epochs = [0 for _ in self._samplers]  # of the world whose ranks each knows

    def record(self) -> None:
        """Note that a step is over."""
        counted, self._ongoing.counted = self._ongoing.counted, None
        world = self._ongoing.world
        if counted is None and world.size == 1:  # whose optimizer sends nothing
            counted = world.members
        times, self._ongoing.all_counted = self._ongoing.all_counted, []
        if counted is None and (self._samplers or self._logs):
            raise ElasticArgumentError(
                "commit() after no step that uses samples: combine gradients by a "
                "DistributedOptimizer, or by elastic.exactly(..., counts=True)"
            )
        for sampler in self._samplers:
            sampler.record_step(counted)
        if self._logs and len(times) > 1 and not self._trains_independently:
            raise ElasticArgumentError(
                f"commit() after {len(times)} steps that combine gradients: with a MembershipLog "
                "in the state commit after each"
            )
        for log in self._logs:
            for used in times[:-1]:  # an entry for each exchange
                log.record(used, takes_sums=False)
            log.record([m for m in counted or () if m not in self._ongoing.weightless])

    def follow(self, *, takes_part: bool = True) -> None:
        """Deal the samples anew if the ranks are others than before, or it is due by their speeds.

        ``takes_part``: those that have come have samples in the next step.
        """
        for sampler in self._samplers:
            if sampler.is_due:
                now = self._ongoing.world
                sampler.changed(now.members[now.rank], self._gather, takes_part=takes_part)
        while (now := self._ongoing.world).epoch != min(self._epochs, default=now.epoch):
            place = self._epochs.index(min(self._epochs))
            self._samplers[place].changed(
                now.members[now.rank], self._gather, takes_part=takes_part
            )
            self._epochs[place] = self._ongoing.world.epoch
        world = self._ongoing.world
        for log in self._logs:
            log.follow(world.members, world.hosts, world.rank)

    def _gather(self, value: Any) -> list[Any]:
        objects = Objects(worlds.current)
        return self._ongoing.run(lambda: objects.allgather_object(value, "elastic.samples"))


class _Kept:
    """The state of the last commit, where steps are computed again."""

    def __init__(self, state: State, ongoing: Steps) -> None:
        self._state, self._ongoing = state, ongoing
        self.commit()

    def commit(self) -> None:
        """Keep the present state, which all ranks have."""
        self._ongoing.commit()
        if self._ongoing.recomputes:
            self.restore = self._state.keep()


def _call(function: Callable[[], R], ongoing: Steps, kept: _Kept) -> R:
    """Call ``function`` until it comes to its end, from the last commit if need be."""
    while True:
        try:
            return function()
        except CollectiveAbortedError as error:
            if not ongoing.recomputes:
                raise
            ongoing.go_back(error)
            kept.restore()


def _commit(
    state: State,
    *,
    ongoing: Steps,
    client: MembershipClient,
    deal: _Deal,
    kept: _Kept,
    joins_during_step: bool = False,
) -> None:
    """Commit, on all ranks, after the same step."""
    settle()
    ongoing.finish_hand_over()
    deal.record()
    handing_over = None
    size = ongoing.world.size
    must_stop = ongoing.must_stop if size > 1 else client.wants_change  # alone it has no tickets
    if must_stop or size < client.min_np:
        for value in state.independent_trainings():
            for _ in value.drain_exchanges():
                deal.record()
        client.stop_for_next(is_wanted=must_stop)
        lifecycle.shutdown()
        lifecycle.init()
        ongoing.begin()
        handing_over = _share(state, ongoing, client, during_step=joins_during_step)
    deal.follow(takes_part=handing_over is None)
    state.has_size(ongoing.world.size)
    kept.commit()
    _hand_over(ongoing, handing_over)


def _hand_over(ongoing: Steps, handing_over: HandingOver | None) -> None:
    """Send what is large of the state beside the next step."""
    if handing_over is not None:
        ongoing.hand_over(handing_over)
        with contextlib.suppress(CollectiveAbortedError):  # the step will notice, and see to it
            handing_over.start()


def _share(
    state: State,
    ongoing: Steps,
    client: MembershipClient,
    *,
    also: bool = False,
    during_step: bool = False,
) -> HandingOver | None:
    """Share the state as a step: who has passed its ticket knows that all ranks have it.

    Each try asks anew whether anybody lacks it (``also``: this rank says so): who does may be gone.
    ``during_step``: what is large may be left for the next step. It is returned; None: nothing is.
    """
    portions: list[Portions] = []

    def attempt() -> None:
        portions.clear()
        if ongoing.first_lacks_state:
            raise CollectiveError(
                f"rank 0 of epoch {ongoing.world.epoch} has come without the state that it would "
                "give to the others, so they keep what they have and the job ends: this is a "
                "defect of Kolovod"
            )
        if also or ongoing.lacks_state:
            portions.extend(state.hand_over(during_step=during_step))

    ongoing.run(attempt)
    if portions:
        return HandingOver(portions, ongoing, client.got_state)
    client.got_state()
    return None


def _finish(ongoing: Steps, client: MembershipClient) -> None:
    """Wait for the others' end: who has missed its last ticket can learn of it from this rank.

    Who does not come to it in _END_S is not waited for.
    """
    ongoing.finish_hand_over()
    if worlds.current().size == 1:
        client.finished()
        return

    def give_up() -> None:
        reason = "its function has ended, that of others has not"
        client.resign(reason)
        job_membership.abort(reason)

    timer = threading.Timer(_END_S, give_up)
    timer.start()
    try:
        with deadlocks.bounded():
            ongoing.run(lambda: None)
    except JobOverError:
        pass
    finally:
        timer.cancel()
    client.finished()


os.register_at_fork(after_in_child=lambda: use_transaction(None))
