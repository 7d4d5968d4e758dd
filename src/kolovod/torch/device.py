"""All that Kolovod asks of a GPU: the only module that talks to ``torch.cuda``. Tests replace it.

Nothing here touches CUDA before a tensor that is on a GPU has been seen.

Memory: pinned buffers come from PyTorch's caching host allocator. A ``non_blocking`` copy notes the
stream it is on with that allocator, which hands the buffer out again only when the copy is over; so
they may be dropped as soon as the copy has been enqueued.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kolovod.gradients.stager import Event
from kolovod.private_apis.torch import raw_stream

_SUBMITTED = 1024  # addresses of tensors whose events are kept, at least


class Cuda:
    """Streams, events and copies of the GPUs of this process.

    "The current stream" is always that of the tensor's own device in the calling thread.
    """

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._streams: dict[tuple[int | None, int], torch.cuda.Stream] = {}
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        self._submitted: dict[int, dict[Any, Event]] = {}  # by address and stream
        self._most_submitted = _SUBMITTED
        self._lock = threading.Lock()

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is in a GPU's memory."""
        return tensor.is_cuda

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """New host memory for ``count`` elements that a GPU can reach by itself."""
        return torch.empty(count, dtype=dtype, pin_memory=True)

    @torch.no_grad()
    def pack(self, tensors: Sequence[torch.Tensor], host: torch.Tensor) -> None:
        """Enqueue: copy ``tensors`` of one device, one after the other, into pinned ``host``."""
        flats = [tensor.reshape(-1) for tensor in tensors]
        host.copy_(flats[0] if len(flats) == 1 else torch.cat(flats), non_blocking=True)

    @torch.no_grad()
    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Enqueue: copy ``tensors`` of one device, one after the other, into new memory there."""
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    @torch.no_grad()
    def spread(self, flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Enqueue: the opposite of ``join``."""
        self.used_here(flat)
        torch._foreach_copy_(list(tensors), split(flat, tensors))

    @torch.no_grad()
    def unpack(self, host: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Enqueue: the opposite of ``pack``."""
        if len(tensors) == 1:
            tensors[0].copy_(host.view(tensors[0].shape), non_blocking=True)
            return
        parts = split(host.to(tensors[0].device, non_blocking=True), tensors)
        torch._foreach_copy_(list(tensors), parts)

    def mark(self, tensor: torch.Tensor, sleeps: bool = False) -> Event:
        """An event where the current stream is now.

        ``sleeps``: who waits for it sleeps, which is slower and leaves the core to others.
        """
        event = torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]
        event.record(self.stream_of(tensor))
        return event

    def submit(self, tensor: torch.Tensor) -> None:
        """Note that the engine gets ``tensor`` as it is: when the current stream has come here."""
        address, stream, event = tensor.data_ptr(), self.stream_of(tensor), self.mark(tensor)
        with self._lock:
            if len(self._submitted) >= self._most_submitted:
                self._forget_reached()
            self._submitted.setdefault(address, {})[stream] = event

    def submitted(self, address: int) -> list[Event]:
        """Return the events to wait for before the engine touches the tensor at ``address``."""
        with self._lock:
            return list(self._submitted.get(address, {}).values())

    def _forget_reached(self) -> None:
        self._submitted = {
            address: left
            for address, events in self._submitted.items()
            if (left := {stream: event for stream, event in events.items() if not event.query()})
        }
        self._most_submitted = max(_SUBMITTED, 2 * len(self._submitted))

    def empty(self, index: int) -> torch.Tensor:
        """A tensor of no bytes, on GPU ``index``."""
        return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}")

    def used_here(self, tensor: torch.Tensor) -> None:
        """Note that ``tensor``, made on another stream, is used on the current one from now on.

        Else its memory could be handed out again, by PyTorch's caching allocator, while who dropped
        it has work in its stream that still reads it.
        """
        tensor.record_stream(self.stream_of(tensor))

    def stream_of(self, tensor: torch.Tensor) -> Any:
        """The current stream. Hooks ask for each gradient, so what PyTorch made once is kept."""
        if raw_stream is None:
            return torch.cuda.current_stream(tensor.device)
        key = tensor.device.index, raw_stream(tensor.device.index)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = torch.cuda.current_stream(tensor.device)
        return stream

    def follow(self, streams: Iterable[Any]) -> None:
        """Let the current streams come after what is in ``streams`` now."""
        for stream in streams:
            current = torch.cuda.current_stream(stream.device)
            if current != stream:
                current.wait_stream(stream)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Make ``stream``, and its device, current."""
        with torch.cuda.stream(stream):
            yield

    @contextmanager
    def beside(self, tensor: torch.Tensor, streams: Iterable[Any]) -> Iterator[None]:
        """Make a side stream of the tensor's device current, after what is in ``streams`` now."""
        side = self._sides.get(tensor.device)
        if side is None:
            side = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
            self._sides[tensor.device] = side
        for stream in streams:
            side.wait_stream(stream)
        with torch.cuda.stream(side):
            yield

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A dense copy in pinned memory, there when this returns.

        It is taken when the current stream has come to it, for which alone this waits.
        """
        host = self.pinned(tensor.numel(), tensor.dtype)
        self.pack([tensor], host)
        self.mark(tensor).synchronize()
        return host.view(tensor.shape)

    def to_device(self, host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Enqueue: a copy of ``host``, which need not be pinned, on the device of ``like``."""
        if not host.is_pinned():  # from other memory the copy would wait for the stream
            host = self.pinned(host.numel(), host.dtype).view(host.shape).copy_(host)
        result = torch.empty(host.shape, dtype=host.dtype, device=like.device)
        self.unpack(host.view(-1), [result])
        return result


def split(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of ``flat`` with the shapes of ``tensors``, one after the other."""
    parts = flat.split([tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


cuda = Cuda()
