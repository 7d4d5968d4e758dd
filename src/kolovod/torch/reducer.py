"""Averaging gradients while backward is still computing others.

The trip of one gradient: autograd accumulates it and calls our hook [1] (``hooks.py``); the hook
that completes a bucket submits all of it to the engine as one group [2] (``sender.py``) and
returns; when backward ends (``passes.py``), the ranks' **round** submits what no hook has submitted
[3], waits for everything [4] (``gradients/in_flight.py``), and puts the results where the optimizer
looks for them [5] (``results.py``). So gradients are final when ``backward()`` returns.

Nothing is sent for parameters that the ranks have not agreed upon: a name that is missing elsewhere
would be waited for forever. So the first round in a world sends everything by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kolovod.core.ops import Sum
from kolovod.core.transaction import forgets, transaction
from kolovod.errors import CollectiveAbortedError, InvalidArgumentError
from kolovod.gradients.agreement import Agreement
from kolovod.gradients.in_flight import InFlight
from kolovod.gradients.spec import ReduceSpec
from kolovod.private_apis.torch import uncompiled
from kolovod.torch import clipping, results, rounds, sparse
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.bucket_settings import BucketSettings
from kolovod.torch.buckets import Bucket, Buckets, InFlightBucket, Item, Sends, over
from kolovod.torch.comm_hooks import Hook, HookSender, check_hook
from kolovod.torch.copied_shards import CopiedShards
from kolovod.torch.countdown import Countdown
from kolovod.torch.hooks import Hooks
from kolovod.torch.parameters import Named, Parameters
from kolovod.torch.parts import whole_of
from kolovod.torch.passes import Passes
from kolovod.torch.rounds import Part
from kolovod.torch.sender import Sender
from kolovod.torch.sentinel import Sentinel
from kolovod.torch.shards import ShardSender
from kolovod.torch.step_state import (
    AGAIN,
    ALL,
    ANEW,
    DROPS,
    FACTS,
    FAILED,
    MARKS,
    PASSES,
    STEPS,
    StepState,
)


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
        self.skips = False
        """Gradients are used as they are."""
        self.verbs = verbs
        self.spec = spec
        self.parameters = Parameters()
        self.countdown = Countdown(passes)
        self.buckets = Buckets(self.parameters, self.countdown, groups)
        self.state = StepState(self.parameters, self.countdown, spec.op)
        self.in_flight = InFlight(over)
        sender = Sender(self.parameters, spec, verbs, self.in_flight)
        self.sender: Sends = sender
        self.hooks = Hooks(
            self.parameters,
            self.countdown,
            self.buckets,
            self.sender.device,
            Passes(self),
        )
        self.agreement = Agreement(verbs.world, spec.process_set)
        self.bucket_settings = BucketSettings(
            self.parameters, self.buckets, spec, verbs, self.agreement, sender.use, sender.device
        )
        self.take_up: Callable[[], Callable[[], None] | None] = lambda: None
        """Gives what adds parameters that the optimizer has got since."""
        self.sentinel: Sentinel | None = None  # see ``watch``
        self._used = False  # there was a step, and no zero_grad since
        if spec.is_member and not spec.comes_later:
            verbs.world()  # raises where there is none
        self.add(named)
        rounds.enlist(self)
        self.follow_world()
        forgets(self)

    def add(self, named: Iterable[Named]) -> None:
        """Take more parameters; those that want no gradient are left alone until they do.

        Name None: not known, which is an error as soon as the parameter wants a gradient.
        """
        self.parameters.add(named)
        self._thaw()

    def follow_world(self) -> bool:
        """Return whether there are other ranks now; hooks are on the parameters if so.

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
        """Look whether there are other ranks now; of a process set the next step finds that out."""
        if self.spec.process_set is None:
            self.follow_world()

    @property
    def passes(self) -> int:
        """Backward passes that are summed before a gradient is sent."""
        return self.countdown.passes

    def watch(self, sentinel: Sentinel) -> None:
        """Have ``sentinel`` look at what ranks have, and at gradients before they are sent."""
        self.sentinel = sentinel
        if isinstance(self.sender, Sender):
            self.sender.check = sentinel.check

    def use_shards(self, check_new_world: Callable[[], None], wholes: set[int]) -> CopiedShards:
        """Let each rank have a part of the gradients only; see ``ShardSender``."""
        self.buckets.are_of_one_kind = True
        self.sender = sender = CopiedShards(
            self.parameters, self.spec, self.verbs, self.in_flight, check_new_world, wholes
        )
        self.buckets.together = sender.together
        self.hooks.before = sender.before_backward
        if self.hooks.are_on:
            self.hooks.take_off()
            self.follow_world()
        if self.sentinel is not None:
            self.sentinel.compares_weights = False  # parameters may be on their way
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
        """True if backward has finished gradients that ``synchronize`` has not seen."""
        return any(bucket.begun() for bucket in self.buckets.all)

    @property
    def settled(self) -> bool:
        """True if all gradients are averaged: since then there was no backward, and no step."""
        return not self._open()

    @property
    def sending(self) -> bool:
        """True if gradients are on their way, so that their values are not to be used."""
        return any(bucket.is_sent for bucket in self.buckets.all)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Within this context backward adds up gradients here, and no pass is counted."""
        try:
            with self.countdown.hold():
                yield
        finally:
            self._used, self.state.has_held = False, True

    def owns(self, ids: set[int]) -> bool:
        """Return whether one of its parameters has one of these values of ``id``."""
        return any(id(whole_of(parameter)) in ids for parameter in self.parameters.tensors)

    def settle(self) -> None:
        """Average the gradients before they are clipped, unless that is done or not wanted.

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
        """The sender through which each rank has a part of the gradients; None where it has all."""
        sender = self.sender
        if isinstance(sender, ShardSender) and (self.hooks.are_on or sender.in_parts):
            return sender
        return None

    def _is_spent(self) -> bool:
        """Return whether the gradients are those that a step has used, still there to be looked at.

        Maybe only one rank looks at them. Where they were thrown away, they are those of a rank
        without a batch, which the others wait for.
        """
        if not self._used or self.countdown.begun:
            return False
        return any(parameter.grad is not None for parameter in self.parameters.tensors)

    def synchronize(self) -> None:
        """Return when every gradient is equal on all ranks; see ``Distributed.synchronize``."""
        if not self.follow_world():
            if self.spec.steps_apart:
                transaction().run(lambda: None, counts=True)
                self.state.close()
            return
        if not (self.parameters or self.parameters.frozen):
            return
        while not self.settled and self.hooks.are_on:
            rounds.combine({self._open()[0]: STEPS})

    def _open(self) -> list[GradientReducer]:
        """Return reducers that still have to combine: this one and those that act in its place."""
        found = [] if self.state.are_over else [self]
        others = dict.fromkeys(self.parameters.lent.values())
        return [*found, *(o for o in others if not (o.state.are_over or o._is_spent()))]

    def passes_ended(self) -> None:
        """Note that a backward pass is over that has completed gradients."""
        self.hooks.passes.ended()

    def is_to_be_combined(self) -> bool:
        """Return whether gradients are combined when a backward pass ends, and not in ``step``."""
        is_done = self.spec.steps_apart or not self.countdown.begun
        return not is_done and self.hooks.are_on and self.follow_world()

    @property
    def is_closed(self) -> bool:
        """True if nobody uses it any more."""
        return self.hooks.is_over

    def is_in(self, engine: object) -> bool:
        """Return whether it combines gradients among the ranks of ``engine``."""
        world = self.verbs.world
        return self.spec.has_others(world, without_world=False) and world().engine is engine

    def begin_round(self, purpose: int | None) -> Part:
        """Return what this rank brings to a round; ``purpose``: see ``Offer``."""
        take_up = self.take_up()
        if take_up is not None and purpose != DROPS:
            take_up()
        problems = [] if purpose == DROPS else self._thaw()
        if purpose is not None and self.bucket_settings.choice is not None:
            self.bucket_settings.choice.backward_ends()
        state, aside = self.state, {}
        if purpose != DROPS and not isinstance(self.sender, ShardSender):
            aside = state.set_sums_aside(problems)
        return Part(self, state.offer(purpose, self.buckets.all), problems, aside)

    def end_round(self, part: Part) -> None:
        """Note that the round is over, or has failed."""
        if part.is_combined or part.offer.purpose is not None:
            self._reset()
        if part.aside:
            self.state.put_back(part.aside)

    def give_up(self) -> None:
        """Wait for nothing that is on its way: the world has failed."""
        self.in_flight.discard()
        self._reset()

    def depart(self, part: Part, buckets: Sequence[Bucket], count: int) -> bytearray:
        """Send what no hook has sent [3]; returns this rank's marks, see ``StepState.marks``.

        ``count``: of the parameters that all ranks have.
        """
        drops = part.offer.purpose == DROPS
        if not drops:
            problem = results.changed(self.parameters, self.buckets)
            part.problems += [] if problem is None else [problem]
        new = [bucket for bucket in buckets if bucket.is_sent or part.offer.has_new(bucket)]
        # What has a state by bucket has it of all.
        sends_all = part.offer.sends_all or (self.sender.keeps_buckets and bool(new))
        for bucket in buckets if sends_all else new:
            if not bucket.is_sent:
                self._submit(bucket, part.problems, blank=drops)
        marks = self.state.marks(part.offer, buckets, count)
        marks[ALL], marks[FAILED] = sends_all, bool(part.problems)
        if part.offer.purpose in (PASSES, STEPS):
            marks[AGAIN] = bool(self.buckets.fresh())
            marks[ANEW] = (
                not self.sender.keeps_buckets and self.bucket_settings.is_to_be_made_anew()
            )
            if self.sentinel is not None:
                if self.state.count == 0:
                    self.sentinel.say(marks, FACTS, in_step=part.offer.purpose == STEPS)
                self.sentinel.say_health(marks, FACTS, MARKS, self.verbs.world().rank)
        return marks

    def follow(self, part: Part, buckets: Sequence[Bucket], marks: bytearray) -> None:
        """Send what this rank has nothing of, to others who have. ``marks``: all ranks'."""
        for bucket in buckets:
            is_wanted = marks[ALL] or any(marks[MARKS + index] for index in bucket.indices)
            if is_wanted and not bucket.is_sent:
                self._submit(bucket, part.problems, blank=part.offer.purpose == DROPS)

    @uncompiled
    def drop(self) -> None:
        """Forget the gradients. What was sent comes back first, on all ranks alike."""
        if not self.hooks.are_on:
            return
        try:
            if self.sending:  # backward has failed
                if self.agreement.is_current():
                    rounds.drop(self)
                else:
                    self.in_flight.discard()
        except CollectiveAbortedError:
            if not transaction().keeps_gradients:
                raise
            self.in_flight.discard()  # the next step will meet the survivors
        finally:
            self.reset(used=False)
        self._thaw()

    def reset(self, *, used: bool) -> None:
        """Count passes anew: the optimizer has used the gradients, or zeroed them."""
        if self.hooks.are_on:  # else nothing was counted
            self._reset()
        self.state.begin(used=used)
        if self.sentinel is not None:
            self.sentinel.step_ends(used=used)
        self._used = used and self.hooks.are_on

    def tell_health(self) -> None:
        """Say, as the optimizer steps, which rank had gradients that are not finite, if one had."""
        if self.sentinel is not None:
            self.sentinel.tell_health(self.verbs.world)

    def forget_step(self) -> None:
        """Discard the gradients, sent or not: they are computed again."""
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
        if not self.parameters.frozen:
            return []
        thawed = self.parameters.thaw()
        if thawed:
            self.buckets.extend(thawed)
            if self.hooks.are_on:
                self.hooks.put_on(thawed, self._complete)
        return self.parameters.without_name()

    @uncompiled
    def _complete(self, bucket: Bucket) -> None:
        """Send a bucket that backward has finished, if all ranks have agreed upon it."""
        is_known = self.verbs.world().engine is self.agreement.engine
        if is_known and bucket.agreed:
            if self.buckets.in_parts.isdisjoint(bucket.indices):
                self._send(bucket)
            return
        if not is_known:
            self.in_flight.discard()
        self.buckets.note(bucket)

    def _send(self, bucket: Bucket) -> None:
        """Send a bucket, from a hook."""
        if self.bucket_settings.choice is not None:
            self.bucket_settings.choice.bucket_leaves()
        try:
            self._submit(bucket)
        except CollectiveAbortedError:
            if not transaction().keeps_gradients:
                raise  # else in an elastic job backward goes on, so that all gradients are there

    def _submit(
        self,
        bucket: Bucket,
        problems: list[InvalidArgumentError] | None = None,
        *,
        blank: bool = False,
    ) -> None:
        if not transaction().counting(self.verbs.world())[0]:
            self._zero(bucket)
        elif self.sentinel is not None and not blank:
            sender = self.sender
            if not (isinstance(sender, Sender) and sender.checks(bucket)):
                self.sentinel.look(bucket.indices)
        self.sender.submit(bucket, problems, blank=blank)

    @torch.no_grad()
    def _zero(self, bucket: Bucket) -> None:
        for index in bucket.indices:
            grad = self.parameters.grad(index)
            if grad is not None:
                grad.zero_()

    def meet(self) -> None:
        """Find out, once per world, whether all ranks have the same parameters.

        Then the buckets are cut in the order in which backward makes gradients on the first rank,
        in whatever order they were noted: a bucket leaves when the last of its gradients is there.
        """
        dims = self.agreement.reach(self.details(), self._sparse_dims())
        self.bucket_settings.make([*self.buckets.order], dims)
        self.state.begin_world()
        self.sender.begin_world()
        if self.sentinel is not None:
            self.sentinel.begin_world()

    def details(self) -> list[tuple[str, Any]]:
        """Return the facts that must be the same on all ranks."""
        return [*self._details(range(len(self.parameters))), *self.bucket_settings.details()]

    def _details(self, indices: Sequence[int]) -> list[tuple[str, Any]]:
        return [*self.parameters.details(indices), *self.sender.details(indices)]

    def _sparse_dims(self) -> list[int]:
        """Return the sparse dimensions that this rank knows of each gradient, 0 of dense ones.

        Gradients that ranks of an earlier world have agreed upon as sparse stay sparse.
        """
        grads = map(self.parameters.grad, range(len(self.parameters)))
        dims = [sparse.sparse_dim_of(grad, self.spec) for grad in grads]
        for index, dim in self.buckets.sparse_dims().items():
            dims[index] = dim
        return dims

    def landed(
        self, done: Sequence[Item], later: Sequence[Callable[[], None]], marks: bytearray
    ) -> list[Callable[[], None]]:
        """Return what puts the results in their places: all is back, on all ranks."""
        stores: list[Callable[[], None]] = []
        if done:
            stores += [*self.sender.complete(), *later]
            _, counting = transaction().counting(self.verbs.world())
            scale = self.spec.scale_of_sum(1.0 / counting)
            stores.append(partial(self._store, done, marks[MARKS:], scale))
        self.state.ended(marks)
        return stores

    def _store(self, done: Sequence[Item], used: bytearray, scale_of_sum: float) -> None:
        self.sender.store(done, lambda index: used[index] != 0, scale_of_sum)
        self.state.note(done, used)

    def agree_further(self) -> Sequence[Bucket]:
        """Agree upon what is new on this rank; return the buckets, which need their own trip."""
        new = {index for bucket in self.buckets.fresh() for index in bucket.indices}
        dims = self.agreement.extend(
            self._details(sorted(new)),
            "every rank must add and thaw the same parameters",
            self._sparse_dims(),
        )
        self.buckets.single_out([dim if index in new else 0 for index, dim in enumerate(dims)])
        fresh = self.buckets.fresh()
        self.buckets.accept(fresh, self.agreement.number)
        self._reset()
        return fresh

    def arrived(self) -> tuple[list[Item], list[Callable[[], None]]]:
        """Wait for all that is on its way [4]; return it, and what brings results back to a GPU."""
        done: list[Item] = []
        later: list[Callable[[], None]] = []

        def landed(in_flight: InFlightBucket) -> None:
            for (
                memory,
                tensors,
            ) in in_flight.copied:  # back to where they are, on the current stream
                is_near = self.sender.device.is_on_device(memory)
                back = self.sender.device.spread if is_near else self.sender.device.unpack
                if not transaction().keeps_gradients:
                    back(memory, tensors)
                else:  # where the gradient is still this rank's own
                    later.append(partial(back, memory, tensors))
            done.extend(in_flight.items)

        self.in_flight.wait_for_all(landed)
        return done, later
