"""All that one GPU can say of Kolovod, in ten minutes and without a network.

Where there is a network, build the wheel, with the Python that the machine with the GPU has (one of
3.12 serves all later versions); two minutes of one core:

    python3.12 -m venv build/w
    build/w/bin/pip install scikit-build-core nanobind cmake ninja
    build/w/bin/python -m pip wheel -q --no-deps --no-build-isolation -w .whl .

Bring the checkout with the folder .whl to the machine, whose Python has torch with CUDA, numpy and
cloudpickle (jax, too, for one part; pytest is not needed), and run there

    python3 scripts/gpu_check.py --commit COMMIT --out FOLDER

It installs the wheel into a folder of its own, and runs parts (gpu_parts.py), the most valuable
first. Each is a process with a time limit, after which all that it has started is ended; what hangs
or crashes is a row like all others. FOLDER gets gpu.jsonl, a row for each part as soon as it is
over, and gpu.log, what was printed. Exits with 1 if a part was not in order. A second call goes on
where the first one ended with --done FOLDER/gpu.jsonl. --device cpu rehearses what needs no GPU.
Back here,

    python scripts/gpu_check.py --page FOLDER/gpu.jsonl

puts the rows into bench/results/gpu.jsonl, and makes bench/results/gpu.md.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import environments
import gpu_rows
from environments import ROOT
from generated import bring_up_to_date
from gpu_parts import PARTS, SURROUNDINGS, Part, limit_s
from gpu_ranks import patience
from gpu_rows import REHEARSAL, BadRows, Row

BUDGET_S = 560.0
INSTALL_LIMIT_S = 60.0
WHEELS = ROOT / ".whl"
OUT = ROOT / "build" / "gpu"
PATHS = (ROOT / "scripts", ROOT / "bench")
KEPT_TEXT = 3000  # characters of what a part has printed, from its end
PRINTED_TEXT = 2500
PR_SET_CHILD_SUBREAPER = 36
BUDGET_HELP = f"seconds in all: no part begins whose limit does not fit ({BUDGET_S:g})"
DONE_HELP = "rows of earlier calls: parts that were in order are left out"
DEVICE_HELP = "cpu: rehearse what needs no GPU, with four times the limits and budget"
PAGE_HELP = "run nothing: put these rows into bench/results/gpu.jsonl, and make the page"
END_LIMIT_S = 10.0


class Failed(RuntimeError):
    """The check cannot begin; the text says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's text."""
    options = parsed(arguments)
    try:
        return make_page(options.page) if options.page is not None else check(options)
    except (Failed, BadRows) as error:
        print(f"gpu_check.py: {error}", file=sys.stderr)
        return 2


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. SystemExit for what is not one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--budget", type=float, metavar="S", help=BUDGET_HELP)
    add("--only", type=names, metavar="A,B", help=f"some of {','.join(PARTS)}")
    add("--done", type=Path, action="append", default=[], metavar="FILE", help=DONE_HELP)
    add("--device", choices=("cuda", "cpu"), default="cuda", help=DEVICE_HELP)
    out = Path(os.environ.get("OUT") or OUT)
    add("--out", type=Path, default=out, metavar="DIR", help="for gpu.jsonl, gpu.log (%(default)s)")
    add("--wheel", type=Path, metavar="DIR", help="where the wheel is (.whl, if that is there)")
    add("--no-wheel", action="store_true", help="use the package that is installed")
    add("--commit", help="for the rows (git's, where this is a checkout)")
    add("--page", type=Path, nargs="*", metavar="FILE", help=PAGE_HELP)
    add("--check", action="store_true", help="with --page: is it up to date?")
    options = parser.parse_args(arguments)
    wanted = options.only or list(PARTS)
    if options.device == "cpu":
        if options.only and (vain := [name for name in wanted if PARTS[name].needs_gpu]):
            parser.error(f"--only {','.join(vain)}: needs a GPU, which '--device cpu' does not use")
        wanted = [name for name in wanted if not PARTS[name].needs_gpu]
    options.parts = wanted
    if options.budget is None:
        options.budget = BUDGET_S * patience(options.device)
    return options


def names(text: str) -> list[str]:
    """Return the names of parts, separated by commas in ``text``."""
    found = text.split(",")
    if unknown := [name for name in found if name not in PARTS]:
        raise argparse.ArgumentTypeError(
            f"there is no part {', '.join(map(repr, unknown))}; there are {', '.join(PARTS)}"
        )
    return found


def make_page(files: Sequence[Path]) -> int:
    """Merge the rows of ``files``, and make the page. Raises BadRows; nothing is written then."""
    rows = gpu_rows.read(gpu_rows.ROWS) if gpu_rows.ROWS.exists() else []
    for path in files:
        rows += gpu_rows.results(gpu_rows.read(path), path)
    rows = gpu_rows.merged(rows)
    if files:
        gpu_rows.ROWS.write_text("".join(f"{row.line()}\n" for row in rows))
    return bring_up_to_date(gpu_rows.PAGE, gpu_rows.page(rows), "gpu_check.py --page")


# Running parts ------------------------------------------------------------------------------------


def check(options: argparse.Namespace) -> int:
    """Run parts until all are over or the budget is. Raises Failed."""
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    known = in_order(options.done, options.device)
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="kolovod-gpu-") as temporary, reaping() as others:
        runner = Runner(Path(temporary), options, others)
        for name in options.parts:
            left_s = options.budget - (time.monotonic() - began)
            if name in known:
                outcomes[name] = "was in order before"
            elif left_s < limit_s(PARTS[name], options.device):
                outcomes[name] = f"no time: {left_s:.0f} s were left"
            else:
                row = runner.row(name, PARTS[name])
                outcomes[name] = "in order" if row.ok else "NOT IN ORDER"
                outcomes[name] += f", {row.seconds:.1f} s"
    print("\n".join(f"{name:15} {outcome}" for name, outcome in outcomes.items()))
    print(f"{time.monotonic() - began:.0f} s in all; rows: {options.out / 'gpu.jsonl'}")
    return int(any("NOT" in outcome for outcome in outcomes.values()))


def in_order(files: Iterable[Path], device: str) -> set[str]:
    """Return the parts that came out well in earlier calls, on a GPU or in a rehearsal as now."""
    found = set()
    for path in files:
        if not path.exists():
            raise Failed(f"--done {path}: there is no such file")
        for row in gpu_rows.read(path):
            if row.ok and (row.device == REHEARSAL) == (device == "cpu"):
                found.add(row.part)
    return found


class Runner:
    """Runs parts with one package on one device, and writes their rows."""

    def __init__(self, folder: Path, options: argparse.Namespace, others: frozenset[int]) -> None:
        """Install the wheel into ``folder``, and look where this is. Raises Failed.

        ``others``: processes below this one that are not to be ended.
        """
        self._others = others
        self._folder, self._out, self._device = folder, options.out, options.device
        site = folder / "site"
        self._wheel = "none" if options.no_wheel else installed(options.wheel, site)
        paths = [site, *PATHS, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self._variables = {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONUNBUFFERED": "1",
        }
        self._commit = options.commit or environments.commit_and_date()["commit"] or "unknown"
        found, error, _ = self._run("surroundings", SURROUNDINGS)
        if found is None or error:
            raise Failed(f"no part was run: {error}")
        self._surroundings = found
        print(f"{found['device']}: {found['versions']}, wheel {self._wheel}", flush=True)

    def row(self, name: str, part: Part) -> Row:
        """Run a part, and write its row."""
        when = environments.commit_and_date()["date"]
        figures, error, seconds = self._run(name, part)
        row = Row(
            part=name,
            when=when,
            commit=self._commit,
            wheel=self._wheel,
            **self._surroundings,
            ok=figures is not None and not error,
            seconds=round(seconds, 1),
            figures=figures or {},
            error=error,
        )
        with (self._out / "gpu.jsonl").open("a") as file:
            file.write(f"{row.line()}\n")
        told = json.dumps(dataclasses.asdict(row)["figures"], indent=1)[:PRINTED_TEXT]
        print(f"----- {name}: {row.seconds} s\n{told}\n{error[-PRINTED_TEXT:]}", flush=True)
        return row

    def _run(self, name: str, part: Part) -> tuple[dict[str, Any] | None, str, float]:
        """Return the figures, None if it had no end; its problems; the time it took."""
        result, log = self._folder / f"{name}.json", self._folder / f"{name}.txt"
        command = [sys.executable, str(ROOT / "scripts" / "gpu_parts.py"), part.work]
        start, limit = time.monotonic(), limit_s(part, self._device)
        code = environments.logged(
            [*command, self._device, str(result)],
            log,
            timeout_s=limit,
            variables=self._variables,
        )
        end_descendants(self._others)
        seconds = time.monotonic() - start
        text = log.read_text(errors="replace")
        with (self._out / "gpu.log").open("a") as file:
            file.write(f"===== {name}: {seconds:.1f} s, exit code {code}\n{text}\n")
        found = json.loads(result.read_text()) if result.exists() else None
        problems = found["problems"] if found else []
        if code == environments.TIMED_OUT:
            problems.append(f"no end after {limit:g} s: {text[-KEPT_TEXT:]}")
        elif code != 0:
            problems.append(f"ended with exit code {code}: {text[-KEPT_TEXT:]}")
        return found and found["figures"], "\n".join(problems), seconds


def installed(folder: Path | None, site: Path) -> str:
    """Install the wheels of ``folder`` into ``site``; return Kolovod's name, and its digest.

    "none" where no folder was given and there is no .whl. Raises Failed.
    """
    if folder is None and not WHEELS.exists():
        return "none"
    folder = folder or WHEELS
    ours = sorted(folder.glob("kolovod-*.whl"))
    if len(ours) != 1:
        raise Failed(
            f"{folder} has {len(ours)} wheels of Kolovod, and needs one; --help says how it is "
            "built, and --no-wheel uses the package that is installed"
        )
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
               "--no-index", "--no-deps", "--no-compile", "--no-cache-dir",
               "--target", str(site), *map(str, sorted(folder.glob("*.whl")))]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"pip did not install {ours[0].name} in {INSTALL_LIMIT_S:g} s") from None
    if done.returncode != 0:
        raise Failed(f"pip cannot install {ours[0].name}: {done.stderr.strip()[-KEPT_TEXT:]}")
    return f"{ours[0].name} {hashlib.sha256(ours[0].read_bytes()).hexdigest()[:12]}"


# Ending what a part has started -------------------------------------------------------------------


@contextlib.contextmanager
def reaping() -> Iterator[frozenset[int]]:
    """Have every process below this one, whose parent ends, become a child of this one.

    Yields those that were there before, which are not this check's to end.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = frozenset(descendants())
    try:
        yield before
    finally:
        end_descendants(before)
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def end_descendants(others: frozenset[int]) -> None:
    """Kill all processes below this one but ``others``, also those with a session of their own."""
    deadline = time.monotonic() + END_LIMIT_S
    while (left := set(descendants()) - others) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # its own parent has to hear of it
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def descendants() -> list[int]:
    """Return the processes below this one."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            after_name = path.read_text(errors="replace").rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(after_name[1])
    found = [os.getpid()]
    for parent in found:
        found += [pid for pid, above in parents.items() if above == parent]
    return found[1:]


if __name__ == "__main__":
    sys.exit(main())
