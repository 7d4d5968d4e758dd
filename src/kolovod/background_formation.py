"""A world that has been formed and is not entered yet; in elastic jobs beside the present one.

An engine shares nothing with another one of the same process, so the next world's can form in a
thread while the script's operations go on in the present one. Nobody decides anything by it: which
world follows is agreed upon as ever, and what does not follow is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kolovod.core.world import World
from kolovod.errors import KolovodError
from kolovod.observe.timeline import Opening

__all__ = ["BackgroundFormation", "Formation", "BackgroundFormations"]

Key = tuple[Any, ...]
"""The key of a world. Worlds that follow each other are in the order of its beginning."""
_ORDER = slice(2)


@dataclass(frozen=True)
class Formation:
    """The world without its backend, which starts when it is entered."""

    world: World
    notes: Mapping[str, str]
    """The notes that rank 0 has told as they met."""
    opening: Opening

    def close(self) -> None:
        """Shut down its engine: it is not needed."""
        self.world.engine.shutdown()
        self.opening.close()


class BackgroundFormation:
    """A world that forms in a thread of its own."""

    def __init__(
        self, key: Key, form: Callable[[], Formation], done: Callable[[bool], None]
    ) -> None:
        """``key``: what it is asked for by. ``done(works)`` is called on that thread."""
        self.key = key
        self._form, self._done = form, done
        self._formation: Formation | None = None
        self._is_formed = threading.Event()
        self._is_decided = threading.Event()
        self._is_wanted = False
        self._thread = threading.Thread(target=self._run, name="kolovod forming", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._formation = self._form()
        except (KolovodError, OSError):  # whoever enters that world says why, if it fails there
            pass
        finally:
            self._is_formed.set()
        self._done(self._formation is not None)
        self._is_decided.wait()
        if self._formation is not None and not self._is_wanted:
            self._formation.close()

    def tell_again(self, done: Callable[[bool], None]) -> None:
        """Call ``done`` once more, for who has not heard of it."""
        if self._is_formed.is_set():  # else it is told when it is
            done(self._formation is not None)

    def take(self) -> Formation | None:
        """Return it when it is there, to be entered or closed; None: it could not be formed."""
        self._is_formed.wait()
        self._is_wanted = True
        self._is_decided.set()
        return self._formation

    def drop(self, wait_s: float = 0.0) -> None:
        """Give it up; return when it is gone, or after ``wait_s``. Idempotent."""
        self._is_decided.set()
        self._thread.join(wait_s)

    def forget(self) -> None:
        """Leave the engine in a forked child: it is the parent's."""
        if self._formation is not None:
            self._formation.world.engine.forget()


class BackgroundFormations:
    """The worlds that form ahead: the one that was asked for last, and the one before.

    Two, because ranks may agree to a world and be asked to form the one after it before the
    script of this process, which is late, has entered the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead: list[BackgroundFormation] = []

    def begin(self, key: Key, form: Callable[[], Formation], done: Callable[[bool], None]) -> None:
        """Begin to form a world, see ``BackgroundFormation``.

        A process that asks for the same world again is told once more; the world forms once.
        """
        dropped: list[BackgroundFormation] = []
        with self._lock:
            known = next((ahead for ahead in self._ahead if ahead.key == key), None)
            if known is None:
                self._ahead.append(BackgroundFormation(key, form, done))
                dropped, self._ahead = self._ahead[:-2], self._ahead[-2:]
        if known is not None:
            known.tell_again(done)
        for ahead in dropped:
            ahead.drop()

    def take(self, key: Key) -> Formation | None:
        """The world of ``key``, if it was formed; those that it follows are dropped."""
        found: BackgroundFormation | None = None
        dropped: list[BackgroundFormation] = []
        with self._lock:
            for ahead in self._ahead:
                if ahead.key == key:
                    found = ahead
                elif ahead.key[_ORDER] <= key[_ORDER]:
                    dropped.append(ahead)
            self._ahead = [a for a in self._ahead if a is not found and a not in dropped]
        for ahead in dropped:
            ahead.drop()
        return None if found is None else found.take()

    def drop(self, wait_s: float) -> None:
        """Give all of them up; wait so long for each."""
        with self._lock:
            dropped, self._ahead = self._ahead, []
        for ahead in dropped:
            ahead.drop(wait_s)

    def forget(self) -> None:
        """Leave the engines in a forked child: they are the parent's."""
        for ahead in self._ahead:
            ahead.forget()
