"""Comparison of the ranks' parameters and options, and a check that their gradients are finite.

What is looked at is cheap: options and the number of steps each time, in every tenth step a part of
the parameters, so that large ones have been seen after some hundred steps. In the first step all of
them are compared, which finds a model that was not broadcast.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from kolovod import _native
from kolovod.core.submission import EngineTensor, WorldLike
from kolovod.gradients import sentinel
from kolovod.gradients.sentinel import Facts, Like
from kolovod.torch.frontend import AVERAGED, is_plain_block
from kolovod.torch.parameters import Parameters

_EVERY = 10  # steps, in one of which parameters on the CPU are looked at
_EVERY_ON_DEVICE = 100  # the same on a GPU, for which that waits
_PART_BYTES = 4 << 20  # of them, each time
WHOLE_BYTES = 1 << 20  # of gradients, in each step; of others only the beginning
BEGINNING = 256  # elements
_ALL = 1 << 62
_RANK = 4  # bytes that say which rank has gradients that are not finite

BYTES = sentinel.BYTES + _RANK
BAD = 2
"""Added to the mark of a parameter whose gradient is not finite on some rank."""

_HEALTH = sentinel.KINDS  # of what was told, beside the kinds of facts
_PLAIN = (bool, int, float, complex, str, type(None))
_NO_OPTIONS = ("params", "param_names")
"""What a group has beside its options."""


class Sentinel:
    """Looks after one optimizer, on this rank."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Parameters) -> None:
        """``parameters``: those of the optimizer."""
        self.compares_weights = True
        """False where ranks have parts of them."""
        self._optimizer = weakref.ref(optimizer)
        self._parameters = parameters
        self._steps = 0
        self._told: set[int] = set()
        self._bad: list[int] = []  # parameters whose gradient is not finite here, in this step
        self._late: list[int] = []  # the same, found too late for this step's round
        self._before: list[int] = []  # and in the step before
        self.is_late = False
        """Gradients are looked at when they have come from a GPU, and told of a step later."""
        self._culprit = ""  # what to say if the step is taken
        self._is_on = sentinel.policy() != "off"
        self._looked_at = self._next = 0  # bytes of gradients in this step; before which to begin
        self._options: tuple[list[list[tuple[str, Any]]] | None, bytes] = (None, b"")

    def begin_world(self) -> None:
        """Begin anew: the ranks of this world are all before the first step."""
        self._steps, self._is_on = 0, sentinel.policy() != "off"
        self._told.clear()
        self._bad, self._late, self._before = [], [], []

    def step_ends(self, *, used: bool) -> None:
        """Note that the gradients were used, or thrown away."""
        if used:
            self._steps += 1
            self._before, self._is_on = self._late, sentinel.policy() != "off"
        self._bad, self._late = [], []
        self._culprit = ""
        self._next = 0 if self._looked_at <= self._next + WHOLE_BYTES else self._next + WHOLE_BYTES
        self._looked_at = 0

    # before a round ------------------------------------------------------------------------------

    def look(self, indices: Iterable[int]) -> None:
        """Look at this rank's gradients of ``indices``, before they are averaged."""
        entries: list[EngineTensor] = []
        seen = []
        for index in indices:
            grad = self._parameters.grad(index)
            if grad is None:
                continue
            if grad.is_sparse:
                grad = grad._values()
            code = AVERAGED.get(grad.dtype)
            if code is not None and grad.is_cpu and is_plain_block(grad):
                entries.append((code, grad.shape, grad.data_ptr(), 0))
                seen.append(index)
        self.check(entries, seen)

    def check(
        self, entries: Sequence[EngineTensor], indices: Sequence[int], *, is_late: bool = False
    ) -> None:
        """Look at the tensors that the engine gets, the gradients of ``indices``, one by one.

        ``is_late``: they have come from a GPU, and this thread is the one that sends them. The
        round of this step may be under way, so the next one says what is found in their beginnings.

        What Python does for a gradient is out of the caches after each layer's backward, and takes
        longer than to look at it: so it is one call for a bucket, with what is known already.
        """
        if not self._is_on:
            return
        if is_late:
            self.is_late = True
            found, _ = _native.which_not_finite(entries, BEGINNING, 0, (0, 0))
            self._late += [indices[place] for place in found]
            return
        due = (0, _ALL) if self._bad else (self._next, self._next + WHOLE_BYTES)
        found, count = _native.which_not_finite(entries, BEGINNING, self._looked_at, due)
        self._looked_at += count
        for place in found:
            self._bad.append(indices[place])

    def say(self, marks: bytearray, begin: int, *, in_step: bool) -> None:
        """Put this rank's facts into ``marks`` from ``begin`` on."""
        if not self._is_on:
            return
        for kind, hashed in (
            (sentinel.STEPS, self._steps.to_bytes(8, "big")),
            (sentinel.OPTIONS_IN_STEP if in_step else sentinel.OPTIONS, self._hash_of_options()),
            (sentinel.WEIGHTS, self._hash_of_weights()),
        ):
            place, said = sentinel.said_of(kind, hashed)
            marks[begin + place.start : begin + place.stop] = said

    def say_health(self, marks: bytearray, begin: int, first: int, rank: int) -> None:
        """Mark gradients that are not finite; parameters' marks begin at ``first``."""
        bad = [*self._bad, *self._before]
        if not bad:
            return
        for index in bad:
            marks[first + index] |= BAD
        high, low = rank // 256 % 256, rank % 256
        at = begin + sentinel.BYTES
        marks[at : at + _RANK] = bytes([low, 255 - low, high, 255 - high])

    # after it ------------------------------------------------------------------------------------

    def differences(self, marks: bytearray, begin: int) -> list[int]:
        """Return the kinds of facts that differ in all ranks' ``marks`` and were not told before.

        They are the same on all ranks.
        """
        facts = marks[begin : begin + sentinel.BYTES]
        if not any(facts):
            return []
        kinds = [kind for kind in sentinel.which_differ(facts) if kind not in self._told]
        if kinds:
            self._told |= sentinel.follow_from(kinds)
        return kinds

    def facts(self) -> Facts:
        """Return the facts that the message is made of."""
        names = zip(self._parameters.names, self._parameters.tensors, strict=True)
        weights = [(name, _hash(tensor, 0, tensor.nbytes, 0)) for name, tensor in names]
        return Facts(self._steps, self._known_options(), weights)

    def like(self, ranks: Sequence[int]) -> Like:
        """Return the optimizer's name and the ranks that are compared."""
        return Like(type(self._optimizer()).__name__, ranks)

    def note_health(self, marks: bytearray, begin: int, first: int, ranks: Sequence[int]) -> None:
        """Remember whose gradients are not finite by all ranks' marks, for ``tell_health``."""
        bad = [i for i, mark in enumerate(marks[first:]) if mark & BAD]
        if not bad or self._culprit:
            return
        at = begin + sentinel.BYTES
        low, not_low, high, not_high = marks[at : at + _RANK]
        is_one = low + not_low == high + not_high == 255 and high * 256 + low < len(ranks)
        who = [ranks[high * 256 + low]] if is_one else []
        number = self._steps if self.is_late else self._steps + 1
        step, name = f"step {number}", self._parameters.names[bad[0]]
        self._culprit = sentinel.of_gradients(who, step, name, len(bad) - 1)

    def tell_health(self, world: Callable[[], WorldLike]) -> None:
        """Warn, once: the optimizer steps, so nobody (a GradScaler, say) has seen to it."""
        if self._culprit and _HEALTH not in self._told:
            self._told.add(_HEALTH)
            if world().rank == 0:
                sentinel.warn(self._culprit, "this is said once")

    def _known_options(self) -> dict[str, dict[str, Any]]:
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.__dict__["param_groups"]
        names = {
            id(tensor): name
            for name, tensor in zip(self._parameters.names, self._parameters.tensors, strict=True)
        }
        found = {}
        for group in groups:
            known = [names[id(p)] for p in group["params"] if id(p) in names]
            if known:
                found[min(known)] = {
                    name: value
                    for name, value in sorted(group.items())
                    if name not in _NO_OPTIONS and _is_plain(value)
                }
        return dict(sorted(found.items()))

    def _hash_of_options(self) -> bytes:
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.__dict__["param_groups"]
        seen = [
            [
                (name, value if type(value) in _PLAIN else _seen(name, value))
                for name, value in group.items()
            ]
            for group in groups
        ]
        if seen != self._options[0]:  # else it costs next to nothing
            self._options = seen, sentinel.digest(repr(self._known_options()))
        return self._options[1]

    def _hash_of_weights(self) -> bytes | None:
        tensors = self._parameters.tensors
        if not self.compares_weights or self._steps % _EVERY or not tensors:
            return None
        if not all(tensor.is_cpu for tensor in tensors):
            return None if self._steps % _EVERY_ON_DEVICE else _hash_on_device(tensors)
        total = sum(tensor.nbytes for tensor in tensors)
        begin, end = 0, total
        if self._steps and total > _PART_BYTES:
            parts = -(-total // _PART_BYTES)
            begin = self._steps // _EVERY % parts * _PART_BYTES
            end = min(total, begin + _PART_BYTES)
        hashed = _native.hash_tensors(tensors, begin, end)
        if hashed is not None:
            return hashed.to_bytes(8, "big")
        state, at = 0, 0
        for tensor in tensors:
            if at < end and begin < at + tensor.nbytes:
                state = _hash(tensor, max(begin - at, 0), min(end - at, tensor.nbytes), state)
                if not state:
                    return None  # it has no memory of its own
            at += tensor.nbytes
        return state.to_bytes(8, "big")


def _seen(name: str, value: Any) -> Any:
    """Return what tells whether the option ``name``, which is no scalar, has changed."""
    if name in _NO_OPTIONS:
        return len(value)
    return repr(value) if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _hash(tensor: torch.Tensor, begin: int, end: int, seed: int) -> int:
    """Return a hash of the tensor's bytes from ``begin`` to ``end``; 0: they cannot be read."""
    tensor = tensor.detach()
    if not tensor.is_cpu:
        return int.from_bytes(_hash_on_device([tensor]) or b"", "big")
    if not is_plain_block(tensor):
        tensor = tensor.contiguous()
    address = tensor.data_ptr()
    if tensor.nbytes and not address:
        return 0
    return _native.hash_memory(address + begin, end - begin, seed) or 1


@torch.no_grad()
def _hash_on_device(tensors: Sequence[torch.Tensor]) -> bytes | None:
    """Return a hash of all tensors' values, computed on the GPU; None where that cannot be done.

    It is made of the sums of their bits as whole numbers.
    """
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    total: Any = 0
    for tensor in tensors:
        if not tensor.is_cuda or tensor.element_size() not in kinds or not is_plain_block(tensor):
            return None
        bits = tensor.detach().view(kinds[tensor.element_size()]).sum(dtype=torch.int64)
        total = total * 1_000_003 + bits
    return (int(total) % (1 << 64)).to_bytes(8, "big")
