"""Every Python decoder of what another process or a file says, as a function of bytes.

Each target does with its input what the program does, and lets pass only the errors that the
decoder promises. Used by test_decoders.py, for a moment, and by fuzz.py, for long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

from horovod.runner.config_file import apply_config_file
from horovod.runner.flags import FLAGS, SWITCHES
from kolovod import _native
from kolovod.coordination import protocol as elastic_protocol
from kolovod.coordination import record_file
from kolovod.coordination.consensus import NOTHING
from kolovod.elastic import join_endpoint
from kolovod.errors import AuthenticationError, BootstrapError, InvalidArgumentError, KolovodError
from kolovod.net import channel as channels
from kolovod.net import messages
from kolovod.observe import collector, reading, summary, trace, whereabouts
from kolovod.planning import plan, words
from kolovod.planning.asked import asked
from kolovod.planning.costs import Link
from kolovod.planning.measured import measured
from kolovod.rendezvous import protocol, rank_environment, segment_handover, versions
from kolovod.rendezvous.external import torchrun
from kolovod.report.figures import figures
from kolovod.report.page import page

CORPUS = Path(__file__).parent / "corpus"
SECRET = "a secret that only this fuzzer has"
SIZE = 4  # of the worlds
_KEY = b"k" * 32
_CONFIG = _native.config_defaults()


def _soon() -> float:
    return time.monotonic() + 10


@contextlib.contextmanager
def _peer_that_sends(data: bytes) -> Iterator[socket.socket]:
    """The other end of a connection on which ``data`` and nothing else comes."""
    near, far = socket.socketpair()
    with near, far:
        far.sendall(data[:60_000])
        far.shutdown(socket.SHUT_WR)
        yield near


def handshake_of_client(data: bytes) -> None:
    """What a server reads of a stranger."""
    with (
        _peer_that_sends(data) as sock,
        contextlib.suppress(AuthenticationError, EOFError),
    ):
        channels.accept(sock, SECRET, "test", _soon())
        raise AssertionError("a stranger has proved the secret")


def handshake_of_server(data: bytes) -> None:
    """What a client reads of whoever answers."""
    for sealed in (False, True):
        with _peer_that_sends(data) as sock, contextlib.suppress(AuthenticationError):
            channels.greet(sock, SECRET, "test", _soon(), encrypted=sealed)
            raise AssertionError("a stranger has proved the secret")


def frames(data: bytes) -> None:
    """Frames as somebody in the middle may have made them; he does not know the key."""
    with _peer_that_sends(data) as sock:
        channel = channels.Channel(sock, os.urandom(32), is_server=True)
        with contextlib.suppress(AuthenticationError, EOFError):
            channel.receive(_soon())
            raise AssertionError("a frame was accepted that nobody has signed")


def frames_encrypted(data: bytes) -> None:
    """The same on a connection that is encrypted."""
    mine, others = _native.KeyExchange(), _native.KeyExchange()
    agreement = mine.agree(os.urandom(32), others.public, 2, True)
    with _peer_that_sends(data) as sock:
        channel = channels.Channel(sock, _KEY, is_server=True, agreement=agreement)
        with contextlib.suppress(AuthenticationError, EOFError):
            channel.receive(_soon())
            raise AssertionError("a frame was opened that nobody has sealed")


def signed_frame(data: bytes) -> None:
    """A body that a peer has signed, which may hold anything."""
    proof = channels._digest(_KEY, b"c", channels._SEQUENCE.pack(0), data)
    with _peer_that_sends(channels._LENGTH.pack(len(data)) + proof + data) as sock:
        channel = channels.Channel(sock, _KEY, is_server=True)
        with contextlib.suppress(BootstrapError, *([EOFError] if len(data) > 59_000 else [])):
            value = channel.receive(_soon())
            assert json.loads(json.dumps(value)) == value


def _of_message(decode: Callable[[Any], object]) -> Callable[[bytes], None]:
    """A target for what is done with a signed message; errors are Kolovod's."""

    def target(data: bytes) -> None:
        with contextlib.suppress(KolovodError):
            decode(channels._parse(data))

    return target


def _join(message: Any) -> None:
    (versions.find_other(message) or "").encode()
    _, rank, name = protocol.parse_stranger(message)
    assert (rank is None) == (name == "a rank")
    name.encode()
    understood = protocol.parse_join(message)
    # What was understood says the same again.
    again = {
        **understood._asdict(),
        "members": protocol.spans(understood.members),
        "member": astuple(understood.member),
    }
    assert protocol.parse_join(json.loads(json.dumps(again))) == understood
    str(understood.member).encode()


def _told_by_store(message: Any) -> None:
    said = json.dumps(message)
    for own_config in (None, _CONFIG):  # as it is asked for without an engine, and with one
        with contextlib.suppress(KolovodError):
            # The same again and again: as many messages as it may take.
            world = protocol.parse_answer(lambda: json.loads(said), range(SIZE), own_config)
            assert len(world.members) == SIZE
            assert 0 < world.epoch <= protocol.MAX_EPOCH
            assert own_config is None or world.config.keys() == own_config.keys()


def _word(message: Any) -> None:
    """What a rank says at the rendezvous server after the answer."""
    word = protocol.parse_word(message, 1)
    assert word is None or (isinstance(word[0], str) and word[1] in (None, *range(1 << 16)))


def _told_by_leader(message: Any) -> None:
    assert len(segment_handover.parse_answer(message, SIZE)) == SIZE


def _told_by_follower(message: Any) -> None:
    messages.whole(message, "rank", 0, messages.MAX_RANKS - 1)
    messages.flag(message, "pidfd")


def _hello(message: Any) -> None:
    """Of a rank of another host."""
    versions.find_other(message)
    messages.whole(message, "rank", 0, messages.MAX_RANKS - 1)
    messages.text(message, "purpose", 16)
    messages.whole(message, "epoch", 0, protocol.MAX_EPOCH)
    messages.whole(message, "stripe", 0, _native.MOST_STRIPES - 1)


def _report(message: Any) -> None:
    with contextlib.suppress(*collector._MALFORMED):
        if "whereabouts" in message:
            whereabouts.parse_whereabouts(message["whereabouts"])
        batch = collector._parse(message)
        events = trace.Trace(0, 0).add(1, "host", batch)
        summary.text(summary.summarize(json.loads(json.dumps(events))))


def _of_a_coordinator(message: Any) -> None:
    """Worlds and records, as members and coordinators of an elastic job send them."""
    pairs: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
        (elastic_protocol.world_of, elastic_protocol.encode_world),
        (elastic_protocol.record_of, elastic_protocol.encode_record),
        (elastic_protocol.member_of, elastic_protocol.encode_member),
        (elastic_protocol.stamp_of, elastic_protocol.encode_stamp),
        (elastic_protocol.proof_of, elastic_protocol.encode_proof),
        (elastic_protocol.facts_of, elastic_protocol.encode_facts),
        (elastic_protocol.contact_of, elastic_protocol.encode_contact),
        (elastic_protocol.policy_of, elastic_protocol.encode_policy),
        (elastic_protocol.hello_of, elastic_protocol.encode_hello),
        (join_endpoint.facts_of, join_endpoint.Facts._asdict),
    ]
    for parse, encode in pairs:
        with contextlib.suppress(KolovodError):
            understood = parse(message)
            assert parse(json.loads(json.dumps(encode(understood)))) == understood


def record_left(data: bytes) -> None:
    """What a process of an elastic job has left in its file."""
    fd, path = record_file.new_file()
    try:
        os.pwrite(fd, data[: 1 << 16], 0)
        record_file.parse(record_file.read(fd))
        with contextlib.closing(record_file.RecordFile(path)) as file:
            for _ in range(2):  # both places
                file.write(NOTHING)
        assert record_file.parse(record_file.read(fd)) == NOTHING
    finally:
        os.close(fd)
    record_file.parse(data)


def told_at_the_endpoint(data: bytes) -> None:
    """What rank 0 gives out, or somebody has written to torch.distributed's store."""
    with contextlib.suppress(BootstrapError):
        told = torchrun._parse(data, ("rendezvous", "secret"))
        assert isinstance(told["rendezvous"], str)


class _InMemory:
    """As much of a Path as ``read`` uses."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_text(self, encoding: str) -> str:
        return self._data.decode(encoding)

    def __str__(self) -> str:
        return "timeline.json"


def timeline(data: bytes) -> None:
    """The file that ``kolovod timeline``, ``kolovod report`` and ``kolovod plan`` read."""
    with contextlib.suppress(InvalidArgumentError):
        events = reading.read(_InMemory(data))  # type: ignore[arg-type]
        summary.text(summary.summarize(events))
        page(figures("timeline.json", events, asked(None, None)))
        words.text(plan.make(measured(events), [1, 2, 9], link=Link(1e9, 1e-4)))


def config_file(data: bytes) -> None:
    """The file that ``horovodrun --config-file`` reads."""
    names = [flag.dest for flag in FLAGS] + [switch.dest for switch in SWITCHES]
    options = argparse.Namespace(
        **dict.fromkeys(names), use_gloo=False, use_mpi=False, use_jsrun=False
    )
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(data)
        file.flush()
        said = ""
        try:
            apply_config_file(options, file.name)
        except ValueError as error:
            said = str(error)
        assert len(said) < 20_000  # whatever aliases in the file stand for


def environment(data: bytes) -> None:
    """The variables of a rank, one a line."""
    lines = data.decode("utf-8", "surrogateescape").splitlines()
    pairs = (line.partition("=") for line in lines)
    with contextlib.suppress(InvalidArgumentError):
        found = rank_environment.read_rank_environment({name: value for name, _, value in pairs})
        assert found is None or 0 <= found.rank < found.size


TARGETS: dict[str, Callable[[bytes], None]] = {
    "handshake_of_client": handshake_of_client,
    "handshake_of_server": handshake_of_server,
    "frames": frames,
    "frames_encrypted": frames_encrypted,
    "signed_frame": signed_frame,
    "rendezvous_join": _of_message(_join),
    "rendezvous_answer": _of_message(_told_by_store),
    "rendezvous_word": _of_message(_word),
    "leader_answer": _of_message(_told_by_leader),
    "follower": _of_message(_told_by_follower),
    "hello": _of_message(_hello),
    "timeline_report": _of_message(_report),
    "coordinator": _of_message(_of_a_coordinator),
    "record": record_left,
    "torchrun_exchange": told_at_the_endpoint,
    "timeline": timeline,
    "config_file": config_file,
    "environment": environment,
}
DECODERS: dict[str, tuple[str, ...]] = {
    "kolovod.net.channel": (
        "Channel.receive",
        "Channel._receive_sealed",
        "greet",
        "accept",
        "_parse",
        "_parse.refuse",
        "_read_or_dropped",
    ),
    "kolovod.net.encryption": ("Exchange.answer", "Exchange.agree"),
    "kolovod.net.sockets": ("read_exactly",),
    "kolovod.rendezvous.segment_handover": ("parse_answer",),
    "kolovod.net.messages": (),
    "kolovod.coordination.protocol": (
        "ballot_of",
        "stamp_of",
        "member_of",
        "world_of",
        "record_of",
        "proof_of",
        "facts_of",
        "contact_of",
        "policy_of",
        "hello_of",
        "_left_of",
    ),
    "kolovod.elastic.join_endpoint": ("facts_of",),
    "kolovod.coordination.record_file": ("read", "parse"),
    "kolovod.rendezvous.rank_environment": ("read_rank_environment", "whole_number"),
    "kolovod.rendezvous.protocol": (
        "parse_join",
        "parse_stranger",
        "_parse_spans",
        "_parse_member",
        "_parse_config",
        "_parse_notes",
        "parse_answer",
        "_parse_members",
        "parse_word",
        "raise_told",
    ),
    "kolovod.rendezvous.external.torchrun": ("_parse",),
    "kolovod.rendezvous.versions": ("find_other",),
    "kolovod.observe.collector": ("_parse", "_int"),
    "kolovod.observe.whereabouts": ("parse_whereabouts",),
    "kolovod.observe.reading": (),
    "kolovod.observe.summary": (),
    "kolovod.observe.trace": (),
    "kolovod.planning.measured": (),
    "kolovod.report.anatomy": (),
    "kolovod.report.figures": (),
    "kolovod.report.lanes": (),
    "kolovod.report.tables": (),
    "horovod.runner.config_file": (),
}
"""Modules and their functions that decode, for coverage; (): all of the module."""


def corpus(name: str) -> list[bytes]:
    """The captured inputs of a target."""
    files = sorted((CORPUS / name).iterdir())
    assert files, f"no inputs for {name}: tests/fuzz/capture.py makes them"
    return [file.read_bytes() for file in files]
