"""The membership of a process in its elastic job: what it was told, and its membership client."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial

from kolovod import lifecycle
from kolovod.config import Settings
from kolovod.coordination import record_file
from kolovod.coordination.coordinator_state import first_world
from kolovod.core import world as worlds
from kolovod.elastic.external import External
from kolovod.elastic.membership_client import MembershipClient
from kolovod.errors import ElasticBootstrapError, NotInitializedError
from kolovod.rendezvous.external.meeting import find_launcher
from kolovod.rendezvous.rank_environment import RankEnvironment

__all__ = ["JobMembership", "abort", "current", "find"]

_membership: JobMembership | None = None


def abort(reason: str) -> None:
    """Make the operations of the present world fail; the script may leave it meanwhile."""
    with contextlib.suppress(NotInitializedError):
        worlds.current().engine.abort(reason)


class _Alone:
    """A process that has come to a job that runs: before ``run`` none of its ranks waits for it."""

    def __init__(self, environment: RankEnvironment) -> None:
        """``environment``: of the process."""
        self._numbers = environment.replica or (0,)
        self._rank = self._numbers.index(environment.process) if environment.replica else 0

    def next_world(self) -> lifecycle.WorldAssignment:
        """Return its place in a world of its own, or of its replica.

        What the script does there concerns nobody else.
        """
        return lifecycle.WorldAssignment(0, self._rank, self._numbers)

    def failed(self, reason: str, unreached: int | None = None) -> None:
        """Raise ElasticBootstrapError: nobody else makes it fail, so another try would not help."""
        raise ElasticBootstrapError(reason)


class JobMembership:
    """The facts that a process of an elastic job knows of it, and its membership client."""

    def __init__(
        self, environment: RankEnvironment, settings: Settings, outside: External | None = None
    ) -> None:
        """``outside``: where the launcher is another than ours."""
        self.environment = environment
        self._settings = settings
        self._outside = outside
        self.begins = bool(environment.first_hosts)
        """Whether this process is one of those that the job starts with."""
        self.client: MembershipClient | None = None

    def enter(self) -> MembershipClient:
        """Become a member, if it is none yet, and return the membership client."""
        if self.client is None:
            environment, outside = self.environment, self._outside
            first = first_world(enumerate(environment.first_hosts)) if self.begins else None
            path, memory = os.environ.get(record_file.VARIABLE, ""), -1
            if outside is not None:
                memory, path = record_file.new_file()
            try:
                self.client = MembershipClient(
                    "" if outside is not None else environment.coordinator,
                    environment.secret,
                    environment.slot,
                    environment.host,
                    process=environment.process,
                    first=None if first is None else (environment.slot, first),
                    record_path=path,
                    encrypted=self._settings.encrypt,
                    interfaces=self._settings.interface_names,
                    abort=abort,
                    form_ahead=partial(lifecycle.form_ahead, environment),
                    min_np=environment.min_np,
                    outside=outside,
                    left=None if outside is None else outside.left,
                    record_copy=None if outside is None else outside.record_copy,
                )
            finally:
                if memory >= 0:
                    os.close(memory)
            if outside is not None:
                outside.begin(self.client.addresses, environment.first_hosts, self.client.lacks)
        return self.client

    @property
    def first_size(self) -> int | None:
        """The size of the world that the job begins with, on its ranks; None on others."""
        return len(self.environment.first_hosts) if self.begins else None

    @property
    def leaving_code(self) -> int:
        """The exit code of a process that leaves.

        A scheduler takes 0 for the end of its rank's work.
        """
        if self._outside is None:
            return 0
        leaves = self.client is not None and self.client.leaves
        return 128 + signal.SIGTERM if leaves else 1

    def forget(self) -> None:
        """Give up the part in the job, in a forked child: it has none."""
        if self.client is not None:
            self.client.forget()
        if self._outside is not None:
            self._outside.forget()


def current() -> JobMembership | None:
    """Return the membership of this process.

    None: its job is not elastic, or ``find`` was not called yet.
    """
    return _membership


def find(own: RankEnvironment | None, settings: Settings) -> JobMembership | None:
    """Return this process's membership, having met the others if need be; None: no elastic job.

    ``own``: what a launcher of ours has told. Raises what ``External`` raises, and
    InvalidArgumentError for a backend that cannot be.
    """
    global _membership
    if _membership is None and own is not None:
        if own.coordinator:
            settings.check_elastic()
            _membership = JobMembership(own, settings)
    elif (
        _membership is None and settings.min_np and (found := find_launcher(os.environ)) is not None
    ):
        settings.check_elastic()
        outside = External(found, os.environ, settings)
        _membership = JobMembership(outside.meet(), settings, outside)
    return _membership


def _guide(
    own: RankEnvironment | None, settings: Settings
) -> tuple[RankEnvironment, lifecycle.Guide] | None:
    membership = find(own, settings)
    if membership is None:
        return None
    environment = membership.environment
    is_member = membership.begins or membership.client is not None
    return environment, membership.enter() if is_member else _Alone(environment)


def _after_fork_in_child() -> None:
    global _membership
    if _membership is not None:
        _membership.forget()
    _membership = None


os.register_at_fork(after_in_child=_after_fork_in_child)
lifecycle.guided_by(_guide)
