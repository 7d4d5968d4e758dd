"""Writes the corpus of the Python decoders: what the processes of real worlds say to each other.

usage: PYTHONPATH=src python tests/fuzz/capture.py

Replaces what is there. Host names and process numbers are those of the machine it runs on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import kolovod as kv
from kolovod.coordination import consensus, record_file
from kolovod.coordination.coordinator_state import Facts, first_world
from kolovod.coordination.membership import Policy
from kolovod.coordination.protocol import (
    Contact,
    Hello,
    Left,
    encode_contact,
    encode_facts,
    encode_hello,
    encode_member,
    encode_policy,
    encode_proof,
    encode_record,
    encode_stamp,
    encode_world,
)
from kolovod.elastic import join_endpoint
from kolovod.net import channel as channels
from kolovod.rendezvous import segment_handover, versions
from kolovod.rendezvous.client import join
from kolovod.rendezvous.mesh import Listener
from kolovod.rendezvous.protocol import Member
from kolovod.rendezvous.rank_environment import RankEnvironment
from kolovod.rendezvous.server import RendezvousServer
from kolovod.testing import run_ranks

CORPUS = Path(__file__).parent / "corpus"
MOST = 4  # of a kind
CONFIG_FILE = """\
controller: gloo
params: {fusion_threshold_mb: 64, cycle_time_ms: 1.5, cache_capacity: 8192}
timeline: {filename: timeline.json, mark_cycles: false}
stall_check: {enabled: true, warning_time_seconds: 60}
library_options: {thread_affinity: [0, 1]}
logging: {level: warning, with_timestamp: true}
"""


def keep(folder: Path, kind: str, data: bytes) -> None:
    (folder / kind).mkdir(parents=True, exist_ok=True)
    if len(data) <= 6000:
        path = folder / kind / f"{time.monotonic_ns()}-{os.getpid()}"
        path.write_bytes(data)


def kind_of(message: Any) -> str:
    """The target for a message, by what is in it."""
    if "timeout_s" in message:
        return "rendezvous_join"
    if "formed" in message:
        return "rendezvous_word"
    if "operations" in message or "whereabouts" in message:
        return "timeline_report"
    if "pidfds" in message or ("error" in message and "message" not in message):
        return "leader_answer"
    if "members" in message or "message" in message:
        return "rendezvous_answer"
    if "purpose" in message:
        return "hello"
    return "follower" if "pidfd" in message else "signed_frame"


def tap(folder: Path) -> None:
    """From now on, everything that this process sends is kept."""
    send = channels.Channel.send_encoded

    def kept(self: channels.Channel, body: bytes, deadline: float) -> None:
        message = json.loads(body)
        keep(folder, kind_of(message), body)
        if "error" in message and "message" not in message:
            keep(folder, "rendezvous_word", body)  # ranks and leaders say alike what keeps them
        keep(folder, "signed_frame", body)
        proof = channels._digest(self._key, self._out, channels._SEQUENCE.pack(self._sent), body)
        keep(folder, "frames", channels._LENGTH.pack(len(body)) + proof + body)
        send(self, body, deadline)

    channels.Channel.send_encoded = kept  # type: ignore[method-assign]


def work(rank: int, folder: Path, timeline: str) -> None:
    tap(folder)
    keep(
        folder,
        "environment",
        "\n".join(f"{k}={v}" for k, v in os.environ.items() if "KOLOVOD" in k).encode(),
    )
    kv.init()
    if timeline and rank == 0:
        kv.start_timeline(timeline)
    for step in range(3):
        kv.allreduce(np.ones(10, np.float32), name="layer1.weight")
        kv.allgather(np.ones((rank + 1, 2)), name=f"rows.{step}")
        time.sleep(0.1)
    if timeline and rank == 0:
        kv.stop_timeline()
    kv.barrier()
    if rank == 3:  # the others find it dead when they form a world again
        os._exit(0)
    kv.shutdown()
    time.sleep(0.5)
    with contextlib.suppress(kv.errors.RankLostError):
        kv.init()


def fail(*_: object) -> int:
    raise PermissionError("memory is sealed")


def work_in_vain(rank: int, folder: Path) -> None:
    tap(folder)
    if rank == 0:
        segment_handover.make_segment = fail  # type: ignore[assignment]
    with contextlib.suppress(kv.errors.BootstrapError, PermissionError):
        kv.init()


def work_of_some(rank: int, folder: Path) -> None:
    tap(folder)
    if rank != 1:
        kv.init(comm=[0, 2])
        kv.shutdown()


def meet_at_several_addresses() -> None:
    """Ranks of two hosts whose listeners have several addresses each."""
    secret = channels.new_secret()

    def meet(rank: int, address: str) -> None:
        with contextlib.closing(Listener(["127.0.0.1", "127.0.0.1", "::1"], 2)) as listener:
            me = Member(rank, f"host-{rank}", os.getpid(), "pid:[1]", "", 0, listener.address)
            with join(address, secret, [0, 1], me, 20.0) as joined:
                joined.formed(time.monotonic() + 20)

    with contextlib.closing(RendezvousServer(secret, 2)) as server:
        server.start()
        threads = [threading.Thread(target=meet, args=(rank, server.address)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def handshakes(folder: Path, *, sealed: bool) -> None:
    """Both directions of one, through a relay, and what the client says next."""
    client, near = socket.socketpair()
    far, server = socket.socketpair()
    deadline = time.monotonic() + 10
    secret = channels.new_secret()
    accepting = threading.Thread(target=channels.accept, args=(server, secret, "test", deadline))

    def call() -> None:
        channel = channels.greet(client, secret, "test", deadline, encrypted=sealed)
        hello = {"rank": 1, "purpose": "data", "epoch": 1, "stripe": 3}
        channel.send({**versions.own(), **hello}, deadline)

    calling = threading.Thread(target=call)
    accepting.start()
    calling.start()
    challenge = far.recv(1000)
    near.sendall(challenge)
    answer = near.recv(1000)
    far.sendall(answer)
    proof = far.recv(1000)
    near.sendall(proof)
    accepting.join()
    calling.join()
    keep(folder, "frames_encrypted" if sealed else "frames", near.recv(1000))
    keep(folder, "handshake_of_client", answer)
    keep(folder, "handshake_of_server", challenge + proof)
    keep(folder, "handshake_of_server", challenge + bytes(32))


def thin_out(found: Path) -> None:
    """Some of each kind, length and number of lists, under names that stay the same."""
    shutil.rmtree(CORPUS, ignore_errors=True)
    for folder in sorted(found.iterdir()):
        by_shape: dict[Any, bytes] = {}
        for file in sorted(folder.iterdir()):
            data = file.read_bytes()
            shape = len(data) // 50, data.count(b"["), data.endswith(bytes(32))
            by_shape.setdefault(shape, data)
        (CORPUS / folder.name).mkdir(parents=True)
        for number, data in enumerate(list(by_shape.values())[:MOST]):
            (CORPUS / folder.name / str(number)).write_bytes(data)


def elastic_messages(folder: Path) -> None:
    """Worlds of an elastic job, and what members note of them."""
    first = first_world([(0, "a"), (1, "a"), (2, "b")])
    ballot = consensus.Ballot(1, -1)
    members = (*first.members[:2], consensus.Member(1 << 20, 2, "b"))
    second = consensus.World(ballot, 2, members, (first,), frozenset({1 << 20}), 1)
    records = [
        consensus.NOTHING,
        consensus.NOTHING.told(first),
        consensus.Record(ballot, first, second),
    ]
    for value in (encode_world(second), encode_member(members[2]), encode_stamp(second.stamp)):
        keep(folder, "coordinator", json.dumps(value).encode())
    keep(folder, "coordinator", json.dumps(encode_record(records[2])).encode())
    proofs = {2: consensus.Proof(2, "was killed", records[1])}
    facts = Facts(second, proofs, {members[2].number: members[2]}, frozenset({1}), frozenset())
    contact = Contact(1, "127.0.0.1:4000", 17, "boot pid:[4026531836]", "/proc/17/fd/5")
    told = encode_facts(facts), encode_contact(contact), encode_policy(Policy())
    at_the_endpoint = join_endpoint.Facts(
        "127.0.0.1:4000", "0123abcd", "feed", ("a", "a", "b")
    )._asdict()
    left = Left(7, records[2])
    hello = encode_hello(Hello(None, 2, "b", contact, consensus.NOTHING, facts, left, 5))
    for value in (*told, encode_proof(proofs[2]), at_the_endpoint, hello):
        keep(folder, "coordinator", json.dumps(value).encode())
    for record in records:
        fd, path = record_file.new_file()
        with contextlib.closing(record_file.RecordFile(path)) as file:
            file.write(consensus.NOTHING)
            file.write(record)  # in the first place
        keep(folder, "record", os.pread(fd, 5000, 0).rstrip(b"\0"))
        os.close(fd)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        found = Path(name) / "found"
        tap(found)
        meet_at_several_addresses()
        hosts = ["a", "a", "b", "b"]
        timeline = Path(name) / "timeline.json"
        options: dict[str, Any] = {"KOLOVOD_LAST_OPERATIONS_DIR": "none"}
        run_ranks(
            4,
            work,
            found,
            str(timeline),
            hosts=hosts,
            keep_going=True,
            env={**options, "KOLOVOD_TIMELINE": "dynamic"},
        )
        run_ranks(3, work_in_vain, found, env=options)
        run_ranks(3, work_of_some, found, env=options)
        for sealed in (False, True):
            handshakes(found, sealed=sealed)
        events = json.loads(timeline.read_text())
        for begin in (0, 20, 40):
            keep(found, "timeline", json.dumps(events[:2] + events[begin : begin + 20]).encode())
        keep(found, "config_file", CONFIG_FILE.encode())
        elastic_messages(found)
        told = {
            "host": "a",
            "rendezvous": "127.0.0.1:4000",
            "has_secret": False,
            "exchange": "kolovod-00",
        }
        keep(found, "torchrun_exchange", json.dumps(told).encode())
        keep(
            found,
            "torchrun_exchange",
            json.dumps({"rendezvous": "127.0.0.1:4000", "secret": "0" * 64}).encode(),
        )
        keep(
            found,
            "environment",
            "\n".join(
                f"{k}={v}"
                for k, v in RankEnvironment(1, 2, 0, 1, 1, 2, "b", "127.0.0.1:4000", "0" * 64)
                .variables()
                .items()
            ).encode(),
        )
        thin_out(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
