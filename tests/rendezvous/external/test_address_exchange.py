"""kolovod.rendezvous.external.address_exchange: who is let in, and when."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from ports import refusing_port, reserve_port
from waiting import DEADLINE_S, until

from kolovod.errors import AuthenticationError, BootstrapError, StartTimeoutError
from kolovod.net.channel import connect
from kolovod.net.server import Server
from kolovod.net.unix_sockets import listen_abstract
from kolovod.rendezvous.external import address_exchange
from kolovod.rendezvous.external.address_exchange import (
    RefusedError,
    ask,
    ask_once,
    tcp_exchange,
    unix_exchange,
)

FACTS = {"store": "127.0.0.1:5"}
TIMEOUT_S = 20.0
# Asks as another process than this one: the name, the secret, the rank, seconds.
ASK = """
import sys
from kolovod.rendezvous.external.address_exchange import ask
print(ask(sys.argv[1], "", int(sys.argv[2]), "h", float(sys.argv[3])))
"""


def new_name():
    return f"kolovod-test-{secrets.token_hex(8)}"


def asked_elsewhere(name, rank, timeout_s):
    command = [sys.executable, "-c", ASK, name, str(rank), str(timeout_s)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_whoever_comes_before_the_door_opens_waits(monkeypatch):
    name, found, tried = new_name(), [], []

    def noted(*arguments):
        try:
            return ask_once(*arguments)
        finally:
            tried.append(arguments)

    monkeypatch.setattr(address_exchange, "ask_once", noted)
    asking = threading.Thread(target=lambda: found.append(ask(name, "", 1, "h", TIMEOUT_S)))
    asking.start()
    until(lambda: tried)
    with closing(unix_exchange(name, FACTS, 2)):
        asking.join(TIMEOUT_S)
    assert found == [FACTS]


def test_a_rank_comes_once_and_a_later_program_of_the_job_waits_for_its_own_rank_0():
    name = new_name()
    with closing(unix_exchange(name, FACTS, 2)):
        assert asked_elsewhere(name, 1, 20).stdout == f"{FACTS}\n"
        later = asked_elsewhere(name, 1, 1.0)
        assert (
            "rank 1 is not expected by rank 0 on this host: rank 1 has come already, on host h"
            in (later.stderr)
        )
        assert "It was tried for 1 s; KOLOVOD_START_TIMEOUT_S sets the limit" in later.stderr
    with closing(unix_exchange(name, {"store": "another"}, 2)):
        for _ in range(2):  # the same process may ask again
            assert ask_once(name, "", 1, "h", time.monotonic() + TIMEOUT_S) == {"store": "another"}


def test_a_last_try_that_has_no_time_does_not_hide_why_it_was_tried_again(monkeypatch):
    tried = []

    def soon_late(address, secret, rank, host, deadline):
        tried.append(rank)
        if len(tried) == 1:
            raise RefusedError("rank 1 has come already")
        until(lambda: time.monotonic() >= deadline)
        raise BootstrapError("rank 1 cannot reach rank 0 (timed out)")

    monkeypatch.setattr(address_exchange, "ask_once", soon_late)
    with pytest.raises(StartTimeoutError, match=r"^rank 1 has come already. It was tried for 1 s"):
        ask(new_name(), "", 1, "h", 1.0)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_the_job_does_not_have(rank):
    name = new_name()
    with (
        closing(unix_exchange(name, FACTS, 2)),
        pytest.raises(BootstrapError, match=f"no rank {rank} to come: the job has 2 ranks"),
    ):
        ask_once(name, "", rank, "h", time.monotonic() + TIMEOUT_S)


def test_two_rank_0_of_one_job():
    name = new_name()
    with (
        closing(unix_exchange(name, FACTS, 2)),
        pytest.raises(BootstrapError, match="does another process of this job run as rank 0"),
    ):
        unix_exchange(name, FACTS, 2)


@pytest.fixture
def soon_refused(monkeypatch):
    """Who breaks the handshake off is tried again for a moment, not for three seconds."""
    monkeypatch.setattr(address_exchange, "_REFUSED_S", 0.3)


@pytest.mark.usefixtures("soon_refused")
def test_between_hosts_the_secret_is_proved():
    port = reserve_port()
    with closing(tcp_exchange(["127.0.0.1"], port, "ours", FACTS, 2)):
        assert ask(("127.0.0.1", port), "ours", 1, "h", TIMEOUT_S) == FACTS
        with ThreadPoolExecutor(1) as pool:  # no reason to try that again, as long as it may be
            asking = pool.submit(ask, ("127.0.0.1", port), "theirs", 1, "h", 100 * TIMEOUT_S)
            with pytest.raises(
                AuthenticationError,
                match=rf"rank 1 cannot .* 127.0.0.1:{port}: .*not that of the job",
            ):
                asking.result(DEADLINE_S)
        with pytest.raises(BootstrapError, match="set KOLOVOD_STORE_PORT to a free one"):
            tcp_exchange(["127.0.0.1"], port, "ours", FACTS, 2)


def test_nobody_opens():
    with (
        refusing_port() as port,
        pytest.raises(
            StartTimeoutError, match=r"rank 1 cannot reach rank 0 at 127.0.0.1:\d+ .*0.2 s"
        ),
    ):
        ask(port.getsockname(), "s", 1, "h", 0.2)
    with pytest.raises(StartTimeoutError, match=r"rank 1 cannot reach rank 0 on this host"):
        ask(new_name(), "", 1, "h", 0.2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can become somebody else")
@pytest.mark.usefixtures("soon_refused")
def test_a_door_of_another_user_is_not_believed():
    name = new_name()
    script = (
        "import os, sys\n"
        "from kolovod.rendezvous.external.address_exchange import unix_exchange\n"
        "os.setuid(65534); made = unix_exchange(sys.argv[1], {}, 2)\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout.readline() == b"open\n"
            with pytest.raises(AuthenticationError, match="a process of another user"):
                ask(name, "", 1, "h", TIMEOUT_S)
        finally:
            other.stdin.close()
            other.wait(TIMEOUT_S)


def test_a_rank_0_that_is_just_ending_is_not_taken_for_a_stranger():
    """It closes the connection in the middle of the handshake; its successor comes at once."""
    name, found = new_name(), []
    old = socket.socket(socket.AF_UNIX)
    old.bind(f"\0{name}")
    old.listen()
    asking = threading.Thread(target=lambda: found.append(ask(name, "", 1, "h", TIMEOUT_S)))
    asking.start()
    old.accept()[0].close()
    old.close()
    with closing(unix_exchange(name, FACTS, 2)):
        asking.join(TIMEOUT_S)
    assert found == [FACTS]


@pytest.mark.parametrize("message", [5, {}, {"rank": "x", "host": "h", "pid": 1, "process": "p"}])
def test_a_malformed_question_is_answered(message):
    name = new_name()
    deadline = time.monotonic() + TIMEOUT_S
    with (
        closing(unix_exchange(name, FACTS, 2)),
        closing(connect(socket.AF_UNIX, f"\0{name}", "", "address-exchange", deadline)) as channel,
    ):
        channel.send(message, deadline)
        assert channel.receive(deadline)["gone"].startswith("a malformed message")


@pytest.mark.parametrize(
    "answer", [5, ["facts"], {}, {"facts": "here"}, {"gone": 5}], ids=lambda answer: str(answer)
)
def test_a_malformed_answer_is_told(answer):
    name = new_name()

    def serve(channel):
        channel.receive(time.monotonic() + TIMEOUT_S)
        channel.send(answer, time.monotonic() + TIMEOUT_S)

    server = Server(listen_abstract(name, 8), "", address_exchange.LABEL, serve)
    server.start()
    with closing(server), pytest.raises(BootstrapError, match="cannot make sense") as raised:
        ask_once(name, "", 1, "h", time.monotonic() + TIMEOUT_S)
    assert not isinstance(raised.value, RefusedError)
    assert "a malformed message" in str(raised.value)
    assert "the same version of kolovod" in str(raised.value)
