"""A tf.data service between two jobs: whoever trains gets every element once."""

from __future__ import annotations

import json
import runpy
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from forked import run_tensorflow_ranks as run_ranks
from frameworks import is_installed

from kolovod.errors import AuthenticationError, BootstrapError, StartTimeoutError

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(200),
]

ELEMENTS = 60


def compute(module, file, options, rank):
    """The command line, in a rank that has TensorFlow imported."""
    sys.argv = [module, file, *options]
    runpy.run_module(module, run_name="__main__")


def trained(file, rank):
    """What this rank reads, by Horovod's names and from the compute side's dispatcher."""
    import tensorflow as tf

    import horovod.tensorflow as hvd
    from horovod.tensorflow.data.compute_service import TfDataServiceConfig

    hvd.init()
    config = TfDataServiceConfig.read(file, wait_for_file_creation=True)
    dataset = tf.data.Dataset.range(ELEMENTS).map(lambda x: 2 * x)
    dataset = dataset.send_to_data_service(config, rank, hvd.size(), reuse_dataset=True)
    found = [int(x) for x in dataset]
    hvd.allgather_object(None)  # nobody reads any more
    if rank == 0:
        config.compute_client(verbose=2).shutdown()
    return found


def trained_with_own_dispatchers(file, rank):
    """By Kolovod's names, each rank with a dispatcher of its own and so with all elements."""
    import tensorflow as tf

    import kolovod.tensorflow as kv
    from kolovod.tensorflow.data_service import DataServiceConfig, data_service, distribute

    kv.init()
    config = DataServiceConfig.read(file, wait_s=60)
    dataset = tf.data.Dataset.range(ELEMENTS)
    with pytest.raises(RuntimeError, match="within data_service"):
        distribute(dataset, config, rank)
    with data_service(config, rank) as address:
        dataset = dataset.apply(
            tf.data.experimental.service.distribute("distributed_epoch", address)
        )
        found = [int(x) for x in dataset]
    kv.allgather_object(None)
    if rank == 0:
        config.client().shutdown()
    return found


@pytest.mark.parametrize(
    ("module", "options", "train", "times"),
    [
        ("horovod.tensorflow.data.compute_worker", [], trained, 1),
        (
            "kolovod.tensorflow.data_service",
            ["--dispatchers", "2", "--dispatcher-side", "training"],
            trained_with_own_dispatchers,
            2,
        ),
    ],
    ids=["horovod", "own-dispatchers"],
)
def test_every_element_comes(tmp_path, module, options, train, times):
    file = tmp_path / "service.json"
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run_ranks, 2, partial(compute, module, str(file), options), timeout_s=120)
        found = run_ranks(2, partial(train, str(file)), timeout_s=110)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert job.result(60) == [None, None]
    factor = 2 if train is trained else 1
    assert sorted(found[0] + found[1]) == sorted([factor * i for i in range(ELEMENTS)] * times)


def ask_a_directory(rank):
    from kolovod.tensorflow.directory import Directory, DirectoryClient

    directory = Directory(2, 1, "a secret of enough bytes", ["127.0.0.1"])
    try:
        client = DirectoryClient(directory.address, "a secret of enough bytes", 5.0)
        with pytest.raises(StartTimeoutError, match=r"dispatcher 1 has not started in 0\.1 s"):
            client.wait_for_dispatcher_registration(1, 0.1)
        with pytest.raises(StartTimeoutError, match="not all of the 1 workers of dispatcher 0"):
            client.wait_for_dispatcher_worker_registration(0, 0.1)
        with pytest.raises(BootstrapError, match="number"):
            client.register_dispatcher(2, "grpc://nowhere:1")
        client.register_dispatcher(1, "grpc://127.0.0.1:1")
        assert client.wait_for_dispatcher_registration(1) == "grpc://127.0.0.1:1"
        with pytest.raises(AuthenticationError):
            DirectoryClient(directory.address, "another secret", 5.0).register_dispatcher(0, "x")
        client.shutdown()
        client.wait_for_shutdown()
    finally:
        directory.close()
    with pytest.raises(BootstrapError, match="does not answer"):
        client.wait_for_dispatcher_registration(1, 0.1)
    client.wait_for_shutdown()


def test_the_directory_says_what_is_missing():
    run_ranks(1, ask_a_directory)


def test_configs(tmp_path):
    def work(rank, folder):
        from horovod.tensorflow.data.compute_service import TfDataServiceConfig
        from kolovod.errors import InvalidArgumentError
        from kolovod.tensorflow.data_service import DataServiceConfig, data_service, distribute

        places = {"lo": [("127.0.0.1", 4000)], "eth0": [("10.0.0.1", 4000)]}
        config = TfDataServiceConfig(2, 3, "compute", places, b"\x01\x02", timeout=7)
        file = f"{folder}/theirs.json"
        config.write(file)
        assert json.loads(Path(file).read_text())["key"] == "0102"
        assert TfDataServiceConfig.read(file) == config
        assert config.config().address == "127.0.0.1:4000,10.0.0.1:4000"
        ours = DataServiceConfig(1, 2, "training", "127.0.0.1:1", "00ff", 3.0)
        ours.write(f"{folder}/ours.json")
        assert DataServiceConfig.read(f"{folder}/ours.json") == ours
        assert TfDataServiceConfig.of(ours).config() == ours
        with pytest.raises(BootstrapError, match="does not describe"):
            DataServiceConfig.read(file)
        with pytest.raises(InvalidArgumentError, match="does not describe"):
            TfDataServiceConfig.read(f"{folder}/ours.json")
        with pytest.raises(BootstrapError, match="cannot be read"):
            DataServiceConfig.read(f"{folder}/none.json", wait_s=0.2)
        for wrong in ((0, 1, "compute"), (1, 1, "nowhere"), (1, "2", "compute")):
            with pytest.raises(InvalidArgumentError, match=r"dispatcher"):
                DataServiceConfig(*wrong, "127.0.0.1:1", "00ff")
        two = DataServiceConfig(2, 1, "compute", "127.0.0.1:1", "00ff")
        with (
            pytest.raises(InvalidArgumentError, match=r"rank 2 trains, but .* 2 dispatchers"),
            data_service(two, 2),
        ):
            pass
        with pytest.raises(InvalidArgumentError, match="give size"):
            distribute(None, two, 1, reuse_dataset=True, round_robin=True)

    run_ranks(1, work, str(tmp_path))
