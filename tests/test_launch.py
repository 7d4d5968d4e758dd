"""kolovod.launch: the command, its ranks and how they end. Everything here is a real process."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kolovod.errors import InvalidArgumentError
from kolovod.launch import mpirun, spawn
from kolovod.launch.mpirun import mpi_command, started_by_mpi
from kolovod.launch.output import LineSplitter
from kolovod.launch.place import Place, local_and_cross, read_place, thread_limits
from kolovod.launch.spawn import Job, JobOptions

KOLOVOD = [sys.executable, "-m", "kolovod"]
DEADLINE_S = 30


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``kolovod`` with these arguments, to its end."""
    return subprocess.run(
        [*KOLOVOD, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, **variables},
    )


def run_code(
    size: int, code: str, *flags: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """``code`` as each of ``size`` ranks; ``rank`` is its number there."""
    code = f"import os, sys, time, signal; rank = int(os.environ['KOLOVOD_RANK'])\n{code}"
    return run("run", "-np", str(size), *flags, "--", sys.executable, "-c", code, **variables)


@contextlib.contextmanager
def launcher(size: int, code: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A running launcher; killed at the end if it is still there."""
    code = f"import os, sys, time, signal; rank = int(os.environ['KOLOVOD_RANK'])\n{code}"
    process = subprocess.Popen(
        [*KOLOVOD, "run", "-np", str(size), *flags, "--", sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def read_pids(process: subprocess.Popen[str], count: int) -> list[int]:
    """The numbers after "pid" in the next lines of the launcher's output."""
    assert process.stdout is not None
    pids: list[int] = []
    while len(pids) < count:
        line = process.stdout.readline()
        assert line, "the launcher ended"
        pids += [int(found) for found in re.findall(r"pid (\d+)", line)]
    return pids


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while alive := [
        p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != "zombie"
    ]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.02)


# --- the command line ---


def test_version() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("kolovod ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: kolovod"),
        (["run", "true"], "-np"),
        (["run", "-np", "2"], "no COMMAND"),
        (["run", "-np", "0", "true"], "'0': expected a number from 1 to 1024"),
        (["run", "-np", "two", "true"], "'two': expected a number"),
        (
            ["run", "-np", "1", "--fusion-bytes", "x", "true"],
            "--fusion-bytes='x': expected a whole",
        ),
        (["run", "-np", "1", "--backend", "gloo", "true"], "--backend='gloo': expected one of"),
        (["run", "-np", "1", "-x", "NAME", "true"], "-x 'NAME': expected NAME=VALUE"),
        (["run", "-np", "1", "-x", "KOLOVOD_CHUNK_SLOTS=1", "true"], "KOLOVOD_CHUNK_SLOTS='1'"),
    ],
)
def test_a_wrong_command_line_is_named(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_that_does_not_exist() -> None:
    done = run("run", "-np", "2", "no-such-command")
    assert done.returncode == 127
    assert done.stderr == "kolovod: command not found: no-such-command\n"


def test_a_command_that_cannot_run(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = run("run", "-np", "1", str(script))
    assert done.returncode == 127
    assert "[0]<stderr>:kolovod: command not found" in done.stderr


def test_options_of_the_command_are_its_own() -> None:
    code = "import sys; print(sys.argv[1:])"
    done = run("run", "-np", "1", sys.executable, "-c", code, "--", "-np", "3", "--version")
    assert done.stdout == "[0]<stdout>:['--', '-np', '3', '--version']\n"


# --- what a rank sees ---


def test_output_is_marked_by_rank_and_stream() -> None:
    done = run_code(2, "print('to out', rank); print('to err', rank, file=sys.stderr)")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[{r}]<stdout>:to out {r}" for r in (0, 1)]
    assert sorted(done.stderr.splitlines()) == [f"[{r}]<stderr>:to err {r}" for r in (0, 1)]


def test_the_environment_tells_the_place() -> None:
    names = "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE"
    code = (
        f"print(*(os.environ[p + n] for p in ('KOLOVOD_', 'HOROVOD_') for n in '{names}'.split()))"
    )
    done = run_code(3, code)
    expected = [f"[{r}]<stdout>:{r} 3 {r} 3 0 1 {r} 3 {r} 3 0 1" for r in range(3)]
    assert sorted(done.stdout.splitlines()) == expected


def test_the_secret_is_on_no_command_line() -> None:
    code = """
secret = os.environ['KOLOVOD_SECRET'].encode()
pids = [p for p in os.listdir('/proc') if p.isdecimal()]
def cmdline(pid):
    try:
        return open(f'/proc/{pid}/cmdline', 'rb').read()
    except OSError:
        return b''
print(len(secret), any(secret in cmdline(pid) for pid in pids))
"""
    assert run_code(1, code).stdout == "[0]<stdout>:64 False\n"


def test_variables_and_knobs_reach_the_ranks() -> None:
    code = "print(os.environ['A'], os.environ['KOLOVOD_FUSION_BYTES'], os.environ['OUTER'])"
    done = run_code(1, code, "-x", "A=b=c", "--fusion-bytes", "4096", OUTER="too")
    assert done.stdout == "[0]<stdout>:b=c 4096 too\n"


def test_compute_threads_are_shared_out_unless_the_user_did() -> None:
    code = "print(os.environ['OMP_NUM_THREADS'], os.environ.get('MKL_NUM_THREADS'))"
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    unset = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "")
    assert f"[0]<stdout>:{share} {share}\n" in run_code(2, code, **unset).stdout
    chosen = run_code(1, "print(os.environ['OMP_NUM_THREADS'])", OMP_NUM_THREADS="7")
    assert chosen.stdout == "[0]<stdout>:7\n"


def test_timestamps_and_output_files(tmp_path: Path) -> None:
    code = "print('é', rank); print('err', file=sys.stderr)"
    done = run_code(2, code, "--timestamps", "--output-dir", str(tmp_path / "logs"))
    assert re.search(r"^\d{4}-\d\d-\d\dT[\d:.]+[+-]\d\d:\d\d \[1\]<stdout>:é 1$", done.stdout, re.M)
    assert (tmp_path / "logs" / "rank.1" / "stdout").read_text() == "é 1\n"
    assert (tmp_path / "logs" / "rank.0" / "stderr").read_text() == "err\n"


# --- how it ends ---


def test_the_first_failing_rank_is_named_and_ends_the_job() -> None:
    done = run_code(3, "sys.exit(3) if rank == 1 else time.sleep(60)")
    assert done.returncode == 3
    assert re.search(r"kolovod: rank 1 \(pid \d+\) ended with exit code 3; ending", done.stderr)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_killed_rank_is_named_with_its_signal(signum: signal.Signals) -> None:
    code = f"os.kill(os.getpid(), {int(signum)}) if rank == 2 else time.sleep(60)"
    done = run_code(4, code)
    assert done.returncode == 128 + signum
    assert re.search(
        rf"rank 2 \(pid \d+\) was killed by signal {int(signum)} \({signum.name}", done.stderr
    )


def test_ctrl_c_reaches_the_ranks_and_is_the_exit_code() -> None:
    code = """
try:
    print('pid', os.getpid(), flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print('interrupted', rank)
"""
    with launcher(2, code) as process:
        pids = read_pids(process, 2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert sorted(out.splitlines()) == [f"[{r}]<stdout>:interrupted {r}" for r in (0, 1)]
    assert "kolovod: SIGINT: ending 2 ranks" in err
    wait_until_gone(pids)


def test_ctrl_c_ends_every_wait() -> None:
    """One rank waits for the others in init(), and later all but one in an operation."""
    code = """
import numpy, kolovod
if rank == 0 and WAIT_IN_INIT:
    time.sleep(60)
kolovod.init()
print('pid', os.getpid(), flush=True)
if rank == 0:
    time.sleep(60)
kolovod.allreduce(numpy.ones(3))
"""
    for wait_in_init, printing in ((True, 0), (False, 3)):
        with launcher(3, code.replace("WAIT_IN_INIT", str(wait_in_init))) as process:
            read_pids(process, printing)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=4)  # less than the grace before SIGKILL
        assert process.returncode == 130
        # Who is interrupted while it still starts says so in its own way; and who hears of it from
        # another rank first, too. In any case nobody has to be killed.
        assert "killing" not in err
        assert "KeyboardInterrupt" in err


def test_a_second_signal_kills_ranks_that_do_not_listen() -> None:
    code = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('pid', os.getpid(), flush=True)
time.sleep(60)
"""
    with launcher(2, code) as process:
        pids = read_pids(process, 2)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143
    assert "SIGTERM again: killing 2 ranks" in err
    wait_until_gone(pids)


def test_after_the_grace_a_rank_that_does_not_listen_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spawn, "GRACE_S", 0.3)
    code = """
import os, signal, sys, time
if os.environ['KOLOVOD_RANK'] == '1':
    time.sleep(0.3)
    sys.exit(5)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""
    with Job(2, JobOptions()) as job:
        job.start(lambda rank: [sys.executable, "-c", code])
        outcome = job.wait(timeout_s=DEADLINE_S)
    assert outcome.late == ()
    assert outcome.exit_code(keep_going=False) == 5
    assert [(end.rank, end.code) for end in outcome.ended] == [(1, 5), (0, -signal.SIGKILL)]


GRANDCHILD = """
import subprocess
child = subprocess.Popen(['sleep', '60'], start_new_session=True)
print('pid', child.pid, flush=True)
"""


def test_grandchildren_end_with_the_job() -> None:
    done = run_code(2, f"{GRANDCHILD}\nif rank == 0: time.sleep(0.3); sys.exit(4)\ntime.sleep(60)")
    assert done.returncode == 4
    wait_until_gone([int(pid) for pid in re.findall(r"pid (\d+)", done.stdout)])


def test_what_a_rank_leaves_behind_does_not_outlive_the_job() -> None:
    done = run_code(1, GRANDCHILD)
    assert done.returncode == 0
    wait_until_gone([int(pid) for pid in re.findall(r"pid (\d+)", done.stdout)])


def test_nothing_outlives_a_launcher_that_is_killed() -> None:
    code = f"{GRANDCHILD}\nprint('pid', os.getpid(), flush=True)\ntime.sleep(60)"
    with launcher(2, code) as process:
        pids = read_pids(process, 4)
        process.kill()
        process.wait(timeout=DEADLINE_S)
        wait_until_gone(pids)


def test_keep_going_lets_the_others_finish() -> None:
    code = "os.kill(os.getpid(), 9) if rank == 0 else (time.sleep(0.3), print('done', rank))"
    done = run_code(3, code, "--keep-going")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[{r}]<stdout>:done {r}" for r in (1, 2)]
    assert "rank 0" in done.stderr
    assert "the others go on" in done.stderr
    assert run_code(2, "sys.exit(6)", "--keep-going").returncode == 6


def test_a_job_inside_a_job_ends_with_the_outer_one() -> None:
    inner = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)"
    code = f"""
import subprocess
command = [sys.executable, '-m', 'kolovod', 'run', '-np', '2', sys.executable, '-c', {inner!r}]
subprocess.run(command)
"""
    with launcher(1, code) as process:
        pids = read_pids(process, 2)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143
    wait_until_gone(pids)


def test_a_console_that_goes_away_does_not_stop_the_ranks(tmp_path: Path) -> None:
    code = f"""
for i in range(300):
    print('x' * 1000)
open({str(tmp_path / "done")!r}, 'w').close()
"""
    with launcher(1, code) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=DEADLINE_S) == 0
        process.stdout = None
    assert (tmp_path / "done").exists()


# --- the deciders ---


@given(st.text(alphabet="ab\r\né↻", max_size=40), st.lists(st.integers(0, 80), max_size=6))
def test_lines_do_not_depend_on_where_reads_cut(text: str, cuts: list[int]) -> None:
    data = text.encode()
    whole = LineSplitter().feed(data, final=True)
    splitter = LineSplitter()
    joined: list[str] = []
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    for piece, is_last in [*((piece, False) for piece in pieces), (b"", True)]:
        lines = splitter.feed(piece, final=is_last)
        if splitter.continues:
            joined[-1] += lines.pop(0)
        joined += lines
    assert joined == whole
    assert "".join(whole).rstrip("\n") == text.rstrip("\n")


def test_carriage_returns_end_lines_and_bad_bytes_are_marked() -> None:
    lines = LineSplitter().feed(b"10%\r20%\r\nend\xff\nrest", final=True)
    assert lines == ["10%\r", "20%\r\n", "end�\n", "rest\n"]


def test_an_endless_line_is_cut() -> None:
    splitter = LineSplitter()
    lines = [line for _ in range(40) for line in splitter.feed(b"x" * 10_000)]
    assert 1 <= len(lines) <= 6
    assert all(len(line) <= 100_000 for line in lines)


def test_a_place_survives_the_environment() -> None:
    place = Place(3, 8, 1, 2, 1, 4, "node", "127.0.0.1:5", "s3cret")
    assert read_place(place.environment()) == place
    assert read_place({}) is None
    assert read_place({"KOLOVOD_RANK": "0", "KOLOVOD_SIZE": "1"}) == Place()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"KOLOVOD_SIZE": "2"}, "KOLOVOD_SIZE='2' is set, but KOLOVOD_RANK is not"),
        ({"KOLOVOD_RANK": "0"}, "KOLOVOD_SIZE=''"),
        ({"KOLOVOD_RANK": "x", "KOLOVOD_SIZE": "2"}, "KOLOVOD_RANK='x': expected a whole"),
        ({"KOLOVOD_RANK": "2", "KOLOVOD_SIZE": "2"}, "KOLOVOD_RANK=2 and KOLOVOD_SIZE=2"),
        ({"KOLOVOD_RANK": "0", "KOLOVOD_SIZE": "2"}, "KOLOVOD_STORE is not set"),
        (
            {"KOLOVOD_RANK": "0", "KOLOVOD_SIZE": "2", "KOLOVOD_STORE": "h:1"},
            "KOLOVOD_SECRET is not set",
        ),
    ],
)
def test_a_wrong_place_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        read_place(environ)


def test_local_and_cross_numbers() -> None:
    hosts = ["a", "a", "b", "b", "b", "c"]
    assert [local_and_cross(hosts, rank) for rank in range(6)] == [
        (0, 2, 0, 3),
        (1, 2, 0, 2),
        (0, 3, 1, 3),
        (1, 3, 1, 2),
        (2, 3, 0, 1),
        (0, 1, 2, 3),
    ]


def test_thread_limits() -> None:
    assert thread_limits({}, 4, 2)["OMP_NUM_THREADS"] == "1"
    assert thread_limits({"MKL_NUM_THREADS": "3"}, 2, 8) == {
        "OMP_NUM_THREADS": "4",
        "OPENBLAS_NUM_THREADS": "4",
    }
    assert thread_limits({"OMP_NUM_THREADS": "2"}, 2, 8) == {}


def test_the_command_line_of_mpirun() -> None:
    command = mpi_command("/bin/mpirun", True, 2, ["python", "t.py"], {"A": "b"}, uid=1000)
    assert command[-4:] == ["-np", "2", "python", "t.py"]
    assert "--allow-run-as-root" not in command
    assert command[command.index("-x") + 1] == "A"
    assert "--allow-run-as-root" in mpi_command("m", True, 2, ["t"], {}, uid=0)
    assert mpi_command("m", False, 3, ["t"], {}, uid=0) == ["m", "-prepend-rank", "-np", "3", "t"]
    assert started_by_mpi({"OMPI_COMM_WORLD_SIZE": "2"})
    assert not started_by_mpi({})
    assert not started_by_mpi({"PMI_SIZE": "1"})


def test_without_mpirun_the_backend_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mpirun, "_find_mpirun", lambda: None)
    assert mpirun.run_by_mpi(2, ["true"], {}) == 127
    assert "pip install 'kolovod[mpi]'" in capsys.readouterr().err
