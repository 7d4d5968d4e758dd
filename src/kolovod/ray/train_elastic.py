"""Ray Train's workers as the ranks of an elastic job.

Train starts a worker in the place of one that has failed, and the others go on meanwhile. What
other jobs' launchers do is divided: Train starts and ends processes, an actor is the coordinator
(``ElasticMeeting``), one on each node holds what a worker leaves (``NodeMonitor``). Here is what
Train's controller does, which tells each worker of these, and what a worker does around its loop.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from kolovod import lifecycle
from kolovod.coordination import record_file
from kolovod.elastic import job_membership
from kolovod.errors import CommandArgumentError, JobOverError
from kolovod.launch.function import end_world_by
from kolovod.launch.local import GRACE_S
from kolovod.ray.answers import answer
from kolovod.ray.elastic_meeting import Addresses, ElasticMeeting, Over
from kolovod.ray.node_monitor import Kept, NodeMonitor
from kolovod.ray.places import on_node
from kolovod.rendezvous.rank_environment import RankEnvironment, local_and_cross

__all__ = ["ElasticGroup", "as_rank"]

_START_S = 60.0
_CALL_S = 30.0
_ALIVE_S = 5.0
"""For a worker to answer, whose main thread does nothing else."""

_Execute = Callable[..., Any]


class _Where(NamedTuple):
    """The host, the node and the process of a worker."""

    host: str
    node_id: str
    pid: int


class _Process(NamedTuple):
    """A process that belongs to a job."""

    number: int
    where: _Where
    local_rank: int


class ElasticGroup:
    """A group of Train's workers, in its controller."""

    def __init__(self, workers: Any, min_workers: int, elastic_timeout_s: float) -> None:
        """``workers``: Train's group."""
        self._workers = workers
        self._min, self._timeout_s = min_workers, elastic_timeout_s
        self._where: list[_Where] = []  # of each slot's last process
        self._jobs: list[_Job] = []
        self._is_sorting_out = False

    def start(self) -> None:
        """Tell all workers. Raises InvalidArgumentError where they are fewer than the fewest."""
        self._where = self._workers.execute(_where)
        if len(self._where) < self._min:
            raise CommandArgumentError(
                f"KolovodConfig(min_workers={self._min}): Train has {len(self._where)} workers"
            )
        job = self._new_job()
        for slot in range(len(self._where)):
            self._tell(job, slot, self._workers, slot)

    def slot_of(self, replica: Any) -> int | None:
        """Return the slot of the one worker in this group of Train's; None: it is not of these."""
        replicas = self._workers.get_replica_groups() or ()
        return next((slot for slot, own in enumerate(replicas) if own is replica), None)

    def replace(self, slot: int, replica: Any) -> None:
        """A worker of Train's has come to fill ``slot``."""
        job = self._jobs[-1]
        job.bury(slot)
        (self._where[slot],) = replica.execute(_where)
        over: Over = ray.get(job.meeting.over.remote(), timeout=_CALL_S)
        if over.reason and not over.is_well:
            # All members fail by that, but Train may see some before others. Those that follow
            # them, one by one, begin anew.
            job = self._new_job()
        self._tell(job, slot, replica, 0)

    def sort_out(self, replica: Any) -> None:
        """A worker's group is being shut down: shut down those of others that have died, too.

        To replace a worker Train (2.60) clears what all others have reported, those included that
        have died and are still to be replaced; that ends its run. It leaves out who is shut down.
        """
        if self._is_sorting_out:  # Train has called us of one of these
            return
        self._is_sorting_out = True
        try:
            for other in self._workers.get_replica_groups() or ():
                if other is not replica and other.is_active() and _has_died(other):
                    other.shutdown()
        finally:
            self._is_sorting_out = False

    def close(self) -> None:
        """End the actors. Idempotent."""
        while self._jobs:
            self._jobs.pop().close()

    def _new_job(self) -> _Job:
        job = _Job([where.host for where in self._where], self._min, self._timeout_s)
        self._jobs.append(job)
        return job

    def _tell(self, job: _Job, slot: int, workers: Any, rank: int) -> None:
        """Tell a worker who it is. ``rank``: its own among ``workers``."""
        process, variables = job.enter(slot, self._where[slot])
        workers.execute_single(rank, _tell, variables, job.meeting, process)


def _has_died(replica: Any) -> bool:
    try:
        ray.get(replica.execute_async(_where), timeout=_ALIVE_S)
    except ActorDiedError:
        return True
    except GetTimeoutError:
        pass
    return False


class _Job:
    """A job, which ends when all its members are lost; Train may go on with another one."""

    def __init__(self, hosts: list[str], min_np: int, elastic_timeout_s: float) -> None:
        """``hosts``: of the ranks that begin it."""
        self._hosts, self._min_np = hosts, min_np
        self._processes: dict[int, _Process] = {}  # by slot, the last one
        self._next = len(hosts)
        self._node_monitors: dict[str, Any] = {}
        here = ray.get_runtime_context().get_node_id()
        make = ray.remote(ElasticMeeting).options(num_cpus=0, scheduling_strategy=on_node(here))
        self.meeting = make.remote(hosts, min_np, elastic_timeout_s)
        try:
            self._told: Addresses = ray.get(self.meeting.told.remote(), timeout=_START_S)
        except BaseException:
            ray.kill(self.meeting)
            raise

    def enter(self, slot: int, where: _Where) -> tuple[int, dict[str, str]]:
        """Return the number, and the variables, of the process that fills ``slot`` from now on."""
        begins = slot not in self._processes
        number, hosts = slot, self._hosts
        ranks = (slot, len(hosts), *local_and_cross(hosts, slot))
        if not begins:
            number, self._next = self._next, self._next + 1
            taken = {
                process.local_rank
                for other, process in self._processes.items()
                if other != slot and process.where.host == where.host
            }
            local_rank = next(rank for rank in range(len(taken) + 1) if rank not in taken)
            # It is alone until the others let it in, but not on its host.
            ranks = (0, 1, local_rank, local_rank + 1, 0, 1)
        environment = RankEnvironment(
            *ranks,
            host=where.host,
            rendezvous=self._told.rendezvous,
            secret=self._told.secret,
            coordinator=self._told.coordinator,
            slot=slot,
            process=number,
            first_hosts=tuple(hosts) if begins else (),
            min_np=self._min_np,
        )
        node_monitor = self._node_monitor(where.node_id)
        prepared = node_monitor.prepare.remote(number, keeps_output=False)
        kept, _ = ray.get(prepared, timeout=_START_S)
        ray.get(node_monitor.watch.remote(number, where.pid), timeout=_CALL_S)
        self._processes[slot] = _Process(number, where, environment.local_rank)
        return number, {**environment.variables(), **kept}

    def _node_monitor(self, node_id: str) -> Any:
        if node_id not in self._node_monitors:
            make = ray.remote(NodeMonitor).options(num_cpus=0, scheduling_strategy=on_node(node_id))
            self._node_monitors[node_id] = make.remote(None)
        return self._node_monitors[node_id]

    def bury(self, slot: int) -> None:
        """Train has ended the process in ``slot``: the others may know what it has left."""
        if slot not in self._processes:
            return
        number, where, _ = self._processes[slot]
        try:
            burial = self._node_monitor(where.node_id).bury.remote(number, GRACE_S)
            kept: Kept = ray.get(burial, timeout=GRACE_S + _CALL_S)
        except (RayError, GetTimeoutError):
            # With its node. What ran there nobody knows; it may run still, so that is no proof.
            self._node_monitors.pop(where.node_id, None)
            return
        ended = self.meeting.ended.remote(number, "Ray Train has replaced it", kept.record)
        ray.get(ended, timeout=_CALL_S)

    def close(self) -> None:
        """End its actors."""
        for actor in (self.meeting, *self._node_monitors.values()):
            ray.kill(actor)


# --- in a worker ---

_own: tuple[Any, int] | None = None
"""The job's meeting, and what it calls this process."""


def _where() -> _Where:
    node_id = ray.get_runtime_context().get_node_id()
    return _Where(f"{ray.util.get_node_ip_address()}-{node_id[:6]}", node_id, os.getpid())


def _tell(variables: Mapping[str, str], meeting: Any, process: int) -> None:
    global _own
    os.environ.update(variables)
    _own = meeting, process


@contextlib.contextmanager
def as_rank() -> Iterator[None]:
    """Be a rank around the loop: whatever it ends by, the others hear of it at once.

    The worker's process does not end by that, as a rank's does. Raises JobOverError if the others
    have come to their end before.
    """
    assert _own is not None
    meeting, process = _own
    over: Over = answer(meeting.over)
    if over.reason:
        raise JobOverError(
            "this worker takes the place of one that has failed, but the job is over: "
            f"{over.reason}"
        )
    cause, is_well = "its loop has returned", False
    try:
        yield
        is_well = True
    except BaseException as error:
        cause = f"its loop has ended by {type(error).__name__}"
        end_world_by(error)
        raise
    finally:
        lifecycle.leave_at_exit()
        membership = job_membership.current()
        if membership is not None and membership.client is not None:
            membership.client.close()  # from now on its record does not change
        with contextlib.suppress(RayError):  # all workers are being ended
            answer(meeting.ended, process, cause, _own_record(), is_well)


def _own_record() -> bytes:
    fd = record_file.open_to_read(os.environ[record_file.VARIABLE])
    try:
        return record_file.read(fd)
    finally:
        os.close(fd)
