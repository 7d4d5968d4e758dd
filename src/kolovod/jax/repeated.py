"""Reductions inside of programs of an elastic job: repeated if a rank is lost.

There an allreduce or a broadcast is a call of Python, and a step of its own: the program goes on
when every rank has the result (kolovod/elastic/steps.py). So it never fails while the job goes on,
and nothing is lost that it was given to keep (``donate_argnums``). The calls are ordered, within a
program and from one to the next, since all ranks must come to their steps in one order.

What Python is given are arrays of NumPy, and nothing of JAX is used: that may need the thread which
waits here. Under ``jax.grad`` and ``jax.vmap`` a verb stays what it is elsewhere: a rank that is
lost is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from kolovod.core.collectives import Collectives
from kolovod.core.numpy_frontend import NumpyFrontend
from kolovod.core.transaction import settle_by, transaction
from kolovod.core.verbs import ALLREDUCE, BROADCAST
from kolovod.elastic import ProcessSet
from kolovod.errors import FrontEndArgumentError
from kolovod.jax import retracing
from kolovod.jax.primitive import Call, batched, differentiated
from kolovod.private_apis.jax import ordered_effect

T = TypeVar("T")

_counts: ContextVar[bool] = ContextVar("kolovod.counts", default=False)


def run_in_transaction(run: Callable[[], T], arrays: Any, *, counts: bool) -> T:
    """``run()``, which reduces ``arrays`` by one operation, as a step if the job is elastic.

    Where they are traced it is the operation that becomes a step. ``counts``: see
    ``elastic.exactly``.
    """
    if not transaction().is_elastic:
        return run()
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arrays)):
        return transaction().run(run, counts=counts)
    token = _counts.set(counts)
    try:
        return run()
    finally:
        _counts.reset(token)


def is_for(call: Call, arrays: Sequence[Any]) -> bool:
    """Return whether ``call`` on ``arrays`` is part of a program, and can be repeated.

    The shape of what other verbs return depends on the number of ranks, which a program cannot
    change; and process sets end with their world, but for those in the job's state.
    """
    process_set = call.request.process_set
    return (
        transaction().is_elastic
        and call.verb in (ALLREDUCE, BROADCAST)
        and (process_set is None or isinstance(process_set, ProcessSet))
        and any(isinstance(array, jax.core.Tracer) for array in arrays)
    )


def take_empty_step(arrays: Any) -> None:
    """Take the step of a rank that has no part in a reduction, if the job is elastic.

    Where ``arrays`` are traced it is a part of the program.
    """
    if not transaction().is_elastic:
        return
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arrays)):
        _step.bind(call=None, counts=True)
    else:
        transaction().run(lambda: None, counts=True)


def bind(call: Call, arrays: Sequence[Any]) -> list[Any]:
    """Make ``call`` part of the program that is being traced."""
    return _step.bind(*arrays, call=call, counts=_counts.get())  # type: ignore[no-any-return]


def _attempt(arrays: Sequence[np.ndarray[Any, Any]], call: Call | None) -> Callable[[], list[Any]]:
    if call is None:
        return lambda: []
    verbs = Collectives(NumpyFrontend(), call.verbs.world)
    return partial(verbs.new_group, call.request._replace(name=call.full_name), arrays)


def _run(arrays: Sequence[np.ndarray[Any, Any]], call: Call | None, counts: bool) -> list[Any]:
    """Run ``call`` on a thread of XLA's: the memory of ``arrays`` is the program's."""
    attempt = _attempt(arrays, call)
    with retracing.running():
        return transaction().run_in_program(attempt, counts=counts)


_step = Primitive("kolovod_step")
_step.multiple_results = True


def register() -> None:
    """Make the primitive known to JAX, once."""
    effect = ordered_effect()

    def abstract(*arrays: Any, call: Call | None, counts: bool) -> tuple[list[Any], set[Any]]:
        if call is not None:
            call.check()
            _ = call.world  # raises now, not when the program runs
        return [array.update(weak_type=False) for array in arrays], {effect}

    def lowering(context: Any, *operands: Any, call: Call | None, counts: bool) -> Sequence[Any]:
        devices = getattr(context.module_context.axis_context, "num_devices", 1)
        if devices != 1:
            what = "a step" if call is None else call.verb.name
            raise FrontEndArgumentError(
                f"{what} is part of a program for {devices} devices, but a rank computes "
                "on one device: start as many processes"
            )

        def callback(*arrays: np.ndarray[Any, Any]) -> tuple[Any, ...]:
            return tuple(_run(arrays, call, counts))

        results, token, _ = mlir.emit_python_callback(
            context,
            callback,
            context.tokens_in.get(effect),
            list(operands),
            context.avals_in,
            context.avals_out,
            has_side_effect=True,
        )
        context.set_tokens_out(mlir.TokenSet({effect: token}))
        return results  # type: ignore[no-any-return]

    _step.def_effectful_abstract_eval(abstract)
    mlir.register_lowering(_step, lowering, platform="cpu")
    settle_by(_settle)


def _eager(*arrays: jax.Array, call: Call | None, counts: bool) -> list[Any]:
    """Run ``call`` where a script uses ``jax.disable_jit``."""
    return [] if call is None else call.bind(arrays)


_step.def_impl(_eager)
ad.primitive_jvps[_step] = lambda arrays, tangents, *, call, counts: differentiated(
    arrays, tangents, call=call
)
batching.primitive_batchers[_step] = lambda arrays, dims, *, call, counts: batched(
    arrays, dims, call=call
)


def _settle() -> None:
    """Wait for the steps of programs that are on their way; a program's own step waits for none."""
    if not retracing.is_running():
        jax.effects_barrier()
        retracing.forget_late()
