"""How rows of the exchange (exchanges.py) are drawn, and what each front end has of the table."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from exchanges import NARROW, Parameter, Row, Step
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

SHAPES = ((), (1,), (3,), (0,), (5, 7), (2, 3, 4, 2), (9, 40), (30, 70), (1, 1100))
LARGE = (700, 450)  # more than a bucket of 1 MiB
ONE_HOST = ((0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0))
TWO_HOSTS = ((0, 1), (0, 1, 1), (0, 0, 1, 1))
MORE_HOSTS = ((0, 1, 2), (0, 0, 1, 1, 2))


SHRINKS = False
"""Whether a row that fails is made as small as can be: for whoever looks for the reason."""


def deterministic(count: int, **options: Any) -> settings:
    """``count`` examples, in each run the same ones; nothing is kept between runs.

    What fails is printed as it was drawn: making it smaller takes minutes (``SHRINKS``).
    """
    shrink = [Phase.shrink] if SHRINKS else []
    options.setdefault("phases", [Phase.explicit, Phase.generate, *shrink])
    return settings(
        max_examples=count, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), **options,
    )  # fmt: skip


class Has(NamedTuple):
    """What a front end has of the table."""

    compressions: tuple[str, ...] = ("none", "fp16", "bf16", "int8", "int4")
    dtypes: tuple[str, ...] = ("float32", "float64", "float16", "bfloat16")
    ways: tuple[str, ...] = ("plain",)
    absent: bool = False
    """Ranks may lack gradients that others have."""
    tables: bool = False
    groups: bool = False
    sharded: bool = False
    staged: bool = False
    resumed: bool = False
    predivide: bool = True
    passes: int = 3
    programs: tuple[str, ...] = ("",)
    worlds: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Of which one is drawn; none: one of any shape, or several one after the other."""


_WAYS = ("plain", "closure", "synchronize", "clip", "zeroed", "set to none", "held back", "early")
TORCH = Has(
    ("none", "fp16", "bf16", "int8", "int4", "signs", "by turns"), ways=_WAYS, absent=True,
    tables=True, groups=True, sharded=True, staged=True, resumed=True,
)  # fmt: skip
# In processes a rank stays on its host.
GROWING = (((0,), (0, 0), (0,), (0, 0, 0)), ((0, 0, 0), (0, 0)), ((0, 0, 1),), ((0, 1), (0,)))
TORCH_PROCESSES = TORCH._replace(worlds=GROWING, staged=False)
_TRACED = ("none", "fp16", "bf16", "int8", "int4")
_ON_PROCESSES = (*GROWING, ((0, 0),), ((0, 0),))
TENSORFLOW = Has(
    _TRACED, ("float32", "float64"), tables=True, groups=True, worlds=_ON_PROCESSES,
    programs=("tape in a graph", "optimizer in a graph", "tape", "optimizer"),
)  # fmt: skip
JAX = Has(_TRACED, ("float32", "float64"), worlds=_ON_PROCESSES, programs=("jitted", "eager"))
JAX_SHARDED = JAX._replace(compressions=("none",), sharded=True, worlds=(((0, 0, 0),), ((0, 1),)))
KERAS = Has(
    _TRACED, ("float32",), groups=True, worlds=_ON_PROCESSES, passes=2,
    programs=("compiled", "eager", "applied"),
)  # fmt: skip
NUMPY = Has(
    ("none", "fp16", "int8", "int4", "signs", "by turns"), ("float32", "float64", "float16"),
    worlds=tuple((world,) for world in ONE_HOST + TWO_HOSTS + MORE_HOSTS),
)  # fmt: skip

NUMPY_PROCESSES = NUMPY._replace(compressions=("none",), worlds=GROWING)


@st.composite
def worlds(draw: Any) -> tuple[tuple[int, ...], ...]:
    """Of any shape; seldom several."""
    one = st.one_of(st.sampled_from(ONE_HOST), st.sampled_from(TWO_HOSTS + MORE_HOSTS))
    if draw(st.integers(0, 4)) < 4:
        return (draw(one),)
    return tuple(draw(st.lists(st.one_of(st.just((0,)), one), min_size=2, max_size=3)))


@st.composite
def rows(draw: Any, has: Has) -> Row:
    """Any row that the front end has."""
    of = st.sampled_from
    hosts = draw(of(has.worlds)) if has.worlds else draw(worlds())
    compression = draw(of(has.compressions))
    program = draw(of(has.programs))
    sharded = has.sharded and compression == "none" and draw(st.integers(0, 3)) == 0
    if sharded and any(has.programs):  # there a state is of one world
        hosts = (max(hosts, key=len),)
    keeps_state, is_coded = compression in ("signs", "by turns"), compression[:3] == "int"
    if is_coded:  # whether halves are rounded up or down is nobody's business: no exact numbers
        hosts = tuple(tuple(min(host, 1) for host in world) for world in hosts)
    with_table = has.tables and not (sharded or is_coded) and draw(st.integers(0, 3)) == 0
    dtypes = has.dtypes if compression in ("none", "fp16", "bf16") else ("float32",)
    parameters = draw(
        st.lists(
            st.builds(Parameter, of(SHAPES), of(dtypes), st.just(False)), min_size=1, max_size=5
        )
    )
    # A compressor with a state is asked where others of its bucket have gradients (Row.mates), and
    # the replay does not know which these are where there are several buckets.
    if draw(st.integers(0, 9)) == 9 and not keeps_state:
        parameters.insert(0, Parameter(LARGE))
    as_dense = with_table and draw(st.booleans())
    if with_table:
        parameters.append(Parameter((draw(of((1, 4, 30))), 3), "float32", True))
    passes = 1 if program.startswith("tape") else draw(st.integers(1, has.passes))
    as_dense = as_dense or (with_table and bool(program) and passes > 1)
    ways = [
        way
        for way in has.ways
        if not (way == "early" and passes == 1)
        and not (keeps_state and way in ("zeroed", "set to none", "closure", "held back", "early"))
        and not (sharded and way in ("synchronize", "set to none"))
        and not (with_table and way == "clip")
        # Whose gradients do not tell whether they are new ones.
        and not (way == "set to none" and any(0 in p.shape for p in parameters))
    ]
    size = max(map(len, hosts))
    steps = []
    for _ in range(draw(st.integers(2, 3))):
        way, absent = draw(of(ways)), ()
        if has.absent and draw(st.booleans()):
            most = st.integers(0, size - 1), st.integers(0, passes), st.integers(0, 5)
            absent = draw(st.lists(st.tuples(*most), max_size=6, unique=True).map(sorted))
            # Of a rank that has no gradient nobody knows that it was thrown away, nor, where those
            # of several passes are summed, that all passes are over when it clips.
            if way in ("zeroed", "set to none") or (way == "clip" and passes > 1):
                few = passes == 1 or way != "set to none"
                absent = [where for where in absent if where[2] and few]
        if has.absent and way != "set to none" and draw(st.integers(0, 5)) == 5:
            nobodys = draw(st.integers(1, 5))  # a parameter that no rank uses, if there is one
            ranks, all_passes = range(size), range(passes + 1)
            absent = [*absent, *((r, p, nobodys) for r in ranks for p in all_passes)]
        if with_table:  # the first step shows what is sparse, on one rank at least
            absent = [where for where in absent if where[2] < len(parameters) - 1]
        steps.append(Step(way, tuple(absent)))
    groups = None
    if has.groups and draw(st.booleans()):
        indices = list(range(len(parameters)))
        by_hand = ((0,), (indices[-1],)) if len(indices) > 1 else ((0,),)
        groups = draw(of((1, 2, 99) if has is KERAS else (1, 2, 99, by_hand)))
    narrow = any(p.dtype in NARROW for p in parameters) or compression in ("fp16", "bf16")
    across = any(len(set(world)) > 1 for world in hosts)
    many = any(len(set(world)) > 2 for world in hosts)
    op = draw(of(("Average", "Sum")))
    predivide = 1.0
    if has.predivide and op == "Average":
        plain = not (narrow or is_coded)
        predivide = draw(of((1.0, 2.0, 8.0, 3.0) if plain else (1.0, 2.0)))
    exact = with_table or (across and narrow) or many or draw(st.booleans())
    exact = exact and not is_coded
    if compression in ("fp16", "bf16") and any(p.dtype == "float64" for p in parameters):
        exact = True  # PyTorch rounds by way of float32
    if program.endswith("graph") and compression in ("fp16", "bf16"):
        exact = exact or min(map(len, hosts)) == 1  # what is traced rounds in a world of one, too
    return Row(
        hosts, tuple(parameters), tuple(steps), op, compression, predivide, groups, passes,
        as_dense, sharded, has.staged and draw(st.booleans()),
        has.resumed and draw(st.booleans()), exact, draw(st.integers(0, 1000)), program,
    )  # fmt: skip


def chosen(strategy: Any, options: Callable[[Any], list[tuple[str, Any]]], count: int) -> list[Any]:
    """So many rows, the same in each run.

    Of many more those that have the most pairs of options together that no row before them has.
    """
    pool: list[Any] = []

    @given(strategy)
    @deterministic(3 * count + 200, phases=[Phase.generate])
    def collect(row: Any) -> None:
        pool.append(row)

    collect()
    found: list[Any] = []
    covered: set[tuple[Any, Any]] = set()
    pairs = {row: set(itertools.combinations(options(row), 2)) for row in pool}
    waiting = [(-len(own), place, row) for place, (row, own) in enumerate(pairs.items())]
    heapq.heapify(waiting)
    while len(found) < count and waiting:
        _, place, row = heapq.heappop(waiting)
        new = pairs[row] - covered  # what a row adds only becomes less
        if waiting and -len(new) > waiting[0][0]:
            heapq.heappush(waiting, (-len(new), place, row))
            continue
        covered |= new
        found.append(row)
    return found


def drawn(has: Has, count: int) -> list[Row]:
    """So many rows of a front end; see ``chosen``."""
    return chosen(rows(has), options_of, count)


def each(run: Callable[[Any], None], rows: Iterable[Any]) -> None:
    """``run`` of each row; what fails says of which."""
    for row in rows:
        try:
            run(row)
        except Exception as error:
            raise AssertionError(f"{row!r}: {error}") from error


def options_of(row: Row) -> list[tuple[str, Any]]:
    """What a row has of the table, in one order for all."""
    plain = ("worlds", "op", "compression", "predivide", "passes", "program", "sharded", "resumed")
    found = [(name, getattr(row, name)) for name in plain]
    found += [("groups", type(row.groups).__name__), ("several", len(row.parameters) > 1)]
    found += [("dtypes", dtype) for dtype in sorted({p.dtype for p in row.parameters})]
    found += [("way", way) for way in sorted({step.way for step in row.steps})]
    table = any(p.is_table for p in row.parameters)
    return [*found, ("table", (table, row.as_dense)), ("absent", any(s.absent for s in row.steps))]
