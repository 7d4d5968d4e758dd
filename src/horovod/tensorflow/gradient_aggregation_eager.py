"""Horovod's name for the same outside of graphs."""

from __future__ import annotations

from horovod.tensorflow.gradient_aggregation import Helper


class LocalGradientAggregationHelperEager(Helper):
    """Works in graphs, too, as the other does here."""
