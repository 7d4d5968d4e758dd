"""What the parts of the GPU check have in common: how ranks begin, and what is noted of them.

Parts import PyTorch and Kolovod where they use them only: this is imported where there is neither.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

KEPT_TEXT = 900  # characters of an error, from its end
KEPT_PROBLEMS = 30
TICK_CYCLES = 1_000_000_000
"""How long ``torch.cuda._sleep`` keeps a stream busy where something is to be late: about 0.5 s."""


SLOWER = 4
"""So many times the limits hold in a rehearsal without a GPU, where a few cores do all."""


def patience(device: str) -> int:
    """Return the factor of all limits."""
    return 1 if device == "cuda" else SLOWER


class Findings:
    """What a part has found: figures, and what was not as it must be.

    Written down each time that something was tried: also a part that has no end leaves some.
    """

    path: ClassVar[Path | None] = None
    """Where to, if anywhere."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.figures: dict[str, Any] = {}
        self.problems: list[str] = []

    def write(self) -> None:
        """Put into the file what there is."""
        if self.path is not None:
            text = json.dumps({"figures": self.figures, "problems": self.problems}, default=str)
            new = self.path.with_suffix(".new")
            new.write_text(text)
            new.replace(self.path)

    def tried(self, label: str, work: Callable[[], Any]) -> Any:
        """Return what ``work`` returns; None and a problem if it raises: the part goes on."""
        self.write()
        try:
            return work()
        except Exception as error:
            self.problems.append(f"{label}: {said(error)}")
            return None

    def noted(self, label: str, work: Callable[[], Any]) -> Any:
        """Return what ``work`` returns, which becomes a figure too unless it raises."""
        found = self.tried(label, work)
        if found is not None:
            self.figures[label] = found
        return found

    def checked(self, label: str, wrong: list[str]) -> None:
        """Take over what was wrong in ``label``."""
        self.problems += [f"{label}: {text}" for text in wrong[:KEPT_PROBLEMS]]
        if len(wrong) > KEPT_PROBLEMS:
            self.problems.append(f"{label}: {len(wrong) - KEPT_PROBLEMS} more")


def said(error: BaseException) -> str:
    """Return the error's type and the end of its text."""
    return f"{type(error).__name__}: {str(error).strip()[-KEPT_TEXT:]}"


def on_ranks(
    n: int,
    work: Callable[..., Any],
    device: str,
    *arguments: Any,
    timeout_s: float,
    backend: str = "native",
    env: Mapping[str, str] | None = None,
    keep_going: bool = False,
) -> list[Any]:
    """Call ``work(kv, *arguments)`` on ``n`` ranks with ``kolovod.torch``; the results by rank.

    Where ``device`` is "cuda", all ranks have the first GPU, also over NCCL (``share_the_gpu``);
    else ``timeout_s`` is longer (``patience``).
    Raises what ``kolovod.testing.run_ranks`` raises.
    """
    from kolovod.testing import run_ranks

    variables = {"KOLOVOD_BACKEND": backend, **(env or {})}
    is_shared = backend == "nccl" and n > 1
    call = (n, _begin, work, device, is_shared, arguments)
    limit_s = timeout_s * patience(device)
    return run_ranks(*call, timeout_s=limit_s, env=variables, keep_going=keep_going)


def _begin(
    rank: int, work: Callable[..., Any], device: str, is_shared: bool, arguments: tuple[Any, ...]
) -> Any:
    if is_shared:
        share_the_gpu(rank)
    import torch

    import kolovod.torch as kv

    kv.init()
    if device == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    found = work(kv, *arguments)
    kv.shutdown()
    return found


HOST_OF_RANK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
}


def hosts_apart(rank: int) -> dict[str, str]:
    """Return variables by which NCCL takes ranks of one GPU for two hosts', which use sockets."""
    level = os.environ.get("NCCL_DEBUG", "WARN")
    return {**HOST_OF_RANK, "NCCL_HOSTID": f"rank{rank}", "NCCL_DEBUG": level}


def share_the_gpu(rank: int) -> None:
    """Let ranks of one GPU use NCCL: its own refusal and Kolovod's two are out of the way."""
    os.environ.update(hosts_apart(rank))
    from kolovod.backends import nccl

    vars(nccl)["_need_enough"] = vars(nccl)["_need_different"] = lambda *_: None


def settle(device: str) -> None:
    """Wait until the GPU has done all that it was given."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def timed_ms(work: Callable[[], Any], times: int, device: str) -> float:
    """Return milliseconds for one of ``times`` calls, until the device has done them."""
    settle(device)
    start = time.perf_counter()
    for _ in range(times):
        work()
    settle(device)
    return (time.perf_counter() - start) * 1e3 / times


def cuda() -> Any:
    """Return PyTorch's ``cuda``, whose streams and events have no types."""
    import torch

    return torch.cuda


def busy(cycles: int) -> None:
    """Keep the current stream busy for so many cycles of the GPU."""
    cuda()._sleep(cycles)
