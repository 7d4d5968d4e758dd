"""The table of the elastic step: whoever dies at whatever point of a step of PyTorch's optimizers.

A row is one of the exchange (``exchanges.py``) with deaths. ``run`` has ranks that are threads
train, and takes from the survivors whose gradients each step has used; the replay computes each
step of just those, and must come to their weights, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from elastic_deaths import Death, check_counted
from elastic_threads import TICKETS, Job, Life, arrange, own_steps
from exchange_rows import LARGE, ONE_HOST, SHAPES, options_of
from exchange_torch import Trained
from exchanges import Parameter, Replay, Row, Step, Taken, compare
from hypothesis import strategies as st

from kolovod.core.transaction import settle
from kolovod.torch import TorchCollectives, TorchFrontend

STEPS = 7
PLACES = ("backward", "averaged", *TICKETS, "update", "between")
OF_SHARDS = ("copies", "gather", "moving")
"""Where a part's copy is made, where parts are gathered, and where a state goes to who is left."""


class ElasticRow(NamedTuple):
    """A row of the exchange in one world, and its deaths in order."""

    row: Row
    deaths: tuple[Death, ...]


@st.composite
def elastic_rows(draw: Any) -> ElasticRow:
    """Any."""
    of = st.sampled_from
    hosts = draw(of((*ONE_HOST, (0, 0, 1, 1), (0, 1, 1))))
    across = len(set(hosts)) > 1
    sharded = draw(st.integers(0, 2)) == 2
    compression = "none" if sharded else draw(of(("none", "bf16", "by turns")))
    parameters = draw(
        st.lists(
            st.builds(Parameter, of(SHAPES), st.just("float32"), st.just(False)),
            min_size=1, max_size=4,
        )
    )  # fmt: skip
    if draw(st.integers(0, 7)) == 7:
        parameters.append(Parameter(LARGE))
    if all(0 in parameter.shape for parameter in parameters):  # which tell nothing
        parameters.append(Parameter((3,)))
    # A compressor's state is lost with what is thrown away.
    thrown_away = () if compression == "by turns" else ("closure", "zeroed")
    ways = of(("plain", "plain", "clip", "held back", *thrown_away)).map(Step)
    taken = draw(st.lists(ways, min_size=STEPS, max_size=STEPS))
    row = Row(
        (hosts,), tuple(parameters), tuple(taken), draw(of(("Average", "Sum"))), compression,
        groups=draw(of((None, None, 1, 2))), passes=draw(st.integers(1, 2)), sharded=sharded,
        exact=sharded or across or draw(st.booleans()), seed=draw(st.integers(0, 1000)),
    )  # fmt: skip
    places = of(PLACES + (OF_SHARDS if sharded else ()))
    alive, deaths, step = list(range(len(hosts))), [], draw(st.integers(1, 2))
    while len(alive) > 1 and len(deaths) < 2:
        # Of a sharded state each part is on two ranks, so that one may be lost at a time.
        most = 1 if sharded else min(2, len(alive) - 1)
        victims = draw(st.lists(of(alive), min_size=1, max_size=most, unique=True))
        place = draw(places)
        if place == "moving" and not deaths:
            place = "gather"
        deaths.append(Death(step, place, tuple(sorted(victims)), draw(st.integers(0, sharded))))
        alive = [member for member in alive if member not in victims]
        step += 2
    for death in deaths:
        if death.place == "averaged" and taken[death.step].way == "closure":
            taken[death.step] = Step()  # there is nothing between its backward and its step
    return ElasticRow(row._replace(steps=tuple(taken)), tuple(deaths))


def options(case: ElasticRow) -> list[tuple[str, Any]]:
    """For ``exchange_rows.chosen``."""
    row, (first, *more) = case.row, case.deaths
    found = [("place", first.place), ("its way", row.steps[first.step].way)]
    found += [("victims", len(first.victims)), ("ticket", first.ticket)]
    then = more[0].place if more else ""
    return [*found, ("then", then), *(o for o in options_of(row) if o[0] != "way")]


def run(case: ElasticRow) -> None:
    """Train, and compare each step of each survivor."""
    (hosts,) = case.row.worlds
    job = Job(hosts, TorchFrontend)
    results = job.run(lambda life: _train(case, life), [death.victims for death in case.deaths])
    dead = {victim for death in case.deaths for victim in death.victims}
    survivors = {m: found for m, found in enumerate(results) if m not in dead}
    assert all(results[victim] is None for victim in dead)
    first = next(iter(survivors.values()))
    members = [counted for counted, _ in first]
    check_counted(range(case.row.size), case.deaths, members)
    replay = Replay(case.row)
    for number, (step, counted) in enumerate(zip(case.row.steps, members, strict=True)):
        wanted = replay.step(0, number, step, counted)
        for member, found in survivors.items():
            own, taken = found[number]
            where = f"member {member} in step {number} of {counted}"
            assert own == counted, where
            for mine, right in zip(taken.weights, wanted.weights, strict=True):
                compare(case.row, mine, right, f"the weights of {where}")


def _train(case: ElasticRow, life: Life) -> list[tuple[tuple[int, ...], Taken]]:
    torch.set_num_threads(1)
    verbs = TorchCollectives(TorchFrontend(), life.world)
    trained = _Mortal(case, life, verbs)
    trained.wrap()
    found = []
    for number, step in enumerate(case.row.steps):
        taken = trained.step(0, number, step)
        settle()
        counted = own_steps().all_counted or [(life.member,)]  # alone a step has no ticket
        found.append((counted[-1], taken))
        own_steps().all_counted = []
        trained.after(number)
    return found


class _Mortal(Trained):
    """Dies where the row says."""

    def __init__(self, case: ElasticRow, life: Life, verbs: TorchCollectives) -> None:
        super().__init__(case.row, life.member, verbs)
        self.deaths, self.life = {death.step: death for death in case.deaths}, life
        self.place = ""

    def step(self, world: int, number: int, step: Step) -> Taken:
        death = self.deaths.get(number)
        self.place = ""
        if death is not None:
            ticket = 0 if step.way == "closure" else death.ticket
            if death.place in TICKETS:
                arrange(death.place, ticket, self.life, death.victims, self.life.world().members)
            elif self.life.member in death.victims:
                self.place = death.place
                self._prepare(death.place)
        return super().step(world, number, step)

    def _prepare(self, place: str) -> None:
        die, optimizer = self.life.die, self.optimizer
        if place == "backward":
            self.parameters[-1].register_hook(lambda grad: die())
        elif place == "update":
            optimizer.register_step_pre_hook(lambda *_: die())
        elif place in OF_SHARDS:
            sender = optimizer._kolovod_sender
            gather = sender.gather

            def die_when_sent() -> None:
                gather()
                die()

            if place == "copies":
                sender._copy_gradients = die
            elif place == "gather":
                sender.gather = die_when_sent
            else:
                sender.move_state = die

    def before_step(self, *arguments: Any) -> None:
        super().before_step(*arguments)
        if self.place == "averaged":
            self.life.die()

    def after(self, number: int) -> None:
        """The step is over."""
        if self.place:  # whatever was to come before did not
            self.life.die()
