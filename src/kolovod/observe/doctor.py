"""The findings of ``kolovod doctor``, made from facts, with advice. It decides, and asks nothing.

The facts of a host are those of ``examine``; those between hosts are ``Link``s, as measured by a
world with a rank on each.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["CANNOT_EXAMINE", "Finding", "Link", "format_findings", "judge"]

OK, WARNING, PROBLEM = "ok", "warning", "PROBLEM"
CANNOT_EXAMINE = "it cannot be examined"
"""The beginning of a reason why nothing is known of a host that was reached."""
_MIN_OPEN_FILES = 1024
_MIN_SHM_BYTES = 64 << 20
_MIN_SHM_BYTES_OF_LOADERS = 256 << 20  # above the 64 MiB of a container that is given none
_MIN_FREE_BYTES = 1 << 30
_MIN_LOCKED_BYTES = 1 << 30
_MAX_CLOCK_OFFSET_S = 1.0
_SLOWER = 1.5  # than the median host


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    host: str
    check: str
    found: str
    verdict: str = OK
    """OK, WARNING, or PROBLEM: a job would not start."""
    advice: str = ""


@dataclass(frozen=True)
class Link:
    """A link between two hosts, as a pair of ranks has measured it."""

    host: str
    other: str
    latency_us: float
    """The median time of an allreduce of 4 bytes between them."""
    bytes_per_s: float
    """The rate in each direction, during an allreduce of 8 MiB."""


def judge(
    facts: Mapping[str, Mapping[str, Any]],
    unreachable: Mapping[str, str],
    links: Sequence[Link] = (),
    clocks: Mapping[str, float] | None = None,
) -> list[Finding]:
    """Return the findings of all hosts. ``clocks``: their times minus the first's, in seconds."""
    findings = [
        Finding(host, "start", reason, PROBLEM, _advice_to_start(host, reason))
        for host, reason in unreachable.items()
    ]
    for host, fact in facts.items():
        findings += _of_host(host, fact)
    findings += _compared(facts)
    findings += _between(links, clocks or {})
    return findings


def _advice_to_start(host: str, reason: str) -> str:
    if "exit code 255" in reason:
        return f"'ssh -o BatchMode=yes {host} true' must work from here without a question"
    if reason.startswith(CANNOT_EXAMINE):
        return "call kolovod.observe.examine.examine() there, to see what raises this"
    return "Kolovod must be installed there for the same Python (--remote-python says where)"


def _of_host(host: str, fact: Mapping[str, Any]) -> list[Finding]:
    found = [
        _versions(host, fact),
        _frameworks(host, fact),
        Finding(host, "GPUs", ", ".join(fact["gpus"]) or "none"),
        Finding(host, "MPI", _mpi(fact)),
        _memory(host, fact),
        _limit_of_files(host, fact),
        _cores(host, fact),
        _encryption(host, fact),
    ]
    if fact["gpus"] and not fact["found"]["nccl"]:
        text = "GPUs, but no NCCL: tensors on them go through the host's memory"
        advice = "pip install a PyTorch with CUDA, which brings NCCL"
        found.append(Finding(host, "NCCL", text, WARNING, advice))
    elif fact["gpus"]:
        found.append(Finding(host, "NCCL", fact["found"]["nccl"]))
    if fact["gpus"] and 0 <= fact["locked_bytes"] < _MIN_LOCKED_BYTES:
        text = f"{fact['locked_bytes'] >> 10} KiB"
        advice = "InfiniBand and GPUs need more: 'ulimit -l unlimited'"
        found.append(Finding(host, "locked memory", text, WARNING, advice))
    if fact["threads"].isdecimal() and int(fact["threads"]) > fact["cores"]:
        text = f"OMP_NUM_THREADS={fact['threads']} on {fact['cores']} cores, for every rank"
        advice = "unset it: the launcher divides the cores among the ranks of a host"
        found.append(Finding(host, "threads", text, WARNING, advice))
    shm = fact["shm_free_bytes"]
    if fact["found"]["torch"] and 0 <= shm < _MIN_SHM_BYTES_OF_LOADERS:
        advice = "workers of a DataLoader, and NCCL, need more (docker: --shm-size 1g)"
        found.append(Finding(host, "/dev/shm", f"{shm >> 20} MiB free", WARNING, advice))
    if fact["ptrace_scope"] not in ("", "0"):
        text = f"yama.ptrace_scope is {fact['ptrace_scope']}: ranks cannot read each other's memory"
        advice = "large tensors go through shared memory then; 'sysctl kernel.yama.ptrace_scope=0'"
        found.append(Finding(host, "ptrace", text, WARNING, advice))
    return found


def _versions(host: str, fact: Mapping[str, Any]) -> Finding:
    text = f"Kolovod {fact['kolovod']}, Python {fact['python']} ({fact['executable']})"
    return Finding(host, "versions", text)


def _frameworks(host: str, fact: Mapping[str, Any]) -> Finding:
    names = ("torch", "tensorflow", "keras", "jax", "mxnet")
    there = [f"{name} {fact['found'][name]}" for name in names if fact["found"][name]]
    if not there:
        advice = "NumPy works; pip install 'kolovod[torch]' or another"
        return Finding(host, "frameworks", "none", WARNING, advice)
    return Finding(host, "frameworks", ", ".join(there))


def _mpi(fact: Mapping[str, Any]) -> str:
    module = fact["found"]["mpi4py"]
    return f"mpi4py {module or 'none'}, mpirun {fact['mpirun'] or 'none'}"


def _memory(host: str, fact: Mapping[str, Any]) -> Finding:
    shm, free = fact["shm_free_bytes"], fact["memory_free_bytes"]
    text = f"{_size(free)} free, copied at {fact['copy_bytes_per_s'] / 1e9:.1f} GB/s"
    if fact["memfd"]:
        text += f", memory files refused ({fact['memfd']}), /dev/shm has {_size(shm)}"
        if shm < _MIN_SHM_BYTES:
            advice = "give the container a larger /dev/shm (docker: --shm-size 1g)"
            return Finding(host, "memory", text, PROBLEM, advice)
    if 0 <= free < _MIN_FREE_BYTES:
        return Finding(host, "memory", text, WARNING, "the system may kill a rank (signal 9)")
    return Finding(host, "memory", text)


def _limit_of_files(host: str, fact: Mapping[str, Any]) -> Finding:
    limit = fact["open_files"]
    text = "unlimited" if limit < 0 else str(limit)
    if 0 <= limit < _MIN_OPEN_FILES:
        advice = f"'ulimit -n {_MIN_OPEN_FILES}' or more: a rank has a connection for every other"
        return Finding(host, "open files", text, WARNING, advice)
    return Finding(host, "open files", text)


def _cores(host: str, fact: Mapping[str, Any]) -> Finding:
    text = f"{fact['cores']} usable of {fact['cores_present']}, load {fact['load']:.1f}"
    if fact["core_quota"] and fact["core_quota"] < fact["cores"]:
        text += f", a quota of {fact['core_quota']:g}"
        advice = "ranks that wait for each other are throttled; ask for whole cores"
        return Finding(host, "cores", text, WARNING, advice)
    if fact["load"] > fact["cores"]:
        return Finding(host, "cores", text, WARNING, "other processes are busy on this host")
    return Finding(host, "cores", text)


def _encryption(host: str, fact: Mapping[str, Any]) -> Finding:
    ciphers = {1: "AES-256-GCM", 2: "ChaCha20-Poly1305"}
    names = [name for bit, name in ciphers.items() if fact["ciphers"] & bit]
    if not names:
        text = fact["libcrypto"] or "no libcrypto"
        advice = "--encrypt cannot be used: it needs OpenSSL 1.1.1 or later (libssl3, openssl-libs)"
        return Finding(host, "encryption", text, WARNING, advice)
    return Finding(host, "encryption", f"{fact['libcrypto']}, {' and '.join(names)}")


def _compared(facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Return the findings about hosts that differ from the others."""
    if len(facts) < 2:
        return []
    findings = []
    for key, text in (("kolovod", "Kolovod"), ("python", "Python")):
        versions = {fact[key] for fact in facts.values()}
        if len(versions) > 1:
            verdict = PROBLEM if key == "kolovod" else WARNING
            listed = ", ".join(f"{host} {fact[key]}" for host, fact in facts.items())
            advice = "install the same on all hosts"
            findings.append(Finding("all", f"{text} versions", listed, verdict, advice))
    for name in ("torch", "tensorflow", "keras", "jax", "mxnet"):
        versions = {fact["found"][name] for fact in facts.values()}
        if len(versions) > 1:
            listed = ", ".join(f"{h} {f['found'][name] or 'none'}" for h, f in facts.items())
            advice = "install the same on all hosts"
            findings.append(Finding("all", f"{name} versions", listed, WARNING, advice))
    middle = statistics.median_low(fact["matmul_s"] for fact in facts.values())
    for host, fact in facts.items():
        if fact["matmul_s"] > _SLOWER * middle:
            times = fact["matmul_s"] / middle
            text = f"a matrix product takes {times:.1f} times as long as on the median host"
            advice = "every step waits for the slowest: look for other load, power limits, a quota"
            findings.append(Finding(host, "speed", text, WARNING, advice))
    return findings


def _between(links: Sequence[Link], clocks: Mapping[str, float]) -> list[Finding]:
    findings = []
    middle = statistics.median(link.bytes_per_s for link in links) if links else 0.0
    for link in links:
        text = f"{link.latency_us:.0f} us, {link.bytes_per_s * 8 / 1e9:.2f} Gbit/s"
        slow = link.bytes_per_s * _SLOWER < middle
        verdict = WARNING if slow else OK
        advice = "slower than the other links: --interface chooses a network" if slow else ""
        findings.append(Finding(link.host, f"link to {link.other}", text, verdict, advice))
    for host, offset_s in clocks.items():
        if abs(offset_s) > _MAX_CLOCK_OFFSET_S:
            text = f"{offset_s:+.1f} s beside the first host"
            advice = "let NTP set it: times in logs and of checkpoints are wrong"
            findings.append(Finding(host, "clock", text, WARNING, advice))
    return findings


def _size(count: int) -> str:
    return "unknown" if count < 0 else f"{count / (1 << 30):.1f} GiB"


def format_findings(findings: Sequence[Finding]) -> str:
    """Return the findings for people; what is to be done stands below its line."""
    heads = ("host", "check", "found", "")
    rows = [(f.host, f.check, f.found, f.verdict) for f in findings]
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in (0, 1)]
    lines = []
    for finding, row in zip(findings, rows, strict=True):
        lines.append(f"{row[3]:7}  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}")
        if finding.advice:
            lines.append(f"{'':9}{'':{widths[0]}}  {'':{widths[1]}}  -> {finding.advice}")
    return "\n".join(lines)
