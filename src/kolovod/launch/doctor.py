"""``kolovod doctor``: look at every host, then at what is between them."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kolovod.errors import KolovodError
from kolovod.launch.agent_line import SshOptions
from kolovod.launch.function import CallOptions, RankFailed, call_on_ranks
from kolovod.launch.hosts import is_this_host
from kolovod.observe.doctor import CANNOT_EXAMINE, PROBLEM, Finding, Link, format_findings, judge
from kolovod.observe.examine import examine

__all__ = ["run_doctor"]

_LIMIT_S = 60.0
_MAX_HOSTS_IN_PAIRS = 8  # more are measured around a ring
_PAYLOAD_BYTES = 8 << 20


def run_doctor(hosts: Sequence[str], ssh: SshOptions | None) -> int:
    """Print the table; return 0 if a job would start on ``hosts``, else 1."""
    facts: dict[str, dict[str, Any]] = {}
    unreachable: dict[str, str] = {}
    threads = [
        threading.Thread(target=_examine, args=(host, ssh, facts, unreachable)) for host in hosts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ordered = {host: facts[host] for host in hosts if host in facts}
    links: list[Link] = []
    clocks: dict[str, float] = {}
    failure = ""
    if len(ordered) > 1:
        try:
            links, clocks = _measure(list(ordered), ssh)
        except (KolovodError, RankFailed, OSError) as error:
            failure = _last_line(error)
    findings = judge(ordered, unreachable, links, clocks)
    if failure:
        advice = "open the network between the hosts, or choose one with --interface"
        findings.append(Finding("all", "a world of one rank each", failure, PROBLEM, advice))
    print(format_findings(findings))
    problems = sum(finding.verdict == PROBLEM for finding in findings)
    print(
        f"\n{problems} problem{'' if problems == 1 else 's'}" if problems else "\na job can start"
    )
    return 1 if problems else 0


def _examine(
    host: str,
    ssh: SshOptions | None,
    facts: dict[str, dict[str, Any]],
    unreachable: dict[str, str],
) -> None:
    try:
        if ssh is None or is_this_host(host):
            facts[host] = examine()
            return
        options = CallOptions(timeout_s=_LIMIT_S, hosts=[host], ssh=ssh, quiet=True)
        [facts[host]] = call_on_ranks(1, lambda rank: examine(), (), options)
    except (KolovodError, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        own = [line.removeprefix(f"{host}: ") for line in lines if line.startswith(f"{host}: ")]
        unreachable[host] = (own or lines or [repr(error)])[0]
    except RankFailed as error:
        unreachable[host] = _last_line(error)
    except Exception as error:  # else the thread would end, and nobody miss the host
        unreachable[host] = f"{CANNOT_EXAMINE}: {error!r}"


def _last_line(error: Exception) -> str:
    """Return the last line of what an exception says, or its name where that is nothing."""
    return (str(error).strip().splitlines() or [repr(error)])[-1]


def _measure(hosts: Sequence[str], ssh: SshOptions | None) -> tuple[list[Link], dict[str, float]]:
    size = len(hosts)
    if size <= _MAX_HOSTS_IN_PAIRS:
        pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
    else:
        pairs = sorted({(min(a, b), max(a, b)) for a in range(size) for b in [(a + 1) % size]})
    limit_s = _LIMIT_S + 5.0 * len(pairs)
    options = CallOptions(timeout_s=limit_s, hosts=hosts, ssh=ssh, quiet=True)
    measured, clocks = call_on_ranks(size, _measure_pairs, (pairs,), options)[0]
    links = [Link(hosts[a], hosts[b], us, rate) for (a, b), (us, rate) in measured.items()]
    return links, dict(zip(hosts, clocks, strict=True))


def _measure_pairs(rank: int, pairs: Sequence[tuple[int, int]]) -> Any:
    """Measure links and clocks, on every host; the result of rank 0 counts."""
    import kolovod

    kolovod.init()
    kolovod.barrier()
    kolovod.barrier()  # the first one has made the connections
    now = time.time()
    times = [float(t) for t in kolovod.allgather(np.array([now]))]
    measured: dict[tuple[int, int], tuple[float, float]] = {}
    for pair in pairs:
        whole = len(pair) == kolovod.size()
        process_set = kolovod.global_process_set if whole else kolovod.add_process_set(list(pair))
        mine = (0.0, 0.0)
        if rank in pair:
            mine = _measure_link(process_set)
        # Both ends have measured; the first one's figures go to all.
        figures = kolovod.broadcast(np.array(mine), root_rank=pair[0])
        measured[pair] = (float(figures[0]), float(figures[1]))
        if not whole:
            kolovod.remove_process_set(process_set)
    kolovod.shutdown()
    return measured, [t - times[0] for t in times]


def _measure_link(process_set: Any) -> tuple[float, float]:
    import kolovod

    latency_s = _median(
        lambda: kolovod.allreduce(np.ones(1, np.float32), process_set=process_set), 51
    )
    payload = np.ones(_PAYLOAD_BYTES // 4, np.float32)
    once_s = _median(lambda: kolovod.allreduce(payload, process_set=process_set), 3)
    # Among two ranks every one sends as many bytes as the payload has.
    return latency_s * 1e6, _PAYLOAD_BYTES / once_s


def _median(work: Any, count: int) -> float:
    work()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
