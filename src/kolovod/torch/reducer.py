"""Averaging gradients while backward is still computing others.

The trip of one gradient: autograd accumulates it and calls our hook [1] (``hooks.py``); the hook
that completes a bucket submits all of it to the engine as one group [2] (``sender.py``) and
returns; ``synchronize`` submits what no hook has submitted [3], waits for everything [4]
(``gradients/in_flight.py``), and puts the results where the optimizer looks for them [5]
(``results.py``).

Nothing is sent for parameters that the ranks have not agreed upon: a name that is missing elsewhere
would be waited for forever. So the first ``synchronize`` in a world sends everything by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kolovod.core import spans
from kolovod.core.ops import Max, Sum
from kolovod.elastic import steps
from kolovod.errors import CollectiveAbortedError, InvalidArgumentError, MismatchError
from kolovod.gradients.agreement import Agreement
from kolovod.gradients.in_flight import InFlight
from kolovod.gradients.spec import ReduceSpec
from kolovod.torch import clipping, results, sparse
from kolovod.torch.arrangement import Arrangement
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.buckets import Bucket, Buckets, Cargo, Item, Sends, over
from kolovod.torch.comm_hooks import Hook, HookSender, check_hook
from kolovod.torch.copied_shards import CopiedShards
from kolovod.torch.countdown import Countdown
from kolovod.torch.hooks import Hooks
from kolovod.torch.parameters import Named, Parameters
from kolovod.torch.parts import whole_of
from kolovod.torch.sender import Sender
from kolovod.torch.shards import ShardSender

# What a rank says of itself in every trip; each rank sees what all ranks together have said.
_STEPS, _DROPS, _FAILED, _AGAIN, _ANEW = range(5)
_MARKS = 5


class GradientReducer:
    """Keeps the gradients of named parameters equal on all ranks. One per optimizer."""

    def __init__(
        self,
        named: Iterable[Named],
        spec: ReduceSpec,
        passes: int,
        verbs: TorchCollectives,
        groups: Mapping[int, int],
    ) -> None:
        """``passes``: backward passes that are summed locally before a gradient is sent.

        ``verbs``: among the members of ``spec.process_set``; other ranks' gradients stay as they
        are. ``groups``: the number of a parameter's group, by its ``id``; groups travel whole.
        """
        self.synchronized = False
        """Gradients were equal everywhere since the last step."""
        self.skips = False
        """Gradients are used as they are."""
        self.verbs = verbs
        self.spec = spec
        self.parameters = Parameters()
        self.countdown = Countdown(passes)
        self.buckets = Buckets(self.parameters, self.countdown, groups)
        self.in_flight = InFlight(over)
        sender = Sender(self.parameters, spec, verbs, self.in_flight)
        self.sender: Sends = sender
        self.hooks = Hooks(self.parameters, self.countdown, self.buckets, self.sender.device)
        self.agreement = Agreement(verbs.world, spec.process_set)
        self.arrangement = Arrangement(
            self.parameters, self.buckets, spec, verbs, self.agreement, sender.use
        )
        self._used = False  # there was a step, and no zero_grad since
        if spec.is_member and not spec.comes_later:
            verbs.world()  # raises where there is none
        self.add(named)
        clipping.watch(self)
        self.follow_world()
        steps.forgets(self)

    def add(self, named: Iterable[Named]) -> None:
        """Take more parameters; those that want no gradient are left alone until they do.

        Name None: not known, which is an error as soon as the parameter wants a gradient.
        """
        self.parameters.add(named)
        self._thaw()

    def follow_world(self) -> bool:
        """Whether there are other ranks now; hooks are on the parameters if so.

        Worlds grow and shrink, so this is asked in every step. What is left of the gradients that
        hooks have counted when the last of the others went is this rank's own.
        """
        hooks = self.hooks
        if not self.spec.has_others(self.verbs.world, without_world=hooks.are_on):
            if hooks.are_on:
                hooks.take_off()
                self.in_flight.discard()
                self._reset()
            return False
        if not hooks.are_on:
            hooks.put_on(range(len(self.parameters)), self._complete)
            clipping.install()
        return True

    def enter_world(self) -> None:
        """See clipping.Averaging. Whether a process set has come along, the next step finds out."""
        if self.spec.process_set is None:
            self.follow_world()

    @property
    def passes(self) -> int:
        """Backward passes that are summed before a gradient is sent."""
        return self.countdown.passes

    def use_shards(self, check_new_world: Callable[[], None]) -> CopiedShards:
        """Let each rank have a part of the gradients only; see ``ShardSender``."""
        self.buckets.are_of_one_kind = True
        self.sender = sender = CopiedShards(
            self.parameters, self.spec, self.verbs, self.in_flight, check_new_world
        )
        return sender

    def use_hook(self, state: Any, hook: Hook) -> None:
        """Let ``hook`` combine gradients; see ``Distributed.register_comm_hook``."""
        has_begun = self.buckets.is_planned or self.countdown.begun
        check_hook(hook, self.spec, has_begun or not isinstance(self.sender, Sender))
        self.buckets.are_of_one_kind = True
        self.sender = HookSender(
            state, hook, self.parameters, self.buckets, self.verbs, self.in_flight
        )

    def set_passes(self, passes: int) -> None:
        """Change ``passes``, between steps."""
        self.countdown.passes = passes
        self._reset()

    @property
    def pending(self) -> bool:
        """Whether backward has finished gradients that ``synchronize`` has not seen."""
        return any(bucket.begun() for bucket in self.buckets.all)

    @property
    def settled(self) -> bool:
        """Whether all gradients are averaged: since then there was no backward, and no step."""
        return self.synchronized and not self.countdown.begun

    @property
    def sending(self) -> bool:
        """Whether gradients may be on their way, so that their values are not to be used."""
        return any(bucket.missing == 0 for bucket in self.buckets.all)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Within this context backward adds up gradients here, and no pass is counted."""
        try:
            with self.countdown.hold():
                yield
        finally:
            self.synchronized = self._used = False

    def owns(self, ids: set[int]) -> bool:
        """See clipping.Averaging."""
        return any(id(whole_of(parameter)) in ids for parameter in self.parameters.tensors)

    def settle(self) -> None:
        """See clipping.Averaging.

        Whatever was accumulated is averaged, also when passes are missing, since it may be all that
        this rank has. More passes may follow, and are averaged with it; but not when the ranks'
        gradients are summed, for that would count the first ones several times.
        """
        if self.skips or self.settled or self.countdown.is_held or self._is_spent():
            return
        if self.pending or self.countdown.passes == 1 or self.spec.op != Sum:
            self.synchronize()

    @property
    def shards(self) -> ShardSender | None:
        """See clipping.Averaging."""
        sender = self.sender
        if isinstance(sender, ShardSender) and (self.hooks.are_on or sender.in_parts):
            return sender
        return None

    def _is_spent(self) -> bool:
        """Whether the gradients are those that a step has used: looked at, maybe by one rank only.

        Thrown away, they are those of a rank without a batch, which the others wait for.
        """
        if not self._used or self.countdown.begun:
            return False
        return any(parameter.grad is not None for parameter in self.parameters.tensors)

    @spans.shown(spans.WAIT_FOR_GRADIENTS)
    def synchronize(self) -> None:
        """Return when every gradient is equal on all ranks; see ``Distributed.synchronize``."""
        if not self.follow_world():
            if self.spec.steps_apart:
                steps.exactly(lambda: None, counts=True)
                self.synchronized = True
            return
        if not (self.parameters or self.parameters.frozen):
            return
        problems = self._thaw()
        if self.arrangement.choice is not None:
            self.arrangement.choice.backward_ends()
        try:
            stores = steps.exactly(
                lambda: self._attempt(list(problems)),
                counts=True,
                is_repeatable=steps.keeps_gradients(),
            )
            for store in stores:
                store()
        finally:
            self._reset()
        self.synchronized = True

    def _attempt(self, problems: list[InvalidArgumentError]) -> list[Callable[[], None]]:
        """Send all, and wait for it; what is returned puts the results in their places.

        In an elastic job gradients are as they were when a rank is lost meanwhile.
        """
        if not self.follow_world():  # no other rank is left
            return []
        try:
            self._meet()
            stores = self._trip(self.buckets.agreed(), problems)
            return [*self.sender.complete(), *stores]
        except CollectiveAbortedError:
            self.in_flight.discard()
            self._reset()
            raise

    def drop(self) -> None:
        """Forget the gradients. What was sent comes back first, on all ranks alike."""
        if not self.hooks.are_on:
            return
        try:
            if self.pending and self.agreement.is_current():
                self._travel(self.buckets.agreed(), _DROPS, [])
            elif self.pending:
                self.in_flight.discard()
        except CollectiveAbortedError:
            if not steps.keeps_gradients():
                raise
            self.in_flight.discard()  # the next step will meet the survivors
        finally:
            self.reset(used=False)
        self._thaw()

    def reset(self, *, used: bool) -> None:
        """The optimizer has used the gradients, or zeroed them: count passes anew."""
        if self.hooks.are_on:  # else nothing was counted
            self._reset()
        self.synchronized, self._used = False, used and self.hooks.are_on

    def forget_step(self) -> None:
        """Of gradients that are computed again nothing is left, sent or not."""
        self.in_flight.discard()
        self.reset(used=False)
        if isinstance(self.sender, ShardSender):
            self.sender.zero_grad()
        for parameter in self.parameters.tensors:
            parameter.grad = None

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        self.hooks.take_off(for_good=True)

    def _reset(self) -> None:
        self.countdown.reset()
        self.buckets.reset()

    def _thaw(self) -> list[InvalidArgumentError]:
        """Take the parameters that want a gradient by now. Returns what is wrong with some."""
        thawed = self.parameters.thaw()
        if thawed:
            self.buckets.extend(thawed)
            if self.hooks.are_on:
                self.hooks.put_on(thawed, self._complete)
        return self.parameters.without_name()

    def _complete(self, bucket: Bucket) -> None:
        """Backward has finished a bucket: send it, if all ranks have agreed upon it."""
        is_known = self.verbs.world().engine is self.agreement.engine
        if is_known and bucket.agreed:
            self._send(bucket)
            return
        if not is_known:
            self.in_flight.discard()
        self.buckets.note(bucket)

    def _send(self, bucket: Bucket) -> None:
        """From a hook."""
        if self.arrangement.choice is not None:
            self.arrangement.choice.bucket_leaves()
        try:
            self._submit(bucket)
        except CollectiveAbortedError:
            if not steps.keeps_gradients():
                raise  # else in an elastic job backward goes on, so that all gradients are there

    def _submit(
        self,
        bucket: Bucket,
        problems: list[InvalidArgumentError] | None = None,
        *,
        blank: bool = False,
    ) -> None:
        if not steps.counting(self.verbs.world())[0]:
            self._zero(bucket)
        self.sender.submit(bucket, problems, blank=blank)

    @torch.no_grad()
    def _zero(self, bucket: Bucket) -> None:
        for index in bucket.indices:
            grad = self.parameters.tensors[index].grad
            if grad is not None:
                grad.zero_()

    def _meet(self) -> None:
        """Find out, once per world, whether all ranks have the same parameters.

        Then the buckets are cut in the order in which backward makes gradients on the first rank,
        in whatever order they were noted: a bucket leaves when the last of its gradients is there.
        """
        if self.agreement.is_current():
            return
        self.in_flight.discard()
        everyone = range(len(self.parameters))
        details = [*self._details(everyone), *self.arrangement.details()]
        dims = self.agreement.reach(details, self._sparse_dims())
        self.arrangement.make([*self.buckets.order], dims)
        self.sender.begin_world()

    def _details(self, indices: Sequence[int]) -> list[tuple[str, Any]]:
        return [*self.parameters.details(indices), *self.sender.details(indices)]

    def _sparse_dims(self) -> list[int]:
        """What this rank knows; what ranks of an earlier world have agreed upon stays sparse."""
        dims = [sparse.sparse_dim_of(p.grad, self.spec) for p in self.parameters.tensors]
        for index, dim in self.buckets.sparse_dims().items():
            dims[index] = dim
        return dims

    def _trip(
        self, buckets: Sequence[Bucket], problems: list[InvalidArgumentError]
    ) -> list[Callable[[], None]]:
        """Average the gradients of ``buckets``, and then those that need a second trip.

        What is returned puts the results in their places.
        """
        marks, done, stores, redo = self._travel(buckets, _STEPS, problems)
        if problems:
            raise problems[0]
        if marks[_FAILED]:
            raise InvalidArgumentError(
                "another rank has a gradient that cannot be averaged; its own error says which"
            )
        if marks[_DROPS]:
            raise MismatchError(
                "another rank called optimizer.zero_grad() where this one averages its gradients: "
                "every rank must step, or skip the step, alike"
            )
        if redo:
            stores.clear()
        else:
            _, counting = steps.counting(self.verbs.world())
            scale = self.spec.scale_of_sum(1.0 / counting)
            used = marks[_MARKS:]
            stores.append(partial(self.sender.store, done, lambda i: used[i] != 0, scale))
        if marks[_AGAIN]:
            stores += self._trip(self._agree_further(redo), [])
        elif marks[_ANEW]:
            self.arrangement.make_anew()
        return stores

    def _agree_further(self, redo: bool) -> Sequence[Bucket]:
        """Agree upon what is new on this rank; the buckets that need a trip of their own."""
        new = {index for bucket in self.buckets.fresh() for index in bucket.indices}
        again: list[tuple[str, Any]] = [("gradients", "thrown away and computed again")] * redo
        dims = self.agreement.extend(
            [*again, *self._details(sorted(new))],
            "every rank must add, thaw and zero the same parameters",
            self._sparse_dims(),
        )
        self.buckets.single_out([dim if index in new else 0 for index, dim in enumerate(dims)])
        fresh = self.buckets.fresh()
        self.buckets.accept(fresh, self.agreement.number)
        self._reset()
        return self.buckets.all if redo else fresh

    def _travel(
        self, buckets: Sequence[Bucket], purpose: int, problems: list[InvalidArgumentError]
    ) -> tuple[bytearray, list[Item], list[Callable[[], None]], bool]:
        """Send what no hook has sent [3], and wait for all [4].

        Returns all ranks' marks, the items, what is left to do for their results to be there, and
        whether to do it again, since this rank threw away what it had sent. After the marks there
        is a byte per parameter: is it used?
        """
        redo = False
        if purpose == _STEPS:
            redo, problem = results.looked_at(self.parameters, self.buckets, self.countdown)
            problems += [] if problem is None else [problem]
        for bucket in buckets:
            if not bucket.is_sent:
                self._submit(bucket, problems, blank=redo or purpose == _DROPS)
        marks = bytearray(_MARKS) + b"\1" * sum(len(b.indices) for b in self.buckets.agreed())
        for bucket in buckets:
            for index in bucket.unused:  # here, but maybe not elsewhere: zeros were sent
                marks[_MARKS + index] = 0
        marks[purpose] = 1
        if purpose == _STEPS:
            marks[_FAILED] = bool(problems)
            marks[_AGAIN] = redo or bool(self.buckets.fresh())
            marks[_ANEW] = not self.sender.keeps_buckets and self.arrangement.is_to_be_made_anew()
        view = torch.frombuffer(marks, dtype=torch.uint8)
        handle = self.verbs.allreduce_async_(view, f"used.{self.agreement.number}", Max)
        done, later = self.arrived()
        handle.wait()
        return marks, done, later, redo

    def arrived(self) -> tuple[list[Item], list[Callable[[], None]]]:
        """Wait for all that is on its way [4]; what is left to do for the results to be there."""
        done: list[Item] = []
        later: list[Callable[[], None]] = []

        def landed(cargo: Cargo) -> None:
            for host, tensors in cargo.staged:  # back to the GPU, on the current stream
                unpack = partial(self.sender.device.unpack, host, tensors)
                if not steps.keeps_gradients():
                    unpack()
                else:  # where the gradient is still this rank's own
                    later.append(unpack)
            done.extend(cargo.items)

        self.in_flight.wait_for_all(landed)
        return done, later
