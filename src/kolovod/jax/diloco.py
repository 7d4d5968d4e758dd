"""DiLoCo as a transformation of optax."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from kolovod.core.process_sets import ProcessSet
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients import periodic
from kolovod.gradients.compression import AnyCompressor, Compression
from kolovod.gradients.periodic import Schedule
from kolovod.jax.periodic import Parts, change_to, transformation, when
from kolovod.jax.with_optax import check_transformation

if TYPE_CHECKING:
    import optax

    from kolovod.jax.periodic import PeriodicTransformation

Leaves = list[Any]

_NOTHING, _OWN, _MEAN = 0, 1, 2  # what waits of a fragment


class DiLoCoState(NamedTuple):
    """The state of ``diloco``. On all ranks the same but for ``sent`` and ``inner``."""

    steps: jax.Array
    """The number of steps that the inner optimizer has taken; int32, ()."""
    common: Any
    """The parameters that all ranks have in common, with the same bits; like the parameters."""
    sent: Any
    """With a delay: the outer gradients that wait to be applied; like the parameters."""
    waits: jax.Array | None
    """With a delay, of each fragment: 0 if nothing waits, 1 if this rank's outer gradients do, 2 if
    it is the ranks' mean; int8, (fragments,)."""
    equal_after: jax.Array
    """By fragment, the steps after which ranks had the same last; int32, (fragments,)."""
    exchanges: jax.Array
    """Steps, and calls of ``synchronize``, in which ranks have exchanged something; int32, ()."""
    inner: Any
    """The state of the inner optimizer."""
    outer: tuple[Any, ...]
    """The state of the outer optimizer for each fragment."""


def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    sync_every: int,
    *,
    fragments: Any = 1,
    fragment_sync_delay: int = 0,
    local_share: float | None = None,
    warm_up_steps: int = 0,
    compression: AnyCompressor = Compression.none,
    process_set: ProcessSet | None = None,
    name: str = "diloco",
) -> PeriodicTransformation:
    """Each rank takes steps of ``inner``; every ``sync_every`` steps ``outer`` steps for all.

    As ``kolovod.torch.DiLoCo``, which has the papers, with the same numbers:

        diloco = kv.diloco(
            optax.adamw(4e-4), optax.sgd(0.7, momentum=0.9, nesterov=True), sync_every=100
        )
        state = diloco.init(params)
        updates, state = diloco.update(grads, state, params)  # as ever, under jax.jit
        params, state = diloco.synchronize(params, state)  # before an evaluation, at the end

    A transformation of optax, the last one of a chain, whose ``update`` needs ``params``. Its
    state is a pytree, which a checkpoint of this rank keeps beside its parameters. As optax *adds*
    updates to parameters, those of the ranks are the same to rounding after an exchange;
    ``state.common`` has the same bits on all, and so has what ``synchronize(params, state)``
    returns: it applies what waits, and synchronises all parameters now; all ranks call it.

    ``inner``, ``outer``: any of optax's. ``inner`` may be a DistributedOptimizer of a process set:
    synchronous within each host, say, and DiLoCo between them.
    ``sync_every``: steps of ``inner`` after which a parameter is synchronised again. The other
    steps have no communication, nor copies: it is in a part of the program that they pass over.
    ``fragments``: how many parts (every n-th leaf), or a pytree of ints, like the parameters or the
    upper part of it, with the number of each leaf's fragment, from 0.
    ``fragment_sync_delay``: a fragment's mean is applied so many steps after what is sent for it
    was computed. A program of JAX ends when all its operations have ended, so an exchange cannot go
    on while other steps are computed: what is to be sent is kept, and sent by the step that applies
    it. The numbers are those of PyTorch; to hide the time of an exchange there is no way here.
    ``local_share``: what remains then of the rank's own parameters, from 0 to 1; None: 0 without a
    delay, else a half.
    ``warm_up_steps``: so many steps are taken with averaged gradients first.
    ``compression``: of the outer gradients; see ``average_gradients``.
    ``process_set``: its members average among themselves; None: all ranks.
    ``name``: what names of operations begin with; see ``allreduce_pytree``.

    All ranks call ``init`` with the same parameters (``broadcast_pytree``), outside of ``jax.jit``:
    it compares them and the options. Where it is traced (``jax.eval_shape(diloco.init, params)``,
    as a template of a checkpoint) the first ``update`` compares shapes and options. Both raise
    MismatchError, on every rank, where they differ; InvalidArgumentError for parameters that are no
    floats, without ``params``, and in an elastic job that has no LocalTraining of it in its state.
    Raises InvalidArgumentError.
    """
    schedule = Schedule.checked(sync_every, warm_up_steps, fragment_sync_delay)
    if isinstance(fragments, int):
        schedule.check_turns(periodic.checked_steps("fragments", fragments, 1))
    parts = Parts("diloco", inner, schedule, compression, process_set, name)
    check_transformation("outer", outer)
    return transformation(_DiLoCo(parts, outer, fragments, schedule.share(local_share)))


class _Fragment(NamedTuple):
    """Some of the leaves of a tree like the parameters."""

    number: int
    places: list[int]
    structure: Any

    def of(self, leaves: Leaves) -> Leaves:
        """Return those of ``leaves``, all leaves of a tree, that are in it."""
        return [leaves[place] for place in self.places]

    def put(self, values: Leaves, leaves: Leaves) -> None:
        """Put ``values`` into ``leaves``: the reverse of ``of``."""
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value

    def tree(self, values: Leaves, hole: Any) -> Any:
        """Its ``values`` where they are in the parameters, and ``hole`` elsewhere."""
        leaves = [hole] * self.structure.num_leaves
        self.put(values, leaves)
        return jax.tree.unflatten(self.structure, leaves)


class _Now(NamedTuple):
    """A step as it is computed: leaves of trees like the parameters, to be replaced one by one."""

    updates: Leaves
    """The updates that are returned at its end."""
    params: Leaves
    """The parameters before the step."""
    common: Leaves
    sent: Leaves
    """The outer gradients that wait; empty without a delay."""
    outer: list[Any]


class _DiLoCo:
    state_type: type = DiLoCoState

    def __init__(self, parts: Parts, outer: Any, fragments: Any, share: float) -> None:
        self.parts = parts
        self._outer = outer
        self._given = fragments
        self._share = share
        self._hole = parts.optax.MaskedNode()  # which optax passes over

    def init(self, params: Any) -> DiLoCoState:
        fragments = self._begun(params, begins=True)
        leaves, is_late = jax.tree.leaves(params), self.parts.schedule.delay > 0
        return DiLoCoState(
            steps=jnp.zeros((), jnp.int32),
            common=jax.tree.map(jnp.array, params),  # a copy: both may be donated
            sent=jax.tree.map(jnp.zeros_like, params) if is_late else None,
            waits=jnp.zeros(len(fragments), jnp.int8) if is_late else None,
            equal_after=jnp.zeros(len(fragments), jnp.int32),
            exchanges=jnp.zeros((), jnp.int32),
            inner=self.parts.inner.init(params),
            outer=tuple(self._outer.init(f.tree(f.of(leaves), self._hole)) for f in fragments),
        )

    def update(
        self, updates: Any, state: DiLoCoState, params: Any = None, **extra: Any
    ) -> tuple[Any, DiLoCoState]:
        fragments = self._begun(params)
        steps, schedule = state.steps + 1, self.parts.schedule
        is_due = [schedule.applies(steps, f.number, len(fragments)) for f in fragments]
        if state.waits is not None:
            is_due = [due & (it != _NOTHING) for due, it in zip(is_due, state.waits, strict=True)]
        updates, inner = self.parts.step(updates, state.steps, state.inner, params, extra)
        common = state.common
        if schedule.warm_up_steps:
            own = partial(self.parts.optax.apply_updates, params, updates)
            common = when(schedule.begins(steps), lambda _: own(), common)
        flat = [jax.tree.leaves(tree) for tree in (updates, params, common)]
        now = _Now(flat[0], flat[1], flat[2], jax.tree.leaves(state.sent), list(state.outer))
        for f, due in zip(fragments, is_due, strict=True):
            self._apply(f, due, state.waits, now)
        whole = partial(jax.tree.unflatten, fragments[0].structure)
        return whole(now.updates), self._kept(fragments, is_due, steps, state, now)._replace(
            steps=steps,
            common=whole(now.common),
            equal_after=self._equal_after(state, is_due, steps),
            exchanges=state.exchanges + self._exchanges(state, is_due),
            inner=inner,
            outer=tuple(now.outer),
        )

    def _exchanges(self, state: DiLoCoState, is_due: list[Any]) -> jax.Array:
        """Return whether ranks exchange something in the step after ``state``."""
        due = jnp.stack([jnp.asarray(each) for each in is_due])
        due = due if state.waits is None else due & (state.waits == _OWN)
        return jnp.any(due) | self.parts.schedule.warms_up(state.steps)

    def _equal_after(self, state: DiLoCoState, is_due: list[Any], steps: Any) -> jax.Array:
        if self._share:
            return state.equal_after
        return jnp.where(jnp.stack([jnp.asarray(due) for due in is_due]), steps, state.equal_after)

    def synchronize(self, params: Any, state: DiLoCoState) -> tuple[Any, DiLoCoState]:
        fragments = self._begun(params)
        own, common = jax.tree.leaves(params), jax.tree.leaves(state.common)
        outer = list(state.outer)
        has_changed = state.equal_after != state.steps
        exchanged = has_changed
        if state.waits is not None:
            has_changed &= state.waits == _NOTHING
            exchanged = has_changed | (state.waits == _OWN)
        for f in fragments:
            if state.waits is not None:
                self._settle(f, state.waits[f.number], state.sent, own, common, outer)

            def exchange(old: tuple[Leaves, Any], f: _Fragment = f) -> tuple[Leaves, Any]:
                mean = self._mean(f, _less(old[0], f.of(own)))
                return self._step(f, mean, *old)

            old = f.of(common), outer[f.number]
            together, outer[f.number] = when(has_changed[f.number], exchange, old)
            f.put(together, common)
        structure = fragments[0].structure
        together = jax.tree.unflatten(structure, common)
        state = state._replace(
            common=jax.tree.map(jnp.array, together),
            waits=None if state.waits is None else jnp.zeros_like(state.waits),
            exchanges=state.exchanges + jnp.any(exchanged),
            equal_after=jnp.full_like(state.equal_after, state.steps),
            outer=tuple(outer),
        )
        return together, state

    def drain_exchanges(self, state: DiLoCoState) -> Iterator[DiLoCoState]:
        if state.waits is None:
            return
        for f in self._fragments(state.common):
            if state.waits[f.number] == _OWN:
                leaves = jax.tree.leaves(state.sent)
                f.put(self._mean(f, f.of(leaves)), leaves)
                state = state._replace(
                    sent=jax.tree.unflatten(f.structure, leaves),
                    waits=state.waits.at[f.number].set(_MEAN),
                    exchanges=state.exchanges + 1,
                )
                yield state

    def options(self, state: DiLoCoState) -> periodic.Details:
        cut = [f.places for f in self._fragments(state.common)]
        return [*self.parts.schedule.details(), ("fragments", cut)]

    def _begun(self, params: Any, *, begins: bool = False) -> list[_Fragment]:
        """Check and compare parameters; return their fragments."""
        self.parts.check(params)
        fragments = self._fragments(params)
        cut = [f.places for f in fragments]
        self.parts.agree(params, [("fragments", cut)], begins=begins)
        return fragments

    def _fragments(self, params: Any) -> list[_Fragment]:
        """Return the fragments of a tree like the parameters."""
        leaves, structure = jax.tree.flatten(params)
        schedule = self.parts.schedule
        if isinstance(self._given, int):
            cut = schedule.cut(self._given, len(leaves))
        else:
            cut = _cut(self._given, params)
            schedule.check_turns(len(cut))
        return [_Fragment(number, places, structure) for number, places in enumerate(cut)]

    def _mean(self, f: _Fragment, gradients: Leaves) -> Leaves:
        tree = f.tree(gradients, self._hole)
        means: Leaves = jax.tree.leaves(self.parts.mean(f"fragment.{f.number}", tree))
        return means

    def _kept(
        self,
        fragments: list[_Fragment],
        is_due: list[Any],
        steps: Any,
        state: DiLoCoState,
        now: _Now,
    ) -> DiLoCoState:
        """``state`` with the outer gradients that this step computes, if there is a delay."""
        if state.waits is None:
            return state
        waits = []
        for f, due, before in zip(fragments, is_due, state.waits, strict=True):
            sends = self.parts.schedule.sends(steps, f.number, len(fragments))
            f.put(when(sends, partial(self._gradients, f, now), f.of(now.sent)), now.sent)
            after = jnp.where(due, jnp.zeros_like(before), before)
            waits.append(jnp.where(sends, jnp.full_like(before, _OWN), after))
        whole = jax.tree.unflatten(fragments[0].structure, now.sent)
        return state._replace(sent=whole, waits=jnp.stack(waits))

    def _gradients(self, f: _Fragment, now: _Now, before: Leaves) -> Leaves:
        """The outer gradients of a fragment that nothing is applied to in this step."""
        own = self.parts.optax.apply_updates(f.of(now.params), f.of(now.updates))
        return _less(f.of(now.common), own)

    def _apply(self, f: _Fragment, due: Any, waits: Any, now: _Now) -> None:
        """Step the outer optimizer on a fragment, if it is ``due``."""
        params = f.of(now.params)
        waiting = f.of(now.sent) if now.sent else None

        def apply(old: tuple[Leaves, Leaves, Any]) -> tuple[Leaves, Leaves, Any]:
            updates, common, outer = old
            own = self.parts.optax.apply_updates(params, updates)
            if waiting is None:
                mean = self._mean(f, _less(common, own))
            else:
                mean = when(waits[f.number] == _OWN, partial(self._mean, f), waiting)
            together, outer = self._step(f, mean, common, outer)
            pairs = zip(together, own, strict=True)
            mixed = [t + self._share * (o - t) for t, o in pairs] if self._share else together
            changed = [change_to(*each) for each in zip(mixed, params, updates, strict=True)]
            return changed, together, outer

        old = f.of(now.updates), f.of(now.common), now.outer[f.number]
        updates, common, now.outer[f.number] = when(due, apply, old)
        f.put(updates, now.updates)
        f.put(common, now.common)

    def _settle(
        self, f: _Fragment, waits: Any, sent: Any, own: Leaves, common: Leaves, outer: Any
    ) -> None:
        """Apply a fragment if it ``waits``, and leave nothing of the rank's own parameters."""
        waiting = f.of(jax.tree.leaves(sent))

        def apply(old: tuple[Leaves, Leaves, Any]) -> tuple[Leaves, Leaves, Any]:
            mean = when(waits == _OWN, partial(self._mean, f), waiting)
            together, after = self._step(f, mean, *old[1:])
            return together, together, after

        old = f.of(own), f.of(common), outer[f.number]
        mine, together, outer[f.number] = when(waits != _NOTHING, apply, old)
        f.put(mine, own)
        f.put(together, common)

    def _step(self, f: _Fragment, mean: Leaves, common: Leaves, outer: Any) -> tuple[Leaves, Any]:
        """Return the parameters in common after a step of the outer optimizer, and its state."""
        before = f.tree(common, self._hole)
        updates, outer = self._outer.update(f.tree(mean, self._hole), outer, before)
        after: Leaves = jax.tree.leaves(self.parts.optax.apply_updates(before, updates))
        return after, outer


def _less(common: Leaves, own: Leaves) -> Leaves:
    """Outer gradients: ``common`` less ``own``."""
    return [c - o for c, o in zip(common, own, strict=True)]


def _cut(numbers: Any, params: Any) -> list[list[int]]:
    """The places of each fragment's leaves, from a tree of fragments' numbers."""
    try:
        spread = jax.tree.map(lambda n, part: jax.tree.map(lambda _: n, part), numbers, params)
    except (ValueError, TypeError, KeyError) as error:
        raise FrontEndArgumentError(
            f"fragments is {numbers!r}: give a number of fragments, or a pytree of ints like the "
            f"parameters or the upper part of it ({error})"
        ) from None
    found = jax.tree.leaves(spread)
    if not all(type(n) is int for n in found) or set(found) != set(range(len(set(found)))):
        raise FrontEndArgumentError(
            f"fragments is {numbers!r}: give each leaf the number of its fragment, from 0 and "
            "without gaps"
        )
    return [[p for p, n in enumerate(found) if n == number] for number in range(len(set(found)))]
