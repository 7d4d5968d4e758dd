"""Texts of Horovod's elastic launcher."""

from __future__ import annotations

__all__ = ["RESET_LIMIT_EXCEEDED_MESSAGE"]

RESET_LIMIT_EXCEEDED_MESSAGE = "the reset limit of {} is reached"
"""The text, with the limit, of a job that would need one more world than it may have."""
