"""Jobs of ``kolovod run --elastic``: processes are killed, come and leave, and no step is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import launched
import pytest
from jobs_with_deaths import DEADLINE_S, SCRIPT, killed, run, train
from launched import KOLOVOD
from slow import thorough_but

from kolovod import elastic
from kolovod.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("full", "plan", "hosts"),
    [
        (3, [2, 0, 1], []),
        pytest.param(4, [0, 3], ["--label-hosts", "a:2,b:2"], marks=pytest.mark.slow),
    ],
    ids=["one host", "two hosts"],
)
def test_killed_ranks_are_replaced_and_no_step_is_lost(
    tmp_path: Path, full: int, plan: list[int], hosts: list[str]
) -> None:
    train("numpy", full, plan, tmp_path, "-np", str(full), *hosts)


@pytest.mark.slow
def test_gloo_is_made_anew_in_each_world(tmp_path: Path) -> None:
    """It carries the bytes; its sums may differ in their last bits from those of a replay."""
    pytest.importorskip("torch", reason="PyTorch, which has Gloo, is not installed")
    flags = ["-np", "3", "--backend", "gloo"]
    done = run(*flags, script=("-c", KILLED_IN_TURN))
    assert done.returncode == 0, done.stderr
    assert re.findall(r"sizes (.*)", done.stdout) == ["[3, 2, 3, 2, 3]"] * 3, done.stderr


NOTING_SIZES = """
import os, signal, sys
import numpy as np
import kolovod.numpy as kv
from kolovod import elastic
from kolovod.core import world
kv.init()
state = elastic.State(step=0, at=0, sizes=[])

@state.on_size_change
def note(before, after):
    state.at = state.step
    state.sizes.append(after)
"""


KILLED_IN_TURN = f"""{NOTING_SIZES}
@elastic.run
def train(state):
    state.sizes = state.sizes or [kv.size()]
    while not (len(state.sizes) == 5 and state.step == state.at + 20):
        # Before the operation, in which another rank's end may change this one's number.
        is_next = state.sizes in ([3], [3, 2, 3]) and kv.rank() == len(state.sizes) // 2
        size = float(elastic.exactly(lambda: kv.allreduce(np.ones(1000), "one", op=kv.Sum))[0])
        assert world.current().carrier is not None
        state.step += 1
        if is_next and state.step == state.at + 20:
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()

train(state)
print("sizes", state.sizes, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    thorough_but(
        [("torch", 3), ("ddp", 3), ("recomputed", 2)],
        [(kind, full) for kind in ("torch", "ddp", "recomputed") for full in (2, 3)],
    ),
)
def test_an_optimizer_of_torch(case: tuple[str, int], tmp_path: Path) -> None:
    """Weights are right after each step, also after a job has shrunk to one rank and grown."""
    kind, full = case
    plan = [0, 2] if full == 3 else [1, 0]
    train(kind, full, plan, tmp_path, "-np", str(full))


@pytest.mark.slow
def test_the_state_comes_while_all_compute(tmp_path: Path) -> None:
    """The mean of a step is that of those who had the state, bit for bit."""
    ends = train("late", 3, [1, 0], tmp_path, "-np", "3", "--label-hosts", "a:2,b:1")
    assert max(end["given"] for end in ends) == 2  # two have joined


LOCAL_RANKS = """
import os, signal
import kolovod.numpy as kv
from kolovod import elastic
kv.init()
slot = os.environ["KOLOVOD_SLOT"]
print("slot", slot, "has", kv.local_rank(), os.environ["LOCAL_RANK"], flush=True)
state = elastic.State(sizes=[])
state.on_size_change(lambda before, after: state.sizes.append(after))

@elastic.run
def train(state):
    while state.sizes != [2, 3]:
        if slot == os.environ["KOLOVOD_PROCESS"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        elastic.exactly(lambda: kv.allreduce(1.0, "one"))
        state.commit()

train(state)
"""


def test_who_comes_later_has_the_local_rank_that_is_free() -> None:
    """By it a script chooses its GPU."""
    done = run("-np", "3", script=("-c", LOCAL_RANKS))
    assert done.returncode == 0, done.stderr
    found = re.findall(r"slot (\d) has (\d) (\d)", done.stdout)
    assert sorted(found) == [(s, s, s) for s in "0112"]


UNTIL_SIZE = """
import os, sys
import kolovod.numpy as kv
from kolovod import elastic
kv.init()
state = elastic.State(step=0, size=0)
state.on_size_change(lambda before, after: setattr(state, "size", after))

@elastic.run
def train(state):
    while state.size < int(sys.argv[1]):
        elastic.exactly(lambda: kv.allreduce(1.0, "one"))
        state.step += 1
        state.commit()

train(state)
print("ended in a world of", kv.size(), "on", os.environ["KOLOVOD_HOST"], flush=True)
"""


@pytest.mark.parametrize(
    ("flags", "hosts"),
    [
        (["-np", "1", "--max-np", "2"], ["localhost", "localhost"]),
        (["-np", "2", "--max-np", "3", "--label-hosts", "a:2,b:2"], ["a", "a", "b"]),
    ],
    ids=["this host", "places beyond -np"],
)
def test_a_job_grows_up_to_max_np_where_there_are_places(
    flags: list[str], hosts: list[str]
) -> None:
    done = run(*flags, script=("-c", UNTIL_SIZE, str(len(hosts))))
    assert done.returncode == 0, done.stderr
    ended = re.findall(r"ended in a world of (\d+) on (\w+)$", done.stdout, re.MULTILINE)
    assert sorted(host for _, host in ended) == hosts
    assert {int(size) for size, _ in ended} == {len(hosts)}


NORMALISED = """
import hashlib, os, signal, threading
import torch
import kolovod.torch as kv
from kolovod import elastic
kv.init()
torch.manual_seed(int(os.environ["KOLOVOD_SLOT"]))
layers = [torch.nn.Linear(4, 64), kv.SyncBatchNorm(64), torch.nn.Linear(64, 1)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
optimizer = kv.DistributedOptimizer(optimizer, model.named_parameters())
state = elastic.State(model=model, optimizer=optimizer, step=0)

@elastic.run(redo="recompute")
def train(state):
    while state.step < 40:
        if state.step == 10 and os.environ["KOLOVOD_SLOT"] == "1":
            threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for _ in range(5):  # so that most of a step is here
            model(torch.randn(8, 4))
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        state.commit()
        if state.step == 11 and os.environ["KOLOVOD_SLOT"] == "1":
            threading.Event().wait()  # it is about to be killed

train(state)
values = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
print("ends", int(layers[1].num_batches_tracked), hashlib.sha256(values).hexdigest(), flush=True)
"""


@pytest.mark.slow
def test_batch_normalisation_over_all_ranks_where_steps_are_computed_again() -> None:
    """The running statistics of a step that was interrupted in forward count once."""
    done = run("-np", "3", "--max-np", "3", script=("-c", NORMALISED))
    assert done.returncode == 0, done.stderr
    ends = re.findall(r"ends (\d+) (\w+)", done.stdout)
    assert len(ends) >= 2, done.stderr
    assert set(ends) == {("240", ends[0][1])}, done.stderr
    assert "was killed by signal 9" in done.stderr


def test_fewer_than_min_np_end_their_step_and_wait(tmp_path: Path) -> None:
    (first, _) = train("numpy", 2, [0, 1], tmp_path, "-np", "2", "--min-np", "2")
    alone = [bits for bits in first["slots"] if bits in (1, 2)]
    assert len(alone) <= 2  # the step that a death interrupted, if it had begun


@pytest.mark.slow
def test_too_few_for_too_long_end_the_job() -> None:
    code = (
        "import os, sys, time, kolovod.numpy as kv; from kolovod import elastic\n"
        "if not os.environ['KOLOVOD_FIRST_HOSTS']: time.sleep(60)\n"
        "def train(state):\n"
        "    while True:\n"
        "        elastic.exactly(lambda: kv.allreduce(1.0, 'one'))\n"
        "        state.step += 1\n"
        "        if state.step == 5 and kv.rank() == 1: os.kill(os.getpid(), 9)\n"
        "        state.commit()\n"
        "kv.init()\n"
        "elastic.run(train)(elastic.State(step=0))\n"
    )
    flags = ["-np", "2", "--min-np", "2", "--elastic-timeout", "2"]
    done = run(*flags, script=("-c", code))
    assert done.returncode == 1  # that of the rank that was left, and raised JobOverError
    assert "1 of the at least 2 members are there" in done.stderr
    assert "nobody came in 2 s" in done.stderr


@pytest.mark.slow
def test_a_job_whose_ranks_all_fail_ends_with_their_code() -> None:
    code = "from kolovod import elastic; elastic.run(lambda state: 1 / 0)(elastic.State())"
    done = run("-np", "2", script=("-c", code))
    assert done.returncode == 1
    assert done.stderr.count("ZeroDivisionError") >= 2


ONE_RAISES = """
import os, sys, threading, time
import kolovod.numpy as kv
from kolovod import elastic
kv.init()
state = elastic.State(step=0)

def wait_for_the_others_end():
    deadline = time.monotonic() + 3600
    while not os.path.exists(sys.argv[2]) and time.monotonic() < deadline:
        time.sleep(0.01)

@elastic.run
def train(state):
    while state.step < 40:
        elastic.exactly(lambda: kv.allreduce(1.0, "one"))
        if state.step == 20 and os.environ["KOLOVOD_SLOT"] == "1":
            if sys.argv[1] == "stays":
                threading.Thread(target=wait_for_the_others_end).start()
            raise ValueError("loss is nan")
        state.step += 1
        state.commit()

train(state)
print("done", kv.size(), flush=True)
open(sys.argv[2], "w").close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ends", "stays"])
def test_a_rank_that_raises_is_left_out_at_once(how: str, tmp_path: Path) -> None:
    """Also where its process goes on until after the others' end, since a thread of it runs."""
    done = run("-np", "3", script=("-c", ONE_RAISES, how, str(tmp_path / "done")))
    assert re.findall(r"done \d", done.stdout) == ["done 2"] * 2, done.stderr
    assert "rank 1 on host localhost was lost (ValueError: loss is nan)" in done.stderr
    reasons = re.findall(r"ranks go on, since (.*)", done.stderr)
    # Of the two that are left one may end long before the other.
    assert len([why for why in reasons if not why.endswith("has ended")]) == 1, done.stderr
    assert done.returncode == 0


HANGS = f"""{NOTING_SIZES}
@elastic.run
def train(state):
    state.sizes = state.sizes or [kv.size()]
    while not (len(state.sizes) == 3 and state.step == state.at + 20):
        if state.sizes == [3] and kv.rank() == 1 and state.step == 20:
            if sys.argv[1] == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                pass
        elastic.exactly(lambda: kv.allreduce(np.ones(10), "one", op=kv.Sum))
        state.step += 1
        state.commit()

train(state)
print("sizes", state.sizes, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spins", "stopped"])
def test_a_rank_that_hangs_is_killed_and_replaced(how: str) -> None:
    limits = ["-x", "KOLOVOD_LATE_FAILURE_S=4", "-x", "KOLOVOD_LATE_REPORT_S=2"]
    done = run("-np", "3", *limits, script=("-c", HANGS, how))
    assert done.returncode == 0, done.stderr
    assert re.findall(r"sizes (.*)", done.stdout) == ["[3, 2, 3]"] * 3, done.stderr
    assert re.search(
        r"kolovod: rank 1 on host localhost \(pid \d+\) was killed by the launcher: it was late "
        r"for too long \(KOLOVOD_LATE_FAILURE_S\): rank 1 on host localhost",
        done.stderr,
    )


HANGS_BETWEEN_WORLDS = f"""{NOTING_SIZES}
from kolovod import lifecycle

def hangs(*arguments):
    if sys.argv[1] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        pass

@elastic.run
def train(state):
    state.sizes = state.sizes or [kv.size()]
    while not (state.sizes[-1] == 3 and len(state.sizes) > 1 and state.step == state.at + 20):
        if state.sizes == [3] and state.step == 20:
            if kv.rank() == 1:
                lifecycle._ready = hangs
            if kv.rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        elastic.exactly(lambda: kv.allreduce(np.ones(10), "one", op=kv.Sum))
        state.step += 1
        state.commit()

train(state)
print("end", kv.size(), state.step - state.at, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spins", "stopped"])
def test_a_rank_that_hangs_on_its_way_into_the_next_world_is_killed_and_replaced(how: str) -> None:
    """Long before the others have waited as long for it as for one that is started."""
    limits = ["-x", "KOLOVOD_LATE_FAILURE_S=4", "-x", "KOLOVOD_START_TIMEOUT_S=600"]
    done = run("-np", "3", *limits, script=("-c", HANGS_BETWEEN_WORLDS, how))
    assert done.returncode == 0, done.stderr
    assert re.findall(r"end (.*)", done.stdout) == ["3 20"] * 3, done.stderr
    assert re.search(r"\(pid \d+\) was killed by the launcher", done.stderr), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slot", "how"),
    [
        pytest.param("2", "os.kill(os.getpid(), 9)", id="killed"),
        pytest.param("0", "return", id="returns", marks=pytest.mark.slow),
    ],
)
def test_the_code_of_a_job_that_loses_a_rank_and_fails_later_is_that_of_the_end(
    slot: str, how: str
) -> None:
    """Also where one has returned early, for which the others are not waited for long."""
    code = (
        "import os, kolovod.numpy as kv; from kolovod import elastic\n"
        "def train(state):\n"
        "    for step in range(20):\n"
        "        slot = os.environ['KOLOVOD_SLOT']\n"
        f"        if step == 5 and kv.size() == 3 and slot == '{slot}': {how}\n"
        "        elastic.exactly(lambda: kv.allreduce(1.0, 'one'))\n"
        "    raise SystemExit(7)\n"
        "kv.init()\n"
        "elastic.run(train)(elastic.State())\n"
    )
    done = run("-np", "3", script=("-c", code))
    assert done.returncode == 7, done.stderr


def test_children_of_a_rank_end_by_sigterm() -> None:
    code = (
        "import multiprocessing, time; from kolovod import elastic\n"
        "context = multiprocessing.get_context('fork')\n"
        "def train(state):\n"
        "    children = [context.Process(target=time.sleep, args=(60,)) for _ in range(40)]\n"
        "    for child in children: child.start(); child.terminate()\n"  # at any moment of a fork
        "    deadline = time.monotonic() + 20\n"
        "    for child in children: child.join(max(0, deadline - time.monotonic()))\n"
        "    print('codes', {child.exitcode for child in children}, flush=True)\n"
        "    for child in children: child.kill()\n"
        "elastic.run(train)(elastic.State())\n"
    )
    done = run("-np", "1", script=("-c", code))
    assert "codes {-15}" in done.stdout, done.stderr


RESIZED = """
import os, signal
import kolovod.numpy as kv
from kolovod import elastic
kv.init()
state = elastic.State(step=0, rate=0.1 * kv.size(), sizes=[])

@state.on_size_change
def scale(before, after):
    state.rate *= after / before
    state.sizes.append((before, after))

@elastic.run
def train(state):
    while len(state.sizes) < 4:
        elastic.exactly(lambda: kv.allreduce(1.0, "one"))
        state.step += 1
        if state.step == 5 and os.environ["KOLOVOD_SLOT"] == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        if state.sizes and kv.size() == 3 and len(state.sizes) < 3 and kv.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()

train(state)
print("sizes", state.sizes, round(state.rate, 6), flush=True)
"""


def test_all_ranks_are_told_of_each_change_of_the_size_once() -> None:
    done = run("-np", "3", script=("-c", RESIZED))
    assert done.returncode == 0, done.stderr
    told = re.findall(r"sizes (.*)", done.stdout)
    assert told == ["[(3, 2), (2, 3), (3, 2), (2, 3)] 0.3"] * 3, done.stderr


def test_names_that_a_state_uses_itself_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="is called 'commit', which State uses itself"):
        elastic.State(commit=1)


def test_a_state_of_another_kind_is_refused() -> None:
    code = "from kolovod import elastic; elastic.run(lambda state: 1)({})"
    done = run("-np", "1", script=("-c", code))
    assert done.returncode == 1
    assert "the first argument is a dict: give a kolovod.elastic.State" in done.stderr


def test_without_elastic_the_function_is_called_as_it_is() -> None:
    code = (
        "from kolovod import elastic; state = elastic.State(n=1)\n"
        "elastic.run(lambda state: (state.commit(), print(state.n)))(state)"
    )
    command = [*KOLOVOD, "run", "-np", "2", "--", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r":(\d)\n", done.stdout)) == ["1", "1"]


LEAVING = """
import os, sys, time
import kolovod, kolovod.numpy as kv
from kolovod import elastic
kv.init()
state = elastic.State(step=0)

@elastic.run
def train(state):
    while kv.size() == 3 or state.step % 20:
        elastic.exactly(lambda: kv.allreduce(1.0, "one"))
        if state.step == 5:
            print("pid", os.getpid(), "slot", os.environ["KOLOVOD_SLOT"], flush=True)
        state.step += 1
        state.commit()
        time.sleep(0.005)

train(state)
print("done", kv.size(), flush=True)
"""


def test_sigterm_lets_a_rank_leave_after_its_step() -> None:
    command = [*KOLOVOD, "run", "--elastic", "-np", "3", "--max-np", "3"]
    command += ["--", sys.executable, "-c", LEAVING]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        pids: dict[int, int] = {}
        assert process.stdout is not None
        while len(pids) < 3:
            found = re.search(r"pid (\d+) slot (\d)", process.stdout.readline())
            if found:
                pids[int(found[2])] = int(found[1])
        os.kill(pids[1], signal.SIGTERM)
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, err
    assert "2 ranks go on, since rank 1 on host localhost leaves" in err
    assert re.findall(r"done \d", out) == ["done 2"] * 2
    assert "was lost" not in err
    assert "Traceback" not in err


def test_a_signal_to_the_launcher_ends_the_job() -> None:
    command = [*KOLOVOD, "run", "--elastic", "-np", "2", "--", sys.executable, "-c"]
    command += ["import time; print('up', flush=True); time.sleep(3600)"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM: ending 2 ranks" in err


DATA_SCRIPT = SCRIPT.with_name("elastic_data_script.py")


@pytest.mark.parametrize(
    ("flags", "samples", "ends"),
    [
        (["-np", "2", "--min-np", "2"], 61, "1:0:2,0:1:0"),
        pytest.param(["-np", "3", "--min-np", "3"], 200, "2:0:3,0:1:4", marks=pytest.mark.slow),
        pytest.param(
            ["-np", "3", "--min-np", "3", "--label-hosts", "a:2,b:1"],
            60,
            "1:0:2,2:1:1",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["2 ranks", "3 ranks", "2 hosts"],
)
def test_every_sample_counts_once_in_an_epoch(flags: list[str], samples: int, ends: str) -> None:
    done = run(*flags, script=(str(DATA_SCRIPT), str(samples), "3", ends))
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in re.findall(r"\{.*\}", done.stdout)]
    assert results, done.stderr
    for result in results:
        assert result["used"] == [[1.0] * samples] * 3
    assert killed(done.stderr) == len(ends.split(","))


@pytest.mark.parametrize("is_elastic", [False, True], ids=["not elastic", "elastic"])
def test_samples_are_shared_by_speed(is_elastic: bool) -> None:
    script = (str(DATA_SCRIPT), "100", "3", "1:0:2,0:1:0" if is_elastic else "", "by_speed")
    if is_elastic:
        done = run("-np", "2", "--min-np", "2", script=script)
    else:
        done = launched.run("run", "-np", "2", "--", sys.executable, *script)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in re.findall(r"\{.*\}", done.stdout)]
    assert len(results) == 2, done.stderr
    for result in results:
        assert result["used"] == [[1.0] * 100] * 3
        assert sorted(result["shares"]) == [0.25, 0.75]
    assert killed(done.stderr) == (2 if is_elastic else 0)


@pytest.mark.slow
def test_a_commit_without_a_step_that_counts_samples_is_named() -> None:
    code = (
        "import kolovod.numpy as kv; from kolovod import elastic; kv.init()\n"
        "state = elastic.State(sampler=elastic.ElasticSampler(range(9), 1))\n"
        "elastic.run(lambda state: state.commit())(state)"
    )
    done = run("-np", "2", script=("-c", code))
    assert done.returncode == 1
    assert "commit() after no step that uses samples" in done.stderr
