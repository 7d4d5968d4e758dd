"""kolovod.rendezvous.server: who dies, goes away or is late while a world forms."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from meeting import (  # noqa: F401
    JOIN,
    SECRET,
    TIMEOUT_S,
    all_join,
    come_and_go,
    joining,
    made_pool,
    made_store,
    member,
    wait_until_joined,
)
from waiting import DEADLINE_S, until

import kolovod.rendezvous.server as store_module
from kolovod.errors import (
    BootstrapError,
    RankLostError,
    StartTimeoutError,
)
from kolovod.net.channel import connect
from kolovod.rendezvous.client import join
from kolovod.rendezvous.server import GONE_GRACE_S, LABEL, RendezvousServer


@pytest.fixture(name="may_come_again")
def made_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes who has gone away, or the launcher to know why it has."""
    monkeypatch.setattr(store_module, "GONE_GRACE_S", DEADLINE_S)


def let_be_late(server: RendezvousServer) -> None:
    """The deadline of the only world has passed."""
    with server._lock:
        (group,) = server._open_groups()
        assert time.monotonic() < group.deadline <= time.monotonic() + TIMEOUT_S
        group.deadline = time.monotonic()
    os.eventfd_write(server._bell, 1)


def test_a_rank_known_to_be_dead_is_named_at_once(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    server.mark_dead(2, "was killed by signal 9 (SIGKILL)")
    server.mark_dead(1, "ended with exit code 1")
    with pytest.raises(RankLostError, match=r"rank 2 was killed by signal 9") as caught:
        joining(pool, server, 0, [0, 1, 2]).result(DEADLINE_S)
    assert caught.value.rank == 2
    survivors = [joining(pool, server, rank, [0, 3]) for rank in (0, 3)]
    assert [f.result(DEADLINE_S).epoch for f in survivors] == [1, 1]


def test_a_death_ends_the_wait_of_the_others(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    waiting = [joining(pool, server, rank, [0, 1, 2]) for rank in (0, 1)]
    wait_until_joined(server, 2)
    server.mark_dead(2, "ended with exit code 0")
    for future in waiting:
        with pytest.raises(RankLostError, match="rank 2 ended with exit code 0"):
            future.result(DEADLINE_S)


def test_a_world_is_not_waited_for_when_a_later_one_has_followed(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    """Though nobody knows that the missing rank has ended: it may only be cut off."""
    waiting = [joining(pool, server, rank, [0, 1, 2], scope=4) for rank in (0, 1)]
    later = joining(pool, server, 0, [0, 1], scope=6)  # which forms ahead
    wait_until_joined(server, 3)
    server.end_scopes(5)
    for future in waiting:
        with pytest.raises(BootstrapError, match="in epoch 5: the world of epoch 4 is over"):
            future.result(DEADLINE_S)
    with pytest.raises(BootstrapError, match="the world of epoch 4 is over"):
        joining(pool, server, 1, [0, 1, 2], scope=4).result(DEADLINE_S)  # it comes late
    server.end_scopes(3)  # of which it is told late
    with pytest.raises(BootstrapError, match="in epoch 5: the world of epoch 4 is over"):
        joining(pool, server, 1, [0, 1, 2], scope=4).result(DEADLINE_S)
    now = [joining(pool, server, rank, [0, 1], scope=5) for rank in (0, 1)]
    assert len({future.result(DEADLINE_S).epoch for future in now}) == 1
    assert not later.done()
    joining(pool, server, 1, [0, 1], scope=6).result(DEADLINE_S)
    later.result(DEADLINE_S)


def test_missing_ranks_are_named_at_the_deadline(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    waiting = [joining(pool, server, rank, [0, 1, 2, 3], timeout_s=TIMEOUT_S) for rank in (0, 2)]
    wait_until_joined(server, 2)
    let_be_late(server)
    for future in waiting:
        with pytest.raises(StartTimeoutError, match=r"rank 1, 3 did not .* 20 s .*there: 0, 2"):
            future.result(DEADLINE_S)


@pytest.mark.usefixtures("may_come_again")
def test_a_rank_that_goes_away_while_it_waits_has_not_joined(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    channel = connect(
        socket.AF_INET,
        ("127.0.0.1", int(server.address.split(":")[1])),
        SECRET,
        LABEL,
        time.monotonic() + DEADLINE_S,
    )
    facts = [1, "h", 5, "", "", 0, "", False]
    request = {**JOIN, "timeout_s": TIMEOUT_S, "member": facts}
    channel.send(request, time.monotonic() + DEADLINE_S)
    wait_until_joined(server, 1)
    channel.close()
    wait_until_joined(server, 0)
    waiting = joining(pool, server, 0, [0, 1])
    wait_until_joined(server, 1)
    assert not waiting.done()
    joining(pool, server, 1, [0, 1]).result(DEADLINE_S)
    assert waiting.result(DEADLINE_S).epoch == 1


def test_who_ends_before_all_have_come_is_named(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    """Nobody tells the rendezvous server of it: its connection breaks."""
    waiting = joining(pool, server, 0, [0, 1, 2])
    wait_until_joined(server, 1)
    come_and_go(server, waiting=2)
    text = r"rank 1 on host h \(pid 1\) ended while the world was forming"
    with pytest.raises(RankLostError, match=text) as caught:
        waiting.result(DEADLINE_S)
    assert caught.value.rank == 1


def test_who_ends_before_the_others_come_is_named(
    server: RendezvousServer, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "GONE_GRACE_S", 0.1)
    come_and_go(server, waiting=1)
    wait_until_joined(server, 0)  # from then on it counts
    time.sleep(1.5 * store_module.GONE_GRACE_S)
    text = r"rank 1 on host h \(pid 1\) ended while the world was forming"
    with pytest.raises(RankLostError, match=text):
        joining(pool, server, 0, [0, 1, 2]).result(DEADLINE_S)
    waiting = [joining(pool, server, 1, [0, 1, 2])]  # there again: nothing is against it any more
    wait_until_joined(server, 1)
    waiting += [joining(pool, server, rank, [0, 1, 2]) for rank in (0, 2)]
    assert {future.result(DEADLINE_S).epoch for future in waiting} == {1}


def test_all_have_formed_the_world_or_none(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    joined = all_join(pool, server, [0, 1, 2])
    waiting = [pool.submit(one.formed, time.monotonic() + TIMEOUT_S) for one in joined[1:]]
    time.sleep(0.05)
    assert not any(future.done() for future in waiting)
    joined[0].formed(time.monotonic() + TIMEOUT_S)
    for future in waiting:
        future.result(DEADLINE_S)
    joined[2].close()  # what becomes of it now is the engine's business
    joined[1].check(GONE_GRACE_S + 0.5)
    server.close()
    joined[1].check(5)


def test_who_ends_after_the_answer_is_named(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    joined = all_join(pool, server, [0, 1, 2])
    waiting = pool.submit(joined[0].formed, time.monotonic() + TIMEOUT_S)
    joined[2].close()
    for hear in (lambda: waiting.result(DEADLINE_S), lambda: joined[1].check(DEADLINE_S)):
        with pytest.raises(RankLostError, match=r"rank 2 on host .* ended while the world") as told:
            hear()
        assert told.value.rank == 2


@pytest.mark.usefixtures("may_come_again")
def test_the_launchers_word_comes_first(server: RendezvousServer, pool: ThreadPoolExecutor) -> None:
    joined = all_join(pool, server, [0, 1])
    joined[1].close()
    server.mark_dead(1, "was killed by signal 9 (SIGKILL)")
    with pytest.raises(RankLostError, match="rank 1 was killed by signal 9"):
        joined[0].formed(time.monotonic() + TIMEOUT_S)


@pytest.mark.parametrize(
    ("error", "told", "text"),
    [
        (OSError("no room"), BootstrapError, r"rank 1 on .* could not form .*: OSError: no room"),
        (BootstrapError("no way"), BootstrapError, r"rank 1 on .* could not form .*: no way"),
        (RankLostError("rank 7 is gone", 7), RankLostError, "(?m)^rank 7 is gone$"),
    ],
)
def test_why_one_gives_up_is_told_to_all(
    server: RendezvousServer,
    pool: ThreadPoolExecutor,
    error: Exception,
    told: type[Exception],
    text: str,
) -> None:
    joined = all_join(pool, server, [0, 1])
    with pytest.raises(type(error)), joined[1]:
        raise error
    with pytest.raises(told, match=text):
        joined[0].formed(time.monotonic() + TIMEOUT_S)


def test_who_does_not_form_the_world_is_named(
    server: RendezvousServer, pool: ThreadPoolExecutor
) -> None:
    joined = all_join(pool, server, [0, 1, 2])
    (group,) = server._forming.values()
    waiting = pool.submit(joined[0].formed, time.monotonic() + TIMEOUT_S)
    until(lambda: group.forming == {1, 2})
    let_be_late(server)
    with pytest.raises(StartTimeoutError, match="rank 1, 2 joined, but did not form the world"):
        waiting.result(DEADLINE_S)


def test_closing_the_store_ends_the_wait(pool: ThreadPoolExecutor) -> None:
    made = RendezvousServer(SECRET, 2)
    made.start()
    waiting = joining(pool, made, 0, [0, 1])
    wait_until_joined(made, 1)
    made.close()
    with pytest.raises(BootstrapError, match="launcher is going away"):
        waiting.result(DEADLINE_S)
    with pytest.raises(BootstrapError, match="has the launcher ended"):
        join(made.address, SECRET, [0, 1], member(0), TIMEOUT_S)
    made.close()
