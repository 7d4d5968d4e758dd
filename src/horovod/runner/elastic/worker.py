"""The names by which scripts find how a worker hears of other hosts."""

from __future__ import annotations

from horovod.common.notifications import HostUpdateResult, WorkerNotificationManager

__all__ = ["HostUpdateResult", "WorkerNotificationManager"]
