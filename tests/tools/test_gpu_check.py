"""scripts/gpu_check.py: what it runs, ends, leaves out and records, and the page of its rows.

It runs as a process of its own, as it ends all that is below it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_check
import gpu_parts
import gpu_rows
import gpu_training
import gpu_verbs
import pytest
from gpu_ranks import Findings, patience
from gpu_rows import Row
from launched import wait_until_gone
from paths import ROOT

TIMEOUT_S = 110
MADE_UP = """
import os, subprocess, sys, time
from gpu_ranks import Findings

def fine(device):
    found = Findings()
    found.figures["device"] = device
    return found

def wrong(device):
    found = fine(device)
    found.tried("a try", lambda: 1 // 0)
    return found

def crashes(device):
    print("the last words", flush=True)
    os.abort()

def hangs(device):
    code = "import time; time.sleep(600)"
    below = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    print("pids", os.getpid(), below.pid, flush=True)
    time.sleep(600)
"""
DRIVER = """
import sys
import gpu_parts
gpu_parts.PARTS.clear()
for name in ("fine", "wrong", "crashes", "hangs"):
    limit_s = 1 if name == "hangs" else 10
    gpu_parts.PARTS[name] = gpu_parts.Part(f"made_up:{name}", limit_s, False, name)
gpu_parts.PARTS["late"] = gpu_parts.Part("made_up:fine", 1000, False, "late")
import gpu_check
gpu_check.SURROUNDINGS = gpu_parts.Part("made_up_surroundings:say", 10, False, "")
sys.exit(gpu_check.main())
"""
SURROUNDINGS = """
from gpu_ranks import Findings

def say(device):
    found = Findings()
    found.figures = {"device": "cpu", "versions": {"torch": "1"}}
    return found
"""


def checked(
    folder: Path, *arguments: str, command: Sequence[str] = ("scripts/gpu_check.py",)
) -> tuple[subprocess.CompletedProcess[str], list[Row]]:
    """The script's end, and the rows it has written into ``folder``."""
    done = subprocess.run(
        [
            sys.executable,
            *command,
            "--device",
            "cpu",
            "--no-wheel",
            "--out",
            str(folder),
            *arguments,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'scripts'}"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    path = folder / "gpu.jsonl"
    return done, gpu_rows.read(path) if path.exists() else []


def made_up(
    folder: Path, *arguments: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Row]]:
    """The same with parts that are made up, by name."""
    (folder / "made_up.py").write_text(MADE_UP)
    (folder / "made_up_surroundings.py").write_text(SURROUNDINGS)
    done, rows = checked(folder, *arguments, command=("-c", DRIVER))
    return done, {row.part: row for row in rows}


@pytest.mark.slow
def test_what_parts_come_to(tmp_path: Path) -> None:
    done, rows = made_up(tmp_path, "--budget", "100", "--commit", "abc")
    assert done.returncode == 1, done.stderr
    assert list(rows) == ["fine", "wrong", "crashes", "hangs"]
    assert [name for name, row in rows.items() if row.ok] == ["fine"]
    fine = rows["fine"]
    assert (fine.figures, fine.error) == ({"device": "cpu"}, "")
    assert (fine.commit, fine.wheel, fine.device) == ("abc", "none", "cpu")
    assert fine.versions == {"torch": "1"}
    assert rows["wrong"].figures == {"device": "cpu"}
    assert rows["wrong"].error.startswith("a try: ZeroDivisionError")
    assert "exit code -6" in rows["crashes"].error
    assert "the last words" in rows["crashes"].error
    limit_s = 1 * patience("cpu")
    assert f"no end after {limit_s} s" in rows["hangs"].error
    assert rows["hangs"].seconds >= limit_s
    pids = rows["hangs"].error.split("pids ")[1].split()[:2]
    wait_until_gone([int(pid) for pid in pids])
    assert "late            no time" in done.stdout
    log = (tmp_path / "gpu.log").read_text()
    assert "the last words" in log


def test_a_second_call_leaves_out_what_was_in_order(tmp_path: Path) -> None:
    only = ("--only", "fine,wrong")
    made_up(tmp_path, *only)
    again = tmp_path / "again"
    again.mkdir()
    done, rows = made_up(again, *only, "--done", str(tmp_path / "gpu.jsonl"))
    assert list(rows) == ["wrong"]
    assert "was in order before" in done.stdout
    done, _ = made_up(again, "--done", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "there is no such file" in done.stderr


def test_what_was_rehearsed_is_not_done_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text(
        f"{ROW.line()}\n{dataclasses.replace(ROW, part='facts', device='cpu').line()}\n"
    )
    assert gpu_check.in_order([path], "cuda") == {"ipc"}
    assert gpu_check.in_order([path], "cpu") == {"facts"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--only", "facts,fatcs"], "there is no part 'fatcs'"),
        (["--only", "facts,ipc"], "ipc: needs a GPU"),
        (["--wheel", "/nowhere", "--only", "facts"], "/nowhere has 0 wheels of Kolovod"),
    ],
)
def test_bad_arguments(
    tmp_path: Path, arguments: list[str], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["--device", "cpu", "--out", str(tmp_path), *arguments]
    try:
        code = gpu_check.main(command)
    except SystemExit as error:
        code = error.code  # type: ignore[assignment]
    assert code == 2
    assert text in capfd.readouterr().err


def test_where_there_is_no_gpu_that_is_said(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done, rows = checked(tmp_path, "--device", "cuda", "--only", "ipc")
    assert (done.returncode, rows) == (2, [])
    assert "finds no GPU here" in done.stderr


def test_all_parts_fit_in_a_call() -> None:
    rows = gpu_rows.read(gpu_rows.ROWS)
    taken_s = {
        name: max((row.seconds for row in rows if row.part == name), default=part.limit_s / 1.5)
        for name, part in gpu_parts.PARTS.items()
    }
    assert sum(taken_s.values()) <= 0.85 * gpu_check.BUDGET_S
    for name, part in gpu_parts.PARTS.items():
        assert part.limit_s >= 1.4 * taken_s[name], "a slow machine is no fault"
    for part in [gpu_parts.SURROUNDINGS, *gpu_parts.PARTS.values()]:
        module, work = part.work.split(":")
        assert callable(getattr(__import__(module), work)), part.work


class OfTwo:
    """As much of ``kolovod.torch`` as a comparison of one rank of two needs."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


HALF = "float16"


@pytest.mark.parametrize(
    ("found", "wanted", "is_exact", "wrong"),
    [
        ([1.5, 2], [1.5, 2], True, 0),
        ([1.5, 2.001], [1.5, 2], True, 1),
        ([1.5, 2.0000002], [1.5, 2], False, 1),  # of two ranks NCCL's sums are exact, too
        (([1.5, 2.001], HALF), ([1.5, 2], HALF), True, 1),
        (([1.5, 2.001], HALF), ([1.5, 2], HALF), False, 0),
        (([1.5, 2.2], HALF), ([1.5, 2], HALF), False, 1),
        ([1.5, 2], ([1.5, 2], "float64"), False, 1),
        ([1.5, 2], [[1.5, 2]], False, 1),
    ],
)
def test_what_counts_as_wrong(found: Any, wanted: Any, is_exact: bool, wrong: int) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def made(values: Any) -> Any:
        values, dtype = values if isinstance(values, tuple) else (values, "float32")
        return torch.tensor(values, dtype=getattr(torch, dtype))

    comparison = gpu_verbs.Comparison(OfTwo(), "cpu", is_exact)
    comparison.same("a verb", [made(found), [2]], [made(wanted), [2]])
    assert (comparison.cases, len(comparison.wrong)) == (2, wrong)
    comparison.same("another", [made(found), [3]], [made(found), [2]])
    assert comparison.wrong[wrong:] == ["another: 3, not 2"]


def test_weights_that_are_not_one_ranks() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    way = gpu_training.WAYS["sgd"]
    alone = gpu_training.train(way, "cpu", slice(None), lambda optimizer, net: optimizer)
    half = gpu_training.train(way, "cpu", slice(0, None, 2), lambda optimizer, net: optimizer)
    for results, texts in (
        ([alone, alone], []),
        ([half, half], ["sgd: weights differ from one rank's"]),
        ([alone, half], ["sgd: the ranks' weights differ"]),
    ):
        found = Findings()
        gpu_training.judge(found, "sgd", way, results, "cpu")
        assert len(found.problems) == len(texts)
        assert all(map(str.startswith, found.problems, texts))


def rehearsed(folder: Path, parts: Sequence[str]) -> None:
    done, rows = checked(folder, "--only", ",".join(parts))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row.part for row in rows] == list(parts)
    assert all(row.ok and row.device == "cpu" and row.figures for row in rows)


@pytest.mark.slow
def test_a_rehearsal(tmp_path: Path) -> None:
    rehearsed(tmp_path, ["facts", "context"])


SLOW = [name for name, part in gpu_parts.PARTS.items() if not part.needs_gpu and name != "facts"]
OF_JAX = [pytest.mark.frameworks]


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [pytest.param(name, marks=OF_JAX if name == "front_ends" else []) for name in SLOW]
)
def test_rehearsals(tmp_path: Path, part: str) -> None:
    rehearsed(tmp_path, [part])


# The page -----------------------------------------------------------------------------------------

ROW = Row(
    part="ipc", when="2026-01-02 03:04 UTC", commit="abc", wheel="a.whl 0123", device="A100",
    versions={"torch": "2.11"}, ok=True, seconds=3.5,
    figures={"ranks": [{"equal": True, "event_us": 4.5}, {"equal": True, "event_us": 5.5}]},
)  # fmt: skip
TIMES = dataclasses.replace(
    ROW,
    part="times",
    ok=False,
    error="a problem",
    figures={
        "staged": {
            "steps_ms": {"small": {"plain": 10.0, "kolovod": 11.0, "ddp": 12.0}},
            "allreduce_ms": {"4 B": {"cpu": 0.01, "cuda": 0.04}},
            "peak_gb": 1.5,
            "pinned_gb": 0.5,
        }
    },
)


def test_the_page_of_rows() -> None:
    other = dataclasses.replace(ROW, device="H100")
    page = gpu_rows.page(gpu_rows.merged([ROW, TIMES, other]))
    assert page.index("## A100") < page.index("### times") < page.index("### ipc")
    assert "No GPU has run this yet" not in page
    assert "torch 2.11; wheel: a.whl 0123." in page
    assert "| ranks 1, event_us | 5.5 |" in page
    assert "| **not in order** | 3.5 | abc | 2026-01-02 03:04 UTC |" in page
    assert "```\na problem\n```" in page
    assert "| staged | small | 10.0 | 11.0 | +10.0 % | 12.0 |" in page
    assert "| staged | 4 B | 0.01 | 0.04 |" in page
    assert "staged: 1.5 GB of the GPU at most, 0.5 GB pinned." in page
    assert "Not run on it: facts, verbs" in page
    assert page.count("## H100") == 1


def test_the_page_without_rows_has_no_figures() -> None:
    page = gpu_rows.page([])
    assert "**No GPU has run this yet**" in page
    assert all(f"| {name} |" in page for name in gpu_parts.PARTS)


def test_rows_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rows, "ROWS", tmp_path / "gpu.jsonl")
    monkeypatch.setattr(gpu_rows, "PAGE", tmp_path / "gpu.md")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    later = dataclasses.replace(ROW, when="2026-02-02 03:04 UTC", figures={"n": 2})
    for number, rows in enumerate(([later, TIMES], [ROW])):  # the older one comes second
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(f"{row.line()}\n" for row in rows))
        assert gpu_check.main(["--page", str(path)]) == 0
    assert gpu_rows.read(gpu_rows.ROWS) == [TIMES, later]
    assert gpu_rows.PAGE.read_text() == gpu_rows.page([TIMES, later])


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (dataclasses.replace(ROW, device="cpu").line(), "was rehearsed without a GPU"),
        ("{", "line 1: not JSON"),
        (json.dumps({"part": "ipc"}), "line 1: not a row"),
    ],
)
def test_what_is_no_result_of_a_gpu_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    line: str,
    text: str,
) -> None:
    monkeypatch.setattr(gpu_rows, "ROWS", tmp_path / "gpu.jsonl")
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{line}\n")
    assert gpu_check.main(["--page", str(path)]) == 2
    assert text in capfd.readouterr().err
    assert not gpu_rows.ROWS.exists()


def test_the_real_page_shows_the_real_rows() -> None:
    rows = list(gpu_rows.results(gpu_rows.read(gpu_rows.ROWS), gpu_rows.ROWS))
    assert rows == gpu_rows.merged(rows)
    assert gpu_rows.PAGE.read_text() == gpu_rows.page(rows)
