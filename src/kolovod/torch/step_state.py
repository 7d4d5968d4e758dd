"""The state of a step: what its rounds have combined so far of one optimizer's gradients.

A step has one round, if every rank's backward comes to all parameters that are in use: ranks tell
each other whether that is so. If not, more may follow, of other losses for example. Then what ranks
have so far is combined, ``step`` has a round as well, and no rank steps before all are there. What
was combined before is sent once more as it is, the same on all ranks, so that the mean stays right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from kolovod.core.ops import Sum
from kolovod.errors import FrontEndArgumentError, InvalidArgumentError, MismatchError
from kolovod.torch import sentinel
from kolovod.torch.buckets import Bucket, Item
from kolovod.torch.countdown import Countdown
from kolovod.torch.parameters import Parameters

# What a rank says of an optimizer in a round; each rank sees what all ranks together have said: it
# is at the end of a backward pass, in step(), throws gradients away, has one that cannot be sent,
# has new parameters, wants other buckets, sends all buckets, may have more of this step, has the
# first round of a step or a later one, has stepped with the gradients of the step before or thrown
# them away, has the optimizer, or has given it up.
PASSES, STEPS, DROPS, FAILED, AGAIN, ANEW, ALL, LACKS = range(8)
FIRST, LATER, USED, THROWN, HAS, LOST = range(8, 14)
FACTS = 14  # of the sentinel
MARKS = FACTS + sentinel.BYTES


class Offer(NamedTuple):
    """The facts that this rank brings to a round, whatever becomes of the world meanwhile."""

    purpose: int | None = None
    """PASSES, STEPS, DROPS, or None: nothing, but others may have."""
    new: bytes = b""
    """For each parameter, 1 if it has a gradient that no round of this step has combined."""
    lacks: bool = False
    """True if there may be more."""
    sends_all: bool = False
    """True if it sends all buckets, whatever they have."""

    def has_new(self, bucket: Bucket) -> bool:
        """Return whether ``bucket`` has to be sent."""
        return any(self.new[index : index + 1] == b"\1" for index in bucket.indices)


class StepState:
    """The rounds of the present step, on this rank."""

    def __init__(self, parameters: Parameters, countdown: Countdown, op: int) -> None:
        """``op``: that of the optimizer."""
        self.count = 0
        """The number of this step's rounds."""
        self.has_held = False
        """True if since the last one backward has added up gradients here only (``no_sync``)."""
        self.in_use = bytearray()
        """For each parameter, 1 if any rank has used it in this step."""
        self._parameters, self._countdown = parameters, countdown
        self._sums_up = op == Sum
        self._last_end: int | None = None  # USED, or THROWN; None: no step before, in this world
        self._is_open = False  # after the last one a rank may have had more
        self._seen = bytearray()  # by parameter: has backward come to it in this step?
        self._used_last = bytearray()  # ``in_use`` of the last step
        self._sums: dict[int, torch.Tensor] = {}  # with op Sum: results of this step

    @property
    def are_over(self) -> bool:
        """True if all gradients are combined: since then there was no backward, and no step."""
        if self.count == 0 or self._is_open or self.has_held or self._countdown.begun:
            return False
        return 1 not in self.new_gradients()

    def offer(self, purpose: int | None, buckets: Iterable[Bucket]) -> Offer:
        """Return this rank's offer for the next round."""
        if purpose == DROPS:
            return Offer(DROPS, sends_all=True)
        lacks = purpose != STEPS and self._lacks(buckets)
        if purpose is None:
            return Offer(None, lacks=lacks)
        new = self.new_gradients()
        # Who has nothing waits to hear whether others have: if nobody has, nothing is sent, and no
        # compressor loses what it keeps for the next step in a result that nobody uses.
        is_whole = self.count == 0 and 1 in new if purpose == STEPS else not lacks
        return Offer(purpose, bytes(new), lacks, is_whole or self.has_held)

    def new_gradients(self) -> bytearray:
        """Return, by parameter, 1 for a gradient that no round of this step has combined."""
        self._extend()
        numbers, passes, in_use = self._countdown.numbers, self._countdown.passes, self.in_use
        grad = self._parameters.grad
        if max(numbers, default=passes) < passes:  # backward has come to all
            new = bytearray(b"\1" * len(numbers))
        elif 0 not in in_use and not self._countdown.begun:
            new = bytearray(len(numbers))
        else:
            each = zip(numbers, in_use, strict=True)
            new = bytearray(
                left < passes or (not used and grad(index) is not None)
                for index, (left, used) in enumerate(each)
            )
        for index in self._parameters.lent:
            new[index] = 0
        return new

    def marks(self, mine: Offer, buckets: Iterable[Bucket], count: int) -> bytearray:
        """Return this rank's marks: its offer, then for each parameter whether it is used here.

        ``buckets``: those that may be on their way. ``count``: of parameters.
        """
        marks = bytearray(MARKS + count)
        if mine.purpose is not None:
            marks[mine.purpose] = 1
        marks[FIRST if self.count == 0 else LATER] = 1
        if self._last_end is not None:
            marks[self._last_end] = 1
        marks[ALL], marks[LACKS], marks[HAS] = mine.sends_all, mine.lacks, 1
        for bucket in buckets:
            for index in bucket.indices if bucket.is_sent else ():
                marks[MARKS + index] = 1
            for index in bucket.unused:  # here, but maybe not elsewhere: zeros were sent
                marks[MARKS + index] = 0
        return marks

    def check(self, marks: bytearray) -> None:
        """Raise the error, if any, that follows from what all ranks have said."""
        if marks[FAILED]:
            raise FrontEndArgumentError(
                "another rank has a gradient that cannot be averaged; its own error says which"
            )
        if marks[DROPS]:
            raise MismatchError(
                "another rank called optimizer.zero_grad() where this one averages its gradients: "
                "every rank must step, or skip the step, alike"
            )
        if marks[LOST]:
            raise MismatchError(
                "another rank has given up the optimizer whose gradients this one averages: all "
                "ranks must use the same optimizers, and drop them at the same place"
            )
        if marks[USED] and marks[THROWN]:
            here, there = "has stepped with", "threw away"
            if self._last_end == THROWN:
                here, there = there, here
            raise MismatchError(
                f"this rank {here} the gradients of the step before, which another one {there} by "
                "optimizer.zero_grad(), so that their models differ: every rank must step, or skip "
                "the step, alike"
            )
        if marks[FIRST] and marks[LATER]:
            here = "begins a step" if self.count == 0 else "has more gradients of a step"
            there = "has more of the one before" if self.count == 0 else "begins the next one"
            raise MismatchError(
                f"this rank {here}, where another one {there}: every rank must call backward() "
                "equally often between two steps, or call it once for the sum of the losses, or "
                "let all but the last run within optimizer.no_sync()"
            )

    def note(self, done: Sequence[Item], used: bytearray) -> None:
        """Note that ``done`` is combined; ``used``: by parameter, by any rank in this round."""
        self._extend()
        if len(done) == len(used) == self.in_use.count(0):
            self.in_use[:] = used
            return
        for index, _, _, _, _ in done:
            self.in_use[index] |= used[index]

    def ended(self, marks: bytearray) -> None:
        """Note what all ranks have said in the last round."""
        self._is_open = bool(marks[LACKS])

    def close(self) -> None:
        """Note that one more round is over."""
        self.count += 1
        self.has_held = False
        if self._sums_up:
            self._extend()
            grads = ((i, self._parameters.grad(i)) for i in range(len(self._parameters)))
            self._sums = {i: grad for i, grad in grads if grad is not None and self.in_use[i]}

    def set_sums_aside(self, problems: list[InvalidArgumentError]) -> dict[int, torch.Tensor]:
        """Take away gradients that are sums over all ranks, and must not be summed again.

        ``problems`` gets the errors of those to which backward has added meanwhile.
        """
        aside: dict[int, torch.Tensor] = {}
        numbers, tensors = self._countdown.numbers, self._parameters.tensors
        for index, sum_ in self._sums.items():
            if tensors[index].grad is not sum_:
                continue  # thrown away, and maybe made anew
            if numbers[index] < self._countdown.passes or self.has_held:
                problems.append(
                    FrontEndArgumentError(
                        f"with op Sum the gradient of '{self._parameters.names[index]}' was "
                        "computed again after it had been summed over all ranks, which would count "
                        "it twice: call backward once for the sum of all losses, or let all but "
                        "the last run within optimizer.no_sync(), or use op Average"
                    )
                )
            else:
                aside[index], tensors[index].grad = sum_, None
        return aside

    @torch.no_grad()
    def put_back(self, aside: dict[int, torch.Tensor]) -> None:
        """Give parameters what was set aside, with what they have got meanwhile."""
        for index, grad in aside.items():
            parameter = self._parameters.tensors[index]
            parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)

    def begin_world(self) -> None:
        """Begin anew: the ranks of this world are all before the first round of a step."""
        self.count, self._is_open, self._last_end = 0, False, None

    def begin(self, *, used: bool) -> None:
        """Forget the last step; ``used``: the optimizer has stepped with its gradients."""
        if self.count:
            self._last_end = USED if used else THROWN
        if self.count and self.in_use:
            self._used_last = self.in_use
        self.count, self._is_open, self.has_held = 0, False, False
        self._seen, self.in_use = bytearray(), bytearray()
        self._sums.clear()

    def _lacks(self, buckets: Iterable[Bucket]) -> bool:
        """Return whether backward has still to come to parameters that are in use, in this step."""
        if not any(bucket.missing for bucket in buckets):
            return False
        self._extend()
        passes, lacks = self._countdown.passes, False
        for index, left in enumerate(self._countdown.numbers):
            if left < passes:
                self._seen[index] = 1
            elif self._used_last[index] and not self._seen[index]:
                lacks = lacks or index not in self._parameters.lent
        return lacks

    def _extend(self) -> None:
        """Make room for parameters that are new."""
        count = len(self._parameters)
        for noted, fill in ((self.in_use, b"\0"), (self._seen, b"\0"), (self._used_last, b"\1")):
            noted.extend(fill * (count - len(noted)))
