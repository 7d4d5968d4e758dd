"""``breakpoint()`` on ranks that have no terminal, where a debugger would end at once.

The launcher names ``refuse`` in PYTHONBREAKPOINT, unless the user has named another one.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from kolovod.errors import CommandArgumentError

HOOK = f"{__name__}.refuse"


def refuse(*arguments: Any, **options: Any) -> NoReturn:
    """Raise InvalidArgumentError."""
    rank = os.environ.get("KOLOVOD_RANK")
    who = "a rank" if rank is None else f"rank {rank}"
    raise CommandArgumentError(
        f"breakpoint() on {who} that has no terminal: only rank 0 has that of `kolovod run`, where "
        "it runs on the same host and the job is not elastic. Stop there, "
        "`if kolovod.rank() == 0: breakpoint()`, or run the script by itself"
    )
