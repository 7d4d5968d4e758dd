"""``kolovod top``: a running job, live."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any

from kolovod.core.stacks import StacksUnavailableError, of_process
from kolovod.errors import CommandArgumentError
from kolovod.launch.job_watch import JobWatch
from kolovod.launch.running_jobs import RunningJob, running_jobs
from kolovod.launch.stacks_command import add_job, chosen
from kolovod.launch.stacks_text import line_of, main_first
from kolovod.observe.live.picture import Picture

__all__ = ["add"]

_FIRST_LOOKS_S = 2.0  # until there is something to show
_LEAST_S, _MOST_S = 0.5, 3.0
_NICE = 19
_STACK_AFTER_S = 1.0  # of being late
_KEY = re.compile(r"\x1b[\[O][A-D]|.", re.DOTALL)
_NAMES = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "k": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "j": "down",
}


def add(parser: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    parser.description = (
        "A live view of a running job's ranks on this host; the job is not changed, "
        "and not started anew for it. Shares are of the last five seconds. Keys: q ends it, up and "
        "down choose a rank, s shows where that rank is in Python. Without a terminal it prints "
        "one picture."
    )
    parser.set_defaults(act=_watch)
    add_job(parser)
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between pictures [2]"
    )
    parser.add_argument("--once", action="store_true", help="one picture, after two seconds")
    parser.add_argument(
        "--json", action="store_true", help="for programs: a line of JSON for each picture"
    )


def _watch(options: argparse.Namespace) -> int:
    if not _LEAST_S <= options.interval <= _MOST_S:
        raise CommandArgumentError(
            f"--interval {options.interval:g}: expected {_LEAST_S:g} to {_MOST_S:g} seconds, since "
            "ranks show news that often, and keep it so long"
        )
    job = chosen(running_jobs(), options.job)
    os.nice(_NICE)  # the job comes first
    watch = JobWatch(lambda: _find(job))
    try:
        if options.json:
            return _print_json(watch, options)
        if options.once or not sys.stdout.isatty() or not sys.stdin.isatty():
            return _print_one(watch)
        return _show(watch, options.interval)
    except KeyboardInterrupt:
        return 0
    finally:
        watch.close()


def _find(chosen_job: RunningJob) -> RunningJob | None:
    jobs = running_jobs(uid=chosen_job.uid)
    return next((job for job in jobs if job.name == chosen_job.name), None)


def _settled(watch: JobWatch) -> tuple[RunningJob, Picture] | None:
    """Return a picture with two seconds in it; None: the job has ended."""
    until_s = time.monotonic() + _FIRST_LOOKS_S
    found = watch.look()
    while found is not None and time.monotonic() < until_s:
        time.sleep(_LEAST_S)
        found = watch.look()
    return found


def _print_json(watch: JobWatch, options: argparse.Namespace) -> int:
    found = _settled(watch)
    while found is not None:
        job, picture = found
        line = {"job": job.name, "at_s": time.time(), **picture.as_json()}
        print(json.dumps({**line, "late_at": late_at(picture)}), flush=True)
        if options.once:
            break
        time.sleep(options.interval)
        found = watch.look()
    return 0


def _print_one(watch: JobWatch) -> int:
    from rich.console import Console

    from kolovod.launch.top_screen import screen

    found = _settled(watch)
    if found is None:
        print("the job has ended")
        return 0
    # Piped, there is no width: lines are as long as they have to be.
    width = None if sys.stdout.isatty() else 200
    console = Console(width=width, highlight=False)
    with console.capture() as captured:  # it has an exit code of its own for a reader that is gone
        console.print(screen(*found, late_at(found[1])))
    print(captured.get(), end="")
    return 0


def late_at(picture: Picture) -> dict[int, str]:
    """Return, by pid of a rank that others wait for, the line of Python that it is at."""
    lines = {}
    for each in picture.ranks:
        if each.late_s >= _STACK_AFTER_S:
            with contextlib.suppress(StacksUnavailableError):
                lines[each.pid] = line_of(of_process(each.pid))
    return lines


def _show(watch: JobWatch, interval_s: float) -> int:
    """Show it until a key ends it, or the job ends."""
    from rich.console import Console
    from rich.live import Live

    from kolovod.launch.top_screen import screen

    selected, shows_stack = 0, False
    console = Console(highlight=False)
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while (found := watch.look()) is not None:
            job, picture = found
            late = late_at(picture)
            due_s = time.monotonic() + interval_s
            while True:
                count = max(1, len(picture.ranks))
                selected = min(selected, count - 1)
                stack = _stack(picture, selected) if shows_stack else ""
                live.update(screen(job, picture, late, selected, stack), refresh=True)
                key = pressed(max(0.0, due_s - time.monotonic()))
                if key in ("q", "\x1b"):
                    return 0
                if key == "up":
                    selected = max(0, selected - 1)
                elif key == "down":
                    selected = min(count - 1, selected + 1)
                elif key in ("s", "\n"):
                    shows_stack = not shows_stack
                elif not key:
                    break
    print("the job has ended")
    return 0


def _stack(picture: Picture, selected: int) -> str:
    if not picture.ranks:
        return ""
    try:
        return main_first(of_process(picture.ranks[selected].pid))
    except StacksUnavailableError as error:
        return f"no stacks: {error}"


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Yield a function that waits so many seconds for a key, and returns "" if none is pressed."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    waiting: list[str] = []  # several may come at a time

    def pressed(timeout_s: float) -> str:
        if not waiting and select.select([fd], [], [], timeout_s)[0]:
            text = os.read(fd, 64).decode(errors="replace")
            waiting.extend(_KEY.findall(text) or ["q"])  # nothing: the terminal is gone
        key = waiting.pop(0) if waiting else ""
        return _NAMES.get(key, key)

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
