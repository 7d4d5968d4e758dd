"""kolovod.spark: what the driver does with a task's messages, without Spark."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from frameworks import is_installed

from kolovod.errors import BootstrapError

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(not is_installed("pyspark"), reason="PySpark is not installed"),
]


@pytest.fixture(name="cluster")
def cluster_without_spark():
    from kolovod.spark.cluster import SparkCluster

    made = SparkCluster(SimpleNamespace(cancelJobGroup=lambda group: None), 1, barrier=False)
    yield made
    made.close()


@pytest.mark.parametrize(
    "message",
    [
        {"began": [0, "x"]},
        {"began": [None, 5]},
        {"ended": [0, 5, "x", None, ""]},
        {"ended": [0, 5, 0, [], ""]},
        {"gone": ["x", True]},
    ],
    ids=str,
)
def test_what_is_no_number_is_said(cluster, message):
    from kolovod.clusters.fleet import Reached
    from kolovod.spark.cluster import _Task

    told = SimpleNamespace(began=None, ended=None)
    task = _Task("a", "", Reached("here", 1), number=0, told=told)
    with pytest.raises(BootstrapError, match="expected a whole number"):
        cluster._hear(task, message)
    assert task.number == 0  # so it is told that the process ends with its task


def test_a_task_that_comes_too_late_leaves_no_descriptor(cluster):
    hello = {"host": "a", "pids": "", "address": "here", "torch_port": 1}
    channel = SimpleNamespace(is_sealed=True, receive=lambda deadline: {"hello": hello})
    cluster.close()
    before = len(os.listdir("/proc/self/fd"))
    cluster._greet(channel)
    assert len(os.listdir("/proc/self/fd")) == before
