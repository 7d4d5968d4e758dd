"""scripts/clients.py compares what was computed, and takes for passed only what came to its end."""

from __future__ import annotations

import subprocess
import sys

import client_results
import client_rows
import clients
import environments
import numpy
import pytest
from launched import wait_until_gone

WEIGHTS = numpy.linspace(1, 2, 6, dtype="float32").reshape(2, 3)
ROW = client_rows.Training(
    client="numpy", environment="fsdp2", what="a test", ours="", theirs="", limit=1e-5
)
NAME = "fsdp2"


def write(folder, backend, ranks):
    """Results of a training."""
    folder.mkdir(exist_ok=True)
    for rank, arrays in enumerate(ranks):
        numpy.savez(folder / f"rank{rank}.npz", backend=backend, **arrays)


def verdict(folder, ours, theirs, row=ROW, backend="kolovod"):
    write(folder / "ours", backend, ours)
    write(folder / "theirs", "gloo", theirs)
    return client_results.compared(folder / "ours", folder / "theirs", row)


def rank(weights=WEIGHTS, **further):
    return {"weights.net": weights, "loss": numpy.float64(0.25), **further}


def test_equal_bits(tmp_path):
    found = verdict(tmp_path, 2 * [rank()], 2 * [rank()])
    assert found.problem == ""
    assert found.equal == "bit for bit, 2 arrays"
    norm = numpy.sqrt((WEIGHTS.astype(float) ** 2).sum())
    assert found.ours == found.theirs == f"loss 0.25, norm of 6 weights {norm:.12g}"


def test_what_ranks_need_not_agree_on(tmp_path):
    ranks = [rank(**{"rank.mine": numpy.arange(3) + number}) for number in range(2)]
    assert verdict(tmp_path, ranks, ranks).problem == ""
    assert "rank.mine of rank 1" in verdict(tmp_path, 2 * [ranks[0]], ranks).problem


@pytest.mark.parametrize(("change", "is_close"), [(1e-6, True), (1e-4, False)])
def test_a_limit_is_relative(tmp_path, change, is_close):
    small = 1e-3 * WEIGHTS
    nearly = small * numpy.float32(1 + change)
    found = verdict(tmp_path, 2 * [rank(nearly)], 2 * [rank(small)])
    assert found.equal.startswith("to ") == is_close
    assert ("weights.net of rank 0 differs by" in found.problem) != is_close
    strict = client_rows.Training(client="", environment="", what="", ours="", theirs="")
    assert (
        "allowed is 0" in verdict(tmp_path, 2 * [rank(nearly)], 2 * [rank(small)], strict).problem
    )


def test_weights_of_no_influence(tmp_path):
    ours, theirs = (rank(**{"weights.none": numpy.full(2, x, "float32")}) for x in (9e-8, -9e-8))
    found = verdict(tmp_path, 2 * [ours], 2 * [theirs])
    assert found.equal == "to 9e-06 (limit 1e-05)"
    assert "none" in verdict(tmp_path, 2 * [rank(none=ours["weights.none"])],
                             2 * [rank(none=theirs["weights.none"])]).problem  # fmt: skip


BAD = {
    "a rank's file": ([rank()], "rank 1 has written nothing"),
    "equal ranks": ([rank(), rank(WEIGHTS + 1)], "weights.net of rank 1 is not that of rank 0"),
    "numbers": (2 * [rank(numpy.full((2, 3), numpy.nan))], "weights.net of rank 0 is not finite"),
    "weights": (2 * [{"loss": numpy.float64(1)}], "rank 0 has written no weights"),
    "the same names": (2 * [rank(further=numpy.ones(2))], "not in both: further"),
    "the same type": (2 * [rank(WEIGHTS.astype(float))], "weights.net of rank 0 differs by inf"),
}


@pytest.mark.parametrize("lacking", BAD)
def test_lacking(tmp_path, lacking):
    ours, problem = BAD[lacking]
    assert problem in verdict(tmp_path, ours, 2 * [rank()]).problem


def test_another_backend_than_the_one_that_is_tried(tmp_path):
    found = verdict(tmp_path, 2 * [rank()], 2 * [rank()], backend="gloo")
    assert found.problem == "rank 0 has used gloo, not kolovod"


SAVE = (
    "import sys, numpy; "
    "[numpy.savez(sys.argv[1] + f'/rank{{r}}.npz', backend=sys.argv[2], **{{'weights.w': "
    "numpy.arange(3.0) * float(sys.argv[3])}}) for r in range(2)]"
)


def training(ours="", theirs="", factor=1):
    """A row whose clients are one line of Python, after commands that are the shell's."""
    save = f'{{python}} -c "{SAVE}" {{out}} '
    return client_rows.Training(
        client="numpy",
        environment=NAME,
        what="a | b",
        ours=f"{ours}\n{save}kolovod {factor}",
        theirs=f"{theirs}\n{save}gloo 1",
        before="echo made once >made",
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a row in place of one that there is, with the interpreter of the tests."""
    monkeypatch.setattr(clients, "FOLDER", tmp_path)
    monkeypatch.setattr(clients, "TABLE", tmp_path / "clients.md")
    monkeypatch.setattr(environments, "installed", lambda *_, **__: sys.executable)
    wheel = tmp_path / "a.whl"
    wheel.touch()
    monkeypatch.setattr(sys, "argv", ["clients.py", str(wheel), "--only", NAME])

    def start(row):
        monkeypatch.setitem(clients.ROWS, NAME, row)
        code = clients.main()
        lines = clients.TABLE.read_text().splitlines()
        return code, next(line for line in lines if line.startswith(f"| {NAME} |"))

    return start


def test_a_row_that_passes(run):
    code, line = run(training(ours="grep once {shared}/made", theirs='[ -z "$(ls)" ]'))
    assert code == 0
    assert line.count("norm of 3 weights 2.2360679775") == 2
    assert "| a \\| b |" in line
    assert "| bit for bit, 1 arrays |" in line


def test_a_row_with_other_numbers(run):
    code, line = run(training(factor=1.5))
    assert code == 1
    assert "**no: weights.w of rank 0 differs by 5.0e-01, allowed is 0e+00**" in line


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_a_client_that_fails(run, side, capfd):
    code, line = run(training(**{side: "echo what it says; exit 7"}))
    assert code == 1
    who = {"ours": "with Kolovod", "theirs": "gloo"}[side]
    assert f"**{who}: ended with 7**" in line
    assert "what it says" in capfd.readouterr().out


@pytest.mark.slow
def test_a_client_that_does_not_end(run, monkeypatch):
    monkeypatch.setattr(clients, "TIMEOUT_S", 10)  # in which a shell begins
    monkeypatch.setattr(environments, "GRACE_S", 0.2)
    pids = clients.FOLDER / "pids"
    stays = f"trap '' TERM; sleep 60 & echo $$ $! >{pids}; wait"
    code, line = run(training(ours=stays))
    assert code == 1
    assert f"with Kolovod: ended with {environments.TIMED_OUT}" in line
    shell, sleep = map(int, pids.read_text().split())
    wait_until_gone([shell, sleep])


def test_a_reference_that_aborts_may_try_again_but_we_may_not(run):
    once = f"if mkdir ../been; then echo {clients.GLOO_ABORTS}; exit 134; fi"
    assert run(training(theirs=once))[0] == 0
    (clients.FOLDER / NAME / NAME / "been").rmdir()
    code, line = run(training(ours=once))
    assert code == 1
    assert "ended with 134" in line


def test_the_wheel_is_installed_last_and_alone(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: calls.append(command))
    environments.installed(
        tmp_path, tmp_path / "a.whl", ["wanted"], pip="pip<24", without_dependencies=["stubborn"]
    )
    assert [sys.executable, "-m", "venv", str(tmp_path / "venv")] == calls[0]
    wheel = str(tmp_path / "a.whl")
    wanted = [["pip<24"], [wheel, "wanted"], ["--no-deps", wheel, "stubborn"]]
    assert [call[-len(end) :] for call, end in zip(calls[1:], wanted, strict=True)] == wanted


def test_what_cannot_be_installed_fails(run, monkeypatch):
    def refuse(*_, **__):
        raise subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setattr(environments, "installed", refuse)
    code, line = run(training())
    assert code == 1
    assert "not installed" in line


@pytest.mark.parametrize(
    ("ours", "theirs", "code"),
    [
        ({"passed": 3, "skipped": 1, "failed": 0}, {"passed": 2, "skipped": 0, "failed": 1}, 0),
        ({"passed": 3, "skipped": 1, "failed": 1}, {"passed": 3, "skipped": 0, "failed": 0}, 1),
        ({"passed": 0, "skipped": 4, "failed": 0}, {"passed": 3, "skipped": 0, "failed": 0}, 1),
    ],
)
def test_a_clients_own_tests(run, monkeypatch, ours, theirs, code):
    counts = iter([ours, theirs])
    monkeypatch.setattr(clients, "unpacked", lambda *_: None)
    monkeypatch.setattr(environments, "counted", lambda *_, **__: next(counts))
    row = client_rows.ROWS["ignite-tests"]
    found, line = run(row)
    assert found == code
    assert f"{ours['passed']} passed, {ours['skipped']} skipped, {ours['failed']} failed" in line


def test_every_row_can_be_filled_in():
    for name, row in client_rows.ROWS.items():
        assert row.environment in client_rows.ENVIRONMENTS, name
        if isinstance(row, client_rows.Training):
            for text in (row.before, row.ours, row.theirs):
                filled = text.format(out="OUT", here=clients.PROGRAMS, python="P", shared="SHARED")
                assert text == "" or "OUT" in filled, name
                for word in filled.replace("\n", " ").split():
                    if word.startswith(str(clients.PROGRAMS)):
                        assert (clients.PROGRAMS / word).exists(), word
