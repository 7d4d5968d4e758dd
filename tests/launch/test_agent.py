"""What an agent keeps of its ranks' output."""

from __future__ import annotations

import errno
import os
import socket
from types import SimpleNamespace
from typing import cast

import pytest

from kolovod.launch import agent
from kolovod.launch.agent_folder import AgentFolder
from kolovod.launch.agent_messages import WINDOW_BYTES, FrameReader, FrameWriter
from kolovod.launch.outbox import Outbox
from kolovod.launch.spool import LIMIT_BYTES


def frame(text: str) -> tuple[int, str, bytes]:
    return 0, "stdout", text.encode()


def sent(box: Outbox, *, at_once: bool = False) -> list[str]:
    """All that may be sent now."""
    found = []
    while (one := box.next(at_once=at_once)) is not None:
        found.append(one[2].decode())
    return found


def test_what_was_not_shown_goes_to_the_next_launcher_as_well() -> None:
    box = Outbox(keeps=True)
    for text in "abc":
        box.add(frame(text))
    assert sent(box) == ["a", "b", "c"]
    assert not box.has_unsent()
    box.drop_shown(2)
    box.add(frame("d"))
    assert sent(box) == ["d"]
    box.begin()
    assert sent(box) == ["c", "d"]
    box.drop_shown(1)
    box.drop_shown(1)  # it was told so already
    box.begin()
    assert sent(box) == ["d"]


def test_without_another_launcher_nothing_is_kept() -> None:
    box = Outbox(keeps=False)
    box.add(frame("a"))
    assert sent(box) == ["a"]
    box.begin()
    assert sent(box) == []


def test_no_more_than_a_window_is_on_its_way() -> None:
    box = Outbox(keeps=True)
    piece = "x" * (WINDOW_BYTES // 4)
    for _ in range(12):
        box.add(frame(piece))
    assert len(sent(box)) == 5
    assert box.is_full()
    box.took(2 * len(piece))
    assert len(sent(box)) == 2
    assert len(sent(box, at_once=True)) == 5
    assert not box.is_full()


def test_the_oldest_is_dropped_where_nobody_takes_it() -> None:
    box = Outbox(keeps=True)
    piece = "x" * (LIMIT_BYTES // 4)
    for text in "abcdef":
        box.add(frame(text + piece))
    assert [text[0] for text in sent(box, at_once=True)] == ["d", "e", "f"]
    box.drop_shown(1)
    box.begin()
    assert [text[0] for text in sent(box, at_once=True)] == ["e", "f"]


def test_a_closed_writer_writes_into_no_other_file() -> None:
    source, sink = os.pipe()
    writer = FrameWriter(sink)
    writer.output(3, "stderr", b"x")
    writer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        writer.output(3, "stderr", b"y")
    ((kind, body),) = FrameReader(prelude=False).feed(os.read(source, 100))
    assert kind == b"O"
    assert body.endswith(b"x")
    os.close(source)
    os.close(sink)


def spoken_to(said: bytes, *, lasts: bool) -> tuple[agent._Agent, agent._Launcher]:
    """An agent whose launcher has said that, before it has heard it."""
    source, sink = os.pipe()
    os.write(sink, said)
    os.close(sink)
    launcher = agent._Launcher(source, -1)
    folder = cast("AgentFolder", SimpleNamespace()) if lasts else None
    made = agent._Agent(launcher, folder)
    made._launcher = launcher
    return made, launcher


@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xffJ",
        b"\0\0\0\1J{",
        b"\0\0\0\1J5",
        b'\0\0\0\x0fJ{"start": "now"}',
        b'\0\0\0\x0eJ{"signal":"x"}',
    ],
    ids=["too long", "no JSON", "no object", "no ranks", "no number"],
)
def test_a_launcher_that_makes_no_sense_is_hung_up(
    said: bytes, lasts: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    made, launcher = spoken_to(said, lasts=lasts)
    made._hear(launcher)
    os.close(launcher.source)
    assert made._closing is not lasts
    assert (made._launcher is None) is lasts
    printed = capsys.readouterr().err
    assert "hangs up, since an order makes no sense: " in printed
    assert "the same version of kolovod" in printed


@pytest.mark.parametrize("lasts", [False, True])
def test_a_line_that_breaks_is_a_launcher_that_is_gone(lasts: bool) -> None:
    made, launcher = spoken_to(b"", lasts=lasts)
    os.close(launcher.source)
    launcher.source = os.open("/", os.O_RDONLY)  # which nobody can read: EISDIR
    made._hear(launcher)
    os.close(launcher.source)
    assert made._closing is not lasts


def test_a_launcher_that_cannot_be_accepted_ends_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(listener: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(agent, "accept_own", fail)
    monkeypatch.setattr(agent, "_PAUSE_S", 0.0)
    made, launcher = spoken_to(b"", lasts=True)
    with socket.socket() as listener:
        made._accept(listener)
    assert made._launcher is launcher
    os.close(launcher.source)
