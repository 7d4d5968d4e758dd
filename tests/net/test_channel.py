"""kolovod.net.channel: nothing is parsed before the proof, and nothing blocks for ever."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import DEADLINE_S, until

from kolovod.errors import AuthenticationError, BootstrapError
from kolovod.net import channel
from kolovod.net.channel import Channel, accept, connect, new_secret
from kolovod.net.server import Server
from kolovod.net.sockets import read_exactly

SECRET = new_secret()


def soon(seconds: float = DEADLINE_S) -> float:
    return time.monotonic() + seconds


@contextlib.contextmanager
def serving(
    handler: Callable[[Channel], None], secret: str = SECRET, **options: Any
) -> Iterator[tuple[Server, str]]:
    """A server on an abstract socket; yields it and its address."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = f"\0kolovod-test-{secrets.token_hex(8)}"
    listener.bind(address)
    listener.listen(64)
    server = Server(listener, secret, "test", handler, **options)
    server.start()
    try:
        yield server, address
    finally:
        server.close()


def echo(channel: Channel) -> None:
    channel.send(channel.receive(soon()), soon())


def call(address: str, message: Any, secret: str = SECRET, label: str = "test") -> Any:
    with contextlib.closing(connect(socket.AF_UNIX, address, secret, label, soon())) as channel:
        channel.send(message, soon())
        return channel.receive(soon())


def channel_pair() -> tuple[Channel, Channel, socket.socket, socket.socket]:
    """Both ends of an authenticated connection, and their raw sockets."""
    left, right = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(accept, left, SECRET, "test", soon())
        client = channel.greet(right, SECRET, "test", soon())
        return server.result(), client, left, right


def test_messages_go_both_ways() -> None:
    with serving(echo) as (_, address):
        message = {"text": "kolo ↻", "numbers": [1, 2.5, None]}
        assert call(address, message) == message


def test_secrets_are_fresh() -> None:
    assert len({new_secret() for _ in range(10)}) == 10
    assert len(bytes.fromhex(new_secret())) == 32


def test_a_client_with_another_secret_is_refused() -> None:
    served = []
    with serving(served.append) as (server, address):
        with pytest.raises(AuthenticationError, match="KOLOVOD_SECRET"):
            call(address, "hello", secret=new_secret())
        until(lambda: server.refused)
        assert server.refused == 1
    assert served == []


def test_a_proof_for_one_purpose_is_of_no_use_for_another() -> None:
    with serving(echo) as (_, address), pytest.raises(AuthenticationError):
        call(address, "hello", label="leader 1")


def test_a_server_that_does_not_know_the_secret_is_refused() -> None:
    def impostor(sock: socket.socket) -> None:
        sock.sendall(channel.MAGIC + bytes(32))
        read_exactly(sock, 8 + 64, soon())
        sock.sendall(os.urandom(32))

    left, right = socket.socketpair()
    thread = threading.Thread(target=impostor, args=(left,))
    thread.start()
    with pytest.raises(AuthenticationError, match="does not know"):
        channel.greet(right, SECRET, "test", soon())
    thread.join()
    left.close()
    right.close()


def test_a_server_of_another_protocol_is_refused() -> None:
    left, right = socket.socketpair()
    left.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    with pytest.raises(AuthenticationError, match="protocol"):
        channel.greet(right, SECRET, "test", soon())
    left.close()
    right.close()


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_instead_of_a_proof_is_refused(garbage: bytes) -> None:
    left, right = socket.socketpair()
    right.sendall(garbage)
    right.shutdown(socket.SHUT_WR)
    with pytest.raises((AuthenticationError, EOFError)):
        accept(left, SECRET, "test", soon())
    left.close()
    right.close()


def test_garbage_and_silence_hold_up_nobody() -> None:
    with serving(echo, handshake_timeout_s=60.0) as (_, address):
        strangers = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        for number, stranger in enumerate(strangers):
            stranger.connect(address)
            if number % 2:
                stranger.sendall(os.urandom(500))
        assert call(address, "still there") == "still there"
        for stranger in strangers:
            stranger.close()


def test_silence_is_dropped_after_the_handshake_timeout() -> None:
    with serving(echo, handshake_timeout_s=0.1) as (_, address):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(address)
        stranger.settimeout(DEADLINE_S)
        while stranger.recv(100):  # the challenge, if there was time for it; then the end
            pass
        stranger.close()


def test_one_byte_at_a_time_does_not_stretch_the_deadline() -> None:
    left, right = socket.socketpair()
    stop = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not stop.wait(0.1):
                right.sendall(b"K")  # it would take seven seconds until it is a wrong proof

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(TimeoutError):
        accept(left, SECRET, "test", soon(0.3))
    stop.set()
    thread.join()
    left.close()
    right.close()


def test_one_stranger_too_many_and_the_oldest_must_go() -> None:
    with serving(echo, max_strangers=2, handshake_timeout_s=60.0) as (_, address):
        strangers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for stranger in strangers:
            stranger.settimeout(DEADLINE_S)
            stranger.connect(address)
            assert len(stranger.recv(100)) == 40
        assert strangers[0].recv(100) == b""
        assert call(address, "and a friend comes in") == "and a friend comes in"
        assert strangers[1].recv(100) == b""
        strangers[2].setblocking(False)
        with pytest.raises(BlockingIOError):  # still waited for
            strangers[2].recv(100)
        for stranger in strangers:
            stranger.close()


def test_a_full_backlog_is_waited_for() -> None:
    listener = socket.socket(socket.AF_UNIX)
    address = f"\0kolovod-test-{secrets.token_hex(8)}"
    listener.bind(address)
    listener.listen(0)
    first = socket.socket(socket.AF_UNIX)
    first.connect(address)
    server = Server(listener, SECRET, "test", echo)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, address, "patience")
        time.sleep(0.1)
        assert not calling.done()
        server.start()
        assert calling.result(DEADLINE_S) == "patience"
    first.close()
    server.close()


def test_an_altered_message_is_refused() -> None:
    server, client, left, right = channel_pair()
    client.send("hello", soon())
    frame = bytearray(left.recv(1000))
    frame[-2] ^= 1
    right.sendall(frame)  # as if it had been changed on its way
    with pytest.raises(AuthenticationError, match="altered"):
        server.receive(soon())
    server.close()
    client.close()


def test_a_repeated_message_is_refused() -> None:
    server, client, left, right = channel_pair()
    client.send("pay", soon())
    frame = left.recv(1000, socket.MSG_PEEK)
    assert server.receive(soon()) == "pay"
    right.sendall(frame)
    with pytest.raises(AuthenticationError, match="replay"):
        server.receive(soon())
    server.close()
    client.close()


def test_a_message_sent_back_to_its_sender_is_refused() -> None:
    server, client, left, _ = channel_pair()
    client.send("hello", soon())
    left.sendall(left.recv(1000))
    with pytest.raises(AuthenticationError):
        client.receive(soon())
    server.close()
    client.close()


def test_a_size_over_the_limit_is_refused_before_it_is_read() -> None:
    server, client, _, right = channel_pair()
    right.sendall(struct.pack(">I", 1 << 31) + bytes(32))
    with pytest.raises(AuthenticationError, match="2147483648 bytes"):
        server.receive(soon())
    server.close()
    client.close()


def test_too_large_a_message_is_not_sent() -> None:
    server, client, _, _ = channel_pair()
    with pytest.raises(BootstrapError, match="bytes is over"):
        client.send("x" * channel.MAX_BODY_BYTES, soon())
    server.close()
    client.close()


@pytest.mark.parametrize("count", [1, 64, 65, 200])
def test_descriptors_arrive_in_order(count: int) -> None:
    server, client, _, _ = channel_pair()
    files = [os.memfd_create(str(number)) for number in range(count)]
    for number, fd in enumerate(files):
        os.write(fd, str(number).encode())
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(server.send_fds, files, soon())
        received = client.receive_fds(count, soon())
        sending.result()
    assert [int(os.pread(fd, 10, 0)) for fd in received] == list(range(count))
    for fd in (*files, *received):
        os.close(fd)
    server.close()
    client.close()


def test_closing_the_server_ends_connections_and_threads() -> None:
    entered = threading.Event()

    def wait_for_ever(channel: Channel) -> None:
        entered.set()
        channel.receive(soon(1000))

    with serving(wait_for_ever) as (server, address):
        channel = connect(socket.AF_UNIX, address, SECRET, "test", soon())
        assert entered.wait(5)
        server.close()
        with pytest.raises((EOFError, OSError)):
            channel.receive(soon())
        channel.close()
        server.close()  # again: nothing happens
