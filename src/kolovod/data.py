"""Loads data: each rank its own share, ahead of time in a thread.

``ShardedSampler`` and ``shard`` need only rank and size, no framework.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

from kolovod.core import rank_info
from kolovod.errors import HelperArgumentError

T = TypeVar("T")

_END = object()
_POLL_S = 0.1


class ShardedSampler:
    """The indices of a dataset that are this rank's, for any loader that takes a sampler.

    Every index comes once in an epoch over all ranks. Where the number of indices is no multiple
    of the number of ranks, either some come again, so that all ranks have equally many (``pad``),
    or some ranks have one more: then end the epoch with ``join()``.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int = 0,
        pad: bool = True,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        """``rank`` and ``size``: those of the world by default, asked when they are needed."""
        self.dataset, self.shuffle, self.seed, self.pad = dataset, shuffle, seed, pad
        self.epoch = 0
        self._rank, self._size = rank, size

    def set_epoch(self, epoch: int) -> None:
        """Choose another shuffled order for ``epoch``, the same on all ranks."""
        self.epoch = epoch

    def _rank_and_size(self) -> tuple[int, int]:
        rank = rank_info.rank() if self._rank is None else self._rank
        size = rank_info.size() if self._size is None else self._size
        if not 0 <= rank < size:
            raise HelperArgumentError(f"rank is {rank} of {size}: need 0 <= rank < size")
        return rank, size

    def __len__(self) -> int:
        """Return the number of indices that this rank has in an epoch."""
        rank, size = self._rank_and_size()
        count = len(self.dataset)
        return -(-count // size) if self.pad else (count - rank + size - 1) // size

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over this rank's indices, in this epoch's order."""
        rank, size = self._rank_and_size()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        if self.pad and indices:
            missing = -len(indices) % size
            indices += (indices * (missing // len(indices) + 1))[:missing]
        return iter(indices[rank::size])


def shard(items: Iterable[T], rank: int | None = None, size: int | None = None) -> Iterator[T]:
    """The items for this rank of a stream that is the same on all ranks: every size-th one."""
    rank = rank_info.rank() if rank is None else rank
    size = rank_info.size() if size is None else size
    if not 0 <= rank < size:
        raise HelperArgumentError(f"rank is {rank} of {size}: need 0 <= rank < size")
    return (item for i, item in enumerate(items) if i % size == rank)


class BaseDataLoader:
    """A loader made of ``_iterate``, which yields batches, and ``_process_batch``."""

    def __len__(self) -> int:
        """Return the number of batches."""
        raise NotImplementedError(f"{type(self).__name__} does not say how many batches it has")

    def _iterate(self) -> Iterator[Any]:
        raise NotImplementedError(f"{type(self).__name__} needs _iterate()")

    def _process_batch(self, batch: Any) -> Any:
        """A batch as it is handed out; the batch itself unless overridden."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        """The batches."""
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Loads ahead in a thread, for the loader that comes after it among the base classes.

    ``class Async(AsyncDataLoaderMixin, Loader)``.

    What the loader raises is raised where the batches are consumed. Leaving the loop early, or
    ``close_async_loader``, ends the thread; a loop that goes on still gets the batches that wait,
    and then ends. So does a loop that is under way when another one over the same loader begins.
    """

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """``async_loader_queue_size``: batches that may wait; 0 loads without a thread.

        ``debug_data_loader``: print at each batch how many wait. Other arguments are the loader's.
        """
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the thread, if there is one. Idempotent."""
        stop, thread = self._stop, self._thread
        self._stop = self._thread = None
        if stop is not None and thread is not None:
            stop.set()
            if thread is not threading.current_thread():  # which may hold the last reference
                thread.join()

    def __del__(self) -> None:
        """Leave no thread behind."""
        if getattr(self, "_stop", None) is not None:
            self.close_async_loader()

    def __iter__(self) -> Iterator[Any]:
        """The batches, processed by the consumer."""
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        self.close_async_loader()  # of a loop that was left
        stop, batches = threading.Event(), queue.Queue[Any](self.async_loader_queue_size)
        self._stop = stop
        iterate = self._iterate  # type: ignore[attr-defined]
        self._thread = threading.Thread(
            target=_load, args=(iterate, batches, stop), name="kolovod-loader", daemon=True
        )
        self._thread.start()
        try:
            while (batch := _next(batches, stop)) is not _END:
                if isinstance(batch, _Raised):
                    raise batch.error
                if self.debug_data_loader:
                    print(f"kolovod: {batches.qsize()} batches wait", flush=True)
                yield self._process_batch(batch)  # type: ignore[attr-defined]
        finally:
            stop.set()


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _next(batches: queue.Queue[Any], stop: threading.Event) -> Any:
    """Return the next batch; _END also if the loader was closed and no batch waits."""
    while True:
        try:
            return batches.get(timeout=_POLL_S)
        except queue.Empty:
            if stop.is_set() and batches.empty():
                return _END


def _load(iterate: Any, batches: queue.Queue[Any], stop: threading.Event) -> None:
    def put(value: Any) -> bool:
        while not stop.is_set():
            try:
                batches.put(value, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    try:
        for batch in iterate():
            if not put(batch):
                return
    except BaseException as error:
        put(_Raised(error))
    else:
        put(_END)
