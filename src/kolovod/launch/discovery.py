"""The hosts that a job may use, asked for again and again: a script of the user's prints them.

It prints lines HOST or HOST:SLOTS on its standard output, as a host file has them; an exit code
other than 0 means that it does not know, and that its last answer holds.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Mapping

from kolovod.errors import BootstrapError, HostError, InvalidArgumentError
from kolovod.launch.hosts import parse_host_file

__all__ = ["PERIOD_S", "Discovery", "ask_script", "places_in", "said_by"]

PERIOD_S = 1.0
_SCRIPT_LIMIT_S = 60.0
_AGAIN_S = 10.0
_MAX_OUTPUT = 1 << 20
_MAX_ERRORS = 1 << 16
_READ_BYTES = 1 << 16


def ask_script(command: str, slots: int = 1) -> dict[str, int]:
    """Return the hosts that ``command``, for a shell, names, with their places.

    ``slots``: those of a host whose line says no number.
    Raises BootstrapError if it fails or takes a minute, InvalidArgumentError for what is no host.
    """
    return places_in(said_by(command), f"the output of {command!r}", slots)


def said_by(command: str) -> str:
    """Return what ``command``, for a shell, prints.

    Raises BootstrapError if it fails, takes a minute, or prints more than a MiB, which no list of
    hosts has: where it was cut a name would be another one.
    """
    script = f"the host discovery script {command!r}"
    with subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            printed, errors = _read_both(process, time.monotonic() + _SCRIPT_LIMIT_S)
        except TimeoutError:
            raise HostError(f"{script} has not ended in {_SCRIPT_LIMIT_S:g} s") from None
        except OverflowError:
            raise HostError(
                f"{script} prints more than {_MAX_OUTPUT} bytes: have it print lines HOST:SLOTS"
            ) from None
        finally:
            if process.poll() is None:
                process.kill()
    if process.returncode != 0:
        said = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise HostError(f"{script} ended with {process.returncode}{': ' + said[0] if said else ''}")
    return printed.decode(errors="replace")


def _read_both(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes]:
    """Wait for a process; return what it has printed, and the end of its errors.

    Raises OverflowError as soon as it has printed too much, TimeoutError at the ``deadline``.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            for key, _ in selector.select(left_s):
                data = os.read(key.fd, _READ_BYTES)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stdout:
                    output += data
                    if len(output) > _MAX_OUTPUT:
                        raise OverflowError
                else:
                    errors += data
                    del errors[:-_MAX_ERRORS]
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    return bytes(output), bytes(errors)


def places_in(text: str, source: str, slots: int) -> dict[str, int]:
    """Return the hosts that the lines of ``text`` name, with their places; see ``ask_script``."""
    if not any(line.split("#")[0].strip() for line in text.splitlines()):
        return {}
    found = parse_host_file(text, source, slots)
    return {host.name: host.slots for host in found}


class Discovery:
    """A thread of its own that asks once a second."""

    def __init__(
        self,
        ask: Callable[[], Mapping[str, int]],
        changed: Callable[[Mapping[str, int]], bool],
        report: Callable[[str], None],
    ) -> None:
        """``changed(places)`` is called with a new answer, ``report(text)`` when asking fails.

        Where ``changed`` returns False it is called again a little later.
        """
        self._ask, self._changed, self._report = ask, changed, report
        self._stopping = threading.Event()
        self._failure = ""
        self._thread = threading.Thread(target=self._serve, name="kolovod discovery", daemon=True)

    def start(self, known: Mapping[str, int]) -> None:
        """Begin; ``known`` is the answer so far."""
        self._known: dict[str, int] | None = dict(known)
        self._thread.start()

    def close(self) -> None:
        """Ask no more. Idempotent."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)

    def _serve(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                found = dict(self._ask())
                self._failure = ""
            except Exception as error:  # a user's own object may raise anything
                is_ours = isinstance(error, BootstrapError | InvalidArgumentError | OSError)
                said = str(error) if is_ours else f"host discovery has failed: {error!r}"
                if said != self._failure:  # else it was said already
                    self._failure = said
                    self._report(f"{said}; the hosts stay as they were")
                continue
            if found != self._known:
                self._known = found
                if not self._changed(found):
                    self._known = None  # which no answer is: an empty one is told again, too
                    self._stopping.wait(_AGAIN_S)
