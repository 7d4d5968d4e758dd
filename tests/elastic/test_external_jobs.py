"""Elastic jobs whose ranks somebody else starts, and starts again: whole ones, on this host."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_steps import DEADLINE_S, STEPS, until
from ports import reserve_port

SIZE = 3
TOLD = ("KOLOVOD_", "HOROVOD_", "OMPI_", "PMI_", "SLURM_")


class Supervised:
    """The ranks of a job, as a supervisor that knows nothing of them would start them."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        self._variables = {
            "KOLOVOD_STORE_HOST": "localhost",
            "KOLOVOD_STORE_PORT": str(reserve_port()),
            "KOLOVOD_SIZE": str(SIZE),
            "KOLOVOD_LOCAL_SIZE": str(SIZE),
            "KOLOVOD_MIN_NP": "1",
            **variables,
        }
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, rank: int, script: str = STEPS, **variables: str) -> subprocess.Popen[str]:
        environ = {n: v for n, v in os.environ.items() if not n.startswith(TOLD)}
        told = {"KOLOVOD_RANK": str(rank), "KOLOVOD_HOST": "here", **self._variables, **variables}
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(self.folder), "0"],
            env={**environ, **told},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def now(self) -> tuple[int, int, int]:
        """Step, number of ranks and pid of rank 0, as it noted them last."""
        try:
            step, size, pid = (self.folder / "step").read_text().split()
            return int(step), int(size), int(pid)
        except (OSError, ValueError):
            return 0, 0, 0

    def waiting(self) -> int:
        """How many are connected to the join endpoint."""
        name = f"-{self._variables['KOLOVOD_STORE_PORT']}-elastic"
        lines = Path("/proc/net/unix").read_text().splitlines()
        return sum(line.endswith(name) and line.split()[5] == "03" for line in lines)

    def goes_on(self, size: int) -> None:
        """Twenty steps at least, the last of them by so many ranks."""
        step = self.now()[0]
        until(lambda: self.now()[0] >= step + 40 and self.now()[1] == size)

    def end(self, *expected: subprocess.Popen[str]) -> list[tuple[str, str]]:
        """Let the job end; what these processes have written."""
        (self.folder / "end").touch()
        said = [process.communicate(timeout=DEADLINE_S) for process in expected]
        assert [process.returncode for process in expected] == [0] * len(expected), said
        return said

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            if process.stdout is not None and not process.stdout.closed:
                print(process.args[0], process.pid, *process.communicate(), sep="\n")


@pytest.fixture(name="job")
def made_job(tmp_path: Path) -> Iterator[Supervised]:
    job = Supervised(tmp_path)
    yield job
    job.close()


def test_rank_0_may_end_and_come_again(job: Supervised) -> None:
    ranks = [job.start(rank) for rank in range(SIZE)]
    job.goes_on(SIZE)
    assert job.now()[2] == ranks[0].pid
    ranks[0].kill()  # who holds the join endpoint, the coordinator's part and the rendezvous
    job.goes_on(SIZE - 1)
    assert job.now()[2] == ranks[1].pid
    again = job.start(0)
    job.goes_on(SIZE)
    ranks[1].kill()
    job.goes_on(SIZE - 1)
    said = job.end(ranks[2], again)
    steps = [re.search(r"steps (\d+) \1 longest", out) for out, _ in said]
    assert sum(step is not None for step in steps) == 1  # rank 0 of then
    assert "rank 1 takes its part from now on" in ranks[1].communicate()[1]


def test_who_ends_before_the_job_begins_may_come_again(job: Supervised) -> None:
    """Rank 0, at which the others wait, and another one; one comes twice at a time."""
    early, one = job.start(0), job.start(1)
    until(lambda: job.waiting() == 1)
    early.kill()
    early.wait()  # until then what was connected there is counted
    zero = job.start(0)
    until(lambda: job.waiting() == 1)
    one.kill()
    until(lambda: job.waiting() == 0)
    twice = [job.start(2), job.start(2)]  # of which the later one at the join endpoint counts
    until(lambda: any(process.poll() is not None for process in twice))
    two, refused = sorted(twice, key=lambda process: process.poll() is not None)
    assert two.poll() is None
    errors = refused.communicate(timeout=DEADLINE_S)[1]
    assert refused.returncode != 0
    assert "rank 2 is not expected" in errors
    assert f"another process has come as rank 2, on host here (pid {two.pid})" in errors
    one = job.start(1)
    job.goes_on(SIZE)
    job.end(zero, one, two)


@pytest.mark.slow
def test_rank_0_comes_again_with_others_and_finds_the_job(job: Supervised) -> None:
    ranks = [job.start(rank) for rank in range(SIZE)]
    job.goes_on(SIZE)
    for process in ranks[:2]:
        process.kill()
    job.goes_on(1)
    again = [job.start(rank) for rank in range(2)]
    job.goes_on(SIZE)
    job.end(*again, ranks[2])


@pytest.mark.slow
def test_sigterm_is_leaving_with_a_code_that_has_another_one_started(job: Supervised) -> None:
    ranks = [job.start(rank) for rank in range(SIZE)]
    job.goes_on(SIZE)
    ranks[1].terminate()
    ranks[1].communicate(timeout=DEADLINE_S)
    assert ranks[1].returncode == 128 + signal.SIGTERM
    job.goes_on(SIZE - 1)
    again = job.start(1)
    job.goes_on(SIZE)
    job.end(ranks[0], again, ranks[2])


CHECKPOINT = STEPS.replace(
    "@elastic.run",
    """@state.on_leave
def save(rank):
    with open(f"{folder}/left {rank} {os.getpid()}", "w") as file:
        file.write(str(state.step))


@elastic.run""",
    1,
)


def test_who_leaves_by_a_signal_may_write_a_checkpoint(tmp_path: Path) -> None:
    """All leave, as before a time limit: rank 0 has made all steps that anybody has made."""
    job = Supervised(tmp_path, KOLOVOD_SIZE="2", KOLOVOD_LOCAL_SIZE="2")
    try:
        ranks = [job.start(rank, CHECKPOINT) for rank in range(2)]
        job.goes_on(2)
        for process in ranks:
            process.send_signal(signal.SIGUSR1)
        said = [process.communicate(timeout=DEADLINE_S)[1] for process in ranks]
        assert [process.returncode for process in ranks] == [128 + signal.SIGTERM] * 2, said
        # Who was told first may have left a step before the other one, which is rank 0 then.
        steps = [int(path.read_text()) for path in tmp_path.glob("left *")]
        assert len(steps) == 2
        by_rank_0 = [int(path.read_text()) for path in tmp_path.glob("left 0 *")]
        assert max(by_rank_0) == max(steps) >= 40
    finally:
        job.close()


@pytest.mark.slow
def test_several_starts_make_one_job_by_its_name(tmp_path: Path) -> None:
    """The second one counts its ranks from 0, too, and has all three on one host."""
    named = {"KOLOVOD_JOB_NAME": "one", "KOLOVOD_SECRET": "0123456789abcdef", "KOLOVOD_MAX_NP": "4"}
    job = Supervised(tmp_path, **named)
    try:
        ranks = [job.start(rank) for rank in range(SIZE)]
        job.goes_on(SIZE)
        other = job.start(0, KOLOVOD_FIRST_RANK="3", KOLOVOD_SECRET="another 0123456789abcdef")
        assert (
            "its secret (KOLOVOD_SECRET) is not that of the job"
            in other.communicate(timeout=DEADLINE_S)[1]
        )
        more = job.start(0, KOLOVOD_FIRST_RANK="3")
        job.goes_on(4)
        job.end(more, *ranks)
    finally:
        job.close()


@pytest.mark.slow
def test_ranks_beyond_the_first_ones_join(tmp_path: Path) -> None:
    job = Supervised(tmp_path, KOLOVOD_MAX_NP="4")
    try:
        more = job.start(3)  # it waits until there is a job
        ranks = [job.start(rank) for rank in range(SIZE)]
        job.goes_on(4)
        job.end(more, *ranks)
    finally:
        job.close()


@pytest.mark.slow
def test_a_job_with_too_few_ranks_waits_and_then_ends(tmp_path: Path) -> None:
    job = Supervised(tmp_path, KOLOVOD_MIN_NP="3", KOLOVOD_ELASTIC_TIMEOUT_S="3")
    try:
        ranks = [job.start(rank) for rank in range(SIZE)]
        job.goes_on(SIZE)
        ranks[2].kill()
        said = [process.communicate(timeout=DEADLINE_S)[1] for process in ranks[:2]]
        assert [process.returncode for process in ranks[:2]] == [1, 1]
        for text in said:
            assert "2 of the at least 3 members are there" in text
    finally:
        job.close()


HOROVOD = """
import os, signal, sys, torch
import horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, batch=0)

@hvd.elastic.run
def train(state):
    while state.batch < 30:
        if state.batch == 10 and hvd.rank() == 0 and hvd.size() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        state.batch += 1
        state.commit()

train(state)
print("size", hvd.size(), "after", state.batch, model.weight.sum().item())
"""


@pytest.mark.slow
def test_horovods_elastic_scripts_are_elastic_there_too(job: Supervised) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    ranks = [job.start(rank, HOROVOD) for rank in range(SIZE)]
    first, second = job.end(*ranks[1:])
    assert first[0] == second[0]
    assert first[0].startswith("size 2 after 30")


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"KOLOVOD_MIN_NP": "4"}, "KOLOVOD_MIN_NP=4, 3 ranks that your own launcher starts"),
        ({"KOLOVOD_MAX_NP": "2"}, "KOLOVOD_MAX_NP=2: they must not descend"),
        ({"KOLOVOD_LOCAL_SIZE": "1"}, "they have no secret in common"),
        ({"KOLOVOD_START_TIMEOUT_S": "0.5"}, "rank 1, 2 did not come within 0.5 s"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, variables: dict[str, str], says: str) -> None:
    job = Supervised(tmp_path, **variables)
    try:
        process = job.start(0)
        errors = process.communicate(timeout=DEADLINE_S)[1]
        assert process.returncode == 1
        assert says in errors
    finally:
        job.close()
