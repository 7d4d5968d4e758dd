"""Allreduce between hosts, Kolovod and gloo in turn in one run: ``bench/hosts.py [--quick]``.

The hosts are network namespaces of this machine (scripts/netbed), so this needs root. Their links
are limited in both directions by the kernel's token bucket (``tbf``), and delayed by a relay that
costs a part of a core. Every rank is started in its host by hand; gloo's ranks meet in a file, and
use the same interface.

How it measures: as bench/collectives.py does, with the same ranks (bench/worker.py): fresh random
data for every operation, every element of every result compared, max(end) - min(start) over the
ranks, medians. One iteration is several operations back to back for small sizes. Peers take turns
at every size, and their order rotates from round to round.

The rate of a link is what one TCP connection brings from one host to another, measured before and
after every round: bytes that arrive, without the first fifth, over the time that they take; the
highest of these, since other load on the machine only lowers it. The bound of an allreduce of S
bytes among H hosts is 2 (H - 1) / H * S / rate: every host must send and receive that much,
whatever the algorithm.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hosts_report
import machine
import report
from collectives import operations
from gangs import Commands, Gang, GangError
from hosts_report import KIB, MIB, Link

sys.path.insert(0, str(machine.ROOT / "scripts"))

import netbed

LINKS = (
    Link("unlimited", 0, 0),
    Link("10G", 10e9, 0),
    Link("1G", 1e9, 0),
    Link("100M", 100e6, 0),
    Link("100M+1ms", 100e6, 1e-3),
)
LONG_LINKS = (  # by --links only
    Link("100M+20ms", 100e6, 20e-3),
    Link("100M+50ms", 100e6, 50e-3),
    Link("1G+50ms", 1e9, 50e-3),
)
SIZES = [4, 64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
QUICK_SIZES = [4, 64 * KIB, MIB, 16 * MIB]
ALL_LINKS = LINKS + LONG_LINKS
PEERS = ("kolovod", "gloo")
ENCRYPTED = "kolovod+encrypt"  # by --peers only; hosts.json has its samples, the tables have not
MAX_ITERATIONS = 100
ASK_TIMEOUT_S = 300.0
RATE_SECONDS = 1.0  # that a measurement of the rate is to take
RATE_BYTES = (4 * MIB, 512 * MIB)
RATE_TIMEOUT_S = 60.0
FASTEST_BITS_PER_S = 20e9  # assumed of a link without a limit, to choose how much to send

RECEIVE = """
import socket, sys, time
count = int(sys.argv[1])
buffer = bytearray(1 << 20)
with socket.create_server(("0.0.0.0", 0)) as server:
    print(server.getsockname()[1], flush=True)
    with server.accept()[0] as connection:
        got = begin_at = 0
        while got < count:
            got += connection.recv_into(buffer)
            if not begin_at and got >= count // 5:
                begin_at, begin = got, time.monotonic()
        print((got - begin_at) / (time.monotonic() - begin))
"""
SEND = """
import socket, sys
left = int(sys.argv[3])
block = memoryview(bytes(1 << 20))
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    while left:
        sent = connection.send(block[: min(left, len(block))])
        left -= sent
    connection.recv(1)
"""


@dataclass
class Record:
    """All that one run found out."""

    samples: dict[hosts_report.Key, list[float]] = field(default_factory=lambda: defaultdict(list))
    rates: dict[tuple[int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    """(hosts, link) -> bytes per second."""
    rounds: list[dict[str, Any]] = field(default_factory=list)
    wrong: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    checked: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    dropped: dict[str, str] = field(default_factory=dict)


def plain_tcp(bed: netbed.Bed, source: str, target: str, count: int) -> float:
    """Return bytes per second of one TCP connection."""
    arguments = [sys.executable, "-c", RECEIVE, str(count)]
    with bed.popen(target, arguments, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        try:
            port = receiver.stdout.readline().strip()
            command = [sys.executable, "-c", SEND, bed.address(target), port, str(count)]
            bed.run(source, command, timeout_s=RATE_TIMEOUT_S)
            return float(receiver.communicate(timeout=RATE_TIMEOUT_S)[0])
        finally:
            receiver.kill()


class Bench:
    """One number of hosts, with ``local`` ranks each, over one kind of link."""

    def __init__(
        self, hosts: int, local: int, link: Link, options: argparse.Namespace, record: Record
    ) -> None:
        self.hosts, self.local, self.link = hosts, local, link
        self.options, self.record = options, record
        self.names = [f"host{index}" for index in range(hosts)]
        self.ranks = [name for name in self.names for _ in range(local)]
        self.gangs: dict[str, Gang] = {}

    def run(self) -> None:
        """Measure all sizes, in all rounds."""
        with contextlib.ExitStack() as cleanup:
            # A delay is that of two links: from a host to the switch, from there to the other.
            self.bed = cleanup.enter_context(
                netbed.Bed(self.names, delay_s=self.link.delay_s / 2, with_sshd=False)
            )
            for name in self.names:  # before there are peers: Kolovod measures its links at once
                self.bed.limit(name, self.link.bits_per_s)
            job = cleanup.enter_context(netbed.Job(self.bed, self.ranks))
            for peer in self.options.peers:
                self._start(peer, job)
                if peer in self.gangs:
                    cleanup.callback(self.gangs[peer].close)
            for number in range(self.options.rounds):
                self._round(number)

    def _start(self, peer: str, job: netbed.Job) -> None:
        program = PEERS[0] if peer == ENCRYPTED else peer
        worker = [sys.executable, str(machine.BENCH / "worker.py"), program]
        commands: Commands = []
        for rank, name in enumerate(self.ranks):
            place = {
                **job.environment(rank),
                "RANK": str(rank),
                "WORLD_SIZE": str(len(self.ranks)),
                "GLOO_SOCKET_IFNAME": "eth0",
                "KOLOVOD_ENCRYPT": str(int(peer == ENCRYPTED)),
            }
            commands.append((self.bed.command(name, worker), place))
        try:
            self.gangs[peer] = Gang(peer, len(self.ranks), self.bed.folder, commands=commands)
        except (GangError, OSError) as error:
            self._drop(peer, error)

    def _drop(self, peer: str, error: Exception) -> None:
        self.gangs.pop(peer, None)
        self.record.dropped[f"{peer}, {self.hosts} x {self.local}"] = str(error)
        print(f"  {peer} dropped: {error}", file=sys.stderr, flush=True)

    def _rate(self) -> float:
        wanted = (self.link.bits_per_s or FASTEST_BITS_PER_S) / 8 * RATE_SECONDS
        count = int(min(RATE_BYTES[1], max(RATE_BYTES[0], wanted)))
        rate = plain_tcp(self.bed, self.names[0], self.names[1], count)
        self.record.rates[self.hosts, self.link.name].append(rate)
        return rate

    def _round(self, number: int) -> None:
        before, started = machine.load(), time.monotonic()
        rate = self._rate()
        for size in self.options.sizes:
            bound_s = hosts_report.bound_s(self.hosts, size, rate)
            turn = number % len(self.options.peers)
            for peer in self.options.peers[turn:] + self.options.peers[:turn]:
                if peer in self.gangs:
                    self._measure(peer, size, bound_s)
        rates = [round(each * 8 / 1e6, 1) for each in (rate, self._rate())]
        after = machine.load()
        seen = {
            "hosts": self.hosts,
            "local": self.local,
            "link": self.link.name,
            "round": number + 1,
            "mbit_per_s": rates,
            "loadavg": [before["loadavg"], after["loadavg"]],
            "steal_s": round(after["steal_s"] - before["steal_s"], 2),
            "seconds": round(time.monotonic() - started, 1),
        }
        self.record.rounds.append(seen)
        print(
            f"{self.hosts} hosts x {self.local}, {self.link.name}, round {number + 1}: plain TCP "
            f"{rates[0]:,} .. {rates[1]:,} Mbit/s, load "
            f"{before['loadavg']:.2f}..{after['loadavg']:.2f}, {seen['seconds']} s",
            flush=True,
        )

    def _measure(self, peer: str, size: int, bound_s: float) -> None:
        key = hosts_report.Key(self.hosts, self.local, self.link.name, size, peer)
        try:
            # The first, after another that nobody counts if it is a short one, says how many more.
            (first_us,) = self._spans(key, 1, warmup=1 if bound_s < self.options.budget_s else 0)
            wanted = int(self.options.budget_s * 1e6 / (operations(size) * first_us))
            self.record.samples[key].append(first_us)
            if wanted > 1:
                more = min(wanted, MAX_ITERATIONS) - 1
                self.record.samples[key] += self._spans(key, more, warmup=0)
        except GangError as error:
            self._drop(peer, error)

    def _spans(self, key: hosts_report.Key, iterations: int, warmup: int) -> list[float]:
        """Return microseconds of one operation, in each of the iterations."""
        ops = operations(key.bytes)
        answers = self.gangs[key.peer].ask(
            ASK_TIMEOUT_S,
            do="verb",
            verb="allreduce",
            front="torch" if key.peer == "gloo" else "numpy",
            dtype="float32",
            bytes=key.bytes,
            ops=ops,
            iterations=iterations,
            warmup=warmup,
        )
        self.record.wrong[key.peer] += sum(answer["wrong"] for answer in answers)
        self.record.checked[key.peer] += sum(answer["checked"] for answer in answers)
        return report.spans(answers, 1e3 * ops)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; see --help."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def words(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    links = [link.name for link in LINKS]
    known = {"links": [link.name for link in ALL_LINKS], "peers": [*PEERS, ENCRYPTED]}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--hosts", type=numbers, metavar="N,N", help="default 2,3,4; with --quick 2")
    add("--local", type=numbers, metavar="N,N", help="ranks of a host; default 1,2, or 1")
    add("--links", type=words, default=links, help=",".join(known["links"]))
    add("--sizes", type=numbers, metavar="BYTES,BYTES", help="default 4 B to 64 MiB, or 16 MiB")
    add("--peers", type=words, default=list(PEERS), help=",".join(known["peers"]))
    add("--rounds", type=int, help="default 2; with --quick 1")
    add("--budget-s", type=float, help="per peer, size and round; default 0.4; with --quick 0.2")
    add("--quick", action="store_true", help="less of everything: about a minute")
    add("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    for what, names in known.items():
        unknown = sorted(set(getattr(options, what)) - set(names))
        if unknown:
            parser.error(f"unknown {what} {unknown}: choose from {', '.join(names)}")
    quick = options.quick
    options.hosts = options.hosts or ([2] if quick else [2, 3, 4])
    options.local = options.local or ([1] if quick else [1, 2])
    options.sizes = sorted(options.sizes or (QUICK_SIZES if quick else SIZES))
    options.rounds = options.rounds or (1 if quick else 2)
    options.budget_s = options.budget_s or (0.2 if quick else 0.4)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, and say whether every result was right and every peer could be measured."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    reason = netbed.unavailable(
        with_delay=any(link.delay_s for link in ALL_LINKS if link.name in options.links)
    )
    if reason:
        print(f"bench/hosts.py: {reason}", file=sys.stderr)
        return 1
    record, facts = Record(), machine.facts()
    print(report.machine_line(facts), flush=True)
    chosen = [link for link in ALL_LINKS if link.name in options.links]
    for hosts in options.hosts:
        for local in options.local:
            for link in chosen:
                Bench(hosts, local, link, options, record).run()
    result, markdown = hosts_report.make(record, facts, chosen)
    name = "hosts-quick" if options.quick else "hosts"
    report.write(name, result, markdown, options.output)
    (options.output / f"{name}.svg").write_text(hosts_report.curve(result, chosen))
    print(f"\n{markdown}")
    failed = dict(record.dropped)
    failed |= {who: f"{count} wrong elements" for who, count in record.wrong.items() if count}
    for who, reason in failed.items():
        print(f"FAILED {who}: {reason.splitlines()[-1]}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
