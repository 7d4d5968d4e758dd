"""``kolovod.ray.run``: a function as the ranks of one world, in a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray import cloudpickle  # which knows references to Ray's objects
from ray.util.placement_group import get_current_placement_group

from kolovod.clusters.calls import Call, elastic_options, packed, size_of
from kolovod.notices import report_to_stderr
from kolovod.ray.launcher import Request, follow

__all__ = ["run"]


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_workers: int | tuple[int, int] = 1,
    resources: Mapping[str, float] | None = None,
    env: Mapping[str, str] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    placement_timeout_s: float = 100.0,
    start_timeout_s: float = 60.0,
    elastic_timeout_s: float = 600.0,
    reset_limit: int | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` in ``num_workers`` Ray actors; return the results by rank.

    ``num_workers=(fewest, most)`` asks for an elastic job: it begins with as many as Ray has room
    for, a rank whose actor or node is lost comes back, and more join when there is room. Then
    ``fn`` calls a function made by ``kolovod.elastic.run``, and the results are those of the ranks
    at the end. ``fn`` calls ``kolovod.init()`` itself.

    ``resources``: what each rank needs, with Ray's names, by default ``{"CPU": 1}``; a rank sees
    the GPUs that are its own. ``env``: further variables of the ranks; ``runtime_env``: see Ray.
    Within a placement group that has enough bundles (that of a trial of Ray Tune, say; the
    caller's is taken last) the ranks are there, else in one of their own. What ranks print is
    passed on, marked with the rank (of an elastic job: slot).

    Times are in seconds. ``timeout_s``: how long all may take, without an end by default; an
    elastic job has none. ``placement_timeout_s``: to wait for room for the fewest.
    ``start_timeout_s``: for an actor to run. Of an elastic job, ``elastic_timeout_s``: to wait
    until there are the fewest again; ``reset_limit``: how often its world may change.

    Raises RankFailed for the rank that failed first (elastic: last), with its traceback in the text
    and its exception as ``__cause__``; JobOverError where an elastic job cannot go on;
    InvalidArgumentError for wrong arguments, BootstrapError where there is no room. No actor and no
    placement group is left behind.
    """
    least, most, is_elastic = size_of(num_workers, "num_workers")
    options = None
    if is_elastic:
        options = elastic_options(
            least, most, elastic_timeout_s=elastic_timeout_s, reset_limit=reset_limit
        )
    asked = dict(runtime_env or {})
    if env:
        asked["env_vars"] = {**asked.get("env_vars", {}), **env}
    request = Request(
        Call(
            packed(fn, args, kwargs, cloudpickle.dumps), most, options, dict(env or {}), timeout_s
        ),
        least,
        most,
        dict({"CPU": 1} if resources is None else resources),
        placement_timeout_s,
        start_timeout_s,
        runtime_env=asked,
        group=get_current_placement_group(),
    )
    return follow(request, report_to_stderr)
