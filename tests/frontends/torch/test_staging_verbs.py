"""Verbs on tensors of a GPU, which go through host memory; the GPU is a fake (fake_device.py)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch_loopback  # noqa: E402
from fake_device import FakeFrontend  # noqa: E402
from tensors import TENSORS, TorchTensors  # noqa: E402
from test_autograd import *  # noqa: E402, F403
from test_sync_batch_norm import (  # noqa: E402, F401
    test_a_whole_model_is_converted,
    test_half_precision_is_computed_in_float32,
)
from test_torch import (  # noqa: E402, F401
    test_backward_notices_that_a_saved_tensor_was_changed_in_place,
    test_broadcast_optimizer_state,
    test_broadcast_parameters,
    test_inference_tensors,
    test_memory_that_is_not_dense_row_by_row,
    test_parameters_work_in_place_and_results_carry_no_history,
    test_the_imaginary_part_of_a_conjugate_is_negated,
)
from torch_loopback import run  # noqa: E402
from worlds import BRIEF, FULL, check, lines  # noqa: E402

from kolovod.core.ops import Sum  # noqa: E402
from kolovod.metrics import Metrics  # noqa: E402
from kolovod.testing.loopback import loopback  # noqa: E402
from kolovod.torch import TorchCollectives, TorchFrontend  # noqa: E402


@pytest.fixture(autouse=True)
def on_device(monkeypatch):
    monkeypatch.setattr(torch_loopback, "TorchFrontend", FakeFrontend)


@pytest.mark.parametrize(
    ("size", "extent"), [(1, BRIEF), pytest.param(2, FULL, marks=pytest.mark.slow), (3, BRIEF)]
)
def test_conformance(size, extent, monkeypatch):
    frontend = FakeFrontend()

    class TensorsOnDevice(TorchTensors):
        def read(self, tensor):
            assert frontend.device.is_on_device(tensor) or not tensor.numel()
            return super().read(tensor)

    monkeypatch.setitem(TENSORS, "on device", TensorsOnDevice())

    def work(kv):
        for line in lines(extent["torch"], "torch"):
            check(kv, "on device", line, extent["torch"])

    with loopback(size, frontend) as world:
        world.run(work, timeout_s=100)


def test_results_in_flight_of_a_list_that_changes_meanwhile():
    def work(kv, rank):
        tensors = [torch.ones(2), torch.ones(3)]
        reduced = kv.grouped_allreduce_async(tensors, op=Sum)
        gathered = kv.grouped_allgather_async(tensors)
        tensors.pop()
        assert [t.tolist() for t in reduced.wait()] == [[2, 2], [2, 2, 2]]
        assert [t.tolist() for t in gathered.wait()] == [[1] * 4, [1] * 6]

    run(2, work)


def test_ranks_whose_tensors_are_on_different_devices():
    """What one rank has on its GPU, another may have in host memory."""

    def work(kv, rank):
        if rank == 0:
            kv = TorchCollectives(TorchFrontend(), kv.world)
        assert kv.allreduce(torch.full((2,), rank), "x", Sum).tolist() == [1, 1]
        assert kv.allgather(torch.full((2,), rank), "y").tolist() == [0, 0, 1, 1]

    run(2, work)


def test_rows_of_a_rank_without_any_are_where_it_has_its_tensors():
    frontend = FakeFrontend()

    def work(kv):
        rank = kv.world().rank
        sent = []

        def allgather(rows, *rest):
            sent.append(frontend.device.is_on_device(rows))
            return TorchCollectives.allgather(verbs, rows, *rest)

        verbs = TorchCollectives(frontend, kv.world)
        verbs.allgather = allgather
        rows = torch.empty(0) if rank == 0 else torch.ones(1, 2)
        found = Metrics(verbs).gather_samples(rows, 1, [0] * rank)
        assert found.tolist() == [[1, 1]]
        return sent

    with loopback(2, frontend) as world:
        assert world.run(work) == [[True], [True]]
