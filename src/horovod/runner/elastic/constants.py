"""Texts of Horovod's elastic launcher."""

from __future__ import annotations

__all__ = ["RESET_LIMIT_EXCEEDED_MESSAGE"]

RESET_LIMIT_EXCEEDED_MESSAGE = "the reset limit of {} is reached"
"""With the limit: what a job says that would need one more world than it may have."""
