"""Members that hang: the others have waited for them as long as may be, and they have not noticed.

They have waited in the world, or, when that has failed for another reason, for the next one. The
second finds who hangs, too, where the first was somebody who waited for it: with several hosts a
rank may wait for the first rank of its host, and that one for another host.

Their process lives, and its threads answer, so no world is without them: worlds would form with the
same members again and again. Who ends them (the launcher) has a proof of it then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

__all__ = ["Hanging"]

_GRACE_S = 2.0
"""For a member that was only slow to notice that its world has failed, and to say so."""


class Hanging:
    """Collects what members say of worlds that have failed. For one thread."""

    def __init__(self, hangs: Callable[[int, str], None], limit_s: float = 0.0) -> None:
        """``hangs(number, reason)`` is called once of each member that does.

        ``limit_s``: for the next world the others wait so long, but no less than for a member to
        notice; 0: for ever.
        """
        self._hangs = hangs
        self._limit_s = max(limit_s, _GRACE_S) if limit_s else 0.0
        self._failed: tuple[int, float, str] = -1, 0.0, ""  # the last epoch, since when, why
        self._noticed: dict[int, int] = {}  # the last epoch of which a member has said that
        self._waited_for: dict[int, tuple[int, float, str]] = {}  # epoch, until when, why
        self._told: set[int] = set()

    def note(self, epoch: int, number: int, late: int | None, reason: str, now_s: float) -> None:
        """The member ``number`` says that the world of ``epoch`` has failed.

        ``late``: the member that it has waited for in vain, if that is why.
        """
        if epoch > self._failed[0]:
            self._failed = epoch, now_s, reason
        self._noticed[number] = max(epoch, self._noticed.get(number, epoch))
        if late is not None and late not in self._waited_for:
            self._waited_for[late] = epoch, now_s + _GRACE_S, reason

    def tell(
        self, ended: Collection[int], epoch: int, present: Collection[int], now_s: float
    ) -> None:
        """Call ``hangs`` of those whose time is over. ``ended``: members that have ended.

        ``present``: members of the newest world, that of ``epoch``, whose hosts can be reached.
        """
        for number, (epoch, until_s, reason) in list(self._waited_for.items()):
            if number in ended or self._noticed.get(number, -1) >= epoch:
                del self._waited_for[number]
            elif now_s >= until_s:
                self._tell(number, reason)
        failed, since_s, reason = self._failed
        if self._limit_s and epoch == failed and now_s >= since_s + self._limit_s:
            for number in present:
                if number not in ended and self._noticed.get(number, -1) < epoch:
                    self._tell(number, f"it has not noticed that its world has failed: {reason}")

    def _tell(self, number: int, reason: str) -> None:
        if number not in self._told:
            self._told.add(number)
            self._hangs(number, reason)
