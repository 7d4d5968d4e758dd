"""The facts that a rank in Spark knows of its task."""

from __future__ import annotations

import os

from kolovod.spark.task import GPUS, gpus_of_task

__all__ = ["get_available_devices"]


def get_available_devices() -> list[str]:
    """The addresses of the GPUs that Spark has given this rank's task, for example ["0"]."""
    text = os.environ.get(GPUS)
    return gpus_of_task() if text is None else [each for each in text.split(",") if each]
