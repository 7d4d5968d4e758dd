"""coordination.pending_joins: what those who come to a coordinator prove of those before them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from elastic_steps import until

from kolovod.coordination import coordinator
from kolovod.coordination.consensus import NOTHING, Ballot, Member, Proof, World
from kolovod.coordination.coordinator import LABEL, Coordinator
from kolovod.coordination.coordinator_state import CoordinatorState, Facts, first_world
from kolovod.coordination.membership import Policy
from kolovod.coordination.protocol import Contact, Hello, Left, encode_hello
from kolovod.net.addresses import address_of, connect_any, listen
from kolovod.net.channel import Channel, new_secret
from kolovod.rendezvous import versions

SECRET = new_secret()
LIMIT_S = 30.0
WORLD = first_world([(0, "a"), (1, "b"), (2, "c")])
REPLACED = "another process has come in its place"


class Job:
    """A coordinator of a world of three of which nobody has come: it may give no numbers."""

    def __init__(self, hang_s: float = 0.0) -> None:
        listeners = listen(["127.0.0.1"], backlog=16)
        self.address = address_of(listeners[0])
        self.state = CoordinatorState(WORLD)
        self.stopped: list[str] = []
        self.hung: dict[int, str] = {}
        self.coordinator = Coordinator(
            0,
            self.state,
            Policy(replaced_are_dead=True, hang_s=hang_s),
            SECRET,
            listeners,
            formed=lambda world, reason: None,
            stopped=self.stopped.append,
            hangs=self.hung.setdefault,
        )
        self.coordinator.start()

    def hello(self, stack: contextlib.ExitStack, hello: Hello) -> Channel:
        deadline = time.monotonic() + LIMIT_S
        channel = stack.enter_context(
            contextlib.closing(connect_any(self.address, SECRET, LABEL, deadline))
        )
        assert channel.receive(deadline)["is_here"]
        channel.send({**versions.own(), **encode_hello(hello)}, deadline)
        return channel


@pytest.fixture(name="job")
def made_job() -> Iterator[Job]:
    job = Job()
    yield job
    job.coordinator.close()


def hello_of(slot: int, number: int | None = None, **told: Any) -> Hello:
    contact = Contact(number or 0, "127.0.0.1:4000", 1, "", "")
    return Hello(number, slot, "abc"[slot], contact, NOTHING, **told)


def test_who_comes_proves_that_the_one_before_has_ended(job: Job) -> None:
    record = NOTHING.told(WORLD)
    with contextlib.ExitStack() as stack:
        job.hello(stack, hello_of(2, left=Left(2, record)))
        until(lambda: 2 in job.state.proofs)
        proof = job.state.proofs[2]
    assert (proof.cause, proof.record) == (REPLACED, record)
    assert job.state.proofs.keys() == {2}


def test_two_processes_of_one_slot_are_told_apart(job: Job) -> None:
    """A host was lost, another process fills the slot, and the host is reached again."""
    with contextlib.ExitStack() as stack:
        job.hello(stack, hello_of(2, 2, process=2))
        job.hello(stack, hello_of(2, 1 << 20, process=7))
        until(lambda: None not in map(job.coordinator.number_of, (2, 7)))
        assert [job.coordinator.number_of(process) for process in (2, 7, 8)] == [2, 1 << 20, None]


def test_one_that_is_connected_has_not_ended(job: Job) -> None:
    with contextlib.ExitStack() as stack:
        job.hello(stack, hello_of(2, 2))
        until(lambda: job.coordinator.is_filled(2))
        job.hello(stack, hello_of(2))
        job.hello(stack, hello_of(1))
        until(lambda: 1 in job.state.proofs)
        assert job.state.proofs.keys() == {1}


def test_an_old_hello_proves_nothing_of_who_has_come_since(job: Job) -> None:
    """Another coordinator let the process in, and its old connection is not known to be gone."""
    replacement = Member(1 << 20, 2, "c")
    newer = World(Ballot(1, 1), 2, (*WORLD.members[:2], replacement), (WORLD,))
    facts = Facts(newer, {}, {}, frozenset(), frozenset())
    with contextlib.ExitStack() as stack:
        job.hello(stack, hello_of(2))
        until(lambda: 2 in job.state.proofs)
        job.hello(stack, hello_of(1, 1, facts=facts))
        until(lambda: job.coordinator.world == newer)
        job.hello(stack, hello_of(0))  # of which a proof follows, in a later turn
        until(lambda: 0 in job.state.proofs)
        assert replacement.number not in job.state.proofs
        job.hello(stack, hello_of(2))  # a new process: now it has ended
        until(lambda: replacement.number in job.state.proofs)


def test_members_of_a_world_that_formed_elsewhere_are_missed_when_they_do_not_come(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator may hear of it long after its own start."""
    monkeypatch.setattr(coordinator, "COME_S", 0.2)
    stranger = Member(1 << 20, 2, "c")
    newer = World(Ballot(1, 1), 2, (WORLD.members[1], stranger), (WORLD,))
    with contextlib.ExitStack() as stack:
        job.hello(stack, hello_of(1, 1, facts=Facts(newer, {}, {}, frozenset(), frozenset())))
        until(lambda: job.state.silent_s.keys() == {stranger.number})


@pytest.mark.slow
def test_a_member_that_is_connected_and_answers_nothing_hangs() -> None:
    """Stopped when it had noticed that its world had failed, say."""
    job = Job(hang_s=0.1)
    with contextlib.ExitStack() as stack:
        stack.callback(job.coordinator.close)
        for slot in range(3):
            job.hello(stack, hello_of(slot, slot))
        until(lambda: job.hung.keys() == {0, 1, 2})
        assert job.hung[0].startswith("it does not answer what it is asked")


def test_a_defect_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(coordinator, "decide", fail)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    job = Job()
    try:
        until(lambda: job.stopped == ["the job's coordinator has failed: RuntimeError('a defect')"])
    finally:
        job.coordinator.close()


def test_without_whom_the_others_go_on(job: Job) -> None:
    """Not without who waits for a world, has ended, or wanted to leave."""
    newer = World(Ballot(1, 1), 2, WORLD.members[:1], (WORLD,))
    gone = {1: Proof(1, "was killed", None)}
    with contextlib.ExitStack() as stack:
        assert not job.coordinator.goes_on_without(2)
        job.hello(stack, hello_of(0, 0, facts=Facts(newer, gone, {}, frozenset(), frozenset())))
        until(lambda: job.coordinator.world == newer)
        assert [job.coordinator.goes_on_without(number) for number in (0, 1, 2)] == [
            False,
            False,
            True,
        ]
        job.coordinator.leave([2])
        assert not job.coordinator.goes_on_without(2)


def test_who_comes_is_told_of_nobody_who_has_ended(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job in which a rank is replaced each minute would have ever more to tell."""
    monkeypatch.setattr(coordinator, "_CONTACTS_PER_MESSAGE", 2)
    last = 20
    with contextlib.ExitStack() as stack:
        for slot in range(3):
            job.hello(stack, hello_of(slot, slot))
        for i in range(last):  # numbers that no world has had
            job.hello(stack, hello_of(2, 100 + i))
            until(lambda number=100 + i: number in job.coordinator._connections)
            if i < last - 1:
                job.coordinator.prove(Proof(100 + i, "was killed", None))
                until(lambda number=100 + i: number in job.state.proofs)
        channel = job.hello(stack, hello_of(2, 2))
        told: set[int] = set()
        while 100 + last - 1 not in told:
            message = channel.receive(time.monotonic() + LIMIT_S)
            told |= {row[0] for row in message.get("contacts", [])}
        assert {0, 1, 2} <= told
        assert len(told) <= 3 + 2 * 4 + 2  # twice the connections and a message


def test_a_malformed_hello_is_answered(job: Job) -> None:
    with contextlib.ExitStack() as stack:
        channel = job.hello(stack, hello_of(1)._replace(slot=-1))
        assert "slot" in channel.receive(time.monotonic() + LIMIT_S)["stop"]
