"""docs/from-horovod.md is right: each message comes as it says, and each cure works."""

from __future__ import annotations

import functools
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from forked import KERAS_2, KERAS_RUNNERS
from frameworks import is_installed
from paths import ROOT

from kolovod.migrate.cures import CURES

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.skipif(KERAS_2 == "keras", reason="Keras is Keras 2 here"),
    pytest.mark.timeout(300),
]

PAGE = ROOT / "docs" / "from-horovod.md"
X, Y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)


def batches():
    while True:
        yield X, Y


def rows():
    """Of the page's tables: the message, and what the last column says."""
    return {message: cells[-1] for message, cells in cells_by_message().items()}


def cells_by_message():
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] != "a script has":
            found[re.match("`([^`]+)`", cells[1])[1]] = cells
    return found


def tools(keras, folder):
    """What the snippets below use."""
    import tensorflow as tf

    import horovod.tensorflow as hvt
    import horovod.tensorflow.keras as hvd

    hvd.init()

    def model(optimizer="sgd", **options):
        made = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        made.compile(optimizer, "mse", **options)
        return made

    def recorded():
        """A loss, a variable, and the tape of it."""
        variable = model().trainable_variables[0]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * 2.0)
        return loss, [variable], tape

    return SimpleNamespace(
        tf=tf, keras=keras, K=keras.backend, hvd=hvd, hvt=hvt, folder=folder, model=model,
        recorded=recorded, sgd=keras.optimizers.SGD,
    )  # fmt: skip


def applied(t):
    """Gradients of a tape, given to a distributed optimizer."""
    loss, variables, tape = t.recorded()
    optimizer = t.hvd.DistributedOptimizer(t.sgd(0.5))
    before = variables[0].numpy()
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    np.testing.assert_allclose(variables[0].numpy(), before - 1.0, rtol=1e-6)


def with_pairs(t, **options):
    loss, variables, tape = t.recorded()
    pairs = list(zip(tape.gradient(loss, variables), variables, strict=True))
    t.sgd(0.5).apply_gradients(pairs, **options)


def history_with(t, callback):
    return t.model().fit(X, Y, verbose=0, callbacks=[callback]).history


def reduced_rate(t):
    return history_with(t, t.keras.callbacks.ReduceLROnPlateau(monitor="loss"))


def checkpoints(t):
    kind, path = t.keras.callbacks.ModelCheckpoint, f"{t.folder}/checkpoint-{{epoch}}"
    history_with(t, kind(f"{path}.keras"))
    history_with(t, kind(f"{path}.weights.h5", save_weights_only=True))


def saved_by_keras_2(t):
    """A model in a folder, read, and kept in a file that Keras 3 reads: see test_keras_2."""
    model = t.keras.models.load_model(f"{t.folder}/of_keras_2")
    model.save(f"{t.folder}/of_keras_2.h5")


def imported(code):
    """To be run as a statement: modules are not attributes before they are imported."""

    def run(t):
        exec(code, {})

    return run


def decays(t):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return t.sgd(0.1, decay=1e-3)


def scheduled(t):
    return t.sgd(t.keras.optimizers.schedules.InverseTimeDecay(0.1, 1, 1e-3))


def set_policy(t):
    t.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        assert t.keras.layers.Dense(1).compute_dtype == "float16"
    finally:
        t.keras.mixed_precision.set_global_policy("float32")


def read(t):
    rate = t.sgd(0.1).learning_rate
    assert float(rate) == pytest.approx(0.1)
    assert float(t.tf.keras.backend.get_value(rate)) == float(rate)


def assigned(t):
    optimizer = t.sgd(0.1)
    optimizer.learning_rate = 0.2
    assert float(optimizer.learning_rate) == pytest.approx(0.2)


def broadcast_state(t):
    optimizer = t.model().optimizer
    t.hvt.broadcast_variables(optimizer.variables, 0)


def references(t):
    variable = t.model().trainable_variables[0]
    assert t.hvt.refs_to_vars(t.hvt.vars_to_refs([variable]))[0].shape == variable.shape
    return getattr(variable, "value", variable)


def exported(t):
    t.model().export(f"{t.folder}/exported")
    t.model().save(f"{t.folder}/model.keras")


# The message: what a script has, with the tools above, and the cure.
KERAS = {
    "Argument(s) not recognized: {'lr':": (
        lambda t: t.sgd(lr=0.1),
        lambda t: t.sgd(learning_rate=0.1),
    ),
    "is no longer supported and will be ignored": (decays, scheduled),
    "object has no attribute 'lr'": (
        lambda t: t.sgd(0.1).lr,
        lambda t: t.sgd(0.1).learning_rate,
    ),
    "module 'keras.backend' has no attribute 'get_value'": (
        lambda t: t.K.get_value(t.sgd(0.1).learning_rate),
        read,
    ),
    "module 'keras.backend' has no attribute 'set_value'": (
        lambda t: t.K.set_value(t.sgd(0.1).learning_rate, 0.2),
        assigned,
    ),
    "is not supported in Keras 3": (
        lambda t: t.keras.optimizers.legacy.SGD(0.1),
        lambda t: t.sgd(0.1),
    ),
    "'list' object is not callable": (
        lambda t: t.hvt.broadcast_variables(t.sgd(0.1).variables(), 0),
        broadcast_state,
    ),
    "object has no attribute 'get_weights'": (
        lambda t: t.sgd(0.1).get_weights(),
        lambda t: [v.numpy() for v in t.sgd(0.1).variables],
    ),
    "object has no attribute 'minimize'": (
        lambda t: (lambda loss, v, tape: t.sgd(0.1).minimize(loss, v, tape=tape))(*t.recorded()),
        applied,
    ),
    "object has no attribute '_compute_gradients'": (
        lambda t: t.sgd(0.1)._compute_gradients(*t.recorded()[:2]),
        applied,
    ),
    "got an unexpected keyword argument 'experimental_aggregate_gradients'": (
        lambda t: with_pairs(t, experimental_aggregate_gradients=False),
        with_pairs,
    ),
    "'Variable' object has no attribute 'ref'": (
        lambda t: t.model().trainable_variables[0].ref(),
        lambda t: references(t).ref(),
    ),
    "has no attribute 'experimental'": (
        lambda t: t.tf.keras.mixed_precision.experimental.set_policy("mixed_float16"),
        set_policy,
    ),
    "has no attribute 'enable_mixed_precision_graph_rewrite'": (
        lambda t: t.tf.train.experimental.enable_mixed_precision_graph_rewrite(t.sgd(0.1)),
        set_policy,
    ),
    "got an unexpected keyword argument 'experimental_run_tf_function'": (
        lambda t: t.model(experimental_run_tf_function=False),
        lambda t: t.model(),
    ),
    "object has no attribute 'fit_generator'": (
        lambda t: t.model().fit_generator(batches(), steps_per_epoch=1, verbose=0),
        lambda t: t.model().fit(batches(), steps_per_epoch=1, verbose=0),
    ),
    "object has no attribute 'evaluate_generator'": (
        lambda t: t.model().evaluate_generator(batches(), 1),
        lambda t: t.model().evaluate(batches(), steps=1, verbose=0),
    ),
    "got an unexpected keyword argument 'workers'": (
        lambda t: t.model().fit(X, Y, verbose=0, workers=4),
        lambda t: t.model().fit(X, Y, verbose=0),
    ),
    "The filepath provided must end in": (
        lambda t: t.keras.callbacks.ModelCheckpoint(f"{t.folder}/checkpoint-{{epoch}}"),
        checkpoints,
    ),
    "got an unexpected keyword argument 'period'": (
        lambda t: t.keras.callbacks.ModelCheckpoint(f"{t.folder}/c.keras", period=2),
        lambda t: t.keras.callbacks.ModelCheckpoint(f"{t.folder}/c.keras", save_freq=2),
    ),
    "Invalid filepath extension for saving": (
        lambda t: t.model().save(f"{t.folder}/folder"),
        exported,
    ),
    "The filename must end in": (
        lambda t: t.model().save_weights(f"{t.folder}/weights.h5"),
        lambda t: t.model().save_weights(f"{t.folder}/model.weights.h5"),
    ),
    "File format not supported": (
        lambda t: t.hvd.load_model(f"{t.folder}/of_keras_2"),
        lambda t: t.hvd.load_model(f"{t.folder}/of_keras_2.h5"),
    ),
    "object has no attribute 'reset_states'": (
        lambda t: t.keras.metrics.Mean().reset_states(),
        lambda t: t.keras.metrics.Mean().reset_state(),
    ),
    "KeyError: 'lr'": (
        lambda t: reduced_rate(t)["lr"],
        lambda t: reduced_rate(t)["learning_rate"],
    ),
    "cannot import name 'ImageDataGenerator'": (
        imported("from keras.preprocessing.image import ImageDataGenerator"),
        imported("from tensorflow.keras.preprocessing.image import ImageDataGenerator"),
    ),
    "cannot import name 'np_utils'": (
        imported("from keras.utils import np_utils"),
        lambda t: t.keras.utils.to_categorical([1, 2], 3),
    ),
    "has no attribute 'set_learning_phase'": (
        lambda t: t.K.set_learning_phase(1),
        lambda t: t.model()(X, training=True),
    ),
    "has no attribute 'set_session'": (
        lambda t: t.K.set_session(t.tf.compat.v1.Session()),
        lambda t: t.tf.config.set_visible_devices([], "GPU"),
    ),
    "missing 1 required positional argument: 'initial_lr'": (
        lambda t: t.hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=5),
        lambda t: t.hvd.callbacks.LearningRateWarmupCallback(0.01 * t.hvd.size(), 5),
    ),
}
OF_LEGACY = {
    "is no longer supported and will be ignored": lambda sgd, t: sgd(0.1, decay=1e-3),
    "object has no attribute 'get_weights'": lambda sgd, t: sgd(0.1).get_weights(),
    "object has no attribute '_compute_gradients'": lambda sgd, t: (
        lambda loss, v, tape: sgd(0.1)._compute_gradients(loss, v, tape=tape)
    )(*t.recorded()),
}
"""What the legacy optimizers of Keras 2 do where others do not."""


def minimized(v1):
    with_loss = v1.get_variable("w", initializer=1.0)
    return v1.train.AdamOptimizer(0.01).minimize(with_loss * with_loss)


OF_TENSORFLOW_1 = {
    "module 'tensorflow' has no attribute 'Session'": lambda t: t.tf.Session(),
    "has no attribute 'AdamOptimizer'": lambda t: t.tf.train.AdamOptimizer(0.01),
    "has no attribute 'Optimizer'": lambda t: t.tf.train.Optimizer,
    "has no attribute 'MonitoredTrainingSession'": lambda t: t.tf.train.MonitoredTrainingSession(),
    "tf.placeholder() is not compatible with eager execution": lambda t: t.tf.compat.v1.placeholder(
        t.tf.float32
    ),
    "The Session graph is empty": lambda t: t.tf.compat.v1.Session().run(t.tf.constant(1)),
    "should be a function when eager execution is enabled": lambda t: minimized(t.tf.compat.v1),
    "broadcast_global_variables is for graphs of TensorFlow 1": lambda t: (
        t.hvt.BroadcastGlobalVariablesHook(0).begin()
    ),
    "is not available with Keras 3": lambda t: t.tf.compat.v1.layers.dense,
    "module 'tensorflow' has no attribute 'estimator'": lambda t: t.tf.estimator.Estimator,
}
"""What each says in TensorFlow 2 and Keras 3; the cure is ``a_script_of_tensorflow_1``."""
IN_WAY_3 = "numpy() is only available when eager execution is enabled"


def said(call):
    """The error's text, with its class as Python prints it."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_the_page_has_what_is_tried_here():
    assert set(rows()) == {*KERAS, *OF_TENSORFLOW_1, IN_WAY_3}
    assert {message: cells[2] for message, cells in cells_by_message().items()} == CURES


@pytest.mark.slow
def test_keras_3(tmp_path):
    if not is_installed("tf_keras"):
        pytest.skip("tf_keras is not installed, which writes a model to be read here")

    def work(rank, folder):
        import keras

        t = tools(keras, folder)
        for message, (has, cure) in KERAS.items():
            assert message in said(functools.partial(has, t)), message
            cure(t)
        for message, has in OF_TENSORFLOW_1.items():
            assert message in said(functools.partial(has, t)), message
        return True

    def write(rank, folder):
        import tf_keras

        t = tools(tf_keras, folder)
        t.model("sgd").save(f"{folder}/of_keras_2")
        saved_by_keras_2(t)
        return True

    assert all(KERAS_RUNNERS["tf_keras"](1, write, str(tmp_path)))
    assert all(KERAS_RUNNERS["tensorflow"](1, work, str(tmp_path), timeout_s=120))


@pytest.mark.slow
def test_keras_2(tmp_path):
    """With TF_USE_LEGACY_KERAS=1 what the page says works does, and the rest is the same."""
    if not is_installed("tf_keras"):
        pytest.skip("tf_keras is not installed")

    def work(rank, folder, expected):
        from tensorflow import keras

        t = tools(keras, folder)
        t.model().save(f"{folder}/of_keras_2")
        for message, (has, cure) in KERAS.items():
            found = said(functools.partial(has, t))
            if expected[message] == "works":
                assert not found, (message, found)
            else:
                assert found, message
                if message in OF_LEGACY:
                    OF_LEGACY[message](keras.optimizers.legacy.SGD, t)
                else:
                    assert expected[message] == "the same", message
                    cure(t)
        return True

    assert all(KERAS_RUNNERS["tf_keras"](1, work, str(tmp_path), rows(), timeout_s=120))


def a_script_of_tensorflow_1(rank):
    """As they are written, but for its first lines."""
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    import horovod.tensorflow as hvd

    hvd.init()
    image, label = tf.placeholder(tf.float32, [None, 2]), tf.placeholder(tf.float32, [None, 1])
    output = tf.layers.dense(image, 1, use_bias=False, kernel_initializer=tf.ones_initializer())
    loss = tf.reduce_mean((output - label) ** 2)
    with tf.variable_scope("start"):
        start = tf.get_variable("start", initializer=float(rank + 3))
    optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.25))
    global_step = tf.train.get_or_create_global_step()
    train = optimizer.minimize(loss, global_step=global_step)
    hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=9)]
    config = tf.ConfigProto()
    config.gpu_options.visible_device_list = str(hvd.local_rank())
    with tf.train.MonitoredTrainingSession(hooks=hooks, config=config) as session:
        while session.run(global_step) < 2 and not session.should_stop():
            session.run(train, {image: [[1.0, rank]], label: [[0.0]]})
        found, first = session.run([tf.trainable_variables()[0], start])
    assert first == 3.0
    return found.tolist()


def a_model_in_way_3(rank):
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    t = tools(tf.keras, "")
    callback = t.hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    return said(lambda: t.model().fit(X, Y, verbose=0, callbacks=[callback]))


def test_tensorflow_1():
    if not is_installed("tf_keras"):
        pytest.skip("tf_keras is not installed, which tf.layers needs")
    weights, inputs = np.ones((2, 1)), np.array([[1.0, 0.0], [1.0, 1.0]])
    for _ in range(2):
        weights = weights - 0.25 * inputs.T @ (2 * inputs @ weights) / 2
    run_ranks = KERAS_RUNNERS["tf_keras"]
    for found in run_ranks(2, a_script_of_tensorflow_1, timeout_s=100):
        np.testing.assert_allclose(found, weights, rtol=1e-6)
    assert IN_WAY_3 in run_ranks(1, a_model_in_way_3)[0]
