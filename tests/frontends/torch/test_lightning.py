"""The strategy "kolovod" of Lightning, in this process: whose ranks it has."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("lightning", reason="lightning is not installed")

from kolovod.errors import InvalidArgumentError  # noqa: E402
from kolovod.rendezvous.rank_environment import RankEnvironment  # noqa: E402
from kolovod.torch.lightning import KolovodStrategy  # noqa: E402

pytestmark = pytest.mark.frameworks

CPU = torch.device("cpu")


@pytest.fixture
def on_rank_4_of_5(monkeypatch):
    """The second rank of a host that has two; the other one has three."""
    place = RankEnvironment(4, 5, 1, 2, 1, 2, rendezvous="127.0.0.1:1", secret="00")
    for name, value in place.variables().items():
        monkeypatch.setenv(name, value)


def test_ranks_are_those_of_the_job(on_rank_4_of_5):
    strategy = KolovodStrategy()
    strategy.parallel_devices = [CPU]  # what Lightning has where devices are not said
    strategy.set_world_ranks()  # as the trainer does, by what it knows of devices and nodes
    assert (strategy.world_size, strategy.global_rank, strategy.local_rank) == (5, 4, 1)
    assert strategy.node_rank == 1
    assert strategy.root_device == CPU
    assert strategy.parallel_devices == [CPU, CPU]
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 5, "rank": 4}
    assert strategy.process_group_backend == "kolovod"


def test_gpus_are_those_of_the_host(on_rank_4_of_5):
    gpus = [torch.device("cuda", index) for index in range(4)]
    strategy = KolovodStrategy(find_unused_parameters=True)
    strategy.parallel_devices = gpus
    assert strategy.root_device == gpus[1]


@pytest.mark.parametrize(
    "devices", [[CPU] * 3, [torch.device("cuda", 0)]], ids=["more CPUs", "fewer GPUs"]
)
def test_devices_that_contradict_the_job_are_refused(on_rank_4_of_5, devices):
    strategy = KolovodStrategy()
    kind = devices[0].type
    with pytest.raises(
        InvalidArgumentError, match=f"{len(devices)} devices, {kind}, but the job has 2"
    ):
        strategy.parallel_devices = devices


def test_without_a_job_lightning_counts(monkeypatch):
    monkeypatch.delenv("KOLOVOD_RANK", raising=False)
    strategy = KolovodStrategy()
    assert strategy.cluster_environment is None
    strategy.parallel_devices = [CPU] * 3
    assert strategy.num_processes == 3
    assert strategy.process_group_backend == "kolovod"


def test_missing_lightning_is_named_with_its_extra():
    code = "import sys; sys.modules['lightning'] = None; import kolovod.torch.lightning"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "kolovod.torch.lightning needs Lightning" in done.stderr
    assert "pip install 'kolovod[lightning]'" in done.stderr
