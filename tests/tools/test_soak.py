"""`make soak-short`, for seconds, and what makes it fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soak
from drawn import NON_BLOCKING, VERBS, Draw
from paths import SUPPORT
from slow import THOROUGH

import kolovod
from kolovod.testing import loopback

SCRIPT = Path(soak.__file__)
# Arrays go back to the system when they are let go, so that what is resident is what is in use.
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "KOLOVOD_UNUSED_OUTPUT_BYTES": "0"}


# So that soak.py itself ends ranks that hang: killed, as after the timeout, it would leave them.
SLACK = ("--slack-s", "60")


def run_soak(*arguments, **variables):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, *SLACK],
        capture_output=True,
        text=True,
        timeout=115,  # 25 s, the slack, and 20 s until they have ended
        env={**os.environ, **variables},
    )


@pytest.mark.slow
@pytest.mark.parametrize(("size", "seconds"), [(2, 6), pytest.param(3, 25, marks=THOROUGH)])
def test_everything_is_right_and_memory_does_not_grow(size, seconds, tmp_path):
    done = run_soak(
        *("--np", str(size), "--seconds", str(seconds), "--folder", str(tmp_path)), **AT_ONCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("RssAnon does not grow") == size
    for rank in range(size):
        *_, last = soak.samples(tmp_path / str(rank))
        assert last["verified"] == last["started"] > 0


@pytest.mark.parametrize("blocking", [False, True])
def test_each_verb_is_right_and_its_check_sees_what_is_not(blocking):
    verbs = VERBS if blocking else NON_BLOCKING
    with loopback(2) as world:

        def work(kv):
            for number, verb in enumerate(verbs):
                draw = Draw(kv, [7, number], [0, 1], None if blocking else verb)
                task = draw.task(verb)
                result = task.start() if blocking else task.start().wait()
                task.check(result)
                if verb != "barrier":
                    with pytest.raises(AssertionError):
                        task.check(spoilt(result))

        world.run(work)


def spoilt(result):
    """Another value of the same kind."""
    if isinstance(result, np.ndarray):
        return (
            result ^ True if result.dtype == bool else result + 1 if result.size else result[None]
        )
    if isinstance(result, dict):
        return {**result, "of": -1}
    if isinstance(result, list | tuple):
        return type(result)([spoilt(result[0]), *result[1:]])
    return None


def sampled(anon_mib):
    """A minute's samples."""
    seconds = range(61)
    return [{"s": float(s), "RssAnon": anon_mib(s) * 1024.0} for s in seconds]


def test_growth_is_what_goes_on_after_the_first_half():
    assert not soak.growth(0, sampled(lambda s: 100))[0]
    assert not soak.growth(0, sampled(lambda s: min(80 + 20 * s, 400)))[0]  # a pool that is full
    assert not soak.growth(0, sampled(lambda s: 100 + 300 * (s % 7 == 0)))[0]  # peaks
    too_much, text = soak.growth(3, sampled(lambda s: 80 + 7 * s))
    assert too_much
    assert "rank 3: RssAnon grows" in text
    assert soak.growth(0, sampled(lambda s: 80)[:2])[0]  # nothing to tell from


WRONG = """
import sys, kolovod.numpy, numpy
right = kolovod.numpy.collectives.allreduce_async
class Wrong:
    def __init__(self, handle): self.handle = handle
    def wait(self):
        result = self.handle.wait()
        result[...] = result + 1
        return result
def wrong(tensor, *args, **kwargs):
    return Wrong(right(tensor, *args, **kwargs))
kolovod.numpy.collectives.allreduce_async = wrong
sys.path.insert(0, sys.argv.pop(1))
import soaking
soaking.main()
"""
HANGS = """
import os, sys, time
sys.path.insert(0, sys.argv.pop(1))
import soaking
soaking.HANG_S = 3.0
soaking.Soak.round = lambda self, number: time.sleep(100) if number == 3 else None
soaking.main()
"""
HANGS_AT_THE_END = """
import sys, time
sys.path.insert(0, sys.argv.pop(1))
import kolovod, soaking
soaking.HANG_S = 3.0
soaking.Soak.run = lambda self, seconds: None
kolovod.shutdown = lambda: time.sleep(100)
soaking.main()
"""


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (WRONG, r"AssertionError: rank \d, seed 1: .* allreduce "),
        pytest.param(HANGS, "Timeout", marks=pytest.mark.slow),
        pytest.param(HANGS_AT_THE_END, "Timeout", marks=pytest.mark.slow),
    ],
    ids=["wrong", "hangs", "hangs at the end"],
)
def test_it_fails(script, says, tmp_path, monkeypatch, capfd):
    changed = tmp_path / "changed.py"
    folder = str(SUPPORT)
    changed.write_text(script.replace("sys.argv.pop(1)", repr(folder)))
    monkeypatch.setattr(soak, "RANK", changed)
    given = ["--np", "2", "--seed", "1", "--seconds", "30", *SLACK]
    monkeypatch.setattr(sys, "argv", ["soak.py", *given])
    assert soak.main() == 1
    said = capfd.readouterr()
    assert "repeat with --seed 1 --np 2" in said.out
    assert re.search(says, said.out + said.err)
    assert not kolovod.is_initialized()
