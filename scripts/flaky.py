"""Runs the tests many times on a busy machine, and lists what failed in any run: `make flaky`.

usage: python scripts/flaky.py [--runs N] [--busy N] [--only SET ...] [--tests ARGUMENTS]

The sets: "quick", the tests of `make test`; "native", the C++ tests that it is quick to run;
"address" and "thread", the same under the sanitizers. Beside them as many processes as ``--busy``
says compute all the time, so that threads and processes meet in orders that a quiet machine does
not show. A test that fails in one run and passes in others has found a race; what it printed is in
build/flaky. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "build" / "flaky"
SET_LIMIT_S = 4 * 3600.0
LINES_SHOWN = 30  # of what a failed test has printed
LONGEST = "^engine_(names_test|(names|hosts)_test_shuffled_.*)$"  # as the Makefile's SANITIZED


class Set(NamedTuple):
    """Tests that one command runs."""

    name: str
    command: tuple[str, ...]
    """It writes the results in JUnit's format into the file that is given as ``{results}``."""
    environment: Mapping[str, str] = {}


class Failure(NamedTuple):
    """A test that failed in one run."""

    set_name: str
    test: str
    run: int
    text: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20, help="of each set [20]")
    parser.add_argument("--busy", type=int, default=4, help="processes that compute beside [4]")
    parser.add_argument("--only", nargs="*", default=[], metavar="SET", help="of these sets")
    parser.add_argument(
        "--tests", type=shlex.split, default=[], metavar="ARGUMENTS", help="of pytest, as one text"
    )
    options = parser.parse_args()
    known = sets(options.tests)
    names = [each.name for each in known]
    if unknown := set(options.only) - set(names):
        parser.error(f"--only {' '.join(sorted(unknown))}: the sets are {', '.join(names)}")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    failures: list[Failure] = []
    with busy(options.busy):
        for run in range(1, options.runs + 1):
            for each in known:
                if not options.only or each.name in options.only:
                    failures += run_once(each, run)
    print(report(failures, options.runs))
    return bool(failures)


def sets(arguments: Sequence[str]) -> list[Set]:
    """Return all sets; pytest gets ``arguments`` besides."""
    quick = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile"]
    quick += ["-m", "not slow and not frameworks", "--junit-xml", "{results}", *arguments]

    def native(folder: str, *chosen: str) -> tuple[str, ...]:
        command = ["ctest", "--test-dir", str(ROOT / "build" / folder), "-j", "3", "--timeout"]
        return (*command, "900", "--output-junit", "{results}", "--no-tests=error", *chosen)

    return [
        Set("quick", tuple(quick)),
        Set("native", native("native-tests", "-LE", "slow")),
        Set("address", native("asan", "-E", LONGEST), {"ASAN_OPTIONS": "detect_leaks=1"}),
        Set("thread", native("tsan", "-E", LONGEST), {"TSAN_OPTIONS": "halt_on_error=1"}),
    ]


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Keep so many processes computing, until the end."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def run_once(tests: Set, run: int) -> list[Failure]:
    """Run a set once; return its failures. Its output is in build/flaky."""
    stem = OUTPUT / f"{tests.name}-{run}"
    results = stem.with_suffix(".xml")
    results.unlink(missing_ok=True)
    command = [part.replace("{results}", str(results)) for part in tests.command]
    began_s = time.monotonic()
    why = ""
    with open(stem.with_suffix(".log"), "w") as log:
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **tests.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=SET_LIMIT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code, why = 1, f"it was killed, since it took more than {SET_LIMIT_S:g} s\n"
    failed = []
    if results.exists():
        try:
            failed = list(failures_of(results))
        except ElementTree.ParseError as error:  # it was killed while it wrote
            code, why = 1, f"{why}its results cannot be read: {error}\n"
    if why or (code != 0 and not failed):  # it crashed, could not begin, or did not end
        log_text = stem.with_suffix(".log").read_text(errors="replace")
        failed.append(("(the whole run)", f"{log_text[-4000:]}\n{why}"))
    found = [Failure(tests.name, test, run, text) for test, text in failed]
    seconds = time.monotonic() - began_s
    print(f"run {run} of {tests.name}: {len(found)} failed, {seconds:.0f} s", flush=True)
    for failure in found:
        print(f"  {failure.test}", flush=True)
    return found


def failures_of(results: Path) -> Iterator[tuple[str, str]]:
    """Return the names of tests that failed, and what they printed."""
    for case in ElementTree.parse(results).iter("testcase"):
        said = [each for kind in ("failure", "error") for each in case.iter(kind)]
        if not said:
            continue
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        parts = [part for each in said for part in (each.get("message"), each.text)]
        parts += [each.text for kind in ("system-out", "system-err") for each in case.iter(kind)]
        yield name, "\n".join(filter(None, parts))


def report(failures: Sequence[Failure], runs: int) -> str:
    """Return what failed in any run: how often, and what it printed the first time."""
    if not failures:
        return f"nothing failed in {runs} runs"
    by_test: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        by_test.setdefault((failure.set_name, failure.test), []).append(failure)
    lines = [f"{len(by_test)} tests failed in at least one of {runs} runs:"]
    for (set_name, test), each in sorted(by_test.items(), key=lambda item: -len(item[1])):
        which = ", ".join(str(failure.run) for failure in each)
        lines += ["", f"{test} ({set_name}): {len(each)} of {runs}, in run {which}"]
        lines += [f"    {line}" for line in each[0].text.splitlines()[-LINES_SHOWN:]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
