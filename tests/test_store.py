"""kolovod.launch.store: ranks meet, or hear at once why not."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import kolovod.launch.store as store_module
from kolovod.errors import (
    AuthenticationError,
    BootstrapError,
    InvalidArgumentError,
    RankLostError,
    StartTimeoutError,
)
from kolovod.launch.auth import connect, encode, new_secret
from kolovod.launch.formation import Formation, Member, encode_members, parse_answer
from kolovod.launch.joining import Joined, join
from kolovod.launch.messages import MAX_RANKS
from kolovod.launch.store import GONE_GRACE_S, LABEL, Store

SECRET = new_secret()
TIMEOUT_S = 20.0
JOIN = {
    "members": [[0, 1]],
    "member": [0, "h", 1, "", "", 0, "", False],
    "config": {},
    "timeout_s": 1,
}


@pytest.fixture
def store() -> Iterator[Store]:
    with contextlib.closing(Store(SECRET, 8)) as made:
        made.start()
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as made:
        yield made


def member(rank: int, pid: int | None = None) -> Member:
    return Member(rank, "localhost", 1000 + rank if pid is None else pid, "", f"socket-{rank}", 0)


def meet(*arguments: Any) -> Formation:
    """Only until the answer."""
    with join(*arguments) as joined:
        return joined.formation


def all_join(pool: ThreadPoolExecutor, store: Store, ranks: list[int]) -> list[Joined]:
    waiting = [
        pool.submit(join, store.address, SECRET, ranks, member(rank), TIMEOUT_S) for rank in ranks
    ]
    return [future.result(10) for future in waiting]


def joining(
    pool: ThreadPoolExecutor, store: Store, rank: int, members: list[int], timeout_s: float = 20.0
) -> Future[Formation]:
    return pool.submit(meet, store.address, SECRET, members, member(rank), timeout_s)


def come_and_go(store: Store, waiting: int) -> None:
    """Rank 1 of three joins, as the one that makes ``waiting``, and its connection breaks."""
    address = ("127.0.0.1", int(store.address.split(":")[1]))
    deadline = time.monotonic() + 5
    with contextlib.closing(connect(socket.AF_INET, address, SECRET, LABEL, deadline)) as channel:
        facts = {"members": [[0, 2]], "member": [1, *JOIN["member"][1:]], "timeout_s": TIMEOUT_S}
        channel.send({**JOIN, **facts}, deadline)
        wait_until_joined(store, waiting)


def wait_until_joined(store: Store, count: int) -> None:
    deadline = time.monotonic() + 5
    while sum(len(group.joined) for group in store._groups.values()) != count:
        assert time.monotonic() < deadline, "the ranks did not join"
        time.sleep(0.005)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_everybody_hears_about_everybody(store: Store, pool: ThreadPoolExecutor, size: int) -> None:
    members = list(range(size))
    formations = [joining(pool, store, rank, members) for rank in reversed(members)]
    expected = Formation(1, tuple(member(rank) for rank in members))
    assert [formation.result(10) for formation in formations] == [expected] * size


def test_the_first_members_config_is_told_to_all(store: Store, pool: ThreadPoolExecutor) -> None:
    members = [1, 3, 4, 5, 7]
    formations = [
        pool.submit(meet, store.address, SECRET, members, member(rank), 20.0, {"a": rank, "b": -1})
        for rank in reversed(members)
    ]
    for formation in formations:
        assert formation.result(10).config == {"a": 1, "b": -1}
        assert [m.rank for m in formation.result(10).members] == members


def test_ranks_that_wait_have_no_threads(store: Store, pool: ThreadPoolExecutor) -> None:
    before = threading.active_count()
    members = list(range(16))
    waiting = [joining(pool, store, rank, members) for rank in members[1:]]
    wait_until_joined(store, 15)
    deadline = time.monotonic() + 5
    while threading.active_count() > before + 15 and time.monotonic() < deadline:
        time.sleep(0.005)  # the last handshake's thread ends
    assert threading.active_count() <= before + 15  # those of the pool
    waiting.append(joining(pool, store, 0, members))
    assert {formation.result(10).epoch for formation in waiting} == {1}
    while store._waiting and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not store._waiting


def test_who_joins_again_is_counted_once(store: Store, pool: ThreadPoolExecutor) -> None:
    first = joining(pool, store, 0, [0, 1])
    wait_until_joined(store, 1)
    again = joining(pool, store, 0, [0, 1])
    deadline = time.monotonic() + 5
    while len(store._waiting) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    joining(pool, store, 1, [0, 1]).result(10)
    assert again.result(10).epoch == 1
    store.close()
    with pytest.raises(BootstrapError):
        first.result(10)


def test_the_answer_to_all_ranks_there_may_be() -> None:
    """Each told at several addresses: in messages of at most 1 MiB, and nothing is lost."""
    told = ",".join(["[fd00:1234:5678:9abc:def0:1234:5678:9abc]:40000"] * 8)
    everybody = [
        Member(rank, f"host-{rank}", rank, "pid:[4026531836]", "kolovod-" + "0" * 32, 1000, told)
        for rank in range(MAX_RANKS)
    ]
    parts = encode_members(everybody)
    bodies = [encode(part) for part in parts]  # which refuses what is too long
    assert sum(map(len, bodies)) > 20 << 20
    bodies[0] = encode({"epoch": 1, "config": {}, **parts[0]})
    received = map(json.loads, bodies)
    formation = parse_answer(lambda: next(received), range(MAX_RANKS), None)
    assert formation.members == tuple(everybody)
    assert next(received, None) is None


def test_an_answer_of_several_messages(pool: ThreadPoolExecutor) -> None:
    """The whole rendezvous of one rank among 4096, without the other 4095 connections."""
    size = 4096
    with contextlib.closing(Store(SECRET, size)) as made:
        made.start()
        me = dataclasses.replace(member(size - 1), socket="kolovod-" + "0" * 32)
        waiting = pool.submit(meet, made.address, SECRET, range(size), me, TIMEOUT_S)
        wait_until_joined(made, 1)
        nobody = SimpleNamespace(send_encoded=lambda *_: None)
        with made._lock:
            (group,) = made._groups.values()
            for rank in range(size - 1):
                facts = dataclasses.replace(me, rank=rank, host=f"host-{rank // 8}")
                group.joined[rank] = (facts, nobody)
            made._complete(group)
        members = waiting.result(10).members
    assert [m.rank for m in members] == list(range(size))
    assert members[-1] == me
    assert members[17].host == "host-2"


def test_every_world_has_a_new_epoch(store: Store, pool: ThreadPoolExecutor) -> None:
    epochs = []
    for members in ([0, 1, 2], [0, 1, 2], [0, 2]):
        formations = [joining(pool, store, rank, members) for rank in members]
        epochs.append({formation.result(10).epoch for formation in formations})
    assert epochs == [{1}, {2}, {3}]


def test_disjoint_worlds_form_side_by_side(store: Store, pool: ThreadPoolExecutor) -> None:
    first = [joining(pool, store, rank, [0, 1]) for rank in (0,)]
    second = [joining(pool, store, rank, [2, 3]) for rank in (2, 3)]
    assert [[m.rank for m in f.result(10).members] for f in second] == [[2, 3]] * 2
    first.append(joining(pool, store, 1, [0, 1]))
    assert len({f.result(10).epoch for f in first}) == 1


def test_a_rank_known_to_be_dead_is_named_at_once(store: Store, pool: ThreadPoolExecutor) -> None:
    store.mark_dead(2, "was killed by signal 9 (SIGKILL)")
    store.mark_dead(1, "ended with exit code 1")
    with pytest.raises(RankLostError, match=r"rank 2 was killed by signal 9") as caught:
        joining(pool, store, 0, [0, 1, 2]).result(10)
    assert caught.value.rank == 2
    survivors = [joining(pool, store, rank, [0, 3]) for rank in (0, 3)]
    assert [f.result(10).epoch for f in survivors] == [1, 1]


def test_a_death_ends_the_wait_of_the_others(store: Store, pool: ThreadPoolExecutor) -> None:
    waiting = [joining(pool, store, rank, [0, 1, 2]) for rank in (0, 1)]
    wait_until_joined(store, 2)
    store.mark_dead(2, "ended with exit code 0")
    for future in waiting:
        with pytest.raises(RankLostError, match="rank 2 ended with exit code 0"):
            future.result(10)


def test_missing_ranks_are_named_at_the_deadline(store: Store, pool: ThreadPoolExecutor) -> None:
    waiting = [joining(pool, store, rank, [0, 1, 2, 3], timeout_s=0.3) for rank in (0, 2)]
    for future in waiting:
        with pytest.raises(StartTimeoutError, match=r"rank 1, 3 did not .* 0.3 s .*there: 0, 2"):
            future.result(10)


def test_different_worlds_that_wait_for_each_other_are_refused(
    store: Store, pool: ThreadPoolExecutor
) -> None:
    first = joining(pool, store, 1, [0, 1, 2])
    wait_until_joined(store, 1)
    second = joining(pool, store, 2, [1, 2])
    for future in (first, second):
        with pytest.raises(InvalidArgumentError, match=r"\[1, 2\], but rank 1 for \[0, 1, 2\]"):
            future.result(10)


def test_a_rank_that_goes_away_while_it_waits_has_not_joined(
    store: Store, pool: ThreadPoolExecutor
) -> None:
    channel = connect(
        socket.AF_INET,
        ("127.0.0.1", int(store.address.split(":")[1])),
        SECRET,
        LABEL,
        time.monotonic() + 5,
    )
    facts = [1, "h", 5, "", "", 0, "", False]
    request = {"members": [[0, 1]], "timeout_s": TIMEOUT_S, "member": facts, "config": {}}
    channel.send(request, time.monotonic() + 5)
    wait_until_joined(store, 1)
    channel.close()
    wait_until_joined(store, 0)
    waiting = joining(pool, store, 0, [0, 1])
    wait_until_joined(store, 1)
    assert not waiting.done()
    joining(pool, store, 1, [0, 1]).result(10)
    assert waiting.result(10).epoch == 1


def test_who_ends_before_all_have_come_is_named(store: Store, pool: ThreadPoolExecutor) -> None:
    """Nobody tells the store of it: its connection breaks."""
    waiting = joining(pool, store, 0, [0, 1, 2])
    wait_until_joined(store, 1)
    come_and_go(store, waiting=2)
    text = r"rank 1 on host h \(pid 1\) ended while the world was forming"
    with pytest.raises(RankLostError, match=text) as caught:
        waiting.result(10)
    assert caught.value.rank == 1


def test_who_ends_before_the_others_come_is_named(store: Store, pool: ThreadPoolExecutor) -> None:
    come_and_go(store, waiting=1)
    time.sleep(1.5 * GONE_GRACE_S)
    text = r"rank 1 on host h \(pid 1\) ended while the world was forming"
    with pytest.raises(RankLostError, match=text):
        joining(pool, store, 0, [0, 1, 2]).result(10)
    waiting = [joining(pool, store, 1, [0, 1, 2])]  # there again: nothing is against it any more
    wait_until_joined(store, 1)
    waiting += [joining(pool, store, rank, [0, 1, 2]) for rank in (0, 2)]
    assert {future.result(10).epoch for future in waiting} == {1}


def test_all_have_formed_the_world_or_none(store: Store, pool: ThreadPoolExecutor) -> None:
    joined = all_join(pool, store, [0, 1, 2])
    waiting = [pool.submit(one.formed, time.monotonic() + TIMEOUT_S) for one in joined[1:]]
    time.sleep(0.05)
    assert not any(future.done() for future in waiting)
    joined[0].formed(time.monotonic() + TIMEOUT_S)
    for future in waiting:
        future.result(10)
    joined[2].close()  # what becomes of it now is the engine's business
    joined[1].check(GONE_GRACE_S + 0.5)
    store.close()
    joined[1].check(5)


def test_who_ends_after_the_answer_is_named(store: Store, pool: ThreadPoolExecutor) -> None:
    joined = all_join(pool, store, [0, 1, 2])
    waiting = pool.submit(joined[0].formed, time.monotonic() + TIMEOUT_S)
    joined[2].close()
    for hear in (lambda: waiting.result(10), lambda: joined[1].check(10)):
        with pytest.raises(RankLostError, match=r"rank 2 on host .* ended while the world") as told:
            hear()
        assert told.value.rank == 2


def test_the_launchers_word_comes_first(store: Store, pool: ThreadPoolExecutor) -> None:
    joined = all_join(pool, store, [0, 1])
    joined[1].close()
    store.mark_dead(1, "was killed by signal 9 (SIGKILL)")
    with pytest.raises(RankLostError, match="rank 1 was killed by signal 9"):
        joined[0].formed(time.monotonic() + TIMEOUT_S)


@pytest.mark.parametrize(
    ("error", "told", "text"),
    [
        (OSError("no room"), BootstrapError, r"rank 1 on .* could not form .*: OSError: no room"),
        (BootstrapError("no way"), BootstrapError, r"rank 1 on .* could not form .*: no way"),
        (RankLostError("rank 7 is gone", 7), RankLostError, "^rank 7 is gone$"),
    ],
)
def test_why_one_gives_up_is_told_to_all(
    store: Store,
    pool: ThreadPoolExecutor,
    error: Exception,
    told: type[Exception],
    text: str,
) -> None:
    joined = all_join(pool, store, [0, 1])
    with pytest.raises(type(error)), joined[1]:
        raise error
    with pytest.raises(told, match=text):
        joined[0].formed(time.monotonic() + TIMEOUT_S)


def test_who_does_not_form_the_world_is_named(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_FORMING_S", 0.2)
    with contextlib.closing(Store(SECRET, 3)) as made:
        made.start()
        waiting = [
            pool.submit(join, made.address, SECRET, [0, 1, 2], member(rank), 0.5)
            for rank in range(3)
        ]
        joined = [future.result(10) for future in waiting]
        with pytest.raises(StartTimeoutError, match="rank 1, 2 joined, but did not form the world"):
            joined[0].formed(time.monotonic() + TIMEOUT_S)


def test_two_processes_of_one_rank_are_told_apart(store: Store, pool: ThreadPoolExecutor) -> None:
    first = joining(pool, store, 0, [0, 1])
    wait_until_joined(store, 1)
    with pytest.raises(InvalidArgumentError, match=r"pid 1000\) has joined already.*pid 77 now"):
        join(store.address, SECRET, [0, 1], member(0, pid=77), TIMEOUT_S)
    joining(pool, store, 1, [0, 1]).result(10)
    assert first.result(10).epoch == 1


def test_another_jobs_secret_is_refused(store: Store) -> None:
    with pytest.raises(AuthenticationError, match="KOLOVOD_SECRET"):
        join(store.address, new_secret(), [0], member(0), TIMEOUT_S)


def test_garbage_and_silence_do_not_disturb(store: Store, pool: ThreadPoolExecutor) -> None:
    port = int(store.address.split(":")[1])
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(16)]
    for stranger in strangers[:4]:
        stranger.sendall(os.urandom(1000))
    strangers[4].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    formations = [joining(pool, store, rank, [0, 1]) for rank in (0, 1)]
    assert [formation.result(10).epoch for formation in formations] == [1, 1]
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    "message",
    [
        {},
        [],
        "JOIN",
        {"members": [[1, 0]]},
        {**JOIN, "members": []},
        {**JOIN, "members": [0, 1]},
        {**JOIN, "members": [[0, 1], [1, 2]]},
        {**JOIN, "members": [[0, 1 << 40]]},
        {**JOIN, "member": [5, "h", 1, "", "", 0, "", False]},
        {**JOIN, "member": [0, "h"]},
        {**JOIN, "config": [1]},
        {**JOIN, "config": {str(number): number for number in range(1000)}},
        {**JOIN, "timeout_s": 0},
    ],
)
def test_a_malformed_request_is_answered(store: Store, message: object) -> None:
    address = ("127.0.0.1", int(store.address.split(":")[1]))
    deadline = time.monotonic() + 5
    with contextlib.closing(connect(socket.AF_INET, address, SECRET, LABEL, deadline)) as channel:
        channel.send(message, deadline)
        assert channel.receive(deadline)["error"] == "malformed"
    assert store._groups == {}


def test_closing_the_store_ends_the_wait(pool: ThreadPoolExecutor) -> None:
    made = Store(SECRET, 2)
    made.start()
    waiting = joining(pool, made, 0, [0, 1])
    wait_until_joined(made, 1)
    made.close()
    with pytest.raises(BootstrapError, match="launcher is going away"):
        waiting.result(10)
    with pytest.raises(BootstrapError, match="has the launcher ended"):
        join(made.address, SECRET, [0, 1], member(0), TIMEOUT_S)
    made.close()


@pytest.mark.parametrize("address", ["", "nowhere", "host:", "host:port", ":1"])
def test_a_wrong_address_is_named(address: str) -> None:
    with pytest.raises(BootstrapError, match=r"KOLOVOD_STORE=.*expected host:port"):
        join(address, SECRET, [0], member(0), TIMEOUT_S)
