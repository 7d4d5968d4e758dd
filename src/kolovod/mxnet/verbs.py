"""The verbs on MXNet's arrays in this process's own world."""

from __future__ import annotations

from kolovod.core.collectives import Collectives
from kolovod.core.world import current
from kolovod.mxnet.frontend import MxnetFrontend


class MxnetCollectives(Collectives):
    """Every verb, on both kinds of arrays: the result is of the kind of the input."""


collectives = MxnetCollectives(MxnetFrontend(), current)
