"""``local_sgd``, a transformation of optax, and what it has in common with ``diloco``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from kolovod.core.process_sets import ProcessSet
from kolovod.elastic import job_membership
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients import periodic
from kolovod.gradients.compression import AnyCompressor, Compression
from kolovod.gradients.periodic import Schedule
from kolovod.jax import with_optax
from kolovod.jax.pytrees import Pytrees, described
from kolovod.jax.verbs import collectives
from kolovod.jax.with_optax import check_transformation, optax_for

if TYPE_CHECKING:
    import optax

T = TypeVar("T")

_pytrees = Pytrees(collectives)


class LocalSGDState(NamedTuple):
    """The state of ``local_sgd``."""

    steps: jax.Array
    """The number of steps taken; int32, ()."""
    exchanges: jax.Array
    """The number of exchanges; int32, ()."""
    inner: Any
    """The state of the optimizer."""


def local_sgd(
    inner: optax.GradientTransformation,
    sync_every: int,
    *,
    warm_up_steps: int = 0,
    compression: AnyCompressor = Compression.none,
    process_set: ProcessSet | None = None,
    name: str = "local_sgd",
) -> PeriodicTransformation:
    """``inner``, with the parameters averaged over the ranks every ``sync_every`` steps.

    Between these steps ranks do not communicate; the state of ``inner`` stays each rank's own.
    See ``kolovod.torch.LocalSGD`` for the papers, and ``diloco`` for what is returned (which has
    ``synchronize``, too), what ``init`` and ``update`` raise, and the arguments.

    ``compression``: of the parameters, as they are sent.
    """
    schedule = Schedule.checked(sync_every, warm_up_steps)
    parts = Parts("local_sgd", inner, schedule, compression, process_set, name)
    return transformation(_LocalSGD(parts))


if TYPE_CHECKING:

    class PeriodicTransformation(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
        """A transformation of optax that can be asked to synchronise."""

        way: Way

        def synchronize(self, params: Any, state: Any) -> tuple[Any, Any]:
            """All ranks' parameters, the same on each, and the state after that."""
            ...


class Parts:
    """The common part of both ways: the optimizer within, the warm-up, means, the agreement."""

    def __init__(
        self,
        kind: str,
        inner: Any,
        schedule: Schedule,
        compression: AnyCompressor,
        process_set: ProcessSet | None,
        name: str,
    ) -> None:
        self.optax = optax_for(f"{kind} is")
        check_transformation("inner", inner)
        self.inner = self.optax.with_extra_args_support(inner)
        self.inner_is_distributed = hasattr(inner, "gather_state")
        """True if it is a DistributedOptimizer."""
        self.schedule = schedule
        self.name = name
        self.exchange = periodic.Exchange(
            kind, compression, process_set, collectives,
            in_state=f"kv.LocalTraining({kind}, params, opt_state)",
        )  # fmt: skip
        self._is_begun = False

    def check(self, params: Any) -> None:
        """Raise InvalidArgumentError for what cannot be trained so."""
        self.exchange.check_in_state()
        if params is None:
            raise FrontEndArgumentError(
                "params is None: call update(grads, state, params), since it is parameters that "
                "ranks average"
            )
        for key, leaf in _named(params):
            dtype = jnp.result_type(leaf)
            if not jnp.issubdtype(dtype, jnp.floating):
                raise FrontEndArgumentError(
                    f"params{key} is of {dtype.name}: only floats are averaged; leave it out, as "
                    "optax.masked and equinox.partition do"
                )

    def agree(self, params: Any, details: periodic.Details, *, begins: bool) -> None:
        """Make sure that ranks have the same: in ``init``, if with values, or in the first step.

        Not in later ones: a rank may be the only one that has to trace its program anew. In an
        elastic job a LocalTraining sees to it, whose values are rank 0's.
        """
        if job_membership.current() is not None:
            return
        if begins and any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params)):
            return

        def mine() -> periodic.Details:
            compared = _named(params) if begins else ()
            values = [(f"the values of {key}", _checksum(leaf)) for key, leaf in compared]
            return [*self.schedule.details(), *details, *described(params), *values]

        if (begins or not self._is_begun) and self.exchange.has_others:
            self.exchange.agree_once(mine)
        self._is_begun = True

    def mean(self, what: str, tree: Any, *, is_compressed: bool = True) -> Any:
        """Return the mean of the ranks' ``tree``, which goes by the name ``what``."""
        spec = self.exchange.spec if is_compressed else self.exchange.plain
        return _pytrees.reduced_in_step(tree, f"{self.name}.{what}", spec)

    def step(
        self, updates: Any, steps: Any, inner: Any, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, Any]:
        """The updates and the state of the inner optimizer, in the step after ``steps``."""
        if self.schedule.warm_up_steps:
            average = partial(self.mean, "gradients", is_compressed=False)
            updates = when(self.schedule.warms_up(steps), average, updates)
        result: tuple[Any, Any] = self.inner.update(updates, inner, params, **extra)
        return result


class _LocalSGD:
    state_type: type = LocalSGDState

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def init(self, params: Any) -> LocalSGDState:
        self._begun(params, begins=True)
        nothing = jnp.zeros((), jnp.int32)
        return LocalSGDState(nothing, jnp.array(nothing), self.parts.inner.init(params))

    def update(
        self, updates: Any, state: LocalSGDState, params: Any = None, **extra: Any
    ) -> tuple[Any, LocalSGDState]:
        self._begun(params)
        updates, inner = self.parts.step(updates, state.steps, state.inner, params, extra)
        steps, schedule = state.steps + 1, self.parts.schedule

        def average(updates: Any) -> Any:
            means = self._mean(self.parts.optax.apply_updates(params, updates))
            return jax.tree.map(change_to, means, params, updates)

        is_due = schedule.sends(steps) | schedule.begins(steps)
        exchanges = state.exchanges + (is_due | schedule.warms_up(state.steps))
        return when(is_due, average, updates), LocalSGDState(steps, exchanges, inner)

    def synchronize(self, params: Any, state: LocalSGDState) -> tuple[Any, LocalSGDState]:
        self._begun(params)
        return self._mean(params), state._replace(exchanges=state.exchanges + 1)

    def drain_exchanges(self, state: LocalSGDState) -> Iterator[LocalSGDState]:
        return iter(())

    def options(self, state: LocalSGDState) -> periodic.Details:
        return self.parts.schedule.details()

    def _begun(self, params: Any, *, begins: bool = False) -> None:
        self.parts.check(params)
        self.parts.agree(params, [], begins=begins)

    def _mean(self, params: Any) -> Any:
        return self.parts.mean("parameters", params)


class Way(Protocol):
    """A way of training of which ``transformation`` makes a transformation of optax."""

    parts: Parts
    state_type: type

    def init(self, params: Any) -> Any:
        """The state to begin with."""
        ...

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """The updates that optax is to add, and the state after them."""
        ...

    def synchronize(self, params: Any, state: Any) -> tuple[Any, Any]:
        """Return all ranks' parameters, the same on each, and the state after that."""
        ...

    def drain_exchanges(self, state: Any) -> Iterator[Any]:
        """The state after each exchange of what waits for one, to be applied when it is due."""
        ...

    def options(self, state: Any) -> periodic.Details:
        """Return the options that must be equal on all ranks."""
        ...


def transformation(way: Way) -> PeriodicTransformation:
    """``way`` as a transformation of optax."""
    return with_optax.transformation(  # type: ignore[no-any-return]
        way.init, way.update, synchronize=way.synchronize, way=way
    )


def when(condition: Any, do: Callable[[T], T], value: T) -> T:
    """``do(value)`` or ``value``, a pytree; a part of the program if that is being traced.

    Conditions follow from numbers of steps, which are the same on all ranks: so all of them
    communicate, or none. A loop of one round or none: in it XLA works in place, where it would copy
    what passes a ``cond`` in every step.
    """
    if not isinstance(condition, jax.core.Tracer):
        return do(value) if condition else value

    def once(carried: tuple[Any, T]) -> tuple[Any, T]:
        return jnp.zeros_like(carried[0]), do(carried[1])

    return cast(T, jax.lax.while_loop(lambda carried: carried[0], once, (condition, value))[1])


def change_to(wanted: Any, param: Any, update: Any) -> Any:
    """Return the change from ``param`` to what is ``wanted``, in the dtype of ``update``."""
    return (wanted - param).astype(update.dtype)


def _named(params: Any) -> list[tuple[str, Any]]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(params)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in pairs]


def _checksum(leaf: Any) -> int:
    return periodic.checksum(np.asarray(leaf))
