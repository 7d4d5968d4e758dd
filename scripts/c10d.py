"""Runs PyTorch's own tests of torch.distributed over gloo and over Kolovod: `make c10d`.

    python scripts/c10d.py                                  all, into bench/results/c10d.md
    python scripts/c10d.py --only 'send|recv' --sizes 2     some: printed, the page stays

The tests are those of the PyTorch that this Python has (torch.testing._internal); c10d_batch.py
says how they come to run over a backend that they do not know. The page has a section for each
version of PyTorch, of which this replaces its own. Exits with 1 if a test that passes over
gloo does not over Kolovod, or, with --backends kolovod, if one fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import environments
from environments import ROOT

FOLDER = ROOT / "build" / "c10d"
PAGE = ROOT / "bench" / "results" / "c10d.md"
BATCH = ROOT / "scripts" / "c10d_batch.py"
BACKENDS = ("gloo", "kolovod")
SIZES = (2, 3, 4, 8)  # PyTorch runs some with 8 or more only
LIMIT_S = 120  # the slowest test takes 15 s of two cores
START_S = 120
TEXT = 160  # characters of an error, in a table
TRIES = {"gloo": 2}
"""The reference may try again, lest a chance failure of its own hides one of ours."""

Run = tuple[str, int]
"""The backend and the number of ranks."""


@dataclass(frozen=True)
class Outcome:
    """What has become of a test."""

    verdict: str
    """passed, skipped or failed."""
    text: str = ""
    """Why it was skipped, or what failed."""

    def cell(self) -> str:
        """Return it for a table."""
        if self.verdict == "failed":
            return f"**failed**: {last_line(self.text)}"
        return f"skipped: {self.text}" if self.verdict == "skipped" else self.verdict


Outcomes = dict[str, Outcome]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", metavar="PATTERN", help="tests in whose name this is found")
    parser.add_argument("--sizes", type=_sizes, default=SIZES, help="numbers of ranks: 2,3,4,8")
    parser.add_argument("--backends", type=_backends, default=BACKENDS, help="gloo,kolovod")
    parser.add_argument("--limit-s", type=int, default=LIMIT_S, help="for each test")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    found: dict[Run, Outcomes] = {}
    facts: dict[str, dict[str, object]] = {}
    for size in options.sizes:
        names = chosen(options.only, size, options.limit_s)
        for backend in options.backends:
            of_now = environments.commit_and_date()
            started = time.monotonic()
            outcomes = found[backend, size] = ran(backend, size, names, options.limit_s)
            facts[title((backend, size))] = {
                **counts(outcomes),
                "versions": environments.versions(sys.executable, ("torch",)),
                "seconds": round(time.monotonic() - started),
                **of_now,
            }
            print(environments.line(title((backend, size)), facts[title((backend, size))], COLUMNS))
            sys.stdout.flush()
    if options.only is None and list(found) == [
        (each, size) for size in SIZES for each in BACKENDS
    ]:
        before = PAGE.read_text() if PAGE.exists() else ""
        PAGE.write_text(page(before, importlib.metadata.version("torch"), section(found, facts)))
    else:
        print("\n".join(tests_table(found, without=["skipped"])))
    return int(bool(behind(found)))


def chosen(pattern: str | None, size: int, limit_s: int) -> list[str]:
    """Return the names of the tests in which ``pattern`` is found; SystemExit if there are none."""
    command = [sys.executable, str(BATCH), BACKENDS[0], str(size), str(limit_s), ""]
    listed = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=START_S, text=True)
    names = [name for name in json.loads(listed.stdout) if re.search(pattern or "", name)]
    if not names:
        raise SystemExit(f"no test has {pattern!r} in its name")
    return names


def ran(backend: str, size: int, names: Sequence[str], limit_s: int) -> Outcomes:
    """Return what has become of the tests over ``backend``, each ended after ``limit_s``."""
    outcomes: Outcomes = {}
    for number in range(TRIES.get(backend, 1)):
        failed = [name for name in names if outcomes.get(name, _NEVER).verdict == "failed"]
        left = failed if number else list(names)
        for name in left:
            outcomes.pop(name, None)
        while left:
            outcomes |= batch(backend, size, left, limit_s, len(outcomes))
            left = [name for name in left if name not in outcomes]
    return {name: outcomes[name] for name in names}


def batch(backend: str, size: int, names: Sequence[str], limit_s: int, number: int) -> Outcomes:
    """Return outcomes up to the test that ended the process: at least of the first."""
    results = FOLDER / f"{backend}-{size}-{number}.jsonl"
    results.unlink(missing_ok=True)
    command = [sys.executable, str(BATCH), backend, str(size), str(limit_s), str(results), *names]
    code = environments.logged(
        command,
        results.with_suffix(".log"),
        timeout_s=START_S + 2 * limit_s * len(names),
        variables={
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(backend != "gloo")),
        },
    )
    lines = results.read_text().splitlines() if results.exists() else []
    return outcomes_of(lines, names, f"the process that runs the tests ended with {code}")


def outcomes_of(lines: Iterable[str], names: Sequence[str], ended: str) -> Outcomes:
    """Read what a batch has written. ``ended`` is said of the test in which it came to its end.

    A batch in which no test began has not come further than the first. Of several outcomes of a
    test (it passes, and fails when it cleans up) the worst counts.
    """
    worst = ("passed", "skipped", "failed")
    outcomes: Outcomes = {}
    begun = None
    for line in lines:
        record = json.loads(line)
        name = record["test"]
        if "outcome" not in record:
            begun = name
            continue
        outcome = Outcome(record["outcome"], record["text"])
        before = outcomes.get(name, outcome)
        outcomes[name] = max(before, outcome, key=lambda each: worst.index(each.verdict))
    last = names[0] if begun is None else begun
    if last not in outcomes:
        outcomes[last] = Outcome("failed", ended)
    return outcomes


def counts(outcomes: Outcomes) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped."""
    verdicts = Counter(outcome.verdict for outcome in outcomes.values())
    return {verdict: verdicts[verdict] for verdict in COLUMNS[:3]}


def behind(found: Mapping[Run, Outcomes]) -> dict[str, list[int]]:
    """Return the tests that pass over gloo but not over Kolovod, each with the numbers of ranks."""
    late: dict[str, list[int]] = {}
    for (backend, size), outcomes in found.items():
        if backend == "kolovod":
            for name, outcome in outcomes.items():
                if _falls_behind(outcome, found.get(("gloo", size), {}).get(name)):
                    late.setdefault(name, []).append(size)
    return late


def _falls_behind(ours: Outcome, gloo: Outcome | None) -> bool:
    if gloo is None:
        return ours.verdict == "failed"
    return gloo.verdict == "passed" and ours.verdict != "passed"


def last_line(text: str) -> str:
    """Return the error of the first rank that failed, without the calls that led to it."""
    first = re.split(r"\nProcess \d+ exited with ", text)[0]
    lines = [line.strip() for line in first.splitlines() if line.strip()]
    said = lines[-1] if lines else "no message"
    return said if len(said) <= TEXT else f"{said[:TEXT]} ..."


_NEVER = Outcome("never run")
COLUMNS = ("passed", "failed", "skipped", "versions", "seconds", "commit", "date")


def title(run: Run) -> str:
    """Return a run's title, for the tables."""
    backend, size = run
    return f"{backend}, {size} ranks"


_HEAD = """# PyTorch's own tests of torch.distributed

By `make c10d` (`scripts/c10d.py`): the tests in `torch.testing._internal.distributed.
distributed_test`, as each version of PyTorch has them, with 2, 3, 4 and 8 ranks. Those
that are for gloo are run over Kolovod, too; the names of a profiler's events are looked
at for gloo only. A test that fails over gloo is tried once more.
"""
_SECTION = "\n## PyTorch "


def page(before: str, version: str, new: str) -> str:
    """Return the page with the section of this version in place of what ``before`` has of it.

    The newest version comes first.
    """
    public = version.split("+")[0]  # without what it was built for
    sections = dict(part.split("\n", 1) for part in before.split(_SECTION)[1:])
    sections[public] = f"\n{new}"
    newest_first = sorted(sections, key=_numbers, reverse=True)
    return _HEAD + "".join(f"{_SECTION}{each}\n{sections[each]}" for each in newest_first)


def _numbers(version: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", version)]


def section(found: Mapping[Run, Outcomes], facts: Mapping[str, Mapping[str, object]]) -> str:
    """Return the section of a version."""
    late = [f"`{name}` ({', '.join(map(str, sizes))})" for name, sizes in behind(found).items()]
    verdict = "Every test that passes over gloo passes over Kolovod."
    if late:
        verdict = f"Over gloo only pass (with so many ranks): {', '.join(late)}."
    runs = [title(run) for run in found]
    lines = [verdict, "", environments.machine(), "", *environments.header("run", COLUMNS)]
    lines += [environments.line(run, facts[run], COLUMNS) for run in runs]
    alike = sum(_is_all("passed", outcomes) for outcomes in _by_test(found).values())
    lines += ["", f"{alike} tests passed in all runs. The others that ran:", ""]
    return (
        "\n".join(
            [*lines, *tests_table(found, without=["passed", "skipped"]), "", *skipped_table(found)]
        )
        + "\n"
    )


def _is_all(verdict: str, outcomes: Mapping[str, Outcome]) -> bool:
    return all(outcome.verdict == verdict for outcome in outcomes.values())


def tests_table(found: Mapping[Run, Outcomes], without: Sequence[str]) -> list[str]:
    """Return what became of each test, but where it is one verdict of ``without`` in all runs."""
    columns = [title(run) for run in found]
    lines = environments.header("test", columns)
    for name, outcomes in _by_test(found).items():
        if not any(_is_all(verdict, outcomes) for verdict in without):
            cells = {column: outcome.cell() for column, outcome in outcomes.items()}
            lines.append(environments.line(f"`{name}`", cells, columns))
    return lines


def skipped_table(found: Mapping[Run, Outcomes]) -> list[str]:
    """Return how many tests were skipped in all runs, by PyTorch's reason in the last."""
    reasons = Counter(
        list(outcomes.values())[-1].text
        for outcomes in _by_test(found).values()
        if _is_all("skipped", outcomes)
    )
    return environments.header("skipped in all runs, since", ["tests"]) + [
        environments.line(reason, {"tests": count}, ["tests"])
        for reason, count in reasons.most_common()
    ]


def _by_test(found: Mapping[Run, Outcomes]) -> dict[str, dict[str, Outcome]]:
    names = dict.fromkeys(name for outcomes in found.values() for name in outcomes)
    return {
        name: {title(run): outcomes[name] for run, outcomes in found.items() if name in outcomes}
        for name in names
    }


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def _backends(text: str) -> tuple[str, ...]:
    given = tuple(text.split(","))
    if not set(given) <= set(BACKENDS):
        raise argparse.ArgumentTypeError(f"{text!r}: some of {','.join(BACKENDS)}")
    return given


if __name__ == "__main__":
    sys.exit(main())
