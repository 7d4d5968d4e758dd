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
    "gloo": "gloo",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "memcpy": "memcpy",
    "inplace": "bound",
}
RATIOS = ("over better MPI", "over gloo", "of the bound")
README_SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)

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
    share = goals.ratio(goals.median(cell, "inplace"), mine)
    return [
        times(goals.ratio(goals.better_mpi(cell), mine)),
        times(goals.ratio(goals.median(cell, "gloo"), mine)),
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


def _many_table(cells: goals.Cells, columns: list[str], count: int) -> str:
    words = {
        "calls": "one blocking call each",
        "async": "asynchronous, then wait for all",
        "grouped": "one grouped call",
    }
    rows = []
    for (what, size), cell in cells.items():
        if what != "allreduce":
            label = f"{count} x {size_name(size)}, {words[what]}"
            rows.append([label, *[_value(cell, column) for column in columns]])
    return table(["", *[PEER_NAMES[c] for c in columns]], rows) if rows else ""


def _readme(groups: Groups, facts: dict[str, Any], dtype: str) -> str:
    """The short table: 2 ranks, in the mode that most sizes were measured in."""
    at_two = {mode: cells for (np, mode), cells in groups.items() if np == 2}
    if not at_two:
        return ""
    mode, cells = max(at_two.items(), key=lambda item: len(item[1]))
    columns = ["kolovod", "openmpi", "mpich", "gloo"]
    rows = []
    for size in README_SIZES:
        cell = cells.get(("allreduce", size))
        if cell:
            medians = [number(goals.median(cell, column)) for column in columns]
            rows.append([size_name(size), *medians, *_ratios(cell)])
    head = ["allreduce", *[PEER_NAMES[c] for c in columns], *RATIOS]
    return (
        f"In-place sum of {dtype}, 2 processes on one host, called from Python; medians in "
        f"microseconds, mode {mode}. The bound: all processes read and write their buffer once.\n\n"
        f"{table(head, rows)}\n"
        f"({machine_line(facts)}; `make bench`, see bench/results/collectives.md)\n"
    )


def make(
    record: Record, facts: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    """The JSON and the Markdown of a run."""
    groups = _groups(record)
    command = machine.command_line()
    parts = [
        "# Allreduce, Kolovod and its peers\n",
        f"`{command}`: {machine_line(facts)}. In-place sum of {options.dtype}; microseconds, "
        "median (p90). How it was measured: the head of bench/collectives.py. Mode near: the cores "
        "share a cache; far: they do not. The bound: every rank reads and writes its buffer once, "
        "all at the same time.\n",
    ]
    for (np, mode), cells in groups.items():
        present = {column for cell in cells.values() for column in cell}
        columns = [column for column in PEER_NAMES if column in present]
        parts += [f"## np={np}, mode {mode}\n", _allreduce_table(cells, columns)]
        many_columns = [c for c in columns if c not in ("memcpy", "inplace", "kolovod-torch")]
        parts.append(_many_table(cells, many_columns, options.many))
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
        "dtype": options.dtype,
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
        "readme": _readme(groups, facts, options.dtype),
    }
    return result, "\n".join(part for part in parts if part)
