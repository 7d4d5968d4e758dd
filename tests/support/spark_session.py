"""A Spark session for the tests of one file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def spark_session(master: str) -> Iterator[Any]:
    """Stopped with the context, and its Java with it."""
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
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
