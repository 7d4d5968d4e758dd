"""A rank's own parameters and optimizer state, in the state of an elastic job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from kolovod.elastic.independent_training import IndependentTraining
from kolovod.errors import FrontEndArgumentError
from kolovod.jax.pytrees import described

if TYPE_CHECKING:
    from kolovod.jax.periodic import PeriodicTransformation, Way


class LocalTraining(IndependentTraining):
    """The parameters and the optimizer state of a rank, which between exchanges differ.

    For ``local_sgd`` and ``diloco`` in elastic jobs, where a plain pytree in the state would be
    given to all ranks; it works in other jobs, too:

        training = kv.LocalTraining(diloco, params, diloco.init(params))
        state = elastic.State(training=training, step=0)

        @elastic.run
        def train(state):
            while state.step < 1000:
                loss = state.training.step(train_step, batch(state.step))
                state.step += 1
                state.commit()
            state.training.synchronize()

    where ``train_step(params, opt_state, batch)`` is jitted and returns what these are afterwards,
    and the loss. The ranks of the job begin with rank 0's, and who joins becomes a copy of it; who
    has taken a step keeps its own.
    """

    def __init__(self, optimizer: PeriodicTransformation, params: Any, opt_state: Any) -> None:
        """``optimizer``: what ``local_sgd`` or ``diloco`` has returned.

        ``params``: as its ``init`` was given, a pytree of arrays. ``opt_state``: what ``init`` has
        returned, or a state which has that in it (of ``optax.chain``), or a checkpoint of it.
        Raises InvalidArgumentError for others.
        """
        way: Way | None = getattr(optimizer, "way", None)
        if way is None:
            raise FrontEndArgumentError(
                f"optimizer is a {type(optimizer).__name__}: give what kv.local_sgd or kv.diloco "
                "has returned, not what it is a part of"
            )
        self._way = way
        self._params, self._opt_state = params, opt_state
        own = self._own()
        described_now = described({"params": params, "opt_state": opt_state})
        self._details = [*way.options(own), *described_now]
        self._committed = int(own.exchanges)

    @property
    def params(self) -> Any:
        """The parameters of this rank, after its last step."""
        return self._params

    @property
    def opt_state(self) -> Any:
        """The optimizer's state of this rank, after its last step."""
        return self._opt_state

    def step(self, function: Callable[..., Any], *args: Any) -> Any:
        """Take a step: ``function(params, opt_state, *args)``, jitted as a rule.

        It returns the parameters and the state after it, which may be in the memory of those that
        it was given (``donate_argnums``), and then anything else: that is returned here, one value
        as it is, several as a tuple, nothing as None. Where ranks have been lost, or have joined,
        this rank comes into their world first. Raises what ``function`` does, JobOverError, and
        InvalidArgumentError where it returns less, or the job's state has not this training.
        """
        self._way.parts.exchange.before_step()
        result = function(self._params, self._opt_state, *args)
        if not isinstance(result, tuple) or len(result) < 2:
            raise FrontEndArgumentError(
                f"{getattr(function, '__name__', 'the function')} has returned a "
                f"{type(result).__name__}: let it return (params, opt_state, ...)"
            )
        self._params, self._opt_state, *further = result
        if len(further) > 1:
            return tuple(further)
        return further[0] if further else None

    def synchronize(self) -> Any:
        """Exchange what was changed since it was exchanged; all ranks call it. Returns ``params``.

        They are the same on all ranks then: before an evaluation, and at the end. In an elastic job
        each fragment of DiLoCo is a step. Raises what ``step`` raises.
        """
        self._params, own = self._way.synchronize(self._params, self._own())
        self._put(own)
        return self._params

    def whole(self) -> Any:
        """Return what a rank that joins needs: parameters and state, a pytree."""
        return self._params, self._opt_state

    def take_whole(self, whole: Any) -> None:
        """Be a copy of the rank whose ``whole`` it is, unless this rank has begun to train."""
        if not self._way.parts.exchange.has_begun:
            self._params, self._opt_state = whole
            self.committed()

    # --- IndependentTraining ---

    @property
    def has_exchanged(self) -> bool:
        """True if ranks have exchanged something since the last commit; waits for the last step."""
        return int(self._own().exchanges) != self._committed

    def committed(self) -> None:
        """Note that a commit has been made, as IndependentTraining says."""
        self._committed = int(self._own().exchanges)

    def enter_world(self) -> None:
        """Enter a world of an elastic job together with all ranks, as IndependentTraining says.

        It may be called on a thread of a program that has the arrays. Raises InvalidArgumentError
        if ``inner`` is a DistributedOptimizer.
        """
        parts = self._way.parts
        if parts.inner_is_distributed:
            raise FrontEndArgumentError(
                "inner is a DistributedOptimizer: in an elastic job each of its steps is one of "
                "all ranks, which ranks that train apart are to leave out; give an optimizer of "
                "optax as it is"
            )
        parts.exchange.enter_world(lambda: self._details)

    def drain_exchanges(self) -> Iterator[None]:
        """Let what is on its way arrive, exchange by exchange, as IndependentTraining says."""
        for own in self._way.drain_exchanges(self._own()):
            self._put(own)
            yield

    def _own(self) -> Any:
        """Return the part of the optimizer's state that is DiLoCo's or local SGD's."""
        found = [leaf for leaf in self._leaves()[0] if self._is_own(leaf)]
        if len(found) != 1:
            raise FrontEndArgumentError(
                f"opt_state has {len(found)} times a {self._way.state_type.__name__} in it: give "
                "what optimizer.init(params), or init of the chain that it is in, has returned"
            )
        return found[0]

    def _put(self, own: Any) -> None:
        leaves, structure = self._leaves()
        after = [own if self._is_own(leaf) else leaf for leaf in leaves]
        self._opt_state = jax.tree.unflatten(structure, after)

    def _leaves(self) -> tuple[list[Any], Any]:
        return jax.tree.flatten(self._opt_state, is_leaf=self._is_own)  # type: ignore[no-any-return]

    def _is_own(self, value: Any) -> bool:
        return isinstance(value, self._way.state_type)
