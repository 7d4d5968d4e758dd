"""What the benchmarks need to know of the machine: its cores, its mode, its load, its limits.

The mode matters more than anything else: two cores may share a cache (*near*) or not (*far*), some
virtual machines are moved between such cores while they run, and the same code is up to six times
slower in one than in the other. So every figure carries the mode it was measured in.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
BUILD = ROOT / "build" / "bench"

NEAR_BELOW_NS = 180.0
"""One way of a cache line: 60 to 140 ns through a shared cache, about 250 ns without one."""

TOOL_TIMEOUT_S = 150.0


class ToolError(RuntimeError):
    """The C++ tool could not be built, failed, or found a wrong result."""


def cores() -> int:
    """Return cores that this process may use."""
    return len(os.sched_getaffinity(0))


def busy_ms() -> float:
    """Return what all cores have worked since the start, in ms; 10 ms are the finest step."""
    with open("/proc/stat") as file:  # without idle, iowait and what other machines have stolen
        user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    return 1000 * (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def sent_bytes(interface: str = "eth0") -> int:
    """Return what an interface of this host has sent, with all headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        if line.strip().startswith(f"{interface}:"):
            return int(line.split()[9])
    raise RuntimeError(f"there is no interface {interface}")


def compile_tool() -> Path:
    """Compile bench/pingpong.cc with the system's C++ compiler, unless it is up to date."""
    source, tool = BENCH / "pingpong.cc", BUILD / "pingpong"
    if tool.exists() and tool.stat().st_mtime >= source.stat().st_mtime:
        return tool
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        raise ToolError("no C++ compiler: install one, or name it in CXX")
    BUILD.mkdir(parents=True, exist_ok=True)
    fresh = BUILD / f"pingpong.{os.getpid()}"
    base = [compiler, "-std=c++17", "-O3", str(source), "-o", str(fresh)]
    for command in ([*base, "-march=native"], base):
        built = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
        if built.returncode == 0:
            fresh.replace(tool)  # whole or not at all, should two benchmarks start together
            return tool
    raise ToolError(f"{' '.join(command)} failed:\n{built.stderr}")


def run_tool(what: str, **options: int) -> dict[str, Any]:
    """Run one measurement of the C++ tool; ``options``: its --np, --bytes, --iterations, --ops."""
    command = [str(compile_tool()), what]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
    if done.returncode != 0:
        said = done.stderr or done.stdout
        raise ToolError(f"{what} {options} ended with {done.returncode}: {said}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def one_way_ns() -> float | None:
    """Return nanoseconds that a cache line takes from core to core; None on a single core."""
    value: float | None = run_tool("pingpong")["one_way_ns"]
    return value


def mode_of(*one_way: float | None) -> str:
    """``near``, ``far``, ``mixed`` (it changed between the looks) or ``one core``."""
    if None in one_way:
        return "one core"
    near = {value < NEAR_BELOW_NS for value in one_way if value is not None}
    if len(near) > 1:
        return "mixed"
    return "near" if near.pop() else "far"


def load() -> dict[str, float]:
    """Return load average of the last minute, and the steal time (s) of all cores since boot."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    steal_ticks = int(fields[8]) if len(fields) > 8 else 0
    return {"loadavg": os.getloadavg()[0], "steal_s": steal_ticks / os.sysconf("SC_CLK_TCK")}


def _cpu_model() -> str:
    names = ("model name", "CPU part", "Hardware")
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(names):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def facts() -> dict[str, Any]:
    """Return what a reader needs to judge the figures; no names of hosts or folders."""
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "transparent_huge_pages": huge_pages.read_text().strip() if huge_pages.exists() else "none",
        "python": platform.python_version(),
    }


def command_line() -> str:
    """Return the command as a reader would type it in a checkout."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    return " ".join(["python", str(name), *sys.argv[1:]])
