"""From ranks that know each other's names to an engine's inputs: the shared segment, the pidfds.

The member with the lowest launcher rank leads, and hands round the segment (segment_handover.py).

A world of several hosts has a leader and a segment on each; before that their leaders connect to
each other (mesh.py). Nobody knows who leads, nor whether there are several hosts, before all have
met at the rendezvous server. So everybody comes there with both addresses, and opens only what
turns out to be needed. All ranks say at the rendezvous server when they are ready, and none goes on
before all are.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kolovod.errors import BootstrapError
from kolovod.net.addresses import addresses_beside
from kolovod.net.encryption import require_libcrypto
from kolovod.rendezvous.client import WORD_S, join
from kolovod.rendezvous.mesh import Links, Listener
from kolovod.rendezvous.protocol import Formation, Member
from kolovod.rendezvous.segment_handover import Leader, Ready, follow, pid_namespace

__all__ = ["bootstrap"]


def bootstrap(
    rank: int,
    members: tuple[int, ...],
    host: str,
    rendezvous: str,
    secret: str,
    config: Mapping[str, int],
    timeout_s: float,
    interfaces: Sequence[str] = (),
    local_rank: int = 0,
    *,
    encrypts: bool = False,
    notes: Mapping[str, str] | None = None,
    scope: int = 0,
    meets_within_s: float = math.inf,
) -> Ready:
    """Meet the other ``members`` (sorted launcher ranks, with ``rank``) and share the segment.

    ``interfaces``: by which ranks of other hosts are to come (see ``addresses_beside``).
    ``encrypts``: what passes between hosts is encrypted, as all members must want it.
    ``notes``: what this rank tells the others if it is the first member. ``scope``: the epoch in
    whose world, of an elastic job, ranks have these numbers; 0: they are launcher ranks.
    ``timeout_s`` is for all of it, ``meets_within_s`` for the first to come, until all have.
    Raises what ``client.join`` raises; RankLostError if a member ends meanwhile, StartTimeoutError
    if one does not come, BootstrapError.
    """
    deadline = time.monotonic() + timeout_s
    if encrypts:
        require_libcrypto(host)
    with contextlib.ExitStack() as cleanup:
        exchange = cleanup.enter_context(contextlib.closing(Leader(secret)))
        listener = Listener(addresses_beside(rendezvous, interfaces, local_rank), len(members))
        cleanup.callback(listener.close)
        pid, user = os.getpid(), os.geteuid()
        me = Member(
            rank, host, pid, pid_namespace(), exchange.name, user, listener.address, encrypts
        )
        joined = cleanup.enter_context(
            join(
                rendezvous,
                secret,
                members,
                me,
                min(timeout_s, meets_within_s),
                config,
                notes,
                scope,
            )
        )
        formation = joined.formation
        deadline = max(deadline, time.monotonic() + 10)  # the last to join must not find it passed
        _check_users(formation)
        _check_encryption(formation)
        new_rank = members.index(rank)
        here = tuple(member for member in formation.members if member.host == host)
        links = None
        if len(here) < len(members):
            links = Links(new_rank, formation, listener, secret, encrypted=encrypts)
            cleanup.callback(links.close)
            try:
                links.connect_leaders(deadline, joined.check)
            except BootstrapError:
                joined.check(WORD_S)  # whoever does not answer may have ended
                raise
        if here[0].rank == rank:
            ready = exchange.run(joined, here, deadline)
        else:
            ready = follow(joined, here[0], new_rank, secret, deadline)
        with _closed_on_error(ready):
            joined.formed(deadline)
        if links is not None:  # it goes on to listen
            cleanup.pop_all()
            joined.close()
            exchange.close()
        return replace(ready, links=links, notes=formation.notes)


@contextlib.contextmanager
def _closed_on_error(ready: Ready) -> Iterator[None]:
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(ready)
        yield
        cleanup.pop_all()


def _check_users(formation: Formation) -> None:
    first: dict[str, Member] = {}
    for member in formation.members:
        other = first.setdefault(member.host, member)
        if member.user != other.user:
            raise BootstrapError(
                f"{member} runs as user {member.user}, but {other} as user {other.user}: ranks of "
                "one host share memory, so start them all as the same user"
            )


def _check_encryption(formation: Formation) -> None:
    first = formation.members[0]
    for member in formation.members:
        if member.encrypts != first.encrypts:
            values = [f"KOLOVOD_ENCRYPT={int(m.encrypts)}" for m in (member, first)]
            raise BootstrapError(
                f"{member} has {values[0]}, but {first} has {values[1]}: set it alike for all "
                "ranks, as kolovod run --encrypt does"
            )
