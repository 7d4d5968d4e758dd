"""A rank's metrics for Prometheus and whoever else reads OpenMetrics.

Names, units and kinds follow OpenMetrics 1.0 and Prometheus' conventions: base units, ``_total``
for what only grows. ``docs/metrics.md`` lists them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

from kolovod.config import Settings
from kolovod.core.world import World, current
from kolovod.errors import CommandArgumentError, InvalidArgumentError
from kolovod.notices import report_to_stderr
from kolovod.observe import counting
from kolovod.optional_dependencies import missing
from kolovod.version import __version__

__all__ = ["begin", "forget", "start_metrics_server", "stop_metrics_server"]

LOOPBACK = "127.0.0.1"
_STEP_BUCKETS_S = tuple(m * 10.0**e for e in range(-3, 3) for m in (1, 2, 5))
_COUNTERS = {
    "operations": "Operations of all ranks, without those of process sets.",
    "buckets": "Buckets that the engine carried.",
    "late_reports": "Reports of ranks that others waited long for.",
}


class _Server:
    """The server of one process."""

    def __init__(self, world: World, port: int, address: str) -> None:
        """Raises OSError where nothing can listen there."""
        from prometheus_client import CollectorRegistry, Histogram, start_http_server
        from prometheus_client.process_collector import ProcessCollector

        registry = CollectorRegistry()
        steps = Histogram(
            "kolovod_step_seconds",
            "From the end of an optimizer's step to the end of the next.",
            buckets=_STEP_BUCKETS_S,
            registry=None,
        )
        self.counting = counting.counting(world, steps.observe)
        registry.register(_Families(self.counting))  # first: it brings the others up to date
        registry.register(steps)
        ProcessCollector(registry=registry)
        try:
            self._http, self._thread = start_http_server(port, address, registry)
        except BaseException:
            counting.end(self.counting)
            raise
        self.port = int(self._http.server_port)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        counting.end(self.counting)


class _Families:
    """The collector that prometheus_client calls at each scrape."""

    def __init__(self, counted: counting.Counting) -> None:
        self._counting = counted

    def describe(self) -> list[Any]:
        """Return nothing: nobody asks for totals while it is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield all that is counted, now."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            InfoMetricFamily,
        )

        totals, world = self._counting.totals()
        yield CounterMetricFamily("kolovod_steps", "Optimizer steps.", totals.steps)
        yield CounterMetricFamily(
            "kolovod_waiting_seconds",
            "Time in which the script did nothing but wait for communication.",
            totals.waiting_s,
        )
        yield CounterMetricFamily(
            "kolovod_communication_seconds",
            "Time in which the engine carried something.",
            totals.communication_s,
        )
        yield CounterMetricFamily(
            "kolovod_hidden_seconds",
            "Time in which the engine carried something while the script did not wait.",
            totals.hidden_s,
        )
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"kolovod_{name}", text, totals.counters.get(name, 0))
        yield CounterMetricFamily(
            "kolovod_operation_bytes",
            "Bytes of the tensors of operations, on this rank.",
            totals.counters.get("bytes", 0),
        )
        sent = CounterMetricFamily(
            "kolovod_sent_bytes", "Bytes sent to ranks of another host.", labels=["to_host"]
        )
        for host, count in totals.sent_bytes.items():
            sent.add_metric([host], count)
        yield sent
        yield CounterMetricFamily(
            "kolovod_worlds", "Worlds that this process was in: more than one in elastic jobs.",
            totals.worlds,
        )  # fmt: skip
        yield GaugeMetricFamily(
            "kolovod_world_size", "Ranks of the world; 0: none.", 0 if world is None else world.size
        )
        if world is None:
            return
        yield GaugeMetricFamily("kolovod_epoch", "Number of the world in its job.", world.epoch)
        yield InfoMetricFamily("kolovod_rank", "What this process is.", _facts(world))


def _facts(world: World) -> dict[str, str]:
    return {
        "rank": str(world.rank),
        "host": world.host,
        "backend": world.settings.backend,
        "compression": world.settings.compression,
        "version": __version__,
    }


_lock = threading.Lock()
_server: _Server | None = None


def begin(world: World) -> None:
    """A world has been formed: serve metrics if KOLOVOD_METRICS_PORT says so, and none does yet."""
    settings: Settings = world.settings
    if settings.metrics_port and _server is None:
        first = settings.metrics_port
        # In an elastic job a rank that has come earlier may have the port of what is its rank now.
        ports = [first + world.local_rank, *range(first, first + world.local_size)]
        for position, port in enumerate(ports):
            try:
                start_metrics_server(port, settings.metrics_address)
                return
            except InvalidArgumentError as error:  # training goes on without
                if position == len(ports) - 1:
                    report_to_stderr(f"rank {world.rank} serves no metrics: {error}")


def start_metrics_server(port: int = 9464, address: str = LOOPBACK) -> int:
    """Serve this rank's metrics over HTTP, at ``/metrics``; return the port.

    ``port``: where to listen; each rank of a host needs its own (``9464 + local_rank()``). 0: any
    free one. ``address``: of the interface to listen at; by default other hosts cannot reach it,
    and whoever can sees step times and host names: "0.0.0.0" or "::" is for networks that you
    trust. It goes on through the worlds of an elastic job, until ``stop_metrics_server`` or the
    end of the process. Needs the package prometheus_client: ``pip install 'kolovod[metrics]'``.

    Raises InvalidArgumentError if it serves already, if nothing can listen there, or if the package
    is missing; NotInitializedError.
    """
    global _server
    world = current()
    if (problem := missing("metrics")) is not None:
        raise CommandArgumentError(str(problem))
    with _lock:
        if _server is not None:
            raise CommandArgumentError(
                f"this rank serves its metrics at port {_server.port} already; call "
                "stop_metrics_server() first"
            )
        try:
            _server = _Server(world, port, address)
        except (OSError, OverflowError) as error:
            raise CommandArgumentError(f"no metrics at {address}:{port}: {error}") from None
        return _server.port


def stop_metrics_server() -> None:
    """Serve metrics no more. Nothing happens where none are served."""
    global _server
    with _lock:
        server, _server = _server, None
    if server is not None:
        server.close()


def forget() -> None:
    """Forget the server in a forked child: it is the parent's."""
    global _lock, _server
    if _server is not None:
        _server._http.socket.close()
    _lock, _server = threading.Lock(), None


os.register_at_fork(after_in_child=forget)
