"""The reductions."""

from __future__ import annotations

import enum

from kolovod import _native


class Op(enum.IntEnum):
    """The way in which allreduce combines the ranks' values, element by element.

    ``Average`` of integers is truncated toward zero. For bool, Sum and Max mean *or*, Min and
    Product mean *and*. Sums and products of integers wrap. ``Adasum`` takes a whole tensor as a
    vector: it is a sum that does not overshoot where the ranks' vectors point the same way, for 2,
    4, 8, ... ranks and floating dtypes (Maleki et al., 2020; csrc/collectives/adasum.h).
    """

    Average = _native.OPS["Average"]
    Sum = _native.OPS["Sum"]
    Adasum = _native.OPS["Adasum"]
    Min = _native.OPS["Min"]
    Max = _native.OPS["Max"]
    Product = _native.OPS["Product"]


Average = Op.Average
Sum = Op.Sum
Adasum = Op.Adasum
Min = Op.Min
Max = Op.Max
Product = Op.Product
