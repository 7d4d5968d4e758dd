"""DistributedOptimizer: any optimizer of Keras, stepping with all ranks' gradients."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, TypeVar

from kolovod.core.ops import Average, Sum
from kolovod.core.process_sets import ProcessSet
from kolovod.core.world import current
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.alike import Alike
from kolovod.gradients.compression import AnyCompressor, Compression
from kolovod.gradients.plan import Groups
from kolovod.gradients.spec import ReduceSpec, checked_passes
from kolovod.keras import copies
from kolovod.keras.framework_detection import backend_of, is_keras_3, keras_of
from kolovod.keras.reducer import GradientReducer
from kolovod.private_apis.keras import SET_BY_SCALERS, caller_itself

O = TypeVar("O")  # noqa: E741

_METHODS = (
    "apply", "apply_gradients", "compute_gradients", "_compute_gradients",
    "_aggregate_gradients", "get_gradients",
)  # fmt: skip
"""The methods, of the classes below, that are called while a function is traced."""


class Distributed:
    """The methods that ``DistributedOptimizer`` adds to the class of the optimizer it is given."""

    _kolovod_base: type
    _kolovod_reducer: GradientReducer
    _kolovod_is_usual: bool = False
    """True if ``DistributedOptimizer`` made it without arguments."""
    _kolovod_is_copy: bool = False
    """True if it was made as a copy: the script may give it to ``DistributedOptimizer`` yet."""

    @classmethod
    def from_config(cls, config: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Make a copy: see copies.py."""
        return cls._kolovod_base.from_config(config, *args, **kwargs)  # type: ignore[attr-defined]

    def get_config(self) -> dict[str, Any]:
        """Return the configuration, with a name that says what it is a configuration of."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        return copies.marked(config, self._kolovod_takes_no_arguments())

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return, for ``copy`` and ``pickle``, a plain optimizer and what to make of it.

        It is of the original class: this one's class cannot be imported, nor is the engine in it
        another process's.
        """
        base: Any = self._kolovod_base
        plain = base.__new__(base)
        own = ((name, value) for name, value in vars(self).items() if name[:9] != "_kolovod_")
        vars(plain).update(own)
        return _copied, (plain, self._kolovod_takes_no_arguments())

    def _kolovod_takes_no_arguments(self) -> bool:
        return self._kolovod_is_usual and not self._kolovod_reducer.local_sources

    def register_local_var(self, variable: Any) -> None:
        """Leave this variable's gradient to each rank; before the first step, on all ranks."""
        self._kolovod_reducer.local_sources += _checked_sources([variable])

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and notice that a LossScaleOptimizer is put around this optimizer.

        It looks for infinities before it calls this one, and all ranks must see the same: so it is
        that one which combines the gradients from then on, or, where this one adds up the gradients
        of several passes, agrees on them.
        """
        super().__setattr__(name, value)
        reducer = self.__dict__.get("_kolovod_reducer")
        if name not in SET_BY_SCALERS or reducer is None or reducer.is_idle:
            return
        scaler = caller_itself(1)
        keras = keras_of(self)
        is_scaler = isinstance(scaler, keras.mixed_precision.LossScaleOptimizer)
        if is_scaler and not isinstance(scaler, Distributed):
            if not getattr(self, "gradient_accumulation_steps", None):
                self._kolovod_reducer = reducer.idle()
            _adopt(scaler, reducer, keras)
            scaler._kolovod_is_usual = self._kolovod_is_usual
            scaler._kolovod_is_copy = self._kolovod_is_copy
            if isinstance(self, InKeras2):
                scaler._kolovod_passes, self._kolovod_passes = self._kolovod_passes, None


class InKeras3(Distributed):
    """The methods for an optimizer of Keras 3."""

    # Keras's own optimizer is not known to the type checker.
    built: bool
    gradient_accumulation_steps: int | None
    _trainable_variables: list[Any]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Combine the ranks' gradients, then apply them as usual."""
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        variables = (
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        if len(grads) == len(variables):  # else Keras says what is wrong
            grads = self._sent(grads, variables)
        super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _sent(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the combined gradients, or this rank's own if they are to be added up first."""
        reducer = self._kolovod_reducer
        if self.gradient_accumulation_steps:
            return reducer.filled(grads, variables)
        return reducer.reduced(grads, variables)

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Sequence[Any]) -> None:
        self._kolovod_reducer.latest = trainable_variables
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        """Send the mean over several passes, with which Keras comes here; then clip."""
        if self.gradient_accumulation_steps:
            reducer = self._kolovod_reducer

            def reduced(grads: list[Any]) -> list[Any]:
                return reducer.reduced(grads, reducer.latest)

            if not reducer.is_idle:
                grads = reducer.backend.in_last_pass(self, reduced, list(grads))
        return super()._clip_gradients(grads)  # type: ignore[misc]


class ScalerInKeras3(InKeras3):
    """The methods for Keras 3's LossScaleOptimizer.

    The optimizer within may add up the gradients of several passes. Then that one combines them,
    in the last pass; in the others too, all ranks must leave out the same gradients, or they would
    not count the same passes: so they agree on whether these are finite.
    """

    inner_optimizer: Any
    variables: list[Any]

    @property
    def _adds_up_first(self) -> bool:
        return bool(self.inner_optimizer.gradient_accumulation_steps)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any
    ) -> Any:
        """Combine the ranks' gradients, then apply them; ``apply`` is not called."""
        if len(grads) == len(self._trainable_variables):
            values = [
                *zip(self._trainable_variables, trainable_variables, strict=True),
                *zip(self.variables, optimizer_variables, strict=True),
            ]
            with keras_of(self).StatelessScope(state_mapping=values):
                grads = self._sent(grads, self._trainable_variables)
        return super().stateless_apply(  # type: ignore[misc]
            optimizer_variables, grads, trainable_variables
        )

    def _sent(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if not self._adds_up_first:
            return self._kolovod_reducer.reduced(grads, variables)
        self._kolovod_reducer.latest = variables
        return self._kolovod_reducer.filled(grads, variables)

    def check_finite(self, grads: Sequence[Any]) -> Any:
        """Return whether the gradients are finite on all ranks."""
        is_finite = super().check_finite(grads)  # type: ignore[misc]
        if not self._adds_up_first:
            return is_finite
        ops, reducer = keras_of(self).ops, self._kolovod_reducer
        # Added up, so that a rank that has joined, and sends zeros, does not object.
        objects = ops.cast(ops.logical_not(is_finite), "float32")
        return ops.less(reducer.total(objects, grads, reducer.latest), 0.5)


class InKeras2(Distributed):
    """The methods for an optimizer of Keras 2.

    Gradients are combined where it computes them, so that what a subclass or a script does with
    these is done with all ranks'; those that were computed elsewhere, before they are applied.
    """

    iterations: Any
    _kolovod_passes: Any = None  # a LocalAggregation, where there are several

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Combine the ranks' gradients unless that is done, then apply them as usual."""
        pairs = list(grads_and_vars)
        reducer = self._kolovod_reducer
        variables = [variable for _, variable in pairs]
        found = reducer.handed_out.take_back(pairs)
        is_last = next((out.note for out in found if out is not None), None)
        if (own := [i for i, out in enumerate(found) if out is None]) or not pairs:
            combined, is_last = self._kolovod_combined([pairs[i] for i in own])
            for i, pair in zip(own, combined, strict=True):
                pairs[i] = pair

        def applied() -> Any:
            return super(InKeras2, self).apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]

        if is_last is None:
            return applied()
        build_in_keras_2(self, variables)  # which cannot be done in a branch
        return reducer.backend.either(
            is_last, applied, lambda: self.iterations.assign_add(1), self.iterations
        )

    def _kolovod_combined(self, pairs: Sequence[tuple[Any, Any]]) -> tuple[list[Any], Any]:
        """The pairs with the ranks' gradients, or sums so far; and whether to step now, or None."""
        reducer, passes = self._kolovod_reducer, self._kolovod_passes
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        is_last = None
        if reducer.is_idle or passes is None:
            grads = reducer.reduced(grads, variables)
        else:
            grads, is_last = passes.add(grads, variables)
        return list(zip(grads, variables, strict=True)), is_last

    def _kolovod_handed_out(self, pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Return combined gradients; ``apply_gradients`` knows them, even if they were changed."""
        combined, is_last = self._kolovod_combined(pairs)
        self._kolovod_reducer.handed_out.hand_out(combined, is_last)
        return combined


class InNewKeras2(InKeras2):
    """The methods for an optimizer that Keras 2.11 brought."""

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[Any]:
        """Compute gradients and combine them over the ranks; several passes: this rank's sums."""
        return self._kolovod_handed_out(
            super().compute_gradients(loss, var_list, tape)  # type: ignore[misc]
        )

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[Any]:
        """Compute gradients, under the name that scripts for a legacy optimizer call.

        ``grad_loss``: None, or the gradient of something with respect to ``loss``, which is a
        callable then.
        """
        if grad_loss is None:
            return self.compute_gradients(loss, var_list, tape)
        if not callable(loss):
            raise FrontEndArgumentError(
                f"grad_loss={grad_loss!r} needs a callable as loss, which is {loss!r}: multiply "
                "the loss by it instead"
            )
        tensorflow = importlib.import_module("tensorflow")
        return self.compute_gradients(lambda: tensorflow.multiply(loss(), grad_loss), var_list)

    def _aggregate_gradients(self, grads_and_vars: Any) -> list[Any]:
        """Return the ranks' gradients; ``apply_gradients`` does not combine them again."""
        return [grad for grad, _ in self._kolovod_handed_out(list(grads_and_vars))]


class InLegacyKeras2(InKeras2):
    """The methods for an optimizer that Keras 2.11 calls legacy."""

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[Any]:
        """Compute gradients and combine them over the ranks; several passes: this rank's sums."""
        return self._kolovod_handed_out(
            super()._compute_gradients(loss, var_list, grad_loss, tape)  # type: ignore[misc]
        )

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """Compute gradients and combine them over the ranks, in a graph of TensorFlow 1."""
        tensorflow = importlib.import_module("tensorflow")
        grads = super().get_gradients(loss, params)  # type: ignore[misc]
        pairs = list(zip(grads, tensorflow.nest.flatten(params), strict=True))
        return [grad for grad, _ in self._kolovod_handed_out(pairs)]


def DistributedOptimizer(
    optimizer: O,
    compression: AnyCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    process_set: ProcessSet | None = None,
    *,
    average_aggregated_gradients: bool = False,
    gradient_predivide_factor: float = 1.0,
    groups: int | Sequence[Iterable[Any]] | None = None,
    sparse_as_dense: bool = False,
    local_sources: Iterable[Any] = (),
    scale_local_gradients: bool = True,
) -> O:
    """Make ``optimizer`` step with the gradients averaged over all ranks, and return it.

    ``optimizer``: of Keras 3 on TensorFlow, PyTorch or JAX, or of Keras 2 (tf_keras), before or
    after it was built. The object stays what it was, an instance of its own class too, and keeps
    its state; a model saved with it is read by any Keras. In a world of one nothing is added, but
    to a step that is traced where the world may grow (KOLOVOD_ELASTIC).

    ``compression``: ``Compression.none``, ``.fp16``, ``.bf16``, between hosts ``.int8``, ``.int4``
    (see ``Compression``), or a ``Compressor``.
    ``backward_passes_per_step``: gradients of so many steps of Keras are summed locally, then sent
    and applied; in Keras 3 this is its own ``gradient_accumulation_steps``, which an optimizer that
    was built already must have been made with. ``average_aggregated_gradients``: their mean.
    ``op``: Average or Sum.
    ``process_set``: its members average among themselves, other ranks step with their own
    gradients. None: all ranks.
    ``gradient_predivide_factor``: with Average, divide gradients by it before they are added up,
    and the sum by what is left of the number of ranks: to keep float16 within its range.
    ``groups``: variables whose gradients travel together: how many groups (neighbours in the
    model), or lists of variables; others are grouped by size. None: all by size.
    ``sparse_as_dense``: send sparse gradients with all their zeros.
    ``local_sources``: variables, or layers, whose gradients stay the rank's own, divided by the
    number of ranks unless ``scale_local_gradients`` is False, so that they weigh as others do.

    Raises InvalidArgumentError for arguments that cannot work, NotInitializedError before
    ``init()``.
    """
    keras = keras_of(optimizer)
    watch_copies()
    if isinstance(optimizer, Distributed):
        if not optimizer._kolovod_is_copy:
            raise FrontEndArgumentError("this optimizer is already distributed; wrap it once")
        _release(optimizer)  # a script that reads a model and wraps its optimizer is right
    passes = checked_passes(backward_passes_per_step)
    key = optimizer._var_key if is_keras_3(keras) else _key_in_keras_2  # type: ignore[attr-defined]
    grouped = Groups(groups, "variables", key)
    spec = ReduceSpec.checked(
        compression,
        op,
        gradient_predivide_factor,
        process_set,
        (Average, Sum),
        sparse_as_dense=sparse_as_dense,
    )
    current()  # raises where there is no world
    takes_mean = average_aggregated_gradients
    factor = _accumulating(optimizer, passes, takes_mean) if is_keras_3(keras) else 1.0
    spec = replace(spec, postscale=spec.postscale * factor)
    backend = importlib.import_module(f"kolovod.keras.on_{backend_of(keras)}")
    reducer = GradientReducer(spec, grouped, backend, key, scale_local_gradients)
    reducer.local_sources += _checked_sources(local_sources)
    adopted: Any = _adopt(optimizer, reducer, keras)
    usual = ReduceSpec.checked(Compression.none, Average, 1.0, None, (Average, Sum))
    adopted._kolovod_is_usual = (
        spec == usual and passes == 1 and groups is None and scale_local_gradients
    )
    if isinstance(adopted, ScalerInKeras3) and adopted._adds_up_first:
        _adopt(adopted.inner_optimizer, reducer, keras)
    if passes > 1 and isinstance(adopted, InKeras2):
        adopted._kolovod_passes = _summing_in_keras_2(passes, reducer, takes_mean)
    return optimizer


def watch_copies(*_: Any) -> None:
    """Make copies distributed as well that a Keras of this process makes from now on."""
    for name in ("keras", "tf_keras"):
        keras = sys.modules.get(name)
        if keras is not None and hasattr(keras, "optimizers"):
            copies.watch(keras, _distributed_copy)


def _copied(plain: Any, is_usual: bool) -> Any:
    return copies.as_before(plain, is_usual, _distributed_copy)


def _distributed_copy(made: Any) -> Any:
    DistributedOptimizer(made)._kolovod_is_copy = True
    return made


def _release(optimizer: Any) -> None:
    """Make it, and what a LossScaleOptimizer has within, what it was."""
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if isinstance(each, Distributed):
            each.__class__ = each._kolovod_base
            for name in [name for name in vars(each) if name.startswith("_kolovod_")]:
                vars(each).pop(name)


def _adopt(optimizer: O, reducer: GradientReducer, keras: ModuleType) -> O:
    base: Any = type(optimizer)
    optimizer.__class__ = _class_for(base, keras)
    assert isinstance(optimizer, Distributed)
    optimizer._kolovod_reducer = reducer
    if not reducer.is_idle:
        reducer.alike = Alike(optimizer)
    return optimizer


@functools.cache
def _class_for(base: type, keras: ModuleType) -> type:
    """``base`` with what we add, under the names by which Keras, reading a file, finds ``base``."""
    addition = _addition(base, keras)
    name = base.__name__
    if base.__module__.split(".")[0] != keras.__name__:  # perhaps registered under another name
        name = getattr(keras, "saving", keras.utils).get_registered_name(base)
    fields: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_kolovod_base": base,
    }
    if backend_of(keras) == "tensorflow":  # AutoGraph, which rewrites functions, leaves it alone
        keep = importlib.import_module("tensorflow").autograph.experimental.do_not_convert
        for method in _METHODS:
            if hasattr(addition, method):
                fields[method] = keep(getattr(addition, method))
    return type(name, (addition, base), fields)


def _addition(base: type, keras: ModuleType) -> type:
    if is_keras_3(keras):
        is_scaler = issubclass(base, keras.mixed_precision.LossScaleOptimizer)
        return ScalerInKeras3 if is_scaler else InKeras3
    return InLegacyKeras2 if issubclass(base, keras.optimizers.legacy.Optimizer) else InNewKeras2


def _key_in_keras_2(variable: Any) -> Any:
    return variable.ref()


def _checked_sources(sources: Iterable[Any]) -> list[Any]:
    found = list(sources)
    for source in found:
        if not (hasattr(source, "trainable_weights") or hasattr(source, "assign")):
            raise FrontEndArgumentError(
                f"local_sources contains {source!r}: give variables, or layers of Keras"
            )
    return found


def _summing_in_keras_2(passes: int, reducer: GradientReducer, takes_mean: bool) -> Any:
    from kolovod.tensorflow.aggregation import LocalAggregation

    return LocalAggregation(passes, reducer.reduced, takes_mean, reducer.spec.sparse_as_dense)


def build_in_keras_2(optimizer: Any, variables: Sequence[Any]) -> None:
    """Make what the optimizer keeps between steps, unless it is there."""
    init_scope = importlib.import_module("tensorflow").init_scope
    with init_scope():
        if hasattr(optimizer, "_create_all_weights"):  # a legacy one
            optimizer._create_all_weights(list(variables))
        else:
            optimizer.build(list(variables))


def _accumulating(optimizer: Any, passes: int, takes_mean: bool) -> float:
    """Have ``optimizer`` add up ``passes`` gradients; return the factor for their combination."""
    if passes == 1:
        return 1.0
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    own = optimizer.gradient_accumulation_steps
    if own not in (None, passes) or (own is None and optimizer.built):
        raise FrontEndArgumentError(
            f"backward_passes_per_step is {passes}, but the optimizer, "
            f"{'built already' if own is None else 'made'} with gradient_accumulation_steps={own}, "
            f"adds up otherwise: make it with gradient_accumulation_steps={passes}"
        )
    optimizer.gradient_accumulation_steps = passes
    return 1.0 if takes_mean else float(passes)  # Keras takes the mean
