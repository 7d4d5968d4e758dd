"""From a step's gradients to those of all ranks, for every framework that Keras runs on.

Gradients travel in buckets, the last layers' first, since backward has those first. All buckets are
on their way before one is waited for. Where Keras traces its step once, this runs once too: what it
sends becomes a part of the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kolovod.core.ops import Sum
from kolovod.core.submission import WorldLike
from kolovod.core.transaction import transaction
from kolovod.core.world import current
from kolovod.gradients import exchange, plan
from kolovod.gradients.agreement import Agreement
from kolovod.gradients.alike import EVERY, Alike
from kolovod.gradients.compression import Key, dtype_name, element_bytes
from kolovod.gradients.plan import Groups
from kolovod.gradients.spec import ReduceSpec, is_elastic, sends
from kolovod.keras.handed_out import HandedOut


class GradientReducer:
    """Combines the gradients of one optimizer. ``is_idle``: hands them through instead."""

    def __init__(
        self,
        spec: ReduceSpec,
        groups: Groups,
        backend: Any,
        key: Callable[[Any], Hashable],
        scale_local_gradients: bool = True,
    ) -> None:
        """``backend``: the module for what Keras runs on. ``key``: what identifies a variable."""
        self.spec = spec
        self.groups = groups
        self.backend = backend
        self.key = key
        self.scale_local_gradients = scale_local_gradients
        self.is_idle = False
        self.local_sources: list[Any] = []
        """Variables, and layers, that may have no variables yet."""
        self.alike: Alike | None = None
        """Compares what ranks have; None: nothing is compared."""
        self.latest: Sequence[Any] = ()
        """The variables whose gradients are being applied."""
        self.handed_out = HandedOut(backend, key)
        self._agreement = Agreement(current, spec.process_set)
        self._label = ""
        """The number of this optimizer, the same on all ranks."""
        self._agreed: list[tuple[frozenset[tuple[str, int]], int]] = []
        """Processes that have agreed, and on which number, the last at the end."""
        self._plans: dict[tuple[int, ...], list[list[int]]] = {}

    def idle(self) -> GradientReducer:
        """Return one that hands gradients through, to take the place of this one."""
        other = GradientReducer(self.spec, self.groups, self.backend, self.key)
        other.is_idle = True
        return other

    def reduced(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the ranks' ``grads`` combined, in their order.

        None stands for no gradient. Where that can change from step to step (PyTorch), a gradient
        that some rank has is one that all have. Raises, in the first step, MismatchError on every
        rank when the ranks' variables differ. In an elastic job all of them are one step.
        """
        if self.is_idle:
            return list(grads)
        reduced: list[Any] = self.backend.run_alone(self._reduced_as_a_step, grads, variables)
        return reduced

    def _reduced_as_a_step(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if not transaction().is_elastic:
            return self._reduced(grads, variables)
        backend = self.backend
        own = [
            backend.dense(grad) if backend.is_sparse(grad) and self.spec.sparse_as_dense else grad
            for grad in grads
        ]
        reduced: list[Any] = backend.run_in_transaction(
            lambda each: self._reduced(each, variables), own, counts=True
        )
        return reduced

    def _reduced(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        world, factor, backend = self._members(), self.spec.scale, self.backend
        is_traced = backend.is_traced(grads)
        if world is None or not sends(world, is_traced=is_traced):
            return [g if g is None or factor == 1 else backend.scaled(g, factor) for g in grads]
        if is_traced:
            exchange.refuse_state(self.spec.compressor, "Keras's step (without run_eagerly=True)")
        is_local = self._meet(world, grads, variables)
        results = list(grads)
        for i, grad in enumerate(grads):
            if is_local[i] and grad is not None:
                share = self._share(world) if self.scale_local_gradients else 1.0
                results[i] = backend.scaled(grad, factor * share)
        varies = backend.varies
        sent = [
            i for i, grad in enumerate(grads) if not is_local[i] and (varies or grad is not None)
        ]
        compare = self._compare(
            world,
            [v for v, own in zip(variables, is_local, strict=True) if not own],
            [
                (variables[i], grads[i])
                for i in sent
                if grads[i] is not None and not backend.is_sparse(grads[i])
            ],
        )
        gathered = {i for i in sent if self._is_sparse(results[i])}
        waits = [(i, self._gather(i, results[i], world)) for i in sorted(gathered, reverse=True)]
        self._combine(results, variables, [i for i in sent if i not in gathered], world)
        for i, wait in waits:
            (results[i],) = wait()
        compare()
        return results

    def _compare(
        self, world: WorldLike, variables: Sequence[Any], dense: Sequence[tuple[Any, Any]]
    ) -> Callable[[], None]:
        """Send this rank's facts; return what looks at all ranks'. Not in elastic jobs.

        ``dense``: variables with their gradients that have all elements.
        """
        backend = self.backend
        numbers = None if self.alike is None or is_elastic() else self.alike.numbers()
        if numbers is None or not variables:
            return lambda: None
        assert self.alike is not None
        process_set = self.spec.process_set
        ranks = range(world.size) if process_set is None else process_set.ranks
        names = [name_of(variable) for variable in variables]
        looked_at = [dense[i] for i in self.alike.looked_at(dense)]
        of_those = [name_of(variable) for variable, _ in looked_at]
        tell = self.alike.teller(ranks, names, of_those, world.rank == 0)
        grads = [grad for _, grad in looked_at]
        mine = backend.facts(*numbers, variables, EVERY, grads, process_set)
        # A sum, to which ranks that have joined give zeros.
        spec = ReduceSpec(Sum, process_set=process_set)
        wait = backend.start(spec, "allreduce", self._name("alike"), [mine], ())

        def look() -> None:
            (everyone,) = wait()
            backend.tell_where(everyone, tell)

        return look

    def total(self, value: Any, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
        """The sum of the ranks' ``value``, which is about ``grads`` that are not sent yet."""
        if self.is_idle:
            return value
        return self.backend.run_alone(self._total_as_a_step, value, grads, variables)

    def _total_as_a_step(self, value: Any, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
        if not transaction().is_elastic:
            return self._total(value, grads, variables)

        def total(values: Sequence[Any]) -> list[Any]:
            return [self._total(values[0], grads, variables)]

        return self.backend.run_in_transaction(total, [value], counts=False)[0]

    def _total(self, value: Any, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
        world = self._members()
        if world is None or not sends(world, is_traced=self.backend.is_traced(grads)):
            return value
        self._meet(world, grads, variables)
        spec = ReduceSpec(Sum, process_set=self.spec.process_set)
        return self.backend.start(spec, "allreduce", self._name("about"), [value], ())()[0]

    def filled(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """``grads`` with zeros for None where that varies, to be added up over passes."""
        if self.is_idle or not self.backend.varies:
            return list(grads)
        return [
            self.backend.zeros(v) if g is None else g for g, v in zip(grads, variables, strict=True)
        ]

    def _share(self, world: WorldLike) -> Any:
        """Return the weight of one rank's gradient in an average."""
        return self.backend.share(world.size, self.spec.process_set)

    def _scaled(self, world: WorldLike, total: Any) -> Any:
        """Return ``total``, a sum of gathered gradients, scaled as the spec says."""
        return self.backend.scaled(total, self.spec.scale_of_sum(self._share(world)))

    def _is_sparse(self, grad: Any) -> bool:
        return not self.spec.sparse_as_dense and bool(self.backend.is_sparse(grad))

    def _name(self, what: object) -> str:
        return f"keras.{self._label}.{what}"

    def _gather(self, index: int, grad: Any, world: WorldLike) -> Callable[[], list[Any]]:
        """Send a gradient that has indices and values."""
        spec = replace(self.spec, compressor=self.backend.SPARSE)
        return self._start(spec, index, [(str(index), grad)], world)

    def _start(
        self,
        spec: ReduceSpec,
        index: int,
        grads: Sequence[tuple[str, Any]],
        world: WorldLike,
        further: Sequence[Any] = (),
    ) -> Callable[[], list[Any]]:
        """Send a bucket, which is called by ``index``."""
        submit, scaled = partial(self.backend.start, spec), partial(self._scaled, world)
        return exchange.start(spec, self._name(index), grads, submit, scaled, further)

    def _combine(
        self, results: list[Any], variables: Sequence[Any], sent: list[int], world: WorldLike
    ) -> None:
        """Put the combined gradients of ``sent`` in the place of this rank's, bucket by bucket."""
        spec, backend = self.spec, self.backend
        present = [results[i] is not None for i in sent] if backend.varies else []
        waiting: list[tuple[list[int], Callable[[], list[Any]]]] = []
        buckets = self._plan(variables, sent)
        if buckets and transaction().is_elastic and backend.is_traced(results):
            buckets = [[i for bucket in buckets for i in bucket]]  # to be repeated as a whole
        for indices in buckets:
            grads = [
                backend.zeros(variables[i]) if results[i] is None else results[i] for i in indices
            ]
            dense = [
                (Key(i, name_of(variables[i])), backend.dense(grad))
                for i, grad in zip(indices, grads, strict=True)
            ]
            flags = [backend.flags(present, dense[0][1])] if present and not waiting else []
            waiting.append((indices, self._start(spec, indices[0], dense, world, flags)))
        known: list[bool] = []
        for number, (indices, wait) in enumerate(waiting):
            combined = wait()
            if present and number == 0:
                known = (combined.pop() > 0).tolist()
            for i, grad in zip(indices, combined, strict=True):
                results[i] = grad
        if len(waiting) > 1:
            whole = backend.together([results[i] for i in sent], spec.process_set)
            for i, tensor in zip(sent, whole, strict=True):
                results[i] = tensor
        for i, is_known in zip(sent, known, strict=bool(known)):
            if not is_known:
                results[i] = None

    def _members(self) -> WorldLike | None:
        """Return the world of the ranks that communicate; None if this rank does not."""
        process_set = self.spec.process_set
        if process_set is None:
            return current()
        return process_set.membership() if process_set.included() else None

    def _local(self, variables: Sequence[Any]) -> list[bool]:
        """Return, for each of ``variables``, whether each rank has it of its own."""
        local = {
            self.key(variable)
            for source in self.local_sources
            for variable in getattr(source, "trainable_weights", [source])
        }
        return [self.key(variable) in local for variable in variables]

    def _meet(
        self, world: WorldLike, grads: Sequence[Any], variables: Sequence[Any]
    ) -> Sequence[bool]:
        """Make sure, once per world, that ranks have the same variables; return which are local.

        Ranks that have agreed in a world before may go on with the program that was traced there.
        So one of them that traces anew must not wait for the others; the number stays the same.
        In an elastic job ranks may be new, and never wait for others as they trace: there all call
        the program's operations alike, and it is the engine that compares what they send.
        """
        is_local = self._local(variables)
        agreement = self._agreement
        if is_elastic():
            self._plans.clear()
            if self.backend.is_traced(grads):
                self._label = "traced"
                return is_local
            if agreement.engine is not world.engine:
                agreement.reach(self._details(grads, variables, is_local))
        elif agreement.engine is not world.engine:
            self._plans.clear()
            self._agree_or_recall(grads, variables, is_local)
        self._label = str(agreement.number)
        return is_local

    def _agree_or_recall(
        self, grads: Sequence[Any], variables: Sequence[Any], is_local: Sequence[bool]
    ) -> None:
        """Agree, unless a program is traced by one of those that have agreed before."""
        agreement, members = self._agreement, self._processes()
        known = [number for processes, number in self._agreed if members <= processes]
        if not (known and self.backend.is_traced(grads)):
            agreement.reach(self._details(grads, variables, is_local))
            if not known:
                self._agreed.append((members, agreement.number))
        if known:
            agreement.number = known[-1]

    def _processes(self) -> frozenset[tuple[str, int]]:
        """Return the processes that communicate, known in every world: by the launcher's ranks."""
        world, process_set = current(), self.spec.process_set
        ranks = range(world.size) if process_set is None else process_set.ranks
        return frozenset((world.environment.rendezvous, world.members[rank]) for rank in ranks)

    def _details(
        self, grads: Sequence[Any], variables: Sequence[Any], is_local: Sequence[bool]
    ) -> list[tuple[str, Any]]:
        """Return the facts that must be the same on all ranks."""
        mine = []
        for grad, variable, local in zip(grads, variables, is_local, strict=True):
            # Without the layer's name, which counts how many the process has made.
            name = str(variable.name).split("/")[-1].removesuffix(":0")
            lacks = grad is None and not self.backend.varies
            detail = [tuple(variable.shape), dtype_name(variable)]
            mine.append((name, (*detail, *["local"] * local, *["without gradient"] * lacks)))
        return mine

    def _plan(self, variables: Sequence[Any], sent: list[int]) -> list[list[int]]:
        places = tuple(sent)
        if places not in self._plans:
            self.groups.check_known(variables)
            groups = self.groups.among({i: variables[i] for i in sent})
            self._plans[places] = plan.cut({i: _bytes(variables[i]) for i in sent[::-1]}, groups)
        return self._plans[places]


def name_of(variable: Any) -> str:
    """Return the path of ``variable``, or in Keras 2 its name."""
    return str(getattr(variable, "path", None) or variable.name).removesuffix(":0")


def _bytes(variable: Any) -> int:
    count: int = math.prod(variable.shape)
    return count * element_bytes(dtype_name(variable))
