"""The facts of this process: noted by the watchers, written to a file, and the end of the run."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from kolovod.checking.facts import Facts, File
from kolovod.checking.places import line_of_error, named_line
from kolovod.core.call_lines import is_of_script

__all__ = ["VARIABLE", "Opened", "Recorder", "the_recorder"]

VARIABLE = "KOLOVOD_CHECK"
"""Set for the ranks: how many steps they may take, how many batches an epoch may have (0: all that
it has), and the folder for the facts, with spaces between."""
Opened = list[tuple[str, bool, list[tuple[str, int]]]]
_NO_FILES = ("/dev/", "/proc/", "/sys/")
_NO_PARTS = (
    "__autograph_generated_file",
    "__pycache__",
    "/.cache/",
    "torchinductor",
    "/.nv/",
    "/.triton/",
    "/.config/",
)
_REST = 5  # times as long as saving has taken, until steps are saved again
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Recorder:
    """The recorder of a process that is watched."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        steps, batches, self._folder = environment[VARIABLE].split(" ", 2)
        self._most_steps = int(steps)
        self.most_batches = int(batches) or sys.maxsize
        """The batches after which an epoch ends."""
        rank = int(environment.get("KOLOVOD_RANK", "0"))
        self.facts = Facts(rank=rank, pid=os.getpid(), began=time.time())
        self.is_on = True
        """False in forked children, and after the end."""
        self.before_first_step: list[Callable[[], None]] = []
        self.at_end: list[Callable[[], None]] = []
        self._opened: Opened = []
        self._files_read = 0
        self._save_at = 0.0
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self.is_on = False

    def use_files(self, opened: Opened) -> None:
        """Note the files that have been opened by now, and will be later."""
        self._opened = opened

    def note_file(self, path: Any, line: str, *, appends: bool = False) -> None:
        """Note a file that the script writes. None is noted twice."""
        if not self.is_on or not isinstance(path, str | bytes | os.PathLike):
            return
        real = os.path.realpath(os.fsdecode(path))
        if real.startswith(_NO_FILES) or any(part in real for part in _NO_PARTS):
            return
        if real.endswith(".lock") or real.startswith(self._folder):
            return
        if os.path.isdir(real):  # in which a file without a name was made
            return
        for file in self.facts.files:
            if file.path == real:
                file.appends = file.appends and appends
                return
        self.facts.files.append(File(real, line, appends))

    def _read_files(self) -> None:
        opened = self._opened[self._files_read :]
        self._files_read += len(opened)
        for path, appends, stack in opened:
            if stack and stack[0][0].startswith(_OURS):
                continue
            own = next(((file, line) for file, line in stack if is_of_script(file)), None)
            self.note_file(path, named_line(*own) if own else "", appends=appends)

    def step_begins(self, line: str) -> None:
        """The script is about to change weights."""
        if not self.is_on:
            return
        self.facts.step_line = line
        if self.facts.steps == 0:
            for snapshot in self.before_first_step:
                snapshot()
            self.before_first_step.clear()
            self.save()

    def step_ends(self) -> None:
        """It has changed them. Ends the process if it has done so as often as it may."""
        if not self.is_on:
            return
        self.facts.steps += 1
        if self.facts.steps >= self._most_steps:
            self._leave()
        if time.monotonic() >= self._save_at:
            self.save()

    def save(self) -> None:
        """Save the facts, so that they are known however this process ends."""
        if self.is_on:
            began = time.monotonic()
            self._read_files()
            if not self.facts.steps:
                self.facts.framework = self.facts.framework or _front_end()
            self.facts.save(self._folder)
            now = time.monotonic()
            self._save_at = now + _REST * (now - began)

    def script_ends(self) -> None:
        """The interpreter is about to end."""
        if not self.is_on:
            return
        error = getattr(sys, "last_value", None)  # that nobody has caught
        self.facts.ended = "script" if error is None else "error"
        if error is not None:
            self._note_error(error)
        self._end()

    def _note_error(self, error: BaseException) -> None:
        kind = type(error)
        self.facts.error_kind = f"{kind.__module__}.{kind.__qualname__}"
        with contextlib.suppress(Exception):  # of its own __str__
            self.facts.error = str(error)[:2000]
        self.facts.error_line = line_of_error(error.__traceback__)
        rank = getattr(error, "rank", None)
        if kind.__module__ == "kolovod.errors" and isinstance(rank, int):
            self.facts.error_rank = rank

    def _end(self) -> None:
        for snapshot in self.at_end:
            with contextlib.suppress(Exception):  # of a model that an error has left half made
                snapshot()
        self._read_files()
        # What is gone was there for a while only, and nobody has taken it for the other rank's.
        self.facts.files = [file for file in self.facts.files if os.path.exists(file.path)]
        self.save()
        self.is_on = False

    def _leave(self) -> NoReturn:
        """End the process here: whatever the script would do now is not wanted, files above all.

        An exception would not do: the script may catch it, or write in a ``finally``.
        """
        self.facts.ended = "steps"
        lifecycle = sys.modules.get("kolovod.lifecycle")
        try:
            if lifecycle is not None:
                lifecycle.shutdown()
        finally:
            self._end()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def _front_end() -> str:
    """Return the framework whose front end of Kolovod is imported, the outermost one."""
    names = ("keras", "tensorflow", "jax", "torch")
    return next((name for name in names if f"kolovod.{name}" in sys.modules), "")


_recorder: Recorder | None = None


def the_recorder() -> Recorder:
    """Return the recorder of this process."""
    global _recorder
    if _recorder is None:
        _recorder = Recorder(os.environ)
    return _recorder
