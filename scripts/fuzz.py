"""Fuzzes every decoder and says what was reached: `make fuzz`.

usage: python scripts/fuzz.py BUILD_FOLDER [--seconds S] [--runs N] [--only NAME ...]
                              [--output FILE]

The C++ targets (csrc/fuzz) are those of a build with KOLOVOD_FUZZ in BUILD_FOLDER; the Python ones
are tests/fuzz/decoders.py. Each starts from its captured messages and goes on until ``--seconds``
or ``--runs`` inputs. What reached something new is kept in BUILD_FOLDER/found, and the next run
starts there. Coverage is measured by running all that is kept: Clang's for C++, coverage.py's for
Python. Exits with 1 if an input broke a target.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_FUZZER = ROOT / "tests" / "fuzz" / "fuzz.py"
DECODERS = (
    "csrc/base/text.cc",
    "csrc/control/bytes.h",
    "csrc/control/overdue_waits.cc",
    "csrc/control/message.cc",
    "csrc/control/negotiate.cc",
    "csrc/control/message_ring.cc",
    "csrc/engine/record_file.cc",
    "csrc/transport/operation_record.cc",
    "csrc/transport/stream.cc",
    "csrc/transport/sealer.cc",
    "csrc/transport/control_link.cc",
)
"""The files with decoders, and with what is done with a message before it is known to be sound."""


@dataclass
class Outcome:
    """One target's run."""

    name: str
    inputs: int
    reached: str
    """libFuzzer's counts of code edges and features; "" without."""
    failure: str


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each target")
    parser.add_argument("--runs", type=int, default=10**9, help="for each target, at most")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    build = options.build.resolve()
    outcomes = []
    for name, command in targets(build, options.seconds, options.runs):
        if options.only and name not in options.only:
            continue
        outcomes.append(run(name, command, build, options.seconds))
        print(row(outcomes[-1]), flush=True)
    text = report(outcomes, native_coverage(build), python_coverage(build))
    print(text)
    if options.output:
        options.output.write_text(text)
    return any(outcome.failure for outcome in outcomes)


def targets(build: Path, seconds: float, runs: int) -> Iterator[tuple[str, list[str]]]:
    """Return every target and its command."""
    limits = [f"-max_total_time={max(1, round(seconds))}", f"-runs={runs}"]
    for source in sorted((ROOT / "csrc" / "fuzz").glob("*_fuzz.cc")):
        name = source.name.removesuffix("_fuzz.cc")
        found = found_in(build, f"cpp_{name}")
        corpus = ROOT / "csrc" / "fuzz" / "corpus" / name
        program = str(build / f"fuzz_{name}")
        yield f"cpp_{name}", [program, *limits, "-max_len=4096", str(found), str(corpus)]
    for name in sorted(python_targets()):
        found = found_in(build, f"py_{name}")
        command = [sys.executable, str(PYTHON_FUZZER), name]
        command += ["--seconds", str(seconds), "--runs", str(runs), "--keep", str(found)]
        yield f"py_{name}", command


def python_targets() -> list[str]:
    return [path.name for path in (ROOT / "tests" / "fuzz" / "corpus").iterdir()]


def found_in(build: Path, name: str) -> Path:
    folder = build / "found" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def environment(build: Path, name: str) -> dict[str, str]:
    profiles = build / "profiles"
    profiles.mkdir(exist_ok=True)
    return {**os.environ, "LLVM_PROFILE_FILE": str(profiles / f"{name}.profraw")}


def run(name: str, command: Sequence[str], build: Path, seconds: float) -> Outcome:
    crashes = build / "crashes" / name
    crashes.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(
        command,
        cwd=crashes,
        env=environment(build, name),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds + 300,
        check=False,
    )
    text = result.stdout + result.stderr
    done = re.findall(r"^#(\d+)\s+DONE\s*(cov: \d+ ft: \d+)?", text, re.MULTILINE)
    inputs, reached = done[-1] if done else ("0", "")
    failure = "" if result.returncode == 0 else f"exit code {result.returncode}, see {crashes}"
    if failure:
        (crashes / "log").write_text(text)
    return Outcome(name, int(inputs), reached, failure)


def native_coverage(build: Path) -> list[tuple[str, float, float]]:
    """``(file, lines %, regions %)`` of the C++ decoders, over the profiles of all targets."""
    profiles = sorted((build / "profiles").glob("cpp_*.profraw"))
    programs = [build / f"fuzz_{path.stem.removeprefix('cpp_')}" for path in profiles]
    merge, show = tool("llvm-profdata"), tool("llvm-cov")
    if not profiles or not merge or not show:
        return []
    merged = str(build / "merged.profdata")
    subprocess.run([merge, "merge", "-o", merged, *map(str, profiles)], check=True)
    command = [show, "export", "-summary-only", f"-instr-profile={merged}", str(programs[0])]
    command += [f"-object={program}" for program in programs[1:]]
    exported = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = []
    for file in json.loads(exported)["data"][0]["files"]:
        name = os.path.relpath(file["filename"], ROOT)
        if name in DECODERS:
            parts = file["summary"]
            found.append((name, parts["lines"]["percent"], parts["regions"]["percent"]))
    return found


def tool(name: str) -> str | None:
    """Return LLVM's tool, that with the highest version in its name where none has no version."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    versions = {p.name for folder in folders for p in Path(folder).glob(f"{name}-[0-9]*")}
    newest = sorted(versions, key=lambda text: int(text.rpartition("-")[2]))[-1:]
    return shutil.which(os.environ.get(name.upper().replace("-", "_"), name)) or (
        shutil.which(newest[0]) if newest else None
    )


_REPLAY = """
import contextlib, io, sys
from pathlib import Path
import decoders
for name, target in decoders.TARGETS.items():
    kept = Path(sys.argv[1]) / f"py_{name}"
    for data in decoders.corpus(name) + [f.read_bytes() for f in kept.iterdir() if f.is_file()]:
        with contextlib.redirect_stderr(io.StringIO()):
            target(data)
"""


def python_coverage(build: Path) -> list[tuple[str, float, float]]:
    """``(file, lines %, branches %)`` of the decoders' functions, over all that was kept."""
    sys.path.insert(0, str(PYTHON_FUZZER.parent))
    from decoders import DECODERS as MODULES

    script = build / "replay.py"
    script.write_text(_REPLAY)
    data = str(build / "python.coverage")
    files = [f"*/{name.replace('.', '/')}.py" for name in MODULES]
    settings = ["--branch", f"--data-file={data}", f"--include={','.join(files)}"]
    command = [sys.executable, "-m", "coverage", "run", *settings, str(script), "found"]
    python_path = os.pathsep.join([str(PYTHON_FUZZER.parent), os.environ.get("PYTHONPATH", "")])
    surroundings = {**os.environ, "PYTHONPATH": python_path}
    subprocess.run(command, cwd=build, env=surroundings, check=True)
    exported = str(build / "python-coverage.json")
    subprocess.run(
        [sys.executable, "-m", "coverage", "json", f"--data-file={data}", "-q", "-o", exported],
        check=True,
        cwd=build,
    )
    found = []
    for path, file in json.loads(Path(exported).read_text())["files"].items():
        name = re.sub(r".*/(?=(kolovod|horovod)/)", "", path)
        functions = MODULES[name.removesuffix(".py").replace("/", ".")]
        parts = [file["functions"][function]["summary"] for function in functions]
        parts = parts or [file["summary"]]
        found.append(
            (
                f"{name}: {', '.join(functions)}" if functions else name,
                _percent(parts, "covered_lines", "num_statements"),
                _percent(parts, "covered_branches", "num_branches"),
            )
        )
    return found


def _percent(parts: Sequence[dict[str, int]], covered: str, of: str) -> float:
    whole = sum(part[of] for part in parts)
    return 100 * sum(part[covered] for part in parts) / whole if whole else 100.0


def row(outcome: Outcome) -> str:
    state = outcome.failure or "nothing"
    return f"| {outcome.name} | {outcome.inputs:,} | {outcome.reached or '-'} | {state} |"


def report(
    outcomes: Sequence[Outcome],
    native: Sequence[tuple[str, float, float]],
    python: Sequence[tuple[str, float, float]],
) -> str:
    total = sum(outcome.inputs for outcome in outcomes)
    lines = ["| target | inputs | reached | broken by |", "|---|---|---|---|"]
    lines += [row(outcome) for outcome in outcomes]
    lines += [f"| together | {total:,} | | |", ""]
    lines += ["| C++ file | lines | regions |", "|---|---|---|"]
    lines += [f"| `{name}` | {part:.0f} % | {other:.0f} % |" for name, part, other in native]
    lines += ["", "| Python file | lines | branches |", "|---|---|---|"]
    lines += [f"| `{name}` | {part:.0f} % | {other:.0f} % |" for name, part, other in python]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
