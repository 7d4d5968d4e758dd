"""The verbs with Horovod's gradients.

They are those of the *mean* of the ranks' losses where Kolovod's are of their sum (broadcast,
allgather; for reducescatter they are multiplied by the number of ranks), and Min, Max and Product
hand the gradient through the same operation. Scripts have been tuned with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kolovod.core.collectives import Collectives
from kolovod.core.derivatives import Given, backward_request, finish
from kolovod.core.ops import Average
from kolovod.core.submission import Request
from kolovod.core.verbs import ALLREDUCE, REDUCESCATTER
from kolovod.core.world import current
from kolovod.torch.autograd import Arithmetic, TorchCollectives
from kolovod.torch.frontend import TorchFrontend


class HorovodCollectives(TorchCollectives):
    """The verbs with Horovod's gradients, see the module's text.

    Gradients have no names, as Horovod's have none of the user's.
    """

    def send_back(
        self, request: Request, given: Given, grads: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Implement ``TorchCollectives.send_back``."""
        request = request._replace(name=None)
        if request.verb is ALLREDUCE:
            return self.new_group(request, grads)
        back = backward_request(request, given.received)
        if back.verb is ALLREDUCE:
            back = back._replace(op=Average)
        results = finish(request, given, self.new_group(back, grads), Arithmetic())
        return [grad * given.size for grad in results] if request.verb is REDUCESCATTER else results


plain = Collectives(TorchFrontend(), current)
"""The verbs on values only."""
verbs = HorovodCollectives(TorchFrontend(), current)


# Horovod's names for its autograd functions, of which scripts may call ``apply``.


class HorovodAllreduce:
    """``apply(tensor, name, op, prescale, postscale, process_set)``."""

    apply = staticmethod(verbs.allreduce)


class HorovodGroupedAllreduce:
    """``apply(name, op, prescale, postscale, process_set, *tensors)``."""

    @staticmethod
    def apply(*given: Any) -> tuple[torch.Tensor, ...]:
        """Carry out the operation, with the arguments that the class names."""
        return tuple(verbs.grouped_allreduce(given[5:], *given[:5]))


class HorovodAllgather:
    """``apply(tensor, name, process_set)``."""

    apply = staticmethod(verbs.allgather)


class HorovodGroupedAllgather:
    """``apply(name, process_set, *tensors)``."""

    @staticmethod
    def apply(*given: Any) -> tuple[torch.Tensor, ...]:
        """Carry out the operation, with the arguments that the class names."""
        return tuple(verbs.grouped_allgather(given[2:], *given[:2]))


class HorovodBroadcast:
    """``apply(tensor, root_rank, name, process_set)``."""

    apply = staticmethod(verbs.broadcast)


class HorovodAlltoall:
    """``apply(tensor, splits, name, process_set)``: the tensor, and received splits (int32)."""

    @staticmethod
    def apply(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Carry out the operation, with the arguments that the class names."""
        result, received = verbs.alltoall(*given)
        return result, torch.tensor(received, dtype=torch.int32)


class HorovodReducescatter:
    """``apply(tensor, name, op, prescale, postscale, process_set)``."""

    apply = staticmethod(verbs.reducescatter)


class HorovodGroupedReducescatter:
    """``apply(name, op, prescale, postscale, process_set, *tensors)``."""

    @staticmethod
    def apply(*given: Any) -> tuple[torch.Tensor, ...]:
        """Carry out the operation, with the arguments that the class names."""
        return tuple(verbs.grouped_reducescatter(given[5:], *given[:5]))
