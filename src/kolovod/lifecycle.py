"""The entry of this process into a world, and its end there: ``init`` and ``shutdown``.

``init`` finds out which rank this is, meets the others, makes the engine, gives the world its
backend, and starts the threads and hooks that watch it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from kolovod import _native, backends, blame, hiding
from kolovod.background_formation import BackgroundFormations, Formation
from kolovod.config import Settings, load
from kolovod.core import affinity, call_lines, deadlocks, record_files, stacks, uncaught
from kolovod.core import world as worlds
from kolovod.core.engine_factory import listed, make_engine, members_of
from kolovod.core.process_sets import ProcessSet, add_first_sets
from kolovod.core.world import Formed, World
from kolovod.errors import (
    AuthenticationError,
    BootstrapError,
    CollectiveAbortedError,
    InvalidArgumentError,
    NotInitializedError,
    SettingError,
    StartTimeoutError,
    unreached_rank,
)
from kolovod.notices import report_to_stderr
from kolovod.observe import counting, metrics_server, tensorboard, timeline
from kolovod.observe.live import showing
from kolovod.rendezvous.bootstrap import bootstrap
from kolovod.rendezvous.external import mpi
from kolovod.rendezvous.external.launchers import why_alone
from kolovod.rendezvous.external.meeting import ExternalJob, find_launcher, meet
from kolovod.rendezvous.protocol import Member
from kolovod.rendezvous.rank_environment import (
    RankEnvironment,
    local_and_cross,
    read_rank_environment,
)
from kolovod.rendezvous.segment_handover import Ready, own_pidfd

__all__ = [
    "FormAhead",
    "Guide",
    "WorldAssignment",
    "form_ahead",
    "guided_by",
    "has_rank",
    "init",
    "init_at",
    "leave",
    "shutdown",
]


_DOUBT_S = 10.0
"""How long a rank waits before it says that it waits; no job on one host takes so long to come."""


class WorldAssignment(NamedTuple):
    """The assignment of this process to a world of an elastic job."""

    epoch: int
    rank: int
    numbers: tuple[int, ...]
    """The members' numbers, in the order of their ranks: no two processes of a job have the
    same."""
    rendezvous: str = ""
    """The address where they meet; "": where the job began."""
    ballot: tuple[int, int] = (0, 0)
    """The ballot in which they have agreed to it: with the epoch no other world's."""


FormAhead = Callable[[WorldAssignment, Callable[[bool], None]], None]
"""``form_ahead``, given the environment of a process."""


class Guide(Protocol):
    """A guide that finds the worlds of an elastic job for this process."""

    def next_world(self) -> WorldAssignment:
        """Return this process's place in a world that it has not been in, once there is one."""
        ...

    def failed(self, reason: str, unreached: int | None = None) -> None:
        """The present world has failed, or was not formed, since ``unreached`` was not reached."""
        ...


_AHEAD_S = 5.0
"""The longest time for a world that forms beside another one."""
_LEAST_MEETING_S = 5.0
"""The least time that ranks wait for each other: a busy machine may keep one from coming."""
_END_S = 1.0

Find = Callable[[RankEnvironment | None, Settings], tuple[RankEnvironment, Guide] | None]

_find_guide: Find | None = None
_MOST_FAILURES = 20
"""Worlds in a row that an elastic job's process cannot form, before it gives up."""


def guided_by(find: Find) -> None:
    """Have ``init`` call ``find(environment, settings)`` for this process's environment and guide.

    None: the job has but one world. ``environment``: what a launcher of ours has told.
    """
    global _find_guide
    _find_guide = find


class _Process:
    """The state of this process besides its world. ``init`` and ``shutdown`` hold the lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.epochs_alone = 0  # worlds of one need no store to count them
        self.environment: RankEnvironment | None = None  # given by ``init_at``
        self.meetings: list[
            ExternalJob
        ] = []  # with ranks that another launcher than ours has started
        self.forked_from = ""  # not empty: a forked child, and of whom
        self.may_init = True
        self.has_exit_hook = False
        self.has_pruned = False  # the files of jobs that are long over
        self.watch: uncaught.Watch | None = None
        self.formations = BackgroundFormations()  # have a lock of their own: see form_ahead


_process = _Process()


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | None = None,
) -> None:
    """Form a world with the other ranks of the job; does nothing if this process is in one.

    Without a launcher the world has size 1; docs/launchers.md lists those that are recognised.
    ``comm``: the launcher ranks that form it, any iterable of whole numbers, the same on each of
    them (in any order); new ranks are positions in the sorted list. Or an mpi4py communicator with
    ascending members. After a failure the survivors call ``shutdown()`` and then
    ``init(comm=...)``, in the same processes.
    ``process_sets``: sets to add at once, the same on all ranks (see ``add_process_set``); if that
    fails, so does ``init``. An empty list makes sure that the others give none either.

    Returns when all ranks are there. Raises StartTimeoutError if one does not come (the limit is
    KOLOVOD_START_TIMEOUT_S), RankLostError if one has ended (its ``rank`` is a launcher
    rank, also where the message begins with the new one: "rank 0 on host a (pid 17, launched as
    rank 2)"), InvalidArgumentError for a wrong comm or a wrong environment, NotInitializedError in
    a process forked from a rank, AuthenticationError, BootstrapError.
    """
    if comm is not None and not mpi.is_communicator(comm):
        comm = listed(comm)
    with hiding.explained(), _process.lock:
        if worlds.is_initialized():
            _check_same_members(comm, worlds.current())
            return
        if not _process.may_init:
            raise NotInitializedError(_process.forked_from)
        stacks.answer_others()
        settings = load(os.environ)
        own = read_rank_environment(os.environ)
        found = None if _find_guide is None else _find_guide(own, settings)
        if found is not None:
            _follow(*found, comm, settings)
        else:
            with _doubting_launcher(settings.start_timeout_s):
                environment, members = _environment(comm, settings.start_timeout_s)
                _begin(environment, members, settings, None)
    if process_sets is not None:
        try:
            add_first_sets(process_sets)
        except BaseException:
            shutdown()
            raise


def _begin(
    environment: RankEnvironment,
    members: tuple[int, ...],
    settings: Settings,
    assignment: WorldAssignment | None,
) -> None:
    """Form a world and enter it. ``assignment``: see ``_make_world``."""
    with _noting_culprit():
        formation = _form_world(environment, members, settings, assignment)
    _enter(formation)


@contextlib.contextmanager
def _doubting_launcher(limit_s: float) -> Iterator[None]:
    """Within this context, who waits for ranks hears that there may never have been any.

    First on the way, where it waits for long, then in the error, after ``limit_s``.
    """
    found = None
    if read_rank_environment(os.environ) is None:
        with contextlib.suppress(
            InvalidArgumentError
        ):  # who needs the variables says what is wrong
            found = find_launcher(os.environ)
    if found is None:
        yield
        return
    text = f"{found}, waits for the other ranks, up to {limit_s:g} s. {found.doubt}"
    timer = threading.Timer(_DOUBT_S, report_to_stderr, [text])
    timer.daemon = True
    if not found.local_rank:  # one for each host is enough
        timer.start()
    try:
        yield
    except StartTimeoutError as error:
        raise StartTimeoutError(f"{error}. {found.doubt}") from None
    finally:
        timer.cancel()


@contextlib.contextmanager
def _noting_culprit() -> Iterator[None]:
    try:
        yield
    except CollectiveAbortedError as error:
        error.rank = blame.launched_as(error.rank, str(error))
        blame.note(error.rank)
        raise


def _form_world(
    environment: RankEnvironment,
    members: tuple[int, ...],
    settings: Settings,
    assignment: WorldAssignment | None,
) -> Formation:
    """Form a world, beside the one that this process may be in.

    ``assignment``: see ``_make_world``.
    """
    with contextlib.ExitStack() as cleanup:
        opening = cleanup.enter_context(
            contextlib.closing(_opening(environment, members, settings))
        )
        scope = 0 if assignment is None else assignment.epoch
        ready = _ready(environment, members, settings, scope, opening.notes)
        world = _make_world(ready, environment, settings, assignment)
        cleanup.pop_all()
        return Formation(world, ready.notes, opening)


def _follow(own: RankEnvironment, guide: Guide, comm: Any, settings: Settings) -> None:
    """Enter the next world of an elastic job; where one of its ranks is lost, the one after it."""
    if comm is not None:
        raise SettingError(
            "init(comm=...) in an elastic job, which decides by itself who is in its next world: "
            "leave comm out"
        )
    failures = 0
    while True:
        assignment = guide.next_world()
        try:
            formation = _process.formations.take(_key(assignment))
            if formation is not None:
                _enter(formation)
            else:
                _begin(*_told(own, assignment, settings), assignment)
            return
        except AuthenticationError:
            raise
        except (CollectiveAbortedError, BootstrapError) as error:
            failures += 1
            if failures == _MOST_FAILURES:
                raise
            guide.failed(str(error), unreached_rank(error))


def _told(
    own: RankEnvironment, assignment: WorldAssignment, settings: Settings
) -> tuple[RankEnvironment, tuple[int, ...], Settings]:
    """Return environment, members and settings for the world of ``assignment``.

    ``own``: the environment of the process. A world that is no epoch of the job's, of processes
    that have just come, has the launcher's numbers: several such worlds may form at a time.
    """
    members = tuple(range(len(assignment.numbers))) if assignment.epoch else assignment.numbers
    rendezvous = assignment.rendezvous or own.rendezvous
    rank = members[assignment.rank]
    environment = replace(own, rank=rank, size=len(members), rendezvous=rendezvous)
    return environment, members, replace(settings, elastic=True)


def form_ahead(
    own: RankEnvironment, assignment: WorldAssignment, done: Callable[[bool], None]
) -> None:
    """Form the world of ``assignment`` in a thread, beside the present one; ``init`` enters it.

    Unless a later one follows: then it is dropped. ``own``: the environment of this process.
    ``done(works)`` is called on that thread; at once if that world has formed already.
    """
    settings = load(os.environ)
    settings = replace(settings, start_timeout_s=min(settings.start_timeout_s, _AHEAD_S))
    told = _told(own, assignment, settings)
    _process.formations.begin(_key(assignment), lambda: _form_world(*told, assignment), done)


def _key(assignment: WorldAssignment) -> tuple[Any, ...]:
    """Return the world's key, which begins with ballot and epoch, the order of worlds."""
    return assignment.ballot, assignment.epoch, *assignment


def shutdown() -> None:
    """Leave the world; operations that are pending here fail with ShutDownError. Idempotent.

    The other ranks keep their world; only an operation that needs this rank fails there.
    """
    with _process.lock:
        timeline.end()
        showing.leave()
        tensorboard.leave()
        counting.leave()
        world = worlds.take()
        if world is None:
            return
        call_lines.turn(False)  # worlds of threads (kolovod.testing) may follow, which have none
        deadlocks.watch(False)
        if _process.watch is not None:
            _process.watch.end()
        for engine in reversed(world.sets.engines):
            engine.shutdown()
        world.engine.shutdown()
        _unpublish(world)
        for process_set in world.sets.by_id.values():
            process_set._forget()
        for carrier in (*world.sets.carriers.values(), world.carrier):
            if carrier is not None:
                carrier.stop()


def _check_same_members(comm: Any, world: World) -> None:
    """Raise InvalidArgumentError if ``comm`` asks for another world than this one."""
    asked = mpi.ranks_of(comm) if mpi.is_communicator(comm) else comm
    if asked is not None and members_of(asked, world.members[world.rank]) != world.members:
        raise SettingError(
            f"init(comm={list(asked)}): this process is in a world of the launcher ranks "
            f"{list(world.members)}; call shutdown() first"
        )


def _enter(formation: Formation) -> None:
    """Make this process a rank of the world that was formed, and close what is open for that.

    Raises what the backend does, and InvalidArgumentError for a timeline that cannot be written.
    """
    with contextlib.closing(formation.opening):
        with _noting_culprit():
            world = _with_carrier(formation.world)
        _be_rank_of(world)
        try:
            timeline.begin(world, formation.notes, formation.opening)
        except BaseException:
            shutdown()
            raise


def _be_rank_of(world: World) -> None:
    worlds.enter(world)
    call_lines.turn(world.settings.call_lines)
    deadlocks.watch(world.settings.deadlock_check)
    showing.enter(world)
    counting.enter(world)
    metrics_server.begin(world)
    tensorboard.begin(world)
    blame.formed(world.rank, world.members)
    blame.note(None)
    _process.watch = uncaught.Watch(world.engine.abort) if world.size > 1 else None
    _native.publish(0, world.engine)
    if not _process.has_exit_hook:
        atexit.register(leave_at_exit)
        _process.has_exit_hook = True


def _opening(
    environment: RankEnvironment, members: tuple[int, ...], settings: Settings
) -> timeline.Opening:
    if environment.rank != members[0]:
        return timeline.Opening()
    return timeline.prepare(settings, len(members), environment.rendezvous)


def _unpublish(world: World) -> None:
    """Have ops inside graphs find no engine from now on."""
    for number in (0, *world.sets.by_id):
        _native.publish(number, None)


def _environment(comm: Any, timeout_s: float) -> tuple[RankEnvironment, tuple[int, ...]]:
    """The environment of this rank, and the launcher ranks of the world that ``comm`` asks for."""
    by_mpi = comm if mpi.is_communicator(comm) else None
    ranks = comm if by_mpi is None else mpi.ranks_of(by_mpi)
    environment = read_rank_environment(os.environ) or _process.environment
    if environment is None and by_mpi is not None:  # which needs nothing else, whoever started it
        return mpi.meet(by_mpi), tuple(ranks)
    found = find_launcher(os.environ) if environment is None else None
    if found is None or found.size == 1:
        if environment is None and found is None and (text := why_alone(os.environ)):
            report_to_stderr(text)
        environment = environment or RankEnvironment()
        return environment, members_of(ranks, environment.rank, environment.size)
    members = members_of(ranks, found.rank, found.size)
    # The same one on all members: they were all there, in the same order.
    for meeting in _process.meetings:
        if meeting.ranks.issuperset(members):
            return meeting.environment, members
    meeting = meet(found, os.environ, members, timeout_s)
    _process.meetings.append(meeting)
    return meeting.environment, members


def has_rank() -> bool:
    """Return whether a launcher, ours or MPI's, has told this process its rank."""
    found = find_launcher(os.environ)
    return read_rank_environment(os.environ) is not None or (
        found is not None and found.launcher.is_mpi
    )


def init_at(environment: RankEnvironment) -> None:
    """``init`` in a process that has no launcher of ours but knows its environment."""
    with _process.lock:
        _process.environment = environment
        init()


def leave(environment: RankEnvironment) -> None:
    """``shutdown``, after which no world is formed at ``environment`` any more."""
    with _process.lock:
        shutdown()
        if _process.environment is environment:
            _process.environment = None


def _ready(
    environment: RankEnvironment,
    members: tuple[int, ...],
    settings: Settings,
    scope: int = 0,
    notes: Mapping[str, str] | None = None,
) -> Ready:
    """All that an engine among ``members`` needs, once they have met.

    ``scope``, ``notes``: see ``bootstrap``.
    """
    if len(members) > 1:
        return bootstrap(
            environment.rank,
            members,
            environment.host,
            environment.rendezvous,
            environment.secret,
            settings.engine_config(),
            settings.start_timeout_s,
            settings.interface_names,
            environment.local_rank,
            encrypts=settings.encrypt,
            notes=notes,
            scope=scope,
            meets_within_s=_meets_within_s(settings, scope),
        )
    _process.epochs_alone += 1
    member = Member(environment.rank, environment.host, os.getpid(), "", "", os.geteuid())
    facts = (member,), -1, (own_pidfd(),), settings.engine_config()
    return Ready(0, _process.epochs_alone, *facts, notes=notes or {})


def _meets_within_s(settings: Settings, scope: int) -> float:
    """Return how long the first rank that comes to a world waits for the others.

    ``scope``: the world's epoch. Members of an elastic job's epoch have all asked for it, so a rank
    that does not come hangs; it is left out then, and its launcher replaces it.
    """
    if not scope or not settings.late_failure_s:
        return settings.start_timeout_s
    return min(settings.start_timeout_s, max(settings.late_failure_s, _LEAST_MEETING_S))


def _form(world: World, ranks: Sequence[int]) -> Formed:
    """An engine among ``ranks`` of ``world``; there, a backend carries only what is on GPUs."""
    members = tuple(rank if world.scope else world.members[rank] for rank in ranks)
    device = "gpu" if world.takes_gpus else ""
    with _ready(world.environment, members, world.settings, world.scope) as ready:
        prefix = record_files.file_prefix(
            world.settings.last_operations_dir, world.environment.secret, ready.epoch, ranks
        )
        engine = make_engine(
            ready,
            world.core,
            external=device,
            ranks=tuple(ranks),
            world=world.engine,
            last_operations_prefix=prefix,
        )
    return Formed(engine, _carrier(world, engine, ranks) if device else None)


def _carrier(world: World, engine: _native.Engine, ranks: Sequence[int]) -> backends.Carrier:
    """Start the backend of ``world`` for ``engine``, which ends if there can be none."""
    try:
        return backends.start(world.settings.backend, world, engine, ranks)
    except BaseException:
        engine.shutdown()
        raise


def _make_world(
    ready: Ready,
    environment: RankEnvironment,
    settings: Settings,
    assignment: WorldAssignment | None,
) -> World:
    """``assignment``: in an elastic job, which numbers its worlds and their members."""
    size = len(ready.members)
    hosts = [member.host for member in ready.members]
    device = _carried(settings, size)
    local_rank, local_size, cross_rank, cross_size = local_and_cross(hosts, ready.rank)
    if assignment is not None and not assignment.epoch:  # others of the job are on this host, too
        local_rank, local_size = environment.local_rank, environment.local_size
    if ready.rank == 0 and not _process.has_pruned:
        _process.has_pruned = True
        record_files.prune()
    with ready:
        prefix = record_files.file_prefix(
            settings.last_operations_dir, environment.secret, ready.epoch
        )
        core = affinity.core_of(settings.thread_affinity, local_rank, local_size)
        engine = make_engine(ready, core, external=device, last_operations_prefix=prefix)
    return World(
        rank=ready.rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        cross_rank=cross_rank,
        cross_size=cross_size,
        host=hosts[ready.rank],
        epoch=ready.epoch if assignment is None else assignment.epoch,
        engine=engine,
        settings=settings,
        environment=environment,
        members=tuple(member.rank for member in ready.members)
        if assignment is None
        else assignment.numbers,
        scope=0 if assignment is None else assignment.epoch,
        hosts=tuple(hosts),
        core=core,
        former=_form,
        takes_gpus=device == "gpu",
    )


def _carried(settings: Settings, size: int) -> str:
    """Which tensors a backend carries in a world of ``size``; see ``make_engine``."""
    device = backends.device_of(settings.backend)
    return "" if device == "host" and size == 1 else device


def _with_carrier(world: World) -> World:
    """Return ``world`` with its backend, which is started only now.

    NCCL forms no communicator beside one that is in use.
    """
    if not _carried(world.settings, world.size):
        return world
    return replace(world, carrier=_carrier(world, world.engine, range(world.size)))


def end_by(error: BaseException) -> None:
    """End the world, if there is one, for all ranks: ``error`` ends this one."""
    if _process.watch is not None:
        _process.watch.tell(error)


def leave_at_exit() -> None:
    """Leave the world, with no thread in it any more, as the interpreter ends."""
    _process.formations.drop(_END_S)
    if not worlds.is_initialized():
        return
    if _process.watch is not None:
        world = worlds.current()
        engines = (world.engine, *world.sets.engines)
        _process.watch.tell_at_exit(sum(engine.pending() for engine in engines))
    shutdown()
    uncaught.let_threads_out()


def _after_fork_in_child() -> None:
    """The engine, its thread and its segment are the parent's: never touch them here."""
    global _process
    world = worlds.take()
    before, _process = _process, _Process()  # a new lock: the old one may be held by a lost thread
    if before.watch is not None:
        before.watch.end()
        blame.formed(-1, ())
    before.formations.forget()
    _process.epochs_alone = before.epochs_alone
    _process.has_exit_hook = before.has_exit_hook
    _process.forked_from, _process.may_init = before.forked_from, before.may_init
    if world is None:
        return
    _unpublish(world)
    timeline.forget()
    counting.forget()
    for engine in (*world.sets.engines, world.engine):
        engine.forget()
    _process.forked_from = (
        f"this process (pid {os.getpid()}) was forked from rank {world.rank} (pid {os.getppid()}), "
        "and a forked process is no rank: communicate in the parent, or start a process anew "
        "(multiprocessing's spawn method)"
    )
    worlds.explain_missing(_process.forked_from)
    _process.may_init = world.size == 1


os.register_at_fork(after_in_child=_after_fork_in_child)
