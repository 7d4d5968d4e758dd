"""kolovod.launch: the command, its ranks and how they end. Everything here is a real process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launched import (
    DEADLINE_S,
    KOLOVOD,
    is_running,
    launcher,
    read_pids,
    run,
    run_code,
    wait_until_gone,
)
from slow import slow_but

from kolovod.errors import InvalidArgumentError
from kolovod.launch import supervisor
from kolovod.launch.job import Job, JobOptions
from kolovod.launch.local import HostRanks, Order

pytestmark = pytest.mark.environments

# --- the command line ---


def test_version() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("kolovod ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: kolovod"),
        (["run", "true"], "-np N, -H or --hostfile must say"),
        (["run", "-np", "2"], "no COMMAND"),
        (["run", "-np", "0", "true"], "'0': expected a number from 1 to 1024"),
        (["run", "-np", "two", "true"], "'two': expected a number"),
        (
            ["run", "-np", "1", "--fusion-bytes", "x", "true"],
            "--fusion-bytes='x': expected a whole",
        ),
        (["run", "-np", "1", "--backend", "ucx", "true"], "--backend='ucx': expected one of"),
        (["run", "-np", "1", "-x", "NAME", "true"], "-x 'NAME': expected NAME=VALUE"),
        (["run", "-np", "1", "-x", "KOLOVOD_SECRET=s", "true"], "can be read by everybody"),
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


def test_a_script_that_is_no_program(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('never')")
    for action in (["run", "-np", "2"], ["check"]):
        done = run(*action, "--", str(script), "--lr", "0 1")
        assert done.returncode == 127
        assert done.stderr == (
            f"kolovod: {script} is no program: give python {script} --lr '0 1'\n"
        )


def test_ranks_that_never_meet_are_noticed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained')")
    done = run("run", "-np", "2", "--", sys.executable, str(script))
    assert done.returncode == 0
    assert f"no rank has called init(): each of the 2 has run {script} for itself" in done.stderr
    assert f"'kolovod init {script}' shows" in done.stderr
    assert run("run", "-np", "2", "--quiet", "--", sys.executable, str(script)).stderr == ""
    assert run("run", "-np", "1", "--", sys.executable, str(script)).stderr == ""
    script.write_text("import kolovod; kolovod.init()")
    assert run("run", "-np", "2", "--", sys.executable, str(script)).stderr == ""


def test_who_leaves_before_the_others_is_named() -> None:
    code = """
import kolovod, numpy
kolovod.init()
for step in range(3 - rank):
    kolovod.allreduce(numpy.ones(3), name="gradient")
"""
    done = run_code(2, code)
    assert done.returncode == 1
    assert re.search(r"the first to fail was rank 0 \(pid \d+\)", done.stderr)
    assert re.search(
        r"before that rank 1 \(pid \d+\) had ended with exit code 0, while rank 0 \(pid \d+\) "
        "still needed it: does one rank have fewer steps",
        done.stderr,
    )


def test_a_command_that_cannot_run(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = run("run", "-np", "1", str(script))
    assert done.returncode == 127
    assert "[0]<stderr>:kolovod: command not found" in done.stderr


def test_too_few_files_that_may_be_open() -> None:
    """Ranks that run already end, and what to do is said."""
    limited = ["bash", "-c", 'ulimit -n 24; exec "$@"', "bash", *KOLOVOD]
    done = subprocess.run(
        [*limited, "run", "-np", "8", "sleep", "100"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1
    assert "may open 24 files, and a launcher opens several for each rank" in done.stderr
    assert "Traceback" not in done.stderr


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


@pytest.mark.parametrize(
    "signum", slow_but([signal.SIGKILL], [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
)
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


def test_ctrl_c_ends_every_wait(tmp_path: Path) -> None:
    """All but one wait in init() for that one, and later in an operation."""
    code = """
import numpy, kolovod, threading
def tell_when_it_waits():
    main, before, same = threading.main_thread().ident, None, 0
    while same < 20:
        frame = sys._current_frames()[main]
        at = frame.f_code.co_filename, frame.f_lasti
        waits = 'kolovod' in at[0] or at[0] == wait.__code__.co_filename  # in a verb
        same = same + 1 if at == before and waits else 0
        before = at
        time.sleep(0.01)
    print('pid', os.getpid(), flush=True)
def wait():
    if rank == 0:
        print('pid', os.getpid(), flush=True)
        time.sleep(60)
    threading.Thread(target=tell_when_it_waits).start()
try:
    if WAIT_IN_INIT:
        wait()
    kolovod.init()
    wait()
    kolovod.allreduce(numpy.ones(3))
except KeyboardInterrupt:
    open(f'FOLDER/{rank}', 'w').close()
    while len(os.listdir('FOLDER')) < 3:  # the others would hear of this one's end
        time.sleep(0.01)
    raise
"""
    for wait_in_init in (True, False):
        folder = tmp_path / str(wait_in_init)
        folder.mkdir()
        each = code.replace("WAIT_IN_INIT", str(wait_in_init)).replace("FOLDER", str(folder))
        with launcher(3, each) as process:
            read_pids(process, 3)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130
        # Nobody had to be killed.
        assert set(re.findall(r"\[(\d)\]<stderr>:KeyboardInterrupt", err)) == {"0", "1", "2"}


def test_a_second_signal_kills_ranks_that_do_not_listen() -> None:
    code = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('pid', os.getpid(), flush=True)
time.sleep(60)
"""
    with launcher(2, code) as process:
        pids = read_pids(process, 2)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert "SIGTERM: ending 2 ranks" in process.stderr.readline()
        time.sleep(0.5)  # two at a time are one
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143
    assert "SIGTERM again: killing 2 ranks" in err
    wait_until_gone(pids)


def test_after_the_grace_a_rank_that_does_not_listen_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", 0.3)
    code = """
import os, signal, sys, time
if os.environ['KOLOVOD_RANK'] == '1':
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    sys.exit(5)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], 'w').close()
time.sleep(60)
"""
    with Job(2, JobOptions()) as job:
        job.start(lambda rank: [sys.executable, "-c", code, str(tmp_path / "does not listen")])
        outcome = job.wait(timeout_s=DEADLINE_S)
    assert outcome.late == ()
    assert outcome.exit_code(keep_going=False) == 5
    assert [(end.rank, end.code) for end in outcome.ended] == [(1, 5), (0, -signal.SIGKILL)]


def test_a_signal_to_some_ranks_reaches_what_they_have_started_and_nobody_else() -> None:
    # It goes on when the signal has ended its child first.
    code = "import subprocess, time; subprocess.run(['sleep', '60']); time.sleep(60)"
    ranks = HostRanks(lambda *_: None)
    try:
        ranks.start([Order(number, [sys.executable, "-c", code], {}) for number in range(3)])
        processes = {n: psutil.Process(pid) for n, pid in ranks.pids().items()}
        deadline = time.monotonic() + DEADLINE_S
        while not all(process.children() for process in processes.values()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        children = {n: process.children()[0].pid for n, process in processes.items()}
        ranks.send(signal.SIGTERM, [0, 2])
        wait_until_gone([children[0], children[2], processes[0].pid, processes[2].pid])
        assert is_running(children[1])
        assert {end.rank: end.code for end in ranks.collect()} == {0: -15, 2: -15}
        assert ranks.running == {1}
    finally:
        ranks.close()


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


def test_a_full_disk_does_not_stop_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "stdout").symlink_to("/dev/full")
    code = "for i in range(300): print('x' * 1000)\nprint('the end')"  # more than a pipe holds
    done = run_code(2, code, "--output-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the end") == 2
    named = f"kolovod: {tmp_path}/rank.0/stdout is incomplete: [Errno 28] No space left on device"
    assert done.stderr.count(named) == 1
    assert done.stderr.count("incomplete") == 1
    assert (tmp_path / "rank.1" / "stdout").read_text().endswith("the end\n")


def test_a_job_with_a_setting_that_is_refused_opens_nothing(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    wrong = JobOptions({"KOLOVOD_LATE_REPORT_S": "soon"}, output_dir=tmp_path / "logs")
    with pytest.raises(InvalidArgumentError, match="KOLOVOD_LATE_REPORT_S"):
        Job(2, wrong)
    assert os.listdir("/proc/self/fd") == before
    assert not (tmp_path / "logs").exists()
