"""Somebody between two peers, and what tests of strangers need besides."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable

from waiting import DEADLINE_S

from kolovod.net import channel
from kolovod.rendezvous.protocol import Member


def soon(seconds: float = DEADLINE_S) -> float:
    return time.monotonic() + seconds


def member(rank: int, address: str = "") -> Member:
    return Member(rank, "localhost", 1000 + rank, "", f"socket-{rank}", 0, address)


def encrypting(rank: int, encrypts: bool = True) -> Member:
    return dataclasses.replace(member(rank), encrypts=encrypts)


def port_of(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def echo(channel: channel.Channel) -> None:
    channel.send(channel.receive(soon()), soon())


class Middle:
    """Somebody between a client and ``target``, who may change what passes, and remembers it.

    ``change(from_client, offset, data)``: what goes on in place of ``data``.
    """

    def __init__(
        self, target: tuple[str, int], change: Callable[[bool, int, bytes], bytes] | None = None
    ) -> None:
        self.seen = {True: b"", False: b""}
        self._change = change or (lambda from_client, offset, data: data)
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                for way in ((True, client, server), (False, server, client)):
                    thread = threading.Thread(target=self._pump, args=way, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, from_client: bool, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                offset = len(self.seen[from_client])
                self.seen[from_client] += data
                sink.sendall(self._change(from_client, offset, data))
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Middle:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)
