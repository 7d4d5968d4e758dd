"""Ranks on other hosts, which ssh reaches: hosts are namespaces with an sshd each."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from netbed import Bed, unavailable
from reached_by_ssh import (  # noqa: F401
    DEADLINE_S,
    HELLO,
    RUN,
    environment,
    made_bed,
    run,
    written_script,
)
from slow import slow_but
from waiting import until

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

SLEEP = """
import os, subprocess, time, kolovod, numpy
kolovod.init()
kolovod.allreduce(numpy.ones(2))
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("ready", os.environ["KOLOVOD_RANK"], os.getpid(), flush=True)
time.sleep(1000)
"""


class Running:
    """A launcher on the login host, and its ranks of ``SLEEP``, until they are all there."""

    def __init__(self, bed, command, *flags, ranks=3, hosts="a:2,b:1"):
        self.bed = bed
        self.process = bed.popen(
            "login",
            [*RUN, "-H", hosts, *flags, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self.pids: dict[int, int] = {}
        while len(self.pids) < ranks:
            line = self.process.stdout.readline()
            assert line, self.process.communicate(timeout=DEADLINE_S)[1]
            for rank, pid in re.findall(r"ready (\d+) (\d+)", line):
                self.pids[int(rank)] = int(pid)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)

    def end(self):
        """Its exit code and what it said."""
        _, said = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, said

    def processes(self, host, text):
        return [p for p in self.bed.processes(host) if text in p.command]


def nothing_left(bed):
    def left():
        return [(h, p) for h in bed.names for p in bed.processes(h) if "sshd" not in p.command]

    until(lambda: not left(), "nothing is left on the hosts")


def test_ranks_fill_the_hosts_in_order(bed, script):
    done = run(bed, "-H", "a:2,b:2,login:4", "-np", "5", *script(HELLO))
    assert done.returncode == 0, done.stderr
    here = os.getcwd()
    places = sorted(re.findall(r"place (.*)", done.stdout))
    assert places == [
        f"0 5 0 0 15.0 a a {here}",
        f"1 5 1 0 15.0 a a {here}",
        f"2 5 0 1 15.0 b b {here}",
        f"3 5 1 1 15.0 b b {here}",
        f"4 5 0 2 15.0 login login {here}",
    ]
    nothing_left(bed)


def test_a_host_file_an_address_a_directory_and_folders_for_output(bed, script, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text(f"# two\n[{bed.addresses('a')[0].ipv6}] slots=1\n{bed.address('b')}\n")
    out = tmp_path / "out"
    flags = ["--hostfile", str(hosts), "--directory", "/usr", "--output-dir", str(out)]
    flags += ["--ssh-args", "-o HostKeyAlias=a -o StrictHostKeyChecking=no", "--timestamps"]
    done = run(bed, *flags, "-x", "MARK=42", *script(HELLO + "print(os.environ['MARK'])"))
    assert done.returncode == 0, done.stderr
    assert (out / "rank.1" / "stdout").read_text().endswith("b /usr\n42\n")
    assert re.search(r"^\d{4}-\d\d-\d\dT\S+ \[0\]<stdout>:place 0 2 0 0 3.0 ", done.stdout, re.M)


def test_the_environment_follows_but_not_what_is_of_the_login(bed, script):
    code = """
import os
names = ("MINE", "CUDA_VISIBLE_DEVICES", "OLDPWD", "SSH_AUTH_SOCK", "PYTHONUNBUFFERED")
print("has", [os.environ.get(name) for name in names])
"""
    done = run(
        bed,
        *("-H", "a:1", *script(code)),
        MINE="x y'z\nw",
        CUDA_VISIBLE_DEVICES="3",
        OLDPWD="/",
        SSH_AUTH_SOCK="/s",
    )
    assert "has [\"x y'z\\nw\", None, None, None, '1']" in done.stdout, done.stderr


@pytest.mark.slow
def test_every_host_that_cannot_be_used_is_named_before_anything_starts(bed, script, tmp_path):
    done = run(bed, "-H", "a:1,nowhere.invalid:1,b:1,10.255.255.1:1", *script(HELLO))
    assert done.returncode == 1
    assert "2 of 4 other hosts cannot be used, so nothing was started:\n" in done.stderr
    assert re.search(r"^  nowhere.invalid: ssh .*Could not resolve", done.stderr, re.M)
    assert re.search(r"^  10.255.255.1: ssh .*(unreachable|timed out)", done.stderr, re.M)
    assert "place" not in done.stdout
    for flags, text in (
        (["--remote-python", "/no/python"], "a: ssh to a ended with exit code 127: env: '/no/pyth"),
        (["--directory", "/no/folder"], "b: ssh to b ended with exit code 2: /bin/sh: 1: cd:"),
        (["-p", "9"], "Connection refused"),
        (["-i", str(tmp_path / "none"), "--ssh-args", "-F /no/config"], "Can't open user config"),
        (["--ssh-args", "-o UserKnownHostsFile=/dev/null"], "Host key verification failed"),
    ):
        done = run(bed, "-H", "a:1,b:1", *flags, *script(HELLO))
        assert done.returncode == 1
        assert text in done.stderr
        assert "Traceback" not in done.stderr
    nothing_left(bed)


def test_the_first_to_fail_is_named_with_its_host_and_last_words(bed, script):
    code = HELLO + (
        "import time\n"
        "if kolovod.rank() == 2:\n"
        "    print('last words', file=sys.stderr)\n"
        "    sys.exit(9)\n"
        "time.sleep(1000)\n"
    )
    done = run(bed, "-H", "a:2,b:1", *script(code))
    assert done.returncode == 9
    lines = done.stderr.splitlines()
    assert re.fullmatch(
        r"kolovod: rank 2 on host b \(pid \d+\) ended with exit code 9; ending the other 2",
        next(line for line in lines if line.startswith("kolovod: ")),
    )
    assert re.fullmatch(
        r"kolovod: the first to fail was rank 2 on host b \(pid \d+\): it ended with exit code 9. "
        r"The last lines of its stderr:",
        lines[-2],
    )
    assert lines[-1] == "  last words"
    nothing_left(bed)


@pytest.mark.slow
def test_a_rank_that_is_killed_on_another_host(bed, script):
    with Running(bed, script(SLEEP)) as job:
        [victim] = [p for p in job.processes("b", "script.py") if p.inner == job.pids[2]]
        os.kill(victim.pid, signal.SIGKILL)
        code, said = job.end()
    assert code == 128 + signal.SIGKILL
    assert "rank 2 on host b" in said
    assert "was killed by signal 9" in said
    nothing_left(bed)


@pytest.mark.parametrize("signum", slow_but([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_to_the_launcher_ends_all_hosts(bed, script, signum):
    with Running(bed, script(SLEEP)) as job:
        job.process.send_signal(signum)
        code, said = job.end()
    assert code == 128 + signum
    assert f"{signum.name}: ending 3 ranks" in said
    nothing_left(bed)


def test_nothing_outlives_a_launcher_that_is_killed(bed, script):
    with Running(bed, script(SLEEP)) as job:
        job.process.kill()
        nothing_left(bed)


@pytest.mark.slow
def test_ssh_is_killed(bed, script):
    with Running(bed, script(SLEEP)) as job:
        [ssh] = [p for p in job.processes("login", "ssh -T") if " -- b " in p.command]
        os.kill(ssh.pid, signal.SIGKILL)
        code, said = job.end()
    assert code == 255
    assert "rank 2 on host b" in said
    assert "is lost: ssh to b ended, killed by signal 9 (SIGKILL)" in said
    nothing_left(bed)


@pytest.mark.slow
def test_an_agent_is_killed(bed, script):
    with Running(bed, script(SLEEP)) as job:
        [agent] = [
            p for p in job.processes("b", "kolovod.launch.agent") if "sh -c" not in p.command
        ]
        os.kill(agent.pid, signal.SIGKILL)
        code, said = job.end()
    assert code != 0
    assert "rank 2 on host b" in said
    nothing_left(bed)


@pytest.mark.slow
def test_a_host_that_dies_is_lost_and_named(script):
    with Bed(["login", "a", "b"]) as bed, Running(bed, script(SLEEP)) as job:
        bed.kill_host("b")
        code, said = job.end()
        assert code in (1, 255)
        assert "the first to fail was rank 2 on host b" in said
        nothing_left(bed)


def test_the_secret_is_on_no_command_line_and_in_no_file(bed, script):
    code = SLEEP + "#"
    with Running(bed, script(code)) as job:
        rank = next(p for p in job.processes("a", "script.py") if p.inner == job.pids[0])
        variables = Path(f"/proc/{rank.pid}/environ").read_bytes().split(b"\0")
        [secret] = [v[15:] for v in variables if v.startswith(b"KOLOVOD_SECRET=")]
        assert len(secret) == 64
        for host in bed.names:
            for process in bed.processes(host):
                assert secret.decode() not in process.command
        job.process.send_signal(signal.SIGTERM)
        _, said = job.end()
    assert secret.decode() not in said


@pytest.mark.slow
def test_doctor_looks_at_all_hosts(bed):
    command = [sys.executable, "-m", "kolovod", "doctor", "-H"]
    done = bed.run("login", [*command, "a,b,login"], timeout_s=DEADLINE_S, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    for host in ("a", "b", "login"):
        assert re.search(rf"^ok +{host} +versions +Kolovod", done.stdout, re.M)
    for first, second in (("a", "b"), ("a", "login"), ("b", "login")):
        assert re.search(rf"^\w+ +{first} +link to {second} +\d+ us, ", done.stdout, re.M)
    done = bed.run("login", [*command, "a,b,no.invalid"], timeout_s=DEADLINE_S, env=environment())
    assert done.returncode == 1
    assert re.search(r"^\w+ +a +link to b +\d+ us, ", done.stdout, re.M)
    assert done.stdout.endswith("1 problem\n")
    assert re.search(r"^PROBLEM +no\.invalid +start +ssh to no\.invalid ended", done.stdout, re.M)
    assert re.search(r"^ok +a +versions", done.stdout, re.M)


@pytest.mark.slow
def test_a_function_on_the_ranks_of_several_hosts(bed, script):
    code = """
import os
import kolovod


class Wrong(Exception):
    pass


def work(base, add=0):
    import numpy as np
    kolovod.init()
    total = kolovod.allreduce(np.full(1, kolovod.rank() + 1.0), op=kolovod.Sum)
    return base + add, os.uname().nodename, float(total[0])


def fail():
    kolovod.init()
    if kolovod.rank() == 1:
        raise Wrong("on purpose")
    kolovod.barrier()


print(kolovod.run(work, (10,), {"add": 5}, hosts="a:1,b:1,login:1"))
try:
    kolovod.run(fail, np=2, hosts="a:1,b:1")
except kolovod.RankFailed as error:
    print("failed", error.rank, type(error.__cause__).__name__, error.__cause__)
    print("in fail" in str(error), "Wrong: on purpose" in str(error))
"""
    done = bed.run("login", script(code), timeout_s=DEADLINE_S, env=environment())
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "[(15, 'a', 6.0), (15, 'b', 6.0), (15, 'login', 6.0)]"
    assert lines[-2:] == ["failed 1 Wrong on purpose", "True True"]


@pytest.mark.slow
def test_horovodrun_on_two_hosts(bed, script):
    code = """
import horovod.torch as hvd, os, torch
hvd.init()
total = hvd.allreduce(torch.full((3,), hvd.rank() + 1.0), op=hvd.Sum)
print("horovod", hvd.rank(), hvd.local_rank(), hvd.cross_rank(), float(total[0]),
      os.environ["HOROVOD_HOSTNAME"], os.uname().nodename, flush=True)
"""
    command = [sys.executable, "-m", "horovod.runner.launch", "-np", "3", "-H", "a:2,b:1"]
    done = bed.run("login", [*command, *script(code)], timeout_s=DEADLINE_S, env=environment())
    assert done.returncode == 0, done.stderr
    found = sorted(re.findall(r"horovod (\d.*)", done.stdout))
    assert found == ["0 0 0 6.0 a a", "1 1 0 6.0 a a", "2 0 1 6.0 b b"]


@pytest.mark.slow
def test_the_start_timeout_names_who_is_missing_and_where(bed, script):
    code = """
import os, time, kolovod
if os.environ["KOLOVOD_RANK"] == "2":
    time.sleep(1000)
kolovod.init()
"""
    done = run(bed, "-H", "a:2,b:1", "--start-timeout-s", "10", *script(code))
    assert done.returncode == 1
    assert "StartTimeoutError: rank 2 (host b) did not call init() within 10 s" in done.stderr
    nothing_left(bed)
