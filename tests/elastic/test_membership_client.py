"""Membership clients and a coordinator, as threads of one process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from waiting import until

from kolovod.coordination.consensus import NOTHING, Ballot, Proof, World
from kolovod.coordination.coordinator import BEAT_S, LABEL, Coordinator
from kolovod.coordination.coordinator_state import FIRST_LAUNCHER, CoordinatorState, first_world
from kolovod.coordination.membership import Policy
from kolovod.coordination.protocol import encode_record
from kolovod.elastic import membership_client as client_module
from kolovod.elastic.membership_client import MembershipClient
from kolovod.errors import AuthenticationError, JobOverError
from kolovod.net.addresses import address_of, connect_any, listen
from kolovod.net.channel import new_secret
from kolovod.rendezvous import versions

SECRET = new_secret()
HOSTS = ["a", "a", "b"]
LIMIT_S = 30.0


class Job:
    """A coordinator, and the clients of those it starts with."""

    def __init__(self, policy: Policy) -> None:
        self.world = first_world(enumerate(HOSTS))
        listeners = listen(["127.0.0.1"], backlog=16)
        self.address = address_of(listeners[0])
        self.formed: list[str] = []
        self.stopped: list[str] = []
        self.aborted: list[tuple[int, str]] = []
        self.ended: list[int] = []
        """Before which scopes are over at the rendezvous server."""
        self.coordinator = Coordinator(
            FIRST_LAUNCHER,
            CoordinatorState(self.world),
            policy,
            SECRET,
            listeners,
            formed=lambda world, reason: self.formed.append(reason),
            stopped=self.stopped.append,
            end_scopes=self.ended.append,
        )
        self.coordinator.start()
        self._made: list[MembershipClient] = []
        self.clients = [self.client(slot, HOSTS[slot], begins=True) for slot in range(len(HOSTS))]
        self.pool = ThreadPoolExecutor(8)
        for client in self.clients:
            assert client.next_world().numbers == (0, 1, 2)

    def client(self, slot: int, host: str, *, begins: bool = False) -> MembershipClient:
        client = MembershipClient(
            self.address,
            SECRET,
            slot,
            host,
            first=(slot, self.world) if begins else None,
            abort=lambda reason: self.aborted.append((slot, reason)),
        )
        self._made.append(client)
        return client

    def next_worlds(self, *clients: MembershipClient) -> list[Any]:
        futures = [self.pool.submit(client.next_world) for client in clients]
        return [future.result(LIMIT_S) for future in futures]

    def first_reason(self) -> str:
        """Which is told when the members have been told."""
        until(lambda: bool(self.formed))
        return self.formed[0]

    def close(self) -> None:
        """Also in a test that has failed, so that one failure is told, not what it leaves, too."""
        for client in {*self._made, *self.clients}:
            client.close()
        self.coordinator.close()
        self.pool.shutdown()


@pytest.fixture(name="job")
def made_job() -> Iterator[Job]:
    """Nobody counts as gone by silence: who closes is proved dead, or another one comes for it."""
    job = Job(Policy(gather_s=0.05, silence_s=LIMIT_S, broken_s=0.2, elastic_timeout_s=LIMIT_S))
    yield job
    job.close()


def test_survivors_of_a_death_agree_without_their_scripts(job: Job) -> None:
    first, second, third = job.clients
    third.close()
    job.coordinator.prove(Proof(2, "was killed", NOTHING))
    until(lambda: sorted(slot for slot, _ in job.aborted) == [0, 1])
    places = job.next_worlds(first, second)
    assert [place.rank for place in places] == [0, 1]
    assert {(place.epoch, place.numbers) for place in places} == {(2, (0, 1))}
    assert "rank 2 on host b was lost (was killed)" in job.first_reason()
    assert job.ended == [2]


def test_what_waits_is_told_before_anybody_stops(job: Job) -> None:
    first = job.clients[0]
    told: list[Any] = []
    first.hears_of_change = lambda: told.append(first.change)
    assert first.change is None
    assert not first.expects_world
    joining = job.client(3, "b")
    until(lambda: bool(told))
    before, after = told[0]
    assert before == job.world
    assert sorted(after.numbers - before.numbers) == sorted(after.joined)
    assert first.expects_world
    until(lambda: all(client.change is not None for client in job.clients))
    for client in job.clients:
        client.stop_for_next()
    until(lambda: first.change is None)  # it has agreed
    assert first.expects_world
    job.next_worlds(*job.clients, joining)
    assert not first.expects_world


def test_who_is_to_come_into_a_world_does_not_agree_to_the_one_after_it(job: Job) -> None:
    """A rank leaves, and the next change follows at once: others wait in the world between."""
    *staying, leaving = job.clients
    leaving.leave()
    until(lambda: all(client.change is not None for client in staying))
    for client in job.clients:
        client.stop_for_next()
    until(lambda: bool(job.formed))
    joining = job.client(3, "b")

    def knows_both(client: MembershipClient) -> bool:
        return client.change is not None and client.change[1].epoch == 3

    until(lambda: all(map(knows_both, staying)))
    assert [place.epoch for place in job.next_worlds(*staying)] == [2, 2]
    for client in staying:
        client.stop_for_next()
    assert [place.epoch for place in job.next_worlds(*staying, joining)] == [3, 3, 3]


def test_who_has_come_is_not_expected_any_more() -> None:
    job = Job(Policy(gather_s=0.0, gather_started_s=60.0))
    try:
        job.coordinator.expect(3, comes=True)
        job.coordinator.expect(4, comes=True)
        joining = [job.client(3, "b")]
        until(lambda: bool(job.coordinator._state.entrants))
        assert not job.clients[0].wants_change
        job.coordinator.expect(4, comes=False)  # its process has ended
        until(lambda: job.clients[0].wants_change)
        joining[0].close()
    finally:
        job.close()


def test_members_of_a_host_that_is_avoided_leave_with_the_one_that_failed(job: Job) -> None:
    job.coordinator.avoid("a")
    job.clients[0].close()
    job.coordinator.prove(Proof(0, "was killed", NOTHING))
    (place,) = job.next_worlds(job.clients[2])
    assert place.numbers == (2,)
    with pytest.raises(JobOverError, match="goes on in epoch 2 without this process") as caught:
        job.next_worlds(job.clients[1])
    assert caught.value.has_left
    until(lambda: bool(job.formed))  # a member may know of it before
    assert len(job.formed) == 1


def test_who_joins_waits_until_the_others_stop(job: Job) -> None:
    joining = job.client(3, "b")
    waiting = job.pool.submit(joining.next_world)
    until(lambda: all(client.wants_change for client in job.clients))
    assert not waiting.done()
    assert not joining.has_state
    for client in job.clients:
        client.stop_for_next()
    places = job.next_worlds(*job.clients)
    places.append(waiting.result(LIMIT_S))
    assert [place.rank for place in places] == [0, 1, 2, 3]
    assert not job.aborted
    joining.got_state()
    assert joining.has_state


def test_who_waits_for_the_slot_of_a_member_that_lives_is_in_the_way(job: Job) -> None:
    second, fourth = job.client(1, "c"), job.client(3, "b")
    waits, is_free = until(lambda: second._number), until(lambda: fourth._number)
    assert waits is not None
    assert is_free is not None
    assert job.coordinator.is_in_the_way(waits)
    assert not job.coordinator.is_in_the_way(is_free)
    assert not job.coordinator.is_in_the_way(1)
    job.clients[1].resign("it ends")
    until(lambda: not job.coordinator.is_in_the_way(waits))  # when the coordinator has heard of it


def test_who_leaves_is_told_so_and_the_others_go_on(job: Job) -> None:
    leaving, *others = job.clients
    leaving.leave()
    until(lambda: all(client.wants_change for client in job.clients))
    for client in job.clients:
        client.stop_for_next()
    places = job.next_worlds(*others)
    assert [place.numbers for place in places] == [(1, 2)] * 2
    with pytest.raises(JobOverError, match="goes on in epoch 2 without this process") as caught:
        leaving.next_world()
    assert caught.value.has_left


@pytest.mark.parametrize("how", ["told before it stops", "told since a rank is lost"])
def test_who_has_asked_to_leave_has_left_whenever_it_is_told(job: Job, how: str) -> None:
    *others, leaving = job.clients
    leaving.leave()
    until(lambda: all(client.wants_change for client in job.clients))
    if how == "told before it stops":
        for client in others:
            client.stop_for_next()
        assert {place.numbers for place in job.next_worlds(*others)} == {(0, 1)}
        leaving.stop_for_next()
    else:
        job.coordinator.prove(Proof(1, "was killed", NOTHING.told(job.world)))
        assert {place.numbers for place in job.next_worlds(others[0])} == {(0,)}
        leaving.failed("its step was interrupted")
    with pytest.raises(JobOverError, match=r"goes on in epoch \d without this process") as caught:
        leaving.next_world()
    assert caught.value.has_left


@pytest.mark.parametrize("how", ["when it has agreed", "before it heard of the proposal"])
def test_who_has_stopped_for_others_to_join_and_is_cut_off_has_not_left(job: Job, how: str) -> None:
    """Else its launcher would leave its place empty."""
    *others, cut_off = job.clients
    if how == "when it has agreed":
        job.client(3, "b")
        until(lambda: all(client.wants_change for client in job.clients))
    cut_off.stop_for_next()
    if how == "when it has agreed":
        until(lambda: cut_off.change is None)
    job.coordinator.prove(Proof(2, "cannot be reached", NOTHING.told(job.world)))
    assert {place.numbers for place in job.next_worlds(*others)} == {(0, 1)}
    cut_off._told(job.coordinator.world, "")  # by another member, when it is reached again
    with pytest.raises(JobOverError, match=r"goes on in epoch \d without this process") as caught:
        cut_off.next_world()
    assert not caught.value.has_left


def test_whom_the_launcher_sends_away_has_left(job: Job) -> None:
    """Its host stays; the client hears of it with the world that it is not in."""
    *others, sent_away = job.clients
    job.coordinator.leave([2])
    until(lambda: all(client.wants_change for client in job.clients))
    for client in job.clients:
        client.stop_for_next()
    assert {place.numbers for place in job.next_worlds(*others)} == {(0, 1)}
    with pytest.raises(JobOverError, match="goes on in epoch 2 without this process") as caught:
        sent_away.next_world()
    assert caught.value.has_left


def test_a_world_that_fails_without_a_death_is_formed_anew(job: Job) -> None:
    for client in job.clients:
        client.failed("connection reset")
    places = job.next_worlds(*job.clients)
    assert {(place.epoch, place.numbers) for place in places} == {(2, (0, 1, 2))}
    assert "connection reset" in job.first_reason()


def test_a_reason_of_any_characters_comes_through(job: Job) -> None:
    for client in job.clients:
        client.failed("reset\nby \x1bpeer" + 5000 * "!")
    assert {place.epoch for place in job.next_worlds(*job.clients)} == {2}
    assert "reset by \\x1bpeer!!" in job.first_reason()


def test_ranks_that_stop_for_a_world_that_is_off_go_on(job: Job) -> None:
    """Who wanted to join has ended meanwhile, say."""
    for client in job.clients:
        client.stop_for_next()
    places = job.next_worlds(*job.clients)
    assert {(place.epoch, place.numbers) for place in places} == {(2, (0, 1, 2))}
    assert "its ranks have stopped for a world that is off" in job.first_reason()


def test_nobody_hears_of_the_end_before_the_client_has_left_the_engine(job: Job) -> None:
    """Else the process may end meanwhile, and the thread that is in native code with it."""
    entered: list[str] = []
    goes_on: list[bool] = []

    def abort(reason: str) -> None:
        entered.append(reason)
        until(lambda: bool(goes_on))

    client = job.clients[0]
    client._abort = abort
    with job.coordinator._lock:
        job.coordinator._tell({"stop": "it is over"}, "it is over")
    until(lambda: bool(entered))
    assert not client.has_failed
    goes_on.append(True)
    with pytest.raises(JobOverError, match="it is over"):
        job.next_worlds(client)


def test_a_member_that_talks_nonsense_is_told_so(job: Job) -> None:
    client = job.clients[0]
    client._sign_of_life = lambda: {"alive": "nonsense"}  # type: ignore[method-assign]
    client.leave()
    with pytest.raises(JobOverError, match="malformed message"):
        client.next_world()


def test_a_failure_while_a_rank_waits_to_join_is_mended_without_it(job: Job) -> None:
    """Its world would meet ranks in the middle of a step."""
    joining = job.client(3, "b")
    waiting = job.pool.submit(joining.next_world)
    until(lambda: all(client.wants_change for client in job.clients))
    for client in job.clients:
        client.failed("connection reset")
    places = job.next_worlds(*job.clients)
    assert {place.numbers for place in places} == {(0, 1, 2)}
    assert not waiting.done()
    until(lambda: all(client.wants_change for client in job.clients))
    for client in job.clients:
        client.stop_for_next()
    assert [len(place.numbers) for place in job.next_worlds(*job.clients)] == [4] * 3
    assert waiting.result(LIMIT_S).rank == 3


def test_all_who_leave_end_their_step_however_late_one_of_them_is(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the state of a rank that is late would be older than that of the others."""
    monkeypatch.setattr(client_module, "_WANTED_S", 0.05)
    job.coordinator.leave(range(3))  # all at once, so no world without some of them is on its way
    for client in job.clients:
        client.leave()
    for client in job.clients[:2]:
        client.stop_for_next()
    until(lambda: len(job.coordinator._state.stopped) == 2)
    time.sleep(3 * BEAT_S + 2 * 0.2)  # for them to complain, and the coordinator to believe it
    assert job.stopped == []
    job.clients[2].stop_for_next()
    for client in job.clients:
        with pytest.raises(JobOverError, match="all members leave") as told:
            client.next_world()
        assert told.value.has_left


def test_who_gives_up_is_left_out_though_it_lives(job: Job) -> None:
    job.clients[1].resign("ValueError: loss is nan")
    places = job.next_worlds(job.clients[0], job.clients[2])
    assert [place.numbers for place in places] == [(0, 2)] * 2
    assert "ValueError: loss is nan" in job.first_reason()
    with pytest.raises(JobOverError, match="this process has given up: ValueError"):
        job.clients[1].next_world()
    job.clients[1].leave()  # when the thread is over: it does nothing, to no descriptor


def test_a_member_may_speak_right_after_its_hello(job: Job) -> None:
    """Before the coordinator has looked at that; who has no number yet would be taken for gone."""
    deadline = time.monotonic() + LIMIT_S
    record = encode_record(NOTHING.told(job.world))
    hello = {
        **versions.own(),
        "number": 2,
        "slot": 2,
        "host": "b",
        "contact": ["127.0.0.1:4000", 1, "", ""],
        "record": record,
        "facts": None,
    }
    said = {"has_state": True, "leaves": False, "stops": False, "ends": False}
    said |= {"broken": "", "epoch": 1}
    with contextlib.closing(connect_any(job.address, SECRET, LABEL, deadline)) as channel:
        assert channel.receive(deadline)["is_here"]
        with job.coordinator._lock:
            channel.send(hello, deadline)
            channel.send({"alive": record, **said}, deadline)
        assert channel.receive(deadline)["you"] == [2, 2, "b"]


def test_a_client_whose_connection_breaks_comes_again(job: Job) -> None:
    def are_open() -> list[bool]:
        with job.coordinator._lock:
            return [c.channel.fileno() >= 0 for c in job.coordinator._connections.values()]

    with job.coordinator._lock:
        for connection in job.coordinator._connections.values():
            connection.channel.close()
    until(lambda: are_open() == [True] * 3)
    job.coordinator.prove(Proof(0, "was killed", NOTHING))
    job.clients[0].close()
    assert [place.numbers for place in job.next_worlds(*job.clients[1:])] == [(1, 2)] * 2


def test_who_was_left_out_elsewhere_hears_of_it_though_it_stayed_connected(job: Job) -> None:
    """A partition: others have gone on under another coordinator, and come back to this one."""
    elsewhere = World(Ballot(2, 1), 2, job.world.members[1:], (job.world,))
    for number in (1, 2):
        job.clients[number].close()
        again = MembershipClient(
            job.address, SECRET, number, HOSTS[number], first=(number, elsewhere)
        )
        job.clients[number] = again
    # It is in a step, which those who went on have ended, maybe while its host was cut off.
    until(lambda: (0, "the job goes on in epoch 2 without this process") in job.aborted)
    with pytest.raises(JobOverError, match="goes on in epoch 2 without this process"):
        job.next_worlds(job.clients[0])


def test_the_end_of_a_job_is_an_error_with_its_reason() -> None:
    job = Job(Policy(min_np=2, silence_s=LIMIT_S, elastic_timeout_s=0.3))
    try:
        for number in (1, 2):
            job.clients[number].close()
            job.coordinator.prove(Proof(number, "was killed", NOTHING))
        survivor = job.clients[0]
        while job.next_worlds(survivor)[0].numbers != (0,):
            pass
        survivor.stop_for_next(is_wanted=False)
        with pytest.raises(JobOverError, match=r"1 of the at least 2 .* nobody came in 0.3 s"):
            survivor.next_world()
        until(lambda: len(job.stopped) == 1)
    finally:
        job.close()


def test_a_coordinator_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a process that has not heard yet who else could be one."""
    monkeypatch.setattr("kolovod.elastic.membership_client._LOST_S", 0.3)
    job = Job(Policy())
    job.close()
    joining = job.client(3, "b")
    with pytest.raises(
        JobOverError, match=r"coordinator at 127.0.0.1:\d+ cannot be reached"
    ) as caught:
        joining.next_world()
    assert not caught.value.has_left  # the job may go on, so this process is started again
    joining.close()


def test_a_wrong_secret_is_refused(job: Job) -> None:
    with pytest.raises(AuthenticationError):
        connect_any(job.address, new_secret(), LABEL, time.monotonic() + 5)


def test_a_search_that_fails_is_told_to_who_waits(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(client_module.Standby, "find", fail)
    joining = job.client(3, "b")
    with pytest.raises(JobOverError, match="can't start new thread"):
        job.next_worlds(joining)


def test_a_coordinator_tells_its_own_process_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """That one may end as soon as it hears that the job is over, and the coordinator with it."""
    told: list[int] = []
    state = CoordinatorState(first_world(enumerate(HOSTS)))
    own = Coordinator(
        1, state, Policy(), SECRET, formed=lambda world, reason: None, stopped=lambda reason: None
    )
    own._connections = dict.fromkeys([1, 0, 2])  # type: ignore[assignment]
    monkeypatch.setattr(own, "_send", lambda number, connection, message: told.append(number))
    own._tell({"stop": "over"}, "over")
    assert told == [0, 2, 1]
    own._connections.clear()
    own.close()
