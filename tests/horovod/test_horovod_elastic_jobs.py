"""Horovod's elastic jobs from the command line: hosts come and go, processes fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frameworks import is_installed
from netbed import Bed
from reached_by_ssh import environment, made_bed  # noqa: F401
from slow import THOROUGH, slow_but, thorough_but

from horovod.runner.elastic.constants import RESET_LIMIT_EXCEEDED_MESSAGE
from horovod.runner.elastic.discovery import FixedHosts
from horovod.runner.elastic.launch import elastic_options
from kolovod.launch import elastic_job, supervisor
from kolovod.launch.agent_line import SshOptions
from kolovod.launch.elastic_job import ElasticJob
from kolovod.launch.job import JobOptions

pytestmark = pytest.mark.timeout(340)

SCRIPT = Path(__file__).parents[1] / "support" / "horovod_elastic_script.py"
HOROVODRUN = [sys.executable, "-m", "horovod.runner.launch"]
A, B, BOTH = "localhost:2\n", "127.0.0.1:2\n", "localhost:2\n127.0.0.1:2\n"
DEADLINE_S = 300


@dataclass(frozen=True)
class Scenario:
    """What happens to a job, and how it ends."""

    plan: list[dict[str, Any]]
    hosts: str
    """What discovery says at the beginning."""
    flags: str = "-np 2"
    sizes: tuple[int, ...] = ()
    """Of the worlds that did batches; none: the job fails."""
    ends_on: tuple[str, ...] = ()
    """The hosts of the processes that come to the end."""
    says: str = ""
    """On standard error; a regular expression."""
    most_entries: int = 1
    """How often a process that was there from the beginning enters its function."""


def killed(host: str, batch: int = 10) -> dict[str, Any]:
    return {"batch": batch, "do": "kill", "host": host}


def hosts_are(text: str, batch: int = 10) -> dict[str, Any]:
    return {"batch": batch, "do": "hosts", "text": text}


SCENARIOS = {
    "hosts added": Scenario(
        [hosts_are(BOTH)], A, sizes=(2, 4), ends_on=("127.0.0.1",) * 2 + ("localhost",) * 2,
        says="2 joined on 127.0.0.1", most_entries=2,
    ),
    "slots added": Scenario(
        [hosts_are("localhost:3\n")], A, sizes=(2, 3), ends_on=("localhost",) * 3, most_entries=2,
    ),
    "hosts removed": Scenario(
        [hosts_are(A)], BOTH, sizes=(4, 2), ends_on=("localhost",) * 2,
        says="rank 2 on host 127.0.0.1 leaves, rank 3 on host 127.0.0.1 leaves", most_entries=2,
    ),
    "hosts removed and added again": Scenario(
        [hosts_are(A), hosts_are(BOTH, 20)], BOTH, sizes=(4, 2, 4),
        ends_on=("127.0.0.1",) * 2 + ("localhost",) * 2, most_entries=3,
    ),
    "the oldest host removed": Scenario(
        [hosts_are(B)], BOTH, sizes=(4, 2), ends_on=("127.0.0.1",) * 2, most_entries=2,
    ),
    "a worker fails": Scenario(
        [killed("127.0.0.1")], BOTH, sizes=(4, 2), ends_on=("localhost",) * 2,
        says=r"host 127\.0\.0\.1 is avoided.*ending the other 1", most_entries=2,
    ),
    "rank 0 fails": Scenario(
        [killed("localhost")], BOTH, sizes=(4, 2), ends_on=("127.0.0.1",) * 2, most_entries=2,
    ),
    "a worker raises": Scenario(
        [{"batch": 10, "do": "raise", "host": "127.0.0.1", "error": "no more"}], BOTH,
        sizes=(4, 2), ends_on=("localhost",) * 2, says="ValueError: no more", most_entries=2,
    ),
    "an operation fails": Scenario(
        [{"batch": 10, "do": "lost"}], A, sizes=(2,), ends_on=("localhost",) * 2,
        says="2 ranks go on, since epoch 1 has failed", most_entries=2,
    ),
    "a host cools down and comes back": Scenario(
        [killed("127.0.0.1"), hosts_are(BOTH, 20)], BOTH,
        flags="-np 4 --min-np 2 --blacklist-cooldown-range 1 2", sizes=(4, 2, 4),
        ends_on=("127.0.0.1",) * 2 + ("localhost",) * 2, most_entries=3,
    ),
    "fewer than min-np wait for others": Scenario(
        [killed("127.0.0.1")], BOTH,
        flags="-np 4 --min-np 4 --blacklist-cooldown-range 1 2", sizes=(4,),
        ends_on=("127.0.0.1",) * 2 + ("localhost",) * 2, most_entries=2,
    ),
    "all hosts are avoided": Scenario(
        [killed("localhost"), killed("127.0.0.1", 20)], BOTH, says="the others go on",
    ),
    "the reset limit": Scenario(
        [hosts_are(BOTH), hosts_are(BOTH.replace("2", "3", 1), 20)], A,
        flags="-np 2 --reset-limit 1", says=RESET_LIMIT_EXCEEDED_MESSAGE.format(1),
    ),
    "nobody comes": Scenario(
        [killed("127.0.0.1")], BOTH, flags="-np 4 --min-np 4 --elastic-timeout 3",
        says="2 of the at least 4 members are there",
    ),
}  # fmt: skip


SHORT = (
    "hosts added", "a worker fails", "the oldest host removed", "an operation fails",
    "a host cools down and comes back", "all hosts are avoided", "the reset limit", "nobody comes",
)  # fmt: skip


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOROVODRUN, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, **variables},
    )


def weights_after(batches: int) -> float:
    """What SGD with momentum makes of gradients of one."""
    weight = velocity = np.float64(0.0)
    for _ in range(batches):
        velocity = velocity * 0.5 + 1.0
        weight = weight - velocity
    return float(weight)


def check(kind: str, scenario: Scenario, folder: Path) -> None:
    (folder / "hosts").write_text(scenario.hosts)
    plan = json.dumps(scenario.plan)
    done = run(
        *scenario.flags.split(), "--host-discovery-script", f"cat {folder}/hosts",
        sys.executable, str(SCRIPT), kind, plan, str(folder),
    )  # fmt: skip
    assert re.search(scenario.says, done.stderr, re.DOTALL), done.stderr
    if not scenario.sizes:
        assert done.returncode == 1, done.stderr
        assert "Horovod detected that one or more processes exited" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in re.findall(r"\{.*\}", done.stdout)]
    assert sorted(result["host"] for result in results) == list(scenario.ends_on), done.stderr
    assert sorted(result["rank"] for result in results) == list(range(len(results)))
    for result in results:
        assert result["sizes"] == list(scenario.sizes), done.stderr
        assert result["weights"] == [weights_after(40)] * 3
    first = max(results, key=lambda result: result["entries"])
    assert (first["entries"], first["resets"]) == (scenario.most_entries,) * 2 or (
        first["entries"] == scenario.most_entries == first["resets"] + 1
    )


@pytest.mark.parametrize(
    "name",
    [
        *slow_but(["a worker fails"], SHORT),
        *thorough_but([], [name for name in SCENARIOS if name not in SHORT]),
    ],
)
def test_without_a_framework(name: str, tmp_path: Path) -> None:
    check("plain", SCENARIOS[name], tmp_path)


def start_on_two_hosts(code: str, **options: Any) -> ElasticJob:
    """As horovodrun does, in this process: two processes on each of two hosts."""
    places = {"localhost": 2, "127.0.0.1": 2}
    elastic = elastic_options(FixedHosts(places), num_proc=4, min_num_proc=1, max_num_proc=None)
    job = ElasticJob(elastic, JobOptions(ssh=SshOptions(), **options))
    job.start([sys.executable, "-c", code])
    return job


DEAF = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = pathlib.Path({path!r})

def until(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)

def has_ended():
    try:
        return ") Z" in pathlib.Path("/proc", deaf.read_text(), "stat").read_text()
    except OSError:
        return True

if os.environ["HOROVOD_HOSTNAME"] == "localhost":
    until(deaf.exists)
    until(has_ended)
    sys.exit(0)
if os.environ["HOROVOD_LOCAL_RANK"] == "0":
    until(deaf.exists)
    sys.exit(5)
deaf.with_suffix(".new").write_text(str(os.getpid()))
deaf.with_suffix(".new").rename(deaf)
time.sleep(3600)
"""


def test_who_does_not_end_with_its_host_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", 0.1)
    said: list[str] = []
    code = DEAF.format(path=str(tmp_path / "deaf"))
    with start_on_two_hosts(code, report=said.append) as job:
        assert job.wait() == 5
    assert [(end.rank, end.code) for end in job.outcome.failed] == [(2, 5)]
    assert any("host 127.0.0.1 is avoided" in text for text in said)
    assert not any("rank 3" in text for text in said)


EARLY = """
import pathlib, sys, time
import horovod.common.basics as basics
from horovod.common.elastic import ObjectState, run_fn
import kolovod.numpy as kv

folder = pathlib.Path({folder!r})
basics.init()
first_rank = basics.rank()
state = ObjectState(kv.broadcast_object, basics.rank, step=0)

class Enough(Exception):
    pass

def steps(state):
    while state.step < 60:
        kv.allreduce(1.0, "one")
        state.step += 1
        if state.step == 5 and first_rank in {stops}:
            raise Enough
        state.commit()

try:
    run_fn(steps, lambda: (basics.shutdown(), basics.init()))(state)
except Enough:  # it saves, which takes until the launcher has no more patience with any other
    deadline = time.monotonic() + 60
    while not (folder / "enough").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    (folder / f"saved {{first_rank}}").touch()
    sys.exit({codes}[first_rank])
"""


@pytest.mark.parametrize(
    ("stops", "codes", "code"),
    [
        pytest.param([0, 1, 2, 3], [0, 0, 0, 0], 0, id="all"),
        pytest.param([0, 1, 2, 3], [0, 0, 3, 0], 3, id="one fails then"),
        pytest.param([3], [0, 0, 0, 0], 0, id="one, the others go on"),
    ],
)
def test_a_script_that_catches_what_has_left_its_function_is_left_to_finish(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stops: list[int], codes: list[int], code: int
) -> None:
    for module in (elastic_job, supervisor):
        monkeypatch.setattr(module, "GRACE_S", 0.1)
    if len(stops) == 4:  # nobody goes on without one that is late to stop
        monkeypatch.setattr("kolovod.coordination.coordinator._RESIGNED_GRACE_S", 5.0)
    said: list[str] = []

    def report(text: str) -> None:
        said.append(text)
        if "to end after an exception" in text:
            (tmp_path / "enough").touch()

    script = EARLY.format(folder=str(tmp_path), stops=stops, codes=codes)
    with start_on_two_hosts(script, report=report) as job:
        assert job.wait() == code, said
    assert sorted(path.name for path in tmp_path.glob("saved*")) == [f"saved {n}" for n in stops]
    assert len(job.outcome.failed) == sum(each != 0 for each in codes)
    assert not any("killed" in text for text in said)


LINGERS = """
import threading, time
import horovod.common.basics as basics
from horovod.common.elastic import ObjectState, run_fn
import kolovod.numpy as kv
from kolovod.elastic import running
running._LINGER_S = 5.0  # first the traceback is written
basics.init()
state = ObjectState(kv.broadcast_object, basics.rank)

def raising(state):
    threading.Thread(target=time.sleep, args=(600,), name="prefetch").start()
    raise ValueError("loss is nan")

run_fn(raising, lambda: (basics.shutdown(), basics.init()))(state)
"""


@pytest.mark.slow
def test_a_script_that_an_exception_ends_does_not_stay_for_a_thread() -> None:
    said: list[str] = []
    with start_on_two_hosts(LINGERS, report=said.append) as job:
        assert job.wait() == 1
        assert {end.code for end in job.outcome.failed} == {1}
        told = job.tail(job.outcome.failed[0], "stderr")
    assert "ValueError: loss is nan" in told
    assert "an exception has ended this script 5 s ago, but its threads prefetch run" in told


def test_a_script_without_elastic_calls_ends_as_always() -> None:
    done = run("-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1", "--", "true")
    assert done.returncode == 0, done.stderr
    done = run(
        "-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1",
        sys.executable, "-c", "raise SystemExit(7)",
    )  # fmt: skip
    assert done.returncode == 1
    assert "exit code 7" in done.stderr


def test_a_discovery_script_that_fails_at_once_ends_it(tmp_path: Path) -> None:
    command = ["-np", "2", "--host-discovery-script", f"echo no >&2; rm {tmp_path}/missing", "true"]
    done = run(*command)
    assert done.returncode == 1
    assert "the host discovery script" in done.stderr
    assert "usage" not in done.stderr


def test_what_is_no_program_is_said() -> None:
    done = run("-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1", "no-such-program")
    assert done.returncode == 1
    assert "command not found: no-such-program" in done.stderr


def test_min_np_reached_late(tmp_path: Path) -> None:
    """Discovery names too few hosts for a while."""
    hosts = tmp_path / "hosts"
    script = f"test -e {hosts} && cat {hosts} || (echo {A.strip()}; echo '{BOTH}' > {hosts})"
    done = run(
        "-np", "4", "--host-discovery-script", script,
        sys.executable, str(SCRIPT), "plain", "[]", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.findall(r'"sizes": (\[.*?\])', done.stdout) == ["[4]"] * 4


def call_elastic(code: str) -> subprocess.CompletedProcess[str]:
    text = f"import horovod, os, signal\n{code}"
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=DEADLINE_S
    )


FUNCTION = """
def train(base):
    import horovod.common.basics as basics
    from horovod.common.elastic import ObjectState, run_fn
    import kolovod.numpy as kv
    basics.init()
    state = ObjectState(kv.broadcast_object, basics.rank, step=0)
    def steps(state):
        while state.step < 10:
            kv.allreduce(1.0, "one")
            if state.step == 5 and basics.rank() == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            state.step += 1
            state.commit()
        return base + basics.rank(), basics.size()
    return run_fn(steps, lambda: (basics.shutdown(), basics.init()))(state)
"""


def test_a_function_in_an_elastic_job() -> None:
    done = call_elastic(
        f"{FUNCTION}\nprint(horovod.run(train, (10,), num_proc=4, min_num_proc=2, "
        "hosts='localhost:2,127.0.0.1:2'))"
    )
    assert "[(10, 2), (11, 2)]" in done.stdout, done.stderr


def test_a_function_that_raises_in_all_ranks() -> None:
    done = call_elastic(
        "def fail(): raise KeyError('weights')\n"
        "try: horovod.run(fail, num_proc=2, min_num_proc=1, hosts='localhost:1,127.0.0.1:1')\n"
        "except RuntimeError as error: print('caught', error)"
    )
    assert "caught Horovod detected that one or more processes" in done.stdout, done.stderr
    assert "KeyError: 'weights'" in done.stdout


IN_SHORT = ("hosts removed",)


@pytest.mark.slow
@pytest.mark.parametrize("name", thorough_but(IN_SHORT, SCENARIOS))
def test_torch(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    check("torch", SCENARIOS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.parametrize(
    "case",
    thorough_but(
        [("tensorflow", "a worker fails"), ("keras", "hosts removed")],
        [(kind, name) for kind in ("tensorflow", "keras") for name in SCENARIOS],
    ),
    ids="-".join,
)
def test_tensorflow_and_keras(case: tuple[str, str], tmp_path: Path) -> None:
    kind, name = case
    if not is_installed("tensorflow"):
        pytest.skip("TensorFlow is not installed")
    check(kind, SCENARIOS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("jax", "a worker fails"),
        *[
            pytest.param(backend, name, marks=THOROUGH)
            for backend in ("jax", "torch")
            for name in SCENARIOS
            if (backend, name) != ("jax", "a worker fails")
        ],
    ],
)
def test_keras_on_other_backends(
    backend: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_installed("keras") or not is_installed(backend):
        pytest.skip(f"there is no Keras on {backend}")
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setenv("JAX_ENABLE_X64", "1")  # the weights tell of each step
    check("keras on its backend", SCENARIOS[name], tmp_path)


@pytest.mark.slow
def test_a_host_that_ssh_reaches_loses_all_its_processes(bed: Bed, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    plan = json.dumps([{"batch": 10, "do": "kill", "host": "b"}])
    done = bed.run(
        "login",
        [
            *HOROVODRUN, "-np", "4", "--min-np", "2", "-H", "a:2,b:2",
            sys.executable, str(SCRIPT), "plain", plan, str(tmp_path),
        ],
        timeout_s=DEADLINE_S,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "host b is avoided, since a process has failed there: ending the other 1" in done.stderr
    assert re.findall(r'"host": "(.)".*?"sizes": (\[.*?\])', done.stdout) == [("a", "[4, 2]")] * 2
