"""Faults between hosts: who is named, and how soon. Ranks run on the hosts of a bed.

Every limit is five times what docs/design.md promises or what was measured, for busy machines; but
for the silence of a host, which the kernel itself would end after five seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from netbed import Bed, World, unavailable
from slow import slow_but
from waiting import until

import kolovod
from kolovod.errors import CollectiveAbortedError

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

LIMIT_S = 30.0
"""For what takes 0.1 s (a process that ended: its host tells), 1.5 s (a host that says nothing) and
2.5 s (two hosts that a third one reaches): without that it is minutes until TCP gives up."""
HOSTS = ("a", "a", "b", "c")


def there(world):
    """Wait until every rank has had its first result."""
    marks = [world.bed.folder / f"ready{rank}" for rank in range(len(world.job.hosts))]
    until(lambda: all(mark.exists() for mark in marks))


def reduce_until_it_fails(rank, folder):
    """How the world ended for this rank."""
    kolovod.init()
    kolovod.allreduce(np.ones(10_000), "t")
    Path(folder, f"ready{rank}").touch()
    try:
        while True:
            kolovod.allreduce(np.ones(10_000), "t")
            time.sleep(0.005)
    except CollectiveAbortedError as error:
        return type(error).__name__, error.rank, str(error)


def wait_until_it_fails(rank, folder, victim, in_what):
    """The same, waiting for the victim: nothing is on its way between the hosts."""
    kolovod.init()
    kolovod.allreduce(np.ones(3), "t")
    Path(folder, f"ready{rank}").touch()
    try:
        if rank == victim:
            until(lambda: Path(folder, "failed").exists())
        if in_what == "allreduce":
            kolovod.allreduce(np.ones(3), "t")
        else:
            kolovod.recv(np.empty(3), victim)
    except CollectiveAbortedError as error:
        Path(folder, "failed").touch()
        return type(error).__name__, error.rank, str(error)


def pull_the_cable(bed, world):
    bed.set_link("c", up=False)


def cut_off(bed, world):
    bed.partition(["a", "b"], ["c"])


@pytest.mark.parametrize("victim", slow_but([1], [1, 3]))
def test_a_killed_rank_is_named_on_every_host(victim):
    with (
        Bed(["a", "b", "c"], with_sshd=False) as bed,
        World(bed, HOSTS, reduce_until_it_fails, str(bed.folder)) as world,
    ):
        there(world)
        world.ranks[victim].kill()
        results = world.results(LIMIT_S)
    for rank, result in enumerate(results):
        if rank == victim:
            assert result.exit_code == -9
            continue
        kind, culprit, text = result
        assert (kind, culprit) == ("RankLostError", victim)
        assert f"rank {victim} on host {HOSTS[victim]}" in text


@pytest.mark.parametrize("fault", slow_but((), (pull_the_cable, cut_off)))
def test_a_host_that_is_out_of_reach_is_named(fault):
    """Host c; and its own rank names somebody of the other side."""
    with (
        Bed(["a", "b", "c"], with_sshd=False) as bed,
        World(bed, HOSTS, reduce_until_it_fails, str(bed.folder)) as world,
    ):
        there(world)
        fault(bed, world)
        results = world.results(LIMIT_S)
    for result in results[:3]:
        kind, culprit, text = result
        assert (kind, culprit) == ("RankLostError", 3)
        assert "rank 3 on host c" in text
    kind, culprit, text = results[3]
    assert kind == "RankLostError"
    assert culprit in (0, 1, 2)
    assert f"rank {culprit} on host {HOSTS[culprit]}" in text


ENCRYPTED_WAIT = ("allreduce", 1, "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ENCRYPTED_WAIT,
        ("allreduce", 0, "0"),
        ("recv", 1, "0"),
        ("recv", 0, "0"),
    ],
)
def test_a_host_that_is_waited_for_is_lost_soon(case):
    """Neither the root nor a leaf of the tree of leaders has anything to say."""
    in_what, victim, encrypt = case
    with (
        Bed(["a", "b"], with_sshd=False) as bed,
        World(
            bed,
            ["a", "b"],
            wait_until_it_fails,
            str(bed.folder),
            victim,
            in_what,
            env={"KOLOVOD_ENCRYPT": encrypt},
        ) as world,
    ):
        there(world)
        time.sleep(0.5)  # what was said last is acknowledged
        bed.partition(["a"], ["b"])
        kind, culprit, text = world.results(LIMIT_S)[1 - victim]
    assert (kind, culprit) == ("RankLostError", victim)
    assert "has acknowledged nothing for" in text


def reduce_much_until_told(rank, folder):
    kolovod.init()
    Path(folder, f"ready{rank}").touch()
    end = 0.0
    while not end:
        done = float(Path(folder, "end").exists())
        end = kolovod.allreduce(np.full(500_000, done), "t", op=kolovod.Max)[0]
    return "done"


def survive(host_lost_s: str, trouble: Callable[[Bed], None]) -> None:
    """Ranks on three hosts reduce while there is trouble, and to their end."""
    environment = {"KOLOVOD_HOST_LOST_S": host_lost_s}
    with (
        Bed(["a", "b", "c"], with_sshd=False) as bed,
        World(bed, HOSTS, reduce_much_until_told, str(bed.folder), env=environment) as world,
    ):
        there(world)
        time.sleep(0.5)
        trouble(bed)
        (bed.folder / "end").touch()
        assert world.results(60) == ["done"] * len(HOSTS)


@pytest.mark.slow
def test_a_host_whose_processes_stand_still_is_not_lost():
    """Its kernel answers, that there is no room; and it does not take the others for lost."""

    def stand_still(bed: Bed) -> None:
        for host in ("a", "c"):
            ranks = [p.pid for p in bed.processes(host) if "rank.py" in p.command]
            for pid in ranks:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(3)
            for pid in ranks:
                os.kill(pid, signal.SIGCONT)
            time.sleep(0.5)

    survive("0.5", stand_still)


@pytest.mark.slow
def test_an_outage_that_is_shorter_is_survived():
    def part(bed: Bed) -> None:
        bed.partition(["a", "b"], ["c"])
        time.sleep(3)
        bed.heal()
        time.sleep(0.5)

    survive("15", part)


@pytest.mark.slow
def test_two_hosts_that_do_not_reach_each_other_but_the_first():
    """Everybody fails and names one of the two, which may find it at the same time."""
    with (
        Bed(["a", "b", "c"], with_sshd=False) as bed,
        World(bed, HOSTS, reduce_until_it_fails, str(bed.folder)) as world,
    ):
        there(world)
        bed.partition(["b"], ["c"])
        results = world.results(LIMIT_S)
    for kind, culprit, _ in results:
        assert kind == "RankLostError"
        assert culprit in (2, 3)


def verbs_with_loss(rank, folder):
    kolovod.init()
    size = kolovod.size()
    Path(folder, f"ready{rank}").touch()
    until(Path(folder, "go").exists)
    for turn in range(20):
        for count in (1, 3_000, 200_000):
            total = kolovod.allreduce(np.full(count, rank + turn), f"t{count}", op=kolovod.Sum)
            assert np.all(total == sum(range(size)) + turn * size)
        rows = kolovod.allgather(np.full((rank + 1, 100), rank))
        assert rows.shape[0] == size * (size + 1) // 2
    return "right"


@pytest.mark.slow
def test_one_lost_packet_of_a_hundred_is_of_no_concern():
    with (
        Bed(["a", "b", "c"], with_sshd=False) as bed,
        World(bed, HOSTS, verbs_with_loss, str(bed.folder)) as world,
    ):
        until(lambda: all((bed.folder / f"ready{rank}").exists() for rank in range(len(HOSTS))))
        bed.lose(0.01)
        (bed.folder / "go").touch()
        assert world.results(90) == ["right"] * len(HOSTS)


def wait_for_the_late(rank, folder):
    kolovod.init()
    kolovod.allreduce(np.ones(3), "weight")
    if rank == 3:
        until(lambda: Path(folder, "reported").exists())
    return kolovod.allreduce(np.ones(3), "weight")[0]


@pytest.mark.slow
def test_a_late_host_is_reported_and_nothing_fails():
    with (
        Bed(["a", "b", "c"], with_sshd=False) as bed,
        World(
            bed,
            HOSTS,
            wait_for_the_late,
            str(bed.folder),
            env={"KOLOVOD_LATE_REPORT_S": "1"},
        ) as world,
    ):
        wanted = "rank 3 on host c"
        until(lambda: any(wanted in world.stderr(rank) for rank in range(4)))
        (bed.folder / "reported").touch()
        assert world.results(60) == [1] * len(HOSTS)
        reports = "".join(world.stderr(rank) for rank in range(4))
    assert "has not submitted 'weight'" in reports
    assert "in wait_for_the_late" in reports  # where it is


def just_init(rank):
    try:
        kolovod.init()
    except kolovod.errors.KolovodError as error:
        return type(error).__name__, str(error)
    return "in"


@pytest.mark.slow
def test_a_rank_with_another_secret_stays_outside():
    with (
        Bed(["a", "b"], with_sshd=False) as bed,
        World(
            bed,
            ["a", "b"],
            just_init,
            env={"KOLOVOD_START_TIMEOUT_S": "2"},
            secrets={1: "0" * 64},
        ) as world,
    ):
        (kind, text), (stranger, reason) = world.results(LIMIT_S)
        said = [world.stderr(rank) for rank in range(2)]
    assert stranger == "AuthenticationError"
    assert "KOLOVOD_SECRET" in reason
    assert kind == "StartTimeoutError"
    assert "rank 1 did not call init()" in text
    for shown in (text, reason, *said):
        assert world.job.secret not in shown
        assert "0" * 64 not in shown


GARBAGE = """
import os, socket, sys
from concurrent.futures import ThreadPoolExecutor
held = []
texts = [b"", b"GET / HTTP/1.1\\r\\n\\r\\n", os.urandom(5000), b"KOLOVOD\\x01" + bytes(64),
         b"KOLOVOD\\x01" + os.urandom(1 << 16), b"\\xff" * 300]
def send(text):
    try:
        connection = socket.create_connection((host, int(port)), timeout=5)
        connection.sendall(text)
        held.append(connection)
    except OSError:
        pass
with ThreadPoolExecutor(len(texts)) as pool:  # each has to wait for the delay
    for line in sys.stdin:
        host, port = line.split()
        list(pool.map(send, texts))
        print(len(held), flush=True)
"""


def add_up_when_told(rank, folder):
    until(lambda: Path(folder, "go").exists(), 60)
    kolovod.init()
    total = [int(kolovod.allreduce(np.full(1000, rank), op=kolovod.Sum)[7]) for _ in range(5)]
    Path(folder, f"ready{rank}").touch()
    until(lambda: Path(folder, "end").exists(), 60)
    return total, int(kolovod.allreduce(np.full(100_000, rank), op=kolovod.Sum)[7])


@pytest.mark.slow
@pytest.mark.skipif(bool(unavailable(with_delay=True)), reason=unavailable(with_delay=True))
def test_garbage_to_every_port_while_the_world_forms_and_after():
    """The delay keeps the ranks' own ports open for seconds."""
    attacked = set()
    with (
        Bed(["a", "b", "stranger"], with_sshd=False, delay_s=0.05) as bed,
        World(
            bed,
            ["a", "a", "b"],
            add_up_when_told,
            str(bed.folder),
            env={"KOLOVOD_INTERFACE": "10.0.0.0/8"},  # else ranks listen at IPv6 addresses, too
        ) as world,
        bed.popen(
            "stranger",
            [sys.executable, "-c", GARBAGE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as stranger,
    ):
        (bed.folder / "go").touch()
        marks = [bed.folder / f"ready{rank}" for rank in range(3)]
        deadline = time.monotonic() + 60
        while not all(mark.exists() for mark in marks) and time.monotonic() < deadline:
            for host in ("a", "b"):
                for port in bed.listening_ports(host):
                    if (host, port) not in attacked:
                        attacked.add((host, port))
                        stranger.stdin.write(f"{bed.address(host)} {port}\n")
                        stranger.stdin.flush()
        for host in ("a", "b"):
            for port in bed.listening_ports(host):
                stranger.stdin.write(f"{bed.address(host)} {port}\n")
                attacked.add((host, port))
        stranger.stdin.close()
        held = [int(line) for line in stranger.stdout]
        (bed.folder / "end").touch()
        assert world.results(60) == [([3] * 5, 3)] * 3
    assert len(attacked) == 4  # the rendezvous server's and each rank's
    assert held[-1] >= 12  # connections that were made


SILENT = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
held = []
for number in range(1, count + 1):
    held.append(socket.create_connection((host, port), timeout=20))
    if number % 50 == 0:  # else TCP waits for seconds until it knocks at a full queue again
        try:
            held[-1].recv(1)
        except ConnectionResetError:
            pass
print("there", flush=True)
sys.stdin.read()
"""


def resident_mib(bed, host, word):
    (process,) = [p for p in bed.processes(host) if word in p.command]
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


@pytest.mark.slow
def test_a_thousand_connections_that_say_nothing():
    """They take bounded memory, and neither the forming nor the world minds."""
    with (
        Bed(["a", "b", "stranger"], with_sshd=False) as bed,
        World(bed, ["a", "a", "b"], add_up_when_told, str(bed.folder)) as world,
    ):
        host, _, port = world.job.server.rpartition(":")
        before = resident_mib(bed, "a", "rendezvous.py")
        silent = bed.popen(
            "stranger",
            [sys.executable, "-c", SILENT, host, port, "1000"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with silent:
            assert silent.stdout.readline() == "there\n"
            grown = resident_mib(bed, "a", "rendezvous.py") - before
            (bed.folder / "go").touch()
            until(lambda: all((bed.folder / f"ready{rank}").exists() for rank in range(3)))
            (bed.folder / "end").touch()
            assert world.results(60) == [([3] * 5, 3)] * 3
            silent.stdin.close()
            silent.wait(30)
    assert grown < 64
