"""What every verb must give for every dtype, shape and op, by NumPy.

The checks run on one rank; ``worlds.py`` has the table of what is checked where. Inputs depend on
(case, rank) only, so every rank knows what all others have, and can tell what must come out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from tensors import TENSORS

from kolovod.core.objects import Objects
from kolovod.core.ops import Adasum, Average, Max, Min, Op, Product, Sum
from kolovod.errors import InvalidArgumentError

OPS = (Average, Sum, Min, Max, Product)
INTEGERS = ("uint8", "int8", "uint16", "int16", "int32", "int64")
FLOATS = ("float16", "float32", "float64", "bfloat16")
NUMPY_DTYPES = (*INTEGERS, "float16", "float32", "float64", "bool")
TORCH_DTYPES = ("uint8", "int8", "int16", "int32", "int64", *FLOATS, "bool")
SHAPES = ((), (1,), (0,), (7,), (3, 5), (2, 0, 3), (1025,), (4, 3, 70))
LARGE = ((70_001,),)  # several chunks of 64 KiB
SCALES = ((1.0, 1.0), (0.5, 3.0))
MODES = tuple(itertools.product((False, True), (False, True)))  # in place, asynchronous

# Largest relative error of one rounding; the values are small integers, exact until they are
# divided.
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22, "float64": 2.0**-50}


class Case(NamedTuple):
    """One line of the allreduce table."""

    dtype: str
    shape: tuple[int, ...]
    op: Op
    scales: tuple[float, float]
    in_place: bool
    asynchronous: bool
    dense: bool = True


def reductions(
    dtype: str, shapes: tuple[tuple[int, ...], ...], modes: Any = MODES
) -> Iterator[Case]:
    """The lines of one dtype; bool has no Average and no factors."""
    for shape, op, scales, (in_place, asynchronous) in itertools.product(
        shapes, OPS, SCALES, modes
    ):
        if dtype == "bool" and (op == Average or scales != (1.0, 1.0)):
            continue
        yield Case(dtype, shape, op, scales, in_place, asynchronous)
    if any(len(shape) > 0 and math.prod(shape) > 1 for shape in shapes):
        for in_place, asynchronous in modes:
            yield Case(dtype, (3, 5), Sum, (1.0, 1.0), in_place, asynchronous, dense=False)


def values_of(dtype: str, shape: tuple[int, ...], rank: int) -> np.ndarray:
    """What ``rank`` puts in: small integers, also negative ones, that differ by rank and place."""
    flat = np.arange(math.prod(shape), dtype=np.int64)
    values = (flat * 7 + rank * 5) % 11
    if dtype == "bool":
        values = values % 3 == 0
    elif not dtype.startswith("uint"):
        values = values - 5
    return values.reshape(shape)


def expected(case: Case, size: int) -> np.ndarray:
    """What allreduce must give for ``values_of``."""
    return combined(case, [values_of(case.dtype, case.shape, rank) for rank in range(size)])


def combined(case: Case, inputs: list[np.ndarray]) -> np.ndarray:
    """What allreduce must give for these inputs, computed with exact integers and float64."""
    if case.dtype == "bool":
        combine = np.logical_or if case.op in (Sum, Max) else np.logical_and
        return combine.reduce(inputs)
    pre, post = case.scales
    scaled = [values * pre for values in inputs]
    if case.dtype in INTEGERS:
        scaled = [np.trunc(values) for values in scaled]
    reducer = {Min: np.minimum, Max: np.maximum, Product: np.multiply}.get(case.op, np.add)
    result = reducer.reduce(scaled)
    if case.dtype in INTEGERS and case.op != Average:
        result = _wrapped(result, case.dtype)
    if case.op == Average:
        result = result / len(inputs)
    result = result * post
    if case.dtype not in INTEGERS:
        return result
    limits = np.iinfo(case.dtype)
    return np.clip(np.trunc(result), limits.min, limits.max)


def _wrapped(values: np.ndarray, dtype: str) -> np.ndarray:
    """Sums and products of narrow integers wrap."""
    return values.astype(np.int64).astype(dtype).astype(np.float64)


def assert_equal(actual: np.ndarray, wanted: np.ndarray, dtype: str, what: object) -> None:
    """Exactly, or to two roundings where a division or factor makes one necessary."""
    assert actual.shape == wanted.shape, what
    if dtype in EPSILON:
        tolerance = 2 * EPSILON[dtype]
        np.testing.assert_allclose(
            actual.astype(np.float64), wanted, rtol=tolerance, atol=0, err_msg=str(what)
        )
    else:
        np.testing.assert_array_equal(actual, wanted.astype(dtype), err_msg=str(what))


def check_allreduce(kv: Any, frontend: str, case: Case) -> None:
    """Run one line on this rank."""
    tensors = TENSORS[frontend]
    world = kv.world()
    values = values_of(case.dtype, case.shape, world.rank)
    tensor = tensors.make(values, case.dtype, case.dense)
    if case.in_place:
        tensor = tensors.writable(tensor)
    verb = "allreduce" + "_async" * case.asynchronous + "_" * case.in_place
    result = getattr(kv, verb)(tensor, str(case), case.op, *case.scales)
    if case.asynchronous:
        result = result.wait()
    assert tensors.name(result) == case.dtype
    wanted = expected(case, world.size)
    assert_equal(tensors.read(result), wanted, case.dtype, (case, world.size))
    if case.in_place:
        assert result is tensor
    else:
        assert_equal(tensors.read(tensor), values.astype(np.float64), case.dtype, (case, "input"))


def check_grouped(
    kv: Any, frontend: str, dtypes: tuple[str, ...], shapes: Any, modes: Any = MODES
) -> None:
    """Groups that mix dtypes and shapes, and the empty group."""
    tensors = TENSORS[frontend]
    world = kv.world()
    for in_place, asynchronous in modes:
        cases = [
            Case(dtype, shape, Sum, (1.0, 1.0), in_place, asynchronous)
            for dtype, shape in itertools.product(dtypes, shapes)
        ]
        group = [tensors.make(values_of(c.dtype, c.shape, world.rank), c.dtype) for c in cases]
        if in_place:
            group = list(map(tensors.writable, group))
        verb = "grouped_allreduce" + "_async" * asynchronous + "_" * in_place
        results = getattr(kv, verb)(group, f"group.{in_place}.{asynchronous}", Sum)
        if asynchronous:
            results = results.wait()
        assert isinstance(results, list)
        for case, given, result in zip(cases, group, results, strict=True):
            assert (result is given) == in_place
            assert_equal(tensors.read(result), expected(case, world.size), case.dtype, case)
    assert kv.grouped_allreduce([], "empty group") == []


def check_broadcast(kv: Any, frontend: str, dtype: str, shapes: Any, modes: Any = MODES) -> None:
    """From every root, dense and not."""
    tensors = TENSORS[frontend]
    world = kv.world()
    for shape, root, (in_place, asynchronous), dense in itertools.product(
        shapes, range(world.size), modes, tensors.layouts
    ):
        tensor = tensors.make(values_of(dtype, shape, world.rank), dtype, dense)
        if in_place:
            tensor = tensors.writable(tensor)
        verb = "broadcast" + "_async" * asynchronous + "_" * in_place
        result = getattr(kv, verb)(tensor, root, f"b.{dtype}.{shape}.{root}")
        if asynchronous:
            result = result.wait()
        assert (result is tensor) == in_place
        assert tensors.name(result) == dtype
        wanted = values_of(dtype, shape, root).astype(np.float64)
        assert_equal(tensors.read(result), wanted, dtype, (shape, root))


def check_allgather(kv: Any, frontend: str, dtype: str) -> None:
    """Equal and different first dimensions, some or all of them zero; dense and not."""
    tensors = TENSORS[frontend]
    world = kv.world()
    tails: tuple[tuple[int, ...], ...] = ((), (3,), (2, 2), (0,))
    rows_of = (lambda rank: 4, lambda rank: rank, lambda rank: 3 * (rank % 2), lambda rank: 0)
    for tail, (pattern, rows), dense, asynchronous in itertools.product(
        tails, enumerate(rows_of), tensors.layouts, (False, True)
    ):
        parts = [values_of(dtype, (rows(rank), *tail), rank) for rank in range(world.size)]
        mine = tensors.make(parts[world.rank], dtype, dense)
        name = f"g.{dtype}.{tail}.{pattern}"
        result = kv.allgather_async(mine, name).wait() if asynchronous else kv.allgather(mine, name)
        assert tensors.name(result) == dtype
        wanted = np.concatenate(parts).astype(np.float64)
        assert_equal(tensors.read(result), wanted, dtype, (tail, pattern))


def check_grouped_allgather(kv: Any, frontend: str, dtypes: tuple[str, ...]) -> None:
    """Groups that mix dtypes and first dimensions, both ways; the empty group."""
    tensors = TENSORS[frontend]
    world = kv.world()
    for asynchronous in (False, True):
        lines = list(itertools.product(dtypes, ((), (3,)), (lambda r: r, lambda r: 2)))
        parts = [
            [values_of(dtype, (rows(rank), *tail), rank) for rank in range(world.size)]
            for dtype, tail, rows in lines
        ]
        mine = [tensors.make(p[world.rank], line[0]) for p, line in zip(parts, lines, strict=True)]
        results = getattr(kv, "grouped_allgather" + "_async" * asynchronous)(mine, "group")
        if asynchronous:
            results = results.wait()
        assert isinstance(results, list)
        for (dtype, *what), part, result in zip(lines, parts, results, strict=True):
            assert tensors.name(result) == dtype
            assert_equal(tensors.read(result), np.concatenate(part).astype("f8"), dtype, what)
    assert kv.grouped_allgather([], "empty group") == []


def check_alltoall(kv: Any, frontend: str, dtype: str, scale: int = 1) -> None:
    """Even and uneven splits, none for some, rows that stay; dense and not."""
    tensors = TENSORS[frontend]
    rank, size = kv.world().rank, kv.world().size
    patterns = (
        lambda source: [2 * scale] * size,
        lambda source: [(3 * source + to) % 4 * scale for to in range(size)],
        lambda source: [scale if to == 0 else 0 for to in range(size)],
        lambda source: [0] * size,
    )
    for tail, (number, splits_of), spare, dense, asynchronous in itertools.product(
        ((), (2, 3)), enumerate(patterns), (0, 2), tensors.layouts, (False, True)
    ):
        inputs = [
            values_of(dtype, (sum(splits_of(source)) + spare, *tail), source)
            for source in range(size)
        ]
        splits = None if number == 0 and spare == 0 else splits_of(rank)
        tensor = tensors.make(inputs[rank], dtype, dense)
        name = f"a.{dtype}.{tail}.{number}.{spare}.{scale}"
        answer = getattr(kv, "alltoall" + "_async" * asynchronous)(tensor, splits, name)
        result, received = answer.wait() if asynchronous else answer
        assert received == [splits_of(source)[rank] for source in range(size)]
        assert tensors.name(result) == dtype
        parts = [
            np.split(values, np.cumsum(splits_of(source)))[rank]
            for source, values in enumerate(inputs)
        ]
        wanted = np.concatenate(parts).astype(np.float64)
        assert_equal(tensors.read(result), wanted, dtype, (tail, number, spare, scale))


def check_reducescatter(kv: Any, frontend: str, case: Case) -> None:
    """A line of the allreduce table, scattered: rows as np.array_split divides them."""
    tensors = TENSORS[frontend]
    rank, size = kv.world().rank, kv.world().size
    values = values_of(case.dtype, case.shape, rank)
    tensor = tensors.make(values, case.dtype, case.dense)
    verb = "reducescatter" + "_async" * case.asynchronous
    result = getattr(kv, verb)(tensor, str(case), case.op, *case.scales)
    if case.asynchronous:
        result = result.wait()
    assert tensors.name(result) == case.dtype
    wanted = np.array_split(expected(case, size), size)[rank]
    assert_equal(tensors.read(result), wanted, case.dtype, (case, size))
    assert_equal(tensors.read(tensor), values.astype(np.float64), case.dtype, (case, "input"))


def check_grouped_reducescatter(kv: Any, frontend: str, dtypes: tuple[str, ...]) -> None:
    """Groups that mix dtypes and shapes, both ways; the empty group."""
    tensors = TENSORS[frontend]
    rank, size = kv.world().rank, kv.world().size
    for asynchronous in (False, True):
        cases = [
            Case(dtype, shape, Sum, (1.0, 1.0), False, asynchronous)
            for dtype, shape in itertools.product(dtypes, ((7,), (0,), (3, 5), (1, 1025)))
        ]
        group = [tensors.make(values_of(c.dtype, c.shape, rank), c.dtype) for c in cases]
        results = getattr(kv, "grouped_reducescatter" + "_async" * asynchronous)(group, "r", Sum)
        if asynchronous:
            results = results.wait()
        for case, result in zip(cases, results, strict=True):
            wanted = np.array_split(expected(case, size), size)[rank]
            assert_equal(tensors.read(result), wanted, case.dtype, case)
    assert kv.grouped_reducescatter([], "empty group") == []


def check_adasum(kv: Any, frontend: str, dtype: str, in_place: bool = True) -> None:
    """One vector and a group, in place or not, scaled; refused unless there are 2^k ranks."""
    tensors = TENSORS[frontend]
    rank, size = kv.world().rank, kv.world().size
    draws = [np.random.default_rng(r) for r in range(size)]
    inputs = [[tensors.make(draw.normal(size=n), dtype) for n in (1, 17, 3011)] for draw in draws]
    mine = inputs[rank]
    if size & (size - 1) != 0:
        with pytest.raises(InvalidArgumentError, match=f"ranks, not {size}; use Average"):
            kv.allreduce(mine[0], "refused", Adasum)
        return
    wanted = [
        3 * adasum([tensors.read(vectors[i]).astype("f8") / 2 for vectors in inputs])
        for i in range(len(mine))
    ]
    alone = [kv.allreduce(vector, f"v{i}", Adasum, 0.5, 3.0) for i, vector in enumerate(mine)]
    if in_place:
        mine = list(map(tensors.writable, mine))
        kv.grouped_allreduce_(mine, "group", Adasum, 0.5, 3.0)
    else:
        mine = kv.grouped_allreduce(mine, "group", Adasum, 0.5, 3.0)
    tolerance = 20 * EPSILON[dtype]
    for one, grouped, right in zip(alone, mine, wanted, strict=True):
        actual = tensors.read(one).astype("f8")
        np.testing.assert_allclose(actual, right, tolerance, tolerance, err_msg=dtype)
        np.testing.assert_array_equal(actual, tensors.read(grouped).astype("f8"))
        everywhere = tensors.read(kv.allgather(one)).astype("f8")
        np.testing.assert_array_equal(everywhere, np.tile(actual, size))  # the same bits


def adasum(vectors: list[np.ndarray]) -> np.ndarray:
    """Of 2^k vectors, straight from the paper's formula, in float64."""
    while len(vectors) > 1:
        vectors = [
            (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def check_objects(kv: Any) -> None:
    """Objects of different sizes, from every root; barriers between."""
    rank, size = kv.world().rank, kv.world().size
    objects = Objects(kv.world)
    everyone = [{"rank": r, "payload": "x" * (1000 * r)} for r in range(size)]
    assert objects.allgather_object(everyone[rank]) == everyone
    for root in range(size):
        kv.barrier()
        assert (
            objects.broadcast_object(everyone[rank] if rank == root else None, root)
            == (everyone[root])
        )
        kv.barrier(f"after {root}")


def check_join(kv: Any) -> None:
    """Rank r has work for r + 1 turns, then it joins: the others' sums are without it."""
    rank, size = kv.world().rank, kv.world().size
    for turn in range(rank + 1):
        total = kv.allreduce(np.full(5, rank + 1), f"turn {turn}", Sum)
        np.testing.assert_array_equal(total, np.full(5, sum(range(turn + 1, size + 1))))
    assert kv.join() == size - 1
