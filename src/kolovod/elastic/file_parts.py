"""A part of the files of a dataset: which ones, in which order, and how far they are read."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np

from kolovod.errors import ElasticArgumentError

__all__ = ["FileParts"]

F = TypeVar("F")
S = TypeVar("S")

_SEEDS = 2**32


class FileParts(Generic[F, S]):
    """The samples of one part of a list of files: for the ``make`` of an ElasticStream.

    All ranks shuffle the files alike, in each epoch in another way, and part ``k`` has each
    ``parts``-th file from the ``k``-th on. So each file is in one part. It is a dataset for
    PyTorch's DataLoader, whose workers share the files of the part, and for torchdata's
    StatefulDataLoader, which goes on in the middle of a file by ``state_dict``. With ``batch_size``
    it makes batches by itself, and needs no loader.
    """

    def __init__(
        self,
        files: Sequence[F],
        read: Callable[[F], Iterable[S]],
        part: int,
        parts: int,
        epoch: int = 0,
        *,
        seed: int = 0,
        shuffle: bool = True,
        batch_size: int | None = None,
    ) -> None:
        """``files``: all of them, in the same order on all ranks; paths, or what ``read`` takes.

        ``read(file)``: returns the file's samples, the same whenever it is called. ``batch_size``:
        lists of so many samples are made, of which the last may be shorter; None: samples, for a
        loader that makes batches. Raises InvalidArgumentError for values that cannot work.
        """
        if not callable(read):
            raise ElasticArgumentError(f"read is {read!r}: need a function of a file")
        if isinstance(files, str | bytes) or not isinstance(files, Sequence):
            raise ElasticArgumentError(
                f"files is {files!r}: need a list, in the same order on all ranks"
            )
        numbers = {"part": part, "parts": parts, "epoch": epoch, "seed": seed}
        if batch_size is not None:
            numbers["batch_size"] = batch_size
        for name, value in numbers.items():
            try:
                operator.index(value)
            except TypeError:
                raise ElasticArgumentError(f"{name} is {value!r}: need a whole number") from None
        if not 0 <= part < parts:
            raise ElasticArgumentError(f"part is {part} of {parts}: need 0 <= part < parts")
        if batch_size is not None and batch_size < 1:
            raise ElasticArgumentError(f"batch_size is {batch_size}: need at least 1")
        order = np.arange(len(files))
        if shuffle:  # a stream that NumPy keeps for ever, as that of ElasticSampler
            order = np.random.RandomState([seed % _SEEDS, epoch % _SEEDS]).permutation(len(files))
        self.files: list[F] = [files[at] for at in order[part::parts].tolist()]
        """The files of this part, in the order in which they are read."""
        self.batch_size = batch_size
        self._read = read
        self._terms = [len(files), part, parts, epoch, seed if shuffle else None, batch_size]
        self._at = (0, 0)  # of this worker's files, and samples read in that one
        self._is_loaded = False
        _be_iterable_dataset()

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the samples, or batches, from the beginning, or from a state just loaded."""
        at = self._at if self._is_loaded else (0, 0)
        self._at, self._is_loaded = at, False
        return self._samples(*at) if self.batch_size is None else self._batches(*at)

    def _samples(self, file: int, sample: int) -> Iterator[S]:
        worker, workers = _worker()
        own = self.files[worker::workers]
        for number in range(file, len(own)):
            skipped = sample if number == file else 0
            samples = islice(iter(self._read(own[number])), skipped, None)
            for count, value in enumerate(samples, skipped + 1):
                self._at = number, count
                yield value

    def _batches(self, file: int, sample: int) -> Iterator[list[S]]:
        samples = self._samples(file, sample)
        while batch := list(islice(samples, self.batch_size)):
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the part, of this worker of a loader: plain numbers."""
        file, sample = self._at
        return {"file": file, "sample": sample, "worker": list(_worker()), "terms": self._terms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on from what ``state_dict`` has returned.

        Raises InvalidArgumentError if the state is of another part, epoch, seed or number of files,
        or of a loader with another number of workers.
        """
        try:
            at = int(state["file"]), int(state["sample"])
            terms, (worker, workers) = list(state["terms"]), state["worker"]
        except (KeyError, TypeError, ValueError) as error:
            raise ElasticArgumentError(f"not a state of files ({error!r}): {state!r}") from None
        if terms != self._terms:
            raise ElasticArgumentError(
                "the state is of (files, part, parts, epoch, seed, batch_size) = "
                f"{tuple(terms)}, but this one has {tuple(self._terms)}"
            )
        if (worker, workers) != _worker():
            raise ElasticArgumentError(
                "the state is of worker {} of {}, but this is worker {} of {}: give the loader as "
                "many workers as before".format(worker, workers, *_worker())
            )
        self._at, self._is_loaded = at, True


def _worker() -> tuple[int, int]:
    """Return the number of this worker of a DataLoader, and how many there are."""
    data = sys.modules.get("torch.utils.data")
    info = None if data is None else data.get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _be_iterable_dataset() -> None:
    """Have PyTorch, if it is imported, take a FileParts for what it is."""
    data = sys.modules.get("torch.utils.data")
    if data is not None and not issubclass(FileParts, data.IterableDataset):
        data.IterableDataset.register(FileParts)
