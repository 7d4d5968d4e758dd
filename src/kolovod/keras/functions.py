"""Values and variables between ranks, outside of the training step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kolovod.core.codecs import codec_in
from kolovod.core.objects import Objects
from kolovod.core.ops import Average
from kolovod.core.process_sets import ProcessSet
from kolovod.core.rank_info import rank
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.agreement import agree
from kolovod.gradients.compression import Compression, StaticCompressor, dtype_name
from kolovod.keras.framework_detection import is_keras_3, keras_of
from kolovod.keras.optimizer import build_in_keras_2
from kolovod.numpy import collectives
from kolovod.private_apis.keras import layers_of

Array = npt.NDArray[Any]

_objects = Objects(collectives.world)
_ADAPT_ALIKE = (
    "adapt it to the same data on all ranks, or give all what one has found, say by "
    "layer.set_vocabulary(kv.broadcast_object(layer.get_vocabulary()))"
)


def to_numpy(value: Any) -> Array:
    """A number, array, tensor or variable of any of the frameworks, as a dense array.

    Raises InvalidArgumentError for what is none.
    """
    if hasattr(value, "detach"):  # PyTorch's
        value = value.detach().cpu()
    if hasattr(value, "numpy"):
        value = value.numpy()
    array = np.asarray(value)
    if array.dtype == object or array.dtype.kind in "SU":
        raise FrontEndArgumentError(f"{value!r} is no number, array, tensor or variable")
    return np.ascontiguousarray(array) if array.ndim else array.copy()


def allreduce(
    value: Any,
    name: str | None = None,
    op: int = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: type[StaticCompressor] = Compression.none,
    process_set: ProcessSet | None = None,
) -> Array:
    """Combine ``value`` over all ranks, and return an array. See ``kolovod.allreduce``.

    ``value``: a number, array, tensor or variable of any framework.
    """
    small, context = compression.compress(to_numpy(value))
    scales = prescale_factor, postscale_factor
    reduced = collectives.allreduce(small, name, op, *scales, process_set, codec_in(compression))
    result: Array = compression.decompress(reduced, context)
    return result


def allgather(value: Any, name: str | None = None, process_set: ProcessSet | None = None) -> Array:
    """Return the ranks' ``value`` one after the other. See ``kolovod.allgather``."""
    return collectives.allgather(to_numpy(value), name, process_set)


def broadcast(
    value: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Array:
    """Return the ``value`` of ``root_rank``. See ``kolovod.broadcast``."""
    return collectives.broadcast(to_numpy(value), root_rank, name, process_set)


def reducescatter(
    value: Any,
    name: str | None = None,
    op: int = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Array:
    """Combine ``value``, and return this rank's rows. See ``kolovod.reducescatter``."""
    scales = prescale_factor, postscale_factor
    return collectives.reducescatter(to_numpy(value), name, op, *scales, process_set)


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int = 0,
    process_set: ProcessSet | None = None,
    *,
    keeps: bool = False,
) -> None:
    """Give variables the values that they have on ``root_rank``.

    ``variables``: of Keras or TensorFlow, in the same order on all ranks. ``keeps``: those of this
    rank stay as they are. Raises MismatchError, on every rank, when their number, shapes or dtypes
    differ between ranks.
    """
    variables = list(variables)
    described = [(str(v.name).split("/")[-1], (tuple(v.shape), dtype_name(v))) for v in variables]
    agree(_objects, described, "variable", "broadcast_variables", process_set)
    values = [to_numpy(variable) for variable in variables]
    if keeps:  # which may be memory of the variables
        values = [np.empty_like(value) if rank() != root_rank else value for value in values]
    handles = [  # as bytes, since NumPy does not know bfloat16
        collectives.broadcast_async_(
            value.reshape(-1).view(np.uint8), root_rank, f"variable.{i}", process_set
        )
        for i, value in enumerate(values)
    ]
    is_root = rank() == root_rank
    for variable, value, handle in zip(variables, values, handles, strict=True):
        handle.wait()
        if not is_root and not keeps:
            variable.assign(value)


def broadcast_model(
    model: Any,
    root_rank: int = 0,
    process_set: ProcessSet | None = None,
    local_variables: Iterable[Any] = (),
    *,
    keeps: bool = False,
) -> None:
    """Give ``model`` the weights, and its optimizer the state, that they have on ``root_rank``.

    ``model``: built, or a layer; its optimizer is built here where it is not. The states of random
    generators stay as they are. ``local_variables``: others that do. ``keeps``: all of this rank
    do. Raises InvalidArgumentError for a model that is not built, and MismatchError, on every rank,
    when the ranks' models differ, or the words or bins to which their layers have adapted.
    """
    if not model.built:
        raise FrontEndArgumentError(
            f"{model!r} has no variables yet: call model.build(), or fit with "
            "BroadcastGlobalVariablesCallback"
        )
    optimizer = getattr(model, "optimizer", None)
    variables = list(model.weights)
    if optimizer is not None:
        variables += optimizer_variables(optimizer, model)
    local = {id(variable) for variable in local_variables}
    sent = [variable for variable in variables if id(variable) not in local]
    layers = layers_of(model)
    adapted = [(layer.name, found) for layer in layers if (found := _adapted_to(layer)) is not None]
    if adapted:
        agree(_objects, adapted, "adapted layer", "model.adapted", process_set, _ADAPT_ALIKE)
    broadcast_variables(sent, root_rank, process_set, keeps=keeps)
    _normalise_by_weights(model, layers)


def _adapted_to(layer: Any) -> str | None:
    """Return, in words, what ``layer`` has got from data beside its weights; None: nothing."""
    if callable(getattr(layer, "get_vocabulary", None)):
        kind, values = "words", layer.get_vocabulary()
    elif getattr(layer, "bin_boundaries", None) is not None:
        kind, values = "boundaries", [float(each) for each in layer.bin_boundaries]
    else:
        return None
    digest = hashlib.sha256("\0".join(map(repr, values)).encode()).hexdigest()
    return f"with {len(values)} {kind} ({digest[:8]})"


def _normalise_by_weights(model: Any, layers: Iterable[Any]) -> None:
    """Have Normalization layers use the weights of now: they keep what they have made of them."""
    changed = False
    for layer in layers:
        if getattr(layer, "adapt_mean", None) is None:
            continue
        before = to_numpy(layer.mean), to_numpy(layer.variance)
        layer.finalize_state()
        after = to_numpy(layer.mean), to_numpy(layer.variance)
        changed |= not all(map(np.array_equal, before, after))
    if changed and getattr(model, "optimizer", None) is not None:  # graphs have it as a constant
        model.test_function = model.predict_function = None
        model.make_train_function(force=True)


def optimizer_variables(optimizer: Any, model: Any) -> list[Any]:
    """All that ``optimizer`` keeps between steps; it is built for ``model`` if need be."""
    keras = keras_of(optimizer)
    if is_keras_3(keras):
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        return list(optimizer.variables)
    build_in_keras_2(optimizer, model.trainable_variables)
    variables = optimizer.variables
    return list(
        variables() if isinstance(optimizer, keras.optimizers.legacy.Optimizer) else variables
    )
