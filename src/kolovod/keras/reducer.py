"""From a step's gradients to those of all ranks, for every framework that Keras runs on.

Gradients travel in groups of about 1 MiB, the last layers' first, since backward has those first.
All groups are on their way before one is waited for. Where Keras traces its step once, this runs
once too: what it sends becomes a part of the program.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

from kolovod import _native
from kolovod.core.ops import Average, Sum
from kolovod.core.process_sets import ProcessSet
from kolovod.core.submission import WorldLike
from kolovod.core.world import current
from kolovod.errors import InvalidArgumentError
from kolovod.gradients.agreement import SAME_MODEL, agree_on_optimizer
from kolovod.gradients.compression import Compression, Compressor, dtype_name

_BUCKET_BYTES = 1 << 20


class Way(NamedTuple):
    """How gradients travel."""

    compression: type[Compressor] = Compression.none
    op: int = Average
    predivide: float = 1.0
    factor: float = 1.0
    """What the combined gradients are multiplied with: for sums over several passes."""
    groups: int | Sequence[Sequence[Any]] | None = None
    process_set: ProcessSet | None = None
    scale_local_gradients: bool = True
    sparse_as_dense: bool = False


class HandedOut(NamedTuple):
    """Combined gradients that whoever computes and applies them has got."""

    place: Any
    """Where they are of use: see the backend's ``place``."""
    note: Any


class GradientReducer:
    """Combines the gradients of one optimizer. ``is_idle``: hands them through instead."""

    def __init__(self, way: Way, backend: Any, key: Callable[[Any], Hashable]) -> None:
        """``backend``: the module for what Keras runs on. ``key``: what identifies a variable."""
        self.way = way
        self.is_idle = False
        self.backend = backend
        self.local_sources: list[Any] = []
        """Variables, and layers, that may have no variables yet."""
        self.latest: Sequence[Any] = ()
        """The variables whose gradients are being applied."""
        self._handed_out: dict[int, tuple[weakref.ref[Any], HandedOut]] = {}
        """By ``id`` of a gradient, as long as that exists."""
        self._not_applied: dict[Hashable, HandedOut] = {}
        """By variable: the last that was handed out and has not been applied, or only changed."""
        self._key = key
        self._number = 0
        self._engine: _native.Engine | None = None  # of the world whose ranks have agreed
        self._agreed: list[tuple[frozenset[tuple[str, int]], int]] = []
        """Processes that have agreed, and on which number, the last at the end."""
        self._plans: dict[tuple[int, ...], list[list[int]]] = {}

    def reduced(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """What the ranks' ``grads`` make together, in their order.

        None stands for no gradient. Where that can change from step to step (PyTorch), a gradient
        that some rank has is one that all have. Raises, in the first step, MismatchError on every
        rank when the ranks' variables differ.
        """
        if self.is_idle:
            return list(grads)
        world, factor = self._members(), self.way.factor
        if world is None or world.size == 1:
            return [
                g if g is None or factor == 1 else self.backend.scaled(g, factor) for g in grads
            ]
        local = self._local()
        is_local = [self._key(variable) in local for variable in variables]
        if self._engine is not world.engine:
            self._meet(world, grads, variables, is_local)
        results = list(grads)
        for i, grad in enumerate(grads):
            if is_local[i] and grad is not None:
                share = self._share(world) if self.way.scale_local_gradients else 1.0
                results[i] = self.backend.scaled(grad, factor * share)
        varies = self.backend.varies
        sent = [
            i for i, grad in enumerate(grads) if not is_local[i] and (varies or grad is not None)
        ]
        gathered = {i for i in sent if self._is_sparse(results[i])}
        waits = [
            (i, self.backend.gather(results[i], self._name(i), self._share(world), self.way))
            for i in sorted(gathered, reverse=True)
        ]
        self._combine(results, variables, [i for i in sent if i not in gathered])
        for i, wait in waits:
            results[i] = wait()
        return results

    def hand_out(self, pairs: Sequence[tuple[Any, Any]], note: Any) -> None:
        """``pairs`` of combined gradients and variables are about to be returned."""
        out, known = HandedOut(self.backend.place(), note), self._handed_out

        for grad, variable in pairs:
            self._not_applied[self._key(variable)] = out
            if grad is not None:
                number = id(grad)
                known[number] = weakref.ref(grad, partial(_forget, known, number)), out

    def take_back(self, pairs: Sequence[tuple[Any, Any]]) -> list[HandedOut | None]:
        """Which of ``pairs``, of gradients and variables, to be applied now, were handed out.

        First, the very gradients, whenever and however often they are applied. Then what comes for
        a variable whose gradient was handed out last, and has not been applied: so many things
        can be done to a gradient that nothing tells a changed one from another.
        """
        found = []
        for grad, variable in pairs:
            key = self._key(variable)
            _, out = self._handed_out.get(id(grad), (None, None))
            waiting = self._not_applied.get(key)
            if out is None and waiting is not None and self.backend.is_within(waiting.place):
                out = waiting
            if out is None or out is waiting:
                self._not_applied.pop(key, None)
            found.append(out)
        return found

    def total(self, value: Any, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
        """The sum of the ranks' ``value``, which is about ``grads`` that are not sent yet."""
        world = None if self.is_idle else self._members()
        if world is None or world.size == 1:
            return value
        if self._engine is not world.engine:
            local = self._local()
            self._meet(world, grads, variables, [self._key(v) in local for v in variables])
        name, process_set = f"keras.{self._number}.about", self.way.process_set
        return self.backend.start([value], name, Sum, (1.0, 1.0), process_set)()[0]

    def filled(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """``grads`` with zeros for None where that varies, to be added up over passes."""
        if self.is_idle or not self.backend.varies:
            return list(grads)
        return [
            self.backend.zeros(v) if g is None else g for g, v in zip(grads, variables, strict=True)
        ]

    def _share(self, world: WorldLike) -> Any:
        """What one rank's gradient counts in an average."""
        return self.backend.share(world.size, self.way.process_set)

    def _is_sparse(self, grad: Any) -> bool:
        return not self.way.sparse_as_dense and bool(self.backend.is_sparse(grad))

    def _name(self, index: int) -> str:
        return f"keras.{self._number}.{index}"

    def _combine(self, results: list[Any], variables: Sequence[Any], sent: list[int]) -> None:
        way, backend = self.way, self.backend
        scales = 1.0 / way.predivide, way.predivide * way.factor
        present = [results[i] is not None for i in sent] if backend.varies else []
        waiting: list[tuple[list[int], list[Any], Callable[[], list[Any]]]] = []
        for indices in self._plan(variables, sent):
            tensors, contexts = [], []
            for i in indices:
                grad = backend.zeros(variables[i]) if results[i] is None else results[i]
                small, context = way.compression.compress(backend.dense(grad))
                tensors.append(small)
                contexts.append(context)
            if present and not waiting:
                tensors.append(backend.flags(present, tensors[0]))
            name = self._name(indices[0])
            wait = backend.start(tensors, name, way.op, scales, way.process_set)
            waiting.append((indices, contexts, wait))
        known: list[bool] = []
        for indices, contexts, wait in waiting:
            reduced = wait()
            if present and not known:
                known = (reduced.pop() > 0).tolist()
            for i, context, small in zip(indices, contexts, reduced, strict=True):
                results[i] = way.compression.decompress(small, context)
        if len(waiting) > 1:
            whole = backend.together([results[i] for i in sent], way.process_set)
            for i, tensor in zip(sent, whole, strict=True):
                results[i] = tensor
        for i, is_known in zip(sent, known, strict=bool(known)):
            if not is_known:
                results[i] = None

    def _members(self) -> WorldLike | None:
        """Where this rank stands among those that communicate; None if it does not."""
        process_set = self.way.process_set
        if process_set is None:
            return current()
        return process_set.membership() if process_set.included() else None

    def _local(self) -> set[Hashable]:
        return {
            self._key(variable)
            for source in self.local_sources
            for variable in getattr(source, "trainable_weights", [source])
        }

    def _meet(
        self,
        world: WorldLike,
        grads: Sequence[Any],
        variables: Sequence[Any],
        is_local: Sequence[bool],
    ) -> None:
        """Once per world: have all ranks the same variables? They number the optimizer, too.

        Ranks that have agreed in a world before may go on with the program that was traced there.
        So one of them that traces anew must not wait for the others; the number stays the same.
        """
        self._plans.clear()
        members = self._processes()
        known = [number for processes, number in self._agreed if members <= processes]
        if known and self.backend.is_traced(grads):
            self._number = known[-1]
            return
        number = self._agree(grads, variables, is_local)
        if not known:
            self._agreed.append((members, number))
        self._number = known[-1] if known else number
        self._engine = world.engine

    def _processes(self) -> frozenset[tuple[str, int]]:
        """Those that communicate, as they are known in every world: by the launcher's ranks."""
        world, process_set = current(), self.way.process_set
        ranks = range(world.size) if process_set is None else process_set.ranks
        return frozenset((world.environment.rendezvous, world.members[rank]) for rank in ranks)

    def _agree(
        self, grads: Sequence[Any], variables: Sequence[Any], is_local: Sequence[bool]
    ) -> int:
        mine = []
        for grad, variable, local in zip(grads, variables, is_local, strict=True):
            # Without the layer's name, which counts how many the process has made.
            name = str(variable.name).split("/")[-1].removesuffix(":0")
            lacks = grad is None and not self.backend.varies
            detail = [tuple(variable.shape), dtype_name(variable)]
            mine.append((name, (*detail, *["local"] * local, *["without gradient"] * lacks)))
        return agree_on_optimizer(current, mine, SAME_MODEL, [], self.way.process_set)[0]

    def _plan(self, variables: Sequence[Any], sent: list[int]) -> list[list[int]]:
        places = tuple(sent)
        if places not in self._plans:
            self._plans[places] = self._cut(variables, sent)
        return self._plans[places]

    def _cut(self, variables: Sequence[Any], sent: list[int]) -> list[list[int]]:
        """What is sent together: the user's groups, else neighbours by size, the last first."""
        groups = self.way.groups
        if isinstance(groups, int) and groups > 0:
            count = min(groups, len(sent))
            parts: list[list[int]] = [[] for _ in range(count)]
            for place, i in enumerate(sent):
                parts[place * count // len(sent)].append(i)
            return parts[::-1]
        buckets: list[list[int]] = []
        by_group: dict[int, list[int]] = {}
        group_of = self._groups(groups, variables) if isinstance(groups, list | tuple) else {}
        filled = _BUCKET_BYTES
        for i in reversed(sent):
            group = group_of.get(self._key(variables[i]))
            if group is not None:
                if group not in by_group:
                    by_group[group] = []
                    buckets.append(by_group[group])
                by_group[group].append(i)
                continue
            size = math.prod(variables[i].shape) * _bytes_of(dtype_name(variables[i]))
            if filled + size > _BUCKET_BYTES:
                neighbours: list[int] = []
                buckets.append(neighbours)
                filled = 0
            neighbours.append(i)
            filled += size
        return buckets

    def _groups(
        self, groups: Sequence[Sequence[Any]], variables: Sequence[Any]
    ) -> dict[Hashable, int]:
        known = {self._key(variable) for variable in variables}
        found: dict[Hashable, int] = {}
        for number, group in enumerate(groups):
            for variable in group:
                key = self._key(variable)
                if key not in known:
                    raise InvalidArgumentError(
                        f"groups[{number}] contains {variable!r}, which the optimizer does not "
                        "change: give lists of the model's trainable variables"
                    )
                if found.setdefault(key, number) != number:
                    raise InvalidArgumentError(
                        f"{variable!r} is in groups {found[key]} and {number}: give it once"
                    )
        return found


def _forget(known: dict[int, Any], number: int, _: object) -> None:
    known.pop(number, None)


def _bytes_of(dtype: str) -> int:
    """Of an element."""
    return {"float64": 8, "float16": 2, "bfloat16": 2}.get(dtype, 4)
