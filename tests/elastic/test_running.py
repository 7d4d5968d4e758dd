"""What the ranks of an elastic job do after a step, wherever each is when a rank is lost.

Ranks are threads, and their worlds and operations are played: an operation during which a rank is
lost gives its result to some of the survivors and fails on the others. The code under test is that
of ``running`` and ``steps``. In each world all ranks must run the same operations in one order.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from kolovod.elastic import handing_over, running
from kolovod.elastic.steps import Steps
from kolovod.errors import CollectiveAbortedError, JobOverError

STEPS = 12
LIMIT_S = 20.0
NOTHING = -1_000_000


class Killed(BaseException):
    """Ends the thread of a rank, as SIGKILL does a process."""


class World:
    """One, and what its ranks have put into its operations."""

    def __init__(self, epoch: int, members: tuple[int, ...]) -> None:
        self.epoch, self.members, self.size = epoch, members, len(members)
        self.given: list[dict[int, tuple[str, Any]]] = []
        self.taken: list[set[int]] = []
        self.done: dict[int, set[int]] = {}
        """Who gets the result of the operation of that number; None has not been decided."""
        self.calls: Counter[int] = Counter()
        self.sent: dict[tuple[int, int, int], int] = {}
        self.is_broken = False
        self.stopped: set[int] = set()


class View(NamedTuple):
    """A world as one of its ranks sees it."""

    epoch: int
    members: tuple[int, ...]
    rank: int
    size: int


class Job:
    """The worlds of a job. One lock guards all of it."""

    def __init__(self, seed: int, size: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.moved = threading.Condition()
        self.worlds = [World(1, tuple(range(size)))]
        self.alive = set(range(size))
        self.waiting: list[int] = []  # to join
        self.have_state = set(self.alive)
        self.deaths_left = self.rng.randrange(4)
        self.here = threading.local()
        self.seen: Counter[str] = Counter()
        self.wrong = ""
        self.results: dict[int, Any] = {}
        self.threads: list[threading.Thread] = []

    # --- what a rank calls ---

    @property
    def mine(self) -> World:
        return self.here.world  # type: ignore[no-any-return]

    def current(self) -> View:
        world, number = self.mine, self.here.number
        return View(world.epoch, world.members, world.members.index(number), world.size)

    def init(self) -> None:
        """The newest world that this rank is in, later than its last."""
        before = self.here.world
        self._wait(lambda: self._next(before) is not None)
        self.here.world = self._next(before)

    def shutdown(self) -> None:
        with self.moved:
            world = self.mine
            if world.stopped.issuperset(world.members) and not world.is_broken:
                joined, self.waiting = self.waiting, []
                self._break(world, joined)
                self.seen["grows" if joined else "stops for nothing"] += 1
            self.moved.notify_all()

    def stop_for_next(self, *, is_wanted: bool) -> None:
        with self.moved:
            self.mine.stopped.add(self.here.number)

    @property
    def wants_change(self) -> bool:
        with self.moved:
            return bool(self.waiting) and self.rng.random() < 0.7

    def run(self, name: str, value: Any) -> list[Any]:
        """An operation: the values of all ranks."""
        world, number = self.mine, self.here.number
        with self.moved:
            place = world.calls[number]
            world.calls[number] += 1
            if len(world.given) == place:
                world.given.append({})
            if not self._fails(world):
                world.given[place][number] = name, value
                if len({name for name, _ in world.given[place].values()}) > 1:
                    self.wrong = f"epoch {world.epoch}: {world.given[place]}"
                if len(world.given[place]) == world.size:
                    self._complete(world, place)
            self.moved.notify_all()
        self._wait(lambda: self._fails(world) or place in world.done)
        with self.moved:
            if number not in self.alive:
                raise Killed
            if number not in world.done.get(place, ()):
                raise CollectiveAbortedError(f"epoch {world.epoch} has failed")
            return [world.given[place][member][1] for member in world.members]

    # --- under the lock ---

    def _complete(self, world: World, place: int) -> None:
        """All have come; perhaps one is lost, and some do not get the result."""
        world.done[place] = set(world.members)
        victim = self._may_lose(world, "", 0.04)
        if victim is not None:
            torn = {m for m in world.members if self.rng.random() < 0.5}
            world.done[place] -= torn
            kind = world.given[place][victim][0]
            self.seen[f"{kind} torn" if torn - {victim} else "dies"] += 1

    def _may_lose(self, world: World, kind: str, probability: float) -> int | None:
        """Who is lost, as long as somebody with the state is left."""
        victim = self.rng.choice(world.members)
        survives = bool((self.have_state & self.alive).intersection(world.members) - {victim})
        is_lost = self.deaths_left and survives and self.rng.random() < probability
        if not is_lost or world.is_broken:
            return None
        self.deaths_left -= 1
        self.alive.discard(victim)
        self.seen[f"{kind} lost"] += 1
        self._break(world)
        return victim

    def _fails(self, world: World) -> bool:
        return world.is_broken or bool(world.stopped - {self.here.number})

    def _break(self, world: World, joined: Sequence[int] = ()) -> None:
        """Another one follows, of those who are left."""
        if not world.is_broken:
            world.is_broken = True
            members = tuple(m for m in world.members if m in self.alive)
            self.worlds.append(World(len(self.worlds) + 1, (*members, *joined)))
        self.moved.notify_all()

    def _next(self, before: World | None) -> World | None:
        newest = self.worlds[-1]
        is_later = before is None or newest.epoch > before.epoch
        return newest if is_later and self.here.number in newest.members else None

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self.moved:
            came = self.moved.wait_for(
                lambda: condition() or self._is_over() or self._gives_up(), LIMIT_S
            )
            if not came:
                self.wrong = self.wrong or f"rank {self.here.number} waits for ever"
                self.moved.notify_all()
            if self._is_over():
                raise Killed
            if not condition() and self._gives_up():
                raise JobOverError("others have ended")

    def _is_over(self) -> bool:
        """For this rank."""
        return bool(self.wrong) or self.here.number not in self.alive

    def _gives_up(self) -> bool:
        """As a rank does that waits for others' end for too long."""
        return self.here.is_ending and bool(self.results)

    # --- ranks ---

    def join(self) -> None:
        """Another one comes."""
        with self.moved:
            number = max(self.worlds[0].size, len(self.threads))
            self.alive.add(number)
            self.waiting.append(number)
            self.start(number)  # here, or another one that comes now gets the same number

    def start(self, number: int) -> None:
        self.threads.append(threading.Thread(target=self._live, args=(number,)))
        self.threads[-1].start()

    def _live(self, number: int) -> None:
        self.here.number, self.here.world, self.here.is_ending = number, None, False
        try:
            self.results[number] = train(self, number)
            with self.moved:  # whoever has not come in by now is not needed
                self.alive.difference_update(self.waiting)
                self.waiting.clear()
                self.moved.notify_all()
        except Killed:
            pass
        except Exception as error:
            with self.moved:
                self.wrong = self.wrong or f"rank {number}: {error!r}"
                self.moved.notify_all()


class Sampler:
    """Takes part in the exchange, as an ElasticSampler does, and remembers who is in it."""

    is_due = False

    def __init__(self) -> None:
        self.members: list[int] = []
        self.log: list[tuple[int, ...]] = []

    def record_step(self, members: tuple[int, ...]) -> None:
        self.log.append(members)

    def changed(
        self, member: int, allgather: Callable[[Any], list[Any]], *, takes_part: bool
    ) -> None:
        self.members = allgather(member)


class Late:
    """An exchange that is sent in one step and used in the next, as in independent training."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.own = job, 1 << number
        self.is_sent, self.means = False, 0  # 0: they have not arrived
        self.ongoing: Any = None

    def arrive(self) -> int:
        if self.is_sent and not self.means:
            run = self.job.run
            self.means = sum(self.ongoing.run(lambda: run("late", self.own), counts=True))
        return self.means

    def send(self) -> None:
        self.is_sent, self.means = True, 0

    def drain_exchanges(self) -> Iterator[None]:
        if self.is_sent and not self.means:
            self.arrive()
            self.job.seen["arrives before the world is left"] += 1
            yield


class Messages:
    """Between two ranks of a world; see ``Transfers``."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def isend(self, cell: list[int], taker: int, tag: int) -> Any:
        self._sent()[self.job.current().rank, taker, tag] = cell[0]
        return SimpleNamespace(wait=lambda: self._wait(lambda: True))

    def irecv(self, cell: list[int], giver: int, tag: int) -> Any:
        sent, key = self._sent(), (giver, self.job.current().rank, tag)

        def wait() -> None:
            with self.job.moved:
                self.job._may_lose(self.job.mine, "message", 0.3)
            self._wait(lambda: key in sent)
            cell[0] = sent[key]

        return SimpleNamespace(wait=wait)

    def recv(self, cell: list[int], giver: int, tag: int) -> None:
        self.irecv(cell, giver, tag).wait()

    def _sent(self) -> dict[tuple[int, int, int], int]:
        with self.job.moved:
            return self.job.mine.sent

    def _wait(self, has_come: Callable[[], bool]) -> None:
        job, world = self.job, self.job.mine
        with job.moved:
            job.moved.notify_all()
        job._wait(lambda: has_come() or job._fails(world))
        if not has_come() or job._fails(world):
            raise CollectiveAbortedError(f"epoch {world.epoch} has failed")


class MembershipClient:
    """A rank's, and its ``steps.Recovery``."""

    min_np = 0

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self.stop_for_next = job.stop_for_next

    def reform(self, error: CollectiveAbortedError) -> None:
        with self.job.moved:
            self.job._break(self.job.mine)
        self.job.init()

    @property
    def wants_change(self) -> bool:
        return self.job.wants_change

    leaves = False

    @property
    def has_state(self) -> bool:
        return self.number in self.job.have_state

    @property
    def has_failed(self) -> bool:
        with self.job.moved:
            fails = self.job.mine.is_broken and self.job._next(self.job.mine) is not None
            self.job.seen["follows"] += fails
            return fails

    def got_state(self) -> None:
        self.job.have_state.add(self.number)


def train(job: Job, number: int) -> Any:
    """What ``elastic.run`` does, with a function of STEPS steps.

    In every other job steps are computed again from the last commit; in half of the others ranks
    train independently, and in a quarter the sum of all steps is given to a rank that joins in its
    first.
    """
    recomputes, trains_independently = bool(job.seed % 2), job.seed % 4 == 2
    joins_during_step = job.seed % 8 == 4
    late = Late(job, number)
    job.init()
    samplers = [Sampler(), Sampler()]
    state = SimpleNamespace(step=0, total=0, log=[], sizes=[], begun=0)
    state.samplers, state.logs = lambda: samplers, list
    state.independent_trainings = lambda: [late] if trains_independently else []

    def take(cell: list[int]) -> None:
        state.total = cell[0]
        job.seen["is given the state in a step"] += 1

    def hand_over(*, during_step: bool) -> list[Any]:
        sent = late.is_sent, late.means
        total = NOTHING if during_step else state.total
        mine = state.step, total, tuple(state.log), tuple(state.sizes), sent
        state.step, total, log, sizes, sent = job.run("sync", mine)[0]
        portions = []
        if total == NOTHING:
            cell = [NOTHING if job.current().rank in ongoing.lacking else state.total]
            of_cell = SimpleNamespace(transfers=Messages(job), pieces=[cell])
            of_cell.take, of_cell.checksum = lambda: take(cell), lambda cell: cell[0]
            portions.append(of_cell)
        else:
            state.total = total
        assert all(sent) or not any(sent), "what is on its way has not arrived"
        late.is_sent, late.means = sent
        state.log, state.sizes = list(log), list(sizes)
        return portions

    def keep() -> Callable[[], None]:
        kept = state.step, state.total, tuple(state.log), tuple(state.sizes)

        def restore() -> None:
            state.step, state.total, log, sizes = kept
            state.log, state.sizes, state.begun = list(log), list(sizes), state.step
            job.seen["goes back"] += 1

        return restore

    state.hand_over, state.keep = hand_over, keep
    state.has_size = lambda size: state.sizes.append(size)
    client: Any = MembershipClient(job, number)
    ongoing = Steps(client, job.current, recomputes=recomputes)  # type: ignore[arg-type]
    ongoing._verbs = SimpleNamespace(allreduce_=maximum(job))  # type: ignore[assignment]
    late.ongoing = ongoing
    ongoing.begin()
    handing_over = running._share(state, ongoing, client, also=True)
    deal = running._Deal(state, ongoing)  # type: ignore[arg-type]
    deal.follow(takes_part=handing_over is None)
    state.has_size(ongoing.world.size)
    kept = running._Kept(state, ongoing)  # type: ignore[arg-type]
    running._hand_over(ongoing, handing_over)
    state.begun = state.step

    def loop() -> None:
        while state.step < STEPS:
            state.begun += 1
            if recomputes:
                job.run("forward", 0)
            if trains_independently:
                ongoing.follow()
                state.log.append(late.arrive())
                state.total += state.log[-1]
                late.send()
            else:
                ongoing.run(lambda: job.run("more", 0))
            values = ongoing.run(
                lambda: job.run("weights", ongoing.counting(ongoing.present_world)[0] << number),
                counts=True,
                is_repeatable=not recomputes,
            )
            state.total += sum(values)
            assert state.total >= 0, "it has stepped with a state that it had not"
            state.log.append(sum(values))
            state.step += 1
            assert state.begun == state.step
            with job.moved:
                joins = job.rng.random() < 0.1 and len(job.threads) < 6
            if joins:
                job.join()
            running._commit(
                state,
                ongoing=ongoing,
                client=client,
                deal=deal,
                kept=kept,
                joins_during_step=joins_during_step,
            )

    running._call(loop, ongoing, kept)
    ongoing.finish_hand_over()
    job.here.is_ending = True
    with contextlib.suppress(JobOverError):
        ongoing.run(lambda: None)
    return state.total, state.log, state.sizes


def maximum(job: Job) -> Callable[..., None]:
    def allreduce_(array: np.ndarray, name: str, op: object) -> None:
        array[...] = np.max(job.run(name, array.copy()), axis=0)

    return allreduce_


def play(seed: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    size = random.Random(seed).choice([2, 3, 4])
    job = Job(seed, size)
    monkeypatch.setattr(running, "lifecycle", job)
    monkeypatch.setattr(handing_over, "Transfers", lambda frontend, world: Messages(job))
    monkeypatch.setattr(
        running,
        "Objects",
        lambda world: SimpleNamespace(allgather_object=lambda value, name: job.run(name, value)),
    )
    for number in range(size):
        job.start(number)
    for thread in job.threads:  # which grow
        thread.join()
    assert not job.wrong, f"seed {seed}: {job.wrong}"
    ended = [result for result in job.results.values() if result is not None]
    assert ended, f"seed {seed}"
    assert all(result == ended[0] for result in ended), f"seed {seed}: {job.results}"
    assert ended[0][0] == sum(ended[0][1])
    return job.seen


@pytest.mark.slow
def test_ranks_agree_after_each_step_whoever_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    for seed in range(300):
        seen += play(seed, monkeypatch)
    own = ("ticket", "meeting", "samples")
    for kind in (
        "weights",
        "more",
        "forward",
        "sync",
        "late",
        *(f"elastic.{name}" for name in own),
    ):
        assert seen[f"{kind} torn"], seen
    assert seen["grows"] > 50, seen
    assert seen["goes back"] > 20, seen
    assert seen["follows"], seen
    assert seen["arrives before the world is left"] > 20, seen
    assert seen["is given the state in a step"] > 20, seen
    assert seen["message lost"] > 5, seen
