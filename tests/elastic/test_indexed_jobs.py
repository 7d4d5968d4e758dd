"""Elastic jobs as Indexed Jobs of Kubernetes, on a simulated cluster (tests/support)."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_steps import STEPS
from indexed_job import Cluster, Pod
from netbed import unavailable

from kolovod.launch import cli

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]
SCRIPT = STEPS.replace('os.environ["KOLOVOD_HOST"]', "os.uname().nodename")
NAME = "digits"
LEFT = 143


class Training:
    """A job on a cluster."""

    def __init__(self, cluster: Cluster, folder: Path, manifest: list[dict[str, Any]]) -> None:
        self.cluster, self.folder = cluster, folder
        cluster.apply(manifest)

    def at(self, index: int) -> list[int]:
        """Its step, the size of its world, and its pid."""
        try:
            words = (self.folder / f"on {NAME}-{index}").read_text().split()
            return [int(word) for word in words]
        except (OSError, ValueError):
            return [0, 0, 0]

    def goes_on(self, *indices: int) -> None:
        """Just these work together, from now on."""
        before = {index: self.at(index)[0] for index in indices}
        self.cluster.until(
            lambda: all(
                self.at(i)[0] > before[i] + 2 and self.at(i)[1] == len(indices) for i in indices
            )
        )

    def has_ended(self, pod: Pod) -> int:
        """The exit code of a pod, when it has."""
        self.cluster.until(lambda: pod in self.cluster.ended)
        return int(pod.process.returncode)

    def end(self) -> None:
        """The script comes to its end; so does the Job."""
        (self.folder / "end").touch()
        self.cluster.until(lambda: self.cluster.is_complete and not self.cluster.pods)


Start = Callable[..., Training]


@pytest.fixture(name="start")
def made_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Start]:
    opened: list[Cluster] = []

    def start(
        nodes: dict[str, int], pods: int, *flags: str, late_s: float = 0.0, script: str = SCRIPT
    ) -> Training:
        (tmp_path / "script.py").write_text(script)
        command = ["python", str(tmp_path / "script.py"), str(tmp_path), "0"]
        sizes = ["--min-np", "1", "--grace-s", "60", *flags, "--format", "json"]
        given = ["manifest", "--name", NAME, "--image", "i", *sizes, "--", *command]
        assert cli.main(given) == 0
        manifest = json.loads(capsys.readouterr().out)["items"]
        cluster = Cluster(tmp_path, nodes, pods)
        opened.append(cluster.__enter__())
        cluster.dns_late_s = late_s
        return Training(cluster, tmp_path, manifest)

    yield start
    for cluster in opened:
        cluster.__exit__(None, None, None)


@pytest.mark.slow
def test_an_evicted_index_comes_back_with_another_address(start: Start) -> None:
    job = start({"n": 3}, 9, "-np", "3")
    job.goes_on(0, 1, 2)
    for index in (1, 0):
        pod = job.cluster.evict(index)
        assert job.has_ended(pod) == LEFT
        assert pod in job.cluster.ignored
        job.goes_on(0, 1, 2)
        assert job.cluster.pod(index).host != pod.host
    job.end()


@pytest.mark.slow
def test_names_that_are_known_late(start: Start) -> None:
    """A name stands for the address of the pod before, and then for none, for seconds."""
    job = start({"n": 4}, 12, "-np", "4", late_s=4.0)
    job.goes_on(0, 1, 2, 3)
    for index in (0, 3):
        job.cluster.kill(index)
        job.goes_on(0, 1, 2, 3)
    assert job.cluster.failures.keys() >= {0, 3}
    job.end()


@pytest.mark.slow
def test_an_index_comes_back_while_rank_0_finds_no_node(start: Start) -> None:
    """Nobody is where rank 0's name leads, and the name is forgotten: others know the job."""
    job = start({"n": 4}, 11, "-np", "4")
    job.goes_on(0, 1, 2, 3)
    job.cluster.held = {0}
    assert job.has_ended(job.cluster.evict(0)) == LEFT
    job.goes_on(1, 2, 3)
    job.cluster.kill(2)
    job.goes_on(1, 2, 3)
    assert 2 in job.cluster.failures
    job.cluster.held = set()
    job.goes_on(0, 1, 2, 3)
    job.end()


@pytest.mark.slow
def test_scaling_up_and_down(start: Start) -> None:
    job = start({"n": 6}, 14, "-np", "2", "--max-np", "5")
    job.goes_on(0, 1)
    job.cluster.scale(5)
    job.goes_on(0, 1, 2, 3, 4)
    gone = [job.cluster.pod(index) for index in (2, 3, 4)]
    job.cluster.scale(2)
    assert [job.has_ended(pod) for pod in gone] == [LEFT] * 3
    job.goes_on(0, 1)
    job.cluster.scale(3)
    job.goes_on(0, 1, 2)
    job.end()
    assert set(gone) <= set(job.cluster.ignored)


@pytest.mark.slow
def test_a_node_vanishes_with_rank_0_on_it(start: Start) -> None:
    """The others go on before anybody has said that it is gone for good; then its pods return."""
    job = start({"a": 2, "b": 2, "c": 2}, 13, "-np", "5")
    job.goes_on(0, 1, 2, 3, 4)
    gone = job.cluster.vanish(job.cluster.pod(0).node)
    assert len(gone) == 2
    lost = {pod.index for pod in gone}
    stay = sorted({0, 1, 2, 3, 4} - lost)
    job.goes_on(*stay)
    assert lost.isdisjoint(p.index for p in job.cluster.pods if not p.is_lost)
    job.cluster.give_up(gone)
    job.cluster.nodes["d"] = 2
    job.goes_on(0, 1, 2, 3, 4)
    job.end()
    assert set(gone) <= set(job.cluster.ignored)


STUCK = SCRIPT.replace(
    "def train(state):\n",
    """def train(state):
    if os.uname().nodename.endswith("-1") and not os.path.exists(folder + "/was stuck"):
        open(folder + "/was stuck", "w").close()
        time.sleep(3600)  # it comes to no commit
""",
)


@pytest.mark.slow
def test_who_does_not_leave_in_the_grace_period_is_lost(start: Start) -> None:
    job = start({"n": 3}, 6, "-np", "3", "--grace-s", "3", script=STUCK)
    job.cluster.until(lambda: (job.folder / "was stuck").exists())
    pod = job.cluster.evict(1)
    assert job.has_ended(pod) == -signal.SIGKILL
    job.goes_on(0, 1, 2)
    job.end()


FAULTY = SCRIPT.replace(
    "def train(state):\n",
    """def train(state):
    if os.uname().nodename.endswith("-2"):
        raise ValueError("a defect of this index")
""",
)


@pytest.mark.slow
def test_an_index_that_fails_again_and_again_is_given_up(start: Start) -> None:
    job = start({"n": 3}, 8, "-np", "3", "--retries", "2", script=FAULTY)
    job.cluster.until(lambda: job.cluster.failed == {2})
    assert job.cluster.failures == {2: 3}
    job.goes_on(0, 1)
    job.end()
