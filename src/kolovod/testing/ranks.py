"""Real processes as ranks, for tests: each calls a function, and the results come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kolovod.errors import HelperArgumentError
from kolovod.launch.function import CallOptions, RankFailed, call_on_ranks

__all__ = ["RankFailed", "run_ranks"]


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    keep_going: bool = False,
    hosts: Sequence[str] = (),
    output_dir: Path | None = None,
    executable: str = "",
) -> list[Any]:
    """Call ``fn(rank, *args)`` in ``n`` new processes; return the results by rank.

    The processes are ranks of one job: ``kolovod.init()`` in ``fn`` forms their world. ``fn``,
    ``args`` and the results travel by cloudpickle. ``env``: further variables for all ranks.
    ``hosts``: the host of each rank, if not all the same; they run here all the same, but those of
    different hosts communicate over TCP. ``output_dir``: also write each rank's output there, to
    rank.N/stdout and stderr. ``executable``: another Python than this one.

    When a rank fails, the others are ended, and the first failure is raised as RankFailed; so it is
    after ``timeout_s``, with the Python stacks of the ranks that were late. With ``keep_going`` the
    others go on, and the result of a rank that failed is its RankFailed (all failed: it is raised).
    No process is left behind in any case.
    """
    if n < 1:
        raise HelperArgumentError(f"run_ranks({n}): need at least one rank")
    options = CallOptions(
        timeout_s=timeout_s,
        environment=env or {},
        keep_going=keep_going,
        hosts=hosts,
        output_dir=output_dir,
        executable=executable,
    )
    return call_on_ranks(n, fn, args, options)
