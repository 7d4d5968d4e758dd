"""send, recv and their kin of torch.distributed over Kolovod, and kv's on PyTorch's tensors."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from launched import KOLOVOD
from torch_launching import start

BEGIN = """
import copy, datetime
import torch, torch.distributed as dist
import kolovod.torch as kv
dist.init_process_group("kolovod")
rank, size = dist.get_rank(), dist.get_world_size()
"""


@pytest.fixture
def check(tmp_path):
    """Runs ``code`` on each of ``size`` ranks; what they print."""

    def run(size, code, *flags):
        command = [*KOLOVOD, "run", "-np", str(size), *flags, "--", sys.executable]
        done = start(command, BEGIN + code + "\ndist.barrier()\n", tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


DTYPES = "float32 bfloat16 int16 bool complex64 float8_e4m3fn"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["a:3", "a:2,b:1"])
def test_all_kinds_of_tensors(place, check):
    code = f"""
after, before = (rank + 1) % size, (rank - 1) % size
tag = 0
for dtype in {DTYPES!r}.split():
    for shape in ((1,), (0,), (5,), (100, 300)):
        tag += 2
        mine = (torch.rand(shape) * 8).to(getattr(torch, dtype))
        theirs, back = torch.empty_like(mine), torch.empty_like(mine)
        sent = dist.isend(mine, after, tag=tag)
        assert dist.recv(theirs, before, tag=tag) == before
        sent.wait()
        sent = dist.isend(theirs, before, tag=tag + 1)
        source = dist.irecv(back, tag=tag + 1)
        source.wait()
        assert source._source_rank() == after and source.is_completed()
        sent.wait()
        assert torch.equal(back.view(torch.uint8), mine.view(torch.uint8))
scalar = torch.zeros(())
work = dist.isend(torch.tensor(rank + 0.5), after)
dist.recv(scalar, before)
assert scalar == before + 0.5
strided = torch.zeros(10, 6)
work = dist.isend(torch.arange(30.).reshape(10, 3), after)
dist.recv(strided[:, ::2], before)
assert torch.equal(strided[:, ::2], torch.arange(30.).reshape(10, 3)) and not strided[:, 1::2].any()
work.wait()
"""
    check(3, code, "--label-hosts", place)


@pytest.mark.slow
def test_a_batch_in_groups_and_a_collective_that_reads_what_is_received(check):
    code = """
pair = dist.new_group([1, 2])
if rank > 0:
    other = 3 - rank
    into, out = torch.zeros(5000), torch.full((5000,), float(rank))
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.irecv, into, other, group=pair),
        dist.P2POp(dist.isend, out, other, group=pair),
    ])
    total = into  # still on its way
    dist.all_reduce(total, group=pair)
    assert torch.equal(total, torch.full((5000,), 3.0))
    for work in works:
        work.wait()
everybody = [dist.P2POp(kind, torch.full((70_000,), float(rank)), peer)
             for peer in range(size) if peer != rank for kind in (dist.irecv, dist.isend)]
for work in dist.batch_isend_irecv(everybody):
    work.wait()
assert sorted(op.tensor[0].item() for op in everybody[::2]) == [r for r in range(size) if r != rank]
if rank == 0:
    dist.send_object_list([{"a": 7}, "text"], 1)
elif rank == 1:
    got = [None, None]
    dist.recv_object_list(got, 0)
    assert got == [{"a": 7}, "text"]
"""
    check(3, code)


@pytest.mark.slow
def test_a_wait_ends_at_its_limit(check):
    code = """
if rank == 0:
    work = dist.irecv(torch.zeros(3), 1)
    try:
        work.wait(datetime.timedelta(milliseconds=300))
    except Exception as error:
        print(type(error).__name__, error)
    dist.send(torch.ones(1), 1, tag=1)
    work.wait()
else:
    dist.recv(torch.zeros(1), 0, tag=1)
    dist.send(torch.ones(3), 0)
"""
    assert "recv 'rank 1, tag 0'" in check(2, code)


@pytest.mark.slow
def test_pipeline_parallel_training(check):
    """Two stages by torch.distributed.pipelining give the losses of the whole model."""
    code = """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
torch.manual_seed(0)
parts = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh()), torch.nn.Linear(16, 3)]
reference = copy.deepcopy(torch.nn.Sequential(*parts))
x, y = torch.randn(8, 8), torch.randint(3, (8,))
loss_of = torch.nn.functional.cross_entropy
stage = PipelineStage(parts[rank], rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_of)
losses = []
if rank == 0:
    schedule.step(x)
else:
    schedule.step(target=y, losses=losses)
loss = sum(loss_of(reference(a), b) for a, b in zip(x.chunk(4), y.chunk(4))) / 4
loss.backward()
theirs = dict(reference.named_parameters())
for name, parameter in parts[rank].named_parameters():
    torch.testing.assert_close(parameter.grad, theirs[f"{rank}.{name}"].grad)
if rank == 1:
    torch.testing.assert_close(torch.stack(losses).mean(), loss.detach())
"""
    check(2, code)


@pytest.mark.slow
def test_our_own_verbs_on_tensors(check):
    code = """
other = 1 - rank
handle = kv.isend(torch.full((3,), float(rank), requires_grad=True), other, tag=8)
into = torch.zeros(3)
assert kv.recv(into, tag=8) == other and into[0] == other
assert handle.wait() is None
got = torch.zeros(2, 30_000)
receive = kv.irecv(got.t(), other)
kv.isend(torch.arange(60_000.).reshape(30_000, 2), other).wait()
assert receive.wait() == other
assert torch.equal(got.t(), torch.arange(60_000.).reshape(30_000, 2))
"""
    check(2, code)
