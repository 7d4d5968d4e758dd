"""Ranks that wait for messages which nobody can send or receive any more get one error, soon."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from forked import run_ranks

import kolovod
from kolovod.core.standings import Scope, Standing, decode, encode, find_deadlock
from kolovod.errors import MismatchError

SOON_S = 30.0  # a second is meant; a deadlock that is not found lasts for ever
LARGE = 1 << 21  # elements, so that a send waits until it is received
NOTHING = (0, 0, 0, 0)

# What ranks say -----------------------------------------------------------------------------------


def said(*ranks: tuple[Any, dict[int, tuple[int, int, int, int]]] | None) -> dict[int, Standing]:
    """By rank what it waits for, and its counts.

    It waits for a recv (the rank, or -1 for any), a send, or a collective (its name).
    """
    found = {}
    for rank, given in enumerate(ranks):
        if given is None:
            continue
        waits_for, exchanged = given
        if isinstance(waits_for, int):
            waits_for = ("recv", waits_for)
        is_message = isinstance(waits_for, tuple)
        found[rank] = Standing(
            {"": Scope(None, 5, False, is_message and waits_for[0] == "recv", exchanged)},
            frozenset() if is_message else frozenset({("", waits_for)}),
            "x",
            frozenset({("", *waits_for)}) if is_message else frozenset(),
        )
    return found


CASES = {
    "each receives from the other": (said((1, {}), (0, {})), [0, 1]),
    "one may still send": (said((1, {}), None), []),
    "of three, one may still send": (said((1, {}), (2, {}), None), []),
    "in a ring": (said((1, {}), (2, {}), (0, {})), [0, 1, 2]),
    "who is to send waits for all": (said((1, {}), ("a", {})), [0, 1]),
    "any of two, one of whom may": (said((-1, {}), (0, {}), None), []),
    "any of two, who wait": (said((-1, {}), (0, {}), ("a", {})), [0, 1, 2]),
    "all has arrived": (said((1, {1: (2, 3, 1, 1)}), (0, {0: (3, 2, 1, 1)})), [0, 1]),
    "a message is on its way": (said((1, {1: (0, 2, 0, 0)}), (0, {0: (3, 0, 0, 0)})), []),
    "each offers": (
        said((("send", 1), {1: (1, 0, 0, 0)}), (("send", 0), {0: (1, 0, 0, 0)})),
        [0, 1],
    ),
    "an offer is on its way to who receives": (
        said((("send", 1), {1: (1, 0, 0, 0)}), (0, {})),
        [],
    ),
    "an offer that fits nothing has arrived": (
        said((("send", 1), {1: (1, 0, 0, 0)}), (0, {0: (0, 1, 0, 0)})),
        [0, 1],
    ),
    "an answer is on its way": (
        said((("send", 1), {1: (1, 0, 0, 0)}), ("a", {0: (0, 1, 1, 0)})),
        [],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_who_can_never_go_on(case: str) -> None:
    standings, stuck = CASES[case]
    assert find_deadlock(standings, 3) == stuck


@pytest.mark.parametrize("exchanged", [{}, {0: (1, 2, 3, 4), 7: (0, 0, 0, 1)}, None])
def test_what_is_said_is_what_is_read(exchanged: Any) -> None:
    scopes = {"": Scope(None, 5, False, True, exchanged), "s": Scope((0, 7), 2, True)}
    messages = frozenset({("", "recv", -1), ("s", "send", 7)})
    standing = Standing(scopes, frozenset({("", "a"), ("s", "b")}), "recv at x.py:1", messages)
    assert decode(encode(standing)) == standing


def test_nobody_is_judged_whose_counts_did_not_fit() -> None:
    both = said((1, {}), (0, {}))
    one = both[1]._replace(scopes={"": both[1].scopes[""]._replace(exchanged=None)})
    assert find_deadlock(both, 2) == [0, 1]
    assert find_deadlock({0: both[0], 1: one}, 2) == []


# On real ranks ------------------------------------------------------------------------------------


def caught(call: Any) -> str:
    began_s = time.monotonic()
    with pytest.raises(MismatchError, match="wait for different operations") as error:
        call()
    assert time.monotonic() - began_s < SOON_S
    return str(error.value)


def both_receive(rank: int) -> str:
    kolovod.init()
    x = np.zeros(3)
    if rank == 0:
        kolovod.send(x, 1)
    else:
        kolovod.recv(x, 0)
    return caught(lambda: kolovod.recv(x, 1 - rank))


def both_send(rank: int) -> str:
    kolovod.init()
    return caught(lambda: kolovod.send(np.zeros(LARGE), 1 - rank))


def waits_for_a_barrier(rank: int) -> str:
    """Rank 0 has another tag in mind."""
    kolovod.init()
    x = np.zeros(3)
    if rank == 1:
        kolovod.send(x, 0, tag=1)
        return caught(kolovod.barrier)
    return caught(lambda: kolovod.recv(x, 1, tag=2))


def of_any(rank: int) -> str:
    kolovod.init()
    if rank == 2:
        return caught(lambda: kolovod.recv(np.zeros(3)))
    return caught(lambda: kolovod.allreduce(np.zeros(3), name="loss"))


def in_a_ring(rank: int) -> str:
    kolovod.init()
    received = np.zeros(LARGE)

    def exchange() -> None:
        kolovod.send(received, (rank + 1) % 3)
        kolovod.recv(received, (rank + 2) % 3)

    return caught(exchange)


def in_a_set(rank: int) -> str:
    kolovod.init()
    pair = kolovod.add_process_set([0, 2])
    x = np.zeros(3)
    if rank == 1:
        return caught(kolovod.barrier)
    return caught(lambda: kolovod.recv(x, 2 - rank, process_set=pair))


@pytest.mark.parametrize("hosts", [(), ("a", "b", "b")])
@pytest.mark.parametrize(
    ("work", "size", "texts"),
    [
        (both_receive, 2, ["rank 0 in recv from rank 1 at ", "rank 1 in recv from rank 0 at "]),
        (both_send, 2, ["rank 0 in send to rank 1 at ", "rank 1 in send to rank 0 at "]),
        (waits_for_a_barrier, 2, ["rank 0 in recv from rank 1 at ", "rank 1 in barrier"]),
        (of_any, 3, ["rank 2 in recv from any rank at ", "ranks 0, 1 in allreduce 'loss'"]),
        (in_a_ring, 3, [f"rank {r} in send to rank {(r + 1) % 3}" for r in range(3)]),
        (in_a_set, 3, ["rank 0 in recv from rank 2 of process set [0, 2] at ", "rank 2 in recv"]),
    ],
)
def test_one_error_says_where_each_waits(
    work: Any, size: int, texts: list[str], hosts: tuple[str, ...]
) -> None:
    for text in run_ranks(size, work, hosts=hosts[:size]):
        assert all(each in text for each in texts), text


def goes_on(rank: int) -> list[float]:
    """Waits of one or two seconds for messages, each of which ends."""
    kolovod.init()
    x, large = np.full(3, float(rank)), np.full(LARGE, float(rank))
    found = []

    # Rank 2 computes, then sends to who waits for it, and receives from who waits to send.
    if rank == 2:
        time.sleep(1.5)
        kolovod.send(x, 0)
        kolovod.recv(large, 1)
        found.append(large[0])
    elif rank == 0:
        kolovod.recv(x, 2)
        found.append(x[0])
    else:
        kolovod.send(large, 2)
    kolovod.barrier()

    # A rank that is stopped has not heard that its message was received, and that the others wait.
    if rank == 1:
        if os.fork() == 0:
            time.sleep(0.4)
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(1.5)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        kolovod.send(np.full(LARGE, 7.0), 0)
        os.wait()
    elif rank == 0:
        time.sleep(0.8)
        kolovod.recv(large, 1)
        found.append(large[-1])
    kolovod.barrier()

    # Messages that wait for nobody, while the rank waits for something else.
    handle = kolovod.irecv(large, 1, tag=9) if rank == 0 else None
    time.sleep(1.0 * (rank == 2))
    kolovod.barrier()
    if rank == 1:
        time.sleep(1.0)
        kolovod.send(np.full(LARGE, 8.0), 0, tag=9)
    if handle is not None:
        handle.wait()
        found.append(large[0])
    kolovod.barrier()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [(), ("a", "b", "b"), ("a", "b", "c")])
def test_what_goes_on_after_a_while_is_no_deadlock(hosts: tuple[str, ...]) -> None:
    assert run_ranks(3, goes_on, hosts=hosts, timeout_s=60) == [[2.0, 7.0, 8.0], [], [1.0]]
