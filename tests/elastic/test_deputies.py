"""Members that go on without the launcher: processes, each with a membership client alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import reserve_port
from waiting import until

from kolovod.coordination.consensus import Proof
from kolovod.coordination.coordinator import Coordinator
from kolovod.coordination.coordinator_state import FIRST_LAUNCHER, CoordinatorState, first_world
from kolovod.coordination.membership import Policy
from kolovod.coordination.record_file import new_file, parse, read
from kolovod.net.addresses import address_of, listen
from kolovod.net.channel import new_secret

LIMIT_S = 60.0
MEMBER = Path(__file__).parent.parent / "support" / "elastic_member.py"


class Member:
    """A process, see support/elastic_member.py."""

    def __init__(self, **given: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(MEMBER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.tell(given)

    def tell(self, what: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors()
        return json.loads(line)

    def errors(self) -> str:
        """What it has written to standard error, to its end."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def await_error(self, text: str) -> None:
        """Read standard error as far as ``text``: others may know before it is written."""
        assert self.process.stderr is not None
        while text not in (line := self.process.stderr.readline()):
            assert line, text

    def asked(self, what: str) -> Any:
        """What it answers to the order ``what``."""
        self.tell(what)
        return self.hear()[what]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Job:
    """Members, and a launcher's coordinator."""

    def __init__(self, hosts: list[str], policy: Policy) -> None:
        self.secret = new_secret()
        self.world = first_world(enumerate(hosts))
        self.policy = policy
        self.place = listen(["127.0.0.1"], backlog=16, port=reserve_port())[0]  # it may come back
        self.address = address_of(self.place)
        self.coordinator = self.launcher(FIRST_LAUNCHER, self.place)
        self.files = [new_file() for _ in hosts]
        self.members = [
            self.member(slot=slot, host=host, first_hosts=hosts, record_path=self.files[slot][1])
            for slot, host in enumerate(hosts)
        ]
        for member in self.members:
            assert member.hear()["numbers"] == list(range(len(hosts)))

    def launcher(self, number: int, place: Any) -> Coordinator:
        coordinator = Coordinator(
            number,
            CoordinatorState(self.world),
            self.policy,
            self.secret,
            [place],
            formed=lambda world, reason: None,
            stopped=lambda reason: None,
        )
        coordinator.start()
        return coordinator

    def member(self, **given: Any) -> Member:
        return Member(launcher=self.address, secret=self.secret, **given)

    def wait_for_news(self) -> None:
        """Until members know each other."""
        for member in self.members:
            until(lambda one=member: len(one.asked("contacts")) == len(self.members))  # type: ignore[misc]

    def wait_for_change(self) -> None:
        """Until all members know that another world waits for them to stop."""
        for member in self.members:
            until(lambda one=member: one.asked("change"))  # type: ignore[misc]

    def close(self) -> None:
        self.coordinator.close()
        for member in self.members:
            member.kill()
        for fd, _ in self.files:
            os.close(fd)


@pytest.fixture(name="job")
def made_job(request: pytest.FixtureRequest) -> Iterator[Job]:
    hosts, silence_s = getattr(request, "param", (["a", "a", "a", "a"], LIMIT_S))
    policy = Policy(gather_s=0.05, silence_s=silence_s, broken_s=0.2, elastic_timeout_s=LIMIT_S)
    job = Job(hosts, policy)
    job.wait_for_news()
    yield job
    job.close()


def next_worlds(members: list[Member]) -> list[dict[str, Any]]:
    """Of each, which must all be the same one."""
    told = [member.hear() for member in members]
    assert len({(world["epoch"], *world["numbers"]) for world in told}) == 1, told
    return told


def test_a_loss_without_a_launcher_is_noticed_by_the_others_on_its_host(job: Job) -> None:
    job.coordinator.close()
    job.members[2].kill()
    places = next_worlds([job.members[n] for n in (0, 1, 3)])
    assert places[0]["numbers"] == [0, 1, 3]
    assert places[0]["rendezvous"].startswith("127.0.0.1:")
    assert {place["rendezvous"] for place in places} == {places[0]["rendezvous"]}


def test_whoever_is_coordinator_may_die_one_after_the_other(job: Job) -> None:
    job.coordinator.close()
    places = set()
    for lost in range(3):
        job.members[lost].kill()
        told = next_worlds(job.members[lost + 1 :])
        assert told[0]["numbers"] == list(range(lost + 1, 4))
        places.add(told[0]["rendezvous"])
    assert len(places) == 3
    last = job.members[3]
    last.await_error("the job's coordinator cannot be reached: rank 1 takes its part from now on")
    last.await_error("1 ranks go on, since rank 0 on host a was lost (its process has ended)")


@pytest.mark.parametrize("job", [(["a", "b", "c"], LIMIT_S)], indirect=True)
def test_hosts_go_on_by_majority(job: Job) -> None:
    """Each label counts as a host, whose end only a process there can prove."""
    job.coordinator.close()
    job.members[1].kill()
    assert next_worlds([job.members[0], job.members[2]])[0]["numbers"] == [0, 2]


def test_a_world_can_follow_where_nobody_is_lost(job: Job) -> None:
    job.coordinator.close()
    for member in job.members:
        member.tell("failed")
    assert next_worlds(job.members)[0]["numbers"] == [0, 1, 2, 3]


def test_one_who_comes_later_finds_the_coordinator(job: Job) -> None:
    """By the address of the launcher it cannot; by what it heard before that ended, it can."""
    joining = job.member(slot=4, host="a")
    try:
        job.wait_for_change()
        job.coordinator.close()
        numbers: list[int] = []
        while len(numbers) < 5:  # a world without it may come first
            for member in job.members:
                member.tell("stop")
            numbers = next_worlds(job.members)[0]["numbers"]
            if len(numbers) < 5:
                job.wait_for_change()
        assert joining.hear()["numbers"] == numbers
    finally:
        joining.kill()


def test_the_launcher_that_comes_back_is_coordinator_again(job: Job) -> None:
    job.coordinator.close()
    job.members[3].kill()
    assert next_worlds(job.members[:3])[0]["numbers"] == [0, 1, 2]
    host, port = job.address.rsplit(":", 1)
    job.coordinator = job.launcher(FIRST_LAUNCHER - 1, listen([host], 16, int(port))[0])
    until(lambda: not job.coordinator.misses() and len(job.coordinator.world.members) == 3)
    job.members[2].kill()
    job.coordinator.prove(Proof(2, "was killed", parse(read(job.files[2][0]))))
    told = next_worlds(job.members[:2])
    assert told[0]["numbers"] == [0, 1]
    assert told[0]["rendezvous"] == ""


def test_one_that_has_ended_well_is_not_lost_at_once(job: Job) -> None:
    job.coordinator.close()
    job.members[3].tell("finished")
    until(lambda: job.members[0].asked("ending") == [3])  # who is coordinator now
    ends_s = time.monotonic()
    job.members[3].tell("end")
    job.members[3].process.wait(LIMIT_S)
    next_worlds(job.members[:3])
    assert time.monotonic() - ends_s > 0.5
    job.members[0].await_error("3 ranks go on, since rank 3 on host a has ended")


@pytest.mark.slow
@pytest.mark.parametrize("job", [(["a", "a", "a", "a"], 1.0)], indirect=True)
def test_a_stopped_coordinator_is_replaced_by_those_who_can_prove_it(job: Job) -> None:
    """Not by silence: on one host all that live must agree. So it is killed in the end."""
    job.coordinator.close()
    job.members[0].process.send_signal(signal.SIGSTOP)
    job.members[3].kill()
    time.sleep(2.0)
    job.members[0].kill()
    assert next_worlds(job.members[1:3])[0]["numbers"] == [1, 2]


@pytest.mark.slow
def test_a_coordinator_that_is_stopped_for_good_is_left_for_the_launcher_that_has_come(
    job: Job,
) -> None:
    """It acknowledges what it is sent, since its host lives; who waited for it waited for ever."""
    job.coordinator.close()
    job.members[0].await_error("rank 0 takes its part from now on")
    job.members[0].process.send_signal(signal.SIGSTOP)
    host, port = job.address.rsplit(":", 1)
    job.coordinator = job.launcher(FIRST_LAUNCHER - 1, listen([host], 16, int(port))[0])
    until(lambda: job.coordinator.misses() == {0})
