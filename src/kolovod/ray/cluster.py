"""Ray as what hands out processes (``clusters.fleet.Cluster``): a rank is an actor."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from kolovod.clusters.fleet import Reached, Told
from kolovod.errors import ClusterError
from kolovod.launch.death import reported
from kolovod.launch.discovery import PERIOD_S
from kolovod.launch.fleet import Sink
from kolovod.launch.local import GRACE_S, Ended, Order
from kolovod.ray.node_monitor import Kept, NodeMonitor
from kolovod.ray.places import NoPlacementError, Places, on_node
from kolovod.ray.rank import RankActor

__all__ = ["RayCluster"]

_CALL_S = 30.0
"""For a node monitor to answer."""
_THREADS = 64
_SAID_CHARS = 300
_DETAIL = re.compile(
    r"Worker exit detail: (\S.{0,300}?)\.?(?: Some common causes| If the process|$)"
)
_VERDICT_S = 30.0
"""For Ray to say that a node is gone which nobody reaches."""
_LOOK_S = 0.5


class RayCluster:
    """Ray as a ``Cluster``. ``close`` leaves no actor behind; the places are their maker's."""

    def __init__(
        self,
        places: Places,
        launcher: Any,
        *,
        start_timeout_s: float,
        runtime_env: Mapping[str, Any],
    ) -> None:
        """``launcher``: see NodeMonitor. ``start_timeout_s``: for an actor to run."""
        self._places = places
        self._launcher = launcher
        self._start_timeout_s = start_timeout_s
        self._runtime_env = dict(runtime_env)
        self._lock = threading.Lock()
        self._node_monitors: dict[str, Any] = {}
        self._actors: dict[int, Any] = {}
        self._payload: tuple[bytes, Any] = b"", None
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._sink: Sink = lambda number, stream, data: None

    def written(self, number: int, stream: str, data: bytes) -> None:
        """Pass on what a node monitor has brought to the launcher, which calls this."""
        self._sink(number, stream, data)

    def places(self) -> Mapping[str, int]:
        """Implement ``Cluster.places``."""
        return self._places.count()

    def reach(self, host: str) -> Reached:
        """Implement ``Cluster.reach``."""
        node_monitor = self._node_monitor(host)
        try:
            return Reached(*ray.get(node_monitor.reached.remote(), timeout=self._start_timeout_s))
        except (RayError, GetTimeoutError) as error:
            self._forget(host, node_monitor)
            raise ClusterError(f"no actor can be started on {host}: {_said(error)}") from error

    def _node_monitor(self, host: str) -> Any:
        """Return that of ``host``, which is made if there is none. Raises NoPlacementError."""
        with self._lock:
            if host not in self._node_monitors:
                self._node_monitors[host] = (
                    ray.remote(NodeMonitor)
                    .options(
                        num_cpus=0,
                        max_concurrency=_THREADS,
                        scheduling_strategy=on_node(self._places.node_of(host)),
                    )
                    .remote(self._launcher)
                )
            return self._node_monitors[host]

    def _forget(self, host: str, node_monitor: Any) -> None:
        """Give up a node monitor that does not answer any more."""
        ray.kill(node_monitor)
        with self._lock:
            if self._node_monitors.get(host) is node_monitor:
                del self._node_monitors[host]

    def start(self, host: str, order: Order, payload: bytes, sink: Sink, told: Told) -> None:
        """Implement ``Cluster.start``; node monitors bring the output (``written``)."""
        self._sink = sink
        if self._payload[0] is not payload:
            self._payload = payload, ray.put(payload)
        thread = threading.Thread(
            target=lambda: told.ended(self._live(host, order, self._payload[1], told.began)),
            name=f"kolovod rank {order.rank}",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def _live(
        self, host: str, order: Order, payload: Any, began: Callable[[int, int], None]
    ) -> Ended:
        """Start a process, wait for its end, and return how it has ended."""
        number, pid, code, result, seen = order.rank, 0, 255, b"", ""
        node_monitor = place = None
        try:
            node_monitor = self._node_monitor(host)
            place = self._places.take(host)
            variables, outputs = ray.get(node_monitor.prepare.remote(number), timeout=_CALL_S)
            actor = self._actor(number, place)
            pid = ray.get(actor.begin.remote(outputs), timeout=self._start_timeout_s)
            ray.get(node_monitor.watch.remote(number, pid), timeout=_CALL_S)
            began(number, pid)
            variables = {**variables, **order.environment}
            code, result = ray.get(actor.call.remote(variables, payload))
            actor.__ray_terminate__.remote()  # the hooks of its end included
        except (RayError, GetTimeoutError) as error:
            seen = _said(error)
        except NoPlacementError as error:
            time.sleep(PERIOD_S)  # which the job will have heard of by then
            return Ended(number, pid, None, lost=str(error), record=None)
        finally:
            with self._lock:
                dead = self._actors.pop(number, None)
            if seen and dead is not None:
                ray.kill(dead)
        if node_monitor is None:
            return Ended(number, pid, None, lost=seen, record=None)
        try:
            kept: Kept = ray.get(
                node_monitor.bury.remote(number, GRACE_S), timeout=GRACE_S + _CALL_S
            )
        except (RayError, GetTimeoutError) as error:  # what ran on that node nobody knows
            self._forget(host, node_monitor)
            self._wait_for_verdict(host)
            lost = f"its node cannot be reached: {_said(error)}"
            return Ended(number, pid, None, lost=lost, result=result, record=None)
        finally:
            self._places.give_back(place)
        return Ended(
            number,
            pid,
            reported(code),
            seen=seen,
            result=result,
            blames=kept.blames,
            record=kept.record,
        )

    def _wait_for_verdict(self, host: str) -> None:
        """Wait until Ray says that the node is gone, so that nothing starts there; or a while."""
        deadline = time.monotonic() + _VERDICT_S
        while time.monotonic() < deadline and not self._is_closed:
            with contextlib.suppress(RayError, GetTimeoutError):
                if host not in self._places.count():
                    return
            time.sleep(_LOOK_S)

    def _actor(self, number: int, place: Any) -> Any:
        options = {"max_restarts": 0, **self._places.options(place)}
        if self._runtime_env:
            options["runtime_env"] = self._runtime_env
        with self._lock:
            if self._is_closed:
                raise NoPlacementError("the job has ended")
            actor = ray.remote(RankActor).options(**options).remote(f"kolovod process {number}")
            self._actors[number] = actor
        return actor

    def send(self, host: str, signum: int, numbers: Collection[int]) -> None:
        """Implement ``Cluster.send``."""
        with self._lock:
            node_monitor = self._node_monitors.get(host)
        if node_monitor is not None:
            node_monitor.send.remote(signum, list(numbers))
        if signum == signal.SIGKILL:  # also those that wait for a place
            with self._lock:
                for number in numbers:
                    if number in self._actors:
                        ray.kill(self._actors[number])

    def stopped(self, host: str, numbers: Collection[int]) -> set[int]:
        """Implement ``Cluster.stopped``."""
        with self._lock:
            node_monitor = self._node_monitors.get(host)
        found: set[int] = set()
        with contextlib.suppress(RayError, GetTimeoutError):
            if node_monitor is not None and numbers:
                found = ray.get(node_monitor.stopped.remote(list(numbers)), timeout=_CALL_S)
        return found

    def close(self) -> None:
        """Implement ``Cluster.close``."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            actors, node_monitors = list(self._actors.values()), list(self._node_monitors.values())
        for actor in actors:
            ray.kill(actor)
        for thread in self._threads:
            thread.join(GRACE_S)
        closing = [node_monitor.close.remote() for node_monitor in node_monitors]
        for done, node_monitor in zip(closing, node_monitors, strict=True):
            with contextlib.suppress(RayError, GetTimeoutError):
                ray.get(done, timeout=_CALL_S)
            ray.kill(node_monitor)


def _said(error: Exception) -> str:
    """Return the end of what Ray says, in one line: it begins with what it always says."""
    if found := _DETAIL.search(str(error)):
        return f"its actor has died: {found[1]}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[-1] if lines else type(error).__name__
    return said if len(said) <= _SAID_CHARS else f"{said[:_SAID_CHARS]}..."
