"""The tables of bench/collectives.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import goals
import machine
from report import machine_line, number, size_name, summary, table, times

if TYPE_CHECKING:
    import argparse

    from collectives import Record

PEER_NAMES = {
    "kolovod": "Kolovod",
    "kolovod-torch": "Kolovod (torch)",
    "kolovod-tcp": "Kolovod (TCP)",
    "gloo": "gloo",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "memcpy": "memcpy",
    "inplace": "bound",
}
WORDS_OF_WAY = {
    "calls": "one blocking call each",
    "async": "asynchronous, then wait for all",
    "grouped": "one grouped call",
}
RATIOS = ("over better MPI", "over gloo", "TCP over gloo", "of the bound")
SHORT_SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
SHORT_VERB_SIZES = (1 << 20, 64 << 20)
MIXED = "mixed"  # as machine.mode_of calls it
SHORT_COLUMNS = ("kolovod", "openmpi", "mpich", "gloo", "kolovod-tcp")

Groups = dict[tuple[int, str], dict[tuple[str, int], dict[str, Any]]]
"""(ranks, mode) -> (what, bytes) -> column -> summary."""


def _groups(record: Record) -> Groups:
    groups: Groups = {}
    for (np, mode, cell, column), rounds in record.samples.items():
        values = [value for one in rounds for value in one]
        found = {**summary(values), "round_medians": [summary(one)["median"] for one in rounds]}
        groups.setdefault((np, mode), {}).setdefault((cell.what, cell.bytes), {})[column] = found
    return groups


def _ratios(cell: Mapping[str, Any]) -> list[str]:
    mine = goals.median(cell, "kolovod")
    gloo = goals.median(cell, "gloo")
    share = goals.ratio(goals.median(cell, "inplace"), mine)
    return [
        times(goals.ratio(goals.better_mpi(cell), mine)),
        times(goals.ratio(gloo, mine)),
        times(goals.ratio(gloo, goals.median(cell, "kolovod-tcp"))),
        "-" if share is None else f"{share:.0%}",
    ]


def _value(cell: Mapping[str, Any], column: str) -> str:
    if column not in cell:
        return "-"
    return f"{number(cell[column]['median'])} ({number(cell[column]['p90'])})"


def _allreduce_table(cells: goals.Cells, columns: list[str]) -> str:
    rows = [
        [size_name(size), *[_value(cell, column) for column in columns], *_ratios(cell)]
        for (what, size), cell in sorted(cells.items(), key=lambda item: item[0][1])
        if what == "allreduce"
    ]
    return table(["size", *[PEER_NAMES[c] for c in columns], *RATIOS], rows)


def _verbs_table(cells: goals.Cells, columns: list[str]) -> str:
    rows = [
        [f"{what}, {size_name(size)}", *[_value(cell, c) for c in columns], *_ratios(cell)[:-1]]
        for (what, size), cell in cells.items()
        if what in goals.VERBS
    ]
    return (
        table(["verb, size", *[PEER_NAMES[c] for c in columns], *RATIOS[:-1]], rows) if rows else ""
    )


def _many_table(cells: goals.Cells, columns: list[str], count: int) -> str:
    rows = []
    for (what, size), cell in cells.items():
        if what in WORDS_OF_WAY:
            label = f"{count} x {size_name(size)}, {WORDS_OF_WAY[what]}"
            rows.append([label, *[_value(cell, column) for column in columns]])
    return table(["", *[PEER_NAMES[c] for c in columns]], rows) if rows else ""


def _dtypes_table(cells: goals.Cells) -> str:
    """Return torch's allreduce of equally many elements: by dtype Kolovod, and over gloo."""
    rows = []
    for elements, by_dtype in goals.by_elements(cells).items():
        row = [f"{elements:,}"]
        for dtype in goals.ITEM_BYTES:
            cell = by_dtype.get(dtype, {})
            mine = goals.median(cell, "kolovod-torch")
            row += [
                _value(cell, "kolovod-torch"),
                times(goals.ratio(goals.median(cell, "gloo"), mine)),
            ]
        rows.append(row)
    head = [text for dtype in goals.ITEM_BYTES for text in (dtype, "over gloo")]
    return table(["elements", *head], rows) if rows else ""


def short(groups: Groups, facts: dict[str, Any]) -> str:
    """Return the short tables: 2 ranks, in the mode that most sizes were measured in.

    A size that was not measured in that mode comes from another one, whose name stands in its row.
    """
    modes = modes_of_two(groups)
    if not modes:
        return ""
    shown = modes[0]
    rows = []
    for size in SHORT_SIZES:
        mode, cell = in_some_mode(groups, modes, ("allreduce", size))
        if cell:
            medians = [number(goals.median(cell, column)) for column in SHORT_COLUMNS]
            rows.append([_marked(size_name(size), mode, shown), *medians, *_ratios(cell)])
    head = ["allreduce", *[PEER_NAMES[c] for c in SHORT_COLUMNS], *RATIOS]
    return (
        f"In-place sum of float32, 2 processes on one host, called from Python; medians in "
        f"microseconds, mode {shown} unless the row names another (near: the two cores share a "
        f"cache; far: they do not). The bound: all processes read and write their buffer once. "
        f"TCP: over loopback, as if each process were on a host of its own.\n\n"
        f"{table(head, rows)}\n{_short_verbs(groups, modes)}\n{_missed(groups, shown)}\n"
        f"({machine_line(facts)}; `make bench`, see "
        f"[collectives.md](../bench/results/collectives.md))\n"
    )


def modes_of_two(groups: Groups) -> list[str]:
    """Return the modes that 2 ranks were measured in, the one with the most cells first.

    The last is "mixed", unless there is no other: there a ratio may be one of two modes.
    """
    found = {mode: len(cells) for (np, mode), cells in groups.items() if np == 2}
    return sorted(found, key=lambda mode: (mode == MIXED, -found[mode]))


def in_some_mode(
    groups: Groups, modes: list[str], key: tuple[str, int]
) -> tuple[str, dict[str, Any]]:
    """Return the first of these modes in which 2 ranks of Kolovod were measured so; its cell."""
    for mode in modes:
        cell = groups[2, mode].get(key, {})
        if "kolovod" in cell:
            return mode, cell
    return "", {}


def groups_of(result: Mapping[str, Any]) -> Groups:
    """Return the cells of collectives.json by ranks and mode."""
    groups: Groups = {}
    for cell in result["cells"]:
        cells = groups.setdefault((cell["np"], cell["mode"]), {})
        cells.setdefault((cell["what"], cell["bytes"]), {})[cell["column"]] = cell["us"]
    return groups


def _marked(name: str, mode: str, shown: str) -> str:
    return name if mode in ("", shown) else f"{name} ({mode})"


def _missed(groups: Groups, mode: str) -> str:
    """Return the goals that 2 ranks missed in this mode, as a table."""
    found = goals.collective_rows(2, mode, groups[2, mode])
    rows = [list(row[:3]) for row in found if not row[3]]
    if not rows:
        return f"All {len(found)} goals for 2 processes in mode {mode} were reached.\n"
    head = [f"missed, of {len(found)} goals for 2 processes in mode {mode}", "measured", "wanted"]
    return table(head, rows)


def _short_verbs(groups: Groups, modes: list[str]) -> str:
    rows = []
    for verb in goals.VERBS:
        for size in SHORT_VERB_SIZES:
            mode, cell = in_some_mode(groups, modes, (verb, size))
            if cell:
                name = _marked(f"{verb}, {size_name(size)}", mode, modes[0])
                rows.append([name, *_ratios(cell)[:-1]])
    return table(["times as fast", *RATIOS[:-1]], rows) if rows else ""


def make(
    record: Record, facts: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    """Return the JSON and the Markdown of a run."""
    groups = _groups(record)
    command = machine.command_line()
    parts = [
        "# Collectives, Kolovod and its peers\n",
        f"`{command}`: {machine_line(facts)}. float32 unless said; microseconds, median (p90). "
        "How it was measured: the head of bench/collectives.py. Mode near: the cores "
        "share a cache; far: they do not. The bound: every rank reads and writes its buffer once, "
        "all at the same time.\n",
    ]
    for (np, mode), cells in groups.items():
        present = {column for cell in cells.values() for column in cell}
        columns = [column for column in PEER_NAMES if column in present]
        parts += [f"## np={np}, mode {mode}\n", _allreduce_table(cells, columns)]
        others = [c for c in columns if c not in ("memcpy", "inplace", "kolovod-torch")]
        parts.append(_many_table(cells, [c for c in others if c != "kolovod-tcp"], options.many))
        parts += [_verbs_table(cells, others), _dtypes_table(cells)]
        rows = goals.collective_rows(np, mode, cells)
        if rows:
            parts.append(goals.goals_table(rows))
    total, wrong = sum(record.checked.values()), sum(record.wrong.values())
    parts.append(f"Results checked, every element: {total:,}; wrong elements: {wrong:,}.\n")
    head = ["round", "np", "mode", "cache line, ns", "load average", "steal, s"]
    rounds = [
        [str(one["round"]), str(one["np"]), one["mode"],
         " ".join("-" if look is None else f"{look:.0f}" for look in one["one_way_ns"]),
         "..".join(f"{value:.2f}" for value in one["loadavg"]), str(one["steal_s"])]
        for one in record.rounds
    ]  # fmt: skip
    parts.append(table(head, rounds))
    parts += [f"Dropped: {who}: {why.splitlines()[-1]}\n" for who, why in record.dropped.items()]
    result = {
        "command": command,
        "machine": facts,
        "rounds": record.rounds,
        "checked": dict(record.checked),
        "wrong": dict(record.wrong),
        "dropped": {who: why.splitlines()[-1] for who, why in record.dropped.items()},
        "cells": [
            {"np": np, "mode": mode, "what": what, "bytes": size, "column": column, "us": found}
            for (np, mode), cells in groups.items()
            for (what, size), cell in cells.items()
            for column, found in cell.items()
        ],
        "short": short(groups, facts).splitlines(),
    }
    return result, "\n".join(part for part in parts if part)
