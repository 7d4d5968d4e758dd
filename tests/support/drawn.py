"""Operations drawn at random, each with what NumPy says must come out: for soaking.py.

Everything is drawn from a key of numbers, so all ranks draw the same, and a key repeats an
operation. Values depend on the rank, too; each rank can make what all others give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from conformance import (
    EPSILON,
    FLOATS,
    NUMPY_DTYPES,
    OPS,
    Case,
    adasum,
    assert_equal,
    combined,
)
from tensors import NumpyTensors

from kolovod.core.objects import Objects
from kolovod.core.ops import Adasum, Average, Max, Min, Op, Sum
from kolovod.core.transfers import Transfers

NON_BLOCKING = (
    *("allreduce",) * 4,
    "adasum",
    "grouped_allreduce",
    "broadcast",
    "allgather",
    "grouped_allgather",
    "alltoall",
    "reducescatter",
    "grouped_reducescatter",
    "ring",
)
VERBS = (*NON_BLOCKING, "barrier", "broadcast_object", "allgather_object")
MOST_ELEMENTS = 1 << 20  # of an array; a rank holds a few of that size at a time
_TENSORS = NumpyTensors()


class Task(NamedTuple):
    """An operation as this rank sees it."""

    what: str
    start: Callable[[], Any]
    """Submits it and returns a handle; if it blocks, the result."""
    check: Callable[[Any], None]
    """AssertionError if that is not the result."""


class Messages(NamedTuple):
    """A message that is sent and one that is received."""

    sending: Any
    receiving: Any
    into: np.ndarray

    def wait(self) -> tuple[np.ndarray, int]:
        """What was received, and from which rank."""
        sender = self.receiving.wait()
        self.sending.wait()
        return self.into, sender


class Draw:
    """Draws one operation of a process set; each verb has a method."""

    def __init__(
        self,
        kv: Any,
        key: Sequence[int],
        members: list[int],
        name: str | None = None,
        group: Any = None,
    ) -> None:
        """``name`` None: the operation blocks and is unnamed. ``group``: None for all ranks."""
        self.kv, self.key, self.members = kv, list(key), members
        self.named = {"name": name, "process_set": group}
        self.blocking = name is None
        self.random = np.random.default_rng(self.key)
        self.place = members.index(kv.world().rank)
        self.made = 0

    def task(self, verb: str | None = None) -> Task:
        """Of that verb, or of any."""
        verb = verb or self.one_of(VERBS if self.blocking else NON_BLOCKING)
        drawn: Task = getattr(self, verb)()
        return drawn._replace(what=f"{self.key} {verb} {drawn.what} over ranks {self.members}")

    # What is drawn --------------------------------------------------------------------------------

    def one_of(self, choices: Sequence[Any]) -> Any:
        """Any of them."""
        return choices[int(self.random.integers(len(choices)))]

    def elements(self, most: int = MOST_ELEMENTS) -> int:
        """More often few than many, and now and then none."""
        few_or_many = int(most ** self.random.random() ** 1.5)
        return few_or_many if self.random.random() > 0.05 else 0

    def shape(self, most: int = MOST_ELEMENTS) -> tuple[int, ...]:
        """Of so many elements at most."""
        elements, inner = self.elements(most), self.one_of((0, 1, 2, 3, 7))
        if elements == 1:
            return ()
        return (elements,) if inner == 0 else (elements // inner, inner)

    def rows(self, most: int, count: int) -> list[int]:
        """Up to ``most`` each, drawn for each member or for each pair."""
        return [int(rows) for rows in self.random.integers(most + 1, size=count)]

    def case(self, shape: tuple[int, ...], in_place: bool = False) -> Case:
        """A reduction."""
        dtype = self.one_of(NUMPY_DTYPES)
        op, scales = self.one_of(OPS), self.one_of(((1.0, 1.0), (0.5, 4.0)))
        if dtype == "bool":
            op, scales = (Sum if op == Average else op), (1.0, 1.0)
        return Case(dtype, shape, op, scales, in_place, not self.blocking, self.one_of((1, 1, 0)))

    def values(self, dtype: str, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """What each member gives: small integers, so that sums and products are exact."""
        self.made += 1
        least, most = (0, 2) if dtype == "bool" else (0, 11) if dtype[0] == "u" else (-5, 6)
        kind = bool if dtype == "bool" else np.int64
        return [
            np.random.default_rng([*self.key, self.made, member])
            .integers(least, most, shape, np.int8)
            .astype(kind)
            for member, shape in zip(self.members, shapes, strict=True)
        ]

    def alike(self, case: Case) -> tuple[np.ndarray, list[np.ndarray]]:
        """What this rank gives to a reduction, and the values of all members."""
        inputs = self.values(case.dtype, [case.shape] * len(self.members))
        return _TENSORS.make(inputs[self.place], case.dtype, bool(case.dense)), inputs

    def call(self, verb: str, *arguments: Any, in_place: bool = False, **options: Any) -> Any:
        """What submits it."""
        function = getattr(self.kv, verb + "_async" * (not self.blocking) + "_" * in_place)
        return lambda: function(*arguments, **options, **self.named)

    # Verbs ----------------------------------------------------------------------------------------

    def allreduce(self) -> Task:
        case = self.case(self.shape(), self.one_of((False, True)))
        mine, inputs = self.alike(case)

        def check(result: np.ndarray) -> None:
            equal(result, combined(case, inputs), case)
            assert (result is mine) == case.in_place
            if not case.in_place:
                equal(mine, inputs[self.place], case)

        call = self.call("allreduce", mine, in_place=case.in_place, **how(case))
        return Task(str(case), call, check)

    def grouped_allreduce(self) -> Task:
        op, in_place = self.one_of((Sum, Min, Max)), self.one_of((False, True))
        cases = self.group(op)
        mine, inputs = zip(*map(self.alike, cases), strict=True)

        def check(results: list[np.ndarray]) -> None:
            for case, values, result in zip(cases, inputs, results, strict=True):
                equal(result, combined(case, values), case)

        call = self.call("grouped_allreduce", mine, in_place=in_place, op=op)
        return Task(str(cases), call, check)

    def grouped_reducescatter(self) -> Task:
        op = self.one_of((Sum, Min, Max))
        cases = self.group(op, least_dimensions=1)
        mine, inputs = zip(*map(self.alike, cases), strict=True)

        def check(results: list[np.ndarray]) -> None:
            for case, values, result in zip(cases, inputs, results, strict=True):
                equal(result, self.part(combined(case, values)), case)

        return Task(str(cases), self.call("grouped_reducescatter", mine, op=op), check)

    def reducescatter(self) -> Task:
        case = self.case(self.shape() or (1,))
        mine, inputs = self.alike(case)

        def check(result: np.ndarray) -> None:
            equal(result, self.part(combined(case, inputs)), case)

        return Task(str(case), self.call("reducescatter", mine, **how(case)), check)

    def adasum(self) -> Task:
        if len(self.members) & (len(self.members) - 1) != 0:
            return self.allreduce()
        dtype = self.one_of([dtype for dtype in FLOATS if dtype in NUMPY_DTYPES])
        shape = (1 + self.elements(3000),)
        draws = [np.random.default_rng([*self.key, member]) for member in self.members]
        inputs = [draw.normal(size=shape).astype(dtype) for draw in draws]

        def check(result: np.ndarray) -> None:
            wanted = adasum([values.astype("f8") for values in inputs])
            tolerance = 20 * EPSILON[dtype]
            np.testing.assert_allclose(result.astype("f8"), wanted, tolerance, tolerance)

        call = self.call("allreduce", inputs[self.place], op=Adasum)
        return Task(f"{dtype} {shape}", call, check)

    def broadcast(self) -> Task:
        case = self.case(self.shape(), self.one_of((False, True)))
        root = self.one_of(range(len(self.members)))
        mine, inputs = self.alike(case)
        if case.in_place:
            mine = mine.copy()

        def check(result: np.ndarray) -> None:
            equal(result, inputs[root], case)
            assert (result is mine) == case.in_place

        call = self.call("broadcast", mine, self.members[root], in_place=case.in_place)
        return Task(f"{case} from {self.members[root]}", call, check)

    def allgather(self) -> Task:
        mine, wanted, dtype = self.gathered()
        return Task(
            dtype, self.call("allgather", mine), lambda result: equal(result, wanted, dtype)
        )

    def grouped_allgather(self) -> Task:
        parts = [self.gathered() for _ in range(3)]

        def check(results: list[np.ndarray]) -> None:
            for (_, wanted, dtype), result in zip(parts, results, strict=True):
                equal(result, wanted, dtype)

        return Task("of 3", self.call("grouped_allgather", [part[0] for part in parts]), check)

    def alltoall(self) -> Task:
        dtype, tail = self.one_of(NUMPY_DTYPES), self.one_of(((), (3,)))
        count = len(self.members)
        most = 1 + self.elements(MOST_ELEMENTS // count)
        uneven = np.reshape(self.rows(most, count * count), (count, count))
        even = self.one_of((False, False, True))
        splits = np.full((count, count), most) if even else uneven
        inputs = self.values(dtype, [(int(sum(row)), *tail) for row in splits])
        mine = _TENSORS.make(inputs[self.place], dtype)

        def check(answer: tuple[np.ndarray, list[int]]) -> None:
            parts = [
                np.split(values, np.cumsum(row))[self.place]
                for values, row in zip(inputs, splits, strict=True)
            ]
            assert answer[1] == [int(rows) for rows in splits[:, self.place]]
            equal(answer[0], np.concatenate(parts), dtype)

        given = None if even else [int(rows) for rows in splits[self.place]]
        return Task(f"{dtype} {splits.tolist()}", self.call("alltoall", mine, given), check)

    def ring(self) -> Task:
        """A message to the next member, and one from the member before, or from anybody."""
        dtype, shape = self.one_of(NUMPY_DTYPES), self.shape()
        inputs = self.values(dtype, [shape] * len(self.members))
        mine = _TENSORS.make(inputs[self.place], dtype, self.one_of((True, True, False)))
        into = _TENSORS.make(np.zeros(shape), dtype, self.one_of((True, True, False)))
        before, after = self.place - 1, self.members[(self.place + 1) % len(self.members)]
        source, sends_first = self.one_of((self.members[before], None)), self.one_of((True, False))
        # No other operation has this tag, so ranks may submit them in any order.
        where = {
            "tag": self.key[-2] * 10_000 + self.key[-1],
            "process_set": self.named["process_set"],
        }

        transfers = Transfers(self.kv.frontend, self.kv.world)

        def start() -> Any:
            sending = transfers.isend(mine, after, **where) if sends_first else None
            if self.blocking and sends_first and len(self.members) > 1:
                sender = transfers.recv(into, source, **where)
                sending.wait()
                return into, sender
            receiving = transfers.irecv(into, source, **where)
            sending = sending or transfers.isend(mine, after, **where)
            messages = Messages(sending, receiving, into)
            return messages.wait() if self.blocking else messages

        def check(result: tuple[np.ndarray, int]) -> None:
            equal(result[0], inputs[before], dtype)
            equal(mine, inputs[self.place], dtype)
            assert result[1] == self.members[before]

        return Task(f"{dtype} {shape} from {source}", start, check)

    def barrier(self) -> Task:
        return Task("", lambda: self.kv.barrier(**self.named), lambda result: None)

    def broadcast_object(self) -> Task:
        root = self.one_of(self.members)
        wanted = {"of": root, "payload": b"x" * self.elements(100_000), "key": self.key}
        mine = wanted if self.kv.world().rank == root else None
        objects = Objects(self.kv.world)

        def check(result: Any) -> None:
            assert result == wanted

        call = lambda: objects.broadcast_object(mine, root, **self.named)  # noqa: E731
        return Task(f"from {root}", call, check)

    def allgather_object(self) -> Task:
        lengths = self.rows(1 + self.elements(50_000), len(self.members))
        everyone = [
            (member, "y" * length) for member, length in zip(self.members, lengths, strict=True)
        ]
        objects = Objects(self.kv.world)

        def check(result: Any) -> None:
            assert result == everyone

        call = lambda: objects.allgather_object(everyone[self.place], **self.named)  # noqa: E731
        return Task(str(lengths), call, check)

    # Their parts ----------------------------------------------------------------------------------

    def group(self, op: Op, least_dimensions: int = 0) -> list[Case]:
        """Up to four arrays with one op and no factors."""
        shapes = [self.shape(MOST_ELEMENTS // 4) for _ in range(self.one_of((1, 2, 3, 4)))]
        shapes = [shape if len(shape) >= least_dimensions else (1,) for shape in shapes]
        return [self.case(shape)._replace(op=op, scales=(1.0, 1.0)) for shape in shapes]

    def part(self, values: np.ndarray) -> np.ndarray:
        """What this rank gets of a scattered result."""
        return np.array_split(values, len(self.members))[self.place]

    def gathered(self) -> tuple[np.ndarray, np.ndarray, str]:
        """What this rank gives to an allgather, what must come out, and the dtype."""
        dtype, tail = self.one_of(NUMPY_DTYPES), self.one_of(((), (3,), (2, 2)))
        rows = self.rows(1 + self.elements(MOST_ELEMENTS // 4), len(self.members))
        parts = self.values(dtype, [(count, *tail) for count in rows])
        mine = _TENSORS.make(parts[self.place], dtype, self.one_of((True, True, False)))
        return mine, np.concatenate(parts), dtype


def how(case: Case) -> dict[str, Any]:
    """Its arguments beside the tensor."""
    pre, post = case.scales
    return {"op": case.op, "prescale_factor": pre, "postscale_factor": post}


def equal(result: np.ndarray, wanted: np.ndarray, what: Case | str) -> None:
    """AssertionError if values, shape or dtype are others."""
    dtype = what.dtype if isinstance(what, Case) else what
    assert str(result.dtype) == dtype
    assert_equal(result, wanted if dtype == "bool" else wanted.astype("f8"), dtype, what)
