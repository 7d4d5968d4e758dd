"""The world that this process is a rank of: formed by ``init``, left by ``shutdown``."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kolovod import _native, affinity, backends, uncaught
from kolovod.config import Settings, load
from kolovod.errors import (
    CollectiveAbortedError,
    InvalidArgumentError,
    NotInitializedError,
)
from kolovod.forming import listed, make_engine, members_of
from kolovod.launch import blame, mpi
from kolovod.launch.bootstrap import bootstrap
from kolovod.launch.formation import Member
from kolovod.launch.place import Place, local_and_cross, read_place
from kolovod.launch.sharing import Ready, own_pidfd
from kolovod.launch.started import Meeting, find_launcher, meet
from kolovod.observe import record_files, timeline

if TYPE_CHECKING:
    from kolovod.process_sets import ProcessSet

__all__ = [
    "World",
    "current",
    "has_place",
    "init",
    "init_at",
    "is_initialized",
    "leave",
    "shutdown",
    "word_with",
]


@dataclass(slots=True)
class Sets:
    """The process sets of a world."""

    by_id: dict[int, ProcessSet] = field(default_factory=dict)
    next_id: int = 1
    engines: list[_native.Engine] = field(default_factory=list)
    """Those of the sets that this rank is a member of."""


@dataclass(frozen=True, slots=True)
class World:
    """Facts that hold from ``init`` to ``shutdown``."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: str
    epoch: int
    engine: _native.Engine
    settings: Settings
    place: Place = field(repr=False)
    """What the launcher told this process; it holds the secret."""
    members: tuple[int, ...] = (0,)
    """The launcher's rank of each rank of this world."""
    hosts: tuple[str, ...] = ("localhost",)
    """The host of each rank."""
    sets: Sets = field(default_factory=Sets, repr=False)
    driver: backends.ExternalDriver | None = field(default=None, repr=False)
    """Carries the buckets when the backend is not the native one."""
    core: int | None = None
    """Where the engine's threads run, if they are bound to a core."""

    def form(self, ranks: Sequence[int]) -> _native.Engine:
        """An engine among ``ranks`` (ascending, with this one); called by these ranks only.

        It shares the fate of this world, and ends with it. Raises what ``init`` raises.
        """
        engine = self._form(ranks)
        try:
            engine = self._with_gpus(engine, ranks)
        except BaseException:
            engine.shutdown()
            raise
        self.sets.engines.append(engine)
        return engine

    def _form(self, ranks: Sequence[int], external: bool = False) -> _native.Engine:
        members = tuple(self.members[rank] for rank in ranks)
        with _ready(self.place, members, self.settings) as ready:
            prefix = record_files.file_prefix(
                self.settings.last_operations_dir, self.place.secret, ready.epoch, ranks
            )
            if external:
                # Its bucket only goes to another thread, so start that without delay.
                ready = replace(ready, config={**ready.config, "kick_bytes": 1})
            return make_engine(
                ready,
                self.core,
                external=external,
                ranks=tuple(ranks),
                world=native_part(self.engine),
                last_operations_prefix="" if external else prefix,
            )

    def _with_gpus(self, engine: _native.Engine, ranks: Sequence[int]) -> _native.Engine:
        """``engine``, and with the backend nccl a second one for tensors on GPUs, as one."""
        if self.settings.backend != "nccl":
            return engine
        from kolovod.backends import nccl

        position, size = ranks.index(self.rank), len(ranks)
        nccl.check(engine, position, size, self.host)
        device = self._form(ranks, external=True)
        try:
            return nccl.paired(engine, device, position, size, self.core)
        except BaseException:
            device.shutdown()
            raise

    def dissolve(self, engine: _native.Engine) -> None:
        """Shut down an engine that ``form`` made."""
        timeline.pull()
        self.sets.engines.remove(engine)
        engine.shutdown()


class _Process:
    """What this process knows besides its world. Everything but ``current`` holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.epochs_alone = 0  # worlds of one need no store to count them
        self.place: Place | None = None  # given by ``init_at``
        self.meetings: list[Meeting] = []  # with ranks that another launcher than ours has started
        self.forked_from = ""  # not empty: a forked child, and of whom
        self.may_init = True
        self.has_exit_hook = False
        self.watch: uncaught.Watch | None = None


_process = _Process()
_world: World | None = None


_wording: Callable[[str], str] = str  # what is said of a missing world


def current() -> World:
    """The world of this process. Raises NotInitializedError if there is none."""
    world = _world
    if world is None:
        raise _not_initialized()
    return world


def is_initialized() -> bool:
    """Whether this process is in a world."""
    return _world is not None


def has_nccl() -> bool:
    """Whether this process is in a world whose tensors on GPUs are carried by NCCL."""
    return _world is not None and _world.settings.backend == "nccl"


def native_part(engine: _native.Engine) -> _native.Engine:
    """The native engine of a world or a process set, which is all of it but with nccl."""
    part: _native.Engine = getattr(engine, "host", engine)
    return part


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
    global _world
    if comm is not None and not mpi.is_communicator(comm):
        comm = listed(comm)
    with _process.lock:
        if _world is not None:
            asked = mpi.ranks_of(comm) if mpi.is_communicator(comm) else comm
            if (
                asked is not None
                and members_of(asked, _world.members[_world.rank]) != _world.members
            ):
                raise InvalidArgumentError(
                    f"init(comm={list(asked)}): this process is in a world of the launcher ranks "
                    f"{list(_world.members)}; call shutdown() first"
                )
            return
        if not _process.may_init:
            raise NotInitializedError(_process.forked_from)
        settings = load(os.environ)
        place, members = _place(comm, settings.start_timeout_s)
        try:
            _world = _make_world(_ready(place, members, settings), place, settings)
        except CollectiveAbortedError as error:
            error.rank = blame.launched_as(error.rank, str(error))
            blame.note(error.rank)
            raise
        _watch(_world)
        _native.publish(0, native_part(_world.engine))
        if not _process.has_exit_hook:
            atexit.register(leave_at_exit)
            _process.has_exit_hook = True
        try:
            timeline.begin(_world)
        except BaseException:
            shutdown()
            raise
    if process_sets is not None:
        from kolovod.process_sets import add_first_sets  # which needs this module

        try:
            add_first_sets(process_sets)
        except BaseException:
            shutdown()
            raise


def shutdown() -> None:
    """Leave the world; operations that are pending here fail with ShutDownError. Idempotent.

    The other ranks keep their world; only an operation that needs this rank fails there.
    """
    global _world
    with _process.lock:
        timeline.end()
        world, _world = _world, None
        if world is None:
            return
        if _process.watch is not None:
            _process.watch.end()
        for engine in reversed(world.sets.engines):
            engine.shutdown()
        world.engine.shutdown()
        _unpublish(world)
        for process_set in world.sets.by_id.values():
            process_set._forget()
        if world.driver is not None:
            world.driver.stop()


def _watch(world: World) -> None:
    """From now on the others hear of an exception that ends this process."""
    blame.formed(world.rank, world.members)
    blame.note(None)
    _process.watch = uncaught.Watch(world.engine.abort) if world.size > 1 else None


def _unpublish(world: World) -> None:
    """From now on ops inside graphs find nothing."""
    for number in (0, *world.sets.by_id):
        _native.publish(number, None)


def _place(comm: Any, timeout_s: float) -> tuple[Place, tuple[int, ...]]:
    """The place of this process, and the launcher ranks of the world that ``comm`` asks for."""
    by_mpi = comm if mpi.is_communicator(comm) else None
    ranks = comm if by_mpi is None else mpi.ranks_of(by_mpi)
    place = read_place(os.environ) or _process.place
    if place is None and by_mpi is not None:  # which needs nothing else, whoever started it
        return mpi.meet(by_mpi), tuple(ranks)
    found = find_launcher(os.environ) if place is None else None
    if found is None or found.size == 1:
        place = place or Place()
        return place, members_of(ranks, place.rank, place.size)
    members = members_of(ranks, found.rank, found.size)
    # The same one on all members: they were all there, in the same order.
    for meeting in _process.meetings:
        if meeting.ranks.issuperset(members):
            return meeting.place, members
    meeting = meet(found, os.environ, members, timeout_s)
    _process.meetings.append(meeting)
    return meeting.place, members


def has_place() -> bool:
    """Whether a launcher, ours or MPI's, has told this process its rank."""
    found = find_launcher(os.environ)
    return read_place(os.environ) is not None or (found is not None and found.launcher.is_mpi)


def word_with(wording: Callable[[str], str]) -> None:
    """Have ``wording`` say what is said of a missing world: for an interface with other names."""
    global _wording
    _wording = wording


def init_at(place: Place) -> None:
    """``init`` in a process that has no launcher of ours but knows its place, as the others do."""
    with _process.lock:
        _process.place = place
        init()


def leave(place: Place) -> None:
    """``shutdown``, after which no world is formed at ``place`` any more."""
    with _process.lock:
        shutdown()
        if _process.place is place:
            _process.place = None


def _ready(place: Place, members: tuple[int, ...], settings: Settings) -> Ready:
    """All that an engine among ``members`` needs, once they have met."""
    if len(members) > 1:
        return bootstrap(
            place.rank,
            members,
            place.host,
            place.store,
            place.secret,
            settings.engine_config(),
            settings.start_timeout_s,
            settings.interface_names,
            place.local_rank,
            encrypts=settings.encrypt,
        )
    _process.epochs_alone += 1
    member = Member(place.rank, place.host, os.getpid(), "", "", os.geteuid())
    config = settings.engine_config()
    return Ready(0, _process.epochs_alone, (member,), -1, (own_pidfd(),), config)


def _make_world(ready: Ready, place: Place, settings: Settings) -> World:
    size = len(ready.members)
    hosts = [member.host for member in ready.members]
    is_external = settings.backend in ("mpi", "gloo") and size > 1
    local_rank, local_size, cross_rank, cross_size = local_and_cross(hosts, ready.rank)
    if ready.rank == 0:
        record_files.prune()
    with ready:
        prefix = record_files.file_prefix(settings.last_operations_dir, place.secret, ready.epoch)
        core = affinity.core_of(settings.thread_affinity, local_rank, local_size)
        engine = make_engine(ready, core, external=is_external, last_operations_prefix=prefix)
    world = World(
        rank=ready.rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        cross_rank=cross_rank,
        cross_size=cross_size,
        host=hosts[ready.rank],
        epoch=ready.epoch,
        engine=engine,
        settings=settings,
        place=place,
        members=tuple(member.rank for member in ready.members),
        hosts=tuple(hosts),
        core=core,
    )
    try:
        if not is_external:
            return replace(world, engine=world._with_gpus(engine, range(size)))
        return replace(world, driver=backends.start(settings.backend, world))
    except BaseException:
        engine.shutdown()
        raise


def _not_initialized() -> NotInitializedError:
    text = _process.forked_from or "there is no world in this process: call init() first"
    return NotInitializedError(_wording(text))


def end_by(error: BaseException) -> None:
    """End the world, if there is one, for all ranks: ``error`` ends this one."""
    if _process.watch is not None:
        _process.watch.tell(error)


def leave_at_exit() -> None:
    """Leave the world, with no thread in it any more, as the interpreter ends."""
    world = _world
    if world is None:
        return
    if _process.watch is not None:
        engines = (world.engine, *world.sets.engines)
        _process.watch.tell_at_exit(sum(engine.pending() for engine in engines))
    shutdown()
    uncaught.let_threads_out()


def _after_fork_in_child() -> None:
    """The engine, its thread and its segment are the parent's: never touch them here."""
    global _world, _process
    world, _world = _world, None
    before, _process = _process, _Process()  # a new lock: the old one may be held by a lost thread
    if before.watch is not None:
        before.watch.end()
        blame.formed(-1, ())
    _process.epochs_alone = before.epochs_alone
    _process.has_exit_hook = before.has_exit_hook
    _process.forked_from, _process.may_init = before.forked_from, before.may_init
    if world is None:
        return
    _unpublish(world)
    timeline.forget()
    for engine in (*world.sets.engines, world.engine):
        engine.forget()
    _process.forked_from = (
        f"this process (pid {os.getpid()}) was forked from rank {world.rank} (pid {os.getppid()}), "
        "and a forked process is no rank: communicate in the parent, or start a process anew "
        "(multiprocessing's spawn method)"
    )
    _process.may_init = world.size == 1


os.register_at_fork(after_in_child=_after_fork_in_child)
