"""kolovod.blame: who is named when one failure has made others fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from launched import run_code

from kolovod import blame


@pytest.fixture
def file(monkeypatch):
    fd, value = blame.new_file()
    monkeypatch.setenv(blame.VARIABLE, value)
    yield fd
    os.close(fd)


def test_a_rank_notes_whom_it_blames_and_may_take_it_back(file):
    assert blame.read(file) is None
    blame.note(1023)
    assert blame.read(file) == 1023
    blame.note(7)
    assert blame.read(file) == 7
    blame.note(None)
    assert blame.read(file) is None


def test_another_process_finds_the_file_without_its_descriptor(file):
    code = "from kolovod import blame; blame.note(3)"
    subprocess.run([sys.executable, "-c", code], check=True, close_fds=True)
    assert blame.read(file) == 3


def test_members_of_a_world_have_the_launchers_numbers(file, monkeypatch):
    monkeypatch.setattr(blame, "_own", -1)
    monkeypatch.setattr(blame, "_members", ())
    blame.note_member(0)  # in no world
    assert blame.read(file) is None
    blame.formed(1, (2, 4, 5))
    for rank, expected in ((0, 2), (1, 2), (2, 5), (3, 5), (None, 5)):  # 1 is this rank itself
        blame.note_member(rank)
        assert blame.read(file) == expected


@pytest.mark.parametrize("other", ["no file", "another name", "another file"])
def test_a_path_that_is_not_the_file_is_not_written_to(other, file, monkeypatch, tmp_path):
    name, _, path = os.environ[blame.VARIABLE].partition(":")
    ordinary = tmp_path / "file"
    ordinary.write_bytes(b"of the user")
    with open(ordinary, "r+b") as opened:
        wrong = {
            "no file": f"{name}:/proc/{os.getpid()}/fd/999999",
            "another name": f"kolovod-blame-0:{path}",
            "another file": f"{name}:/proc/{os.getpid()}/fd/{opened.fileno()}",
        }
        monkeypatch.setenv(blame.VARIABLE, wrong[other])
        blame.note(1)
    assert ordinary.read_bytes() == b"of the user"
    assert blame.read(file) is None


@pytest.mark.parametrize(
    "content", [b"", b"1", b"1       2", b"-1      ", b"x       ", b" " * 8, b"1.0     "]
)
def test_what_is_no_number_blames_nobody(content):
    assert blame.parse(content) is None


@pytest.mark.parametrize(
    ("blamed", "running", "well", "named"),
    [
        ({0: None}, {1, 2}, (), (0, False)),  # its own failure
        ({0: 1}, {1, 2}, (), (0, True)),  # rank 1 is about to end
        ({0: 1, 1: None}, {2}, (), (1, False)),
        ({0: 1, 1: 2}, {2}, (), (1, True)),
        ({0: 1, 1: 2, 2: None}, (), (), (2, False)),
        ({0: 1, 1: 0}, {2}, (), (1, False)),  # each other
        ({0: 0}, (), (), (0, False)),
        ({0: 1, 1: None}, {2}, {1}, (0, False)),  # rank 1 has only left
        ({0: 77}, {1}, (), (0, False)),
    ],
)
def test_the_cause_is_found_by_following_who_blames_whom(blamed, running, well, named):
    assert blame.first_cause(0, blamed, running, well) == named


SLOW_TO_END = """
import atexit, select
rank_0 = []
if rank == 1:  # as a framework that goes away; after the world is left
    atexit.register(lambda: select.select(rank_0, [], [], 60))
import numpy as np, kolovod
kolovod.init()
rank_0.append(os.pidfd_open(kolovod.allgather_object(os.getpid())[0]))
"""


@pytest.mark.parametrize(
    ("how", "code"), [("sys.exit(7)", 7), ("raise ValueError('of rank 1')", 1), ("sys.exit(0)", 1)]
)
@pytest.mark.parametrize("caught", [False, True])
def test_a_rank_that_fails_because_of_another_is_not_named_for_it(how, code, caught):
    """Rank 0 has ended before rank 1, whose failure was first."""
    wait = "kolovod.allreduce(np.ones(3), name='x')"
    if caught:
        wait = f"try: {wait}\n  except Exception as e: print(e); sys.exit(1)"
    script = f"{SLOW_TO_END}\nif rank == 1:\n  {how}\nelse:\n  {wait}"
    done = run_code(2, script)
    assert done.returncode == code
    culprit = 0 if how == "sys.exit(0)" else 1  # which leaves, and that is no failure
    first = next(line for line in done.stderr.splitlines() if line.startswith("kolovod: "))
    assert re.match(rf"kolovod: rank {culprit} \(pid \d+\) ended with exit code {code}", first)
    assert f"the first to fail was rank {culprit} " in done.stderr
    if how.startswith("raise"):
        assert done.stderr.rstrip().endswith("ValueError: of rank 1")  # its last lines


@pytest.mark.slow
def test_whom_a_rank_blamed_in_a_world_that_is_gone_is_forgotten():
    script = f"""{SLOW_TO_END}
if rank == 2:
    for other in (0, 1):  # who may be in the first operation still
        kolovod.recv(np.empty(1), other)
    os.kill(os.getpid(), 9)
try:
    kolovod.send(np.ones(1), 2)
    kolovod.allreduce(np.ones(3), name='x')
except kolovod.errors.RankLostError:
    kolovod.shutdown()
    kolovod.init(comm=[0, 1])
kolovod.allreduce(np.ones(3), name='y')
sys.exit(5 if rank == 0 else 0)
"""
    done = run_code(3, script, "--keep-going")
    assert "the others go on" in done.stderr
    assert re.search(r"rank 0 \(pid \d+\) ended with exit code 5", done.stderr)
    assert done.returncode == 0  # rank 1's
    fails = script.replace("5 if rank == 0 else 0", "5")
    assert run_code(3, fails, "--keep-going").returncode == 137  # the first failure of all


DIES_WHILE_IT_JOINS = """
import kolovod as kv, kolovod.lifecycle
if rank == 0:
    sys.exit()
if rank == 2:
    kolovod.lifecycle.make_engine = lambda *_, **__: os._exit(9)
try:
    kv.init(comm=[1, 2])
except kv.errors.RankLostError as error:
    print('lost', error.rank, error, flush=True)
    print('blames', open(os.environ['KOLOVOD_BLAME'].split(':')[1]).read(), flush=True)
"""


def test_who_dies_in_a_world_of_some_of_the_ranks_is_blamed_by_the_launchers_number():
    said = run_code(3, DIES_WHILE_IT_JOINS, "--keep-going").stdout
    assert re.search(r"lost 2 rank 1 on host \w+ \(pid \d+, launched as rank 2\)", said), said
    assert re.search(r"blames 2\b", said), said
