"""The reductions."""

from __future__ import annotations

import enum

from kolovod import _native


class Op(enum.IntEnum):
    """How allreduce combines the ranks' values, element by element.

    ``Average`` of integers is truncated toward zero. Of bool, Sum and Max mean *or*, Min and
    Product mean *and*. Sums and products of integers wrap.
    """

    Average = _native.OPS["Average"]
    Sum = _native.OPS["Sum"]
    Min = _native.OPS["Min"]
    Max = _native.OPS["Max"]
    Product = _native.OPS["Product"]


Average = Op.Average
Sum = Op.Sum
Min = Op.Min
Max = Op.Max
Product = Op.Product
