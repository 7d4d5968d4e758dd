"""The end of authenticated connections that accepts them (channel.py has the handshake)."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from kolovod.errors import AuthenticationError, BootstrapError
from kolovod.net.channel import HANDSHAKE_TIMEOUT_S, Channel, accept
from kolovod.net.sockets import hang_up, shut
from kolovod.net.unix_sockets import same_user

__all__ = ["Server"]


class Server:
    """Accepts connections on ``listener``; calls ``handler(channel)`` for the authenticated ones.

    Each connection has its own short-lived thread, so that one which says nothing holds up nobody.
    The handler's channel is closed after it returns. At most ``max_strangers`` connections may be
    on their way to a proof: one more, and the oldest is closed. Takes over the listening socket.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: str,
        label: str,
        handler: Callable[[Channel], None],
        max_strangers: int = 64,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._label = label
        self._handler = handler
        self._max_strangers = max_strangers
        self._handshake_timeout_s = handshake_timeout_s
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, None] = {}  # of the open ones, oldest first
        self._closed = False
        self.refused = 0  # connections that did not prove the secret
        self._thread = threading.Thread(target=self._accept, name=f"kolovod {label}", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, close every connection and wait for the threads. Idempotent."""
        with self._lock:
            self._closed = True
            open_now = dict(self._open)
        hang_up(self._listener)
        for sock, thread in open_now.items():
            hang_up(sock)
            thread.join(timeout=5)
        if self._thread.ident is not None:
            self._thread.join(timeout=5)

    def forget(self) -> None:
        """Stop listening in a forked child; the parent listens on."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # out of descriptors: some connection will end
                continue
            with self._lock:
                if self._closed or not same_user(sock):
                    hang_up(sock)
                    continue
                if len(self._strangers) >= self._max_strangers:
                    shut(next(iter(self._strangers)))  # its thread wakes, and closes it
                    self._strangers.pop(next(iter(self._strangers)))
                thread = threading.Thread(
                    target=self._serve, args=(sock,), name=f"{self._thread.name} peer", daemon=True
                )
                self._open[sock] = thread
                self._strangers[sock] = None
                try:
                    thread.start()
                except RuntimeError:  # the system gives no more threads: the client tries again
                    del self._open[sock], self._strangers[sock]
                    hang_up(sock)

    def _serve(self, sock: socket.socket) -> None:
        try:
            deadline = time.monotonic() + self._handshake_timeout_s
            try:
                admit = partial(self._admit, sock)
                channel = accept(sock, self._secret, self._label, deadline, admit)
            except (AuthenticationError, EOFError, OSError):
                with self._lock:
                    self.refused += 1
                return
            self._handler(channel)
        except (AuthenticationError, EOFError, OSError):
            return  # the peer went away, and whoever waits for it will notice by other means
        except BootstrapError as error:  # what it sends makes no sense
            print(f"kolovod: {self._label.split(' ', 1)[0]}: {error}\n", end="", file=sys.stderr)
        except ValueError:
            if not self._closed:  # else the handler met the socket that close() has closed
                raise
        finally:
            hang_up(sock)
            with self._lock:
                self._open.pop(sock, None)
                self._strangers.pop(sock, None)

    def _admit(self, sock: socket.socket) -> None:
        """Make it no stranger any more: nobody drives out a client that knows it has got in.

        Raises EOFError where that has happened already; then the client comes again.
        """
        with self._lock:
            if sock not in self._strangers:
                raise EOFError("driven out by other connections")
            del self._strangers[sock]
