"""horovod.ray: executors whose workers are actors. Two GPUs are pretended; nobody uses them."""

from __future__ import annotations

import itertools
import os
import threading
import time
from functools import partial

import numpy as np
import pytest
from ray_cluster import NEEDS_RAY, is_free_again, ray_cluster

pytestmark = NEEDS_RAY


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    with ray_cluster(tmp_path_factory.mktemp("ray"), 2, gpus=2) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(cluster):
    yield
    assert is_free_again(), "workers or placement groups are left"


class Counter:
    """What an executor may hold in each worker."""

    def __init__(self, start, step=1):
        self.value, self.step = start, step

    def next(self):
        self.value += self.step
        return self.value


def total(extra=0.0):
    import horovod.common.basics as hvd  # which needs no framework: each import takes seconds
    import kolovod as kv
    from horovod.ray import ray_logger

    hvd.init()
    ray_logger.log({"rank": hvd.rank()})
    return hvd.rank(), hvd.size(), float(kv.allreduce(np.array([1.0 + extra]), op=kv.Sum)[0])


def test_functions_are_called_in_workers_that_stay():
    import ray

    from horovod.ray import RayExecutor

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=30), num_workers=2)
    executor.start(Counter, [10], {"step": 5}, extra_env_vars={"MINE": 7})
    logged = []
    try:
        assert executor.run(total, callbacks=[logged.append]) == [(0, 2, 2.0), (1, 2, 2.0)]
        assert sorted(entry["rank"] for entry in logged) == [0, 1]
        assert executor.run(total, args=[1.0]) == [(0, 2, 4.0), (1, 2, 4.0)]
        assert executor.execute(lambda counter: counter.next()) == [15, 15]
        assert executor.execute_single(lambda counter: counter.next()) == 20
        assert executor.execute(lambda counter: counter.next()) == [25, 20]
        assert ray.get(executor.run_remote(os.getenv, args=["MINE"])) == ["7", "7"]
        assert executor.run(os.getenv, args=["HOROVOD_LOCAL_RANK"]) == ["0", "1"]
        assert "KOLOVOD_SECRET" not in ray.get(executor.workers[0].env_vars.remote())
    finally:
        executor.shutdown()
    with pytest.raises(ValueError, match=r"start\(\)"):
        executor.run(total)


def test_workers_of_a_host_see_each_others_gpus():
    from horovod.ray import RayExecutor

    executor = RayExecutor(num_hosts=1, num_workers_per_host=2, use_gpu=True)
    executor.start()
    try:
        assert executor.num_workers == 2
        assert executor.run(os.getenv, args=["CUDA_VISIBLE_DEVICES"]) == ["0,1", "0,1"]
    finally:
        executor.shutdown()


def test_what_a_function_raises():
    from horovod.ray import RayExecutor

    def fails():
        import kolovod as kv

        kv.init()
        if kv.rank() == 0:
            raise KeyError("label")
        kv.allreduce(np.ones(1))

    executor = RayExecutor(num_workers=2)
    executor.start()
    try:
        with pytest.raises(Exception, match=r"KeyError: 'label'"):
            executor.run(fails)
    finally:
        executor.shutdown()


def test_no_room():
    from horovod.ray import RayExecutor

    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    executor = RayExecutor(settings, num_workers=5)
    with pytest.raises(TimeoutError, match="5 bundles"):
        executor.start()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_workers": 2, "min_workers": 1}, "Both `min_workers` and `num_workers` provided"),
        ({"max_workers": 2, "num_workers": 1}, "max_workers"),
        ({"num_workers": 2, "num_hosts": 1}, "Only one"),
        ({"num_workers": 0}, "num_workers=0"),
        ({}, "set num_workers"),
        ({"num_workers": 2, "gpus_per_worker": 1}, "use_gpu"),
    ],
)
def test_arguments_that_contradict_each_other(arguments, text):
    from horovod.ray import RayExecutor

    with pytest.raises(ValueError, match=text):
        RayExecutor(**arguments)


def elastic():
    import horovod.torch as hvd
    from horovod.ray import ray_logger

    hvd.init()
    state = hvd.elastic.TorchState(batch=0)

    @hvd.elastic.run
    def train(state):
        while state.batch < 5:
            state.batch += 1
            ray_logger.log({"batch": state.batch, "rank": hvd.rank()})
            state.commit()
        return hvd.size(), state.batch, os.environ["HOROVOD_ELASTIC"], os.environ.get("MINE")

    return train(state)


def test_an_elastic_executor():
    from horovod.ray import ElasticRayExecutor

    settings = ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=2)
    executor = ElasticRayExecutor(settings, env_vars={"MINE": "7"})
    with pytest.raises(ValueError, match=r"start\(\)"):
        executor.run(elastic)
    executor.start()
    logged = []
    assert executor.run(elastic, callbacks=[logged.append]) == [(2, 5, "1", "7")] * 2
    for rank in range(2):  # each one's in order
        batches = [entry["batch"] for entry in logged if entry["rank"] == rank]
        assert batches == list(range(1, 6))


def elastic_without_a_framework(fails=False):
    """The same; its workers need not import PyTorch."""
    import horovod.common.basics as hvd
    import kolovod as kv
    from horovod.common import elastic

    hvd.init()
    state = elastic.ObjectState(partial(kv.broadcast_object, root_rank=0), hvd.rank, batch=0)

    def train(state):
        while state.batch < 5:
            if fails:
                raise KeyError("label")
            state.batch += 1
            state.commit()
        return hvd.size(), state.batch, os.environ["HOROVOD_ELASTIC"], os.environ.get("MINE")

    return elastic.run_fn(train, elastic.next_world)(state)


@pytest.mark.slow
def test_an_elastic_job_of_the_other_executor():
    from horovod.ray import RayExecutor

    executor = RayExecutor(min_workers=1, max_workers=2)
    executor.start()
    assert executor.run(elastic_without_a_framework) == [(2, 5, "1", None)] * 2
    with pytest.raises(RuntimeError, match=r"(?s)non-zero status.*KeyError: 'label'"):
        executor.run(elastic_without_a_framework, args=[True])
    with pytest.raises(ValueError, match="elastic job"):
        executor.execute_single(lambda executable: None)
    executor.shutdown()


class Growing:
    """A discovery that cannot be pickled, and shows a second place once the driver has seen a log.

    Also a generator, a lock and a thread's own memory stay where they are.
    """

    def __init__(self):
        import ray

        self.address = ray.nodes()[0]["NodeManagerAddress"]
        self.lock, self.pids, self.fails = threading.Lock(), set(), True
        self.places = itertools.repeat(1)

    def find_available_hosts_and_slots(self):
        with self.lock:
            self.pids.add(os.getpid())
            places = next(self.places)
            if places == 2 and self.fails:
                self.fails = False
                raise KeyError("the cluster's list")
            return {self.address: places}

    def grow(self, entry):
        with self.lock:
            self.places = itertools.repeat(2)


def grows():
    """Steps until there are two ranks, which is when the driver has heard of a step of one."""
    import horovod.common.basics as hvd
    import kolovod as kv
    from horovod.common import elastic
    from horovod.ray import ray_logger

    hvd.init()
    state = elastic.ObjectState(partial(kv.broadcast_object, root_rank=0), hvd.rank, batch=0)

    def train(state):
        while hvd.size() < 2:
            ray_logger.log({"batch": state.batch})
            state.batch += 1
            state.commit()
            time.sleep(0.05)
        return hvd.size()

    return elastic.run_fn(train, elastic.next_world)(state)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["v1", "v2"])
def test_discovery_and_callbacks_are_the_drivers(which, capfd):
    from horovod.ray import ElasticRayExecutor, RayExecutor

    discovery = Growing()
    if which == "v1":
        settings = ElasticRayExecutor.create_settings(1, 2, discovery=discovery)
        executor = ElasticRayExecutor(settings, override_discovery=False)
    else:
        settings = RayExecutor.create_settings()
        settings.discovery = discovery
        executor = RayExecutor(settings, min_workers=1, max_workers=2, override_discovery=False)
    executor.start()
    assert executor.run(grows, callbacks=[discovery.grow]) == [2, 2]
    assert discovery.pids == {os.getpid()}
    assert "host discovery has failed: KeyError" in capfd.readouterr().err


@pytest.fixture
def named_hosts(cluster):
    """A discovery of two more nodes of one CPU each, which are told apart by their names only."""
    from horovod.runner.elastic.discovery import HostDiscovery

    class Named(HostDiscovery):
        def find_available_hosts_and_slots(self):
            return dict.fromkeys(names, 1)

    names = ["host-1", "host-2"]
    nodes = [cluster.add_node(num_cpus=1, resources={f"node:{name}": 1}) for name in names]
    cluster.wait_for_nodes()
    yield Named()
    assert is_free_again()
    for node in nodes:
        cluster.remove_node(node)


def fails_once(folder, failing):
    """Steps until two ranks have been there, then fewer, then two again; a host's rank fails."""
    import horovod.common.basics as hvd
    import kolovod as kv
    from horovod.common import elastic

    hvd.init()
    state = elastic.ObjectState(partial(kv.broadcast_object, root_rank=0), hvd.rank, sizes=[])
    host = os.environ["HOROVOD_HOSTNAME"]

    def train(state):
        while state.sizes != [2, 1, 2]:
            if state.sizes[-1:] != [hvd.size()]:
                state.sizes = [*state.sizes, hvd.size()]
            state.commit()
            if host == failing and not (folder / "failed").exists():
                (folder / "failed").touch()
                raise OSError("out of memory")
            time.sleep(0.05)
        return host, state.sizes

    return elastic.run_fn(train, elastic.next_world)(state)


@pytest.mark.slow
def test_a_host_comes_back_after_its_cooldown(named_hosts, tmp_path):
    """Nodes go by what they are called in Ray's resources; who asks for hosts, too, is elastic."""
    from horovod.ray import RayExecutor

    settings = RayExecutor.create_settings(timeout_s=60, nics={"lo"})
    settings.discovery = named_hosts
    executor = RayExecutor(
        settings,
        num_hosts=2,
        min_workers=1,
        cooldown_range=(1, 2),
        elastic_timeout=60,
        override_discovery=False,
    )
    executor.start()
    results = executor.run(fails_once, args=[tmp_path, "host-2"])
    assert results == [("host-1", [2, 1, 2]), ("host-2", [2, 1, 2])]


@pytest.mark.slow
def test_as_many_resets_as_are_allowed(named_hosts, tmp_path):
    from horovod.ray import RayExecutor

    settings = RayExecutor.create_settings(timeout_s=60)
    settings.discovery = named_hosts
    limits = {"min_workers": 1, "reset_limit": 1, "cooldown_range": (1, 2)}
    executor = RayExecutor(settings, override_discovery=False, **limits)
    executor.start()
    with pytest.raises(RuntimeError, match="the reset limit of 1 is reached"):
        executor.run(fails_once, args=[tmp_path, "host-2"])


def test_workers_that_somebody_else_starts_meet_by_a_coordinator():
    import ray

    from horovod.ray.runner import Coordinator, MiniSettings
    from horovod.ray.utils import detect_nics, nics_to_env_var

    settings = MiniSettings(timeout_s=60)
    coordinator = Coordinator(settings)
    coordinator.register("here", "node", 1)
    with pytest.raises(ValueError, match=r"ranks \[1\] are registered: some are missing"):
        coordinator.finalize_registration()
    coordinator.register("here", "node", 0)
    own = coordinator.finalize_registration()
    shared = coordinator.establish_rendezvous()
    shared |= nics_to_env_var(detect_nics(settings, list(coordinator.hostnames)))
    assert (coordinator.world_size, coordinator.hoststring) == (2, "node:2")
    assert [own[rank]["HOROVOD_LOCAL_RANK"] for rank in range(2)] == ["0", "1"]

    @ray.remote
    def rank(variables):
        import horovod.common.basics as hvd

        os.environ.update(variables)
        hvd.init()
        return hvd.rank(), hvd.size(), hvd.local_size()

    made = [rank.remote({**own[at], **shared}) for at in range(2)]
    assert ray.get(made) == [(0, 2, 2), (1, 2, 2)]
    del made
    ray.kill(coordinator._meeting)  # it ends with the driver, which goes on here


def test_names_of_the_second_elastic_implementation():
    from ray.util.placement_group import remove_placement_group

    from horovod.ray import elastic_v2
    from horovod.ray.strategy import create_placement_group

    discovery = elastic_v2.RayHostDiscovery(cpus_per_worker=2, gpus_per_worker=1)
    assert list(discovery.find_available_hosts_and_slots().values()) == [1]
    shown = elastic_v2.TestDiscovery(1, 1, 0.0, cpus_per_worker=1, gpus_per_worker=1)
    assert list(shown.find_available_hosts_and_slots().values()) == [2]
    group, bundles = create_placement_group({"CPU": 1}, 2, 60, "PACK")
    assert bundles == group.bundle_specs == [{"CPU": 1}] * 2
    remove_placement_group(group)


def test_discovery():
    import ray

    from horovod.ray.elastic import RayHostDiscovery, TestDiscovery

    address = ray.nodes()[0]["NodeManagerAddress"]
    assert RayHostDiscovery().find_available_hosts_and_slots() == {address: 2}
    assert RayHostDiscovery(cpus_per_slot=3).find_available_hosts_and_slots() == {}
    with_gpus = RayHostDiscovery(use_gpu=True, gpus_per_slot=2)
    assert with_gpus.find_available_hosts_and_slots() == {address: 1}
    assert TestDiscovery(1, 1, 0.0).find_available_hosts_and_slots() == {address: 2}
    assert TestDiscovery(0, 0, 0.0).find_available_hosts_and_slots() == {}


def test_hosts_of_a_discovery_come_and_go(monkeypatch):
    """Between the limits, one at a time."""
    from horovod.ray import elastic

    nodes = [
        {"Alive": True, "NodeManagerAddress": f"192.0.2.{n}", "Resources": {"CPU": 2.0}}
        for n in range(1, 6)
    ]
    monkeypatch.setattr(elastic.ray, "nodes", lambda: nodes)
    discovery = elastic.TestDiscovery(2, 4, 0.0, verbose=False)
    before = len(discovery.find_available_hosts_and_slots())
    counts = set()
    for _ in range(200):
        now = len(discovery.find_available_hosts_and_slots())
        assert 2 <= now <= 4
        assert abs(now - before) <= 1
        before = now
        counts.add(now)
    assert counts == {2, 3, 4}
    nodes[:] = nodes[:1]  # of those that were shown, at most one is left
    assert len(discovery.find_available_hosts_and_slots()) == 1
