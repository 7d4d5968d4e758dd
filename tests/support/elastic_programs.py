"""The table of the elastic step for TensorFlow, Keras and JAX: ranks are processes that are killed.

Cases are those of ``elastic_program_rows.py``. Each survivor says whose gradients each step has
used (the ``MembershipLog`` of its state), and the replay, with just those, must come to its
weights, bit for bit. Steps, commits and the sampler are those of ``elastic.run``; only worlds are
found without a launcher's help.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import numpy as np
from elastic_deaths import Death, check_counted, without
from elastic_program_rows import STEPS, Case, packed
from elastic_threads import TICKETS, arrange, at_call
from exchange_programs import (
    InJax,
    InKeras,
    InKeras2,
    InKerasOnJax,
    InKerasOnTorch,
    InTensorflow,
    Program,
)
from exchanges import RATE, Replay, compare, own_gradients

import kolovod
from kolovod import elastic
from kolovod.core import ops
from kolovod.core import world as worlds
from kolovod.core.transaction import settle, use_transaction
from kolovod.elastic import running
from kolovod.elastic.steps import Steps
from kolovod.errors import CollectiveAbortedError

SAMPLES, BATCH = 1000, 2
LIMIT_S = 150.0


class Found(NamedTuple):
    """What a survivor of a case has."""

    counted: list[tuple[int, ...]]
    """By step."""
    weights: list[list[Any]]
    """After each."""
    losses: list[float]
    """Of programs that have some: means over the ranks of the moment, equal on all."""
    samples_left: int


def run(start: Callable[..., Any], which: str, found: Sequence[Case]) -> None:
    """Train in processes that ``start`` forks, and compare each step of each survivor."""
    for job in packed(found):
        size = len(job[0].members)
        hosts = [f"host{host}" for host in job[0].row.worlds[0][:size]]
        with tempfile.TemporaryDirectory() as folder:
            results = start(
                size, work, which, job, folder, hosts=hosts, timeout_s=LIMIT_S, keep_going=True
            )
            dead = {member for case in job for death in case.deaths for member in death.victims}
            raised = [result for result in results if result and isinstance(result, str)]
            assert not raised, "\n".join(raised)
            for member, result in enumerate(results):
                died = "killed by signal 9" in str(result)
                assert died == (member in dead), f"member {member} of {job!r}: {result}"
            for number, case in enumerate(job):
                try:
                    _check(case, Path(folder), number)
                except AssertionError as error:
                    raise AssertionError(f"{case!r}: {error}") from None


def _check(case: Case, folder: Path, number: int) -> None:
    dead = {victim for death in case.deaths for victim in death.victims}
    survivors: dict[int, Found] = {}
    for member in case.members:
        path = folder / f"{number}.{member}"
        assert path.exists() == (member not in dead), f"member {member}"
        if member not in dead:
            survivors[member] = pickle.loads(path.read_bytes())
    first = next(iter(survivors.values()))
    check_counted(case.members, case.deaths, first.counted)
    replay = Replay(case.row)
    assert len(first.counted) == len(first.weights) == STEPS
    for at, counted in enumerate(first.counted):
        wanted = replay.step(0, at, case.row.steps[at], counted)
        for member, own in survivors.items():
            where = f"member {member} in step {at} of {counted}"
            assert own.counted[at] == counted, where
            for index, right in enumerate(wanted.weights):
                mine = own.weights[at][index]
                compare(case.row, mine, right, f"the weights of {where}, parameter {index}")
                assert mine.tobytes() == first.weights[at][index].tobytes(), where
    for member, own in survivors.items():
        assert own.losses == first.losses, f"the losses of member {member}"
        used = BATCH * sum(map(len, first.counted))
        assert own.samples_left == SAMPLES - used, f"the samples of member {member}"


# In a rank ----------------------------------------------------------------------------------------


def work(rank: int, which: str, job: list[Case], folder: str) -> str:
    """Be a rank in each case of the job; what it comes to is in a file for each.

    Returns what it has raised: that must not be mistaken for a death.
    """
    for number, case in enumerate(job):
        try:
            found = Training(which, case, rank).all()
        except Exception:
            return f"in {case!r}: {traceback.format_exc()}"
        path = Path(folder) / f"{number}.{rank}"
        path.write_bytes(pickle.dumps(found))
    return ""


class Life:
    """One member; what finds worlds for it (``steps.Recovery``), of whom the case leaves alive."""

    wants_change, leaves, has_failed = False, False, False
    has_state = True

    def __init__(self, case: Case, member: int) -> None:
        self.member, self.losses = member, 0
        self._members, self._deaths = case.members, list(case.deaths)
        self.enter()

    def enter(self) -> None:
        """The world of those who are alive."""
        kolovod.shutdown()
        kolovod.init(comm=self._members)

    def die(self) -> None:
        """By SIGKILL."""
        os.kill(os.getpid(), signal.SIGKILL)

    def reform(self, error: CollectiveAbortedError) -> None:
        """See ``steps.Recovery``."""
        if not self._deaths:
            raise AssertionError(f"nobody else should be lost: {error}") from error
        death = self._deaths.pop(0)
        self.losses += 1
        if self.member in death.victims:  # another one that dies in the same step was first
            self.die()
        self._members = without(self._members, death)
        self.enter()


class Training:
    """One rank's, in one case, as ``elastic.run`` has it."""

    def __init__(self, which: str, case: Case, member: int) -> None:
        """Enters the world, and all begin equal."""
        self.case, self.member, self.life = case, member, Life(case, member)
        self.ongoing = Steps(self.life, worlds.current)
        use_transaction(self.ongoing)
        self.program: Any = PROGRAMS[which].made(case.row, member)
        self.program.make()
        sampler = elastic.ElasticSampler(range(SAMPLES), BATCH, shuffle=False)
        values: dict[str, Any] = getattr(self.program, "values", dict)()
        self.state: Any = elastic.State(log=elastic.MembershipLog(), sampler=sampler, **values)
        self.ongoing.begin()
        client: Any = SimpleNamespace(wants_change=False, min_np=1, got_state=lambda: None)
        running._share(self.state, self.ongoing, client, also=True)
        self.deal = running._Deal(self.state, self.ongoing)
        self.deal.follow()
        self.kept = running._Kept(self.state, self.ongoing)
        self.state._on_commit = partial(
            running._commit, ongoing=self.ongoing, client=client, deal=self.deal, kept=self.kept
        )
        self.batches = iter(sampler.batches())
        self.weights: list[list[Any]] = []
        self._is_due = ""  # the place at which this rank is to have died in this step

    def all(self) -> Found:
        """Of all steps."""
        passes = self.case.row.passes
        if getattr(self.program, "fits", False):
            self.program.fit(self)
        else:
            for number in range(STEPS):
                for each in range(passes):
                    self.program.run(self.begin(number, each))
                self.stepped()
                self.state.commit()
                self.committed()
        self.ongoing.run(lambda: None)  # who lacks the last ticket hears of it from the others
        use_transaction(None)
        assert self.program.traced <= self.program.most_traces, (
            f"traced {self.program.traced} times"
        )
        left = sum(stop - start for start, stop in self.state.sampler.state_dict()["left"])
        counted = [step.used for step in self.state.log.steps]
        return Found(counted, self.weights, getattr(self.program, "losses", []), left)

    def begin(self, number: int, each: int) -> list[Any]:
        """A pass begins: its gradients, unless this rank dies before it has them."""
        row = self.case.row
        if each == 0:
            next(self.batches)
            for death in self.case.deaths:
                is_victim = self.member in death.victims
                if death.place == "dealing" and death.step == number + 1 and is_victim:
                    self.deal._gather = self._die_dealing  # type: ignore[method-assign]
                if death.step == number:
                    self._arrange(death, is_victim)
        if self._is_due == "backward" and each == row.passes - 1:
            self.life.die()
        return own_gradients(row, 0, number, row.steps[number], self.member)[each]

    def stepped(self) -> None:
        """A step is over, and not committed."""
        settle()
        self.weights.append([np.array(weight) for weight in self.program.weights()])
        if self._is_due == "between":
            self.life.die()
        # No other place may be behind this one: the row would say what has not been.
        assert self._is_due in ("", "commit", "committed"), f"it did not die at {self._is_due!r}"

    def committed(self) -> None:
        """So is the commit."""
        assert not self._is_due, f"it did not die at {self._is_due!r}"

    def _die_dealing(self, value: Any) -> NoReturn:
        self.life.die()
        raise AssertionError("it is dead")

    def _arrange(self, death: Death, is_victim: bool) -> None:
        life, own, place = self.life, self.ongoing, death.place
        if is_victim and place != "dealing":
            self._is_due = place
        if place in TICKETS:
            alive = worlds.current().members
            arrange(place, death.ticket, life, death.victims, alive, own)
        elif not is_victim:
            pass
        elif place == "sending":
            _in_attempts(own, life.die)
        elif place == "sent":
            _in_attempts(own, lambda: _after_submission(life.die))
        elif place == "update":
            _when_done(own, death.ticket, life.die)
        elif place == "commit":
            self.deal.record = life.die  # type: ignore[method-assign]
        elif place == "committed":
            self.kept.commit = at_call(0, self.kept.commit, life.die)  # type: ignore[method-assign]


def _in_attempts(own: Steps, then: Callable[[], object]) -> None:
    """``then()`` before gradients are sent."""
    exactly = own._exactly

    def with_deaths(attempt: Callable[[], Any], counts: bool, *rest: Any, **more: Any) -> Any:
        def attempted() -> Any:
            then()
            return attempt()

        return exactly(attempted if counts else attempt, counts, *rest, **more)

    own._exactly = with_deaths  # type: ignore[method-assign]


def _when_done(own: Steps, number: int, then: Callable[[], object]) -> None:
    """``then()`` when the ticket of that number, from 0, has been passed, and nothing is used."""
    done, left = own._done, [number]

    def with_deaths(*arguments: Any) -> Any:
        result = done(*arguments)
        left[0] -= 1
        if left[0] < 0:
            then()
        return result

    own._done = with_deaths  # type: ignore[method-assign, assignment]


def _after_submission(then: Callable[[], object]) -> None:
    """``then()`` when the world's engine has taken one more operation."""
    world = worlds.current()

    class Engine:
        def __getattr__(self, name: str) -> Any:
            return getattr(world.engine, name)

        def submit(self, *arguments: Any) -> None:
            world.engine.submit(*arguments)
            then()

        def run(self, *arguments: Any) -> None:
            *request, splits, tells_lines, _, _ = arguments
            world.engine.submit(*request, True, splits, (), tells_lines)
            then()

    worlds._world = replace(world, engine=Engine())  # type: ignore[arg-type]


class Fits(InKeras):
    """Keras: ``fit``, compiled or eager, with the callback that commits; or ``applied``."""

    def make(self) -> None:
        """See Program."""
        super().make()
        self.fits = self.row.program.startswith("fit")
        if self.row.program == "fit eagerly":
            self.model.run_eagerly = True
        if self.kv.rank():  # who begins with the state of rank 0
            self.model.set_weights([weight + 1 for weight in self.model.get_weights()])

    def values(self) -> dict[str, Any]:
        """What the state has."""
        return {"model": self.model, "epoch": 0, "batch": 0}

    def fit(self, training: Training) -> None:
        """All steps, as batches of an epoch."""
        row, count = self.row, STEPS * self.row.passes

        class Dies(self.keras.callbacks.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                number, each = divmod(batch, row.passes)
                if number and not each:
                    training.committed()
                assert training.state.batch == batch
                training.begin(number, each)

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if batch % row.passes == row.passes - 1:
                    training.stepped()

        def batches() -> Iterator[Any]:
            for number in range(STEPS):
                for grads in own_gradients(row, 0, number, row.steps[number], self.rank):
                    factors = np.concatenate([np.ravel(np.asarray(grad)) for grad in grads])[None]
                    yield factors, np.zeros((1, 1), factors.dtype)

        # What dies in a batch does so when the one before is committed.
        commits = self.kv.callbacks.CommitCallback(training.state, row.passes)
        self.model.fit(
            batches(), steps_per_epoch=count, callbacks=[commits, Dies()], verbose=0, shuffle=False
        )
        training.committed()
        assert (training.state.epoch, training.state.batch) == (1, 0)

    def weights(self) -> list[Any]:
        """See Program."""
        importlib.import_module("kolovod.keras.elastic").written_back(self.model)
        return super().weights()


class FitsOnTorch(Fits, InKerasOnTorch):
    """Keras 3 on PyTorch."""


class FitsOnJax(Fits, InKerasOnJax):
    """Keras 3 on JAX."""


class Fits2(Fits, InKeras2):
    """Keras 2."""


class StepsOfJax(InJax):
    """``jitted``, ``eager``; ``allreduce``: gradients by ``elastic.exactly``; and with a loss."""

    def make(self) -> None:
        """See Program."""
        super().make()
        import optax

        row, kv = self.row, self.kv
        self.losses: list[Any] = []
        plain, loss = optax.sgd(RATE, momentum=row.momentum), np.float32(self.rank + 1)

        def by_allreduce(params: Any, state: Any, grads: Any) -> Any:
            combined = elastic.exactly(
                lambda: kv.allreduce_pytree(
                    grads,
                    op=getattr(ops, row.op),
                    compression=getattr(kv.Compression, row.compression),
                ),
                counts=True,
            )
            updates, state = plain.update(combined, state, params)
            return optax.apply_updates(params, updates), state

        @self.jax.jit
        def with_loss(params: Any, state: Any, grads: Any, loss: Any) -> Any:
            updates, state = self.optimizer.update(grads, state, params)
            mean = kv.allreduce(loss, "loss")  # a step of its own
            return optax.apply_updates(params, updates), state, mean

        def keeping_losses(params: Any, state: Any, grads: Any) -> Any:
            params, state, mean = with_loss(params, state, grads, loss)
            self.losses.append(mean)
            return params, state

        if row.program == "allreduce":
            self.step, self.state = by_allreduce, plain.init(self.params)
        elif row.program == "jitted with a loss":
            self.step = keeping_losses

    def weights(self) -> list[Any]:
        """See Program."""
        self.losses = [float(loss) for loss in self.losses]
        return super().weights()


PROGRAMS: dict[str, type[Program]] = {
    "tensorflow": InTensorflow,
    "jax": StepsOfJax,
    "keras on tensorflow": Fits,
    "keras on torch": FitsOnTorch,
    "keras on jax": FitsOnJax,
    "keras 2": Fits2,
}
