"""The bed itself: hosts as namespaces, their links and sshd."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from netbed import Bed, namespaces, network, unavailable
from waiting import DEADLINE_S, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]
needs_delay = pytest.mark.skipif(
    bool(unavailable(with_delay=True)), reason=unavailable(with_delay=True)
)

REACH = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], 22), timeout=float(sys.argv[2])) as connection:
        print(connection.recv(4).decode())
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture(scope="module")
def bed():
    with Bed(["a", "b", "c"], networks=2) as bed:
        yield bed


def reach(bed, host, other, timeout_s=DEADLINE_S / 2):
    """What sshd of ``other`` says first to ``host``, or the error's name."""
    ended = bed.run(host, [sys.executable, "-c", REACH, other, str(timeout_s)])
    return ended.stdout.strip()


def test_hosts_are_themselves(bed):
    script = "hostname; echo $$; cat /proc/net/unix | grep -c kolovod; ls /run"
    for name in ("a", "b"):
        lines = bed.run(name, ["sh", "-c", script]).stdout.split()
        assert lines[0] == name
        assert int(lines[1]) < 1000  # numbers of its own
        assert lines[2:] == ["0", "sshd"]


@pytest.mark.parametrize("name", ["b", "b-v6", "b-1", "b-1-v6"])
def test_ssh_reaches_every_address_with_the_host_key_checked(bed, name):
    command = ["ssh", "-o", "BatchMode=yes", name]
    ended = bed.run("a", [*command, "hostname; exit 7"])
    assert (ended.stdout, ended.returncode) == ("b\n", 7)
    ended = bed.run("a", ["ssh", "-o", "UserKnownHostsFile=/dev/null", *command[1:], "true"])
    assert ended.returncode == 255
    assert "Host key verification failed" in ended.stderr


def test_a_command_ends_as_it_would_here(bed):
    assert bed.run("a", ["sh", "-c", "exit 3"]).returncode == 3
    assert bed.run("a", ["no such command"]).returncode == 127
    assert bed.run("a", ["pwd"], cwd="/usr").stdout == "/usr\n"
    with pytest.raises(subprocess.TimeoutExpired):
        bed.run("a", ["sleep", "100"], timeout_s=0.3)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        sleeper = bed.popen("a", ["sleep", "100"])
        until(lambda: [p.command for p in bed.processes("a")] == ["sleep 100"])
        sleeper.send_signal(number)
        assert sleeper.wait(DEADLINE_S) == -number
        until(lambda: not bed.processes("a"))


def test_a_cable_is_pulled_and_put_in_again(bed):
    bed.set_link("b", up=False)
    assert reach(bed, "a", "b", 0.5) == "TimeoutError"
    assert reach(bed, "a", "b-1") == "SSH-"
    assert reach(bed, "a", "c") == "SSH-"
    bed.set_link("b", up=True)
    assert reach(bed, "a", "b") == "SSH-"


def test_a_partition(bed):
    bed.partition(["a", "c"], ["b"])
    for host, other in (("a", "b"), ("b", "c"), ("a", "b-1")):
        assert reach(bed, host, other, 0.5) == "TimeoutError"
    assert reach(bed, "a", "c") == "SSH-"
    bed.heal()
    assert reach(bed, "a", "b") == "SSH-"


RECEIVE = """
import socket, sys, time
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("there", flush=True)
    with server.accept()[0] as connection:
        count = 0
        while data := connection.recv(1 << 16):
            count += len(data)
        print(count, time.monotonic())
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7000)) as connection:
    print(time.monotonic())
    connection.sendall(bytes(int(sys.argv[2])))
"""


def transfer_s(bed, host, other, count):
    """From before the first byte to after the last one, by the clock that all hosts have."""
    receiver = bed.popen(other, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
    with receiver:
        assert receiver.stdout.readline() == "there\n"
        begun_s = bed.run(host, [sys.executable, "-c", SEND, other, str(count)]).stdout
        received, ended_s = receiver.communicate(timeout=DEADLINE_S)[0].split()
    assert int(received) == count
    return float(ended_s) - float(begun_s)


@pytest.mark.parametrize(("host", "other"), [("a", "b"), ("b", "a")])
def test_a_limit_holds_in_both_directions(bed, host, other):
    bed.limit("a", 0)  # there was none: nothing happens
    bed.limit("a", 20e6)
    assert transfer_s(bed, host, other, 1 << 20) > 0.8 * 8 * (1 << 20) / 20e6
    bed.limit("a", 0)


@pytest.mark.slow
def test_lost_packets(bed):
    """Of datagrams about the share that was asked for; a stream arrives whole."""
    bed.lose(0.2)
    code = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
    receiver.bind(("0.0.0.0", 7001))
    print("there", flush=True)
    receiver.settimeout(60)
    count = 0
    while True:
        text, sender = receiver.recvfrom(10)
        if text == b"x":
            count += 1
        else:
            receiver.sendto(text, sender)
        if text == b"end":
            print(count, flush=True)
"""
    # The receiver answers after each few, since what its socket has no room for is lost, too.
    send = """
import socket, time

def ask(text):
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        sender.sendto(text, ("b", 7001))
        try:
            while sender.recv(10) != text:
                pass
            return
        except TimeoutError:
            pass  # the question is lost, or the answer

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    sender.settimeout(0.1)
    for number in range(2000):
        sender.sendto(b"x", ("b", 7001))
        if number % 50 == 49:
            ask(str(number).encode())
    ask(b"end")
"""
    receiver = bed.popen("b", [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with receiver:
        assert receiver.stdout.readline() == "there\n"
        bed.run("a", [sys.executable, "-c", send], timeout_s=3 * DEADLINE_S)
        arrived = int(receiver.stdout.readline())
        receiver.kill()
    assert 1200 < arrived < 1900
    bed.lose(0.02)
    transfer_s(bed, "a", "c", 1 << 18)
    bed.lose(0)
    assert reach(bed, "a", "b") == "SSH-"


CONNECT_TIME = """
import socket, sys, time
socket.create_connection(("b", 22)).close()
begin = time.monotonic()
socket.create_connection(("b", 22)).close()
print(time.monotonic() - begin)
"""


@pytest.mark.slow
@needs_delay
def test_delay_counts_once_on_every_link_and_direction():
    with Bed(["a", "b"], delay_s=0.02, bits_per_s=100e6) as bed:

        def connect_s():
            return float(bed.run("a", [sys.executable, "-c", CONNECT_TIME]).stdout)

        assert connect_s() >= 0.08
        until(lambda: connect_s() < 2 * 0.08, "a connection that is delayed once each way")
        assert transfer_s(bed, "a", "b", 1 << 20) > 0.8 * 8 * (1 << 20) / 100e6
        bed.set_link("b", up=False)
        assert reach(bed, "a", "b", 0.5) == "TimeoutError"


WATCH = """
import socket, sys
with socket.create_connection(("b", 22)) as connection:
    print(connection.recv(4).decode(), flush=True)
    connection.recv(1000)
    sys.stdin.readline()
    connection.settimeout(float(sys.argv[1]))
    try:
        print("end" if not connection.recv(100) else "data")
    except TimeoutError:
        print("nothing")
"""


@pytest.mark.parametrize("how", ["host", "sshd"])
def test_of_a_killed_host_the_others_hear_nothing(how):
    with Bed(["a", "b"]) as bed:
        watch = bed.popen(
            "a",
            # How long it looks for nothing; what comes is waited for.
            [sys.executable, "-c", WATCH, "1" if how == "host" else str(DEADLINE_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with watch:
            assert watch.stdout.readline() == "SSH-\n"
            sleeper = bed.popen("b", ["sleep", "100"])
            until(lambda: "sleep 100" in [p.command for p in bed.processes("b")])
            if how == "host":
                bed.kill_host("b")
                assert sleeper.wait(DEADLINE_S) == -signal.SIGKILL
                assert not bed.processes("b")
            else:
                bed.kill_sshd("b")
                assert [p.command for p in bed.processes("b")] == ["sleep 100"]
                sleeper.kill()
                sleeper.wait()
            heard = watch.communicate("\n", timeout=2 * DEADLINE_S)[0]
        assert heard.strip() == ("nothing" if how == "host" else "end")


def test_two_beds_of_the_same_names(bed):
    with Bed(["a", "b"]) as other:
        until(lambda: not bed.processes("b"), "what an earlier test has started has ended")
        sleeper = other.popen("b", ["sleep", "101"])
        until(lambda: [p.command for p in other.processes("b")] == ["sleep 101"])
        assert not bed.processes("b")
        ended = other.run("a", ["ssh", "-o", "BatchMode=yes", "b", "ps -e -o args"])
        assert "sleep 101" in ended.stdout
        ended = bed.run("a", ["ssh", "-o", "BatchMode=yes", "b", "ps -e -o args"])
        assert "sleep 101" not in ended.stdout
        sleeper.kill()
        sleeper.wait()


HOLD = """
import json, signal, time
from netbed import Bed
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start jobs with it ignored
with Bed(["a", "b"], delay_s=0.001) as bed:
    sleeper = bed.popen("a", ["sh", "-c", "sleep 100 & setsid sleep 101"])
    while len(bed.processes("a")) < 3:
        time.sleep(0.01)
    pids = [p.pid for name in bed.names for p in bed._hosts[name].processes()]
    pids += [bed._hosts[name].pid for name in bed.names]
    pids += [bed._switch._space.pid, bed._switch._relay.pid]
    print(json.dumps([str(bed.folder), pids]), flush=True)
    time.sleep(100)
"""


def running(pid):
    """When that process began, since a later one may have its number; "" if it has ended."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else others[18]


@needs_delay
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_however_the_process_ends(number):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with holder:
        folder, pids = json.loads(holder.stdout.readline())
        begun = {pid: running(pid) for pid in pids}
        assert all(begun.values())
        holder.send_signal(number)
        assert holder.wait(DEADLINE_S) in (-number, 1)
    until(lambda: not any(running(pid) == since for pid, since in begun.items()))
    until(lambda: not os.path.exists(folder))


def test_a_machine_without_the_means_is_told(monkeypatch):
    look = unavailable.__wrapped__
    assert look() == ""
    with monkeypatch.context() as patch:
        patch.setattr(namespaces.os, "geteuid", lambda: 1000)
        assert look() == "network namespaces need root, this is user 1000"
    with monkeypatch.context() as patch:
        patch.setattr(namespaces, "tool", lambda name: "" if name in ("nft", "ip") else name)
        assert look() == "ip, nft not found: apt-get install iproute2 nftables"
    with monkeypatch.context() as patch:
        patch.setattr(namespaces, "_UNSHARE", ["unshare", "--no-such-namespace"])
        assert look().startswith("namespaces are refused: ")
    with monkeypatch.context() as patch:
        patch.setattr(network, "_TABLE", "no-such-family netbed")
        assert "nft" in look()
