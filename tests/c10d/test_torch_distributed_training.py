"""DDP and FSDP2 over the torch.distributed backend train as they do over gloo, bit for bit."""

from __future__ import annotations

import itertools
import math
import re
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
from forked import run_torch_ranks as run_ranks  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: E402
    default_hooks,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch_launching import TORCHRUN, start  # noqa: E402

import kolovod.torch  # noqa: E402, F401 - registers the backend

STEPS = 6


class Net(nn.Module):
    """With batch statistics, and a branch that ``forward`` takes only when it is told to."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(12, 200), nn.BatchNorm1d(200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh()
        )
        self.branch = nn.Linear(200, 200)
        self.head = nn.Linear(200, 3)

    def forward(self, x, takes_branch=True):
        x = self.body(x)
        return self.head(self.branch(x) if takes_branch else x)


def batch(step):
    draw = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randn(8, 12, generator=draw), torch.randint(0, 3, (8,), generator=draw)


def trained(model, optimizer, takes_branch=lambda step: True, syncs=lambda step: True):
    """The parameters and buffers after some steps."""
    for step in range(STEPS):
        inputs, targets = batch(step)
        if syncs(step):
            optimizer.zero_grad()
        before = model.no_sync if not syncs(step + 1) else torch.enable_grad
        with before():
            nn.functional.cross_entropy(model(inputs, takes_branch(step)), targets).backward()
        if syncs(step + 1):
            optimizer.step()
    values = [value.full_tensor() if hasattr(value, "full_tensor") else value
              for value in model.state_dict().values()]  # fmt: skip
    return [value.detach().clone() for value in values]


def new_net():
    torch.manual_seed(5 + dist.get_rank())  # DDP makes the ranks equal
    return Net()


def ddp(
    group,
    takes_branch=lambda step: True,
    syncs=lambda step: True,
    hook=None,
    bucket_cap_mb=0.1,
    **options,
):
    model = DistributedDataParallel(
        new_net(), process_group=group, bucket_cap_mb=bucket_cap_mb, **options
    )
    if hook is not None:
        hook(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return trained(model, optimizer, takes_branch, syncs)


def fp16(model, group):
    model.register_comm_hook(group, default_hooks.fp16_compress_hook)


def power_sgd(model, group):
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def blocking(model, group):
    """Waits inside backward for what ``then`` makes of a future, and for several at once.

    The latter happens in C++, unseen by Kolovod, and takes it a second each: in two buckets only.
    """
    buckets = itertools.count()

    def hook(state, bucket):
        tensor = bucket.buffer().div_(2)
        first = dist.all_reduce(tensor, group=group, async_op=True).get_future()
        halved = first.then(lambda future: future.value()[0]).wait()
        if next(buckets) in (0, 5):
            extra = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future()
            torch.futures.wait_all([extra])
        done = torch.futures.Future()
        done.set_result(halved)
        return done

    model.register_comm_hook(None, hook)


def join(group):
    """Rank r has r + 2 batches."""
    model = DistributedDataParallel(new_net(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(dist.get_rank() + 2):
            inputs, targets = batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


DDP = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True, "takes_branch": lambda step: step % 2 == 0},
    "static": {"static_graph": True},
    "accumulation": {"syncs": lambda step: step % 2 == 0},
    "fp16": {"hook": fp16},
    "power_sgd": {"hook": power_sgd, "bucket_cap_mb": 25},  # several can deadlock gloo's threads
    "blocking_hook": {"hook": blocking},
}


def compare(mine, theirs, label):
    assert len(mine) == len(theirs) > 10, label
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other), label


def ddp_both_ways(rank):
    dist.init_process_group("kolovod")
    gloo = dist.new_group(backend="gloo")
    for label, options in DDP.items():
        compare(ddp(dist.group.WORLD, **options), ddp(gloo, **options), label)
    assert len(ddp(dist.group.WORLD, hook=power_sgd)) > 10
    compare(join(dist.group.WORLD), join(gloo), "join")
    dist.destroy_process_group()
    return True


def test_ddp_equals_gloo():
    assert all(run_ranks(2, ddp_both_ways, timeout_s=100))


def embedding(group):
    """With sparse gradients, which DDP reduces one by one."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True, mode="sum"), nn.Linear(8, 3))
    model = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        words = torch.randint(0, 50, (8, 4), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        targets = batch(step)[1]
        begin = dist.get_rank()
        nn.functional.cross_entropy(model(words[begin:]), targets[begin:]).backward()
        assert net[0].weight.grad.is_sparse
        optimizer.step()
    return [value.clone() for value in net.state_dict().values()]


def sparse_both_ways(rank):
    dist.init_process_group("kolovod")
    gloo = dist.new_group(backend="gloo")
    for mine, theirs in zip(embedding(dist.group.WORLD), embedding(gloo), strict=True):
        assert torch.equal(mine, theirs)
    dist.destroy_process_group()
    return True


def test_ddp_of_sparse_gradients_equals_gloo():
    assert all(run_ranks(2, sparse_both_ways))


def fsdp(mesh, **options):
    torch.manual_seed(5)
    model = Net()
    for layer in (model.body[0], model.body[3], model.branch):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return trained(model, optimizer)


def mesh_over(backend, shape, names):
    """Ranks 0, 1, ... row by row."""
    if backend == "kolovod":
        return init_device_mesh("cpu", shape, mesh_dim_names=names)
    grid = torch.arange(math.prod(shape)).view(-1, shape[-1])
    mine = []
    for lines in (grid.t(), grid)[-len(shape) :]:
        groups = [dist.new_group(line.tolist(), backend=backend) for line in lines]
        mine.append(next(group for group in groups if group != dist.GroupMember.NON_GROUP_MEMBER))
    if len(mine) == 1:
        return DeviceMesh.from_group(mine[0], "cpu", mesh_dim_names=names)
    return DeviceMesh.from_group(mine, "cpu", mesh=grid, mesh_dim_names=names)


def fsdp_both_ways(rank, shape):
    dist.init_process_group("kolovod")
    names = ("replicate", "shard")[-len(shape) :]
    meshes = [mesh_over(backend, shape, names) for backend in ("kolovod", "gloo")]
    for reshards in (True, False):
        mine, theirs = (fsdp(mesh, reshard_after_forward=reshards) for mesh in meshes)
        if len(shape) == 1:
            compare(mine, theirs, "fsdp")
        for one, other in zip(mine, theirs, strict=True):  # of four: added in another order
            torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
    dist.destroy_process_group()
    return True


@pytest.mark.parametrize(
    "shape", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)], ids=["fsdp", "hsdp"]
)
def test_fsdp2_equals_gloo(shape):
    assert all(run_ranks(2 * len(shape), fsdp_both_ways, shape, timeout_s=100))


SCRIPT = """
import torch, torch.distributed as dist
for _ in range(2):
    dist.init_process_group("kolovod")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    model(torch.full((1, 3), rank + 1.0)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.5] * 3], model.module.weight.grad
    half = dist.new_group([1])
    if rank == 1:
        dist.barrier(half)
    dist.destroy_process_group()
import os; os.write(1, f"rank {rank} is done\\n".encode())
"""


@pytest.mark.slow
def test_torchrun(tmp_path):
    done = start(TORCHRUN, SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall("rank . is done", done.stdout)) == ["rank 0 is done", "rank 1 is done"]


HOSTS = """
import os, torch, torch.distributed as dist
os.environ["KOLOVOD_HOST"] = f"host-{os.environ['RANK']}"
dist.init_process_group("kolovod")
tensor = torch.ones(1000)
dist.all_reduce(tensor)
dist.all_reduce(tensor, group=dist.new_group())
os.write(1, f"all have {tensor[999].item()}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_on_several_hosts_with_a_common_secret(tmp_path):
    done = start(TORCHRUN, HOSTS, tmp_path, KOLOVOD_SECRET="a text that all ranks know")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all have 4.0") == 2
    done = start(TORCHRUN, HOSTS, tmp_path, KOLOVOD_START_TIMEOUT_S="60")
    assert done.returncode != 0
    assert (
        "rank 0 is on host host-0 and has no KOLOVOD_SECRET, rank 1 on host host-1" in done.stderr
    )


ALONE = """
import os, torch, torch.distributed as dist
dist.init_process_group("kolovod", rank=0, world_size=1, store=dist.HashStore())
tensor = torch.ones(1)
dist.all_reduce(tensor)
dist.destroy_process_group()
os.write(1, f"alone with {tensor.item()}\\n".encode())
"""


@pytest.mark.slow
def test_a_group_of_one_needs_none_of_those_that_a_launcher_speaks_of(tmp_path):
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = start([sys.executable], ALONE, tmp_path, KOLOVOD_START_TIMEOUT_S="60", **told)
    assert done.stdout == "alone with 1.0\n", done.stderr
