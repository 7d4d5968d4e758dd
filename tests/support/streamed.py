"""Simulated elastic jobs that read streams: deaths in rounds and steps, joins, leaves, restarts.

Everything is in one thread. ``play`` checks after each step what must hold, and at the end of each
epoch that each sample has counted once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from kolovod.elastic.stream import ElasticStream
from kolovod.elastic.streaming import StreamStep

Batch = list[int]


def batches_of(part: int, lengths: list[int], epoch: int) -> list[Batch]:
    """Of a part, one of ``lengths`` batches, with samples that no other one has."""
    draw = random.Random(f"{part} {epoch}")
    numbers = itertools.count(1000 * part)
    return [[next(numbers) for _ in range(draw.randrange(1, 4))] for _ in range(lengths[part])]


class Stateful:
    """A loader that can tell its state, and fails if it is told to skip what it has given."""

    def __init__(self, batches: list[Batch], reads: Counter[str]) -> None:
        self.batches, self.reads, self.at = batches, reads, 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.reads["loaded"] += 1

    def __iter__(self) -> Iterator[Batch]:
        while self.at < len(self.batches):
            self.at += 1
            self.reads["batches"] += 1
            yield self.batches[self.at - 1]


@dataclass(eq=False)
class Process:
    """A rank, or one that will be."""

    member: int
    stream: ElasticStream[Batch]
    batch: tuple[Batch, float] = field(default=([], 0.0))


class Job:
    """A schedule, drawn from a seed, or what hypothesis draws."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.lengths = [draw.choice([0, 0, 1, 2, 3, 7, 20]) for _ in range(draw.randrange(1, 9))]
        self.every = draw.choice([1, 2, 5, 100])
        self.tells_state = draw.random() < 0.6
        self.death, self.move = draw.choice([0, 0.1, 0.3]), draw.choice([0, 0.1, 0.4])
        self.recomputes = draw.random() < 0.3
        self.next_member = 0
        self.epoch = draw.randrange(3)
        self.counts: Counter[int] = Counter()
        self.events: Counter[str] = Counter()
        self.saved: tuple[str, Counter[int]] | None = None
        self.ranks: list[Process] = []
        self.idle: set[int] = set()
        self.start(draw.randrange(1, 6), None)

    def make(self, part: int, parts: int, epoch: int) -> Any:
        assert parts == len(self.lengths)
        batches = batches_of(part, self.lengths, epoch)
        return Stateful(batches, self.events) if self.tells_state else iter(batches)

    def process(self) -> Process:
        self.next_member += 1
        stream = ElasticStream(self.make, len(self.lengths), snapshot_every=self.every)
        return Process(self.next_member, stream)

    def start(self, size: int, state: str | None) -> None:
        """A job, from the beginning or from a checkpoint."""
        self.ranks = [self.process() for _ in range(size)]
        for rank in self.ranks:
            if state is not None:
                rank.stream.load_state_dict(json.loads(state))
            else:
                rank.stream.set_epoch(self.epoch)
        self.change(self.ranks)

    # --- events ---

    def dies(self) -> bool:
        return self.draw.random() < self.death / max(len(self.ranks), 1)

    def talk(self, talks: list[tuple[Process, Any]], event: str) -> list[Any]:
        """What all generators return in the end; some ranks may die meanwhile."""
        said = [next(talk) for _, talk in talks]
        while True:
            at = self.draw.randrange(len(talks))
            others = [rank for k, (rank, _) in enumerate(talks) if k != at]
            if any(rank in self.ranks for rank in others) and self.dies():
                talks.pop(at)[1].close()  # and the round is repeated without it
                said.pop(at)
                self.events[event] += 1
            gathered, results, said = list(said), [], []
            for _, talk in talks:
                try:
                    said.append(talk.send(list(gathered)))
                except StopIteration as end:
                    results.append(end.value)
            assert len(results) in (0, len(talks))
            if results:
                return results

    def change(self, ranks: list[Process]) -> None:
        """``ranks`` are those of the next world; some may die in the exchange."""
        takes_part = not any(rank in self.ranks for rank in ranks) or self.draw.random() < 0.6
        talks = [(rank, rank.stream.exchange(rank.member, takes_part=takes_part)) for rank in ranks]
        old = list(self.ranks)
        self.talk(talks, "died in an exchange")
        self.ranks = [rank for rank, _ in talks]
        for rank in self.ranks:
            if rank not in old:
                rank.stream.set_epoch(self.epoch)  # as its script does
                self.events["joined"] += 1
                if not takes_part:
                    self.idle.add(rank.member)
        self.check_alike()

    def check_alike(self) -> None:
        first = self.ranks[0].stream
        state = json.dumps(first.state_dict())
        for rank in self.ranks:
            assert rank.stream._progress == first._progress
            assert json.dumps(rank.stream.state_dict()) == state

    def go_back(self) -> None:
        """All go back to the last commit, from a step that some have not come to."""
        restores = [(rank, rank.stream.keep()) for rank in self.ranks]
        talks = [rank.stream.rounds(rank.member) for rank in self.ranks]
        said = [next(talk, None) for talk in talks]
        if None not in said:
            for talk in talks:
                if self.draw.random() < 0.5:  # it has passed the ticket of this round
                    with contextlib.suppress(StopIteration):
                        talk.send(list(said))
        for talk in talks:
            talk.close()
        for rank, restore in restores:
            if self.draw.random() < 0.3:  # it has come to its next epoch
                rank.stream.set_epoch(self.epoch + 1)
            restore()
        self.events["went back"] += 1

    def step(self) -> bool:
        """One of all ranks, some of which may die in it; False: the epoch is over."""
        if self.recomputes and self.draw.random() < 0.1:
            self.go_back()
        talks = [(rank, rank.stream.rounds(rank.member)) for rank in self.ranks]
        if self.ranks[0].stream._progress.is_over:
            assert [next(talk, None) for _, talk in talks] == [None] * len(talks)
            return False
        steps = self.talk(talks, "died in a round")
        self.ranks = [rank for rank, _ in talks]
        step = steps[0]
        assert all(each == step for each in steps)
        if step is None:
            self.check_alike()
            return False
        assert step.taken
        for rank in self.ranks:
            rank.batch = rank.stream.batch_of(step, rank.member)
        self.check_batches(step)
        everyone = list(self.ranks)
        dead = [rank for rank in everyone if self.dies()]
        if len(dead) == len(everyone) and self.draw.random() < 0.8:
            dead.pop()
        has_passed = self.draw.random() < 0.4  # the ticket, before they died
        counted = [rank for rank in everyone if has_passed or rank not in dead]
        self.ranks = [rank for rank in everyone if rank not in dead]
        if not self.ranks:
            self.events["all died"] += 1
            return True
        self.events["died in a step"] += len(dead)
        self.check_average(step, counted)
        for rank in counted:
            if rank.batch[1]:
                self.counts.update(rank.batch[0])
        for rank in self.ranks:
            rank.stream.record_step([each.member for each in counted])
        self.idle.clear()
        self.check_alike()
        return True

    def check_batches(self, step: StreamStep) -> None:
        parts = [part for part, _ in step.taken.values()]
        assert len(set(parts)) == len(parts)
        present = {rank.member for rank in self.ranks}
        assert set(step.taken) <= present
        assert set(step.members) <= present
        for rank in self.ranks:
            batch, weight = rank.batch
            assert batch  # the model runs on all ranks
            assert (weight > 0) == (rank.member in step.taken)
            if rank.member in self.idle and len(self.idle & present) < len(present):
                assert not weight
                self.events["idle"] += 1
        self.events["nothing left for a rank"] += len(step.taken) < len(present)
        total = sum(weight for _, weight in (rank.batch for rank in self.ranks))
        assert abs(total - len(step.members)) < 1e-9
        assert abs(step.correction(list(present)) - 1) < 1e-9

    def check_average(self, step: StreamStep, counted: list[Process]) -> None:
        """The average of weighted means is that of the samples, whoever was lost."""
        members = [rank.member for rank in counted]
        samples = [sample for rank in counted if rank.batch[1] for sample in rank.batch[0]]
        ranks = sum(member in step.members for member in members)
        if not samples:
            return
        total = sum(Fraction(sum(b), len(b)) * Fraction(w) for b, w in (r.batch for r in counted))
        average = float(total) / ranks * step.correction(members)
        mean = sum(samples) / len(samples)
        assert abs(average - mean) < 1e-6 * (1 + abs(mean))

    def commit(self) -> None:
        """Ranks leave and come."""
        progress = self.ranks[0].stream._progress
        is_changed = len(self.ranks) < len(progress.members)
        ranks = list(self.ranks)
        if self.draw.random() < self.move and len(ranks) > 1:
            ranks.pop(self.draw.randrange(len(ranks)))
            is_changed = True
            self.events["left"] += 1
        if self.draw.random() < self.move and len(ranks) < 7:
            ranks += [self.process() for _ in range(self.draw.randrange(1, 3))]
            is_changed = True
        if self.draw.random() < 0.1:  # ours come last, but need not
            self.draw.shuffle(ranks)
            is_changed = True
        if is_changed or self.draw.random() < 0.05:
            self.change(ranks)
        if self.draw.random() < 0.2:
            state = json.dumps(self.draw.choice(self.ranks).stream.state_dict())
            self.saved = state, Counter(self.counts)

    # --- the whole ---

    def play(self, epochs: int) -> Counter[str]:
        for _ in range(epochs):
            self.counts, self.saved = Counter(), None
            self.play_epoch()
            parts = range(len(self.lengths))
            batches = [b for p in parts for b in batches_of(p, self.lengths, self.epoch)]
            expected = Counter(sample for batch in batches for sample in batch)
            assert self.counts == expected, (self.counts - expected, expected - self.counts)
            assert self.ranks[0].stream.samples_done == len(expected)
            self.epoch += self.draw.choice([1, 1, 2])
            for rank in self.ranks:
                rank.stream.set_epoch(self.epoch)
        return self.events

    def play_epoch(self) -> None:
        for number in itertools.count():
            assert number < 2000
            if self.draw.random() < 0.01 or not self.ranks:
                self.restart()
            if not self.step():
                return
            if self.ranks:
                self.commit()

    def restart(self) -> None:
        state, self.counts = (None, Counter()) if self.saved is None else self.saved
        self.counts = Counter(self.counts)
        self.idle.clear()
        self.events["restarted"] += 1
        self.start(self.draw.randrange(1, 6), state)


def play(draw: random.Random) -> Counter[str]:
    """A whole job; returns how often what happened."""
    job = Job(draw)
    return job.play(draw.randrange(1, 4))


# --- streams without a simulation ---


def talk_over(talks: list[Generator[Any, list[Any], Any]]) -> list[Any]:
    """What the generators of all ranks return, when they have told each other all they yield."""
    said, results = [next(talk) for talk in talks], []
    while not results:
        gathered, said = said, []
        for talk in talks:
            try:
                said.append(talk.send(list(gathered)))
            except StopIteration as end:
                results.append(end.value)
    assert len(results) == len(talks)
    return results


def change(streams: list[ElasticStream[Any]], members: list[int]) -> None:
    """``changed`` on all."""
    talk_over([each.exchange(member) for each, member in zip(streams, members, strict=True)])


def step(
    streams: list[ElasticStream[Any]], members: list[int] | None = None, dies: int | None = None
) -> dict[int, tuple[Any, float]] | None:
    """What each member takes in a step, which all record; None: the epoch is over.

    ``dies``: a member whose gradients do not come, and which records nothing.
    """
    ranks = dict(zip(members or range(len(streams)), streams, strict=True))
    step, *_ = talk_over([stream.rounds(member) for member, stream in ranks.items()])
    if step is None:
        return None
    taken = {member: stream.batch_of(step, member) for member, stream in ranks.items()}
    counted = [member for member in ranks if member != dies]
    for member in counted:
        ranks[member].record_step(counted)
    return taken
