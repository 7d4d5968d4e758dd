"""A copy of a distributed optimizer is distributed, too, or says that it is not."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import warnings

import pytest
from forked import KERAS_RUNNERS as RUNNERS
from keras_jobs import assert_same_everywhere, fit, new_model, prepared, quick, runs
from slow import slow_but

from kolovod.errors import InvalidArgumentError

pytestmark = pytest.mark.timeout(300)


def from_file(keras, make, path):
    model = make()
    fit(model, epochs=1)
    model.save(path)
    return keras.models.load_model(path)


def by_config(optimizer):
    return type(optimizer).from_config(optimizer.get_config())


def ways(keras, kv, sgd, which, folder):
    """By name: a function that makes an optimizer, or a model with one, of a distributed one."""
    optimizers, mixed = keras.optimizers, keras.mixed_precision

    def model():
        return quick(new_model(keras, sgd()), which)

    found = {
        "load_model": lambda: from_file(keras, model, f"{folder}/{kv.rank()}.keras"),
        "from_config": lambda: by_config(sgd()),
        "of the class": lambda: optimizers.SGD.from_config(sgd().get_config()),
        "deserialize": lambda: optimizers.deserialize(optimizers.serialize(sgd())),
        "of a copy": lambda: by_config(by_config(sgd())),
        "in a scaler": lambda: by_config(mixed.LossScaleOptimizer(sgd())),
    }
    if which != "tf_keras":  # whose optimizers cannot be copied or pickled
        found |= {
            "deepcopy": lambda: copy.deepcopy(sgd()),
            "pickle": lambda: pickle.loads(pickle.dumps(sgd())),
            "deepcopy of a model": lambda: copy.deepcopy(model()),
        }
    else:
        legacy = optimizers.legacy.SGD
        found["legacy"] = lambda: by_config(kv.DistributedOptimizer(legacy(0.1)))
        found["h5"] = lambda: from_file(keras, model, f"{folder}/{kv.rank()}.h5")
    return found


def trained(keras, kv, which, made):
    """Whether the ranks are still alike when ``made`` has trained; and what was said meanwhile."""
    model = made if hasattr(made, "fit") else new_model(keras, made)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(quick(model, which), kv.rank(), kv.size(), epochs=1)
    said = [str(w.message) for w in caught if "copy of a DistributedOptimizer" in str(w.message)]
    try:
        assert_same_everywhere(kv, model)
    except AssertionError:
        return False, said
    return True, said


def check(rank, which, folder):
    keras, kv = prepared(which)

    def sgd(**arguments):
        return kv.DistributedOptimizer(keras.optimizers.SGD(0.1), **arguments)

    for name, make in ways(keras, kv, sgd, which, folder).items():
        assert trained(keras, kv, which, make()) == (True, []), name
    # A script that wraps what it has read goes on working, with the arguments that it gives.
    for made in (by_config(sgd()), by_config(keras.mixed_precision.LossScaleOptimizer(sgd()))):
        again = kv.DistributedOptimizer(made, op=kv.Sum)
        assert again is made
        assert trained(keras, kv, which, again) == (True, [])
        with pytest.raises(InvalidArgumentError, match="wrap it once"):
            kv.DistributedOptimizer(made)
    # What a configuration cannot hold.
    other = sgd(op=kv.Sum)
    is_alike, said = trained(keras, kv, which, by_config(other))
    assert not is_alike
    assert len(said) == 1
    assert "that the other one had" in said[0]
    # By our own function, with the arguments again; the name is the optimizer's own.
    path = f"{folder}/{kv.rank()}.keras"
    model = quick(new_model(keras, other), which)
    model.save(path)
    again = kv.load_model(path, op=kv.Sum)
    assert trained(keras, kv, which, again) == (True, [])
    assert again.optimizer.name == other.name
    # A plain one is what it was.
    plain = keras.optimizers.SGD(0.1)
    assert type(by_config(plain)) is type(plain)
    assert by_config(plain).get_config() == plain.get_config()
    return True


@pytest.mark.parametrize("which", slow_but(["tensorflow"], RUNNERS))
def test_copies(which, tmp_path):
    assert all(runs(which)(check, which, str(tmp_path)))


READER = """
import sys
import keras
if sys.argv[2] == "after":
    import kolovod.keras as kv
    kv.init()
model = keras.models.load_model(sys.argv[1])
print(type(model.optimizer).__name__, hasattr(model.optimizer, "_kolovod_base"))
"""


@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.parametrize("kolovod", ["after", "never"])
def test_a_file_is_read_by_other_processes(kolovod, tmp_path):
    def write(rank):
        keras, kv = prepared("torch")
        new_model(keras, kv.DistributedOptimizer(keras.optimizers.SGD(0.1))).save(path)

    path = str(tmp_path / "model.keras")
    runs("torch")
    RUNNERS["torch"](1, write)
    read = subprocess.run(
        [sys.executable, "-c", READER, path, kolovod],
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert read.stdout.split() == ["SGD", str(kolovod == "after")]
