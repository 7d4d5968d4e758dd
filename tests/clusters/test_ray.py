"""Ranks in Ray: a cluster of three nodes on this host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
import ray_train_job
from growing_job import check_results, growing, said, works_with
from ray_cluster import NEEDS_RAY, is_free_again, ray_cluster
from ray_train_job import die, ends, first_here, train_until

pytestmark = NEEDS_RAY

_LOST = {"num_failures": 8, "req_failure_prob": 30, "resp_failure_prob": 40}
"""Ray's own injection of faults; in percent."""
_TALKS = """
import sys
import time

import ray

import kolovod.ray


def talks():
    import kolovod as kv

    kv.init()
    for line in range(60):
        print(f"line {line}", flush=True)
        time.sleep(0.05)
    return kv.rank()


ray.init(address=sys.argv[1])
print("results", kolovod.ray.run(talks, num_workers=2))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ray_cluster(tmp_path_factory.mktemp("ray"), 2, 1, 1) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(cluster):
    yield
    assert is_free_again(), "ranks or placement groups are left"


def run(*arguments, **keywords):
    import kolovod.ray

    return kolovod.ray.run(*arguments, **keywords)


def test_results_by_rank(capsys):
    import ray

    def of_rank(factor, references, plus=0):
        import ray

        import kolovod as kv

        kv.init()
        assert ray.get(references) == ["there"]  # a rank is an actor: Ray's objects arrive in it
        total = kv.allreduce(np.array([kv.rank() * factor + plus]), op=kv.Sum)
        print(f"this is rank {kv.rank()}")
        node = ray.get_runtime_context().get_node_id()
        return kv.rank(), kv.size(), float(total[0]), node, os.environ["SAID"]

    arguments = 10.0, [ray.put("there")]
    results = run(of_rank, arguments, {"plus": 1}, num_workers=4, env={"SAID": "yes"})
    assert [result[:3] for result in results] == [(rank, 4, 64.0) for rank in range(4)]
    assert len({result[3] for result in results}) == 3  # nodes: two CPUs, one, and one
    assert {result[4] for result in results} == {"yes"}
    shown = capsys.readouterr().out.splitlines()
    assert {f"[{rank}]<stdout>:this is rank {rank}" for rank in range(4)} <= set(shown)


def test_an_exception_names_the_rank():
    from kolovod.ray import RankFailed

    def fails():
        import kolovod as kv

        kv.init()
        if kv.rank() == 1:
            raise ValueError("the loss is nan")
        kv.allreduce(np.ones(3))

    with pytest.raises(
        RankFailed, match=r"(?s)rank 1 on host \S+ raised\n.*the loss is nan"
    ) as seen:
        run(fails, num_workers=2)
    assert seen.value.rank == 1
    assert isinstance(seen.value.__cause__, ValueError)


def test_an_actor_that_dies_is_named():
    from kolovod.ray import RankFailed

    def dies():
        import kolovod as kv

        kv.init()
        if kv.rank() == 1:
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        kv.allreduce(np.ones(3))

    with pytest.raises(
        RankFailed, match=r"rank 1 on host \S+ has ended: its actor has died"
    ) as seen:
        run(dies, num_workers=2)
    assert seen.value.rank == 1


def test_a_rank_that_exits_is_a_failure():
    from kolovod.ray import RankFailed

    def leaves():
        raise SystemExit(3)

    with pytest.raises(RankFailed, match=r"rank 0 .* ended with exit code 3"):
        run(leaves, num_workers=1)


def test_late_ranks_are_ended():
    from kolovod.ray import RankFailed

    with pytest.raises(RankFailed, match=r"rank 0 did not finish within 1 s"):
        run(lambda: time.sleep(100), num_workers=1, timeout_s=1)


def test_no_room():
    from kolovod.errors import BootstrapError

    with pytest.raises(BootstrapError, match=r"places for 0 of 9 ranks .*The cluster has"):
        run(lambda: None, num_workers=9, placement_timeout_s=1)
    with pytest.raises(BootstrapError, match=r"places for [0-4] of 9 ranks"):
        run(lambda: None, num_workers=(9, 10), placement_timeout_s=1)


@pytest.mark.parametrize("wanted", [0, (0, 1), (3, 2)])
def test_wrong_numbers(wanted):
    from kolovod.errors import InvalidArgumentError

    with pytest.raises(InvalidArgumentError, match="num_workers="):
        run(lambda: None, num_workers=wanted)


@pytest.fixture
def job(tmp_path):
    """An elastic job of two to three ranks."""
    with growing(partial(run, num_workers=(2, 3)), tmp_path) as made:
        yield made


@pytest.mark.slow
def test_a_killed_actor_comes_back(job):
    job, folder, stop = job
    job.wait_for(lambda: works_with(folder, 3))
    first = said(folder)
    victim = next(pid for pid, (rank, _, _) in first.items() if rank == 0)
    os.kill(victim, signal.SIGKILL)
    job.wait_for(
        lambda: victim not in {p for p in said(folder) if p not in first} and len(said(folder)) == 4
    )
    job.wait_for(lambda: works_with(folder, 3))
    stop.touch()
    check_results(job.result(), 3, first.keys() - {victim})


@pytest.mark.slow
def test_a_node_that_dies(cluster, job):
    import ray

    job, folder, stop = job
    job.wait_for(lambda: works_with(folder, 3))
    own = ray.get_runtime_context().get_node_id()
    nodes = [node for node in cluster.list_all_nodes() if node.node_id != own]
    first = said(folder)
    cluster.remove_node(nodes[-1], allow_graceful=False)
    job.wait_for(lambda: works_with(folder, 3) or works_with(folder, 2))
    added = cluster.add_node(num_cpus=1)
    job.wait_for(lambda: works_with(folder, 3))
    stop.touch()
    results = job.result()
    survivors = first.keys() & {pid for pid, *_ in results}
    assert len(survivors) >= 2
    check_results(results, 3, survivors)
    assert added.node_id in {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def test_an_elastic_job_that_fails():
    from kolovod.ray import RankFailed

    def fails():
        import kolovod as kv
        from kolovod import elastic

        kv.init()
        state = elastic.State(step=0)

        @elastic.run
        def train(state):
            raise KeyError("no such column")

        train(state)

    with pytest.raises(RankFailed, match=r"no such column"):
        run(fails, num_workers=(1, 2), elastic_timeout_s=5.0)


@pytest.mark.slow
def test_connections_to_the_launcher_break(cluster, tmp_path):
    """Of the calls that the driver makes of the launcher, or of their answers, many are lost."""
    driver = tmp_path / "driver.py"
    driver.write_text(_TALKS)
    fail = {"CoreWorkerService.grpc_client.PushTask": dict(_LOST)}
    environment = os.environ | {"RAY_testing_rpc_failure": json.dumps(fail)}
    done = subprocess.run(
        [sys.executable, driver, cluster.address],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    wanted = [f"[{rank}]<stdout>:line {line}" for rank in range(2) for line in range(60)]
    assert sorted(lines) == sorted(wanted)  # each once
    assert [line for line in lines if line[1] == "0"] == wanted[:60]
    assert "results [0, 1]" in done.stdout


@pytest.mark.slow
def test_tune_runs_several_jobs_at_once(tmp_path):
    from ray import tune

    def trial(config):
        import kolovod.ray

        def of_rank(x):
            import kolovod as kv

            kv.init()
            (tmp_path / f"in {x}").touch()
            deadline = time.monotonic() + 60  # until ranks of both jobs have come as far
            while len(list(tmp_path.glob("in *"))) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            others = len(list(tmp_path.glob("in *"))) - 1
            return others, x * float(kv.allreduce(np.ones(1), op=kv.Sum)[0])

        tune.report({"got": kolovod.ray.run(of_rank, (config["x"],), num_workers=2)})

    bundles = tune.PlacementGroupFactory([{"CPU": 0.0}, {"CPU": 1.0}, {"CPU": 1.0}])
    found = tune.Tuner(
        tune.with_resources(trial, bundles),
        param_space={"x": tune.grid_search([1.0, 10.0])},
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    ).fit()
    assert [result.metrics["got"] for result in found] == [[(1, 2.0)] * 2, [(1, 20.0)] * 2]


@pytest.mark.slow
def test_train_starts_our_ranks(tmp_path):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from kolovod.ray.train import KolovodConfig

    def loop():
        import ray.train

        import kolovod as kv

        kv.init()
        assert kv.rank() == ray.train.get_context().get_world_rank()
        total = float(kv.allreduce(np.array([kv.rank() + 1.0]), op=kv.Sum)[0])
        (tmp_path / f"{kv.rank()}").write_text(f"{total} {kv.size()}")

    DataParallelTrainer(
        loop,
        backend_config=KolovodConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "train")),
    ).fit()
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["3.0 2"] * 2


@pytest.fixture
def training(tmp_path):
    """``train(loop, max_failures)``: by Ray Train with three workers, one on each node.

    With two of them the others go on. What the loop calls there comes along with it.
    """
    from ray import cloudpickle
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from kolovod.ray.train import KolovodConfig

    def train(loop, max_failures):
        DataParallelTrainer(
            loop,
            backend_config=KolovodConfig(min_workers=2),
            scaling_config=ScalingConfig(num_workers=3, placement_strategy="SPREAD"),
            run_config=RunConfig(
                storage_path=str(tmp_path / "train"),
                failure_config=FailureConfig(max_failures=max_failures),
            ),
        ).fit()

    cloudpickle.register_pickle_by_value(ray_train_job)
    yield train
    cloudpickle.unregister_pickle_by_value(ray_train_job)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_train_replaces_one_worker_and_the_others_go_on(tmp_path, training, victim):
    """The first one, too, whose world the others are in."""

    def loop():
        import ray.train

        own = ray.train.get_context().get_world_rank()
        (tmp_path / f"began {own} {os.getpid()}").touch()
        is_victim = own == victim and first_here(tmp_path / "victim")
        train_until(
            tmp_path,
            lambda state: state.step >= 40 and state.total[0] != state.step * 3,
            before=lambda state: die() if is_victim and state.step == 10 else None,
        )

    training(loop, max_failures=1)
    found = ends(tmp_path)
    began = [int(path.name.split()[1]) for path in tmp_path.glob("began *")]
    assert sorted(began) == sorted([0, 1, 2, victim])  # the others once
    assert len(found) == 3
    assert sorted(told[1] for told in found.values()) == [0, 1, 2]
    assert found[victim][1] == 2  # who has come later is the last one
    assert {told[2] for told in found.values()} == {3}
    assert len({told[3:] for told in found.values()}) == 1  # all have the same state
    _, _, _, steps, total, sizes = found[0]
    assert total == sizes < 3 * steps  # each step counted once, with all that were there


@pytest.mark.slow
@pytest.mark.parametrize("seen", ["at once", "one by one"])
def test_train_begins_anew_when_nobody_has_the_state_any_more(tmp_path, training, seen):
    """Two are replaced, and the third one fails before it has let them in; so they fail, too.

    ``seen``: how Train comes to know of that; what it sees at once may be a part, too.
    """

    def began(pattern):
        return len(list(tmp_path.glob(f"began {pattern}")))

    def until(condition):
        deadline = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.1)

    def loop():
        import ray.train

        import kolovod as kv
        from kolovod.errors import JobOverError

        own = ray.train.get_context().get_world_rank()
        (tmp_path / f"began {own} {os.getpid()}").touch()
        is_first = first_here(tmp_path / f"was {own}")

        def before(state):
            if is_first and own > 0 and state.step == 10:
                die()

        def after(state):
            if is_first and own == 0 and kv.size() == 1:
                until(lambda: began("*") == 5)
                raise KeyError("label")

        try:
            train_until(tmp_path, lambda state: state.step >= 20, before, after)
        except JobOverError:
            if seen == "one by one":
                until(lambda: began("0 *") == 2)
            raise

    training(loop, max_failures=8)
    assert began("0 *") == 2
    found = ends(tmp_path)
    assert sorted(told[1:] for told in found.values()) == [(r, 3, 20, 60, 60) for r in range(3)]


@pytest.mark.slow
def test_train_hears_that_nobody_is_left_to_join(tmp_path, training):
    """A worker fails when the others have come to the end of their loops."""

    def loop():
        import ray.train

        own = ray.train.get_context().get_world_rank()
        train_until(tmp_path, lambda state: state.step >= 5)
        if own == 1:
            deadline = time.monotonic() + 60
            while len(ends(tmp_path)) < 3 and time.monotonic() < deadline:
                time.sleep(0.1)
            die()

    with pytest.raises(Exception, match="the job is over: no member of epoch 1 is left"):
        training(loop, max_failures=1)
    assert len(ends(tmp_path)) == 3
