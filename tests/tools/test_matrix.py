"""scripts/matrix.py does not take for passed what did not run to its end."""

from __future__ import annotations

import environments
import matrix
import pytest
from launched import wait_until_gone

REPORT = '<testsuites><testsuite tests="3" skipped="1" failures="0" errors="0"/></testsuites>'
ALL_WELL = {"passed": 2, "skipped": 1, "failed": 0}


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Makes an interpreter whose pytest writes a report and then does what it is told."""
    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    (tmp_path / "row").mkdir()

    def make(then, report=REPORT):
        path = tmp_path / "python"
        to = '"${3#--junitxml=}"'
        path.write_text(f"#!/bin/sh\n{f'echo {report!r} > {to}' if report else ''}\n{then}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.mark.parametrize(
    ("then", "report", "wanted"),
    [
        ("exit 0", REPORT, ALL_WELL),
        ("exit 5", REPORT, {"passed": 0, "skipped": 0, "failed": 0}),
        ("kill -SEGV $$", REPORT, ALL_WELL | {"failed": 1}),
        ("exit 3", "", {"passed": 0, "skipped": 0, "failed": 1}),
    ],
)
def test_a_run_counts_as_it_ended(fake, then, report, wanted):
    assert matrix.counted(fake(then, report), "row", 0, []) == wanted


@pytest.mark.slow
def test_a_run_that_does_not_end_fails(fake, monkeypatch, tmp_path):
    monkeypatch.setattr(matrix, "TIMEOUT_S", 10)  # in which a shell begins
    pids = tmp_path / "pids"
    stays = fake(f"sleep 60 & echo $$ $! >{pids}; wait", "")
    assert matrix.counted(stays, "row", 0, [])["failed"] == 1
    assert "ended after 10 s" in (tmp_path / "row" / "log0.txt").read_text()
    shell, sleep = map(int, pids.read_text().split())
    wait_until_gone([shell, sleep])


def test_a_row_without_a_test_fails_and_the_users_choice_is_the_last(fake, monkeypatch):
    given = []

    def counted(python, name, number, arguments):
        given.append(arguments)
        return dict.fromkeys(("passed", "skipped", "failed"), 0)

    name = "mxnet-1.9.1"
    monkeypatch.setitem(matrix.ROWS, name, matrix.ROWS[name]._replace(newest_python=(99, 0)))
    monkeypatch.setattr(environments, "installed", lambda *_, **__: fake("exit 0", ""))
    monkeypatch.setattr(matrix, "counted", counted)
    outcome = matrix.run(name, None, ["-k", "trainer"])
    assert outcome["failed"] == 1
    assert all(arguments[-2:] == ["-k", "trainer"] for arguments in given)


def test_rows_that_are_not_run_keep_what_they_had(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "TABLE", tmp_path / "matrix.md")
    first, second, third = list(matrix.ROWS)[:3]
    matrix.TABLE.write_text(matrix.table({first: {"passed": 11}, third: {"passed": 13}}))
    matrix.TABLE.write_text(matrix.table({second: {"passed": 12}, third: {"passed": 23}}))
    found = [row.split(" | ") for row in matrix.TABLE.read_text().splitlines()]
    assert [(row[0], row[2]) for row in found[-3:]] == [
        (f"| {first}", "11"),
        (f"| {second}", "12"),
        (f"| {third}", "23"),
    ]
