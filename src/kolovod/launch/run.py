"""``kolovod.run``: a function as the ranks of one world, from a script, a notebook or a REPL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kolovod.errors import CommandArgumentError
from kolovod.launch.agent_line import SshOptions
from kolovod.launch.function import CallOptions, RankFailed, call_on_ranks, call_without_rank
from kolovod.launch.hosts import assign, parse_hosts
from kolovod.launch.progress import Progress, notebook_line
from kolovod.notices import report_to_stderr

__all__ = ["Progress", "RankFailed", "SshOptions", "run"]


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    env: Mapping[str, str] | None = None,
    ssh: SshOptions | None = None,
    timeout_s: float | None = None,
    output_dir: str | Path | None = None,
    executable: str = "",
    on_progress: Callable[[Progress], None] | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``np`` ranks; return what each returned, by rank.

    ``hosts``: where they run, as "a:4,b:4"; without it, all on this host. Without ``np`` there are
    as many ranks as ``hosts`` have slots, else one. ``fn`` calls ``kolovod.init()`` itself. It may
    be defined in a notebook or a REPL: it, ``args`` and the results travel by cloudpickle, and to
    other hosts through ssh (``ssh`` says how they are reached). ``env``: further variables of the
    ranks; ``timeout_s``: how long all may take; ``output_dir``: a folder for each rank's output;
    ``executable``: their Python. What ranks print is passed on, marked with the rank.
    ``on_progress`` is called twice a second, and at the end, with how the job stands; without it, a
    line in a notebook's cell says so.

    When a rank fails, the others are ended and RankFailed is raised: with the rank's traceback in
    its text, and the rank's exception as its ``__cause__``. Raises InvalidArgumentError for wrong
    arguments, BootstrapError if hosts cannot be reached. No process is left behind.
    """
    size = 1 if np is None and hosts is None else np
    if size is not None and size < 1:
        raise CommandArgumentError(f"np={np}: at least one rank is needed")
    placed = [] if hosts is None else assign(parse_hosts(hosts), size)
    options = CallOptions(
        timeout_s=timeout_s,
        environment=env or {},
        hosts=placed,
        ssh=(ssh or SshOptions()) if hosts is not None else None,
        output_dir=None if output_dir is None else Path(output_dir),
        executable=executable,
        report=report_to_stderr,
        on_progress=on_progress or notebook_line(),
    )
    count = len(placed) if hosts is not None else (size or 1)
    call = fn, tuple(args), dict(kwargs or {})
    return call_on_ranks(count, call_without_rank, call, options)
