"""Modules and optimizers that are given to ranks while all compute (``run(join="during_step")``).

What only a step's update changes is sent beside the step's computing: parameters that an optimizer
of the state updates, and that optimizer's tensors. All else, and what is small, is given before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from kolovod.core.ops import Adasum
from kolovod.core.transfers import Transfers
from kolovod.elastic.state import State
from kolovod.torch.distributed import Distributed
from kolovod.torch.functions import Functions
from kolovod.torch.parts import is_sharded
from kolovod.torch.sender import Sender
from kolovod.torch.sharded import Sharded

__all__ = ["Tensors", "hand_over_module", "hand_over_optimizer", "is_possible"]

PIECE_BYTES = 16 << 20
"""Pieces are so small that all ranks with the state send about equally much of any tensors."""
SMALL_BYTES = 4 << 10
"""Tensors this small are given before: a message each would take longer than to wait for them."""


class Tensors:
    """Tensors that are alike on all ranks, cut in pieces, as ``handing_over.Portions`` has them."""

    def __init__(
        self,
        tensors: Iterable[tuple[torch.Tensor, torch.dtype]],
        transfers: Transfers,
        lacking: bool,
        *,
        are_in_use: bool,
        taken: Callable[[], object] = lambda: None,
    ) -> None:
        """``tensors``: with their dtypes on the ranks that have the state.

        ``are_in_use``: what there is where they are ``lacking`` stays as it is until all have come.
        Then ``taken()`` is called.
        """
        self.transfers, self._taken = transfers, taken
        self._received: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.pieces: list[torch.Tensor] = []
        for tensor, dtype in tensors:
            whole = tensor.detach()
            if lacking and (are_in_use or whole.dtype != dtype or not whole.is_contiguous()):
                whole = torch.empty(whole.shape, dtype=dtype, device=whole.device)
                self._received.append((tensor, whole))
            data = whole.contiguous().view(-1).view(torch.uint8)
            self.pieces += torch.split(data, PIECE_BYTES)

    def checksum(self, piece: torch.Tensor) -> int:
        """Return the sum of its words of eight bytes, and of the bytes left, modulo 2**64."""
        words = piece.numel() // 8 * 8
        whole, rest = piece[:words].view(torch.int64), piece[words:]
        return int(whole.sum() + rest.sum())

    @torch.no_grad()
    def take(self) -> None:
        """Put what was received in its place: all pieces have come."""
        for tensor, received in self._received:
            tensor.copy_(received)
        self._taken()


def is_possible(state: State) -> bool:
    """Return whether all optimizers of ``state`` change parameters and state in ``step`` only.

    Then each of their steps waits for the gradients of all ranks, and any rank's can be left out of
    the mean.
    """
    return all(_updates_in_step(optimizer) for optimizer in _optimizers(state))


def _optimizers(state: State) -> list[torch.optim.Optimizer]:
    return [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]


def _updates_in_step(value: torch.optim.Optimizer) -> bool:
    if not isinstance(value, Distributed) or isinstance(value, Sharded):
        return False
    reducer = value._kolovod_reducer
    plain = isinstance(reducer.sender, Sender) and reducer.spec.process_set is None
    return plain and reducer.spec.op != Adasum


def hand_over_module(
    functions: Functions,
    transfers: Transfers,
    module: torch.nn.Module,
    state: State,
    lacking: bool,
    restore: Callable[[], Callable[[], None]],
) -> Tensors | None:
    """Make ``module`` rank 0's, but for large parameters that an optimizer of ``state`` updates.

    ``restore()``: returns what makes its buffers what they are now, after a forward that is made
    with other parameters.
    """
    updated = {
        id(parameter)
        for optimizer in _optimizers(state)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    late = {
        name: parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if id(parameter) in updated and _is_large(parameter)
    }
    functions.broadcast_module(module, late)
    functions.check_alike(late.items())
    once = {id(parameter): (parameter, parameter.dtype) for parameter in late.values()}
    if not once:
        return None
    taken = restore() if lacking else lambda: None
    return Tensors(once.values(), transfers, lacking, are_in_use=True, taken=taken)


def hand_over_optimizer(
    functions: Functions, transfers: Transfers, optimizer: torch.optim.Optimizer, lacking: bool
) -> Tensors | None:
    """Make ``optimizer`` rank 0's, but for the large tensors of its state."""
    tensors = functions.give_optimizer_form(optimizer, lacking, _is_large)
    return Tensors(tensors, transfers, lacking, are_in_use=False) if tensors else None


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() > SMALL_BYTES and not is_sharded(tensor)
