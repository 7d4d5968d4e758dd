"""Streams through PyTorch's DataLoader and torchdata's StatefulDataLoader, with workers."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from streamed import change, step

from kolovod.elastic import ElasticStream, FileParts, State
from kolovod.errors import InvalidArgumentError

FILES = [3, 1, 0, 4, 2, 5, 1, 3, 2, 6, 4]
PARTS, BATCH = 4, 2


class Opened:
    """Reads files that are numbers, and whose samples are tensors."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def __call__(self, file: int) -> Iterator[torch.Tensor]:
        return (torch.tensor(100 * file + k) for k in range(self.counts[file]))


def dataset(part: int, parts: int, epoch: int) -> FileParts[int, torch.Tensor]:
    return FileParts(range(len(FILES)), Opened(FILES), part, parts, epoch)


def everything() -> Counter[int]:
    return Counter(100 * file + k for file, count in enumerate(FILES) for k in range(count))


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_loader_share_the_files_of_a_part(workers: int) -> None:
    samples: Counter[int] = Counter()
    for part in range(PARTS):
        loader = torch.utils.data.DataLoader(
            dataset(part, PARTS, 0),  # type: ignore[arg-type]
            BATCH,
            num_workers=workers,
        )
        for batch in loader:
            samples.update(batch.tolist())
    assert samples == everything()
    assert pickle.loads(pickle.dumps(dataset(0, PARTS, 0))).files == dataset(0, PARTS, 0).files


def stateful_loader(*args: Any, **kwargs: Any) -> Any:
    torchdata = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed"
    )
    return torchdata.StatefulDataLoader(*args, **kwargs)


def files(part: int, parts: int, epoch: int, workers: int) -> Any:
    return stateful_loader(dataset(part, parts, epoch), BATCH, num_workers=workers)


def shuffled(part: int, parts: int, epoch: int, workers: int) -> Any:
    samples = sorted(everything())[part::parts]
    generator = torch.Generator().manual_seed(epoch * parts + part)
    return stateful_loader(samples, BATCH, shuffle=True, generator=generator, num_workers=workers)


class Job:
    """Simulated ranks, each with a stream of such loaders."""

    def __init__(self, size: int, make: Callable[..., Any], workers: int, every: int) -> None:
        self.streams = [
            ElasticStream(
                lambda part, parts, epoch: make(part, parts, epoch, workers),
                PARTS,
                snapshot_every=every,
            )
            for _ in range(size)
        ]
        self.members = list(range(size))
        self.counts: Counter[int] = Counter()

    def change(self) -> None:
        change(self.streams, self.members)

    def step(self, dies: int | None = None) -> bool:
        taken = step(self.streams, self.members, dies)
        if taken is None:
            return False
        for member, (batch, weight) in taken.items():
            if weight and member != dies:
                self.counts.update(batch.tolist())
        if dies is not None:
            at = self.members.index(dies)
            del self.members[at], self.streams[at]
        return True


@pytest.mark.frameworks
@pytest.mark.parametrize("every", [1, 2, 100])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [files, shuffled])
def test_a_stateful_loader_goes_on_where_a_lost_rank_was(
    make: Callable[..., Any], workers: int, every: int
) -> None:
    job = Job(3, make, workers, every)
    job.change()
    job.step()
    job.step()
    job.step(dies=1)
    job.change()
    while job.step():
        pass
    assert job.counts == everything()


@pytest.mark.frameworks
@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkpoint_is_gone_on_from_by_other_numbers_of_ranks(workers: int) -> None:
    job = Job(3, files, workers, 2)
    job.change()
    for _ in range(3):
        job.step()
    state = pickle.loads(pickle.dumps(job.streams[1].state_dict()))
    after = Job(2, files, workers, 2)
    after.counts = job.counts
    del job  # its workers end
    for stream in after.streams:
        stream.load_state_dict(state)
    after.change()
    while after.step():
        pass
    assert after.counts == everything()


@pytest.mark.frameworks
def test_a_stateful_loader_is_refused_as_a_value_of_the_state() -> None:
    loader = stateful_loader(dataset(0, 1, 0), BATCH)
    with pytest.raises(
        InvalidArgumentError, match=r"a StatefulDataLoader of torchdata, .*ElasticS"
    ):
        State(loader=loader)
