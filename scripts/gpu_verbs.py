"""Every verb, dtype, layout and way on a device, beside the same verb in host memory: GPU check.

Staged results must be equal bit by bit. NCCL has its own order of additions and rounds floats of 16
bits on the way: there integers, and with two ranks float32 and float64, must be equal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_ranks import Findings, on_ranks, said

if TYPE_CHECKING:
    import torch

DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64",
    "bool", "uint16",
)  # fmt: skip
UNSIGNED = ("uint8", "uint16")
WITHOUT_AVERAGE = ("bool", "uint16")
WITHOUT_PRODUCT = ("uint16",)
HALVES = ("float16", "bfloat16")
MOST_TEXTS = 40


class Extent(NamedTuple):
    """How much is compared."""

    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]


FULL = Extent(DTYPES, ((), (1,), (0,), (257,), (6, 5, 4), (1 << 18,)))
BRIEF = Extent(("float32", "bfloat16", "int64", "bool"), ((), (257,), (6, 5, 4)))
"""Where ranks that share a GPU take turns on it, and a collective takes milliseconds."""


def part_verbs(device: str) -> Findings:
    """Check staged verbs: on one, two and four ranks."""
    found = Findings()
    for n in (1, 2, 4):
        extent = FULL if n < 4 else BRIEF
        compare(found, f"{n} ranks", n, device, True, extent, "native", timeout_s=20)
    return found


def compare(
    found: Findings,
    label: str,
    n: int,
    device: str,
    is_exact: bool,
    extent: Extent,
    backend: str,
    timeout_s: float,
) -> None:
    """Compare all verbs of ``extent`` on ``n`` ranks; figures and problems go to ``found``."""

    def run() -> list[Any]:
        call = (n, every_verb, device, device, is_exact, extent)
        return on_ranks(*call, backend=backend, timeout_s=timeout_s)

    by_rank = found.tried(label, run)
    if by_rank is None:
        return
    seconds = round(by_rank[0]["seconds"], 2)
    cases = sum(each["cases"] for each in by_rank)
    wrong = [f"rank {r}: {text}" for r, each in enumerate(by_rank) for text in each["wrong"]]
    found.figures[label] = {"comparisons": cases, "wrong": len(wrong), "seconds": seconds}
    found.checked(label, wrong)


def every_verb(kv: Any, device: str, is_exact: bool, extent: Extent) -> dict[str, Any]:
    """Return what one rank has compared: how many, and what differs."""
    start = time.perf_counter()
    comparison = Comparison(kv, device, is_exact)
    for dtype in extent.dtypes:
        try:
            comparison.of_dtype(dtype, extent.shapes)
        except Exception as error:  # the same on all ranks, and other dtypes may do
            comparison.wrong.append(f"{dtype}: {said(error)}")
    comparison.of_different_devices()
    comparison.of_messages()
    comparison.of_gradients()
    comparison.of_uneven_data()
    seconds = time.perf_counter() - start
    return {"cases": comparison.cases, "wrong": comparison.wrong, "seconds": seconds}


class Comparison:
    """Results on the device beside those in host memory, on one rank."""

    def __init__(self, kv: Any, device: str, is_exact: bool) -> None:
        """``is_exact``: whether every dtype must be equal bit by bit."""
        import torch

        self._torch = torch
        self._kv, self._device, self._is_exact = kv, device, is_exact
        self._rank, self._size = kv.rank(), kv.size()
        self._draw = torch.Generator().manual_seed(100 + self._rank)
        self.cases = 0
        self.wrong: list[str] = []

    def of_dtype(self, name: str, shapes: Sequence[tuple[int, ...]]) -> None:
        """Compare every verb that this dtype has."""
        if not hasattr(self._torch, name):
            return
        for shape in shapes:
            for layout, host, far in self._pairs(name, shape):
                tag = f"{name}{list(shape)} {layout}"
                self._reductions(name, tag, host, far)
                self._movements(name, tag, host, far)
        self._groups(name)

    def _reductions(self, name: str, tag: str, host: torch.Tensor, far: torch.Tensor) -> None:
        kv = self._kv
        ops = {"Sum": kv.Sum, "Min": kv.Min, "Max": kv.Max}
        ops |= {} if name in WITHOUT_AVERAGE else {"Average": kv.Average}
        ops |= {} if name in WITHOUT_PRODUCT else {"Product": kv.Product}
        for label, op in ops.items():
            self.same(
                f"allreduce {label} {tag}", kv.allreduce(far, op=op), kv.allreduce(host, op=op)
            )
            mine, theirs = far.clone(), host.clone()
            kv.allreduce_(mine, op=op), kv.allreduce_(theirs, op=op)
            self.same(f"allreduce_ {label} {tag}", mine, theirs)
        handles = kv.allreduce_async(far, op=kv.Sum), kv.allreduce_async(host, op=kv.Sum)
        self.same(f"allreduce_async {tag}", *(handle.wait() for handle in handles))
        mine, theirs = far.clone(), host.clone()
        handles = kv.allreduce_async_(mine, op=kv.Max), kv.allreduce_async_(theirs, op=kv.Max)
        self.same(f"allreduce_async_ {tag}", *(handle.wait() for handle in handles))
        if name not in WITHOUT_AVERAGE:
            scaled = [kv.allreduce(each, None, kv.Sum, 0.5, 3.0) for each in (far, host)]
            self.same(f"allreduce with factors {tag}", *scaled, is_scaled=True)
        if host.dim():
            parts = [kv.reducescatter(each, op=kv.Sum) for each in (far, host)]
            self.same(f"reducescatter {tag}", *parts)

    def _movements(self, name: str, tag: str, host: torch.Tensor, far: torch.Tensor) -> None:
        kv, size = self._kv, self._size
        for root in range(size):
            same = [kv.broadcast(each, root) for each in (far, host)]
            self.same(f"broadcast from {root} {tag}", *same)
        if not host.dim():
            return
        count = host.shape[0]
        rows = min(count, self._rank + 1)
        self.same(f"allgather {tag}", kv.allgather(far[:rows]), kv.allgather(host[:rows]))
        self.same(f"allgather, equal {tag}", kv.allgather(far), kv.allgather(host))
        splits = [count - (size - 1) * (count // size)] + [count // size] * (size - 1)
        self.same(f"alltoall {tag}", kv.alltoall(far, splits), kv.alltoall(host, splits))

    def _groups(self, name: str) -> None:
        kv = self._kv
        host = [self._make(name, shape) for shape in ((3,), (1000,), (0,), (7, 9))]
        far = [tensor.to(self._device) for tensor in host]
        for verb in ("grouped_allreduce", "grouped_reducescatter"):
            both = [getattr(kv, verb)(group, op=kv.Sum) for group in (far, host)]
            self.same(f"{verb} {name}", *both)
        self.same(f"grouped_allgather {name}", *map(kv.grouped_allgather, (far, host)))
        if name.startswith("float") and self._size & (self._size - 1) == 0:
            both = [kv.allreduce(group[1], op=kv.Adasum) for group in (far, host)]
            self.same(f"Adasum {name}", *both)

    def of_different_devices(self) -> None:
        """Ranks that submit the same name, some on the device and some in host memory."""
        if self._kv.collectives.frontend.is_direct():
            return  # with NCCL that is a MismatchError, see tests/backends/test_nccl.py
        device = self._device if self._rank % 2 else "cpu"
        total = self._kv.allreduce(self._torch.ones(2, device=device), "mixed", self._kv.Sum)
        self._equal("ranks on different devices", total.tolist(), [float(self._size)] * 2)
        self._equal("their results", total.device.type, device)

    def of_messages(self) -> None:
        """Compare messages from rank 0 to rank 1, blocking and not."""
        kv, x = self._kv, self._torch.full((5,), float(self._rank), device=self._device)
        if self._size > 1 and self._rank == 0:
            kv.send(x + 7, 1)
            kv.isend(x + 8, 1).wait()
        elif self._rank == 1:
            for number, receive in ((7.0, kv.recv), (8.0, lambda *a: kv.irecv(*a).wait())):
                receive(x, 0)
                self.same("a message", x, self._torch.full((5,), number))

    def of_gradients(self) -> None:
        """Gradients of verbs go back by verbs."""
        kv, torch, size = self._kv, self._torch, self._size
        x = torch.ones(2, device=self._device, requires_grad=True)
        kv.allreduce(x, op=kv.Sum).sum().backward()
        self.same("gradient of allreduce", x.grad, torch.full((2,), float(size)))
        x.grad = None
        kv.allgather(x).sum().backward()
        self.same("gradient of allgather", x.grad, torch.full((2,), float(size)))

    def of_uneven_data(self) -> None:
        """Rank r has work for r + 1 turns, then it joins: the others' sums are without it."""
        kv, rank, size = self._kv, self._rank, self._size
        for turn in range(rank + 1):
            x = self._torch.full((5,), rank + 1, device=self._device)
            total = kv.allreduce(x, f"turn {turn}", kv.Sum)
            self._equal(
                "a sum without who has joined", total.tolist(), [sum(range(turn + 1, size + 1))] * 5
            )
        self._equal("who joined last", kv.join(), size - 1)

    def same(self, label: str, found: Any, wanted: Any, *, is_scaled: bool = False) -> None:
        """Compare ``found``, on the device, with ``wanted``, in host memory."""
        torch = self._torch
        if isinstance(wanted, (list, tuple)):
            for one, other in zip(found, wanted, strict=True):
                self.same(label, one, other)
            return
        if not isinstance(wanted, torch.Tensor):
            self._equal(label, found, wanted)
            return
        self.cases += 1
        if found.device.type != self._device:
            self._wrong(f"{label}: the result is on {found.device}")
        ours = found.detach().cpu()
        is_half = str(wanted.dtype).removeprefix("torch.") in HALVES
        must_equal = self._is_exact or not wanted.dtype.is_floating_point
        must_equal |= self._size <= 2 and not is_half and not is_scaled
        is_good = ours.dtype == wanted.dtype and ours.shape == wanted.shape
        if is_good and must_equal:
            is_good = torch.equal(ours, wanted)
        elif is_good:
            limits = {"rtol": 2e-2, "atol": 1e-2} if is_half else {"rtol": 1e-5, "atol": 1e-6}
            is_good = torch.allclose(ours.double(), wanted.double(), **limits)
        if not is_good:
            first = [tensor.flatten()[:3].tolist() for tensor in (ours, wanted)]
            self._wrong(f"{label}: {ours.dtype}{list(ours.shape)} {first[0]}, not {first[1]}")

    def _equal(self, label: str, found: object, wanted: object) -> None:
        self.cases += 1
        if found != wanted:
            self._wrong(f"{label}: {found}, not {wanted}")

    def _wrong(self, text: str) -> None:
        if len(self.wrong) < MOST_TEXTS:
            self.wrong.append(text)

    def _make(self, name: str, shape: tuple[int, ...]) -> Any:
        torch, draw = self._torch, self._draw
        dtype = getattr(torch, name)
        if dtype.is_floating_point:
            made = torch.randn(shape, generator=draw)
        else:
            low, high = (0, 2) if name == "bool" else (0 if name in UNSIGNED else -4, 5)
            made = torch.randint(low, high, shape, generator=draw)
        return made.to(dtype)

    def _pairs(
        self, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Return the same values in host memory and on the device, there in several layouts."""
        for layout in ("dense", "spread", "turned") if len(shape) == 3 else ("dense",):
            host = self._make(name, shape)
            far = host.to(self._device)
            if layout == "spread":
                far = self._torch.stack([far, far], -1)[..., 0]
            elif layout == "turned":
                far = far.permute(2, 0, 1).contiguous().permute(1, 2, 0)
            yield layout, host, far
