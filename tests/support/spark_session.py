"""A Spark session for the tests of one file."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from frameworks import is_installed

NEEDS_SPARK = [
    pytest.mark.frameworks,
    pytest.mark.skipif(not is_installed("pyspark"), reason="PySpark is not installed"),
    pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java (openjdk-17-jre)"),
    pytest.mark.timeout(200),
]
# Of Java processes that live for a minute: without the second compiler they take 40 % less.
QUICK_JAVA = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


@contextlib.contextmanager
def spark_session(master: str) -> Iterator[Any]:
    """Stopped with the context, and its Java with it."""
    os.environ |= {"SPARK_LOCAL_IP": "127.0.0.1", **QUICK_JAVA}
    os.environ["PYSPARK_PYTHON"] = sys.executable  # else the tasks' is the path's
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.executor.memory", "512m")
        .config("spark.task.maxFailures", "4")
        .getOrCreate()
    )
    gateway = session.sparkContext._gateway
    try:
        yield session
    finally:
        session.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()  # it ends with that
        gateway.proc.wait(30)
        type(session.sparkContext)._gateway = type(session.sparkContext)._jvm = None
