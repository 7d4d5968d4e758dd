"""Cures for scripts of earlier releases of TensorFlow and Keras, by how they fail today.

The tables of docs/from-horovod.md say the same; a test compares them, and tries each.
"""

from __future__ import annotations

__all__ = ["CURES", "cure_of"]

_PAGE = "docs/from-horovod.md"

CURES = {
    "Argument(s) not recognized: {'lr':": "`learning_rate=0.1`",
    "is no longer supported and will be ignored": (
        "`SGD(keras.optimizers.schedules.InverseTimeDecay(0.1, 1, 1e-3))`"
    ),
    "object has no attribute 'lr'": "`optimizer.learning_rate`",
    "module 'keras.backend' has no attribute 'get_value'": (
        "`float(optimizer.learning_rate)`; or `from tensorflow.keras import backend as K`"
    ),
    "module 'keras.backend' has no attribute 'set_value'": "`optimizer.learning_rate = 0.2`",
    "is not supported in Keras 3": "`keras.optimizers.SGD(0.1)`",
    "'list' object is not callable": "`optimizer.variables`",
    "object has no attribute 'get_weights'": "`[v.numpy() for v in optimizer.variables]`",
    "object has no attribute 'minimize'": "`tape.gradient`, then `optimizer.apply_gradients`",
    "object has no attribute '_compute_gradients'": (
        "`tape.gradient`, then `optimizer.apply_gradients`: a `DistributedOptimizer` "
        "combines what it applies"
    ),
    "got an unexpected keyword argument 'experimental_aggregate_gradients'": "leave it out",
    "'Variable' object has no attribute 'ref'": (
        "`variable.value.ref()`, or `hvd.vars_to_refs(variables)`"
    ),
    "has no attribute 'experimental'": "`keras.mixed_precision.set_global_policy(name)`",
    "has no attribute 'enable_mixed_precision_graph_rewrite'": (
        "`keras.mixed_precision.set_global_policy(name)`"
    ),
    "got an unexpected keyword argument 'experimental_run_tf_function'": "leave it out",
    "object has no attribute 'fit_generator'": "`model.fit(generator, ...)`",
    "object has no attribute 'evaluate_generator'": "`model.evaluate(generator, steps=n)`",
    "got an unexpected keyword argument 'workers'": (
        "leave it out, or give the number to a `keras.utils.PyDataset`"
    ),
    "The filepath provided must end in": (
        '`"checkpoint-{epoch}.keras"`, or with `save_weights_only=True` '
        '`"checkpoint-{epoch}.weights.h5"`. Keras 3.6 still refuses `.h5`, too'
    ),
    "got an unexpected keyword argument 'period'": "`save_freq=2 * steps_per_epoch`",
    "Invalid filepath extension for saving": (
        '`model.save("model.keras")`, or `model.export("folder")` for serving'
    ),
    "The filename must end in": '`"model.weights.h5"`',
    "File format not supported": (
        "load it with Keras 2, and save it as `model.h5`, which `hvd.load_model` reads in both"
    ),
    "object has no attribute 'reset_states'": "`metric.reset_state()`",
    "KeyError: 'lr'": '`"learning_rate"`; Horovod\'s own callbacks set both',
    "cannot import name 'ImageDataGenerator'": (
        "`from tensorflow.keras.preprocessing.image import ...`"
    ),
    "cannot import name 'np_utils'": "`keras.utils.to_categorical`",
    "has no attribute 'set_learning_phase'": "`model(inputs, training=True)`",
    "has no attribute 'set_session'": (
        '`tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")`'
    ),
    "missing 1 required positional argument: 'initial_lr'": (
        "give it, `0.01 * hvd.size()` say: Horovod wants it since 0.21"
    ),
    "module 'tensorflow' has no attribute 'Session'": "way 3",
    "has no attribute 'AdamOptimizer'": "way 3",
    "has no attribute 'Optimizer'": "way 3",
    "has no attribute 'MonitoredTrainingSession'": "way 3",
    "tf.placeholder() is not compatible with eager execution": (
        "`tf.disable_v2_behavior()` before it, or `with tf.Graph().as_default():` around it"
    ),
    "The Session graph is empty": (
        "`tf.disable_v2_behavior()` before it, or `with tf.Graph().as_default():` around it"
    ),
    "should be a function when eager execution is enabled": (
        "`tf.disable_v2_behavior()` before it, or `minimize(lambda: ...)`"
    ),
    "broadcast_global_variables is for graphs of TensorFlow 1": (
        "way 3, or `hvd.broadcast_variables(model.variables, root_rank=0)`"
    ),
    "is not available with Keras 3": "`pip install tf_keras` and `TF_USE_LEGACY_KERAS=1`",
    "module 'tensorflow' has no attribute 'estimator'": (
        "`tf.train.MonitoredTrainingSession` (way 3), or `model.fit`. TensorFlow 2.15 still has it"
    ),
    "numpy() is only available when eager execution is enabled": (
        "without `tf.disable_v2_behavior()`: way 2 is for models of Keras"
    ),
}
"""By a part of the message."""

_WAYS = {
    "way 2": "`pip install tf_keras`, and `TF_USE_LEGACY_KERAS=1`",
    "way 3": "`import tensorflow.compat.v1 as tf` and `tf.disable_v2_behavior()` at the top",
}
"""What that page calls so."""


def cure_of(said: str) -> str:
    """Return the cure for the failure in ``said``, the end of a script's stderr; "" for others."""
    for message, cure in CURES.items():
        if message in said:
            ways = "".join(f"; {way} is {what}" for way, what in _WAYS.items() if way in cure)
            return (
                f"scripts for earlier releases say {message!r} today; the cure ({_PAGE}{ways}): "
                f"{cure}"
            )
    return ""
