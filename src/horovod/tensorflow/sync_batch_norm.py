"""Horovod's SyncBatchNormalization: Kolovod's, which weighs each rank by its number of samples."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kolovod.errors import FrontEndArgumentError
from kolovod.tensorflow.sync_batch_norm import SyncBatchNormalization as _Synchronized


@tf.keras.utils.register_keras_serializable("horovod")
class SyncBatchNormalization(_Synchronized):
    """Batch normalisation over the batches of all ranks."""

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        """Raise ValueError for ``fused`` True or None: no fused kernel asks other ranks."""
        if fused in (True, None):
            raise FrontEndArgumentError(f"fused is {fused}: SyncBatchNormalization needs False")
        super().__init__(**kwargs)
