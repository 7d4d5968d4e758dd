"""Samplers, shards and loaders in the background."""

import threading

import pytest

from kolovod.data import AsyncDataLoaderMixin, BaseDataLoader, ShardedSampler, shard
from kolovod.errors import InvalidArgumentError


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("count", "size"), [(10, 3), (9, 3), (2, 5), (0, 2), (7, 1)])
def test_every_index_once(count, size, shuffle):
    for pad in (True, False):
        samplers = [
            ShardedSampler(range(count), shuffle, 5, pad, rank, size) for rank in range(size)
        ]
        for epoch in range(2):
            for sampler in samplers:
                sampler.set_epoch(epoch)
            indices = [list(sampler) for sampler in samplers]
            assert [len(own) for own in indices] == list(map(len, samplers))
            together = [index for own in indices for index in own]
            assert set(together) == set(range(count))
            if pad:
                assert len({len(own) for own in indices}) == 1
            else:
                assert len(together) == count


def test_epochs_and_seeds_differ():
    def order(seed, epoch):
        sampler = ShardedSampler(range(50), True, seed, rank=0, size=2)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 7) for epoch in (0, 1)}) == 4


def test_shard():
    assert [list(shard("abcdefg", rank, 3)) for rank in range(3)] == [
        ["a", "d", "g"],
        ["b", "e"],
        ["c", "f"],
    ]
    with pytest.raises(InvalidArgumentError, match="rank is 3 of 3"):
        shard("abc", 3, 3)
    with pytest.raises(InvalidArgumentError, match="rank is 3 of 3"):
        list(ShardedSampler("abc", rank=3, size=3))


class Numbers(BaseDataLoader):
    def __init__(self, count, fails_at=None):
        self.count, self.fails_at, self.threads = count, fails_at, []

    def __len__(self):
        return self.count

    def _iterate(self):
        for number in range(self.count):
            self.threads.append(threading.current_thread())
            if number == self.fails_at:
                raise OSError("the disk is gone")
            yield number

    def _process_batch(self, batch):
        return 10 * batch


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    pass


@pytest.mark.parametrize("waiting", [0, 1, 64])
def test_batches_come_in_order_and_again(waiting):
    loader = AsyncNumbers(waiting, False, 20)
    for _ in range(2):
        assert list(loader) == list(range(0, 200, 10))
    assert len(loader) == 20
    here = threading.current_thread() in loader.threads
    assert here is (waiting == 0)
    loader.close_async_loader()
    loader.close_async_loader()


def test_what_the_loader_raises_is_raised_where_batches_are_used():
    seen = []

    def consume():
        for number in AsyncNumbers(2, False, 20, fails_at=3):
            seen.append(number)

    with pytest.raises(OSError, match="the disk is gone"):
        consume()
    assert seen == [0, 10, 20]


@pytest.mark.parametrize("how", ["close", "break", "drop"])
def test_no_thread_is_left(how):
    loader = AsyncNumbers(1, False, 1_000_000)
    iterator = iter(loader)
    next(iterator)
    thread = loader._thread
    assert thread.is_alive()
    if how == "close":
        loader.close_async_loader()
    elif how == "break":
        iterator.close()
    else:
        del iterator, loader
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("how", ["close", "iterate anew"])
def test_a_loop_whose_loader_is_closed_under_it_ends(how):
    loader = AsyncNumbers(2, False, 1_000_000)
    seen = []

    def consume():
        for number in loader:
            seen.append(number)
            if len(seen) == 3:
                if how == "close":
                    loader.close_async_loader()
                else:
                    next(iter(loader))

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    consumer.join(60)
    assert not consumer.is_alive()
    assert 3 <= len(seen) < 10
    assert seen == list(range(0, 10 * len(seen), 10))


def test_two_loops_over_one_loader_end():
    loader = AsyncNumbers(2, False, 1_000_000)
    pairs = []
    consumer = threading.Thread(
        target=lambda: pairs.extend(zip(loader, loader, strict=False)), daemon=True
    )
    consumer.start()
    consumer.join(60)
    assert not consumer.is_alive()
    assert len(pairs) < 10


def test_a_loader_must_say_how():
    with pytest.raises(NotImplementedError, match="BaseDataLoader needs _iterate"):
        next(iter(BaseDataLoader()))
    with pytest.raises(NotImplementedError, match="how many batches"):
        len(BaseDataLoader())
