"""A rank's metrics, as Prometheus reads them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import run_ranks
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from waiting import until

import kolovod as kv
from kolovod.core import spans
from kolovod.core.spans import OPTIMIZER_STEP, WAIT
from kolovod.errors import InvalidArgumentError, NotInitializedError
from kolovod.observe.counting import Adding, Totals

MS = 1_000_000


def read(port: int) -> dict[str, float]:
    """Every sample, by name and labels."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics",
        headers={"Accept": "application/openmetrics-text; version=1.0.0"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert "openmetrics" in answer.headers["Content-Type"]
        text = answer.read().decode()
    return {
        sample.name + "".join(f" {k}={v}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def steps(count: int) -> None:
    for _ in range(count):
        handle = kv.allreduce_async(np.ones(1_000, np.float32), name="gradient")
        with spans.span(OPTIMIZER_STEP):
            handle.wait()


def serve(rank: int) -> Any:
    kv.init()
    port = kv.start_metrics_server(0)
    with pytest.raises(InvalidArgumentError, match=f"at port {port} already"):
        kv.start_metrics_server(0)
    before = read(port)
    steps(10)
    during = read(port)
    kv.barrier()
    kv.shutdown()
    between = read(port)
    kv.init()
    steps(5)
    after = read(port)
    kv.barrier()
    kv.stop_metrics_server()
    kv.stop_metrics_server()
    assert not spans.log.on
    with pytest.raises(urllib.error.URLError, match="refused"):
        read(port)
    kv.shutdown()
    return before, during, between, after


def test_what_is_counted_goes_on_in_the_next_world() -> None:
    for before, during, between, after in run_ranks(2, serve):
        assert before["kolovod_steps_total"] == 0
        assert before["kolovod_world_size"] == 2
        assert during["kolovod_steps_total"] == 10
        assert during["kolovod_step_seconds_count"] == 9
        assert during["kolovod_operations_total"] >= 10
        assert during["kolovod_operation_bytes_total"] >= 40_000
        assert during["kolovod_waiting_seconds_total"] > 0
        assert during["kolovod_worlds_total"] == 1
        assert between["kolovod_world_size"] == 0
        assert between["kolovod_steps_total"] == 10
        assert after["kolovod_steps_total"] == 15
        assert after["kolovod_step_seconds_count"] == 9 + 4
        assert after["kolovod_operations_total"] >= between["kolovod_operations_total"] + 5
        assert after["kolovod_worlds_total"] == 2
        grown = [n for n in during if n.endswith("_total") and after[n] < during[n]]
        assert grown == []
        info = next(name for name in after if name.startswith("kolovod_rank_info"))
        assert "backend=native" in info


def reserved(port: int) -> socket.socket:
    """Nobody gets this port by chance, but a server that asks for it and sets SO_REUSEADDR may."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", port))
    return holder


def two_ports() -> list[socket.socket]:
    """Of which the second is one more than the first."""
    while True:
        first = reserved(0)
        with contextlib.suppress(OSError, OverflowError):
            return [first, reserved(first.getsockname()[1] + 1)]
        first.close()


def serve_by_setting(rank: int) -> Any:
    holders = two_ports() if rank == 0 else []
    ports = [holder.getsockname()[1] for holder in holders]
    taken = [socket.create_server(("127.0.0.1", port)) for port in ports]
    kv.init()  # without a port: nothing is served
    port = int(kv.broadcast(np.array(ports[:1] or [0]), 0)[0])
    with pytest.raises(InvalidArgumentError, match="no metrics at"):
        kv.start_metrics_server(port)
    kv.barrier()
    kv.shutdown()
    for listener in taken:
        listener.close()
    os.environ["KOLOVOD_METRICS_PORT"] = str(port)
    kv.init()
    found = read(port + rank)
    kv.barrier()
    kv.shutdown()
    kv.stop_metrics_server()
    return found


def test_a_setting_makes_each_rank_serve_at_its_port() -> None:
    for rank, found in enumerate(run_ranks(2, serve_by_setting)):
        assert any(f" rank={rank}" in name for name in found)


def test_without_a_world_there_are_no_metrics() -> None:
    with pytest.raises(NotInitializedError):
        kv.start_metrics_server(0)


def test_time_is_added_up_once() -> None:
    totals, taken = Totals(), []
    adding = Adding(totals, taken.append)

    def operation(bucket: int, start: int, end: int) -> Any:
        return ("", "a", "allreduce", "float32", 1, 4, bucket, True, start, start * MS, end * MS)

    def span(name: str, start: int, end: int) -> Any:
        return (name, "MainThread", start * MS, end * MS, ())

    # Carried from 5 to 40; the wait for it, from 30 to 50, is seen one batch later.
    adding.add([operation(1, 5, 20), operation(1, 5, 20), operation(2, 20, 40)], [])
    adding.add([], [span(WAIT, 30, 50), span(WAIT, 35, 45), span(OPTIMIZER_STEP, 50, 60)])
    adding.add([], [span(OPTIMIZER_STEP, 90, 100), span(OPTIMIZER_STEP, 140, 160)])
    assert totals.communication_s == pytest.approx(0.035)
    assert totals.hidden_s == pytest.approx(0.025)
    assert totals.waiting_s == pytest.approx(0.020)
    assert (totals.steps, taken) == (3, [pytest.approx(0.04), pytest.approx(0.06)])
    adding.pause()
    adding.add([], [span(OPTIMIZER_STEP, 900, 1000)])
    assert (totals.steps, len(taken)) == (4, 2)


# With others' programs ----------------------------------------------------------------------------

BOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
NAMES = re.compile(r"\b(?:kolovod|process)_\w+")


def expressions() -> list[str]:
    """What the Grafana board asks Prometheus for, with its variables filled in."""
    board = json.loads(BOARD.read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(found) > 10
    return [each.replace("$__rate_interval", "10s").replace("$job", ".*") for each in found]


def serve_names(rank: int) -> set[str]:
    kv.init()
    port = kv.start_metrics_server(0)
    steps(2)
    found = {name.split(" ")[0] for name in read(port)}
    kv.shutdown()
    kv.stop_metrics_server()
    return found


def test_the_board_asks_for_what_is_served() -> None:
    (served,) = run_ranks(1, serve_names)
    # Of several hosts only.
    asked = {name for each in expressions() for name in NAMES.findall(each)}
    assert asked - served == {"kolovod_sent_bytes_total"}


def keep_stepping(rank: int, folder: str) -> None:
    kv.init()
    port = kv.start_metrics_server(0)
    (Path(folder) / f"port.{rank}").write_text(str(port))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        time.sleep(0.02)
        steps(1)
        ended = (Path(folder) / "end").exists()
        if kv.allreduce(np.array([float(ended)]), name="end", op=kv.Max)[0]:
            break
    kv.shutdown()
    kv.stop_metrics_server()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus on this machine")
def test_a_real_prometheus_answers_what_the_board_asks(tmp_path: Path) -> None:
    free = reserved(0)
    listen = free.getsockname()[1]
    stepping = partial(keep_stepping, folder=str(tmp_path))
    with free, ThreadPoolExecutor(1) as pool:
        ranks = pool.submit(run_ranks, 2, stepping, timeout_s=150)
        try:
            until(lambda: len(list(tmp_path.glob("port.*"))) == 2)
            targets = [f"127.0.0.1:{path.read_text()}" for path in tmp_path.glob("port.*")]
            job = {"job_name": "training", "static_configs": [{"targets": targets}]}
            config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
            (tmp_path / "prometheus.yml").write_text(json.dumps(config))
            command = [
                "prometheus", f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{listen}",
            ]  # fmt: skip
            with subprocess.Popen(command, stderr=subprocess.DEVNULL) as prometheus:
                try:
                    rate = "rate(kolovod_step_seconds_count[10s])"
                    until(lambda: len(ask(listen, rate)) == 2)
                    for expression in expressions():
                        if "sent_bytes" not in expression:
                            until(lambda e=expression: bool(ask(listen, e)))
                    assert all(0 < float(each["value"][1]) < 100 for each in ask(listen, rate))
                finally:
                    prometheus.terminate()
        finally:
            (tmp_path / "end").touch()
        ranks.result(120)


def ask(port: int, expression: str) -> list[dict[str, Any]]:
    """What Prometheus says; [] as long as it does not answer."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}") as answer:
            return json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{expression}: {error.read().decode()}") from None
    except OSError:
        return []
