"""A tensor that is on its way keeps its memory, whatever the script does with it meanwhile."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from forked import run_torch_ranks as run_ranks
from memory_in_flight import COUNT, OTHERS, REPLACES, given_data, values

import kolovod.torch as kv
from kolovod.core.handles import held_buffers
from kolovod.errors import InvalidArgumentError
from kolovod.testing import loopback
from kolovod.torch import held
from kolovod.torch.frontend import TorchFrontend

IN_PLACE = {
    "allreduce_async_": lambda t: kv.allreduce_async_(t, name="x", op=kv.Sum),
    "grouped_allreduce_async_": lambda t: kv.grouped_allreduce_async_([t], name="x", op=kv.Sum),
    "broadcast_async_": lambda t: kv.broadcast_async_(t, 1, name="x"),
}
NEW = {
    "allreduce_async": lambda t: kv.allreduce_async(t, name="x", op=kv.Sum),
    "grouped_allreduce_async": lambda t: kv.grouped_allreduce_async([t], name="x", op=kv.Sum),
    "broadcast_async": lambda t: kv.broadcast_async(t, 1, name="x"),
    "allgather_async": lambda t: kv.allgather_async(t, name="x"),
    "alltoall_async": lambda t: kv.alltoall_async(t, name="x"),
    "reducescatter_async": lambda t: kv.reducescatter_async(t, name="x", op=kv.Sum),
}


def dense(rank: int) -> torch.Tensor:
    return torch.full((COUNT,), float(rank + 1))


def spread(rank: int) -> torch.Tensor:
    """Every second element of its memory, so that a copy is on its way."""
    return torch.full((COUNT, 2), float(rank + 1))[:, 0]


def started(rank: int, make: Any, call: Any, change: Any) -> Any:
    """The handle of an operation that rank 1 comes to when rank 0 has changed its tensor."""
    tensor = make(rank)
    if rank == 1:
        time.sleep(0.2)
    handle = call(tensor)
    if rank == 0:
        change(tensor)
        del tensor
        return handle, [torch.full((COUNT,), 9.0) for _ in range(3)]  # where it was, if it can be
    return handle, tensor


def all_of(rank: int, make: Any) -> list[tuple[str, str, Any]]:
    kv.init()
    found = []
    for verb, call in (IN_PLACE | (NEW if make is dense else {})).items():
        for change in REPLACES + OTHERS:
            handle, kept = started(rank, make, call, change)
            try:
                said: Any = values(handle.wait())
            except InvalidArgumentError as error:
                said = str(error)
            del kept
            found.append((verb, change.__name__, said))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("make", [dense, spread])
def test_every_verb_and_every_way_to_take_its_memory(make: Any) -> None:
    right = {"allgather_async": [1.0, 2.0], "alltoall_async": [1.0, 2.0]}
    right |= {"broadcast_async": [2.0], "broadcast_async_": [2.0]}
    by_rank = run_ranks(2, all_of, make)
    for rank, found in enumerate(by_rank):
        assert len(found) == (45 if make is dense else 15)
        for verb, change, said in found:
            is_lost = verb in IN_PLACE and change in {each.__name__ for each in REPLACES}
            if rank == 0 and is_lost:
                assert f"shape ({COUNT},) was given other memory while the" in said
                assert "'x'" in said
            else:
                assert said == right.get(verb, [3.0]), (rank, verb, change)


def between_two(rank: int) -> Any:
    kv.init()
    tensor = torch.full((COUNT,), float(rank + 1))
    if rank == 0:
        sent = kv.isend(tensor, 1)
        given_data(tensor)
        sent.wait()
        received = torch.zeros(COUNT)
        handle = kv.irecv(received, 1)
        received.data = torch.zeros(COUNT)
        kv.barrier()
        with pytest.raises(InvalidArgumentError, match="given other memory while the recv"):
            handle.wait()
        return None
    time.sleep(0.2)
    received = torch.zeros(COUNT)
    kv.recv(received, 0)
    kv.barrier()
    kv.send(tensor, 0)
    return values(received)


def test_messages() -> None:
    assert run_ranks(2, between_two)[1] == [1.0]


def test_afterwards_a_tensor_can_be_resized_again() -> None:
    def rank(verbs: Any) -> None:
        tensor = torch.ones(8)
        view = tensor[2:]
        first = verbs.allreduce_async(tensor, name="first")
        second = verbs.allreduce_async(view, name="second")
        first.wait()
        with pytest.raises(RuntimeError, match="not resizable"):
            tensor.resize_(100)
        second.wait()
        tensor.resize_(100)
        verbs.allreduce_async(tensor, name="third")  # nobody waits for it
        deadline = time.monotonic() + 60
        while not tensor.untyped_storage().resizable() and time.monotonic() < deadline:
            held_buffers.sweep()
        tensor.resize_(200)

    with loopback(2, TorchFrontend()) as world:
        world.run(rank)


@pytest.mark.parametrize("make", [lambda: torch.ones(8), lambda: torch.from_numpy(np.ones(8))])
def test_what_is_on_its_way_is_not_moved_to_shared_memory(make: Any) -> None:
    def rank(verbs: Any) -> None:
        tensor = make()
        handle = verbs.allreduce_async_(tensor, name="x")
        for share in (tensor[2:].share_memory_, tensor.untyped_storage()._share_filename_cpu_):
            with pytest.raises(InvalidArgumentError, match="bytes is to be moved to shared mem"):
                share()
        handle.wait()
        tensor.share_memory_()
        handle = verbs.allreduce_async_(tensor, name="y")
        tensor.share_memory_()  # it is there already
        handle.wait()
        assert tensor.tolist() == [1.0] * 8

    with loopback(2, TorchFrontend()) as world:
        world.run(rank)


def started_with_other_defaults(rank: int) -> list[float]:
    kv.init()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    tensor = torch.ones(3, dtype=torch.float32, device="cpu")
    handle = kv.allreduce_async_(tensor, op=kv.Sum)
    return handle.wait().tolist()


def test_defaults_of_the_script_do_not_matter() -> None:
    assert run_ranks(2, started_with_other_defaults) == [[2.0] * 3] * 2


def test_what_cannot_be_resized_stays_so() -> None:
    tensor = torch.from_numpy(np.ones(8))
    holds = [held.hold(tensor), held.hold(tensor)]
    del holds
    assert not tensor.untyped_storage().resizable()


def test_where_the_mark_is_not_found_memory_is_kept_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held, "_place_of_mark", lambda: -1)
    tensor = torch.ones(8)
    hold = held.hold(tensor)
    address = tensor.data_ptr()
    assert not held.has_moved(tensor, address)
    tensor.data = torch.zeros(8)
    assert held.has_moved(tensor, address)
    tensor = torch.zeros(0)
    assert not held.has_moved(tensor, address)
    del hold
