"""Ranks in Spark: a cluster of two executors on this host."""

from __future__ import annotations

import os
import signal
from functools import partial

import numpy as np
import psutil
import pytest
from growing_job import check_results, growing, said, works_with
from spark_session import NEEDS_SPARK, spark_session
from waiting import until

pytestmark = NEEDS_SPARK


@pytest.fixture(scope="module", autouse=True)
def session():
    with spark_session("local-cluster[2,1,512]") as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(session):
    yield
    tracker = session.sparkContext.statusTracker()
    until(lambda: not tracker.getActiveStageIds(), "the end of all stages")


def run(*arguments, **keywords):
    import kolovod.spark

    return kolovod.spark.run(*arguments, **keywords)


def test_results_by_rank(capsys):
    def of_rank(factor, plus=0):
        import kolovod as kv

        kv.init()
        total = kv.allreduce(np.array([kv.rank() * factor + plus]), op=kv.Sum)
        print(f"this is rank {kv.rank()}")
        return kv.rank(), kv.size(), float(total[0]), os.environ["SAID"]

    for _ in range(2):  # Spark's Python workers are used again
        results = run(of_rank, (10.0,), {"plus": 1}, num_proc=2, env={"SAID": "yes"})
        assert results == [(0, 2, 12.0, "yes"), (1, 2, 12.0, "yes")]
    shown = capsys.readouterr().out.splitlines()
    for rank in range(2):
        assert any(line.endswith(f"[{rank}]<stdout>:this is rank {rank}") for line in shown)


def test_many_bytes_there_and_back():
    data = np.random.default_rng(0).bytes(3_000_001)
    assert run(lambda given: given[::-1], (data,), num_proc=1) == [data[::-1]]


def test_an_exception_names_the_rank():
    from kolovod.spark import RankFailed

    def fails():
        import kolovod as kv

        kv.init()
        if kv.rank() == 1:
            raise ValueError("the loss is nan")
        kv.allreduce(np.ones(3))

    with pytest.raises(RankFailed, match=r"(?s)rank 1 .*the loss is nan") as seen:
        run(fails, num_proc=2)
    assert seen.value.rank == 1
    assert isinstance(seen.value.__cause__, ValueError)


def test_a_rank_that_is_killed():
    from kolovod.spark import RankFailed

    def dies():
        import kolovod as kv

        kv.init()
        if kv.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        kv.allreduce(np.ones(3))

    with pytest.raises(RankFailed, match=r"rank 1 .*was killed by signal 9") as seen:
        run(dies, num_proc=2)
    assert seen.value.exit_code == 137


def test_too_few_cores():
    from kolovod.errors import BootstrapError

    with pytest.raises(BootstrapError, match=r"started 0 of 3 tasks in 3 s"):
        run(lambda: None, num_proc=3, start_timeout_s=3.0)


def test_wrong_numbers():
    from kolovod.errors import InvalidArgumentError

    with pytest.raises(InvalidArgumentError, match="num_proc=0"):
        run(lambda: None, num_proc=0)


@pytest.fixture
def job(tmp_path):
    """An elastic job of one to two ranks."""
    import kolovod.spark

    run_elastic = partial(kolovod.spark.run_elastic, min_num_proc=1, max_num_proc=2)
    with growing(run_elastic, tmp_path) as made:
        yield made


def executor_of(pid):
    """The Java process in which the task of a rank is."""
    for process in psutil.Process(pid).parents():
        if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
            return process
    raise AssertionError(f"no executor is above process {pid}")


@pytest.mark.parametrize(
    ("what", "of"),
    [
        pytest.param("rank", 1, marks=pytest.mark.slow),
        pytest.param("executor", 1, marks=pytest.mark.slow),
        ("executor", 0),
    ],
)
def test_what_is_killed_comes_back(job, what, of):
    """A rank in its task; an executor with its task, by Spark."""
    job, folder, stop = job
    job.wait_for(lambda: works_with(folder, 2))
    first = said(folder)
    victim = next(pid for pid, (rank, _, _) in first.items() if rank == of)
    os.kill(victim if what == "rank" else executor_of(victim).pid, signal.SIGKILL)
    job.wait_for(lambda: len(said(folder)) >= 3 and works_with(folder, 2))
    stop.touch()
    check_results(job.result(), 2, first.keys() - {victim})
