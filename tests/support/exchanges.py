"""The table of the exchange: what optimizers must step with, computed by NumPy.

A row says how gradients are combined (op, compression, groups, passes ...), among whom, and what
happens in each step. Gradients follow from the row, the rank and the step alone, so ``Replay``
makes them of all ranks and knows, without a framework, with what each step is taken and what the
weights are after it. Rows are drawn by Hypothesis (``exchange_rows.py``); the front ends' parts are
``exchange_torch.py``, ``exchange_numpy.py`` and ``exchange_programs.py``, the tests are in
``tests/gradients/test_exchange_table.py``.

The weights are stepped by SGD whose rate and momentum are powers of two: where the engine promises
bits, NumPy has the same ones. ``Row`` has a repr that is Python: a row that has failed is repeated
by putting it into ``ONCE_FAILED`` of that file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from blocks import coded
from compressors import ByTurns, SignsWithFeedback

import kolovod

RATE, MOMENTUM = 0.25, 0.5
CLIP = 0.375
Array = npt.NDArray[Any]
NARROW = ("float16", "bfloat16")
LEAST_CODED = 1024
"""Elements; what has less is not encoded (csrc/collectives/codec.h)."""
LOOKED_UP = 3
"""How many rows of a table one pass of one rank looks up."""


class Parameter(NamedTuple):
    """What is trained. NumPy has no bfloat16: it is float32 here, with values of bfloat16."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    is_table: bool = False
    """Rows of it are looked up, so that its gradient has indices."""


class Step(NamedTuple):
    """One step of all ranks."""

    way: str = "plain"
    """How a script comes to it: see ``exchange_torch.py``."""
    absent: tuple[tuple[int, int, int], ...] = ()
    """(rank, pass, parameter) where backward does not come to the parameter."""


class Row(NamedTuple):
    """A line of the table. By default: two ranks on one host average one vector."""

    worlds: tuple[tuple[int, ...], ...] = ((0, 0),)
    """One after the other, for each of its ranks the number of the host. Ranks are the first ones
    of the largest world; who is not in a world pauses."""
    parameters: tuple[Parameter, ...] = (Parameter((3,)),)
    steps: tuple[Step, ...] = (Step(), Step())
    """In each world."""
    op: str = "Average"
    compression: str = "none"
    predivide: float = 1.0
    groups: int | tuple[tuple[int, ...], ...] | None = None
    passes: int = 1
    as_dense: bool = False
    sharded: bool = False
    staged: bool = False
    """Gradients are on a GPU (of fake_device.py)."""
    resumed: bool = False
    """Optimizer and compressor are made anew before each world's last step, from their states."""
    exact: bool = False
    """Gradients are small multiples of 1/8, whose sums are the same in any order."""
    seed: int = 0
    program: str = ""
    """How the front end's step is made, where there are several ways."""

    @property
    def size(self) -> int:
        """How many ranks there are at most."""
        return max(map(len, self.worlds))

    @property
    def momentum(self) -> float:
        """Sparse gradients are stepped with as they are."""
        return 0.0 if any(p.is_table for p in self.parameters) else MOMENTUM

    @property
    def tolerance(self) -> float:
        """How far results may be off, relatively; 0: not by a bit."""
        if self.compression == "signs":
            return 1e-5
        if math.log2(self.predivide) % 1:
            return 1e-5
        return 1e-6 if any(p.is_table for p in self.parameters) else 0.0

    def is_sparse(self, index: int) -> bool:
        """Whether indices and values travel."""
        return self.parameters[index].is_table and not self.as_dense

    def mates(self, index: int) -> list[int]:
        """The parameters that travel with this one: a group, or all that are in none."""
        count = len(self.parameters)

        def group_of(i: int) -> int | None:
            if isinstance(self.groups, int) and self.groups:
                return i * min(self.groups, count) // count
            by_hand = self.groups if isinstance(self.groups, tuple) else ()
            return next((number for number, group in enumerate(by_hand) if i in group), None)

        return [
            i
            for i in range(count)
            if i == index or (group_of(i) == group_of(index) and not self.is_sparse(i))
        ]

    def passes_of(self, step: Step) -> int:
        """How many backward passes the step has."""
        if step.way == "early":
            return self.passes - 1
        return self.passes + (step.way == "held back")


def start(row: Row) -> list[Array]:
    """The weights that all ranks begin with."""
    draw = np.random.default_rng([row.seed, 7])
    return [_as(p.dtype, draw.normal(size=p.shape)) for p in row.parameters]


class Entries(NamedTuple):
    """A gradient of a table: rows, the same maybe twice, and what each gets."""

    indices: Array
    values: Array

    def dense(self, parameter: Parameter) -> Array:
        """With all zeros."""
        whole = np.zeros(parameter.shape, self.values.dtype)
        np.add.at(whole, self.indices, self.values)
        return whole


def gradient(row: Row, where: tuple[int, int, int], rank: int, index: int) -> Array | Entries:
    """What one backward pass of one rank makes; ``where``: the world, the step and the pass."""
    parameter = row.parameters[index]
    draw = np.random.default_rng([row.seed, *where, rank, index])
    shape = (LOOKED_UP, *parameter.shape[1:]) if parameter.is_table else parameter.shape
    exact = draw.integers(-12, 13, size=shape) / 8
    values = _as(parameter.dtype, exact if row.exact else draw.normal(size=shape))
    if not parameter.is_table:
        return values
    return Entries(draw.integers(parameter.shape[0], size=LOOKED_UP), values)


def own_gradients(
    row: Row, world: int, number: int, step: Step, rank: int, *, first: int = 0
) -> list[list[Array | Entries | None]]:
    """By pass, then by parameter; ``first``: another number, for other gradients."""
    return [
        [
            None
            if (rank, each, index) in step.absent
            else gradient(row, (world, number, first + each), rank, index)
            for index in range(len(row.parameters))
        ]
        for each in range(row.passes_of(step))
    ]


class Taken(NamedTuple):
    """What is seen of a step; None instead of gradients where a front end does not show them."""

    gradients: list[Array | None] | None
    weights: list[Array]


class Replay:
    """All ranks' steps in one process."""

    def __init__(self, row: Row) -> None:
        """Makes the first weights."""
        self.row = row
        self.weights = start(row)
        self.velocities: list[Array | None] = [None] * len(row.parameters)
        self._signs = [SignsWithFeedback(np.asarray) for _ in range(row.size)]
        self._turns = [ByTurns() for _ in range(row.size)]

    def all(self) -> list[list[Taken]]:
        """By world and step."""
        return [
            [self.step(world, number, step) for number, step in enumerate(self.row.steps)]
            for world in range(len(self.row.worlds))
        ]

    def step(
        self, world: int, number: int, step: Step, members: tuple[int, ...] | None = None
    ) -> Taken:
        """One of all ranks of a world, or of ``members`` of it alone."""
        row = self.row
        if members is None:
            members = tuple(range(len(row.worlds[world])))
        hosts = tuple(row.worlds[world][member] for member in members)
        sums = [self._summed(world, number, step, member) for member in members]
        taken: list[Array | None] = []
        for index in range(len(row.parameters)):
            own = [each[index] for each in sums]
            combined, is_used = None, any(grad is not None for grad in own)
            is_asked = row.compression in ("signs", "by turns") and any(
                each[mate] is not None for each in sums for mate in row.mates(index)
            )  # with zeros, since others of its bucket are sent
            if is_used or is_asked:
                combined = self._combined(members, hosts, index, own)
            if combined is not None and is_used:
                if step.way == "clip":
                    combined = np.clip(combined, *_as(row.parameters[index].dtype, [-CLIP, CLIP]))
                if step.way == "synchronize":
                    combined = combined * _as(row.parameters[index].dtype, 2)
                self._move(index, combined)
            taken.append(combined if is_used else None)
        return Taken(taken, [weight.copy() for weight in self.weights])

    def _summed(self, world: int, number: int, step: Step, rank: int) -> list[Array | None]:
        """One rank's gradients, added up over the passes."""
        row = self.row
        passes = own_gradients(row, world, number, step, rank)
        found: list[Array | None] = [None] * len(row.parameters)
        for grads in passes:
            for index, grad in enumerate(grads):
                if grad is None:
                    continue
                parameter = row.parameters[index]
                whole = grad.dense(parameter) if isinstance(grad, Entries) else grad
                before = found[index]
                found[index] = whole if before is None else _as(parameter.dtype, before + whole)
        return found

    def _combined(
        self, members: tuple[int, ...], hosts: tuple[int, ...], index: int, own: list[Array | None]
    ) -> Array:
        row, parameter = self.row, self.row.parameters[index]
        dtype, size, is_sparse = parameter.dtype, len(hosts), row.is_sparse(index)
        each = [np.zeros(parameter.shape, _numpys(dtype)) if grad is None else grad for grad in own]
        divisor = size if row.op == "Average" else 1
        if size == 1:
            return np.asarray(each[0])
        if row.compression == "signs" and not is_sparse:
            return self._by_signs(members, index, each, divisor)
        if row.compression == "by turns" and not is_sparse:
            factors = [
                self._turns[member].compress(str(index), np.float64(1)).tensors[0]
                for member in members
            ]
            each = [grad * _as(dtype, by) for grad, by in zip(each, factors, strict=True)]
        travels = dtype
        if row.compression in ("fp16", "bf16") and not is_sparse and dtype not in NARROW:
            travels = {"fp16": "float16", "bf16": "bfloat16"}[row.compression]
            each = [_as(travels, grad) for grad in each]
        wide = np.float32 if travels in NARROW else _numpys(travels)
        is_coded = row.compression in ("int8", "int4") and len(parameter.shape) > 1
        is_coded = is_coded and math.prod(parameter.shape) >= LEAST_CODED
        by_host: dict[int, Array] = {}
        for host, grad in zip(hosts, each, strict=True):
            mine = grad.astype(wide)
            by_host[host] = by_host[host] + mine if host in by_host else mine
        parts = list(by_host.values())
        if is_coded and len(parts) > 1:
            parts = [coded(part, row.compression) for part in parts]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        total = total / wide(divisor)
        if is_coded and len(parts) > 1:
            total = coded(total, row.compression)
        return _as(dtype, _as(travels, total))

    def _by_signs(
        self, members: tuple[int, ...], index: int, each: list[Array], divisor: int
    ) -> Array:
        one = self._signs[0]
        sent = [
            signs.compress(str(index), grad) for signs, grad in zip(self._signs, each, strict=False)
        ]
        if sent[0].verb == "allreduce":
            return np.asarray(sum(each[1:], each[0]) / each[0].dtype.type(divisor))
        parts = zip(*(payload.tensors for payload in sent), strict=True)
        gathered = [np.concatenate(part) for part in parts]
        total: Array = one.decompress(str(index), sent[0], gathered)
        return total / total.dtype.type(divisor)

    def _move(self, index: int, combined: Array) -> None:
        """A step of SGD with momentum, as all frameworks take it."""
        dtype = self.row.parameters[index].dtype
        before = self.velocities[index]
        velocity = combined
        if before is not None:
            velocity = _as(dtype, before * _as(dtype, self.row.momentum) + combined)
        self.velocities[index] = velocity
        moved = self.weights[index] - velocity * _as(dtype, RATE)
        self.weights[index] = _as(dtype, moved)


def entering(row: Row, rank: int) -> Callable[[int], None]:
    """What gets this process into a world of the row, or leaves it out, one after the other."""

    def enter(world: int) -> None:
        kolovod.shutdown()
        kolovod.init(comm=list(range(len(row.worlds[world]))))
        assert (kolovod.rank(), kolovod.size()) == (rank, len(row.worlds[world]))

    return enter


def run_processes(
    start: Callable[..., Any], work: Callable[..., Any], rows: list[Row], **env: str
) -> None:
    """``work(rank, rows)`` on processes that ``start`` has forked: many rows in each job.

    Rows of the same number of ranks on the same hosts share a job.
    """
    jobs: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        jobs.setdefault(max(row.worlds, key=len), []).append(row)
    for hosts, some in jobs.items():
        names = [f"host{host}" for host in hosts]
        results = start(len(hosts), work, some, hosts=names, timeout_s=240.0, env=env)
        for number, row in enumerate(some):
            wanted = Replay(row).all()
            for rank, found in enumerate(results):
                try:
                    check(row, rank, found[number], wanted)
                except AssertionError as error:
                    raise AssertionError(f"{row!r}: {error}") from None


def check(row: Row, rank: int, found: list[list[Taken]], wanted: list[list[Taken]]) -> None:
    """``found``: of one rank, by world and step; an AssertionError says which value differs."""
    for world, hosts in enumerate(row.worlds):
        if rank >= len(hosts):
            continue
        assert len(found[world]) == len(row.steps), (rank, world)
        for number, (mine, right) in enumerate(zip(found[world], wanted[world], strict=True)):
            where = f"rank {rank} in step {number} of world {world}, parameter"
            for index, weight in enumerate(right.weights):
                compare(row, mine.weights[index], weight, f"the weights of {where} {index}")
            assert right.gradients is not None
            for index, grad in enumerate(right.gradients if mine.gradients is not None else ()):
                assert mine.gradients is not None
                own = mine.gradients[index]
                assert (own is None) == (grad is None), f"the gradient of {where} {index}: {own}"
                if grad is not None:
                    compare(row, own, grad, f"the gradient of {where} {index}")


def compare(row: Row, found: Any, wanted: Array, what: str) -> None:
    """AssertionError, which begins with ``what``, where values differ by more than they may."""
    assert found.dtype == wanted.dtype, what
    assert found.shape == wanted.shape, what
    if row.tolerance:
        np.testing.assert_allclose(found, wanted, row.tolerance, row.tolerance, err_msg=what)
    else:
        np.testing.assert_array_equal(found, wanted, err_msg=what)


def _numpys(dtype: str) -> Any:
    return np.float32 if dtype == "bfloat16" else np.dtype(dtype).type


def _as(dtype: str, values: Any) -> Any:
    """Rounded to the nearest value of ``dtype``, ties to even."""
    if dtype != "bfloat16":
        return np.asarray(np.asarray(values).astype(dtype))
    bits = np.asarray(values).astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    return np.asarray(rounded, np.uint32).view(np.float32)
