"""The verbs on MXNet's arrays in this process's own world."""

from __future__ import annotations

import mxnet as mx

from kolovod import _native
from kolovod.core.collectives import Collectives
from kolovod.core.frontend import TensorView
from kolovod.core.world import current
from kolovod.mxnet.frontend import MxnetFrontend


class MxnetCollectives(Collectives[mx.nd.NDArray]):
    """Every verb, on both kinds of arrays: the result is of the kind of the input."""

    def _made(
        self,
        engine: _native.Engine,
        number: int,
        i: int,
        view: TensorView,
        rows: int,
        tensor: mx.nd.NDArray,
    ) -> mx.nd.NDArray:
        made = super()._made(engine, number, i, view, rows, tensor)
        return made.as_np_ndarray() if isinstance(tensor, mx.np.ndarray) else made


collectives = MxnetCollectives(MxnetFrontend(), current)
