"""The launcher of a job in a Ray cluster: an actor, so that all nodes reach it.

It runs the job as ``kolovod run`` does, and is the coordinator of an elastic one. The driver, which
may be outside the cluster, asks it for what there is to show, and for the results.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TextIO, cast

import cloudpickle
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup

from kolovod.clusters.calls import Call, call_in
from kolovod.errors import InternalError, JobOverError
from kolovod.launch.discovery import Discovery
from kolovod.launch.function import console
from kolovod.ray.answers import answer
from kolovod.ray.cluster import RayCluster
from kolovod.ray.places import Bundles, Nodes, Places, on_node

__all__ = ["Event", "Launcher", "Request", "follow", "make_places"]

_MOST_EVENTS = 1000
"""That wait for the driver; ranks that write more wait for it."""
_MOST_AT_ONCE = 100
_WAIT_S = 2.0
_THREADS = 64


class Event(NamedTuple):
    """An event that the driver is told of."""

    kind: str
    """"stdout", "stderr", "report", "results" or "error"."""
    value: Any
    """Text; the results, pickled, or the exception that ends the job."""


@dataclass(frozen=True)
class Request:
    """The description of a job that is to run. It can be pickled."""

    call: Call
    least: int
    most: int
    resources: Mapping[str, float]
    placement_timeout_s: float
    start_timeout_s: float
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    group: PlacementGroup | None = None
    """The caller's group, where the ranks are to be if it has enough bundles; else they are in
    groups of the job's own."""


def make_places(request: Request) -> Places:
    """Return the places of its ranks; the caller closes them. Raises BootstrapError."""
    if request.group is not None:
        found = Bundles.within(request.group, request.most, request.resources)
        if found is not None:
            return found
    return Bundles.reserve(
        request.least, request.most, request.resources, request.placement_timeout_s
    )


class Launcher:
    """The actor. It has several threads, and a call made twice (``answers``) counts once."""

    def __init__(self) -> None:
        self._events: queue.Queue[Event] = queue.Queue(_MOST_EVENTS)
        self._cluster: RayCluster | None = None
        self._places: Places | None = None
        self._beginning = threading.Lock()
        self._has_begun = False
        self._telling = threading.Lock()
        self._taken = 0
        self._told: list[Event] = []  # after those; the driver may not have heard of them
        self._bringing = threading.Lock()
        self._written: dict[tuple[int, str], int] = {}  # bytes, by process and stream

    def begin(self, request: Request, places: Places) -> None:
        """Start the job. Its end is an event."""
        own = ray.get_runtime_context().current_actor
        with self._beginning:
            if self._has_begun:
                return
            self._has_begun = True
            self._places = places
        threading.Thread(target=self._run, args=(request, places, own), daemon=True).start()

    def _run(self, request: Request, places: Places, own: Any) -> None:
        try:
            self._cluster = RayCluster(
                places,
                own,
                start_timeout_s=request.start_timeout_s,
                runtime_env=request.runtime_env,
            )
            results = call_in(
                self._cluster,
                request.call,
                lambda text: self._events.put(Event("report", text)),
                cast("TextIO", _Shown(self._events, "stdout")),
                cast("TextIO", _Shown(self._events, "stderr")),
            )
            self._events.put(Event("results", cloudpickle.dumps(results)))
        except Exception as error:
            self._events.put(Event("error", _packed_error(error)))

    def learn(self, known: Mapping[str, int]) -> None:
        """Take over the nodes of the job, and the places on each, that the driver now names."""
        assert isinstance(self._places, Nodes)
        self._places.learn(known)

    def written(self, number: int, stream: str, start: int, data: bytes) -> None:
        """Take a rank's output from a node monitor, from byte ``start`` of the stream on.

        A node monitor waits for the answer before it brings more of a stream.
        """
        with self._bringing:
            if start < self._written.get((number, stream), 0):
                return  # it is brought a second time
            self._written[number, stream] = start + len(data)
        if self._cluster is not None:
            self._cluster.written(number, stream, data)

    def next(self, taken: int) -> list[Event]:
        """Return what has happened after the first ``taken`` events, of which the driver has heard.

        The list is empty if nothing happens for a while.
        """
        with self._telling:
            del self._told[: taken - self._taken]
            self._taken = taken
            with contextlib.suppress(queue.Empty):
                if not self._told:
                    self._told.append(self._events.get(timeout=_WAIT_S))
                while len(self._told) < _MOST_AT_ONCE:
                    self._told.append(self._events.get_nowait())
            return list(self._told)


class _Shown(io.TextIOBase):
    """A stream to which the job writes what ranks write."""

    def __init__(self, events: queue.Queue[Event], name: str) -> None:
        self._put, self._name = events.put, name

    def write(self, text: str) -> int:
        self._put(Event(self._name, text))
        return len(text)


def _packed_error(error: Exception) -> bytes:
    """Pickle an error, and what it comes from: that gets lost where only the error is pickled."""
    cause = error.__cause__
    for pair in ((error, cause), (error, None), (InternalError(repr(error)), None)):
        with contextlib.suppress(Exception):
            packed: bytes = cloudpickle.dumps(pair)
            pickle.loads(packed)
            return packed
    raise AssertionError("an InternalError can be pickled")


def follow(
    request: Request,
    report: Callable[[str], None],
    discover: Callable[[], Mapping[str, int]] | None = None,
) -> list[Any]:
    """Run a job for the driver: have it run, show what it writes, and return the results.

    ``discover()``: the nodes that the ranks may be on, by address with the places on each; it is
    called here, again and again, on a thread of its own. None: Ray finds the places. Raises what
    the job does; JobOverError if the launcher is lost. Nothing is left behind.
    """
    here = ray.get_runtime_context().get_node_id()
    make = ray.remote(Launcher).options(
        num_cpus=0,
        max_concurrency=_THREADS,
        max_restarts=0,
        scheduling_strategy=on_node(here),
    )
    # Ray keeps groups that an actor has made until the whole driver has ended: it asks for them.
    known = None if discover is None else dict(discover())
    places = make_places(request) if known is None else Nodes(known, request.resources)
    launcher = make.remote()
    consoles = {"stdout": console(sys.stdout), "stderr": console(sys.stderr)}
    taken = 0
    discovery: Discovery | None = None
    try:
        answer(launcher.begin, request, places)
        if discover is not None and known is not None:
            discovery = Discovery(discover, partial(_tell, launcher), report)
            discovery.start(known)
        while True:
            events: list[Event] = answer(launcher.next, taken)
            taken += len(events)
            for event in events:
                if event.kind == "report":
                    report(event.value)
                elif event.kind == "results":
                    results: list[Any] = pickle.loads(event.value)
                    return results
                elif event.kind == "error":
                    error, cause = pickle.loads(event.value)
                    raise error from cause
                elif (shown := consoles[event.kind]) is not None:
                    shown.write(event.value)
                    shown.flush()
    except RayActorError as error:
        text = f"the launcher of the job is lost, and its ranks with it: {error}"
        raise JobOverError(text) from error
    finally:
        if discovery is not None:
            discovery.close()
        ray.kill(launcher)  # whatever it has started ends with it
        places.close()


def _tell(launcher: Any, known: Mapping[str, int]) -> bool:
    with contextlib.suppress(RayActorError):  # the driver hears of that anyway
        answer(launcher.learn, dict(known))
    return True
