"""The benchmarks: they check what they measure, write their files, and drop a broken peer by name.

Sizes are tiny and nothing here looks at a speed.
"""

import functools
import json
import os
import subprocess
import sys
from xml.etree import ElementTree

import chart
import collectives
import collectives_report
import gangs
import goals
import machine
import numpy as np
import overhead
import pytest
import report
import training
from paths import BENCH
from peers import Peer
from worker import SLOT, Barrier, Data, Layout, Measurer

pytestmark = pytest.mark.slow

TIMEOUT_S = 110


def run_bench(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)


class Fake(Peer):
    """A world of one whose verbs add ``error`` to the first element."""

    rank, size = 0, 1

    def __init__(self, error: int, wants_output: bool) -> None:
        self._error, self.wants_output = error, wants_output

    def call(self, front, verb):
        def call(array, out):
            if verb in Layout.IN_PLACE:
                array[0] += self._error
                return None
            result = array.copy() if out is None else out
            result[:] = array
            result[0] += self._error
            return result if out is None else None

        return call

    def close(self):
        pass


@pytest.fixture
def barrier(tmp_path):
    path = tmp_path / "barrier"
    path.write_bytes(bytes(8 * SLOT))
    return Barrier(path, 0, 1)


@pytest.mark.parametrize("wants_output", [False, True])
@pytest.mark.parametrize("what", ["many", "allreduce", *goals.VERBS])
@pytest.mark.parametrize("error", [0, 1])
def test_a_wrong_element_is_counted(barrier, what, error, wants_output):
    measurer = Measurer(Fake(error, wants_output), barrier, seed=3)
    command = {"do": "verb", "verb": what, "front": "numpy", "dtype": "float32"}
    if what == "many":
        command = {**command, "do": "many", "way": "calls"}
        del command["verb"]
    sizes = {"bytes": 400, "ops": 5, "iterations": 4, "warmup": 2}
    answer = measurer.answer({**command, **sizes})
    assert answer["checked"] == 5 * 6
    assert answer["wrong"] == error * 5 * 6
    assert len(answer["starts"]) == len(answer["ends"]) == 4
    assert all(end >= start for start, end in zip(answer["starts"], answer["ends"], strict=True))


def test_every_verb_has_its_own_right_result():
    """What the verbs give three ranks, from what NumPy makes of their buffers."""
    size, count = 3, 12
    for verb in ("allreduce", *goals.VERBS):
        layouts = [Layout(verb, rank, size, count) for rank in range(size)]
        data = Data(size, seed=5)
        data.reserve(count)
        places = data.places(1)[0]
        buffers = [np.empty(layout.given, np.float32) for layout in layouts]
        for buffer, place in zip(buffers, places, strict=True):
            data.fill(buffer, place)
        results = {
            "allreduce": lambda b: [np.sum(b, axis=0)] * size,
            "broadcast": lambda b: [b[0]] * size,
            "allgather": lambda b: [np.concatenate(b)] * size,
            "alltoall": lambda b: list(
                np.reshape(b, (size, size, -1)).swapaxes(0, 1).reshape(size, -1)
            ),
            "reducescatter": lambda b: np.split(np.sum(b, axis=0), size),
        }[verb](buffers)
        for layout, result in zip(layouts, results, strict=True):
            assert layout.wrong(data, result, places) == 0
            assert layout.wrong(data, result[1:], places) == layout.taken
            result = result.copy()
            result[-1] += 1
            assert layout.wrong(data, result, places) == 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint8", "int64"])
def test_data_is_fresh_and_its_sum_exact(dtype):
    count, size = 70_000, 3  # more than one block of the check
    ranks = [Data(size, seed=5) for _ in range(size)]
    seen = []
    for _ in range(2):
        buffers = []
        for rank, data in enumerate(ranks):
            data.reserve(count)
            places = data.places(1)[0]
            buffers.append(np.empty(count, data.use(dtype)))
            data.fill(buffers[-1], places[rank])
        if dtype == "bfloat16":
            wide = [(buffer.astype(np.uint32) << 16).view(np.float32) for buffer in buffers]
            total = (np.sum(wide, axis=0).view(np.uint32) >> 16).astype(np.uint16)
        else:
            total = np.sum(buffers, axis=0, dtype=dtype)
        assert ranks[0].wrong(total, places) == 0
        total[-1] += 1
        assert ranks[0].wrong(total, places) == 1
        seen.append(buffers)
    assert not np.array_equal(seen[0][0], seen[1][0])
    assert not np.array_equal(seen[0][0], seen[0][1])


def test_statistics():
    assert report.quantile([5, 1, 4, 2, 3], 0.5) == 3
    assert report.quantile(list(range(1, 11)), 0.9) == 9
    assert report.quantile([7], 0.9) == 7
    answers = [{"starts": [10, 100], "ends": [30, 150]}, {"starts": [12, 90], "ends": [20, 160]},
               {"starts": [], "ends": []}]  # fmt: skip
    assert report.spans(answers, 10.0) == [2.0, 7.0]


def test_a_result_file_has_a_record_in_each_line(tmp_path):
    records = [{"number": i, "us": {"median": i / 3}, "of": "x" * 99} for i in range(9)]
    result = {"command": "python", "none": [], "records": records, "text": 'a "word"\n' * 99}
    report.write("some", result, "", tmp_path)
    text = (tmp_path / "some.json").read_text()
    assert json.loads(text) == result
    lines = [line.strip(" ,") for line in text.splitlines()]
    assert len(lines) == 7 + len(records)
    assert set(map(json.dumps, records)) < set(lines)


def test_the_page_is_filled_between_its_markers(tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    with pytest.raises(ValueError, match="no results"):
        report.update_page(tmp_path, page)
    for name in ("collectives", "training"):
        report.write(name, {"short": [f"table of {name}"]}, "", tmp_path)
    for _ in range(2):  # again: the same text
        report.update_page(tmp_path, page)
        tables = "table of collectives\n\ntable of training"
        wanted = f"above\n{report.BEGIN}\n{tables}\n{report.END}\nbelow\n"
        assert page.read_text() == wanted
    with pytest.raises(ValueError, match="bench:begin"):
        report.between_markers("a page without a place", "table")


def test_the_real_page_and_chart_show_the_real_results():
    text = report.PAGE.read_text()
    assert text == report.between_markers(text, report.short_tables())
    result = json.loads((report.RESULTS / "collectives.json").read_text())
    groups = collectives_report.groups_of(result)
    assert result["short"] == collectives_report.short(groups, result["machine"]).splitlines()
    assert chart.CHART.read_text() == chart.svg(result)
    ElementTree.fromstring(chart.CHART.read_text())


def cells_of(mode, what, size, **medians):
    return [{"np": 2, "mode": mode, "what": what, "bytes": size, "column": column.replace("_", "-"),
             "us": {"median": us, "p90": us}} for column, us in medians.items()]  # fmt: skip


def test_a_size_that_the_shown_mode_lacks_comes_from_another():
    cells = [
        *cells_of("near", "allreduce", 4, kolovod=8.0, gloo=400.0, mpich=2.0, kolovod_tcp=50.0),
        *cells_of("near", "allreduce", 1 << 20, gloo=9.0, mpich=9.0),  # too noisy for Kolovod
        *cells_of("near", "broadcast", 1 << 20, kolovod=2.0, mpich=1.0),
        *cells_of("mixed", "allreduce", 1 << 20, kolovod=1.0, gloo=9.0),
        *cells_of("mixed", "broadcast", 64 << 20, kolovod=2.0, gloo=6.0),
        *cells_of("far", "allreduce", 1 << 20, kolovod=100.0, gloo=200.0, mpich=150.0),
    ]
    groups = collectives_report.groups_of({"cells": cells})
    facts = {"date": "2026-11-23", "cpu": "x", "cores": 2, "kernel": "6", "python": "3.11"}
    text = collectives_report.short(groups, facts)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[1].startswith("| 4 B | 8.00 |")
    assert rows[1].endswith("| 0.25x | 50.0x | 8.00x | - |")
    assert rows[2].startswith("| 1 MiB (far) | 100 |")  # of one mode, rather than of a mixed one
    assert rows[4:6] == ["| broadcast, 1 MiB | 0.50x | - | - |",
                         "| broadcast, 64 MiB (mixed) | - | 3.00x | - |"]  # fmt: skip
    wanted = "| broadcast, 1 MiB, over the better MPI | 0.50x | at least 1.00x |"
    assert rows[6].startswith("| missed, of ")
    assert rows[7:] == [wanted]
    points = chart.points({"cells": cells})
    assert points["gloo"] == [(4, 50.0, False), (1 << 20, 2.0, True)]
    assert points["the faster MPI"] == [(4, 0.25, False), (1 << 20, 1.5, True)]
    picture = chart.svg({"cells": cells, "machine": facts})
    assert picture.count(" hollow") == 3  # two points, and the style


@pytest.mark.parametrize(("mine", "reached"), [(10.0, True), (40.0, False)])
def test_a_missed_goal_is_shown_as_missed(mine, reached):
    cell = {name: {"median": us, "p90": us} for name, us in
            {"kolovod": mine, "openmpi": 50.0, "mpich": 60.0, "gloo": 900.0}.items()}  # fmt: skip
    rows = goals.collective_rows(2, "near", {("allreduce", 1 << 20): cell})
    assert [row[3] for row in rows] == [reached, True]
    assert ("**no**" in goals.goals_table(rows)) is not reached


@pytest.mark.parametrize(("mine", "reached"), [(10.0, True), (40.0, False)])
def test_goals_of_verbs_dtypes_and_tcp(mine, reached):
    def verdicts(cells):
        return [row[3] for row in goals.collective_rows(3, "near", cells)]

    verb = {"kolovod": {"median": mine}, "mpich": {"median": 30.0}}
    assert verdicts({("alltoall", 1 << 20): verb, ("alltoall", 1 << 19): verb}) == [reached]
    by_dtype = {("float32", 400): 20.0, ("float16", 200): mine, ("bfloat16", 200): mine}
    halves = {key: {"kolovod-torch": {"median": us}} for key, us in by_dtype.items()}
    assert verdicts(halves) == [reached] * 2
    tcp = {"kolovod-tcp": {"median": mine}, "gloo": {"median": 30.0}}
    assert verdicts({("allreduce", 4): tcp, ("broadcast", 1 << 20): tcp}) == [reached] * 2
    level = {"kolovod-tcp": {"median": 30.0}, "gloo": {"median": 30.0}}
    assert verdicts({("allreduce", 4): level, ("allreduce", 1 << 20): level}) == [True, False]


def test_training_goals():
    rows = goals.training_rows("net", {"alone": 100.0, "ddp": 130.0, "kolovod": 115.0})
    assert [(row[1], row[3]) for row in rows] == [("115", True), ("50%", False)]
    rows = goals.training_rows("net", {"alone": 100.0, "ddp": 130.0, "kolovod": 90.0})
    assert [(row[1], row[3]) for row in rows] == [("90.0", True), ("too noisy to tell", False)]


def test_a_failing_rank_is_named_and_no_process_is_left(tmp_path):
    gang = gangs.Gang("local", 2, tmp_path)
    pids = [process.pid for process in gang._processes]
    with pytest.raises(gangs.GangError, match=r"(?s)local, np=2.*do_nothing"):
        gang.ask(30.0, do="nothing")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_peer_that_cannot_start_says_why(tmp_path, monkeypatch):
    command = [sys.executable, "-c", "raise SystemExit('no such engine')"]
    monkeypatch.setattr(gangs, "_commands", lambda peer, np: [(command, {})])
    with pytest.raises(gangs.GangError, match=r"(?s)gloo ended with \[1\].*no such engine"):
        gangs.Gang("gloo", 2, tmp_path)


def test_overhead_goals():
    rows = goals.overhead_rows(2.0, 3.5, -0.02)
    assert [row[3] for row in rows] == [True, False, True]
    assert [row[3] for row in goals.overhead_rows(3.1, None, 0.011)] == [False, False]


def test_worlds_of_many_ranks_are_simulated(tmp_path):
    """There is a bound (docs/design/network.md): 3 messages for each of 5 connections."""
    ended = run_bench("scale.py", "--sizes", "2", "64", "--steps", "10", "--output", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    small, large = json.loads((tmp_path / "scale.json").read_text())["worlds"]
    assert (small["ranks"], small["connections"]) == (2, 1)
    assert abs(small["messages"] - 3) <= 0.3
    assert large["ranks"] == 64
    assert large["messages"] <= 15 * 1.1  # some of the step before or after
    assert abs(large["mean_messages"] - 6 * 63 / 64) <= 0.6
    assert 1 <= large["connections"] <= 8
    assert "| 64 |" in (tmp_path / "scale.md").read_text()
    assert "<polyline" in (tmp_path / "scale.svg").read_text()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Ranks of every peer, for all benchmarks: importing PyTorch takes longer than measuring."""
    folder, made = tmp_path_factory.mktemp("gangs"), {}
    try:
        for peer in (
            "local",
            "gloo",
            "kolovod",
            "kolovod-tcp",
            "kolovod-under-torch",
            "kolovod-unwatched",
        ):
            made[peer] = gangs.Gang(peer, 2, folder)
        yield made
    finally:
        for gang in made.values():
            gang.close()


class Lent:
    """A gang that is kept when a benchmark has no more questions."""

    def __init__(self, gang):
        self.ask = gang.ask

    def close(self):
        pass


@pytest.fixture
def lent(kept, monkeypatch):
    """Benchmarks find the ranks that are there already, and look at the mode once."""

    def gang(peer, np, scratch):
        return Lent(kept[peer]) if np == 2 else gangs.Gang(peer, np, scratch)

    for script in (collectives, overhead, training):
        monkeypatch.setattr(script, "Gang", gang)
    monkeypatch.setattr(machine, "one_way_ns", functools.cache(machine.one_way_ns))


@pytest.mark.parametrize("script", ["collectives.py", "overhead.py", "training.py"])
def test_each_is_a_command(script):
    done = run_bench(script, "--help")
    assert (done.returncode, done.stdout[:6]) == (0, "usage:"), done.stderr


@pytest.mark.slow
def test_collectives_write_verified_results(tmp_path, lent):
    names = ["kolovod", "kolovod-torch", "kolovod-tcp", "gloo", "memcpy", "inplace"]
    code = collectives.main([
        "--np", "2", "--sizes", "8,65536", "--many", "8", "--rounds", "1",
        "--budget-s", "0.01", "--peers", ",".join(names), "--output", str(tmp_path),
    ])  # fmt: skip
    assert code == 0
    result = json.loads((tmp_path / "collectives.json").read_text())
    assert result["wrong"] == dict.fromkeys(names[:4], 0)
    assert min(result["checked"].values()) > 0
    cells = {(cell["what"], cell["bytes"], cell["column"]): cell["us"] for cell in result["cells"]}
    expected = {("allreduce", size, name) for size in (8, 65536) for name in names}
    expected.remove(("allreduce", 65536, "kolovod-torch"))
    expected |= {(way, 4096, "kolovod") for way in ("calls", "async", "grouped")}
    expected |= {(way, 4096, "gloo") for way in ("calls", "async")}
    expected |= {
        (verb, size, name)
        for verb in goals.VERBS
        for size in (8, 65536)
        for name in ("kolovod", "kolovod-tcp", "gloo")
    }
    expected |= {
        (dtype, elements * item, name)
        for dtype, item in goals.ITEM_BYTES.items()
        for elements in (2, 16384)
        for name in ("kolovod-torch", "gloo")
    }
    assert set(cells) == expected
    assert all(0 < us["min"] <= us["median"] <= us["p90"] <= us["max"] for us in cells.values())
    text = (tmp_path / "collectives.md").read_text()
    assert "over gloo" in text
    for wanted in ("alltoall, 64 KiB", "| 16,384 |", "allgather over TCP, 8 B, over gloo"):
        assert wanted in text
    assert result["rounds"][0]["mode"] in text


@pytest.mark.slow
@pytest.mark.thorough
def test_training_runs_and_equals_ddp(tmp_path, lent):
    arguments = ["--models", "mlp", "--rounds", "1", "--steps", "2", "--output", str(tmp_path)]
    assert training.main(arguments) == 0
    result = json.loads((tmp_path / "training.json").read_text())
    assert set(result["models"]["mlp"]["ms"]) == {
        "single",
        "alone",
        "ddp",
        "ddp-kolovod",
        "kolovod",
        "kolovod-unwatched",
    }
    assert result["digests"]["mlp/kolovod"] == result["digests"]["mlp/ddp"]


@pytest.mark.slow
@pytest.mark.thorough
def test_overhead_finds_no_hook_in_a_world_of_one(tmp_path, lent):
    assert overhead.main(["--rounds", "1", "--steps", "2", "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "overhead.json").read_text())
    assert set(result["step_ms"]) == {"alone", "ddp", "kolovod"}
    assert result["hook_us"]["samples"] == 4
    assert result["alone"]["ours"]["samples"] == 16
    assert "a gradient's hook" in (tmp_path / "overhead.md").read_text()
