"""Whole pytrees: gradients to be averaged, parameters and optimizer state to start equal from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from kolovod.core.collectives import Collectives
from kolovod.core.numpy_frontend import NumpyFrontend
from kolovod.core.objects import Objects
from kolovod.core.ops import Average
from kolovod.core.process_sets import ProcessSet
from kolovod.core.submission import Group, Request, position_of
from kolovod.core.transaction import transaction
from kolovod.core.verbs import BROADCAST
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients import exchange, plan
from kolovod.gradients.agreement import agree
from kolovod.gradients.compression import AnyCompressor, Compression, adapted
from kolovod.gradients.spec import ReduceSpec
from kolovod.jax import repeated
from kolovod.jax.frontend import DTYPES
from kolovod.jax.verbs import JaxCollectives

Tree = TypeVar("Tree")


class Pytrees:
    """Has the functions for one world; ``kolovod.jax`` binds those for the process's own."""

    def __init__(self, verbs: JaxCollectives) -> None:
        """``verbs``: on arrays."""
        self._verbs = verbs

    def allreduce_pytree(
        self,
        tree: Tree,
        name: str = "pytree",
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
        *,
        compression: AnyCompressor = Compression.none,
    ) -> Tree:
        """``allreduce`` of every array of ``tree``: gradients, inside or outside of ``jax.jit``.

        ``tree``: any pytree of arrays, equal in structure, shapes and dtypes on all ranks. Those of
        a flax or Equinox model are pytrees as they are. Neighbours travel together, about 1 MiB at
        a time; each bucket starts when its last array has values.
        ``name``: what the buckets' names begin with. Trees that are on their way at the same time
        in different programs (of other threads) need names of their own; within one program, and
        one program after the other, nothing is needed.
        ``compression``: ``Compression.none``, ``.fp16``, ``.bf16``, between hosts ``.int8`` or
        ``.int4``, or a ``Compressor``.

        Raises what ``allreduce`` raises; MismatchError when the trees differ.
        """
        pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
        for path, leaf in pairs:
            if not _is_array(leaf):
                raise FrontEndArgumentError(
                    f"leaf {jax.tree_util.keystr(path) or 'of the tree'} is a "
                    f"{type(leaf).__name__}, which cannot be reduced: make it an array with "
                    "jax.numpy.asarray(), or leave it out (equinox.filter does)"
                )
        scales = prescale_factor, postscale_factor
        spec = ReduceSpec(op, *scales, adapted(compression), process_set=process_set)
        leaves = [leaf for _, leaf in pairs]
        results = list(leaves)
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        if is_traced:
            exchange.refuse_state(spec.compressor, "a program of JAX")
        sent = [i for i, leaf in enumerate(leaves) if _dtype(leaf) != jax.dtypes.float0]
        # The backward pass comes to the last layers first, as far as a tree is in their order.
        sizes = {i: leaves[i].size * leaves[i].dtype.itemsize for i in reversed(sent)}
        submit = exchange.by(self._verbs, spec, at_once=is_traced)
        scaled = exchange.scaling(self._verbs, spec)
        waiting = []
        buckets = plan.cut(sizes)
        if buckets and is_traced and transaction().is_elastic:
            buckets = [list(sizes)]  # to be repeated as a whole
        for number, bucket in enumerate(buckets):
            keyed = [(jax.tree_util.keystr(pairs[i][0]), leaves[i]) for i in bucket]
            waiting.append(
                (bucket, exchange.start(spec, f"{name}.{number}", keyed, submit, scaled))
            )
        for bucket, wait in waiting:
            for i, array in zip(bucket, wait(), strict=True):
                results[i] = array
        if len(waiting) > 1:
            together = self._verbs.together([results[i] for i in sent], process_set)
            for i, array in zip(sent, together, strict=True):
                results[i] = array
        return jax.tree.unflatten(structure, results)  # type: ignore[no-any-return]

    def reduced_in_step(self, tree: Tree, name: str, spec: ReduceSpec) -> Tree:
        """``tree``, reduced by ``spec``: in an elastic job a step, which combines gradients.

        On a rank that is no member of the process set: ``tree``, and a step without its part.
        """
        if not spec.is_member:
            repeated.take_empty_step(tree)
            return tree
        scales = spec.prescale, spec.postscale
        reduce = partial(
            self.allreduce_pytree, tree, name, spec.op, *scales, spec.process_set,
            compression=spec.compressor,
        )  # fmt: skip
        return repeated.run_in_transaction(reduce, tree, counts=True)

    def broadcast_pytree(
        self,
        tree: Tree,
        root_rank: int = 0,
        name: str = "pytree",
        process_set: ProcessSet | None = None,
    ) -> Tree:
        """``tree`` with the values that it has on ``root_rank``: parameters, optimizer state.

        ``tree``: any pytree of JAX's or NumPy's arrays (random keys, too), numbers and strings,
        equal in structure, shapes and dtypes on all ranks. Other leaves, such as the functions in
        an Equinox model, stay what they are; inside ``jax.jit`` all but arrays do.

        Raises MismatchError, on every rank, when the trees differ (the first leaf that does is
        named), InvalidArgumentError for a dtype that the engine does not know.
        """
        pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
        keys = [jax.tree_util.keystr(path) for path, _ in pairs]
        leaves = [leaf for _, leaf in pairs]
        arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
        if any(isinstance(leaves[i], jax.core.Tracer) for i in arrays):
            root = position_of(root_rank, process_set)
            request = Request(BROADCAST, name, process_set, root=root)
            sent = [_sendable(leaves[i], keys[i]) for i in arrays]
            received = self._verbs.new_group(request, sent)
        else:
            over = self._verbs.world if process_set is None else process_set.membership
            root = position_of(root_rank, process_set)
            on_arrays = Collectives(NumpyFrontend(), over)
            objects = Objects(on_arrays.world)
            agree(objects, described(tree), "leaf", f"{name}.leaves")
            sent = [_sendable(leaves[i], keys[i]) for i in arrays]
            on_jax = JaxCollectives(self._verbs.frontend, over)
            received = _broadcast(sent, root, name, on_arrays, on_jax)
            others = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _BY_VALUE)]
            values = [leaves[i] for i in others]
            values = objects.broadcast_object(values, root, f"{name}.values")
            for i, value in zip(others, values, strict=True):
                leaves[i] = value
        for i, array in zip(arrays, received, strict=True):
            leaves[i] = _received(array, leaves[i])
        return jax.tree.unflatten(structure, leaves)  # type: ignore[no-any-return]


def described(tree: Any) -> list[tuple[str, Any]]:
    """Return the facts that trees must have in common for ``broadcast_pytree``."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path), _describe(leaf)) for path, leaf in pairs]


def is_wholly_sent(tree: Any) -> bool:
    """Return whether ``broadcast_pytree`` sends all leaves but functions, and refuses none."""
    return all(
        is_key(leaf) or leaf.dtype in DTYPES
        if _is_array(leaf)
        else callable(leaf) or isinstance(leaf, _BY_VALUE)
        for leaf in jax.tree.leaves(tree)
    )


def _broadcast(
    arrays: Sequence[Any], root: int, name: str, on_arrays: Collectives, on_jax: JaxCollectives
) -> list[Any]:
    """Broadcast arrays of NumPy and of JAX; return them, JAX's where they were."""
    host = jax.local_devices(backend="cpu")[0]
    handles = []
    for i, array in enumerate(arrays):
        if isinstance(array, jax.Array):
            array = jax.device_put(array, host)
            handles.append(on_jax.broadcast_async(array, root, f"{name}.{i}"))
        else:
            handles.append(on_arrays.broadcast_async(array, root, f"{name}.{i}"))
    results = [handle.wait() for handle in handles]
    return [
        jax.device_put(result, array.sharding) if isinstance(array, jax.Array) else result
        for array, result in zip(arrays, results, strict=True)
    ]


def _sendable(leaf: Any, key: str) -> Any:
    """An array of a dtype that the engine knows, with the bits of ``leaf``."""
    if is_key(leaf):
        return jax.random.key_data(leaf)
    if leaf.dtype not in DTYPES:
        raise FrontEndArgumentError(
            f"leaf {key} has dtype {leaf.dtype.name}, which the engine does not know; convert it, "
            "or send it with broadcast_object"
        )
    return leaf


def _received(array: Any, leaf: Any) -> Any:
    """Return what was sent, as the kind of array that ``leaf`` is."""
    if is_key(leaf):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
    return array


_BY_VALUE = (bool, int, float, complex, str, bytes)


def _dtype(leaf: Any) -> Any:
    return getattr(leaf, "dtype", None)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def is_key(leaf: Any) -> bool:
    """Return whether ``leaf`` is an array of random keys."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _describe(leaf: Any) -> Any:
    """Return the facts of a leaf that must be equal on all ranks."""
    return (leaf.shape, str(leaf.dtype)) if _is_array(leaf) else type(leaf).__name__
