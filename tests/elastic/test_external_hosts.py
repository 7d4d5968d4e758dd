"""Elastic jobs whose ranks somebody else starts, a rank on each host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from elastic_steps import DEADLINE_S, STEPS, until
from netbed import Bed, unavailable
from reached_by_ssh import environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]
SECRET = "0123456789abcdef0123456789abcdef"


class Pods:
    """A process for each host, as a scheduler would start it, and start it again."""

    def __init__(self, bed: Bed, folder: Path, hosts: str, **variables: str) -> None:
        folder.chmod(0o777)
        self.bed, self.folder, self.hosts = bed, folder, hosts
        self._variables = {
            "KOLOVOD_STORE_HOST": bed.address(hosts[0]),
            "KOLOVOD_SECRET": SECRET,
            "KOLOVOD_SIZE": str(len(hosts)),
            "KOLOVOD_MIN_NP": "1",
            **variables,
        }
        self.running = {host: self.start(host) for host in hosts}

    def start(self, host: str, script: str = STEPS) -> subprocess.Popen[str]:
        rank = str(self.hosts.index(host))
        told = {"KOLOVOD_RANK": rank, "KOLOVOD_HOST": host, **self._variables}
        return self.bed.popen(
            host,
            [sys.executable, "-c", script, str(self.folder), "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**told),
        )

    def lose(self, host: str) -> None:
        """Its process is killed: nobody on other hosts can prove that."""
        process = self.running.pop(host)
        process.kill()
        process.communicate()

    def come_again(self, host: str) -> None:
        self.running[host] = self.start(host)

    def at(self, host: str) -> list[int]:
        """Its step, and the size of its world."""
        try:
            words = (self.folder / f"on {host}").read_text().split()
            return [int(words[0]), int(words[1])]
        except (OSError, ValueError, IndexError):
            return [0, 0]

    def goes_on(self, hosts: str) -> None:
        before = {host: self.at(host)[0] for host in hosts}
        until(
            lambda: all(
                self.at(host)[0] > before[host] and self.at(host)[1] == len(hosts) for host in hosts
            )
        )

    def end(self) -> None:
        (self.folder / "end").touch()
        said = {host: p.communicate(timeout=DEADLINE_S) for host, p in self.running.items()}
        assert all(process.returncode == 0 for process in self.running.values()), said

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            if process.stdout is not None and not process.stdout.closed:
                print(*process.communicate(), sep="\n")
        for host in self.hosts:
            for left in self.bed.processes(host):  # that a rank has forked
                os.kill(left.pid, signal.SIGKILL)


@pytest.fixture(name="bed", scope="module")
def made_bed() -> Iterator[Bed]:
    with Bed(["a", "b", "c"], with_sshd=False) as bed:
        yield bed


@pytest.fixture(name="start")
def made_start(bed: Bed, tmp_path: Path) -> Iterator[Callable[..., Pods]]:
    jobs: list[Pods] = []

    def start(hosts: str, **variables: str) -> Pods:
        jobs.append(Pods(bed, tmp_path, hosts, **variables))
        return jobs[0]

    yield start
    for job in jobs:
        job.close()
    bed.heal()


def test_any_host_of_three_may_lose_its_rank_that_of_rank_0_too(start: Callable[..., Pods]) -> None:
    job = start("abc")
    job.goes_on("abc")
    for host in "ab":
        job.lose(host)
        job.goes_on("abc".replace(host, ""))
        job.come_again(host)
        job.goes_on("abc")
    job.end()


def test_a_host_that_was_cut_off_starts_again(start: Callable[..., Pods]) -> None:
    """Its process ends when it hears that the others have gone on without it."""
    job = start("abc")
    job.goes_on("abc")
    job.bed.partition("a", "bc")
    job.goes_on("bc")
    job.bed.heal()
    process = job.running.pop("a")
    assert "goes on in epoch" in process.communicate(timeout=DEADLINE_S)[1]
    assert process.returncode == 1
    job.come_again("a")
    job.goes_on("abc")
    job.end()


FORKS = STEPS.replace(
    "def train(state):\n",
    """def train(state):
    if os.fork() == 0:  # as a worker that loads data, and does not notice its parent's end
        for fd in (1, 2):
            os.close(fd)
        time.sleep(300)
        os._exit(0)
""",
)


def test_what_a_rank_has_forked_does_not_keep_it_alive(start: Callable[..., Pods]) -> None:
    job = start("abc")
    job.goes_on("abc")
    for host in "ba":  # a member, and then who is coordinator
        job.lose(host)
        job.goes_on("abc".replace(host, ""))
        job.running[host] = job.start(host, FORKS)
        job.goes_on("abc")
        # It has forked once, and the coordinator is still the one that it came to.
        job.lose(host)
        job.goes_on("abc".replace(host, ""))
        job.come_again(host)
        job.goes_on("abc")
    job.end()


def test_with_records_that_are_kept_two_hosts_are_enough(
    start: Callable[..., Pods], tmp_path: Path
) -> None:
    """Rank 1 alone is no majority: it goes on when rank 0's next process proves its end."""
    job = start("ab", KOLOVOD_RECORD_DIR=str(tmp_path))
    job.goes_on("ab")
    job.lose("b")
    job.goes_on("a")
    job.come_again("b")
    job.goes_on("ab")
    job.lose("a")
    job.come_again("a")
    job.goes_on("ab")
    job.end()
