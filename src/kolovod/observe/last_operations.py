"""The last operations of this rank, to be read at any time."""

from __future__ import annotations

import time
from typing import Any

from kolovod.core.process_sets import ProcessSet, global_process_set

__all__ = ["last_operations"]


def last_operations(process_set: ProcessSet = global_process_set) -> list[dict[str, Any]]:
    """Return the last operations of this rank in a set, about a thousand, by order of submission.

    Each is a dict: ``number`` (from 1), ``name`` (longer than 56 bytes: shortened in the middle),
    ``verb``, ``dtype`` (of the first tensor, None without one), ``codec`` (of what travels between
    hosts, or None), ``device`` ("host memory", or "GPU memory" where GPUs' tensors are carried as
    they are), ``tensors``, ``bytes`` (of this rank's), ``bucket`` (the bucket that carried it,
    numbered alike on all ranks; None: none so far, or it needed none), ``state`` ("submitted",
    "started", "done" or "failed"), and ``submitted_at_s``, ``started_at_s``, ``ended_at_s``
    (seconds since 1970; None: not yet). What is pending is always among them, unless more than a
    thousand operations are.
    Raises NotInitializedError, and InvalidArgumentError if this rank is not in the set.
    """
    offset_ns = time.time_ns() - time.monotonic_ns()
    records = process_set.membership().engine.last_operations()
    for record in records:
        for name in ("submitted", "started", "ended"):
            at_ns = record.pop(f"{name}_ns")
            record[f"{name}_at_s"] = (at_ns + offset_ns) / 1e9 if at_ns else None
    return records
