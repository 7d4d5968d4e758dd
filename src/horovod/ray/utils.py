"""Functions that Ray's own libraries ask Horovod for beside its executors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from horovod.runner.nics import interface_variables

__all__ = ["detect_nics", "nics_to_env_var"]


def detect_nics(
    settings: Any,
    all_host_names: Sequence[str] | None = None,
    node_workers: Sequence[Any] | None = None,
) -> list[str]:
    """The interfaces that the settings name; none: ranks find each other by what connects."""
    return sorted(getattr(settings, "nics", None) or ())


def nics_to_env_var(nics: Iterable[str]) -> dict[str, str]:
    """The variables that tell libraries of these interfaces."""
    return interface_variables(list(nics))
