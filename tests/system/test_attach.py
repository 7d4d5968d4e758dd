"""Elastic jobs whose launcher ends: they go on, and ``kolovod attach`` shows them again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_steps import DEADLINE_S, STEPS, until
from launched import KOLOVOD, wait_until_gone

from kolovod.core.runtime_folder import runtime_folder
from kolovod.errors import BootstrapError
from kolovod.launch import folder_locks, job_folders
from kolovod.launch.job_folders import JobFolder
from kolovod.launch.spool import Frame, Spool


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the jobs of this test are, and nobody else's."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@contextlib.contextmanager
def job(folder: Path, np: int = 2, code: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A job that makes steps until it is told; nothing is left of it at the end."""
    process = start("run", "--elastic", "-np", str(np), "--", sys.executable, "-c", STEPS,
                    str(folder), str(code))  # fmt: skip
    try:
        until(lambda: (folder / "step").exists())
        yield process
    finally:
        for kept in job_folders.found():
            kill_agent(kept)  # and so its ranks
            if kept.is_kept():
                os.kill(kept.pid, signal.SIGKILL)
        kill(process)


def kill_agent(kept: JobFolder) -> None:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"serve\0{kept.agent}\0" in (entry / "cmdline").read_text():
                os.kill(int(entry.name), signal.SIGKILL)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*KOLOVOD, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def kill(process: subprocess.Popen[str]) -> str:
    """What it has shown."""
    process.kill()
    out, _ = process.communicate(timeout=DEADLINE_S)
    return out


def steps(folder: Path) -> int:
    return int((folder / "step").read_text().split()[0])


def goes_on(folder: Path) -> None:
    before = steps(folder)
    until(lambda: steps(folder) > before + 40)


def shown(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"step (\d+)$", text, re.MULTILINE)]


@pytest.mark.slow
def test_a_killed_launcher_is_survived_and_the_job_attached_to(folder: Path) -> None:
    """All of the output is shown once, no step is lost, and the exit code is the job's."""
    with job(folder, np=3, code=7) as launcher:
        first = kill(launcher)
        goes_on(folder)
        pid = int((folder / "step").read_text().split()[2])
        os.kill(pid, signal.SIGKILL)  # rank 0, which is replaced though nobody looks
        goes_on(folder)
        (kept,) = job_folders.found()
        again = start("attach", str(kept.pid))
        goes_on(folder)
        (folder / "end").touch()
        second, errors = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 7
    numbers = shown(first) + shown(second)
    assert sorted(set(numbers)) == list(range(20, max(numbers) + 1, 20))
    assert f"(pid {pid}) was killed by signal 9" in errors
    (ended,) = re.findall(r"steps (\d+) (\d+) longest", second)
    assert ended[0] == ended[1]  # each was committed once
    assert not job_folders.found()


@pytest.mark.slow
def test_what_a_job_wrote_that_has_ended_is_shown_later(folder: Path) -> None:
    with job(folder, code=3) as launcher:
        kill(launcher)
        (kept,) = job_folders.found()
        (folder / "end").touch()
        until(lambda: not kept.is_kept())
        done = start("attach")  # it is the only one
        out, _ = done.communicate(timeout=DEADLINE_S)
    assert done.returncode == 3
    assert "steps" in out
    assert not kept.path.exists()


@pytest.mark.slow
def test_a_signal_to_attach_ends_the_job(folder: Path) -> None:
    with job(folder) as launcher:
        pid = int((folder / "step").read_text().split()[2])
        kill(launcher)
        again = start("attach")
        assert again.stdout is not None
        again.stdout.readline()  # it is there
        again.send_signal(signal.SIGTERM)
        _, errors = again.communicate(timeout=DEADLINE_S)
        assert again.returncode == 128 + signal.SIGTERM
        assert "SIGTERM: ending 2 ranks" in errors
        wait_until_gone([pid])


@pytest.mark.slow
def test_another_attach_takes_the_job_over(folder: Path) -> None:
    with job(folder) as launcher:
        again = start("attach")
        out, errors = launcher.communicate(timeout=DEADLINE_S)
        assert launcher.returncode == 128 + signal.SIGHUP  # how the job ends is not known yet
        assert "is shown by another kolovod attach now; it goes on" in errors
        goes_on(folder)
        (folder / "end").touch()
        more, _ = again.communicate(timeout=DEADLINE_S)
    numbers = shown(out) + shown(more)
    assert sorted(set(numbers)) == list(range(20, max(numbers) + 1, 20))


@pytest.mark.slow
def test_a_killed_daemon_is_survived_and_followed_by_another(folder: Path) -> None:
    """Whoever looks on sees all of it; a rank that is lost then is replaced."""
    with job(folder, np=3, code=7) as launcher:
        (kept,) = job_folders.found()
        for _ in range(2):
            os.kill(kept.pid, signal.SIGKILL)
            goes_on(folder)
            kept = next_daemon(kept)
        pid = int((folder / "step").read_text().split()[2])
        os.kill(pid, signal.SIGKILL)
        goes_on(folder)
        (folder / "end").touch()
        out, errors = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 7, errors
    numbers = shown(out)
    assert sorted(set(numbers)) == list(range(20, max(numbers) + 1, 20))
    assert "was killed; another one goes on" in errors  # the second may be killed before it is seen
    assert "this launcher goes on with 3 processes of an earlier one" in errors
    assert "slot 0 failed on host localhost and is started again" in errors
    (ended,) = re.findall(r"steps (\d+) (\d+) longest", out)
    assert ended[0] == ended[1]  # each was committed once
    assert not job_folders.found()


@pytest.mark.slow
def test_daemons_that_are_killed_again_and_again_have_followers(folder: Path) -> None:
    """However short their lives are, since each could start."""
    with job(folder) as launcher:
        (kept,) = job_folders.found()
        assert launcher.stderr is not None
        for _ in range(5):
            os.kill(kept.pid, signal.SIGKILL)
            kept = next_daemon(kept)
            for line in launcher.stderr:
                if "this launcher goes on with 2 processes" in line:
                    break
        goes_on(folder)
        (folder / "end").touch()
        _, errors = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, errors


@pytest.mark.slow
def test_who_has_left_is_known_to_the_next_daemon(folder: Path) -> None:
    """Nobody takes the place of a rank that wanted to leave, whoever keeps the job then."""
    with job(folder, np=3) as launcher:
        (kept,) = job_folders.found()
        os.kill(int((folder / "step").read_text().split()[2]), signal.SIGTERM)
        until(lambda: (folder / "step").read_text().split()[1] == "2")
        goes_on(folder)
        os.kill(kept.pid, signal.SIGKILL)
        next_daemon(kept)
        goes_on(folder)
        replace_first(folder)
        goes_on(folder)
        assert (folder / "step").read_text().split()[1] == "2"
        (folder / "end").touch()
        _, errors = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, errors
    assert errors.count("is started again") == 1, errors
    assert "has a place" not in errors


@pytest.mark.slow
def test_a_job_that_ends_between_two_daemons_has_ended_well(folder: Path) -> None:
    """Though none of its ranks is known to the second; those that the job began with are gone."""
    with job(folder, np=2) as launcher:
        (kept,) = job_folders.found()
        for _ in range(2):
            goes_on(folder)
            replace_first(folder)
        os.kill(kept.pid, signal.SIGKILL)
        (folder / "end").touch()
        _, errors = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, errors
    assert "this launcher goes on with" in errors


@pytest.mark.slow
def test_daemons_say_that_another_process_has_their_port_and_the_next_ones_try_again(
    folder: Path,
) -> None:
    """The job goes on meanwhile, and has a daemon as soon as the port is free."""
    with job(folder) as launcher, socket.socket() as taken:
        (kept,) = job_folders.found()
        pid = (folder / "step").read_text().split()[2]
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
        (port,) = re.findall(r"\bKOLOVOD_COORDINATOR=[^\0]*:(\d+)\0", environment)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(kept.pid, signal.SIGKILL)
        until(lambda: binds(taken, int(port)))
        taken.listen()
        assert launcher.stderr is not None
        said = [next(line for line in launcher.stderr if "cannot go on" in line) for _ in range(2)]
        goes_on(folder)
        taken.close()
        replace_first(folder)
        (folder / "end").touch()
        _, errors = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, errors
    expected = rf"cannot listen at \S*:{port} again: .*in use.*\(kolovod explain K402\)"
    assert re.search(expected, said[1])


def binds(taken: socket.socket, port: int) -> bool:
    try:
        taken.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def replace_first(folder: Path) -> None:
    """Kill the first of two ranks; return once another one has joined the second."""
    victim = (folder / "step").read_text().split()[2]
    os.kill(int(victim), signal.SIGKILL)

    def has_joined() -> bool:
        _, size, first = (folder / "step").read_text().split()
        return size == "2" and first != victim

    until(has_joined)


def next_daemon(before: JobFolder) -> JobFolder:
    """The one that takes the job over, once it answers."""

    def found() -> JobFolder | None:
        now = job_folders.read(before.path)
        return now if now is not None and now.pid != before.pid and now.is_kept() else None

    return until(found)


@pytest.mark.slow
def test_a_job_without_any_launcher_is_attached_to(folder: Path) -> None:
    with job(folder, code=7) as launcher:
        (kept,) = job_folders.found()
        os.kill(launcher.pid, signal.SIGKILL)
        os.kill(kept.pid, signal.SIGKILL)
        first, _ = launcher.communicate(timeout=DEADLINE_S)
        again = start("attach", kept.name)
        goes_on(folder)
        (folder / "end").touch()
        second, errors = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 7, errors
    assert "this launcher goes on with 2 processes of an earlier one" in errors
    numbers = shown(first) + shown(second)
    assert sorted(set(numbers)) == list(range(20, max(numbers) + 1, 20))


@pytest.mark.slow
def test_a_job_whose_launchers_cannot_start_goes_on_and_attach_tries_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(folder, code=7) as launcher:
        (kept,) = job_folders.found()
        # Not by the agent, which has been told the command line; by who attaches.
        broken = kept.path / "job"
        whole = broken.read_text()
        broken.write_text("nothing")
        os.kill(kept.pid, signal.SIGKILL)
        goes_on(folder)
        launcher.kill()
        time.sleep(2)
        goes_on(folder)
        broken.write_text(whole)
        again = start("attach", kept.name)
        goes_on(folder)
        (folder / "end").touch()
        again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 7


@pytest.mark.slow
def test_if_daemon_and_agent_are_killed_the_job_has_ended_and_that_is_said(folder: Path) -> None:
    with job(folder) as launcher:
        pid = int((folder / "step").read_text().split()[2])
        (kept,) = job_folders.found()
        os.kill(kept.pid, signal.SIGSTOP)  # or it would report the agent's end
        kill_agent(kept)
        wait_until_gone([pid])
        os.kill(kept.pid, signal.SIGKILL)
        _, errors = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert f"the processes that kept job {kept.name} were killed, and so the job" in errors
    assert not job_folders.found()  # what was killed is forgotten


@pytest.mark.slow
def test_if_the_agent_is_killed_its_ranks_are_lost_and_named(folder: Path) -> None:
    with job(folder) as launcher:
        (kept,) = job_folders.found()
        kill_agent(kept)
        _, errors = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "rank 0 on host localhost" in errors


@pytest.mark.slow
def test_a_closed_terminal_is_survived(folder: Path) -> None:
    with contextlib.ExitStack() as stack:  # the tests may run under nohup, which is inherited
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        stack.callback(signal.signal, signal.SIGHUP, before)
        launcher = stack.enter_context(job(folder))
        launcher.send_signal(signal.SIGHUP)
        launcher.communicate(timeout=DEADLINE_S)
        assert launcher.returncode == -signal.SIGHUP
        goes_on(folder)


@pytest.mark.slow
def test_where_no_folder_can_be_made_the_job_ends_with_its_launcher(folder: Path) -> None:
    runtime_folder().write_text("in the way")
    with job(folder) as launcher:
        pid = int((folder / "step").read_text().split()[2])
        launcher.kill()
        _, errors = launcher.communicate(timeout=DEADLINE_S)
        wait_until_gone([pid])
    assert "the job ends with this launcher, nobody could attach" in errors


@pytest.mark.slow
def test_what_cannot_be_attached_to_is_said(folder: Path) -> None:
    done = subprocess.run([*KOLOVOD, "attach"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no elastic job of this user is on this host" in done.stderr
    with job(folder), contextlib.ExitStack() as stack:
        (first,) = job_folders.found()
        done = subprocess.run([*KOLOVOD, "attach", "1"], capture_output=True, text=True)
        assert done.returncode == 2
        assert f"there is no job 1; there are:\n  {first.name}  since " in done.stderr
        other = start("run", "--elastic", "-np", "1", "--", "sleep", "60")
        stack.callback(kill, other)
        until(lambda: len(job_folders.found()) == 2)
        done = subprocess.run([*KOLOVOD, "attach"], capture_output=True, text=True)
        assert done.returncode == 2
        assert "name one of these jobs:" in done.stderr
        assert re.search(r"\n  \d+  since [-\d: ]+  sleep 60\n", done.stderr)


def test_a_command_that_cannot_start_is_said_as_before(folder: Path) -> None:
    done = subprocess.run(
        [*KOLOVOD, "run", "--elastic", "-H", "nowhere.invalid:2", "--", "true"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1
    assert "nowhere.invalid" in done.stderr
    assert not job_folders.found()


# --- what nobody has shown yet ---


def test_a_spool_gives_what_was_not_shown_to_the_next_view() -> None:
    spool = Spool()
    for text in ("a", "b", "c"):
        spool.write("stdout", text)
    view, first = spool.begin_view()
    assert [spool.next(view, first + i) for i in range(3)] == [Frame("stdout", t) for t in "abc"]
    spool.shown(view, first + 1)
    later, first = spool.begin_view()
    assert spool.next(view, first) is None
    spool.shown(view, first + 3)  # of a view that is over
    spool.end_view(view)
    assert spool.next(later, first) == Frame("stdout", "b")
    assert spool.rest() == {"stdout": "bc", "stderr": ""}
    spool.end(4)
    assert spool.next(later, first + 2) == 4


def test_a_spool_that_nobody_views_drops_the_oldest_and_says_so() -> None:
    spool = Spool(limit_bytes=10)
    for text in ("aaaa", "bbbb", "cccc", "d" * 50):
        spool.write("stdout", text)
    view, first = spool.begin_view()
    note = spool.next(view, first)
    assert isinstance(note, Frame)
    assert note.stream == "stderr"
    assert "12 bytes of earlier output are lost" in note.text
    assert spool.next(view, first + 1) == Frame("stdout", "d" * 50)  # the last is always kept
    spool.end_view(view)
    assert "12 bytes" in spool.rest()["stderr"]


def test_who_writes_waits_for_a_slow_view_until_it_ends() -> None:
    spool = Spool(limit_bytes=10)
    view, first = spool.begin_view()
    spool.write("stdout", "a" * 10)
    writer = threading.Thread(target=spool.write, args=("stdout", "b"))
    writer.start()
    writer.join(0.1)
    assert writer.is_alive()
    spool.shown(view, first + 1)
    writer.join(10)
    assert spool.next(view, first + 1) == Frame("stdout", "b")
    spool.write("stdout", "c" * 10)
    writer = threading.Thread(target=spool.write, args=("stdout", "d"))
    writer.start()
    spool.end_view(view)
    writer.join(10)
    assert not writer.is_alive()


def test_a_folder_is_a_job_as_long_as_a_process_holds_it(folder: Path) -> None:
    made = job_folders.make(("true",), ("true",))
    assert made.is_kept()
    assert made.name == str(os.getpid())
    assert made.again[0] == "true"
    told = made.again[-1]
    assert [kept.pid for kept in job_folders.found()] == [os.getpid()]
    with pytest.raises(BootstrapError, match="has a keeper"):
        job_folders.take_over(told, ("true",), ("true",))
    other = job_folders.make(("true",), ())  # of a process that has the number in a namespace
    assert other.name == f"{made.name}-2"
    for fd in folder_locks._held[-2:]:
        os.close(fd)
    del folder_locks._held[-2:]
    taken = job_folders.take_over(told, ("true",), ("true",))
    assert (taken.command, taken.again) == (("true",), made.again)
    assert (taken.began, taken.agent) == (made.began, made.agent)
    assert [kept.name for kept in job_folders.found()] == [made.name]
    assert not other.path.exists()
    os.close(folder_locks._held.pop())
