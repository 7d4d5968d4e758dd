"""Not there yet; importing it says so."""

from __future__ import annotations

from horovod import NO_ELASTIC

raise ImportError(NO_ELASTIC, name="horovod.tensorflow.elastic")
