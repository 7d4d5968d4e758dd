"""DistributedOptimizer with ``shard_state=True``: each rank steps with a part of the parameters."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kolovod.core.objects import Objects
from kolovod.core.ops import Max
from kolovod.core.transaction import transaction
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.agreement import agree
from kolovod.private_apis.torch import uncompiled
from kolovod.torch.copied_shards import CopiedShards
from kolovod.torch.distributed import Closure, Distributed
from kolovod.torch.gathering import Gathering
from kolovod.torch.parameters import Named
from kolovod.torch.pieces import Part, laid_as
from kolovod.torch.reducer import GradientReducer
from kolovod.torch.resharding import (
    State,
    Values,
    is_by_element,
    to_next_cut,
    to_whole,
    whole,
)
from kolovod.torch.shardable import stepped_as_wholes

_LOST = (
    "the optimizer's state is in parts on the ranks of a world that is gone: before it ends take "
    "optimizer.state_dict() on all ranks, and afterwards optimizer.load_state_dict()"
)


class Sharded(Distributed):
    """The methods that ``DistributedOptimizer(shard_state=True)`` adds to the optimizer's class.

    Outside of this class ``param_groups`` has the parameters, as usual. While the optimizer steps
    it has this rank's pieces of them, by which ``state`` is kept.
    """

    _kolovod_sender: CopiedShards
    _kolovod_gathering: Gathering | None

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise InvalidArgumentError: it is not possible."""
        raise FrontEndArgumentError(
            "with shard_state a rank has the averaged gradients of its part of the parameters "
            "only, so that step() cannot use gradients as they are; PyTorch's clipping functions "
            "and GradScaler work without skip_synchronize()"
        )
        yield

    @uncompiled
    def step(self, closure: Closure | None = None) -> Any:
        """Synchronize, step with this rank's part, and gather all parameters.

        Gradients are gone afterwards. A ``closure`` is called once; its loss is averaged. Raises
        JobOverError in an elastic job, on all ranks, where both ranks that had a part are lost.
        """
        loss = None
        self.wait_for_parameters()
        if closure is None:
            self._kolovod_prepare()
        else:
            with torch.enable_grad():
                loss = self._synchronizing(closure)()
        reducer, sender = self._kolovod_reducer, self._kolovod_sender
        reducer.tell_health()
        if not self._kolovod_is_in_parts():
            super(Distributed, self).step()
            reducer.reset(used=True)
            return loss
        self._kolovod_renew()
        sender.heed()
        with self._kolovod_pieces():
            super(Distributed, self).step()
        if transaction().is_elastic:
            sender.gather_exactly()
        elif self._kolovod_gathering is None:
            for _, wait in sender.gather():
                wait()
        else:
            self._kolovod_gathering.begin(sender.gather())
        sender.zero_grad()
        reducer.reset(used=True)
        return loss

    # As Distributed.step has it: this method runs the base class's, which runs the step hooks.
    step.hooked = True  # type: ignore[attr-defined]

    def gather_in_forward(self, model: torch.nn.Module) -> None:
        """Let ``step`` return before parameters are gathered: ``model``'s next forward waits.

        Each parameter is waited for when a function of PyTorch first gets it within forward; a
        model with compiled parts waits at its beginning. ``model.state_dict()`` and ``step`` wait
        as well. Whatever else reads parameters between ``step`` and forward (an average of
        weights, norms for a log) must call ``wait_for_parameters()`` before, or sees old values of
        what other ranks have stepped. In an elastic job ``step`` waits all the same: what a rank
        is lost with there the others must know of. Raises InvalidArgumentError for what is no
        model, or when called twice.
        """
        if self._kolovod_gathering is not None:
            raise FrontEndArgumentError("gather_in_forward was called before: call it once")
        self._kolovod_gathering = Gathering(model)

    def wait_for_parameters(self) -> None:
        """Return when all parameters are gathered; see ``gather_in_forward``."""
        if self._kolovod_gathering is not None:
            self._kolovod_gathering.wait()

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, as without shards, and those of the pieces."""
        self._kolovod_sender.zero_grad()  # and the marks, which cannot be zeros
        super().zero_grad(set_to_none)
        self._kolovod_sender.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the optimizer would have it without shards, on every rank.

        It is gathered parameter by parameter, so all ranks call this together; it may be loaded by
        any number of ranks, with or without shards. In an elastic job it is a step, like
        ``elastic.exactly``: call it within the function of ``elastic.run``.
        """
        if transaction().is_elastic:
            return self._kolovod_state_dict_of(self._kolovod_state_of_those_left())
        reducer, has_parts = self._kolovod_reducer, any(self._kolovod_sender.all_parts())
        if not (reducer.follow_world() and has_parts and reducer.agreement.is_current()):
            if self._kolovod_has_state():
                raise FrontEndArgumentError(_LOST)
            return super().state_dict()
        return self._kolovod_state_dict_of(self._kolovod_whole_state())

    def _kolovod_state_dict_of(self, state: State) -> dict[str, Any]:
        own = self.__dict__["state"]
        self.__dict__["state"] = state
        try:
            return super().state_dict()
        finally:
            self.__dict__["state"] = own

    def __reduce__(self) -> tuple[Any, ...]:
        """Raise InvalidArgumentError once there is state: this rank has but a part of it."""
        if self._kolovod_has_state():
            raise FrontEndArgumentError(
                "an optimizer with shard_state cannot be copied or pickled after its first step, "
                "since this rank has a part of the state only: use state_dict() on all ranks"
            )
        return super().__reduce__()

    def _kolovod_to_unscale(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Groups of pieces, of which all ranks see an infinity if one has it."""
        reducer, sender = self._kolovod_reducer, self._kolovod_sender
        if not self._kolovod_is_in_parts():
            return groups
        sender.heed()
        gradients = [piece.grad for piece in sender.cut.tensors() if piece.grad is not None]
        is_finite = all(bool(torch.isfinite(grad).all()) for grad in gradients)
        own = torch.tensor([not is_finite], dtype=torch.uint8)
        name = f"infinity.{reducer.agreement.number}"
        mark = transaction().run(lambda: sender.verbs.allreduce(own, name, Max))
        if not gradients:  # a GradScaler wants one to look at
            stand_in = torch.zeros(1, device=groups[0]["params"][0].device, requires_grad=True)
            stand_in.grad = torch.zeros_like(stand_in)
            gradients = [stand_in.grad]
            groups = [*groups, {"params": [stand_in]}]
        if mark.item() and is_finite:
            first = gradients[0]
            first[(0,) * first.dim()] = float("inf")  # of a step that all ranks leave out
        by_pieces = self._kolovod_by_pieces(groups)
        return [{**g, "params": pieces} for g, pieces in zip(groups, by_pieces, strict=True)]

    def _kolovod_add(self, new: list[Named]) -> None:
        self._kolovod_sender.wholes |= stepped_as_wholes(self, {id(p) for _, p in new})
        super()._kolovod_add(new)

    def _kolovod_is_in_parts(self) -> bool:
        """Return whether the averaged gradients are in pieces; if not, the state is whole, too.

        Raises InvalidArgumentError, or in an elastic job JobOverError, where it cannot be.
        """
        reducer, sender = self._kolovod_reducer, self._kolovod_sender
        if not transaction().is_elastic:
            if reducer.follow_world():
                return True
            if self._kolovod_has_state():
                raise FrontEndArgumentError(_LOST)
            return False
        # Gradients that nobody has averaged are those of the last rank of all.
        parameters = reducer.parameters
        has_own = any(parameters.grad(index) is not None for index in range(len(parameters)))
        if sender.in_parts and not has_own:
            return True
        if sender.cut.epoch is not None:
            self._kolovod_renew()
            to_whole(self.__dict__["state"], sender)
        return False

    def _kolovod_by_pieces(self, groups: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
        """Return this rank's pieces by group; parameters that are not trained stay whole."""
        pieces = self._kolovod_sender.pieces()
        trained = {id(parameter) for parameter in self._kolovod_reducer.parameters.tensors}
        return [
            [
                each
                for p in group["params"]
                for each in pieces.get(id(p), [] if id(p) in trained else [p])
            ]
            for group in groups
        ]

    @contextmanager
    def _kolovod_pieces(self) -> Iterator[None]:
        """Within this context the optimizer has pieces in the place of parameters."""
        groups = self.__dict__["param_groups"]
        before = [group["params"] for group in groups]
        for group, pieces in zip(groups, self._kolovod_by_pieces(groups), strict=True):
            group["params"] = pieces
        try:
            yield
        finally:
            for group, parameters in zip(groups, before, strict=True):
                group["params"] = parameters

    def _kolovod_renew(self) -> None:
        """Keep state by pieces: of parameters that moved, and what was loaded for whole ones.

        Whoever reads or writes ``optimizer.state[parameter]`` makes an entry, too, which must not
        take the place of what its piece has.
        """
        state: State = self.__dict__["state"]
        cut = self._kolovod_sender.cut
        for pieces in cut.both():
            for old, new in pieces.follow_parameters().items():
                if old in state:
                    state[new] = state.pop(old)
        for index, parameter in enumerate(self._kolovod_reducer.parameters.tensors):
            loaded = state.pop(parameter, None)
            for pieces in cut.both() if loaded else ():
                piece = pieces.tensors.get(index)
                if piece is not None:
                    state.setdefault(piece, {}).update(
                        (key, pieces.own_of(index, value))
                        if is_by_element(value, parameter)
                        else (key, copy.deepcopy(value))
                        for key, value in loaded.items()
                    )

    def _kolovod_has_state(self) -> bool:
        state = self.__dict__["state"]
        return any(piece in state for piece in self._kolovod_sender.cut.tensors())

    def _kolovod_state_of_those_left(self) -> State:
        """The whole state, of an elastic job, in whichever world it is."""
        state: State = self.__dict__["state"]
        sender, tensors = self._kolovod_sender, self._kolovod_reducer.parameters.tensors

        def attempt() -> dict[int, Values]:
            self._kolovod_move_loaded()
            return whole(state, sender)

        trained = {*tensors, *sender.cut.tensors()}
        found: State = defaultdict(dict)
        for index, (_, by_element, once) in transaction().run(attempt).items():
            found[tensors[index]] = {**by_element, **once}
        found.update({key: value for key, value in state.items() if key not in trained})
        return found

    def _kolovod_move_loaded(self) -> None:
        """Give pieces, if there are any, the state that was loaded since the last step."""
        if self._kolovod_sender.cut.epoch is not None:
            self._kolovod_renew()

    def _kolovod_share(self) -> None:
        """Take the options of rank 0, learning rates and so on; the state is dealt in a step."""
        sender = self._kolovod_sender
        objects = Objects(sender.verbs.world)
        groups = self.__dict__["param_groups"]
        shapes = [
            (f"group {number}", tuple(tuple(p.shape) for p in group["params"]))
            for number, group in enumerate(groups)
        ]
        agree(objects, shapes, "optimizer group", "sharded optimizer")
        own = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        options = objects.broadcast_object(own, 0, "sharded optimizer.options")
        for group, of_first in zip(groups, options, strict=True):
            group.update(of_first)

    def _kolovod_whole_state(self) -> State:
        self._kolovod_renew()
        state: State = self.__dict__["state"]
        sender, tensors = self._kolovod_sender, self._kolovod_reducer.parameters.tensors
        pieces, own_pieces = set(sender.cut.tensors()), sender.cut.own.tensors
        found: State = defaultdict(dict)
        found.update({key: value for key, value in state.items() if key not in pieces})
        number = self._kolovod_reducer.agreement.number
        for name, part in sender.all_parts():
            said = self._kolovod_outlines(part, f"state.{number}.{name}")
            keys = {key: dtype for index in part.indices for key, dtype in said[index][0].items()}
            for index in part.indices:
                by_element, once = said[index]
                if by_element or once:
                    found[tensors[index]] = dict(once)
            for key, dtype in sorted(keys.items()):
                own = [
                    laid_as(piece, value)
                    if is_by_element(value := state.get(piece, {}).get(key), piece)
                    else piece.new_zeros(piece.numel(), dtype=dtype, requires_grad=False)
                    for piece in (own_pieces[each.index] for each in part.pieces)
                ] or [tensors[part.indices[0]].new_empty(0, dtype=dtype)]
                values = sender.gathered(f"state.{number}.{name}.{key}", part, own)
                for index, value in zip(part.indices, values, strict=True):
                    if key in said[index][0]:
                        is_alone = len(part.indices) == 1
                        found[tensors[index]][key] = value if is_alone else value.clone()
        return found

    def _kolovod_outlines(
        self, part: Part, name: str
    ) -> dict[int, tuple[dict[str, torch.dtype], dict[str, Any]]]:
        """Return, by parameter, its state's dtypes by element, and the values that it has once."""
        state: State = self.__dict__["state"]
        pieces = self._kolovod_sender.cut.own.tensors
        own: dict[int, tuple[dict[str, torch.dtype], dict[str, Any]]] = {}
        for index in (piece.index for piece in part.pieces):
            kept = state.get(pieces[index], {})
            by_element = {k: v.dtype for k, v in kept.items() if is_by_element(v, pieces[index])}
            once = {k: v for k, v in kept.items() if k not in by_element}
            own[index] = (by_element, once)
        objects = Objects(self._kolovod_sender.verbs.world)
        everyone = objects.allgather_object(own, f"{name}.outline")
        merged: dict[int, tuple[dict[str, torch.dtype], dict[str, Any]]] = {}
        for said in reversed(everyone):
            merged.update(said)
        return {index: merged.get(index, ({}, {})) for index in part.indices}


def shard(
    optimizer: torch.optim.Optimizer, reducer: GradientReducer, wholes: set[int]
) -> CopiedShards:
    """Let ``reducer`` scatter the gradients of ``optimizer``, which will be ``Sharded``.

    ``wholes``: the ``id`` of the parameters that one rank is to step with as a whole.
    """
    reference = weakref.ref(optimizer)

    def check_new_world() -> None:
        alive = reference()
        is_whole = isinstance(alive, Sharded) and alive._kolovod_has_state()
        if is_whole and not transaction().is_elastic:
            raise FrontEndArgumentError(_LOST)

    def move_state(sender: CopiedShards) -> Callable[[], None]:
        alive = reference()
        assert isinstance(alive, Sharded)
        alive._kolovod_move_loaded()
        return to_next_cut(alive.__dict__["state"], sender)

    sender = reducer.use_shards(check_new_world, wholes)
    sender.move_state = move_state
    return sender
