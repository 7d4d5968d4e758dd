"""Starting equal: arrays by name, from one rank to all."""

from __future__ import annotations

from collections.abc import Mapping

from kolovod.core.collectives import Collectives
from kolovod.core.numpy_frontend import Array
from kolovod.core.objects import Objects
from kolovod.errors import InvalidArgumentError
from kolovod.gradients.agreement import agree


class Functions:
    """Has the functions for one world; ``kolovod.numpy`` binds those for the process's own."""

    def __init__(self, verbs: Collectives) -> None:
        """``verbs``: on arrays."""
        self._verbs = verbs
        self._objects = Objects(verbs.world)

    def broadcast_parameters(self, params: Mapping[str, Array], root_rank: int = 0) -> None:
        """Overwrite the arrays in ``params`` with those of ``root_rank``, in place.

        Raises InvalidArgumentError for what is not a mapping of str to arrays that can be written
        (of any dtype that the engine knows); MismatchError, on every rank, when names, shapes or
        dtypes differ between ranks.
        """
        if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
            raise InvalidArgumentError(
                f"params is a {type(params).__name__}: give a dict of arrays by name (str)"
            )
        frontend = self._verbs.frontend
        pairs = sorted(params.items())
        for _, array in pairs:
            frontend.claim(array)
            frontend.view(array)
        described = [(name, (array.shape, str(array.dtype))) for name, array in pairs]
        agree(self._objects, described, "parameter", "broadcast_parameters")
        handles = [
            self._verbs.broadcast_async_(array, root_rank, f"parameter.{name}")
            for name, array in pairs
        ]
        for handle in handles:
            handle.wait()
