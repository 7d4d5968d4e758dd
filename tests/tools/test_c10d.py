"""scripts/c10d.py takes for passed only what passed, and knows where Kolovod falls behind gloo."""

from __future__ import annotations

import json
import signal
import sys
import unittest

import c10d
import c10d_batch
import pytest
from c10d import Outcome

pytestmark = pytest.mark.slow

PASSED, SKIPPED, FAILED = (
    Outcome("passed"),
    Outcome("skipped", "no GPU"),
    Outcome("failed", "Process 0 exited with error code 10 and exception:\nTraceback\nE: no\n\n"
            "Process 1 exited with error code 10 and exception:\nE: later"),
)  # fmt: skip

BATCH = """
import json, os, sys
backend, ranks, limit_s, results, *names = sys.argv[1:]
if not names:
    print('["test_a", "test_b", "test_c"]')
with open(results or os.devnull, "a") as file:
    for name in names:
        file.write(json.dumps({"test": name}) + "\\n")
        file.flush()
        verdict = os.environ.get(f"{backend}_{ranks}_{name}", "passed")
        if verdict == "ends":
            os._exit(9)
        if verdict == "once":
            been = os.path.join(os.path.dirname(results), "been")
            verdict = "passed" if os.path.exists(been) else "failed"
            open(been, "w").close()
        file.write(json.dumps({"test": name, "outcome": verdict, "text": "why"}) + "\\n")
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs c10d.py over tests whose outcomes the environment says: exit code, what is printed."""
    monkeypatch.setattr(c10d, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(c10d, "PAGE", tmp_path / "c10d.md")
    monkeypatch.setattr(c10d, "BATCH", tmp_path / "batch.py")
    monkeypatch.setattr(c10d.environments, "ROOT", tmp_path)
    (tmp_path / "batch.py").write_text(BATCH)

    def main(*arguments, **outcomes):
        for key, verdict in outcomes.items():
            monkeypatch.setenv(key, verdict)
        monkeypatch.setattr(sys, "argv", ["c10d.py", *arguments])
        code = c10d.main()
        return code, capsys.readouterr().out

    return main


def test_all_of_it_fills_the_page(run):
    code, _ = run(gloo_3_test_b="skipped", kolovod_3_test_b="skipped")
    table = c10d.PAGE.read_text()
    assert code == 0
    assert "2 tests passed in all runs." in table
    assert "`test_a`" not in table
    assert "| `test_b` | passed | passed | skipped: why | skipped: why | passed |" in table
    assert "| kolovod, 3 ranks | 2 | 0 | 1 | Python " in table
    assert "Every test that passes over gloo passes over Kolovod." in table


def test_a_version_replaces_its_own_section_only(run, monkeypatch):
    for version in ("2.9.0+cpu", "2.13.0", "2.8.0", "2.9.0"):
        monkeypatch.setattr(c10d.importlib.metadata, "version", lambda _, now=version: now)
        run(kolovod_8_test_b="passed" if version == "2.9.0" else "skipped")
    page = c10d.PAGE.read_text()
    parts = page.split("\n## PyTorch ")
    assert [part.split("\n")[0] for part in parts[1:]] == ["2.13.0", "2.9.0", "2.8.0"]
    assert parts[0].startswith("# PyTorch's own tests")
    assert ["`test_b`" in part for part in parts[1:]] == [True, False, True]
    assert all(part.count("| gloo, 2 ranks | ") == 2 for part in parts[1:])
    assert "\n\n\n" not in page


def test_a_test_that_kolovod_alone_fails(run):
    only_ours = {"kolovod_2_test_b": "failed", "kolovod_3_test_b": "failed"}
    code, _ = run(**only_ours, gloo_4_test_c="failed", kolovod_4_test_c="failed")
    table = c10d.PAGE.read_text()
    assert code == 1
    assert "Over gloo only pass (with so many ranks): `test_b` (2, 3).\n" in table
    assert "| `test_b` | passed | **failed**: why | passed |" in table


def test_some_are_printed_and_leave_the_page(run):
    code, said = run("--only", "_[ab]$", "--sizes", "3", kolovod_3_test_a="skipped")
    assert code == 1, "what runs over gloo is not to be skipped"
    assert "| `test_a` | passed | skipped: why |" in said
    assert "test_c" not in said
    run("--sizes", "2,3,4,5")
    assert not c10d.PAGE.exists()
    assert run("--sizes", "2", "--backends", "kolovod", kolovod_2_test_c="failed")[0] == 1
    with pytest.raises(SystemExit, match="no test has 'nothing'"):
        run("--only", "nothing")


def test_what_comes_after_a_test_that_ends_the_process_is_run(run):
    code, said = run("--sizes", "2", kolovod_2_test_b="ends")
    assert code == 1
    assert (
        "| `test_b` | passed | **failed**: the process that runs the tests ended with 9 |" in said
    )
    assert "| `test_c` | passed | passed |" in said


def test_the_reference_may_try_again_but_we_may_not(run):
    assert run("--sizes", "2", gloo_2_test_a="once")[0] == 0
    assert "| `test_a` | passed | passed |" in run("--sizes", "2", gloo_2_test_a="once")[1]
    (c10d.FOLDER / "been").unlink()
    assert run("--sizes", "2", gloo_2_test_a="passed", kolovod_2_test_a="once")[0] == 1


@pytest.mark.parametrize(
    ("ours", "gloo", "is_behind"),
    [
        (PASSED, PASSED, False),
        (FAILED, PASSED, True),
        (SKIPPED, PASSED, True),
        (FAILED, FAILED, False),
        (SKIPPED, SKIPPED, False),
        (PASSED, FAILED, False),
    ],
)
def test_behind(ours, gloo, is_behind):
    found = {("kolovod", 2): {"test": ours}, ("gloo", 2): {"test": gloo}}
    assert c10d.behind(found) == ({"test": [2]} if is_behind else {})
    alone = c10d.behind({("kolovod", 2): {"test": ours}})
    assert alone == ({"test": [2]} if ours is FAILED else {})


def test_what_a_batch_has_written():
    lines = [
        {"test": "a"}, {"test": "a", "outcome": "passed", "text": ""},
        {"test": "a", "outcome": "failed", "text": "cleaning up"}, {"test": "b"},
    ]  # fmt: skip
    found = c10d.outcomes_of(map(json.dumps, lines), ["a", "b", "c"], "ended")
    assert found == {"a": Outcome("failed", "cleaning up"), "b": Outcome("failed", "ended")}
    assert c10d.outcomes_of([], ["a", "b"], "ended") == {"a": Outcome("failed", "ended")}


def test_of_an_error_the_last_line_of_the_first_rank():
    assert FAILED.cell() == "**failed**: E: no"
    assert c10d.last_line("x" * 500) == f"{'x' * c10d.TEXT} ..."
    assert c10d.last_line("") == "no message"


def test_each_test_is_written_down_and_ends(tmp_path):
    class Subject(unittest.TestCase):
        def test_good(self):
            """Passes."""

        def test_bad(self):
            self.fail("bad")

        def test_skipped(self):
            self.skipTest("no GPU")

        def test_endless(self):
            signal.pause()

    before = signal.getsignal(signal.SIGALRM)
    path = tmp_path / "results"
    names = ["test_good", "test_bad", "test_skipped", "test_endless"]
    try:
        unittest.TestSuite(map(Subject, names)).run(c10d_batch.Result(path, 1))
    finally:
        signal.signal(signal.SIGALRM, before)
    found = c10d.outcomes_of(path.read_text().splitlines(), names, "")
    assert found == {
        "test_good": PASSED, "test_bad": Outcome("failed", "bad"), "test_skipped": SKIPPED,
        "test_endless": Outcome("failed", "no end after 1 s"),
    }  # fmt: skip


def test_a_name_that_passes_for_gloos():
    name = c10d_batch.AsGloo("kolovod")
    assert name == "gloo"
    assert name == "kolovod"
    assert name != "nccl"
    assert name in {"kolovod"}
    assert name not in {"nccl"}
    assert name.lower() != "gloo"
