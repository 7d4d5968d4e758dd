"""DistributedDataParallel in the state of an elastic job: a step is repeated when a rank is lost.

DDP's own reducer communicates from C++ while backward runs, and overwrites what it reads. So while
the function of ``elastic.run`` runs it rests, and the reducer of ``DistributedOptimizer`` averages
the gradients, which are left alone until all ranks have the results. Forward is ours, and tells
DDP's reducer nothing [1]; hooks send gradients while backward computes others; at backward's end
all are waited for [2], in a step that is repeated in a smaller world if a rank is lost. So after
``backward()`` each gradient is the average of all ranks', which is what a script expects of DDP.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from kolovod.core.transaction import transaction
from kolovod.elastic.state import run_within
from kolovod.errors import GroupArgumentError
from kolovod.gradients.spec import ReduceSpec
from kolovod.private_apis.torch import current_backward, current_node, when_backward_ends
from kolovod.torch.reducer import GradientReducer
from kolovod.torch.verbs import collectives

__all__ = ["follow", "register"]

_elastic: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_defaults: weakref.WeakSet[Any] = weakref.WeakSet()  # groups that are, or were, the default one


def register() -> None:
    """Let ``kolovod.elastic.run`` make the modules in its state elastic that DDP has wrapped."""
    run_within(_is_ours, _within)


def follow(group: Any) -> None:
    """Give ``group``, the default one now, to the modules that had the one before."""
    _defaults.add(group)
    for module in list(_elastic):
        _move(module, group)


def _move(module: Any, group: Any) -> None:
    module._update_process_group(group)


def _is_ours(value: Any) -> bool:
    if not isinstance(value, DistributedDataParallel):
        return False
    group: Any = value.process_group
    return bool(group.name() == "kolovod")


@contextlib.contextmanager
def _within(name: str, module: DistributedDataParallel) -> Iterator[None]:
    _check(name, module)
    _elastic.add(module)
    _move(module, dist.group.WORLD)
    with DataParallel(name, module).in_use():
        yield


def _check(name: str, module: DistributedDataParallel) -> None:
    """Raise InvalidArgumentError for what cannot be elastic."""
    if module.process_group not in _defaults:
        raise GroupArgumentError(
            f"the model {name!r} of the state is in DDP over {module.process_group!r}: in an "
            "elastic job it is over all ranks, by the default group; leave process_group out"
        )
    if module._comm_hooks:
        hooks = ", ".join(
            getattr(hook, "__qualname__", repr(hook)) for hook, _ in module._comm_hooks
        )
        raise GroupArgumentError(
            f"the model {name!r} of the state has a communication hook of DDP ({hooks}), which "
            "cannot be repeated when a rank is lost: leave it out, or use "
            "kolovod.torch.DistributedOptimizer with its compression instead of DDP"
        )
    if module.mixed_precision is not None:
        raise GroupArgumentError(
            f"the model {name!r} of the state is in DDP with mixed_precision, whose gradients of "
            "another dtype elastic jobs do not know: use torch.autocast"
        )


class DataParallel:
    """A module in DDP, of an elastic job."""

    def __init__(self, name: str, module: DistributedDataParallel) -> None:
        """``name``: the same on all ranks. Nothing is changed before ``in_use``."""
        self._name, self._module = name, module
        ignored = module.parameters_to_ignore
        named = [(n, p) for n, p in module.module.named_parameters() if n not in ignored]
        self._parameters = [parameter for _, parameter in named]
        self._reducer = GradientReducer(named, ReduceSpec(), 1, collectives, {})
        self._reducer.skips = True  # what clips comes after backward, and has nothing to wait for
        self._unsynced = contextlib.ExitStack()  # of a pass that is not sent
        self._syncs = False
        self._has_new = False  # gradients, that were not averaged
        self._begun: set[int] = set()  # backwards at whose end the gradients are waited for

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within this context a rank may be lost while the module is trained."""
        module: Any = self._module
        hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p in self._parameters]
        module.forward = self._forward
        try:
            yield
        finally:
            del module.forward
            for hook in hooks:
                hook.remove()
            self._unsynced.close()
            self._reducer.close()

    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module in the place of DDP's forward, without DDP's reducer [1]."""
        module = self._module
        if module._join_config.enable:
            raise GroupArgumentError(
                f"the model {self._name!r} of the state runs within DDP's join(), which cannot be "
                "in an elastic job: give all ranks as many batches, by an ElasticSampler, say"
            )
        self._syncs = torch.is_grad_enabled() and module.require_backward_grad_sync
        self._unsynced.close()
        if not self._syncs:
            self._unsynced.enter_context(self._reducer.hold())
        outputs = module.module(*inputs, **kwargs)
        if self._syncs:  # the first gradients of a backward, outside of what is computed again
            for output in tree_leaves(outputs):
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    output.register_hook(self._begin)  # type: ignore[no-untyped-call]
        return outputs

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self._has_new = True
        self._begin(parameter)

    def _begin(self, _: torch.Tensor) -> None:
        """Wait for the gradients at the end of backward, which has come to this module."""
        backward = current_backward()
        if self._syncs and backward not in self._begun:
            self._begun.add(backward)
            when_backward_ends(partial(self._end, backward))

    def _end(self, backward: int) -> None:
        """Wait for the gradients [2]."""
        self._begun.discard(backward)
        if current_node() is not None:  # within another one, of a checkpoint, which goes on
            return
        if self._has_new:  # else it was torch.autograd.grad
            self._has_new = False
            self._reducer.synchronize()
            self._reducer.reset(used=False)  # each backward that is sent is a step
            self._share_buffers()

    def _share_buffers(self) -> None:
        """Give all ranks rank 0's (running statistics, say), as DDP does at the next forward."""
        module = self._module
        ignored = module.parameters_to_ignore
        buffers = [b for n, b in module.module.named_buffers() if n not in ignored]
        if not (module.broadcast_buffers and buffers):
            return

        def attempt() -> list[torch.Tensor]:
            handles = [
                collectives.broadcast_async(buffer, 0, f"ddp.{self._name}.buffer.{i}")
                for i, buffer in enumerate(buffers)
            ]
            return [handle.wait() for handle in handles]

        values = transaction().run(attempt)
        with torch.no_grad():
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)
