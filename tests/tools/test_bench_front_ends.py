"""bench/front_ends.py measures and checks what it says, shortened."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import front_ends
import gangs
import pytest
from forked import run_keras_ranks, run_torch_ranks
from frameworks import is_installed
from paths import BENCH

pytestmark = pytest.mark.frameworks


def be_rank(rank, commands, environment):
    """What the command of this rank would do, in a process that has imported the framework."""
    (_, script, way), extra = commands[rank]
    os.environ.update({**environment, **extra})
    sys.path.insert(0, str(BENCH))
    sys.argv = [script, way]
    runpy.run_path(script, run_name="__main__")


class Forked(gangs.Gang):
    """Ranks that are forked, which saves six imports of the framework."""

    run_ranks: Callable[..., list[object]]

    def _launch(self, commands, environment):
        if len(commands) == 1:  # by the launcher
            ((command, extra),) = commands
            commands = [(command[command.index("--") + 1 :], extra)] * self.np
        told = {name: value for name, value in environment.items() if name.startswith("BENCH_")}
        arguments = (self.np, be_rank, commands, told)
        self._thread = threading.Thread(target=type(self).run_ranks, args=arguments)
        self._thread.start()

    def close(self):
        for rank in self._ranks:
            rank.connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(gangs.GRACE_S)
        self.kill()


def options(framework, folder):
    chosen = ["--frameworks", framework, "--models", "mid", "--rounds", "1", "--steps", "2"]
    return [*chosen, "--quick", "--output", str(folder)]


def check(framework, folder):
    """Each way is measured, and Kolovod and the framework's own come to the same weights."""
    found = json.loads((folder / "front_ends-quick.json").read_text())[framework]
    assert all(found["ms"][f"mid/{way}"]["samples"] == 2 for way in ("alone", "own", "kolovod"))
    assert found["distance"]["mid/kolovod"] < 1e-3
    assert found["distance"]["mid/alone"] > 1e-2  # so that the check could fail


@pytest.mark.slow
@pytest.mark.thorough
def test_a_short_run_with_jax(tmp_path):
    """As a user starts it."""
    if not hasattr(pytest.importorskip("jax"), "shard_map"):
        pytest.skip("this JAX has no jax.shard_map, which its own way is written with")
    done = subprocess.run(
        [sys.executable, str(BENCH / "front_ends.py"), *options("jax", tmp_path)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    check("jax", tmp_path)


@pytest.mark.parametrize(
    ("framework", "run_ranks"),
    [
        pytest.param("tensorflow", run_keras_ranks, marks=pytest.mark.slow),
        ("torch", run_torch_ranks),
    ],
)
def test_a_short_run(tmp_path, monkeypatch, framework, run_ranks):
    if not is_installed(framework):
        pytest.skip(f"{framework} is not installed")
    monkeypatch.setattr(Forked, "run_ranks", staticmethod(run_ranks), raising=False)
    monkeypatch.setattr(front_ends, "Gang", Forked)
    assert front_ends.main(options(framework, tmp_path)) == 0
    check(framework, tmp_path)
