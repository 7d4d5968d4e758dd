"""What it costs those who train when a rank joins, and when one leaves: ``bench/joining.py``.

A job of ``--np`` ranks trains a model with Adam (bench/joining_rank.py): ``--mb`` of weights and
optimizer state, computing that is slept, gradients that are exchanged and an update that is
computed. A discovery script alternately says that there is one place more, and that there is not;
so a process starts and joins, and leaves again by SIGTERM. Each change is one pause:

- pause: the step at whose commit the ranks change and the one after it, less two medians of all
  steps: of the rank for which it is longest. A rank is given the state within the first, or, with
  ``elastic.run(join="during_step")``, beside the computing of the second: both are measured;
- beside it: the longest other step of an old rank from the moment that the place is there, over the
  median. On a machine whose cores are all busy a process that imports PyTorch takes them;
- state: the bytes of weights and optimizer state over the time in which they are shared, where all
  wait for that.

``--hosts`` (needs root): each rank has a host of its own, a network namespace whose link carries
``--gbit`` in each direction.

Checksums of the weights, every tenth step and after each change, must be the same on all ranks,
else the run ends. ``--torchft PYTHON``: torchft's HTTP transport gives one process as many bytes of
another one, in whole and in chunks, with nothing else running; see bench/elastic.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import launcher_loss
import machine
import report
from report import Json, number, quantile, table

LIMIT_S = 120.0
SETTLED_STEPS = 8
DURING_STEP = "during_step"
JOINS = ("at_commit", DURING_STEP)
BYTES_PER_PARAMETER = 12  # a weight and Adam's two, of four bytes
RANK = str(machine.BENCH / "joining_rank.py")
TORCHFT = """
import sys, time
from datetime import timedelta
from multiprocessing import Process, Queue, set_start_method
import torch
from torchft.checkpointing import HTTPTransport

LIMIT, SIZE, CHUNKS = timedelta(seconds=120), int(sys.argv[1]), int(sys.argv[2])

def give(told, done):
    state = {f"{i}": torch.full((SIZE // 20,), float(i)) for i in range(20)}
    transport = HTTPTransport(LIMIT, CHUNKS)
    for step in range(1, 6):
        transport.send_checkpoint([1], step, state, LIMIT)
        told.put((step, transport.metadata()))
        done.get()
        transport.disallow_checkpoint()
    transport.shutdown(wait=False)

if __name__ == "__main__":
    set_start_method("spawn")
    told, done = Queue(), Queue()
    other = Process(target=give, args=(told, done), daemon=True)
    other.start()
    transport = HTTPTransport(LIMIT, CHUNKS)
    for _ in range(5):
        step, metadata = told.get()
        begin = time.monotonic()
        state = transport.recv_checkpoint(0, metadata, step, LIMIT)
        took = time.monotonic() - begin
        assert all(bool((state[f"{i}"] == i).all()) for i in range(20))
        print(SIZE * 4 / took / 1e9, flush=True)
        done.put(None)
    transport.shutdown(wait=False)
"""


class Step(NamedTuple):
    """A line of a rank's notes."""

    at_ns: int
    number: int
    size: int
    is_first: bool
    ms: float
    commit_ms: float
    share_ms: float
    checksum: int


class Notes:
    """What all ranks have noted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.by_process: dict[str, list[Step]] = {}

    def read(self) -> list[list[Step]]:
        """Read whole lines, by process; raises SystemExit where weights differ."""
        for path in self._folder.glob("*.notes"):
            text = path.read_text()
            lines = text[: text.rfind("\n") + 1].splitlines()
            self.by_process[path.stem] = [Step(*json.loads(line)) for line in lines]
        sums: dict[int, int] = {}
        for steps in self.by_process.values():
            for step in steps:
                if step.checksum and sums.setdefault(step.number, step.checksum) != step.checksum:
                    raise SystemExit(f"after step {step.number} weights differ between ranks")
        return [steps for steps in self.by_process.values() if steps]

    def until(self, size: int) -> None:
        """Wait until as many ranks as that have made some steps together."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            last = [steps[-SETTLED_STEPS:] for steps in self.read()]
            newest = max((steps[-1].number for steps in last), default=0)
            settled = [
                steps
                for steps in last
                if steps[-1].number >= newest - 1
                and len(steps) == SETTLED_STEPS
                and all(step.size == size for step in steps)
            ]
            if len(settled) == size:
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"no {size} ranks train together after {LIMIT_S:g} s")
            time.sleep(0.1)


class Place:
    """Where the ranks run: this host, or hosts of a bed."""

    def __init__(self, np: int, bed: Any) -> None:
        self._np, self._bed = np, bed

    def hosts(self, size: int) -> str:
        """Return what discovery says."""
        if self._bed is None:
            return f"localhost:{size}\n"
        return "".join(f"{name}:1\n" for name in self._bed.names[:size])

    def popen(self, *args: Any, **kwargs: Any) -> Any:
        """Start the launcher."""
        if self._bed is None:
            return subprocess.Popen(*args, **kwargs)
        return self._bed.popen(self._bed.names[0], *args, **kwargs)


def measured(options: argparse.Namespace, place: Place, folder: Path, join: str) -> Json:
    """Return figures of one job, with all its changes."""
    parameters = int(options.mb * 1e6 / BYTES_PER_PARAMETER)
    said, script = folder / "hosts", folder / "discover"
    say(said, place.hosts(options.np))
    script.write_text(f"#!/bin/sh\ncat {said}\n")
    script.chmod(0o700)
    more = options.np + 1
    command = [sys.executable, "-m", "kolovod", "run", "--min-np", str(options.np)]
    command += ["--max-np", str(more), "--host-discovery-script", str(script), "--"]
    command += [sys.executable, RANK, str(folder), str(parameters), str(options.compute_s), join]
    notes = Notes(folder)
    asked: list[tuple[int, int]] = []
    with (folder / "said").open("w") as output:
        job = place.popen(
            command,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
        )
    try:
        notes.until(options.np)
        for size in [more, options.np] * options.changes:
            asked.append((time.monotonic_ns(), size))
            say(said, place.hosts(size))
            notes.until(size)
        (folder / "stop").touch()
        code = job.wait(LIMIT_S)
    except BaseException:
        print((folder / "said").read_text()[-3000:], file=sys.stderr)
        raise
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(10)
    if code:
        raise SystemExit(f"the job has ended with {code}: {(folder / 'said').read_text()[-3000:]}")
    return judged(notes.read(), asked, options.np, parameters * BYTES_PER_PARAMETER)


def say(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, whole at every moment."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def judged(ranks: list[list[Step]], asked: list[tuple[int, int]], np: int, size: int) -> Json:
    """Return figures from the notes."""
    old = [steps for steps in ranks if steps[0].number == 1]
    usual = [step.ms for steps in old for step in steps[1:] if step.share_ms == 0]
    median_ms = quantile(usual, 0.5)
    found: Json = {"median_ms": median_ms, "join": [], "leave": [], "beside": [], "gb_per_s": []}
    ends = [*(at for at, _ in asked[1:]), 1 << 62]
    for (begin_ns, to), end_ns in zip(asked, ends, strict=True):
        pauses, beside, shared = [], [], []
        for steps in old:
            span = [s for s in steps if begin_ns <= s.at_ns < end_ns]
            at = next(place for place, step in enumerate(span) if step.size == to)
            change, after = span[at : at + 2]
            pauses.append(change.ms + after.ms - 2 * median_ms)
            beside += [
                s.ms for s in span if s not in (change, after) and s.at_ns < change.at_ns + 5e9
            ]
            shared.append(change.share_ms)
        found["join" if to > np else "leave"].append(max(pauses))
        if to > np:
            found["beside"].append(max(beside) / median_ms)
            found["gb_per_s"].append(size / max(shared) / 1e6)
    return found


def torchft(python: str, mb: float) -> Json:
    """Return the rate of torchft's transport in GB/s: in whole, and in chunks."""
    found: Json = {}
    for name, chunks in (("whole", 0), ("8 chunks", 8)):
        command = [python, "-c", TORCHFT, str(int(mb * 1e6 / 4)), str(chunks)]
        with machine_script(command) as run:
            found[name] = [float(line) for line in run.stdout.split()]
    return found


@contextlib.contextmanager
def machine_script(command: list[str]) -> Iterator[subprocess.CompletedProcess[str]]:
    """A script that starts processes of its own needs a file to be imported from."""
    with launcher_loss.folder() as folder:
        path = folder / "script.py"
        path.write_text(command[2])
        yield subprocess.run(
            [command[0], str(path), *command[3:]],
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
            cwd=folder,
        )


def page(result: Json, options: argparse.Namespace) -> str:
    """Return the result for people."""
    rows = []
    for name, found in result["places"].items():
        row = [name, number(found["median_ms"])]
        for key in ("join", "leave"):
            row += [f"{number(quantile(found[key], 0.5))} (longest {number(max(found[key]))})"]
        rate, longest = quantile(found["gb_per_s"], 0.5), max(found["beside"])
        is_beside = name.endswith(DURING_STEP)
        rows.append([*row, f"{longest:.2f}x", "beside a step" if is_beside else f"{rate:.3g}"])
    head = ["ranks", "step, ms", "pause when one joins, ms", "when one leaves, ms"]
    head += ["longest step beside it", "state, GB/s"]
    load = result["load"]
    text = (
        "# Ranks that join while others train\n\n"
        f"`{machine.command_line()}` on {report.machine_line(result['machine'])}, load "
        f"{load[0]:.1f} to {load[1]:.1f}; {options.mb:g} MB of weights and optimizer state, "
        f"{options.changes} ranks that join and leave again. Weights were compared on all ranks, "
        "every tenth step and after each change.\n\n"
        f"{table(head, rows)}"
    )
    if result["torchft"]:
        rates = ", ".join(
            f"{name} {number(quantile(values, 0.5))}" for name, values in result["torchft"].items()
        )
        text += f"\ntorchft's HTTP transport on this host, the same bytes, GB/s: {rates}.\n"
    return text


def main() -> None:
    """Measure, and write joining.json and .md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--mb", type=float, default=200.0)
    parser.add_argument("--compute-s", type=float, default=0.1)
    parser.add_argument("--changes", type=int, default=8)
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--gbit", type=float, default=2.0)
    parser.add_argument("--torchft", metavar="PYTHON", default="")
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args()
    load = [os.getloadavg()[0]]
    places: Json = {}
    for join in JOINS:
        with launcher_loss.folder() as folder:
            found = measured(options, Place(options.np, None), folder, join)
        places[f"{options.np} on one host, {join}"] = found
    for join in JOINS if options.hosts else ():
        from netbed import Bed

        names = [chr(ord("a") + index) for index in range(options.np + 1)]
        with launcher_loss.folder() as folder, Bed(names) as bed:
            for name in names:
                bed.limit(name, options.gbit * 1e9)
            found = measured(options, Place(options.np, bed), folder, join)
        places[f"{options.np} on {options.np} hosts, {options.gbit:g} Gbit/s, {join}"] = found
    result: Json = {"command": machine.command_line(), "places": places}
    result["machine"] = machine.facts()
    result["torchft"] = torchft(options.torchft, options.mb) if options.torchft else {}
    result["load"] = [*load, os.getloadavg()[0]]
    markdown = page(result, options)
    print(markdown)
    report.write("joining", result, markdown, options.output)


if __name__ == "__main__":
    main()
