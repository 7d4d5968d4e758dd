"""scripts/flaky.py on a test that fails in every second run, and on one that never does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import flaky
import psutil
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(flaky, "OUTPUT", tmp_path / "output")
    monkeypatch.setattr(flaky, "ROOT", tmp_path)
    flaky.OUTPUT.mkdir()
    (tmp_path / "test_some.py").write_text(
        "import pathlib\n"
        "def test_always(): assert True\n"
        "def test_in_turn():\n"
        "    mark = pathlib.Path('mark')\n"
        "    if mark.exists():\n"
        "        mark.unlink()\n"
        "        raise AssertionError('the second time')\n"
        "    mark.touch()\n"
    )
    return tmp_path


def set_of(folder: Path) -> flaky.Set:
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junit-xml")
    return flaky.Set("some", (*command, "{results}", str(folder / "test_some.py")))


def test_what_fails_in_one_run_is_listed_with_what_it_said(folder: Path) -> None:
    found = [failure for run in (1, 2, 3, 4) for failure in flaky.run_once(set_of(folder), run)]
    assert [(failure.test, failure.run) for failure in found] == [
        ("test_some::test_in_turn", 2),
        ("test_some::test_in_turn", 4),
    ]
    text = flaky.report(found, 4)
    assert "1 tests failed in at least one of 4 runs" in text
    assert "test_some::test_in_turn (some): 2 of 4, in run 2, 4" in text
    assert "the second time" in text
    assert "test_always" not in text


def test_a_run_that_cannot_begin_is_a_failure(folder: Path) -> None:
    broken = flaky.Set("broken", (sys.executable, "-c", "raise SystemExit('nothing is here')"))
    (failure,) = flaky.run_once(broken, 1)
    assert failure.test == "(the whole run)"
    assert "nothing is here" in failure.text


def test_results_of_ctest_are_read(tmp_path: Path) -> None:
    results = tmp_path / "results.xml"
    results.write_text(
        '<testsuite><testcase name="good" classname="good"><system-out>x</system-out></testcase>'
        '<testcase name="engine_test" classname="engine_test"><failure message="Failed"/>'
        "<system-out>engine_test.cc:7: CHECK failed</system-out></testcase></testsuite>"
    )
    ((name, text),) = flaky.failures_of(results)
    assert name == "engine_test::engine_test"
    assert text == "Failed\nengine_test.cc:7: CHECK failed"


def test_processes_compute_beside_the_tests_and_end_with_them() -> None:
    before = {process.pid for process in psutil.Process().children()}
    with flaky.busy(2):
        beside = {process.pid for process in psutil.Process().children()} - before
        assert len(beside) == 2
    assert not any(psutil.pid_exists(pid) for pid in beside)


def test_an_unknown_set_is_refused() -> None:
    script = Path(flaky.__file__)
    command = [sys.executable, str(script), "--only", "quick", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 2
    assert "--only none: the sets are quick, native, address, thread" in done.stderr


def test_a_run_that_does_not_end_is_a_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flaky, "SET_LIMIT_S", 1.0)
    code = "print('so far', flush=True); import time; time.sleep(600)"
    (failure,) = flaky.run_once(flaky.Set("endless", (sys.executable, "-c", code)), 1)
    assert failure.test == "(the whole run)"
    assert "so far" in failure.text
    assert "it was killed, since it took more than 1 s" in failure.text


def test_results_that_are_cut_off_are_a_failure(folder: Path) -> None:
    code = "import sys; open(sys.argv[1], 'w').write('<testsuite><testcase')"
    (failure,) = flaky.run_once(flaky.Set("cut", (sys.executable, "-c", code, "{results}")), 1)
    assert "its results cannot be read" in failure.text
