"""What the codecs bring between hosts: ``bench/wire.py``.

The hosts are network namespaces of this machine (scripts/netbed), so this needs root; each has one
rank (or ``--local``), and its link is limited in both directions. An allreduce of float32 by
Average is done without a codec and with each of them in turn, with fresh numbers every time, in the
same run.

Time is from the first rank's start to the last one's end (the clock is the same), the median of all
turns. Bytes are those that the interface of rank 0's host has sent meanwhile, with all headers,
acknowledgements and control messages, over the bytes of the tensor. Every result is checked: all
ranks' bits are the same, and no element is off by more than the codec allows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import machine
import numpy as np
import report
from report import number, table

import kolovod
from kolovod import Compression

sys.path.insert(0, str(machine.ROOT / "scripts"))
sys.path.insert(0, str(machine.BENCH))

import netbed

LINKS = {"100 Mbit/s": 100e6, "1 Gbit/s": 1e9, "10 Gbit/s": 10e9}
MIB = 1 << 20
CODECS = ("none", "int8", "int4")
STEPS = {"int8": 127, "int4": 7}  # of a block's largest magnitude
WANTED_MS = {("100 Mbit/s", "int8"): 1520, ("100 Mbit/s", "int4"): 800, ("1 Gbit/s", "int8"): 155}
WANTED_TIMES_FEWER = {"int8": 3.8, "int4": 7.4}


def check(result: Any, inputs: list[Any], codec: str) -> None:
    """Raise RuntimeError for what the codec cannot have made."""
    exact = sum(values.astype(np.float64) for values in inputs) / len(inputs)
    off = np.abs(result - exact)
    if codec == "none":
        allowed = 1e-5
    else:  # half a step of each host's block, and of the result's
        largest = max(float(np.abs(values).max()) for values in inputs)
        allowed = 1.01 * largest / STEPS[codec]
    if float(off.max()) > allowed:
        raise RuntimeError(f"{codec}: an element is off by {off.max()}, allowed are {allowed}")


def measure(rank: int, count: int, turns: int) -> list[tuple[str, float, float, int, int]]:
    """Return, by turn, codec, begin, end, bytes sent, digest of the result."""
    kolovod.init()
    size = kolovod.size()
    found = []
    for turn in range(turns + 1):  # the first warms up
        inputs = [
            np.random.default_rng([turn, r]).standard_normal(count, np.float32) for r in range(size)
        ]
        for place in range(len(CODECS)):
            codec = CODECS[(place + turn) % len(CODECS)]
            mine = inputs[rank].copy()
            kolovod.barrier()
            before, begin = machine.sent_bytes(), time.monotonic()
            kolovod.allreduce_(mine, codec, compression=getattr(Compression, codec))
            end, sent = time.monotonic(), machine.sent_bytes() - before
            check(mine, inputs, codec)
            if turn > 0:
                found.append((codec, begin, end, sent, zlib.crc32(mine.tobytes())))
    kolovod.barrier()
    return found


def on_link(bed: Any, hosts: list[str], mib: float, turns: int) -> dict[str, Any]:
    """Return median ms and bytes sent over those of the tensor, by codec."""
    count = int(mib * MIB) // 4
    with netbed.World(bed, hosts, measure, count, turns) as world:
        ranks = world.results(600)
    if wrong := [each for each in ranks if not isinstance(each, list)]:
        raise SystemExit(str(wrong[0].text))
    times: dict[str, list[float]] = {codec: [] for codec in CODECS}
    sent: dict[str, list[float]] = {codec: [] for codec in CODECS}
    for turn in zip(*ranks, strict=True):
        codec = turn[0][0]
        if len({each[4] for each in turn}) != 1:
            raise SystemExit(f"{codec}: ranks have different results")
        times[codec].append(1000 * (max(each[2] for each in turn) - min(each[1] for each in turn)))
        sent[codec].append(turn[0][3] / (4 * count))
    return {
        codec: {"ms": statistics.median(times[codec]), "bytes": statistics.median(sent[codec])}
        for codec in CODECS
    }


def goals(by_codec: dict[str, Any], link: str) -> list[list[str]]:
    """Return rows of what was wanted with 64 MiB between two hosts."""
    rows = []
    for codec in CODECS[1:]:
        ms, wanted = by_codec[codec]["ms"], WANTED_MS.get((link, codec))
        if wanted:
            reached = "yes" if ms <= wanted else "no"
            rows.append([f"{codec}, {link}: ms", number(ms), number(wanted), reached])
        fewer = by_codec["none"]["bytes"] / by_codec[codec]["bytes"]
        least = WANTED_TIMES_FEWER[codec]
        reached = "yes" if fewer >= least else "no"
        rows.append([f"{codec}, {link}: times fewer bytes", f"{fewer:.2f}", f"{least}", reached])
    return rows


def page(result: report.Json) -> str:
    """Return the result for people."""
    rows: list[list[str]] = []
    wanted: list[list[str]] = []
    for key, by_codec in result["found"].items():
        hosts, link, mib = key.split("|")
        plain = by_codec["none"]
        row = [hosts, link, f"{float(mib):g}", *(number(by_codec[codec]["ms"]) for codec in CODECS)]
        for codec in CODECS[1:]:
            row.append(f"{plain['ms'] / by_codec[codec]['ms']:.2f}x")
            row.append(f"{plain['bytes'] / by_codec[codec]['bytes']:.2f}")
        rows.append(row)
        if hosts == "2" and float(mib) == 64 and not result["delay_ms"]:
            wanted += goals(by_codec, link)
    head = ["hosts", "link", "MiB", *(f"{codec}, ms" for codec in CODECS)]
    for codec in CODECS[1:]:
        head += [f"{codec}: faster", f"{codec}: times fewer bytes"]
    text = (
        "# Codecs between hosts\n\n"
        f"`{result['command']}` on {report.machine_line(result['machine'])}, load "
        f"{result['load'][0]:.1f} to {result['load'][1]:.1f}. Medians of {result['turns']} "
        "allreduces of float32 by Average; what is counted and checked: the head of "
        f"bench/wire.py.\n\n{table(head, rows)}"
    )
    if wanted:
        text += "\n" + table(["64 MiB, 2 hosts", "measured", "wanted", "reached"], wanted)
    return text


def main() -> None:
    """Measure, and write wire.md and wire.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--links", nargs="*", default=list(LINKS), choices=list(LINKS))
    parser.add_argument("--local", type=int, default=1, help="ranks of a host")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="from host to host, one way")
    parser.add_argument("--mib", type=float, nargs="*", default=[1.0, 8.0, 64.0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args()
    before = machine.load()["loadavg"]
    found: dict[str, Any] = {}
    for count in options.hosts:
        names = [f"host{index}" for index in range(count)]
        ranks = [name for name in names for _ in range(options.local)]
        for link in options.links:
            # A delay is that of two links: from a host to the switch, from there to the other.
            delay_s = options.delay_ms / 2000
            with netbed.Bed(names, delay_s=delay_s, with_sshd=False) as bed:
                for name in names:
                    bed.limit(name, LINKS[link])
                for mib in options.mib:
                    found[f"{count}|{link}|{mib}"] = on_link(bed, ranks, mib, options.turns)
                    print(count, link, mib, found[f"{count}|{link}|{mib}"], flush=True)
    load = [before, machine.load()["loadavg"]]
    result = {
        "command": machine.command_line(),
        "machine": machine.facts(),
        "load": load,
        "turns": options.turns,
        "delay_ms": options.delay_ms,
        "found": found,
    }
    report.write("wire", result, page(result), options.output)


if __name__ == "__main__":
    main()
