"""Watches PyTorch: optimizers, models and files; ``watch_loaders.py`` what DataLoaders yield."""

from __future__ import annotations

import functools
import random
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from kolovod.checking import watch_loaders
from kolovod.checking.digests import array_values, digest_of, text_digest
from kolovod.checking.facts import NotFinite, Optimizer, Values, note_operation
from kolovod.checking.places import modules_above, script_line
from kolovod.checking.recorder import Recorder

__all__ = ["imported"]

_OF_GROUPS = {
    "all_reduce": "allreduce",
    "reduce": "reduce",
    "all_gather": "allgather",
    "all_gather_into_tensor": "allgather",
    "all_gather_object": "allgather",
    "gather": "gather",
    "gather_object": "gather",
}
"""Functions of torch.distributed that combine values of ranks, and their verbs."""
_MOST_INPUTS = 16  # of one step
_MOST_GRADIENTS = 50  # steps whose gradients are compared


def imported(name: str, recorder: Recorder) -> None:
    """``name`` has been imported: torch, or a module of Kolovod's whose class is watched."""
    module = sys.modules[name]
    watcher = _watcher(recorder)
    if name == "torch":
        watcher.begin()
    elif name == "kolovod.torch.periodic":
        watcher.watch_apart(module.TrainsIndependently)
    else:
        kind = {"distributed": "Distributed", "sharded": "Sharded", "adasum": "ByAdasum"}
        watcher.watch_steps(getattr(module, kind[name.rpartition(".")[2]]))


_watchers: dict[int, _Watcher] = {}


def _watcher(recorder: Recorder) -> _Watcher:
    return _watchers.setdefault(id(recorder), _Watcher(recorder))


class _Watcher:
    """The state of models and optimizers that is kept between their calls."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._facts = recorder.facts
        self._roots: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._children: weakref.WeakValueDictionary[int, torch.nn.Module] = (
            weakref.WeakValueDictionary()
        )
        self._optimizers: dict[int, Optimizer] = {}
        self._stepped: list[weakref.ref[torch.optim.Optimizer]] = []
        self._stepping: list[int] = []  # ids of optimizers, the outermost first
        self._is_ours = False  # the outermost one is Kolovod's
        self._has_begun = False  # its gradients are there
        self._inputs: list[str] = []

    def begin(self) -> None:
        """Begin to watch: PyTorch is there."""
        register_optimizer_step_pre_hook(self._before_own_step)
        register_optimizer_step_post_hook(self._after_own_step)
        torch.nn.modules.module.register_module_forward_pre_hook(self._forward)
        self._recorder.before_first_step.append(self._look_before)
        self._recorder.at_end.append(self._look_after)
        watch_loaders.begin(self._recorder, to_array)
        save = torch.save

        def saving(obj: Any, f: Any, *arguments: Any, **named: Any) -> None:
            self._recorder.note_file(f, script_line())
            save(obj, f, *arguments, **named)

        torch.save = torch.serialization.save = saving
        if torch.distributed.is_available():
            for function, verb in _OF_GROUPS.items():
                self._watch_operation(function, verb)

    def _watch_operation(self, function: str, verb: str) -> None:
        """Note what the script, or a library that it uses, asks of ``torch.distributed``."""
        operate = getattr(torch.distributed, function)

        @functools.wraps(operate)
        def operating(*arguments: Any, **named: Any) -> Any:
            frame = sys._getframe(1)
            if self._recorder.is_on and not frame.f_globals.get("__name__", "").startswith(
                "torch."
            ):
                note_operation(self._facts, verb, function, script_line(frame))
            return operate(*arguments, **named)

        setattr(torch.distributed, function, operating)

    def watch_apart(self, kind: Any) -> None:
        """Watch ``kind``, which lets ranks train by themselves for a while."""
        make = kind.__init__

        def making(self_: Any, *arguments: Any, **named: Any) -> None:
            self._facts.apart = type(self_).__name__
            make(self_, *arguments, **named)

        kind.__init__ = making

    # --- optimizers ---

    def watch_steps(self, kind: Any) -> None:
        """Watch ``kind``, which steps with the gradients of all ranks."""
        step = kind.step

        def stepping(self_: Any, closure: Any = None) -> Any:
            if self._stepping:
                return step(self_, closure)
            closure = self._enter_step(self_, closure, wrapped=True)
            try:
                result = step(self_, closure)
            finally:
                self._stepping.clear()
            self._end_step()
            return result

        stepping.hooked = True  # type: ignore[attr-defined]  # as the method that it calls
        kind.step = stepping

    def _before_own_step(self, optimizer: Any, arguments: Any, named: Any) -> Any:
        """The class of the optimizer itself steps, with gradients as they are."""
        if self._stepping:
            if self._stepping == [id(optimizer)] and self._has_begun:
                self._note_gradients(optimizer)
            return None
        if any(map(_is_ours, modules_above(sys._getframe(1)))):
            return None  # a trial, of whether an optimizer's state can be sharded
        closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)
        closure = self._enter_step(optimizer, closure, wrapped=False)
        if closure is None:
            return None
        if "closure" in named:
            return arguments, {**named, "closure": closure}
        return (arguments[0], closure, *arguments[2:]), named

    def _after_own_step(self, optimizer: Any, arguments: Any, named: Any) -> None:
        if self._stepping == [id(optimizer)] and not self._is_ours:
            self._stepping.clear()
            self._end_step()

    def _enter_step(self, optimizer: Any, closure: Any, *, wrapped: bool) -> Any:
        """Return the closure to step with: if there is one, the step begins with its gradients."""
        self._stepping.append(id(optimizer))
        self._is_ours, self._has_begun = wrapped, False
        frame = sys._getframe(2)
        line, modules = script_line(frame), modules_above(frame)

        def begin() -> None:
            self._begin_step(optimizer, line, modules)
            if not wrapped:
                self._note_gradients(optimizer)

        if closure is None:
            return begin()

        def computing() -> Any:
            result = closure()
            if not self._has_begun:
                begin()
            return result

        return computing

    def _begin_step(self, optimizer: Any, line: str, modules: list[str]) -> None:
        self._has_begun = True
        fact = self._optimizers.get(id(optimizer))
        if fact is None:
            wrapped = self._is_ours or self._is_combined_by_model(optimizer)
            fact = Optimizer(type(optimizer).__name__, line, wrapped)
            self._optimizers[id(optimizer)] = fact
            self._stepped.append(weakref.ref(optimizer))
            fact.parameters = [name for name, _ in self._named(optimizer)]
            self._facts.optimizers.append(fact)
            weakref.finalize(optimizer, self._optimizers.pop, id(optimizer), None)
        self._recorder.step_begins(line)
        if self._facts.framework in ("", "torch"):
            self._facts.framework = _way_of(modules, self._facts.other_world) or "torch"
        fact.rates.append([float(group.get("lr", 0.0)) for group in optimizer.param_groups])

    def _is_combined_by_model(self, optimizer: Any) -> bool:
        """Return whether DDP or FSDP combines the gradients of all that an optimizer has."""
        combined = {
            id(parameter)
            for _, model in self._models()
            if type(model).__name__ == _DDP
            for parameter in model.parameters()
        }
        own = [each for group in optimizer.param_groups for each in group["params"]]
        return all(id(each) in combined or _is_part(each) for each in own)

    def _end_step(self) -> None:
        watch_loaders.step_ends()
        self._facts.inputs.append(text_digest("".join(self._inputs)) if self._inputs else "")
        self._inputs.clear()
        for each in self._facts.optimizers:
            each.steps = len(each.rates)
        for optimizer in filter(None, [ref() for ref in self._stepped]):
            for name, parameter in self._named(optimizer):
                self._note_not_finite("weight", name, parameter)
        self._recorder.step_ends()

    def _note_not_finite(self, what: str, name: str, tensor: torch.Tensor) -> None:
        found = self._facts.not_finite
        if any(each.what == what for each in found) or not self._recorder.is_on:
            return
        if tensor.is_floating_point() and not _is_part(tensor) and not tensor.is_meta:
            values = tensor.detach()
            if not bool(
                torch.isfinite(values.coalesce().values() if values.is_sparse else values).all()
            ):
                found.append(NotFinite(what, name, self._facts.steps + 1))

    def _note_gradients(self, optimizer: Any) -> None:
        if _has_own_gradients(optimizer) or not self._recorder.is_on:
            return
        fact = self._optimizers[id(optimizer)]
        if len(fact.gradients) >= _MOST_GRADIENTS:
            return
        gradients = {
            name: digest_of(parameter.grad, to_array)
            for name, parameter in self._named(optimizer)
            if parameter.grad is not None
        }
        fact.gradients.append(gradients)

    def _named(self, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
        names = {id(p): name for name, p in self._parameters()}
        given = getattr(optimizer, "_kolovod_names", {})
        stepped = [ref() for ref in self._stepped]
        number = next(i for i, each in enumerate(stepped) if each is optimizer)
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                place = f"parameter {i} of group {g} of optimizer {number}"
                yield names.get(id(parameter)) or given.get(id(parameter)) or place, parameter

    # --- models ---

    def _forward(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if id(module) in self._children or not self._recorder.is_on:
            return
        if id(module) not in self._roots:
            self._children.update({id(m): m for m in module.modules() if m is not module})
            if next(module.parameters(), None) is None:
                return
            self._roots = {key: ref for key, ref in self._roots.items() if ref() is not None}
            self._roots[id(module)] = weakref.ref(module)
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and parameter.is_leaf and not _is_part(parameter):
                    note = functools.partial(self._note_not_finite, "gradient", name)
                    hooked: Any = parameter
                    hooked.register_hook(note)  # before anything combines it
        if module.training and torch.is_grad_enabled() and len(self._inputs) < _MOST_INPUTS:
            self._facts.inputs_line = script_line(sys._getframe(1))
            self._inputs.append(digest_of(arguments, to_array))

    def _models(self) -> list[tuple[str, torch.nn.Module]]:
        """Return the models that the script has called, each with the prefix of its names."""
        alive = [ref() for key, ref in self._roots.items() if key not in self._children]
        roots = [root for root in alive if root is not None]
        if len(roots) == 1:
            return [("", roots[0])]
        return [(f"{type(root).__name__} {i}: ", root) for i, root in enumerate(roots)]

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, model in self._models():
            for name, parameter in model.named_parameters():
                yield prefix + name, parameter

    # --- what ranks are compared by ---

    def _look_before(self) -> None:
        facts = self._facts
        facts.weights_before = self._weights()
        facts.trainable = [name for name, p in self._parameters() if p.requires_grad]
        states = {
            "torch": digest_of(torch.get_rng_state(), to_array),
            "numpy": digest_of(list(np.random.get_state(legacy=True)), to_array),
            "random": text_digest(repr(random.getstate())),
        }
        facts.seeds.update(states)
        for prefix, model in self._models():
            kinds = {type(each).__name__ for each in model.modules() if each.training}
            facts.draws += [f"{prefix}{kind}" for kind in sorted(kinds) if "Dropout" in kind]
            name = type(model).__name__
            if name in (_DDP, "FullyShardedDataParallel"):
                facts.other_world = f"{name} over torch.distributed"
                facts.sharded |= name.startswith("Fully")
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and not facts.other_world:
            facts.other_world = f"torch.distributed ({distributed.get_backend()})"

    def _look_after(self) -> None:
        self._facts.weights_after = self._weights()
        norm = torch.nn.modules.batchnorm._NormBase
        self._facts.buffers_after = {
            f"{prefix}{name}.{buffer}": _values(tensor)
            for prefix, model in self._models()
            for name, module in model.named_modules()
            if isinstance(module, norm)
            for buffer, tensor in module.named_buffers(recurse=False)
        }

    def _weights(self) -> dict[str, Values]:
        parameters = dict(self._parameters())
        known = {id(parameter) for parameter in parameters.values()}
        for optimizer in filter(None, [ref() for ref in self._stepped]):
            others = {name: p for name, p in self._named(optimizer) if id(p) not in known}
            parameters.update(others)
        self._facts.sharded |= any(map(_is_part, parameters.values()))
        return {name: _values(parameter) for name, parameter in parameters.items()}


def _has_own_gradients(optimizer: Any) -> bool:
    """Return whether ranks may rightly step with other gradients, or other parts of them."""
    reducer = getattr(optimizer, "_kolovod_reducer", None)
    names = {each.__name__ for each in type(optimizer).__mro__}
    if any(_is_part(each) for group in optimizer.param_groups for each in group["params"]):
        return True
    is_of_set = reducer is not None and reducer.spec.process_set is not None
    return is_of_set or bool(names & {"Sharded", "ByAdasum"})


def _way_of(modules: list[str], other_world: str) -> str:
    """Return the name of the library that lets ranks step, by the modules that call the step."""
    roots = {module.partition(".")[0] for module in modules}
    for library, names in _LIBRARIES.items():
        if roots & names:
            return library
    return "ddp" if other_world else ""


_LIBRARIES = {
    "lightning": {"lightning", "pytorch_lightning"},
    "transformers": {"transformers"},
    "accelerate": {"accelerate"},
}
_DDP = "DistributedDataParallel"


def _is_ours(module: str) -> bool:
    return module.startswith("kolovod.") and not module.startswith("kolovod.checking")


def _is_part(tensor: Any) -> bool:
    return type(tensor).__name__ == "DTensor" or type(tensor.data).__name__ == "DTensor"


def _values(tensor: torch.Tensor) -> Values:
    array = to_array(tensor)
    if array is None:
        return Values("")
    if tensor.dtype == torch.bfloat16:
        array = to_array(tensor.float())
    return array_values(array)


def to_array(value: Any) -> Any:
    """Return the NumPy array of a tensor's values; of dtypes that NumPy lacks, of its bytes."""
    if not isinstance(value, torch.Tensor):
        return None
    with torch.no_grad():
        tensor = value.detach()
        if _is_part(value):
            tensor = value.to_local()  # type: ignore[attr-defined]
        if tensor.layout != torch.strided:
            tensor = tensor.coalesce().values() if tensor.is_sparse else tensor.to_dense()
        if tensor.is_meta or tensor.is_quantized:
            return None
        tensor = tensor.cpu().contiguous().resolve_conj().resolve_neg()
        try:
            return tensor.numpy()
        except TypeError:
            return tensor.reshape(-1).view(torch.uint8).numpy()
