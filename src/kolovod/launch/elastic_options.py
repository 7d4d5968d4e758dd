"""The user's options for an elastic job."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kolovod.config import KNOBS
from kolovod.coordination.hosts import RetryPolicy
from kolovod.coordination.membership import PREPARE_S, Policy

__all__ = ["ElasticOptions", "late_failure_of"]

_LATE_FAILURE_S = 600
"""For what is slow and not wrong: a first compilation, a checkpoint to a slow file server."""


def late_failure_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that says when a rank is late for good, for all ranks.

    It is {} where the user has set the limit. ``variables``: of the ranks, over the launcher's own.
    Other jobs have none: there nobody could take the place of a rank that is killed for it.
    """
    (knob,) = (knob for knob in KNOBS if knob.name == "late_failure_s")
    given = {**os.environ, **variables}
    if not given.keys().isdisjoint((knob.environment, *knob.aliases, knob.off)):
        return {}
    return {knob.environment: str(_LATE_FAILURE_S)}


@dataclass(frozen=True)
class ElasticOptions:
    """The options of an elastic job."""

    np: int
    """Processes at the beginning."""
    min_np: int = 1
    max_np: int = 1 << 10
    places: Mapping[str, int] = field(default_factory=dict)
    """Processes that each host may have, in the order of preference."""
    discover: Callable[[], Mapping[str, int]] | None = None
    """A function that says the places instead, as often as it is asked. Raises as
    ``discovery.ask_script``."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    elastic_timeout_s: float = 600.0
    reset_limit: int | None = None
    ends_for_growth: bool = False
    """See ``membership.Policy``."""
    gather_started_s: float = 0.0
    """See ``membership.Policy``."""
    hang_s: float = 0.0
    """See ``membership.Policy``."""
    replica_size: int = 1
    """See ``membership.Policy``. The numbers of processes are multiples of it."""
    begins_with_all: bool = False
    """Whether the job begins with as many processes as there are places, up to ``max_np``."""

    @property
    def policy(self) -> Policy:
        """The coordinator's policy."""
        return Policy(
            min_np=self.min_np,
            max_np=self.max_np,
            elastic_timeout_s=self.elastic_timeout_s,
            reset_limit=self.reset_limit,
            ends_for_growth=self.ends_for_growth,
            gather_started_s=self.gather_started_s,
            prepare_s=PREPARE_S,
            hang_s=self.hang_s,
            replica_size=self.replica_size,
        )
