"""Tensors of torch.distributed's asynchronous operations keep their memory until these are done."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
from forked import run_torch_ranks as run_ranks  # noqa: E402
from memory_in_flight import COUNT, OTHERS, REPLACES, values  # noqa: E402

import kolovod.torch  # noqa: E402, F401 - registers the backend
from kolovod.errors import InvalidArgumentError  # noqa: E402


def all_reduce(tensor: Any) -> tuple[Any, Any]:
    return dist.all_reduce(tensor, async_op=True), tensor


def broadcast(tensor: Any) -> tuple[Any, Any]:
    return dist.broadcast(tensor, 1, async_op=True), tensor


def all_gather(tensor: Any) -> tuple[Any, Any]:
    outputs = [torch.zeros(COUNT), torch.zeros(COUNT)]
    return dist.all_gather(outputs, tensor, async_op=True), outputs[1]


def reduce_scatter(tensor: Any) -> tuple[Any, Any]:
    output = torch.zeros(COUNT // 2)
    return dist.reduce_scatter_tensor(output, tensor, async_op=True), output


def all_to_all(tensor: Any) -> tuple[Any, Any]:
    output = torch.zeros(COUNT)
    return dist.all_to_all_single(output, tensor, async_op=True), output


IN_PLACE = {"allreduce": all_reduce, "broadcast": broadcast}
OTHER_VERBS = {"allgather": all_gather, "reducescatter": reduce_scatter, "alltoall": all_to_all}
RIGHT = {
    "allreduce": [3.0],
    "broadcast": [2.0],
    "allgather": [2.0],
    "reducescatter": [3.0],
    "alltoall": [1.0, 2.0],
}


def all_of(rank: int) -> list[tuple[str, str, Any]]:
    dist.init_process_group("kolovod")
    found = []
    for verb, call in (IN_PLACE | OTHER_VERBS).items():
        for change in REPLACES + OTHERS:
            tensor = torch.full((COUNT,), float(rank + 1))
            if rank == 1:
                time.sleep(0.1)
            work, result = call(tensor)
            if rank == 0:
                change(tensor)
            del tensor
            others = [torch.full((COUNT,), 9.0) for _ in range(3)]  # where it was, if it can be
            try:
                work.wait()
                said: Any = values(result)
            except InvalidArgumentError as error:
                said = str(error)
            del others
            result.untyped_storage().resize_(0)  # FSDP does so
            found.append((verb, change.__name__, said))
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_every_verb_and_every_way_to_take_its_memory() -> None:
    by_rank = run_ranks(2, all_of)
    for rank, found in enumerate(by_rank):
        assert len(found) == 25
        for verb, change, said in found:
            is_lost = verb in IN_PLACE and change in {each.__name__ for each in REPLACES}
            if rank == 0 and is_lost:
                assert f"shape ({COUNT},) was given other memory while the {verb}" in said
            else:
                assert said == RIGHT[verb], (rank, verb, change)


def receives(rank: int) -> str:
    dist.init_process_group("kolovod")
    said = ""
    if rank == 0:
        tensor = torch.zeros(COUNT)
        work = dist.irecv(tensor, 1)
        with pytest.raises(RuntimeError, match="not resizable"):
            tensor.untyped_storage().resize_(0)
        tensor.data = torch.zeros(COUNT)
        dist.barrier()
        with pytest.raises(InvalidArgumentError) as caught:
            work.wait()
        said = str(caught.value)
    else:
        dist.barrier()
        dist.send(torch.ones(COUNT), 0)
    dist.destroy_process_group()
    return said


def test_a_message_has_no_place_any_more() -> None:
    assert "was given other memory while the recv" in run_ranks(2, receives)[0]
