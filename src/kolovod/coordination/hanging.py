"""Members that hang: the others have waited for them as long as may be, and they have not noticed.

They have waited in the world, or, when that has failed, for the next one. The second finds who
hangs where the first did not: with several hosts a rank may blame the first rank of its host, which
waits for another host; and two may hang at a time, or one while another one is lost. Who has
noticed may hang before the next world has formed: it does not answer its coordinator then.

Their process lives, and its threads answer, so no world is without them: worlds would form with the
same members again and again. Who ends them (the launcher) has a proof of it then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

__all__ = ["Hanging"]

_GRACES_S = 0.5, 2.0
"""For a member that was only slow to notice that its world has failed, and to say so: half of the
time that others wait for it, within these limits."""
_AWAKE_S = 1.0
"""Who has not asked for longer was stopped itself, and has not heard yet what was said since."""


class Hanging:
    """Collects what members say of worlds that have failed. For one thread."""

    def __init__(self, hangs: Callable[[int, str], None], limit_s: float = 0.0) -> None:
        """``hangs(number, reason)`` is called once of each member that does.

        ``limit_s``: for the next world the others wait so long, but no less than for a member to
        notice; 0: for ever.
        """
        self._hangs = hangs
        shortest_s, longest_s = _GRACES_S
        self._grace_s = min(max(limit_s / 2, shortest_s), longest_s) if limit_s else longest_s
        self._limit_s = max(limit_s, longest_s) if limit_s else 0.0
        self._noticed: dict[int, int] = {}  # the last epoch whose end a member has noticed
        self._waited_for: dict[int, tuple[int, float, str]] = {}  # epoch, until when, why
        self._owing: dict[int, tuple[int, float, str]] = {}  # the same: to notice its end
        self._asked: dict[int, float] = {}  # until when they are to answer a coordinator
        self._told: set[int] = set()
        self._asked_s = 0.0

    def see(self, epoch: int, number: int) -> None:
        """The script of the member ``number`` is in the world of ``epoch``: it has left others."""
        self._noticed[number] = max(epoch - 1, self._noticed.get(number, -1))

    def note(
        self,
        epoch: int,
        number: int,
        late: int | None,
        reason: str,
        now_s: float,
        members: Collection[int] = (),
    ) -> None:
        """Note that the member ``number`` says that the world of ``epoch`` has failed.

        ``late``: the member that it has waited for in vain, if that is why. ``members``: the
        members of that world, if it is the newest.
        """
        self._noticed[number] = max(epoch, self._noticed.get(number, epoch))
        if late is not None and late not in self._waited_for:
            self._waited_for[late] = epoch, now_s + self._grace_s, reason
        for member in members if self._limit_s else ():
            if not self.has_noticed(epoch, member):
                self._owing.setdefault(member, (epoch, now_s + self._limit_s, reason))

    def has_noticed(self, epoch: int, number: int) -> bool:
        """Return whether that member has noticed that the world of ``epoch`` is over."""
        return self._noticed.get(number, -1) >= epoch

    def expect(self, numbers: Collection[int], now_s: float) -> None:
        """These, and no others, owe an answer that needs nothing of their scripts."""
        until_s = now_s + self._limit_s
        self._asked = {n: self._asked.get(n, until_s) for n in numbers if self._limit_s}

    def hear(self, number: int) -> None:
        """That member has answered; it may owe the next answer at once."""
        self._asked.pop(number, None)

    def tell(self, ended: Collection[int], present: Collection[int], now_s: float) -> None:
        """Call ``hangs`` of those whose time is over. ``ended``: members that have ended.

        ``present``: members that are connected. Of others nobody knows what they have noticed: they
        may have gone on in worlds of their own. They have all the time anew when they are back, and
        all have it where this process itself was stopped.
        """
        if now_s > self._asked_s + _AWAKE_S:
            present = ()
            self._asked.clear()
        self._asked_s = now_s
        for number, until_s in self._asked.items():
            if now_s >= until_s:
                self._tell(number, "it does not answer what it is asked for the next world")
        for number, reason in self._over(self._waited_for, self._grace_s, ended, present, now_s):
            self._tell(number, reason)
        for number, reason in self._over(self._owing, self._limit_s, ended, present, now_s):
            self._tell(number, f"it has not noticed that its world is over: {reason}")

    def _over(
        self,
        waited: dict[int, tuple[int, float, str]],
        time_s: float,
        ended: Collection[int],
        present: Collection[int],
        now_s: float,
    ) -> list[tuple[int, str]]:
        """Return the members whose time is over; who has noticed, or ended, is forgotten."""
        for number, (epoch, _, reason) in list(waited.items()):
            if number in ended or self.has_noticed(epoch, number):
                del waited[number]
            elif number not in present:
                waited[number] = epoch, now_s + time_s, reason
        return [(number, why) for number, (_, until_s, why) in waited.items() if now_s >= until_s]

    def _tell(self, number: int, reason: str) -> None:
        if number not in self._told:
            self._told.add(number)
            self._hangs(number, reason)
