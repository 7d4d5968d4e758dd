"""The checked flags of `kolovod plan` and `kolovod report`. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kolovod.errors import CommandArgumentError
from kolovod.planning.changes import Change, parse_change, parse_hosts, parse_link
from kolovod.planning.measured import Measured
from kolovod.planning.plan import Plan, make

__all__ = ["Asked", "asked"]

_TIMES = (1, 2, 4, 8)  # the measured hosts


@dataclass(frozen=True)
class Asked:
    """Flags that have been checked."""

    hosts: tuple[int, ...]
    """() for the usual ones."""
    link: str
    changes: tuple[Change, ...]

    def plan(self, file: object, seen: Measured) -> Plan:
        """Make the plan. Raises InvalidArgumentError if the timeline ``file`` says too little."""
        hosts = self.hosts or tuple(times * seen.cluster.hosts for times in _TIMES)
        link = parse_link(self.link, seen.cluster.link.latency_s) if self.link else None
        if link is None and not seen.knows_link and max(hosts) > 1:
            raise CommandArgumentError(
                f"{file} is of one host, so no link was measured: say --link 10G (bits per "
                "second), or record a run on two hosts"
            )
        return make(seen, hosts, link=link, changes=self.changes)


def asked(hosts: str | None, link: str | None, changes: Sequence[str] = ()) -> Asked:
    """Check what was typed. Raises InvalidArgumentError."""
    parsed = tuple(parse_change(text) for text in changes)
    keys = [change.key for change in parsed]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise CommandArgumentError(f"--what-if {twice[0]}= is given twice: run it once for each")
    numbers = tuple(parse_hosts(hosts)) if hosts else ()
    if link:
        parse_link(link, 0.0)
    return Asked(numbers, link or "", parsed)
