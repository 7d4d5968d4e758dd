"""horovod.spark, and the example that trains from a DataFrame, in local[2]."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import numpy as np
import pytest
from paths import ROOT
from slow import thorough_but
from spark_session import NEEDS_SPARK, QUICK_JAVA, spark_session

pytestmark = NEEDS_SPARK


@pytest.fixture(scope="module")
def session():
    with spark_session("local[2,4]") as made:
        yield made


def test_without_a_session():
    import horovod.spark

    with pytest.raises(Exception, match="active SparkContext"):
        horovod.spark.run(lambda: None)
    with pytest.raises(Exception, match="active SparkContext"):
        horovod.spark.run_elastic(lambda: None)


def test_arguments_that_contradict_each_other():
    import horovod.spark

    with pytest.raises(ValueError, match="exclude each other"):
        horovod.spark.run(lambda: None, use_mpi=True, use_gloo=True)


def of_rank(factor, fails=False):
    import kolovod as kv
    from horovod.spark.task import get_available_devices

    kv.init()
    print("here")
    if fails and kv.rank() == 1:
        raise KeyError("label")
    total = kv.allreduce(np.array([factor]), op=kv.Sum)
    return kv.rank(), float(total[0]), os.environ["MINE"], get_available_devices()


def test_run(session):
    import horovod.spark

    out = io.StringIO()
    results = horovod.spark.run(
        of_rank, (2.0,), env={"MINE": 7}, stdout=out, prefix_output_with_timestamp=True
    )
    assert results == [(rank, 4.0, "7", []) for rank in range(2)]  # the default parallelism
    lines = out.getvalue().splitlines()
    assert sorted(line.split(" ", 1)[1] for line in lines) == [
        f"[{rank}]<stdout>:here" for rank in range(2)
    ]
    with pytest.raises(RuntimeError, match=r"(?s)non-zero status.*KeyError: 'label'"):
        horovod.spark.run(of_rank, (2.0,), {"fails": True}, num_proc=2, env={"MINE": 7})
    with pytest.raises(ValueError, match="num_proc=0"):
        horovod.spark.run(of_rank, num_proc=0)


@pytest.mark.slow
def test_run_elastic(session, tmp_path):
    """A rank that fails comes back, with the others' last commit."""
    import horovod.spark

    marker = tmp_path / "failed"

    def elastic():
        import horovod.torch as hvd

        hvd.init()
        state = hvd.elastic.TorchState(batch=0)

        @hvd.elastic.run
        def train(state):
            while state.batch < 8:
                if state.batch == 4 and hvd.rank() == 1 and not marker.exists():
                    marker.touch()
                    os._exit(1)
                hvd.allreduce(__import__("torch").ones(1), name="step")
                state.batch += 1
                state.commit()
            return state.batch, os.environ["HOROVOD_ELASTIC"]

        return train(state)

    results = horovod.spark.run_elastic(elastic, num_proc=2, min_num_proc=1)
    assert marker.exists()
    assert results
    assert set(results) == {(8, "1")}


def test_pairs_are_sparks():
    from pyspark import SparkConf

    from horovod.spark import conf

    made = SparkConf(loadDefaults=False)
    for name in conf.__all__:
        value = getattr(conf, name)
        if isinstance(value, tuple):
            made.set(*value)
            assert made.get(value[0]) == value[1]
    assert made.get("spark.task.maxFailures") == str(2**31 - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "master", thorough_but(["local[2]"], ["local[2]", "local-cluster[2,1,1024]"])
)
def test_the_example(master):
    """tests/clusters/test_spark.py has what is different where there are several executors."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "spark_parquet.py"), "--master", master],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, **QUICK_JAVA},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [line.split() for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert [int(words[1].rstrip(":")) for words in ranks] == [0, 1]
    assert all(int(words[2]) >= 2 and float(words[-1]) > 0.8 for words in ranks), done.stdout
