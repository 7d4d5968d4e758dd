"""A process's part in an elastic job: it keeps in touch with the coordinator, and finds its worlds.

A thread answers the coordinator at once, whatever the script is at. It agrees to a world that
follows a loss without asking the script, whose operations then fail, and to one that can wait when
the script has come to a place where all ranks stop alike (``stop_for_next``). Where the coordinator
is lost it follows another one (standby.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kolovod.coordination.consensus import NOTHING, Member, Proof, Record, Stamp, World
from kolovod.coordination.coordinator import BEAT_S
from kolovod.coordination.coordinator_state import FIRST_LAUNCHER
from kolovod.coordination.protocol import (
    Contact,
    Hello,
    Left,
    ballot_of,
    contact_of,
    encode_hello,
    encode_proof,
    encode_reason,
    encode_record,
    encode_stamp,
    facts_of,
    list_of,
    member_of,
    reason_of,
    world_of,
)
from kolovod.coordination.record_file import Copy, RecordFile
from kolovod.elastic.local_peers import LocalPeers, pid_space
from kolovod.elastic.search import Answer
from kolovod.elastic.standby import Known, Outside, Standby
from kolovod.errors import AuthenticationError, BootstrapError, JobOverError
from kolovod.lifecycle import FormAhead, WorldAssignment
from kolovod.net import messages
from kolovod.net.channel import Channel
from kolovod.net.lost_hosts import HostWatch, notice_lost_host
from kolovod.rendezvous import versions

__all__ = ["MembershipClient"]

_SEND_S = 2.0
_AGAIN_S = 0.02
_QUIET_S = 10.0
"""A coordinator that says nothing for so long counts as stopped, though its host acknowledges."""
_LOST_S = 30.0
"""How long a coordinator that cannot be reached is looked for."""
_KNOW_S = 10.0
"""How long the first world waits for its members to know each other."""
_LEAVE_S = 7.0
"""How long who leaves waits for the others' world, which is prepared meanwhile."""
_WANTED_S = 1.0
"""How long all ranks wait to be asked for a world that one of them has heard of."""


def _cannot_form(assignment: WorldAssignment, done: Callable[[bool], None]) -> None:
    done(False)


class MembershipClient:
    """The client of the coordinator in one process, from its first world to its end."""

    def __init__(
        self,
        coordinator: str,
        secret: str,
        slot: int,
        host: str,
        *,
        process: int | None = None,
        first: tuple[int, World] | None = None,
        record_path: str = "",
        encrypted: bool = False,
        interfaces: Sequence[str] = (),
        abort: Callable[[str], None] = lambda reason: None,
        form_ahead: FormAhead = _cannot_form,
        min_np: int = 1,
        outside: Outside | None = None,
        left: Left | None = None,
        record_copy: Copy | None = None,
    ) -> None:
        """``coordinator``: the launcher's addresses; "": there is none, but an ``outside``.

        ``slot``, ``host``: the place of this process. ``process``: see ``Hello``.

        ``first``: its number and the world that the job starts with, if it is one of those who
        start it. ``record_path``: see record_file.py. ``abort(reason)``: makes the operations of
        the present world fail; it is called on the client's thread. ``min_np``: a world of fewer
        ranks stops after the step that it is at. ``left``: what the process has left that was in
        this slot before, if anybody knows. ``record_copy``: see record_file.py. ``form_ahead``: see
        lifecycle.py.
        """
        self.min_np = min_np
        self.hears_of_change: Callable[[], None] = lambda: None
        """Is called on the client's thread when ``change`` has become other than None, or
        ``others_come`` true."""
        self._address = coordinator
        self._slot, self._host, self._process = slot, host, process
        self._abort, self._form_ahead = abort, form_ahead
        self._file = RecordFile(record_path, record_copy)
        self._copy, self._left = record_copy, left
        self._channel: Channel | None = None  # to the coordinator
        self._lock = threading.Condition()
        self._number: int | None = None
        self._record = NOTHING
        self._reason = ""
        self._current: World | None = None  # that this process works in, or has last
        self._has_state = False
        self._leaves = False
        self._leaves_by_s = math.inf
        self._ends = False
        self._broken = ""
        self._unreached: int | None = None
        self._is_late = False  # that one, which was waited for in vain
        self._pending: World | None = None  # not urgent, and not agreed to yet
        self._others_come = False
        self._stops = False  # at a place where all ranks stop alike
        self._wanted_until_s = math.inf
        self._over: JobOverError | None = None
        self._is_left_out = False  # why it is over
        self._is_closed = False
        if first is not None:
            number, world = first
            self._number, self._record = number, NOTHING.told(world)
            if record_copy is not None:
                record_copy.number = number
            self._file.write(self._record)
        self._local_peers = LocalPeers()
        self._proofs: dict[int, Proof] = {}  # of members on this host
        self._standby = Standby(
            coordinator,
            secret,
            self._known,
            encrypted=encrypted,
            interfaces=interfaces,
            outside=outside,
        )
        self.addresses = self._standby.addresses
        """Where others find it."""
        self._rendezvous = ""  # of the present coordinator
        self._heard_s = 0.0  # from it
        self._resigns = ""
        self._prepared: list[tuple[Stamp, bool]] = []  # what the coordinator does not know yet
        self._to_abort = ""  # why, once the answer is sent
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="kolovod session", daemon=True)
        self._thread.start()

    # --- the script's side ---

    def next_world(self) -> WorldAssignment:
        """Wait until this process is in a world that follows its last one, and may work there.

        Raises JobOverError if the job ends, or goes on without this process.
        """
        with self._lock:
            know_by_s = time.monotonic() + _KNOW_S
            while True:
                world = self._next()
                if world is not None and (
                    self._current is not None
                    or self._standby.knows(world)
                    or time.monotonic() > know_by_s
                ):
                    break
                if self._over is not None:
                    self._over.has_left |= self._is_left_out and self._leaves
                    raise self._over
                if self._is_closed:
                    raise JobOverError("this process has left its job")
                self._lock.wait(None if world is None else 0.1)
            number = self._number
            assert number is not None
            self._current, self._broken, self._stops = world, "", False
            self._unreached, self._is_late = None, False
            if number not in world.joined:
                self._has_state = True
            return self._assignment(world, number)

    def _assignment(self, world: World, number: int) -> WorldAssignment:
        """Under the lock."""
        numbers = tuple(member.number for member in world.members)
        rank = numbers.index(number)
        return WorldAssignment(world.epoch, rank, numbers, self._rendezvous, world.ballot)

    def failed(self, reason: str, unreached: int | None = None, *, is_late: bool = False) -> None:
        """The present world has failed, or could not be formed: another one must follow.

        ``unreached``: the rank in it that could not be reached, if that is why; ``is_late``: it was
        waited for, for as long as KOLOVOD_LATE_FAILURE_S.
        """
        with self._lock:
            self._broken = reason or "it failed"
            members = () if self._current is None else self._current.members
            if unreached is not None and unreached < len(members):
                self._unreached, self._is_late = members[unreached].number, is_late
        self._ring()

    @property
    def has_state(self) -> bool:
        """True if this process has the job's state."""
        with self._lock:
            return self._has_state

    def got_state(self) -> None:
        """From now on this process has the job's state as the others have it."""
        with self._lock:
            self._has_state = True
        self._ring()

    def leave(self) -> None:
        """Let this process leave at the next place where all ranks stop alike."""
        with self._lock:
            if not self._leaves:
                self._leaves_by_s = time.monotonic() + _LEAVE_S
            self._leaves = True
        self._ring()

    def finished(self) -> None:
        """The script has done its part, so the process may end well from now on."""
        with self._lock:
            self._ends = True
        self._ring()

    def lacks(self, slot: int) -> bool:
        """Return whether this process is coordinator, and no process there fills ``slot``."""
        return self._standby.lacks(slot)

    @property
    def leaves(self) -> bool:
        """True if this process has been told to leave."""
        with self._lock:
            return self._leaves

    @property
    def last_rank(self) -> int:
        """The rank in the world that it works in, or has worked in last."""
        with self._lock:
            assert self._current is not None
            assert self._number is not None
            return [member.number for member in self._current.members].index(self._number)

    @property
    def wants_change(self) -> bool:
        """True if another world waits until all ranks stop."""
        with self._lock:
            if self._pending is not None or not self._leaves:
                return self._pending is not None
            is_alone = self._current is not None and len(self._current.members) == 1
            return is_alone or time.monotonic() > self._leaves_by_s

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots of the present world's members, by rank."""
        with self._lock:
            return () if self._current is None else tuple(m.slot for m in self._current.members)

    @property
    def change(self) -> tuple[World, World] | None:
        """The present world, and the one that waits until all ranks stop; None: none does."""
        with self._lock:
            before, after = self._current, self._pending
            return None if before is None or after is None else (before, after)

    @property
    def others_come(self) -> bool:
        """True if processes are on their way to places that were found since this world began."""
        with self._lock:
            return self._others_come

    @property
    def has_failed(self) -> bool:
        """True if another world has formed, or the job is over, so that the present one fails."""
        with self._lock:
            return self._next() is not None or self._over is not None

    @property
    def expects_world(self) -> bool:
        """True if this process knows that another world follows the present one."""
        with self._lock:
            return bool(self._is_offered() or self._leaves or self._next() or self._over)

    def stop_for_next(self, *, is_wanted: bool = True) -> None:
        """All ranks have come here alike, and stop until their next world.

        ``is_wanted``: somebody has heard of one; it may be off by now, and then this world is
        formed anew.
        """
        with self._lock:
            self._stops = True
            self._wanted_until_s = time.monotonic() + _WANTED_S if is_wanted else math.inf
        self._ring()

    def resign(self, reason: str) -> None:
        """Be counted as dead: by ``reason`` this process ends, however long that takes."""
        with self._lock:
            if self._over is None:
                self._resigns = encode_reason(reason) or "it gives up"
        self._ring()
        self._thread.join(_SEND_S)

    def see_off(self) -> None:
        """Having left, stay until the others can do without this process: it may be coordinator."""
        self._standby.see_off()

    def close(self) -> None:
        """Hang up. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._lock.notify_all()
        if os.getpid() == self._owner:
            self._ring()
            self._thread.join(_SEND_S)
            self._standby.close()
        self._file.close()

    def forget(self) -> None:
        """Let go of the job in a forked child: it must not keep the parent connected."""
        self._standby.forget()
        if self._channel is not None:
            self._channel.forget()

    def _next(self) -> World | None:
        """Under the lock."""
        if self._number is None:
            return None
        world = self._record.works_in(self._number)
        if world is None:
            return None
        before = self._current
        return world if before is None or world.stamp > before.stamp else None

    # --- the thread ---

    def _ring(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def _serve(self) -> None:
        lost_s = time.monotonic()
        while not self._is_closed and self._over is None:
            try:
                self._watch_local_peers()
                answer = self._standby.find(lambda formed: self._told(formed, ""))
            except (EOFError, OSError, BootstrapError) as error:
                if isinstance(error, AuthenticationError) or time.monotonic() > lost_s + _LOST_S:
                    where = f" at {self._address}" if self._address else ""
                    self._end(
                        f"the job's coordinator{where} cannot be reached ({error})", is_lost=True
                    )
                time.sleep(_AGAIN_S)
                continue
            except Exception as error:  # no more threads, say: whoever waits must hear of it
                self._end(f"the search for the job's coordinator has failed: {error!r}")
                break
            try:
                with contextlib.closing(answer):
                    self._follow(answer)
            except (EOFError, OSError, AuthenticationError) as error:
                lost_s = time.monotonic()
                if isinstance(error, TimeoutError):
                    self._standby.host_is_silent(self._heard_s)
            except Exception as error:  # a defect: whoever waits must hear of it
                self._end(f"the session with the coordinator has failed: {error!r}")
        self._abort_if_due()
        self._local_peers.close()
        self._standby.retire()
        with self._lock:
            bell, self._bell = self._bell, -1
            os.close(bell)

    def _abort_if_due(self) -> None:
        if self._to_abort:
            self._abort(self._to_abort)
            self._to_abort = ""

    def _known(self) -> Known:
        with self._lock:
            return Known(self._number, self._record, tuple(self._proofs.values()))

    def _follow(self, answer: Answer) -> None:
        """Follow a coordinator, until the connection breaks, or this process needs it no longer."""
        channel = answer.channel
        assert channel is not None
        self._channel = channel
        notice_lost_host(channel.fileno())
        facts = self._standby.facts
        with self._lock:
            self._rendezvous = answer.rendezvous
            number = self._number
            hello = Hello(
                number,
                self._slot,
                self._host,
                Contact(
                    number or 0, self._standby.addresses, os.getpid(), pid_space(), self._file.path
                ),
                self._record,
                facts,
                self._left,
                self._process,
            )
        channel.send({**versions.own(), **encode_hello(hello)}, time.monotonic() + _SEND_S)
        # Who has started them all sees them end, and knows why.
        self._converse(channel, tells_proofs=answer.coordinator != FIRST_LAUNCHER)

    def _converse(self, channel: Channel, *, tells_proofs: bool) -> None:
        bell, host = self._bell, HostWatch(channel.fileno())
        said_s = quiet_s = 0.0
        told: set[int] = set()
        while not self._is_closed and self._over is None:
            poll = select.poll()
            for fd in (channel.fileno(), bell, *self._local_peers.fds()):
                poll.register(fd, select.POLLIN)
            wait_s = min(BEAT_S, max(0.0, host.due_s() - time.monotonic()))
            begun_s = time.monotonic()
            ready = [fd for fd, _ in poll.poll(wait_s * 1000 + 1)]
            host.check()
            # No longer than it meant to wait: what it was stopped itself does not count.
            waited_s = min(wait_s, time.monotonic() - begun_s)
            quiet_s = 0.0 if channel.fileno() in ready else quiet_s + waited_s
            if quiet_s > _QUIET_S:
                raise EOFError("the coordinator says nothing")
            self._watch_local_peers()
            untold = self._proofs.keys() - told if tells_proofs and self._number is not None else ()
            if untold:
                told |= untold
                rows = [encode_proof(self._proofs[number]) for number in sorted(untold)]
                channel.send({"proofs": rows}, time.monotonic() + _SEND_S)
            if channel.fileno() in ready:
                message = messages.mapping(channel.receive(time.monotonic() + _SEND_S))
                self._heard_s = time.monotonic()
                answer = self._answer(message)
                if answer is not None:
                    channel.send(answer, time.monotonic() + _SEND_S)
                self._abort_if_due()
                if ("propose" in message and self.change is not None) or (
                    "formed" not in message and message.get("others_come") is True
                ):
                    self.hears_of_change()
            if bell in ready:
                os.eventfd_read(bell)
                if self._resigns and self._number is not None:
                    self._send_resignation(channel)
                    return
                answer = self._agree_if_due()
                if answer is not None:
                    channel.send(answer, time.monotonic() + _SEND_S)
                for stamp, works in self._take_prepared():
                    word = {"prepared": encode_stamp(stamp), "works": works}
                    channel.send(word, time.monotonic() + _SEND_S)
            now = time.monotonic()
            if (bell in ready or now >= said_s + BEAT_S) and self._number is not None:
                said_s = now
                channel.send(self._sign_of_life(), now + _SEND_S)

    def _watch_local_peers(self) -> None:
        """Note which members on this host have ended."""
        ended = self._local_peers.ended()
        with self._lock:
            self._proofs |= {proof.number: proof for proof in ended}

    def _send_resignation(self, channel: Channel) -> None:
        """Say the last word: nothing is agreed to after it, so the record is as a dead one's."""
        with self._lock:
            self._over = JobOverError(f"this process has given up: {self._resigns}")
            self._lock.notify_all()
            message = {"resigns": self._resigns, "record": encode_record(self._record)}
        channel.send(message, time.monotonic() + _SEND_S)

    def _sign_of_life(self) -> dict[str, Any]:
        with self._lock:
            epoch = 0 if self._current is None else self._current.epoch
            # Who leaves lets those who stay say so. If all leave no other world follows, and the
            # job ends when the last one has come to the end of its step, however late.
            is_off = not self._is_offered() and time.monotonic() > self._wanted_until_s
            if self._stops and is_off and not self._leaves:
                self._broken = self._broken or "its ranks have stopped for a world that is off"
            return {
                "alive": encode_record(self._record),
                "has_state": self._has_state and self._current is not None,
                "leaves": self._leaves,
                "stops": self._stops,
                "ends": self._ends,
                "broken": encode_reason(self._broken),
                "epoch": epoch,
                "unreached": self._unreached,
                "late": self._is_late,
            }

    def _is_offered(self) -> bool:
        """Return, under the lock, whether this process may still come into a later world."""
        agreed, current = self._record.agreed, self._current
        later = agreed is not None and current is not None and agreed.stamp > current.stamp
        return later or self._pending is not None

    def _answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Hear what the coordinator has said, and return the reply."""
        if "ask" in message:
            with self._lock:
                self._set(self._record.promise(ballot_of(message["ask"])))
                return {"promised": encode_record(self._record)}
        if "prepare" in message:
            self._prepare(world_of(message["prepare"]))
        elif "propose" in message:
            return self._consider(world_of(message["propose"]), message)
        if "you" in message:
            self._take_number(member_of(message["you"]))
            self._told(world_of(message.get("formed")), "")
        elif "formed" in message:
            is_let_go = messages.flag(message, "is_let_go")
            others_come = messages.flag(message, "others_come")
            reason = reason_of(message, "reason")
            self._told(world_of(message["formed"]), reason, others_come, is_let_go=is_let_go)
        elif "others_come" in message:
            with self._lock:
                self._others_come = messages.flag(message, "others_come")
        elif "facts" in message:
            self._standby.hear_facts(facts_of(message["facts"]))
        elif "contacts" in message:
            contacts = list_of(message["contacts"], contact_of, "contacts")
            self._standby.hear_contacts(contacts)
            for contact in contacts:
                self._local_peers.add(contact)
            with self._lock:
                self._lock.notify_all()
        elif "stop" in message:
            self._end(reason_of(message, "stop"))
        return None

    def _prepare(self, world: World) -> None:
        with self._lock:
            number = self._number
            if number is None or number not in world.numbers:
                return
            assignment = self._assignment(world, number)
        self._form_ahead(assignment, lambda works: self._has_prepared(world.stamp, works))

    def _has_prepared(self, stamp: Stamp, works: bool) -> None:
        """On any thread."""
        with self._lock:
            self._prepared.append((stamp, works))
        self._ring()

    def _take_prepared(self) -> list[tuple[Stamp, bool]]:
        with self._lock:
            taken, self._prepared = self._prepared, []
        return taken

    def _take_number(self, member: Member) -> None:
        with self._lock:
            if self._number is None:
                self._number = member.number
                if self._copy is not None:  # the coordinator knows what stands there
                    self._copy.number = member.number
                    self._copy.write(self._record)

    def _consider(self, world: World, message: dict[str, Any]) -> dict[str, Any] | None:
        urgent = messages.flag(message, "urgent")
        reason = reason_of(message, "reason")
        with self._lock:
            works = self._current is not None and not self._broken
            in_a_step = self._current is not None and not self._stops
            if not urgent and (self._is_awaited() or (in_a_step and (works or world.joined))):
                self._pending = world  # whose new ranks would meet this one in the middle of a step
                return None
            answer = self._agree(world)
            agreed = self._record.agreed
        if works and urgent and agreed is not None and agreed.stamp == world.stamp:
            self._to_abort = reason or "another world follows"
        return answer

    def _agree_if_due(self) -> dict[str, Any] | None:
        """Agree to a world that could wait, if the script has stopped for it; else return None."""
        with self._lock:
            world = self._pending
            if world is None or self._is_awaited():
                return None
            if not (self._stops or (self._broken and not world.joined)):
                return None
            return self._agree(world)

    def _is_awaited(self) -> bool:
        """Return, under the lock, whether a world has formed that the script is yet to come into.

        Others are there, and wait: it comes there first, whatever is to follow.
        """
        return self._next() is not None

    def _agree(self, world: World) -> dict[str, Any]:
        """Return an answer, under the lock, whether this process agrees or not."""
        self._pending = None
        self._set(self._record.agree(world))
        return {"agreed": encode_stamp(world.stamp), "record": encode_record(self._record)}

    def _set(self, record: Record | None) -> None:
        """Under the lock. Written before anybody is told (rule 2 of ``consensus``)."""
        if record is not None and record != self._record:
            self._file.write(record)
            self._record = record

    def _told(
        self,
        formed: World,
        reason: str,
        others_come: bool = False,
        *,
        is_let_go: bool = False,
    ) -> None:
        """``is_let_go``: if it is left out, that is because it, or its replica, is to leave."""
        with self._lock:
            self._others_come = others_come
            self._set(self._record.told(formed))
            if self._record.formed == formed:
                self._reason = reason or self._reason
            number, known = self._number, self._record.formed
            if number is not None and known is not None and self._was_left_behind(number, known):
                text = f"the job goes on in epoch {known.epoch} without this process"
                self._over = JobOverError(f"{text}: {reason}" if reason else text, is_let_go)
                self._is_left_out = True
                if not self._stops and not self._broken:
                    # It waits for those who went on. That their connections ended it may never
                    # hear, if its host was cut off when they said so.
                    self._to_abort = text
            self._lock.notify_all()

    def _was_left_behind(self, number: int, known: World) -> bool:
        before = self._current
        return before is not None and known.stamp > before.stamp and number not in known.numbers

    def _end(self, reason: str, *, is_lost: bool = False) -> None:
        """``is_lost``: the job may go on, but this process cannot find it."""
        # First: who hears that it is over may end the process, and a thread that Python ends while
        # it is in the engine, or frees it, ends all by std::terminate.
        try:
            self._abort(reason)
        finally:
            self._note_end(reason, is_lost=is_lost)

    def _note_end(self, reason: str, *, is_lost: bool) -> None:
        with self._lock:
            has_left = self._leaves or (self._current is None and not is_lost)
            if self._current is None and not is_lost:
                reason = f"the job has ended before this process was in it ({reason})"
            self._over = self._over or JobOverError(reason, has_left)
            self._lock.notify_all()
