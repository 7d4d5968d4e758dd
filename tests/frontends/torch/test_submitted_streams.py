"""What the engine waits for before it touches a tensor on a GPU: events by address and stream."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from kolovod.torch import device  # noqa: E402


class Marking(device.Cuda):
    """Its streams are names, its events numbers, of which those in ``reached`` are over."""

    def __init__(self):
        super().__init__()
        self.current, self.reached, self.count = "main", set(), 0

    def stream_of(self, tensor):
        return self.current

    def mark(self, tensor, sleeps=False):
        self.count += 1
        number = self.count
        return SimpleNamespace(number=number, query=lambda: number in self.reached)


def numbers(cuda, tensor):
    return [event.number for event in cuda.submitted(tensor.data_ptr())]


def test_the_last_event_of_each_stream():
    cuda, first, second = Marking(), torch.ones(2), torch.ones(2)
    for tensor in (first, second, first):
        cuda.submit(tensor)
    cuda.current = "side"
    cuda.submit(first)
    assert numbers(cuda, first) == [3, 4]
    assert numbers(cuda, second) == [2]
    assert cuda.submitted(7) == []


def test_what_is_over_is_forgotten_when_there_is_much(monkeypatch):
    monkeypatch.setattr(device, "_SUBMITTED", 3)
    cuda, tensors = Marking(), [torch.ones(2) for _ in range(9)]
    cuda._most_submitted = 3
    for tensor in tensors[:3]:
        cuda.submit(tensor)
    cuda.reached = {1, 3}
    cuda.submit(tensors[3])
    assert [numbers(cuda, tensor) for tensor in tensors[:4]] == [[], [2], [], [4]]
    for tensor in tensors[4:]:  # none of which is over
        cuda.submit(tensor)
    assert [numbers(cuda, tensor) for tensor in tensors[4:]] == [[5], [6], [7], [8], [9]]
