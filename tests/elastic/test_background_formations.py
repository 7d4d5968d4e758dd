"""Worlds that form beside the present one: in whole jobs, and what becomes of those not used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launched import KOLOVOD
from waiting import until

from kolovod.background_formation import BackgroundFormation, Formation
from kolovod.errors import BootstrapError

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import kolovod.numpy as kv
from kolovod import elastic, lifecycle

slot, unable = int(os.environ["KOLOVOD_SLOT"]), sys.argv[2:]
hosts, taken = Path(sys.argv[1]), []
form, formations = lifecycle._form_world, lifecycle._process.formations
plain = formations.take

def noting(key):
    formation = plain(key)
    taken.append([len(key[-3]), formation is not None])
    return formation

def failing(environment, members, settings, place):
    if lifecycle.worlds.is_initialized() and str(slot) in unable:
        raise lifecycle.BootstrapError("no memory")
    return form(environment, members, settings, place)

formations.take, lifecycle._form_world = noting, failing
kv.init()
state = elastic.State(step=0, total=0.0, sizes=[])

@elastic.run
def train(state):
    while state.sizes != [1, 2, 3, 2]:
        state.total += elastic.exactly(lambda: kv.allreduce(1.0, "one", op=kv.Sum))
        state.step += 1
        size = kv.size()
        if state.sizes[-1:] != [size]:
            state.sizes = [*state.sizes, size]
            places = {1: 2, 2: 3, 3: 2}[size]
            if kv.rank() == 0 and len(state.sizes) < 4:
                hosts.with_suffix(".new").write_text(f"localhost:{places}\\n")
                hosts.with_suffix(".new").replace(hosts)
        state.commit()
        time.sleep(0.02)

train(state)
print(json.dumps([slot, state.step, state.total, taken]), flush=True)
"""


def grown(folder: Path, *unable: str) -> list[Any]:
    """What the two that are left at the end say of a job of 1, 2, 3 and 2 ranks."""
    hosts = folder / "hosts"
    hosts.write_text("localhost:1\n")
    command = [*KOLOVOD, "run", "-np", "1", "--max-np", "3"]
    command += ["--host-discovery-script", f"cat {hosts}", "--", sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        [*command, str(hosts), *unable], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads(text) for text in re.findall(r"\[\d+, \d+, .*\]\]\]", done.stdout)]
    assert len(said) == 2, done.stdout
    assert said[0][1:3] == said[1][1:3]
    return sorted(said)


@pytest.mark.slow
def test_ranks_enter_what_has_formed_ahead(tmp_path: Path) -> None:
    first, second = grown(tmp_path)
    assert first[3] == [[1, False], [2, True], [3, True], [2, True]]
    assert second[3][-3:] == [[2, True], [3, True], [2, True]]


@pytest.mark.slow
def test_what_one_rank_cannot_form_ahead_all_form_when_they_have_stopped(tmp_path: Path) -> None:
    first, second = grown(tmp_path, "0")
    assert first[3] == [[1, False], [2, False], [3, False], [2, False]]
    assert [taken for _, taken in second[3][-3:]] == [False, False, False]


class Engine:
    def __init__(self) -> None:
        self.is_shut_down = threading.Event()

    def shutdown(self) -> None:
        self.is_shut_down.set()


def formation(engine: Engine, closed: list[bool]) -> Formation:
    opening = SimpleNamespace(close=lambda: closed.append(True))
    return Formation(SimpleNamespace(engine=engine), {}, opening)  # type: ignore[arg-type]


def test_one_that_is_dropped_ends() -> None:
    engine, closed, done = Engine(), [], []
    ahead = BackgroundFormation("key", lambda: formation(engine, closed), done.append)
    ahead.drop(5.0)
    assert (done, closed, engine.is_shut_down.is_set()) == ([True], [True], True)
    ahead.drop(5.0)


def test_one_that_is_dropped_while_it_forms_ends_then() -> None:
    engine, closed, go = Engine(), [], threading.Event()

    def form() -> Formation:
        assert go.wait(10)
        return formation(engine, closed)

    ahead = BackgroundFormation("key", form, lambda works: None)
    ahead.drop()
    assert not engine.is_shut_down.is_set()
    go.set()
    assert engine.is_shut_down.wait(10)


def test_one_that_is_taken_lives() -> None:
    engine, closed = Engine(), []
    ahead = BackgroundFormation("key", lambda: formation(engine, closed), lambda works: None)
    taken = ahead.take()
    assert taken is not None
    ahead.drop(5.0)
    assert taken.world.engine is engine  # type: ignore[comparison-overlap]
    assert (closed, engine.is_shut_down.is_set()) == ([], False)


@pytest.mark.parametrize("error", [BootstrapError("rank 1 has ended"), OSError(24, "no files")])
def test_one_that_cannot_form_says_so(error: Exception) -> None:
    done: list[bool] = []

    def form() -> Formation:
        raise error

    ahead = BackgroundFormation("key", form, done.append)
    assert ahead.take() is None
    until(lambda: done)
    assert done == [False]


@pytest.mark.slow
def test_a_job_that_ends_while_a_world_forms_ends_well(tmp_path: Path) -> None:
    """The last step comes when a third process is there, and before its world is wanted."""
    code = f"""
import time
from pathlib import Path
import kolovod.numpy as kv
from kolovod import elastic, lifecycle
ahead = []
kv.init()
state = elastic.State(step=0)

def slowly(environment, members, settings, place, plain=lifecycle._form_world):
    formation = plain(environment, members, settings, place)
    ahead.append(place)
    time.sleep(0 if place.rank == 2 else 3600)
    return formation

lifecycle._form_world = slowly

@elastic.run
def train(state):
    ends = False
    while not ends:
        ends = bool(elastic.exactly(lambda: kv.allreduce(float(bool(ahead)), op=kv.Min)))
        state.step += 1
        if state.step == 3:
            Path("{tmp_path}/hosts").write_text("localhost:3\\n")
        state.commit()
        time.sleep(0.02)

train(state)
print("ended in a world of", kv.size())
"""
    (tmp_path / "hosts").write_text("localhost:2\n")
    command = [*KOLOVOD, "run", "-np", "2", "--max-np", "3"]
    command += ["--host-discovery-script", f"cat {tmp_path}/hosts", "--", sys.executable, "-c"]
    # Nobody waits for the world that is on its way.
    done = subprocess.run([*command, code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ended in a world of 2") == 2, done.stderr
    assert "Error" not in done.stderr, done.stderr
