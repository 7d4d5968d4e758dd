"""What strangers, and those between two peers, can do to a job's connections: docs/security.md."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from middle import Middle, echo, member, port_of, soon
from waiting import DEADLINE_S, until

from kolovod.errors import AuthenticationError, BootstrapError
from kolovod.net import channel
from kolovod.net.addresses import address_of, listen
from kolovod.net.channel import connect, new_secret
from kolovod.net.server import Server
from kolovod.net.sockets import read_exactly
from kolovod.observe.collector import Collector
from kolovod.rendezvous import mesh, segment_handover
from kolovod.rendezvous.client import join
from kolovod.rendezvous.protocol import Formation
from kolovod.rendezvous.server import LABEL, RendezvousServer

SECRET = new_secret()


@contextlib.contextmanager
def tcp_server(max_strangers: int = 64) -> Iterator[tuple[Server, tuple[str, int]]]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    address = listener.getsockname()
    server = Server(listener, SECRET, "test", echo, max_strangers)
    server.start()
    try:
        yield server, address
    finally:
        server.close()


@contextlib.contextmanager
def rank_0_of_another_host() -> Iterator[str]:
    """Listens in a world of two, at the address that is given."""
    listener = mesh.Listener(["127.0.0.1"], 2)
    world = Formation(1, (member(0, listener.address), member(1)))
    with contextlib.closing(mesh.Links(0, world, listener, SECRET)) as links:
        listener.start(SECRET, links._serve)
        yield listener.address


def call_rank_0(address: str, secret: str) -> None:
    """As rank 1 of that world, who has been told that rank 0 is at ``address``."""
    world = Formation(1, (member(0, address), member(1)))
    listener = mesh.Listener(["127.0.0.1"], 2)
    with contextlib.closing(mesh.Links(1, world, listener, secret)) as links:
        os.close(links._call(0, "data", soon(), soon()).fd)


@contextlib.contextmanager
def leader_of_a_host() -> Iterator[tuple[str, str]]:
    """One that has begun to serve: the address and the label of its socket."""
    with contextlib.closing(segment_handover.Leader(SECRET)) as leader:
        leader._server.start()
        yield f"\0{leader.name}", segment_handover.leader_label(leader.name)


def call(address: tuple[str, int], timeout_s: float = DEADLINE_S) -> object:
    deadline = soon(timeout_s)
    with contextlib.closing(connect(socket.AF_INET, address, SECRET, "test", deadline)) as channel:
        channel.send("hello", deadline)
        return channel.receive(deadline)


# Replay, reflection, relays ---------------------------------------------------------------------


def test_a_recorded_conversation_opens_nothing() -> None:
    with tcp_server() as (server, address):
        with Middle(address) as middle:
            assert call(middle.address) == "hello"
            recorded = middle.seen
        with socket.create_connection(address) as again:
            again.settimeout(10)
            assert again.recv(100)[:8] == channel.MAGIC
            again.sendall(recorded[True])
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := again.recv(100):
                    answer += piece
        assert answer in (b"", bytes(32))  # the refusal, if what was sent too much did not end it
        assert server.refused == 1


def test_a_recorded_server_convinces_no_client() -> None:
    with tcp_server() as (_, address), Middle(address) as middle:
        call(middle.address)
        recorded = middle.seen[False]
    near, far = socket.socketpair()
    with near, far:
        far.sendall(recorded)
        with pytest.raises(AuthenticationError, match="does not know"):
            channel.greet(near, SECRET, "test", soon())


def test_a_challenge_sent_back_proves_nothing() -> None:
    with tcp_server() as (server, address), socket.create_connection(address) as mirror:
        mirror.settimeout(10)
        challenge = mirror.recv(100)
        mirror.sendall(challenge + challenge[8:])  # magic, nonce, and the nonce as the proof
        assert mirror.recv(100) == bytes(32)
        assert mirror.recv(100) == b""
        assert server.refused == 1


def test_a_clients_own_proof_sent_back_proves_nothing() -> None:
    near, far = socket.socketpair()

    def mirror() -> None:
        far.sendall(channel.MAGIC + secrets.token_bytes(32))
        far.sendall(read_exactly(far, 8 + 64, soon())[-32:])

    with near, far, ThreadPoolExecutor(1) as pool:
        pool.submit(mirror)
        with pytest.raises(AuthenticationError, match="does not know"):
            channel.greet(near, SECRET, "test", soon())


def test_a_handshake_cannot_be_passed_on_to_another_rank() -> None:
    """Who stands where rank 0 is said to be, and passes everything on to rank 1, is found out."""
    with rank_0_of_another_host() as address:
        call_rank_0(address, SECRET)
        with (
            Middle(port_of(address)) as middle,
            pytest.raises(AuthenticationError, match="wrong address"),
        ):
            call_rank_0(f"127.0.0.1:{middle.address[1]}", SECRET)


@pytest.mark.parametrize("from_client", [True, False])
def test_what_is_changed_on_its_way_is_refused(from_client: bool) -> None:
    """One bit of a message after the handshake, in every place where a field begins."""
    begin = 72  # of bytes of the handshake, in either direction
    for at in (0, 3, 4, 35, 36, 38):

        def flip(side: bool, offset: int, data: bytes, at: int = begin + at) -> bytes:
            if side is not from_client or not offset <= at < offset + len(data):
                return data
            changed = bytearray(data)
            changed[at - offset] ^= 1
            return bytes(changed)

        with (
            tcp_server() as (_, address),
            Middle(address, flip) as middle,
            pytest.raises((AuthenticationError, EOFError, OSError)),
        ):
            call(middle.address, timeout_s=2)


def test_a_handshake_may_end_anywhere() -> None:
    with tcp_server() as (server, address):
        with Middle(address) as middle:
            call(middle.address)
            sent = middle.seen[True][:72]
        lengths = [*range(0, 72, 5), 71]
        for length in lengths:
            with socket.create_connection(address) as stranger:
                stranger.sendall(sent[:length])
        until(lambda: server.refused >= len(lengths))
        assert server.refused == len(lengths)
        assert call(address) == "hello"


# The wrong secret ---------------------------------------------------------------------------------


def at_the_store(secret: str) -> None:
    with contextlib.closing(RendezvousServer(SECRET, 2)) as server:
        server.start()
        join(server.address, secret, [0, 1], member(0), 5)


def at_a_rank_of_another_host(secret: str) -> None:
    with rank_0_of_another_host() as address:
        call_rank_0(address, secret)


def at_the_leader(secret: str) -> None:
    with leader_of_a_host() as (address, label):
        connect(socket.AF_UNIX, address, secret, label, soon())


def at_the_timeline(secret: str) -> None:
    listeners = listen(["127.0.0.1"], backlog=8)
    collector = Collector(SECRET, 1, 2, lambda rank, batch: None, listeners)
    with contextlib.closing(collector):
        address = port_of(address_of(listeners[0]))
        connect(socket.AF_INET, address, secret, "timeline", soon())


SERVERS = [at_the_store, at_a_rank_of_another_host, at_the_leader, at_the_timeline]


@pytest.mark.parametrize("knock", SERVERS, ids=lambda knock: knock.__name__)
def test_a_wrong_secret_is_refused_everywhere(knock: Callable[[str], None]) -> None:
    wrong = new_secret()
    with pytest.raises(AuthenticationError, match="KOLOVOD_SECRET") as caught:
        knock(wrong)
    assert wrong not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_another_user_of_the_host_gets_no_challenge() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs to be root, to become another user")
    with leader_of_a_host() as (address, _):
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX) as stranger:
                    stranger.settimeout(10)
                    stranger.connect(address)
                    code = 0 if stranger.recv(100) == b"" else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# A peer that knows the secret, and talks nonsense -------------------------------------------------


@pytest.mark.parametrize("hello", [{"rank": "x", "pidfd": True}, {"rank": 1}, [], {"rank": 10**30}])
def test_nonsense_at_the_leader_is_said_and_leaves_nothing(
    hello: object, capfd: pytest.CaptureFixture[str]
) -> None:
    with leader_of_a_host() as (address, label):
        before = len(os.listdir("/proc/self/fd"))
        channel = connect(socket.AF_UNIX, address, SECRET, label, soon())
        with contextlib.closing(channel):
            channel.send(hello, soon())
            with pytest.raises((EOFError, OSError)):
                channel.receive(soon())
        until(lambda: len(os.listdir("/proc/self/fd")) <= before, "its descriptors are closed")
    said = capfd.readouterr().err
    assert said.startswith("kolovod: leader: a malformed message: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("answer", [{}, [], {"epoch": 1, "members": 5}, {"error": "rank_lost"}])
def test_nonsense_of_the_store_is_one_error(answer: object) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    def nonsense(channel: channel.Channel) -> None:
        channel.receive(soon())
        channel.send(answer, soon())

    server = Server(listener, SECRET, LABEL, nonsense)
    server.start()
    with contextlib.closing(server), pytest.raises(BootstrapError, match="malformed"):
        join(address, SECRET, [0, 1], member(0), 5)


def test_a_timeout_of_a_month_is_waited_for() -> None:
    """The kernel counts milliseconds in 31 bits."""
    with contextlib.closing(RendezvousServer(SECRET, 2)) as server, ThreadPoolExecutor(2) as pool:
        server.start()
        month_s = 30 * 86_400.0
        waiting = [
            pool.submit(join, server.address, SECRET, [0, 1], member(rank), month_s)
            for rank in (0, 1)
        ]
        assert [future.result(20).formation.epoch for future in waiting] == [1, 1]


# Floods -------------------------------------------------------------------------------------------


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 3000:
        pytest.skip(f"may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_connections_that_say_nothing(many_files: None) -> None:
    with (
        contextlib.closing(RendezvousServer(SECRET, 2)) as server,
        contextlib.ExitStack() as strangers,
    ):
        server.start()
        before = psutil.Process().memory_info().rss
        for number in range(1, 1001):
            stranger = socket.create_connection(port_of(server.address), timeout=DEADLINE_S)
            strangers.enter_context(stranger)
            if number % 50 == 0:  # else TCP waits for seconds until it knocks at a full queue again
                with contextlib.suppress(ConnectionResetError):
                    stranger.recv(1)
        until(lambda: len(server._servers[0]._open) <= 66)
        assert threading.active_count() < 66 + 20
        assert psutil.Process().memory_info().rss - before < 64 << 20
        with ThreadPoolExecutor(2) as pool:
            waiting = [
                pool.submit(join, server.address, SECRET, [0, 1], member(rank), 20)
                for rank in (0, 1)
            ]
            assert [future.result(30).formation.epoch for future in waiting] == [1, 1]


@pytest.mark.slow
def test_ranks_get_in_while_others_knock_all_the_time(many_files: None) -> None:
    """Strangers drive each other out, and now and then a rank; which then comes again."""
    stop = threading.Event()

    def knock(address: tuple[str, int]) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), contextlib.ExitStack() as strangers:
                for _ in range(100):
                    strangers.enter_context(socket.create_connection(address, timeout=5))

    with contextlib.closing(RendezvousServer(SECRET, 2)) as server, ThreadPoolExecutor(5) as pool:
        server.start()
        flood = [pool.submit(knock, port_of(server.address)) for _ in range(2)]
        try:
            for epoch in (1, 2, 3):
                waiting = [
                    pool.submit(join, server.address, SECRET, [0, 1], member(rank), 20)
                    for rank in (0, 1)
                ]
                assert [future.result(40).formation.epoch for future in waiting] == [epoch] * 2
        finally:
            stop.set()
        for future in flood:
            future.result(20)


def test_who_is_driven_out_comes_again() -> None:
    with tcp_server(max_strangers=1) as (server, address), contextlib.ExitStack() as strangers:

        def drive_out(from_client: bool, offset: int, data: bytes) -> bytes:
            if from_client and offset == 0:  # the first proof, before it arrives
                stranger = strangers.enter_context(
                    socket.create_connection(address, timeout=DEADLINE_S)
                )
                assert len(stranger.recv(100)) == 40
            return data

        with Middle(address, drive_out) as middle:
            assert call(middle.address) == "hello"
        until(lambda: server.refused >= 2)  # it counts who is driven out when it has seen that go
        assert server.refused == 2  # the call's first try, and the stranger in its turn


def test_who_has_got_in_is_not_driven_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that knows so does not come again: it would take the server for gone."""
    accept = channel.accept
    with contextlib.ExitStack() as strangers:

        def accept_and_be_slow(*arguments: Any) -> channel.Channel:
            accepted = accept(*arguments)  # the client has its proof
            stranger = socket.create_connection(address, timeout=DEADLINE_S)
            assert len(strangers.enter_context(stranger).recv(100)) == 40
            return accepted

        monkeypatch.setattr("kolovod.net.server.accept", accept_and_be_slow)
        with tcp_server(max_strangers=1) as (server, address):
            assert call(address) == "hello"
            assert server.refused == 0


def test_who_is_dropped_comes_again_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of nobody's that closes each connection: an error, and soon."""
    monkeypatch.setattr(channel, "_PAUSE_S", 0.002)  # else ten seconds, of nothing but pauses
    listener = socket.create_server(("127.0.0.1", 0))
    accepted = []

    def close_all() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                accepted.append(1)  # before the client can notice
                connection.close()

    thread = threading.Thread(target=close_all, daemon=True)
    thread.start()
    with pytest.raises(AuthenticationError, match="again and again"):
        connect(socket.AF_INET, listener.getsockname(), SECRET, "test", soon())
    assert len(accepted) == channel._TRIES
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)
