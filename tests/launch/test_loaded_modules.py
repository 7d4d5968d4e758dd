"""What a command of ours loads: each launcher, agent and daemon pays for it at its start."""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded(code: str) -> set[str]:
    """What is loaded after ``code``, in a process of its own."""
    code = f"import sys\n{code}\nprint('loaded', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.rpartition("loaded")[2].split())


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] in ("kolovod", "horovod")}


def test_a_command_loads_only_itself() -> None:
    call = "from kolovod.launch.cli import main\ntry: main(['--version'])\nexcept SystemExit: pass"
    modules = loaded(call)
    assert len(ours(modules)) <= 15
    assert "numpy" not in modules
    explaining = loaded("from kolovod.launch.cli import main\nmain(['explain', 'K201'])")
    assert not {m for m in ours(explaining) if m.endswith("_command")} - {
        "kolovod.launch.explain_command"
    }


@pytest.mark.parametrize("name", ["run_command", "attach_command", "agent", "resume", "job_daemon"])
def test_what_starts_ranks_needs_no_numpy(name: str) -> None:
    assert "numpy" not in loaded(f"import kolovod.launch.{name}")


def test_the_package_brings_what_is_asked_for() -> None:
    assert "numpy" not in loaded("import kolovod")
    assert "numpy" not in loaded("import kolovod\nkolovod.errors.RankLostError")
    brought = loaded("import kolovod\nkolovod.init")
    assert "numpy" in brought
    # A process of an elastic job knows that it is one.
    assert "kolovod.elastic.job_membership" in brought


def test_all_names_are_there_however_they_are_asked_for() -> None:
    loaded(
        "import kolovod\n"
        "from kolovod import *\n"
        "assert allreduce is kolovod.allreduce is kolovod.numpy.allreduce\n"
        "assert init is kolovod.init and Compression.int8 and errors and run\n"
        "assert {*kolovod.__all__} <= {*dir(kolovod)}\n"
        "assert [getattr(kolovod, name) for name in dir(kolovod)]\n"
        "from kolovod import elastic\n"
        "assert all(getattr(elastic, name) for name in elastic.__all__)\n"
        "assert kolovod.elastic.run is elastic.run\n"
        "assert not hasattr(kolovod, 'no_such_name') and not hasattr(elastic, 'no_such_name')"
    )
