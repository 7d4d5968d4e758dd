"""What the project wants of these figures, as data, and whether a run reached it.

The goals are ratios within one run in one mode of the machine; a missed one is shown as missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from report import number, size_name, table, times

KIB, MIB = 1 << 10, 1 << 20

Cells = Mapping[tuple[str, int], Mapping[str, Any]]
"""(what, bytes) -> column -> summary in microseconds, for one number of ranks in one mode."""

AT_LEAST: Mapping[int, Mapping[int, tuple[float, float | None]]] = {
    # ranks: bytes: (times the better MPI, times gloo)
    2: {
        64 * KIB: (1.0, 20.0),
        MIB: (1.5, 8.0),
        16 * MIB: (1.8, 8.0),
        64 * MIB: (3.5, 6.0),
        256 * MIB: (3.5, 6.0),
    },
    4: {MIB: (1.5, None), 64 * MIB: (3.0, None)},
}
VERBS = ("broadcast", "allgather", "alltoall", "reducescatter")
VERBS_FROM = MIB  # from here on at least level with the better MPI
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
TCP_FASTER_FROM = MIB  # below: not slower than gloo
SHARE_OF_BOUND = {"near": 0.70, "far": 0.40}  # np=2, 64 and 256 MiB
SMALL_BYTES, SMALL_US, SMALL_TIMES_GLOO = 4 * KIB, 10.0, 15.0
MANY_ASYNC_US = 3000.0
P90_TIMES_MEDIAN = 5.0  # np=4, every size
HOOK_US = 3.0
ADDED_MS = 3.0  # to a step with 500 small parameters
ALONE_SHARE = 0.01  # of a step, in a world of one
OVERHEAD_SHARE_OF_DDP = 1 / 3
NOISE = 0.03  # faster than without communication by more than this: measured badly

Row = tuple[str, str, str, bool]
"""What, measured, wanted, reached."""


def median(cell: Mapping[str, Any], column: str) -> float | None:
    """Return the column's median in this cell, or None when it was not measured."""
    return cell[column]["median"] if column in cell else None


def ratio(over: float | None, under: float | None) -> float | None:
    """Divide; None when either is missing."""
    return None if over is None or not under else over / under


def better_mpi(cell: Mapping[str, Any]) -> float | None:
    """Return the smaller of the medians of the MPIs that were measured."""
    found = [value for mpi in ("openmpi", "mpich") if (value := median(cell, mpi)) is not None]
    return min(found, default=None)


def _at_least(what: str, value: float | None, wanted: float) -> Iterator[Row]:
    if value is not None:
        yield what, times(value), f"at least {times(wanted)}", value >= wanted


def _small(cells: Cells) -> Iterator[Row]:
    for (what, size), cell in cells.items():
        if what != "allreduce" or size > SMALL_BYTES:
            continue
        for column, name in (("kolovod", "NumPy"), ("kolovod-torch", "torch")):
            mine = median(cell, column)
            if mine is not None:
                label = f"blocking from {name}, {size_name(size)}"
                yield label, f"{number(mine)} us", f"at most {SMALL_US:g} us", mine <= SMALL_US
                gloo = ratio(median(cell, "gloo"), mine)
                yield from _at_least(f"{label}, over gloo", gloo, SMALL_TIMES_GLOO)


def by_elements(cells: Cells) -> dict[int, dict[str, Mapping[str, Any]]]:
    """Return columns, by number of elements and dtype, of the cells that compare dtypes."""
    found: dict[int, dict[str, Mapping[str, Any]]] = {}
    for (what, size), cell in cells.items():
        if what in ITEM_BYTES:
            found.setdefault(size // ITEM_BYTES[what], {})[what] = cell
    return found


def _dtypes(cells: Cells) -> Iterator[Row]:
    for elements, by_dtype in by_elements(cells).items():
        full = median(by_dtype.get("float32", {}), "kolovod-torch")
        for dtype in ("float16", "bfloat16"):
            speed = ratio(full, median(by_dtype.get(dtype, {}), "kolovod-torch"))
            label = f"{dtype}, {elements:,} elements: per second, over float32"
            yield from _at_least(label, speed, 1.0)


def _verbs(cells: Cells) -> Iterator[Row]:
    for (what, size), cell in cells.items():
        if what in VERBS and size >= VERBS_FROM:
            speed = ratio(better_mpi(cell), median(cell, "kolovod"))
            yield from _at_least(f"{what}, {size_name(size)}, over the better MPI", speed, 1.0)


def _tcp(cells: Cells) -> Iterator[Row]:
    for (what, size), cell in cells.items():
        speed = ratio(median(cell, "gloo"), median(cell, "kolovod-tcp"))
        if speed is None or (what != "allreduce" and what not in VERBS):
            continue
        label = f"{what} over TCP, {size_name(size)}, over gloo"
        faster = size >= TCP_FASTER_FROM
        wanted = f"{'more than' if faster else 'at least'} {times(1.0)}"
        yield label, times(speed), wanted, speed > 1.0 or (speed == 1.0 and not faster)


def _many(cells: Cells) -> Iterator[Row]:
    by_what = {what: cell for (what, _), cell in cells.items()}
    asynchronous = median(by_what.get("async", {}), "kolovod")
    if asynchronous is not None:
        reached = asynchronous <= MANY_ASYNC_US
        wanted = f"at most {number(MANY_ASYNC_US)} us"
        yield "many small tensors, asynchronous", f"{number(asynchronous)} us", wanted, reached
    grouped = median(by_what.get("grouped", {}), "kolovod")
    mpi = better_mpi(by_what.get("calls", {}))
    if grouped is not None and mpi is not None:
        wanted = f"under {number(mpi)} us (the better MPI's calls)"
        yield "many small tensors, one grouped call", f"{number(grouped)} us", wanted, grouped < mpi


def collective_rows(np: int, mode: str, cells: Cells) -> list[Row]:
    """Return every goal that this run can judge."""
    rows: list[Row] = []
    if np == 2:
        rows += _small(cells)
    for size, (mpi_times, gloo_times) in AT_LEAST.get(np, {}).items():
        cell = cells.get(("allreduce", size), {})
        mine = median(cell, "kolovod")
        name = size_name(size)
        rows += _at_least(f"{name}, over the better MPI", ratio(better_mpi(cell), mine), mpi_times)
        if gloo_times is not None:
            rows += _at_least(f"{name}, over gloo", ratio(median(cell, "gloo"), mine), gloo_times)
        share = ratio(median(cell, "inplace"), mine)
        if np == 2 and size >= 64 * MIB and share is not None and mode in SHARE_OF_BOUND:
            least = SHARE_OF_BOUND[mode]
            label = f"{name}, share of the in-place bound"
            rows.append((label, f"{share:.0%}", f"at least {least:.0%}", share >= least))
    if np == 2:
        rows += _many(cells)
    rows += [*_verbs(cells), *_dtypes(cells), *_tcp(cells)]
    if np == 4:
        for (what, size), cell in cells.items():
            if what == "allreduce" and "kolovod" in cell:
                spread = cell["kolovod"]["p90"] / cell["kolovod"]["median"]
                label = f"{size_name(size)}, p90 over median"
                wanted = f"at most {times(P90_TIMES_MEDIAN)}"
                rows.append((label, times(spread), wanted, spread <= P90_TIMES_MEDIAN))
    return rows


def training_rows(model: str, medians: Mapping[str, float]) -> list[Row]:
    """Return the goals of one model; ``medians``: kind -> ms per step."""
    return [*_ddp_row(model, medians), *_kolovod_rows(model, medians)]


def _ddp_row(model: str, medians: Mapping[str, float]) -> Iterator[Row]:
    if {"ddp", "ddp-kolovod"} <= medians.keys():
        gloo, mine = medians["ddp"], medians["ddp-kolovod"]
        label = f"{model}, ms per step with DDP over Kolovod"
        yield label, number(mine), f"under {number(gloo)} over gloo", mine < gloo


def _kolovod_rows(model: str, medians: Mapping[str, float]) -> list[Row]:
    if not {"alone", "ddp", "kolovod"} <= medians.keys():
        return []
    ddp, mine, alone = medians["ddp"], medians["kolovod"], medians["alone"]
    faster = (f"{model}, ms per step", number(mine), f"under DDP's {number(ddp)}", mine < ddp)
    wanted = f"at most {OVERHEAD_SHARE_OF_DDP:.0%}"
    overhead = f"{model}, communication overhead as a share of DDP's"
    if ddp <= alone or mine < (1 - NOISE) * alone:
        return [faster, (overhead, "too noisy to tell", wanted, False)]
    share = (mine - alone) / (ddp - alone)
    return [faster, (overhead, f"{share:.0%}", wanted, share <= OVERHEAD_SHARE_OF_DDP)]


def overhead_rows(hook_us: float, added_ms: float | None, alone_share: float) -> list[Row]:
    """Return the goals of bench/overhead.py."""
    rows = [
        ("a gradient's hook", f"{number(hook_us)} us", f"at most {HOOK_US:g} us",
         hook_us <= HOOK_US),
        ("a step's cost in a world of one", f"{alone_share:+.2%}", f"under {ALONE_SHARE:.0%}",
         alone_share < ALONE_SHARE),
    ]  # fmt: skip
    if added_ms is not None:
        rows.insert(1, ("what 500 small parameters add to a step", f"{added_ms:.2f} ms",
                        f"at most {ADDED_MS:g} ms", added_ms <= ADDED_MS))  # fmt: skip
    return rows


def goals_table(rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    return table(
        ("goal", "measured", "wanted", "reached"),
        [(*texts, "yes" if reached else "**no**") for *texts, reached in rows],
    )
