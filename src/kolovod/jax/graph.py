"""The verbs as a custom call of an XLA program (csrc/bind/xla_ffi.cc).

The handler submits and returns a future: all operations of a program whose inputs are ready are on
their way together, and the engine fuses them. XLA starts them in an order of its own, which differs
from rank to rank; so each has a name that is its own in the program, and the same on all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jaxlib
import numpy as np
from jax.interpreters import mlir

from kolovod import _native
from kolovod.core import deadlocks
from kolovod.core.codecs import in_digits
from kolovod.core.ops import Sum
from kolovod.core.process_sets import number_of
from kolovod.core.verbs import ALLREDUCE, BARRIER, BROADCAST
from kolovod.errors import FrontEndArgumentError
from kolovod.jax.primitive import ALIKE, TOGETHER, Call, primitive
from kolovod.private_apis.jax import (
    FUNCTIONS,
    has_caches,
    replace_caches,
    version_of_ffi,
    written_for_each_use,
)

_TARGET = "kolovod"


def register() -> None:
    """Make the custom call known to XLA. Raises ImportError when it cannot be."""
    major, minor = version_of_ffi()
    handler = _native.xla_collective_handler(major, minor)
    if not handler:
        raise ImportError(
            f"kolovod.jax with jax {jax.__version__}: its foreign function interface has version "
            f"{major}.{minor}, which this version of Kolovod does not know; look for a newer one"
        )
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(handler), platform="cpu")
    deadlocks.waits_within(f"{Path(jaxlib.__file__).resolve().parent}/")
    # Lowered once for each use, though JAX would do with once for equal ones: names differ.
    mlir.register_lowering(primitive, _lowering, platform="cpu", **written_for_each_use())
    mlir.register_lowering(primitive, _refusal)


def _lowering(context: Any, *operands: Any, call: Call) -> Sequence[Any]:
    """Write the custom call into the program."""
    devices = getattr(context.module_context.axis_context, "num_devices", 1)
    if devices != 1:
        raise FrontEndArgumentError(
            f"{_said(call)} is part of a program for {devices} devices, but a rank computes on one "
            "device: start as many processes, or call it outside of pmap, shard_map and jit of "
            "arrays that are spread over devices"
        )
    if call.verb is TOGETHER:
        aliases = {i: i for i in range(len(operands))}
        together = jax.ffi.ffi_lowering(_TARGET, operand_output_aliases=aliases)
        return together(context, *operands, together=np.int64(1))  # type: ignore[no-any-return]
    if call.verb is ALIKE:
        compared = jax.ffi.ffi_lowering(_TARGET, has_side_effect=True)
        return compared(  # type: ignore[no-any-return]
            context,
            *operands,
            compared=np.int64(1),
            about=call.about,
            name=_name(context, call),
            verb=np.int64(ALLREDUCE.number),
            op=np.int64(Sum),
            process_set=np.int64(number_of(call.request.process_set)),
        )
    rank, size = (call.world.rank, call.world.size) if call.is_placed else (-1, -1)
    attributes = {
        "name": _name(context, call),
        "called_from": call.line,
        "codecs": in_digits(call.request.codecs, len(operands)),
        "verb": np.int64(call.verb.number),
        "op": np.int64(call.request.op),
        "root": np.int64(call.request.root),
        "prescale": np.float64(call.request.prescale),
        "postscale": np.float64(call.request.postscale),
        "process_set": np.int64(number_of(call.request.process_set)),
        "zeroed": np.int64(call.zeroed),
        "rank": np.int64(rank),
        "size": np.int64(size),
    }
    options: dict[str, Any] = {"has_side_effect": True}  # XLA must not leave it out on some ranks
    options["operand_output_aliases"] = {i: i for i in _in_place(call, operands)}
    rule = jax.ffi.ffi_lowering(_TARGET, **options)
    return rule(context, *operands, **attributes)  # type: ignore[no-any-return]


def _in_place(call: Call, operands: Sequence[Any]) -> list[int]:
    """The operands whose memory is that of the result, too.

    A barrier passes them on. A gradient in memory of its own would have its place taken by one that
    is computed later, which would then wait until this one has been sent. What comes from outside
    of the function would have to be copied.
    """
    if call.verb is BARRIER:
        return list(range(len(operands)))
    if call.verb not in (ALLREDUCE, BROADCAST):
        return []
    return [i for i, each in enumerate(operands) if not isinstance(each.owner, mlir.ir.Block)]


def _refusal(context: Any, *operands: Any, call: Call) -> Sequence[Any]:
    platforms = ", ".join(context.module_context.platforms)
    raise FrontEndArgumentError(
        f"{_said(call)} is part of a program for {platforms}, but this engine works in host "
        "memory: compute on the CPU, under jax.default_device(jax.devices('cpu')[0])"
    )


def _said(call: Call) -> str:
    return call.verb.name if call.name is None else f"{call.verb} '{call.full_name}'"


def _name(context: Any, call: Call) -> str:
    """Return a name that no other operation of this program has.

    Numbers are given in the order of the program's text, which is the same on ranks that compute
    the same; however often each of them has traced it.
    """
    module = context.module_context
    taken = _taken(module) if has_caches(module) else _taken_in_main(module, call)
    name = call.full_name
    if name is None:
        program = module.module.operation.attributes["sym_name"].value
        name = ".".join((program, call.verb.name, *call.steps))
    is_first = True
    if call.branches > 1:  # they are written one after the other
        uses = f"{name} in branches {call.number}"
        is_first = taken[uses] % call.branches == 0
        taken[uses] += 1
    taken[name] += is_first
    count = taken[name]
    return name if count == 1 and call.name is not None else f"{name}#{count}"


def _taken(module: Any) -> Counter[str]:
    """Return how often each name occurs in the module; replace its caches by ``_Unshared``."""
    known = getattr(module, FUNCTIONS)
    if isinstance(known, _Unshared):
        return known.taken
    # There, because it lives as long as the module, and copies of the module's context share it.
    taken: Counter[str] = known.setdefault(_taken, Counter())
    replace_caches(module, lambda cache: _Unshared(cache, taken))
    return taken


_in_main: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


def _taken_in_main(module: Any, call: Call) -> Counter[str]:
    """``_taken`` for a JAX whose caches cannot be found: where none can share, or an error."""
    block = mlir.ir.InsertionPoint.current.block
    operation = block.owner.operation
    while operation is not None and operation.name != "func.func":
        operation = operation.parent
    if operation is None or mlir.ir.StringAttr(operation.attributes["sym_name"]).value != "main":
        raise FrontEndArgumentError(
            f"{_said(call)} is in a function that jax {jax.__version__} may write once and run "
            "several times, in an order that differs between ranks, and this version of Kolovod "
            "cannot tell those calls apart there: call it in the outermost jax.jit itself, not in "
            "a jax.jit, loop, cond, checkpoint or custom_jvp inside of it; or use a JAX that "
            "docs/jax.md names"
        )
    return _in_main.setdefault(module.module, Counter())


class _Unshared(dict[Any, Any]):
    """A cache of JAX's, without what has operations of ours in it: that is written for each use.

    A function under ``jax.jit``, or a body given to ``scan``, is otherwise in the module once and
    in the program as often as it is called; with the same names each time. XLA may come to one
    call first on this rank, and to the other on that one: they would be reduced with each other.
    """

    def __init__(self, known: dict[Any, Any], taken: Counter[str]) -> None:
        """``known``: from before our first operation; what is being written has no entry yet."""
        super().__init__(known)
        self.taken = taken
        self._missed: dict[Any, int] = {}  # how many operations there were when JAX began to write

    def __missing__(self, key: Any) -> Any:
        self._missed[key] = self.taken.total()
        raise KeyError(key)

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._missed.pop(key, None) == self.taken.total():
            super().__setitem__(key, value)
