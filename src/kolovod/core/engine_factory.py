"""The parts that ``init`` forms a world with: members, an engine.

Nothing here knows the state of the process.
"""

from __future__ import annotations

from operator import index
from typing import Any

from kolovod import _native
from kolovod.core import affinity, stacks
from kolovod.errors import (
    SettingError,
    StartTimeoutError,
    WaitTimeoutError,
    from_engine,
)
from kolovod.rendezvous.rank_environment import usable_cores
from kolovod.rendezvous.segment_handover import Ready

__all__ = ["listed", "make_engine", "members_of"]


def members_of(comm: Any, rank: int, size: int | None = None) -> tuple[int, ...]:
    """``comm`` as a sorted tuple; None: all ``size``. Raises InvalidArgumentError."""
    if comm is None and size is not None:
        return tuple(range(size))
    members = tuple(sorted(listed(comm)))
    if size is not None and (not members or members[0] < 0 or members[-1] >= size):
        raise SettingError(
            f"comm={list(members)}: expected launcher ranks from 0 to {size - 1}, at least one"
        )
    if len(set(members)) != len(members):
        raise SettingError(f"comm={list(members)}: a rank is named twice")
    if size is not None and rank not in members:
        raise SettingError(
            f"comm={list(members)} does not contain this process, which the launcher started as "
            f"rank {rank}: only the ranks of the new world call init(comm)"
        )
    return members


def listed(comm: Any) -> list[int]:
    """The numbers in ``comm``, any iterable of them. Raises InvalidArgumentError."""
    try:
        return [index(member) for member in comm]
    except TypeError:
        raise SettingError(f"comm={comm!r}: expected launcher ranks (whole numbers)") from None


def make_engine(
    ready: Ready,
    core: int | None,
    *,
    external: str = "",
    ranks: tuple[int, ...] = (),
    world: _native.Engine | None = None,
    last_operations_prefix: str = "",
) -> _native.Engine:
    """The engine of what has been made ready; its threads run on ``core``, if that is given.

    ``external``: which tensors a backend is to carry; see ``_native.Engine``. ``ranks``: of a
    process set of ``world``, its members' numbers there.
    """
    size = len(ready.members)
    hosts = ready.hosts
    config = ready.config
    if core is not None:  # the engine must not count that one only
        config = {**config, "cores": config["cores"] or usable_cores()}
    links = ready.links
    try:
        with affinity.threads_on(core):
            to_leaders = [] if links is None else links.hand_over()
            return _native.Engine(
                ready.rank,
                size,
                ready.epoch,
                ready.segment_fd,
                ready.peers(ranks or range(size)),
                config,
                external=external,
                ranks=ranks,
                world=world,
                hosts=hosts,
                control_fds=[made.fd for made in to_leaders],
                control_keys=[made.keys for made in to_leaders],
                links=links,
                stacks=stacks.source() if size > 1 else None,
                last_operations_prefix=last_operations_prefix,
            )
    except BaseException as exc:
        if links is not None:
            links.close()
        if not isinstance(exc, _native.EngineError):
            raise
        error = from_engine(exc)
        if isinstance(error, WaitTimeoutError):
            raise StartTimeoutError(str(error)) from None
        raise error from None
