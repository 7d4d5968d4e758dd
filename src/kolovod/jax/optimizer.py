"""Gradients of all ranks in optax's optimizers. optax is imported when one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from kolovod.core.ops import Average, Sum
from kolovod.core.process_sets import ProcessSet
from kolovod.gradients.compression import AnyCompressor, Compression
from kolovod.gradients.spec import ReduceSpec, checked_passes
from kolovod.jax.alike import compared
from kolovod.jax.pytrees import Pytrees
from kolovod.jax.sharded import Sharded
from kolovod.jax.verbs import collectives
from kolovod.jax.with_optax import check_transformation, optax_for, transformation

if TYPE_CHECKING:
    import optax

_pytrees = Pytrees(collectives)


def average_gradients(
    compression: AnyCompressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet | None = None,
    *,
    gradient_predivide_factor: float = 1.0,
    name: str = "gradients",
) -> optax.GradientTransformation:
    """A transformation of optax that puts all ranks' average in the place of each gradient.

    First in the chain: ``optax.chain(kv.average_gradients(), optax.adam(1e-3))``. What comes before
    it in a chain (clipping, say) works on this rank's own gradients, what comes after on the
    average. Within ``optax.MultiSteps`` it is right, too, but that runs what it holds on every
    call and drops all results but every k-th; ``DistributedOptimizer`` sends only then.

    ``compression``: ``Compression.none``, ``.fp16``, ``.bf16``, between hosts ``.int8``, ``.int4``
    (see ``Compression``); outside of ``jax.jit`` also a
    ``Compressor`` that keeps a state.
    ``op``: Average or Sum.
    ``process_set``: its members average among themselves, other ranks keep their own gradients.
    ``gradient_predivide_factor``: with Average, divide gradients by it before they are added up,
    and the sum by what is left of the number of ranks: to keep float16 within its range.
    ``name``: see ``allreduce_pytree``; for transformations that run in threads at the same time.

    ``update`` works inside and outside of ``jax.jit`` and raises what ``allreduce_pytree`` raises.
    Raises InvalidArgumentError for arguments that cannot work.
    """
    optax = optax_for("average_gradients is")
    predivide = gradient_predivide_factor
    spec = ReduceSpec.checked(compression, op, predivide, process_set, (Average, Sum))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        reduced = _pytrees.reduced_in_step(updates, name, spec)
        return compared(collectives, spec, name, params, None, updates, reduced), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


if TYPE_CHECKING:

    class DistributedTransformation(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
        """A transformation of optax whose state can be made whole, and cut into ranks' parts."""

        def gather_state(self, state: Any, params: Any) -> Any:
            """The state as it is without shards, the same on all ranks."""
            ...

        def cut_state(self, whole: Any, params: Any) -> Any:
            """Return this rank's state, cut from a whole one: the reverse of ``gather_state``."""
            ...


def DistributedOptimizer(
    optimizer: optax.GradientTransformation,
    compression: AnyCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    process_set: ProcessSet | None = None,
    *,
    shard_state: bool = False,
    gradient_predivide_factor: float = 1.0,
    name: str = "gradients",
) -> DistributedTransformation:
    """``optimizer`` after ``average_gradients``: a transformation of optax like any other.

    ``optimizer``: any of optax's, and what its ``update`` takes besides (a loss, say) is passed on.
    ``backward_passes_per_step``: gradients of so many calls are summed here before they are sent;
    the calls before the last return updates of zeros.
    ``shard_state``: each rank keeps the optimizer's state for its share of the parameters only
    (ZeRO's first stage: Rajbhandari et al., 2020). Gradients are scattered, ``optimizer`` gets this
    rank's part of each parameter, gradient and state, in trees of the same structure, and updates
    are gathered: all ranks return the same. A part of an array of n elements is of shape
    ``(1, ..., 1, ceil(n / ranks))``, with as many dimensions. Then

    - ``optimizer`` must step with each element by itself, as adamw and sgd do, or with each array,
      as muon and adafactor do: such an array is one rank's as a whole. ``init`` finds out which
      are, and raises InvalidArgumentError where arrays are needed together.
      ``clip_by_global_norm`` of this module clips by the norm of all.
    - the state is this rank's own, and ``init`` is called on all ranks after ``kv.init()``: outside
      of ``jax.jit`` it compares shapes with the other ranks.
    - ``gather_state(state, params)``, on all ranks, returns the state as it is without shards, and
      ``cut_state(whole, params)`` makes a rank's own of it: a checkpoint serves any number of
      ranks. Without ``shard_state`` both return what they are given.

    The other arguments, and what is raised: see ``average_gradients``. With ``shard_state``
    InvalidArgumentError for compression, in an elastic job, for parameters that are no floats, for
    the state of another rank or world; MismatchError where ranks have other shapes.
    """
    optax = optax_for("DistributedOptimizer makes")
    check_transformation("optimizer", optimizer)
    passes = checked_passes(backward_passes_per_step)
    predivide = gradient_predivide_factor
    spec = ReduceSpec.checked(compression, op, predivide, process_set, (Average, Sum))
    way: Any
    if shard_state:
        way = Sharded(optimizer, spec, name, collectives)
        whole = {"gather_state": way.gather_state, "cut_state": way.cut_state}
    else:
        average = optax.stateless(lambda grads, _: _pytrees.reduced_in_step(grads, name, spec))
        way = optax.with_extra_args_support(optax.chain(average, optimizer))
        whole = {"gather_state": _as_it_is, "cut_state": _as_it_is}

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        stepped, after = way.update(updates, state, params, **extra)
        alike = None if shard_state else state
        return compared(collectives, spec, name, params, alike, updates, stepped), after

    made = transformation(way.init, update, **whole)
    return made if passes == 1 else _every(passes, made)


def _as_it_is(state: Any, params: Any) -> Any:
    """Return ``state``, which is whole on each rank."""
    return state


class AccumulatedState(NamedTuple):
    """The state of ``DistributedOptimizer(backward_passes_per_step=...)``."""

    passes: jax.Array
    """The number of calls since the last step; int32, ()."""
    total: Any
    """The sum of their gradients, like the parameters."""
    inner: Any
    """The state of the optimizer."""


def _every(passes: int, inner: DistributedTransformation) -> DistributedTransformation:
    def init(params: Any) -> AccumulatedState:
        total = jax.tree.map(jnp.zeros_like, params)
        return AccumulatedState(jnp.zeros((), jnp.int32), total, inner.init(params))

    def update(
        updates: Any, state: AccumulatedState, params: Any = None, **extra: Any
    ) -> tuple[Any, AccumulatedState]:
        total = jax.tree.map(jnp.add, state.total, updates)

        def step() -> tuple[Any, AccumulatedState]:
            stepped, after = inner.update(total, state.inner, params, **extra)
            nothing = jax.tree.map(jnp.zeros_like, total)
            return stepped, AccumulatedState(jnp.zeros_like(state.passes), nothing, after)

        def wait() -> tuple[Any, AccumulatedState]:
            nothing = jax.tree.map(jnp.zeros_like, total)
            return nothing, AccumulatedState(state.passes + 1, total, state.inner)

        # The number is the same on all ranks, so all of them send or none.
        if not isinstance(state.passes, jax.core.Tracer):
            return step() if state.passes == passes - 1 else wait()
        return jax.lax.cond(state.passes == passes - 1, step, wait)  # type: ignore[no-any-return]

    def gather_state(state: AccumulatedState, params: Any) -> AccumulatedState:
        return state._replace(inner=inner.gather_state(state.inner, params))

    def cut_state(whole: AccumulatedState, params: Any) -> AccumulatedState:
        return whole._replace(inner=inner.cut_state(whole.inner, params))

    return transformation(  # type: ignore[no-any-return]
        init, update, gather_state=gather_state, cut_state=cut_state
    )
