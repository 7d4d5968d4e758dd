"""The examples for TensorFlow, shortened, as a user starts them."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from forked import run_tensorflow_ranks
from frameworks import is_installed
from paths import EXAMPLES

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(150),
]

needs_digits = pytest.mark.skipif(
    not is_installed("sklearn"), reason="scikit-learn, whose digits they are, is not installed"
)

OF_HOROVOD = EXAMPLES / "horovod" / "tensorflow"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


def run(launcher, script, *arguments):
    """The output of an example that must end well."""
    command = [sys.executable, "-m", *launcher, "-np", "2", sys.executable, str(script)]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=140,
        env={**os.environ, **QUIET},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@needs_digits
def test_digits():
    script = EXAMPLES / "tensorflow_digits.py"
    options = ("--epochs", "1", "--warmup-epochs", "0", "--compare")
    output = run(["kolovod", "run"], script, *options)
    found = re.findall(r"process(?:es)?: accuracy (\d+\.\d+)%", output)
    assert len(found) == 2
    assert float(found[0]) > 50
    assert abs(float(found[0]) - float(found[1])) < 2
    losses = re.findall(r"epoch  1/1 loss (\d+\.\d+)", output)
    assert abs(float(losses[0]) - float(losses[1])) < 0.01


@pytest.mark.slow
def test_text_learns():
    options = ("--steps", "40", "--report-every", "20", "--width", "32", "--layers", "1")
    script = EXAMPLES / "tensorflow_text.py"
    output = run(["kolovod", "run"], script, *options, "--lr", "0.01", "--compression", "bf16")
    bits = [float(found) for found in re.findall(r"(\d\.\d+) bits per character", output)]
    assert len(bits) == 2  # rank 0 alone reports
    assert bits[1] < bits[0] < 6.6  # 96 characters: log2 is 6.58
    assert bits[1] < 4.53  # what is possible without looking at the characters before


def example(name):
    sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def text_in_float64(rank):
    """The weights that the example comes to, and on rank 0 those of it alone."""
    import tensorflow as tf

    import kolovod.tensorflow as kv

    tf.keras.backend.set_floatx("float64")
    text = example("tensorflow_text")
    sys.argv = ["tensorflow_text.py", "--steps", "20", "--lr", "0.01", "--warmup", "5",
                "--layers", "1", "--width", "32", "--context", "16", "--batch-size", "8",
                "--characters", "50000"]  # fmt: skip
    arguments = text.parse_arguments()
    kv.init()
    nets = [text.train(arguments, 2)]
    kv.shutdown()
    if rank == 0:
        kv.init(comm=[0])
        nets.append(text.train(arguments, 2))
    return [[np.array(v) for v in net.trainable_variables] for net in nets]


@pytest.mark.slow
def test_text_is_that_of_one_process():
    (together, alone), (on_rank_1,) = run_tensorflow_ranks(2, text_in_float64, timeout_s=100)
    assert any(weights.shape == (16, 32) for weights in alone)  # positions are learnt, too
    for mine, theirs, whole in zip(together, on_rank_1, alone, strict=True):
        assert mine.dtype == np.float64
        assert (mine == theirs).all()
        np.testing.assert_allclose(mine, whole, rtol=1e-8, atol=1e-8)


def digits_in_float64(rank):
    """The weights that an epoch of the example comes to, and on rank 0 those of it alone."""
    import tensorflow as tf

    import kolovod.tensorflow as kv

    tf.keras.backend.set_floatx("float64")
    digits = example("tensorflow_digits")
    sys.argv = ["tensorflow_digits.py", "--epochs", "1", "--warmup-epochs", "0", "--lr", "0.01"]
    arguments, nets, build = digits.parse_arguments(), [], digits.build_net
    digits.build_net = lambda: nets.append(build()) or nets[-1]
    kv.init()
    digits.train(arguments, 2, *digits.load_data(arguments.seed))
    kv.shutdown()
    if rank == 0:
        kv.init(comm=[0])
        digits.train(arguments, 2, *digits.load_data(arguments.seed))
    return [[np.array(v) for v in net.trainable_variables] for net in nets]


@needs_digits
def test_digits_are_those_of_one_process():
    (together, alone), (on_rank_1,) = run_tensorflow_ranks(2, digits_in_float64, timeout_s=100)
    for mine, theirs, whole in zip(together, on_rank_1, alone, strict=True):
        assert mine.dtype == np.float64
        assert (mine == theirs).all()
        np.testing.assert_allclose(mine, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_script_of_horovod():
    output = run(["horovod.runner.launch"], OF_HOROVOD / "mnist.py", "--images", "1500")
    (accuracy,) = re.findall(r"epoch 1: .* accuracy ([\d.]+)%", output)
    assert float(accuracy) > 80


@pytest.mark.parametrize("script", sorted(OF_HOROVOD.glob("*.py")), ids=lambda path: path.stem)
def test_scripts_know_of_horovod_and_tensorflow_only(script):
    modules = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
    assert "horovod.tensorflow" in modules
    others = {module.split(".")[0] for module in modules} - sys.stdlib_module_names
    assert others == {"horovod", "numpy", "tensorflow"}
