"""Simulated elastic jobs: deaths, joins, leaves, and loaders that draw ahead.

Everything is in one thread: a rank is a generator over its training loop. ``play`` checks after
each step what must hold, and at the end of each epoch that each sample has counted once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import random
import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from kolovod.elastic.sampler import ElasticSampler
from kolovod.elastic.sampling import Plan

Step = list[tuple[list[int], float]]


class KnownSpeed:
    """Has the speed that a test says, where a ``SpeedMeter`` measures it."""

    def __init__(self, speed: float) -> None:
        self.speed = speed

    def step(self, done: int, samples: int) -> None:
        assert done > 0
        assert samples >= 0

    def forget(self) -> None:
        """Keep the speed: it is known."""


class Loader:
    """Draws up to ``ahead`` batches more than it has given out, as loaders with workers do."""

    def __init__(self, sampler: ElasticSampler, ahead: int, *, cuts: bool) -> None:
        """``cuts``: it takes indices and cuts batches of them itself."""
        self.sampler, self.ahead, self.cuts = sampler, ahead, cuts

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._cut() if self.cuts else iter(self.sampler.batches())
        waiting: deque[list[int]] = deque()
        while True:
            while len(waiting) <= self.ahead and (batch := next(batches, None)) is not None:
                waiting.append(batch)
            if not waiting:
                return
            yield waiting.popleft()

    def _cut(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        while batch := list(itertools.islice(indices, self.sampler.batch_size)):
            yield batch


def change_all(ranks: list[tuple[ElasticSampler, int]]) -> None:
    """``changed`` on all ranks, which are samplers and their members' numbers, in one thread."""
    talks = [sampler.exchange(member) for sampler, member in ranks]
    said = [next(talk) for talk in talks]
    while said:
        gathered, said = said, []
        for talk in talks:
            with contextlib.suppress(StopIteration):
                said.append(talk.send(list(gathered)))


@dataclass(eq=False)
class Process:
    """A rank, or one that will be."""

    member: int
    sampler: ElasticSampler
    loader: Loader
    uses_steps: bool
    loop: Iterator[Step] = field(init=False)

    def begin(self) -> None:
        """Enter the training loop of the epoch."""
        self.loop = self._with_steps() if self.uses_steps else self._plain()

    def _with_steps(self) -> Iterator[Step]:
        for step in self.sampler.steps(self.loader):
            yield list(step)

    def _plain(self) -> Iterator[Step]:
        while self.sampler.steps_left:
            for batch in self.loader:
                yield [(batch, self.sampler.weight)]


class Job:
    """A schedule, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.length = draw.choice([0, 1, 2, 3, *[draw.randrange(4, 80)] * 8])
        self.batch_size = draw.choice([1, 2, 3, 4, 7, 100])
        self.pad = draw.random() < 0.3
        self.per_step = None
        if not self.pad and draw.random() < 0.4:
            self.per_step = draw.randrange(1, 40)
        self.uses_steps = self.per_step is not None or draw.random() < 0.5
        self.cuts = self.per_step is None and draw.random() < 0.5
        self.shuffles, self.seed = draw.random() < 0.8, draw.randrange(5)
        self.draw_speed = random.Random(seed)
        self.by_speed = self.per_step is not None and self.draw_speed.random() < 0.6
        self.is_calm = self.by_speed and self.draw_speed.random() < 0.5
        if self.is_calm:  # long enough that shares are agreed on again
            self.length = self.draw_speed.randrange(60, 160)
        self.commits_every = draw.choice([1, 1, 1, 2, 3])
        self.death, self.move = draw.choice([0, 0.1, 0.3]), draw.choice([0, 0.1, 0.4])
        self.values = [Fraction(draw.randrange(-50, 50)) for _ in range(self.length)]
        self.next_member = 0
        self.epoch = draw.randrange(3)
        self.counts: Counter[int] = Counter()
        self.events: Counter[str] = Counter()
        self.saved: tuple[str, Counter[int]] | None = None
        self.ranks: list[Process] = []
        self.idle: set[int] = set()
        self.start(draw.randrange(1, 6), None)

    def process(self) -> Process:
        sampler = ElasticSampler(
            range(self.length),
            self.batch_size,
            self.shuffles,
            self.seed,
            self.pad,
            samples_per_step=self.per_step,
            by_speed=self.by_speed,
        )
        speed = self.draw_speed.choice([0, 1, 1.02, 2, self.draw_speed.uniform(0.01, 100)])
        sampler._meter = KnownSpeed(speed)  # type: ignore[assignment]
        loader = Loader(sampler, self.draw.choice([0, 0, 1, 2, 5]), cuts=self.cuts)
        self.next_member += 1
        return Process(self.next_member, sampler, loader, self.uses_steps)

    def start(self, size: int, state: str | None) -> None:
        """A job, from the beginning or from a checkpoint."""
        self.ranks = [self.process() for _ in range(size)]
        for rank in self.ranks:
            if state is not None:
                rank.sampler.load_state_dict(json.loads(state))
            else:
                rank.sampler.set_epoch(self.epoch)
        self.change(self.ranks)
        for rank in self.ranks:
            rank.begin()

    # --- events ---

    def dies(self) -> bool:
        return self.draw.random() < self.death / max(len(self.ranks), 1)

    def change(self, ranks: list[Process]) -> None:
        """``ranks`` are those of the next world; some may die in the exchange."""
        takes_part = not any(rank in self.ranks for rank in ranks) or self.draw.random() < 0.6
        talks = [
            (rank, rank.sampler.exchange(rank.member, takes_part=takes_part)) for rank in ranks
        ]
        said = [next(talk) for _, talk in talks]
        while True:
            at = self.draw.randrange(len(talks))
            others = [rank for k, (rank, _) in enumerate(talks) if k != at]
            # It is repeated without whoever dies. Where only new ranks are left the job is lost.
            if any(rank in self.ranks for rank in others) and self.dies():
                talks.pop(at)[1].close()
                said.pop(at)
                self.events["died in an exchange"] += 1
            gathered, ended, said = list(said), 0, []
            for _, talk in talks:
                try:
                    said.append(talk.send(list(gathered)))
                except StopIteration:
                    ended += 1
            assert ended in (0, len(talks))
            if ended:
                break
        old = list(self.ranks)
        self.ranks = [rank for rank, _ in talks]
        for rank in self.ranks:
            if rank not in old:
                rank.sampler.set_epoch(self.epoch)  # as its script does
                rank.begin()
                self.events["joined"] += 1
                if not takes_part:
                    self.idle.add(rank.member)
        self.check_alike()
        plan = self.ranks[0].sampler._progress.plan
        assert list(plan.members) == [rank.member for rank in self.ranks]
        check_shape(self.ranks[0].sampler._progress.plan)

    def check_alike(self) -> None:
        first = self.ranks[0].sampler
        for rank in self.ranks:
            assert rank.sampler._progress == first._progress
            assert rank.sampler.steps_left == first.steps_left

    def step(self) -> None:
        """One of all ranks; some may die in it."""
        everyone = list(self.ranks)
        taken: dict[int, Step] = {}
        for rank in everyone:
            step = next(rank.loop, None)
            if step is None:  # there were only steps without samples, and ``steps`` left them out
                assert rank.sampler.steps_left == 0
                continue
            taken[rank.member] = step
        if not taken:
            return
        assert len(taken) == len(everyone)
        for member in self.idle & taken.keys():
            assert not any(weight for _, weight in taken[member])
            self.events["idle"] += 1
        self.idle.clear()
        dead = [rank for rank in everyone if self.dies()]
        if len(dead) == len(everyone) and self.draw.random() < 0.8:
            dead.pop()
        has_passed = self.draw.random() < 0.4  # the ticket, before they died
        counted = [r.member for r in everyone if has_passed or r not in dead]
        self.ranks = [rank for rank in everyone if rank not in dead]
        if not self.ranks:
            self.events["all died"] += 1
            return
        self.events["died in a step"] += len(dead)
        now = self.ranks[0].sampler._progress
        self.check_average(taken, counted)
        for rank in self.ranks:
            rank.sampler.record_step(counted)
        self.count(taken, counted, now.plan, now.done)
        self.check_alike()

    def check_average(self, taken: dict[int, Step], counted: list[int]) -> None:
        """The average of weighted gradients is that of the samples, whoever was lost."""
        samples = [i for m in counted for batch, w in taken[m] if w for i in batch]
        sampler = self.ranks[0].sampler
        if not samples:
            self.events["nothing counted"] += 1
            return
        mean = sum(self.values[i] for i in samples) / len(samples)
        total = 0.0
        for member in counted:
            for batch, weight in taken[member]:
                total += float(sum(self.values[i] for i in batch) / len(batch)) * weight
        idle = sampler._progress.idle
        ranks = sum(member not in idle for member in counted)
        average = total / ranks * sampler.correction(counted)
        assert abs(average - float(mean)) < 1e-9 * (1 + abs(float(mean)))
        if len(counted) == len(sampler._progress.plan.members):
            assert abs(sampler.correction(counted) - 1) < 1e-12
            assert sampler.samples == len(samples)

    def count(self, taken: dict[int, Step], counted: list[int], plan: Plan, step: int) -> None:
        sampler = self.ranks[0].sampler
        for member, batches in taken.items():
            rank = plan.members.index(member)
            assert len(batches) == plan.passes
            for number, (batch, weight) in enumerate(batches):
                planned = plan.batch(rank, step * plan.passes + number)
                own = sum(stop - start for start, stop in planned.own)
                if self.cuts and not weight:
                    assert set(batch) == set(sampler._indices(planned))
                else:
                    assert batch == sampler._indices(planned)
                assert batch
                assert bool(weight) == bool(own or (self.pad and planned.counts))
                assert len(batch) <= self.batch_size
                if member in counted:
                    self.counts.update(batch[:own])
        if not any(plan.kept) and len(taken) == len(plan.members):
            sizes = [len(b) for batches in taken.values() for b, w in batches if w]
            if self.pad:
                assert len(set(sizes)) == 1
            if plan.shares:
                self.check_shares(taken, plan)
            else:
                assert max(sizes) - min(sizes) <= 1
            if step < plan.steps - 1:
                assert sum(sizes) == plan.samples

    def check_shares(self, taken: dict[int, Step], plan: Plan) -> None:
        """No sample would end earlier with another rank that may have it."""
        self.events["shared by speed"] += 1
        slots = [
            (len(batch) if weight else 0, share)
            for (_, batches), share in zip(taken.items(), plan.shares, strict=True)
            for batch, weight in batches
        ]
        for size, share in slots:
            for other, theirs in slots:
                may_move = size > 1 and other < self.batch_size
                assert not may_move or size * theirs <= (other + 1) * share, slots

    def commit(self) -> None:
        """Ranks leave and come; those that are left share out the rest."""
        is_changed = len(self.ranks) < len(self.ranks[0].sampler._progress.plan.members)
        ranks = list(self.ranks)
        if self.is_calm and not is_changed:
            if ranks[0].sampler.is_due:
                self.events["due"] += 1
                self.change(ranks)
            return
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
            state = json.dumps(self.draw.choice(self.ranks).sampler.state_dict())
            self.saved = state, Counter(self.counts)

    # --- the whole ---

    def play(self, epochs: int) -> Counter[str]:
        for _ in range(epochs):
            self.counts, self.saved = Counter(), None
            self.play_epoch()
            expected = Counter(range(self.length))
            assert self.counts == expected, (self.counts - expected, expected - self.counts)
            self.epoch += self.draw.choice([1, 1, 2])
            for rank in self.ranks:
                rank.sampler.set_epoch(self.epoch)
                rank.begin()
        return self.events

    def play_epoch(self) -> None:
        for number in itertools.count():
            assert number < 2000
            if self.draw.random() < 0.01 or not self.ranks:
                self.restart()
            if not self.ranks[0].sampler.steps_left:
                if number:
                    self.commit()
                if not self.ranks[0].sampler.steps_left:
                    return
                continue
            self.step()
            if self.ranks and number % self.commits_every == 0:
                self.commit()

    def restart(self) -> None:
        state, self.counts = (None, Counter()) if self.saved is None else self.saved
        self.counts = Counter(self.counts)
        self.events["restarted"] += 1
        self.start(self.draw.randrange(1, 6), state)


def check_shape(plan: Plan) -> None:
    """No more steps than the batches that are kept allow."""
    longest = max(len(batches) for batches in plan.kept)
    left = sum(stop - start for start, stop in plan.pool)
    size = len(plan.members)
    if plan.passes == 1 and plan.rules.samples_per_step is None:
        steps = longest
        while sum(steps - len(kept) for kept in plan.kept) * plan.rules.batch_size < left:
            steps += 1
        assert plan.steps == steps
    if not longest:
        assert plan.steps == -(-left // plan.samples)
    for step in range(plan.steps):
        assert len(plan.weights(step)) == size * plan.passes


def play(seed: int) -> Counter[str]:
    """A whole job; returns how often what happened."""
    job = Job(seed)
    return job.play(job.draw.randrange(1, 4))


# --- samplers without a simulation ---


def world(size: int, *args: Any, **kwargs: Any) -> list[ElasticSampler]:
    """One for each rank."""
    return [ElasticSampler(*args, rank=rank, size=size, **kwargs) for rank in range(size)]


def change(samplers: list[ElasticSampler], members: list[int]) -> None:
    """``changed`` on all, each in a thread."""
    values: list[Any] = [None] * len(samplers)
    gate = threading.Barrier(len(samplers), timeout=20)
    errors: list[Exception | None] = [None] * len(samplers)

    def run(rank: int) -> None:
        def allgather(value: Any) -> list[Any]:
            gate.wait()
            values[rank] = pickle.dumps(value)
            gate.wait()
            return list(map(pickle.loads, values))

        try:
            samplers[rank].changed(members[rank], allgather)
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(samplers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors[0] is not None:
        assert len({repr(error) for error in errors}) == 1, errors
        raise errors[0]
