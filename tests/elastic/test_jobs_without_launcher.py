"""Elastic jobs on several hosts whose launcher, or its host, is lost. Hosts are namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from elastic_steps import DEADLINE_S, STEPS, until
from netbed import Bed, unavailable
from reached_by_ssh import RUN, environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]


class Running:
    """A job with a rank on each of three hosts, started on ``login`` or on one of them."""

    def __init__(self, bed: Bed, folder: Path, login: str, *flags: str) -> None:
        self.bed, self.folder, self.login = bed, folder, login
        command = [*RUN, "--elastic", "-H", "a:1,b:1,c:1", *flags, "--"]
        self.process = self.view([*command, sys.executable, "-c", STEPS, str(folder), "0"])
        until(lambda: all(self.step(host)[1:2] == [3] for host in "abc"))

    def view(self, command: list[str]) -> subprocess.Popen[str]:
        with open(self.folder / "errors", "a") as errors:
            return self.bed.popen(
                self.login,
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(XDG_RUNTIME_DIR=str(self.folder)),
            )

    def attach(self) -> None:
        """In the place of the launcher that shows it, which is killed."""
        self.process.kill()
        self.process.communicate()
        self.process = self.view([*RUN[:-1], "attach"])

    def step(self, host: str) -> list[int]:
        """Its steps, the size of its world, and the pid of the rank there; [] before the first."""
        try:
            return [int(word) for word in (self.folder / f"on {host}").read_text().split()]
        except (OSError, ValueError):
            return []

    def goes_on(self, *hosts: str, size: int) -> None:
        before = {host: self.step(host)[0] for host in hosts}
        until(
            lambda: all(
                self.step(host)[0] > before[host] + 20 and self.step(host)[1] == size
                for host in hosts
            )
        )

    def daemon(self) -> int:
        (job,) = self.folder.glob("kolovod/jobs/*/job")
        return int(json.loads(job.read_text())["pid"])

    def agent_beside(self) -> int:
        """That of the daemon's host, as numbered here."""
        (agent,) = (
            process.pid
            for process in self.bed.processes(self.login)
            if re.search(r"agent serve \S+(?<!-b)(?<!-c)$", process.command)
        )
        return agent

    def kill(self, host: str, pid: int) -> None:
        """``pid``: as it is there."""
        self.bed.run(host, ["kill", "-9", str(pid)], timeout_s=DEADLINE_S)

    def stop(self, host: str, pid: int) -> None:
        """For good. ``pid``: as it is there."""
        self.bed.run(host, ["kill", "-STOP", str(pid)], timeout_s=DEADLINE_S)

    def errors(self) -> str:
        """What the launcher has said so far."""
        return (self.folder / "errors").read_text()

    def reaching(self) -> set[int]:
        """Processes of ssh by which the launcher has agents, or tries to."""
        found = self.bed.processes(self.login)
        return {p.pid for p in found if "ssh" in p.command and "reach" in p.command}

    def end(self) -> tuple[str, str]:
        (self.folder / "end").touch()
        out = self.process.communicate(timeout=DEADLINE_S)[0]
        return out, self.errors()

    def close(self) -> None:
        self.process.kill()
        for host in (self.login, "a", "b", "c"):
            for process in self.bed.processes(host):
                if any(
                    word in process.command for word in (str(self.folder), "kolovod.", "ssh -T")
                ):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
        print(self.process.communicate()[0], self.errors(), sep="\n")


@pytest.fixture(name="bed", scope="module")
def made_bed() -> Iterator[Bed]:
    with Bed(["login", "a", "b", "c"]) as bed:
        yield bed


@pytest.fixture(name="start")
def made_start(bed: Bed, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    jobs = []

    def start(login: str, *flags: str) -> Running:
        jobs.append(Running(bed, tmp_path, login, *flags))
        return jobs[-1]

    yield start
    bed.heal()
    for host in ("login", "a", "b", "c"):
        bed.set_link(host, up=True)
    for job in jobs:
        job.close()
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_a_killed_launcher_finds_its_hosts_again(start: Callable[..., Running]) -> None:
    job = start("login")
    job.kill("login", job.daemon())
    job.goes_on("a", "b", "c", size=3)
    until(lambda: len(job.reaching()) >= 3)  # the next launcher has come as far as to serve
    job.kill("b", job.step("b")[2])
    job.goes_on("a", "c", size=3)  # it is replaced
    out, errors = job.end()
    assert job.process.returncode == 0, errors
    assert "this launcher goes on with 3 processes of an earlier one" in errors
    assert re.search(r"steps (\d+) \1 longest", out)


def test_a_launcher_that_follows_while_hosts_are_cut_off_starts_nobody_in_their_places(
    start: Callable[..., Running],
) -> None:
    """It finds them later; else it would take them for names of its own host."""
    job = start("a")
    job.bed.partition(["a"], ["b", "c"])
    before = job.reaching()
    job.kill("a", job.daemon())
    job.goes_on("b", "c", size=2)
    until(lambda: len(job.reaching() - before) >= 2)
    first = job.reaching() - before
    until(lambda: not first & job.reaching())  # the next launcher has given up ssh to them
    job.bed.heal()
    job.goes_on("a", "b", "c", size=3)
    _, errors = job.end()
    assert job.process.returncode == 0, errors
    assert "has a place" not in errors
    assert re.search("host [bc] is reached again, with 1 processes", errors)


def test_the_launchers_host_may_be_cut_off_and_come_back(start: Callable[..., Running]) -> None:
    job = start("login")
    before = job.reaching()
    job.bed.set_link("login", up=False)
    job.goes_on("a", "b", "c", size=3)
    job.kill("c", job.step("c")[2])  # who can prove it is gone, but two of three are a majority
    job.goes_on("a", "b", size=2)
    until(lambda: not before & job.reaching())  # the launcher counts all hosts as lost
    job.bed.set_link("login", up=True)
    job.goes_on("a", "b", size=3)  # it starts another one
    _, errors = job.end()
    assert job.process.returncode == 0, errors
    assert "host a is reached again, with 1 processes of this job" in errors


def test_a_killed_agent_is_followed_by_another_with_other_ranks(
    start: Callable[..., Running],
) -> None:
    """That of the launcher's own host, beside which it goes on."""
    job = start("a")
    before = job.step("a")[2]
    os.kill(job.agent_beside(), signal.SIGKILL)
    job.goes_on("b", "c", size=2)
    job.goes_on("a", "b", "c", size=3)
    assert job.step("a")[2] != before
    job.kill("a", job.daemon())  # the new agent has been told what the next launcher must know
    job.goes_on("a", "b", "c", size=3)
    _, errors = job.end()
    assert job.process.returncode == 0, errors
    assert "this launcher goes on with 3 processes of an earlier one" in errors


def test_the_end_of_a_process_is_not_taken_for_that_of_another_in_its_slot(
    start: Callable[..., Running],
) -> None:
    """Host b is lost, its slot is filled on another host, and b is reached again."""
    job = start("login", "-H", "c:1,b:1,a:2", "-np", "3")
    first = job.step("b")[2]
    job.kill("b", first)
    until(lambda: job.step("b")[1:] != [3, first] and job.step("b")[1] == job.step("c")[1] == 3)
    pid = str(job.step("b")[2])
    job.bed.set_link("b", up=False)
    until(lambda: job.step("c")[1] == 2)
    job.bed.run("b", ["kill", "-STOP", pid], timeout_s=DEADLINE_S)  # it ends after b is reached
    until(lambda: job.step("c")[1] == 3)
    job.bed.set_link("b", up=True)
    until(lambda: "host b is reached again, with 1 processes" in job.errors())
    job.bed.run("b", ["kill", "-CONT", pid], timeout_s=DEADLINE_S)
    place = str(job.folder)
    until(lambda: not any(place in process.command for process in job.bed.processes("b")))
    job.goes_on("c", "a", size=3)
    _, err = job.end()
    assert "slot 1 was cut off on host b and is started on host a" in err
    reached = err.index("host b is reached again, with 1 processes of this job")
    ended = err.index("on host b (pid ", reached)
    assert "epoch" not in err[ended:], err  # nobody was missed


def test_the_host_of_launcher_and_lowest_rank_may_vanish(start: Callable[..., Running]) -> None:
    job = start("a")
    job.bed.set_link("a", up=False)
    began_s = time.monotonic()
    until(lambda: job.step("b")[1] == 2 and job.step("c")[1] == 2)
    print(f"the others went on after {time.monotonic() - began_s:.2f} s")
    job.goes_on("b", "c", size=2)
    stood = job.step("a")
    time.sleep(2)
    assert job.step("a") == stood  # a minority makes no step
    (job.folder / "end").touch()
    for host in "bc":
        until(
            lambda host=host: (
                not any(str(job.folder) in process.command for process in job.bed.processes(host))
            )
        )


def stopped_agents(job: Running, *hosts: str) -> list[int]:
    """The agents of these hosts, which are stopped."""
    found = [p.pid for h in hosts for p in job.bed.processes(h) if "agent serve" in p.command]
    assert len(found) == len(hosts)
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    return found


def test_stopped_agents_are_woken_and_no_rank_is_taken_for_dead(
    start: Callable[..., Running],
) -> None:
    job = start("a")
    stopped_agents(job, "a", "b")
    job.goes_on("a", "b", "c", size=3)
    job.kill("b", job.step("b")[2])  # its replacement waits for the agent
    until(lambda: job.errors().count("is heard again") == 2)
    job.goes_on("a", "b", "c", size=3)
    _, errors = job.end()
    assert job.process.returncode == 0, errors
    assert errors.count("says nothing for 10 s: its ranks are taken to go on") == 2
    assert errors.count("was killed by signal 9") == 1


def test_a_job_that_is_ended_ends_the_ranks_of_agents_that_do_not_answer(
    start: Callable[..., Running],
) -> None:
    job = start("a")
    agents = stopped_agents(job, "a", "b")
    job.process.send_signal(signal.SIGTERM)
    _, errors = job.process.communicate(timeout=DEADLINE_S)[0], job.errors()
    assert job.process.returncode == 128 + signal.SIGTERM, errors
    assert "may run on" not in errors
    assert not any(os.path.exists(f"/proc/{pid}") for pid in agents)
    left = [p for h in "abc" for p in job.bed.processes(h) if str(job.folder) in p.command]
    assert not left


def kill_daemon_and_agent(job: Running) -> None:
    daemon = job.daemon()
    job.stop("a", daemon)  # else it would start another agent
    os.kill(job.agent_beside(), signal.SIGKILL)
    job.kill("a", daemon)


def test_where_daemon_and_agent_of_a_host_are_killed_agents_on_others_know_the_job(
    start: Callable[..., Running],
) -> None:
    job = start("a")
    for times in range(1, 3):
        kill_daemon_and_agent(job)
        until(lambda times=times: job.errors().count("has told this launcher") == times)
        job.goes_on("a", "b", "c", size=3)
    job.process.kill()
    kill_daemon_and_agent(job)
    job.attach()
    until(lambda: job.errors().count("has told this launcher") == 3)
    job.goes_on("a", "b", "c", size=3)
    _, errors = job.end()
    assert job.process.returncode == 0, errors


def test_where_those_hosts_cannot_be_reached_the_others_go_on_and_that_is_said(
    start: Callable[..., Running],
) -> None:
    job = start("a")
    daemon = job.daemon()
    job.stop("a", daemon)
    job.bed.set_link("a", up=False)
    os.kill(job.agent_beside(), signal.SIGKILL)
    job.kill("a", daemon)
    assert job.process.wait(DEADLINE_S) == 128 + signal.SIGHUP
    job.goes_on("b", "c", size=2)
    assert (
        "its ranks on this host with them. Those on b, c go on without a launcher" in job.errors()
    )


@pytest.mark.parametrize(
    ("host", "pause_s"),
    [
        pytest.param("a", -1.4, id="before it"),
        pytest.param("b", 0.1, id="before the next one is there"),
        pytest.param("a", 2.0, id="when it has come to the next one"),
    ],
)
def test_a_rank_that_is_stopped_for_good_beside_a_killed_daemon_is_replaced(
    start: Callable[..., Running], host: str, pause_s: float
) -> None:
    """A world may form without it, since no coordinator hears of it any more."""
    job = start("a", "--late-failure-s", "4")
    stopped = job.step(host)[2]
    faults = [lambda: job.kill("a", job.daemon()), lambda: job.stop(host, stopped)]
    first, second = faults if pause_s > 0 else reversed(faults)
    first()
    time.sleep(abs(pause_s))
    second()
    until(lambda: job.step(host)[2:] not in ([], [stopped]))
    job.goes_on("a", "b", "c", size=3)
    _, errors = job.end()
    assert job.process.returncode == 0, errors
