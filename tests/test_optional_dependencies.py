"""A front end imports its own framework and no other; without it, it names the extra to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks import is_installed
from slow import slow_but

pytestmark = pytest.mark.frameworks

FRAMEWORKS = ("torch", "tensorflow", "keras", "tf_keras", "jax", "mxnet", "ray", "pyspark")
NEEDS = {  # what a front end cannot do without, and what it may import besides
    "kolovod": ("", ()),
    "kolovod.numpy": ("", ()),
    "kolovod.torch": ("torch", ()),
    "kolovod.tensorflow": ("tensorflow", ("keras", "tf_keras")),
    "kolovod.keras": ("keras", ()),
    "kolovod.jax": ("jax", ()),
    "kolovod.mxnet": ("mxnet", ()),
    "kolovod.ray": ("ray", ()),
    "kolovod.spark": ("pyspark", ()),
    "horovod": ("", ()),
    "horovod.torch": ("torch", ()),
    "horovod.tensorflow": ("tensorflow", ("keras", "tf_keras")),
    "horovod.keras": ("keras", ()),
    "horovod.mxnet": ("mxnet", ()),
    "horovod.ray": ("ray", ()),
    "horovod.spark": ("pyspark", ()),
}

# TensorFlow itself imports JAX where there is one.
SAY_WHAT_IS_IMPORTED = """
import importlib, sys
front_end, framework, *frameworks = sys.argv[1:]
if framework:
    importlib.import_module(framework)
before = set(sys.modules)
importlib.import_module(front_end)
print(*(name for name in frameworks if name in sys.modules.keys() - before))
"""
IMPORT_WITHOUT = """
import importlib, sys
sys.modules |= dict.fromkeys(sys.argv[2:])  # as if they were not installed
try:
    importlib.import_module(sys.argv[1])
except ImportError as error:
    print(type(error).__name__, error)
"""


def run(code, *arguments):
    """What a new interpreter prints."""
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# TensorFlow takes seconds to import, and does it for these, too.
QUICK = NEEDS.keys() - {"kolovod.keras", "horovod.keras", "horovod.tensorflow"}


@pytest.mark.parametrize("front_end", slow_but(QUICK, NEEDS))
def test_a_front_end_imports_no_other_framework(front_end):
    framework, allowed = NEEDS[front_end]
    if framework and not is_installed(framework):
        pytest.skip(f"{framework} is not installed")
    assert set(run(SAY_WHAT_IS_IMPORTED, front_end, framework, *FRAMEWORKS).split()) <= {*allowed}


@pytest.mark.parametrize("front_end", [name for name, (needed, _) in NEEDS.items() if needed])
def test_a_missing_framework_is_named_with_its_extra(front_end):
    extra = front_end.partition(".")[2]
    said = run(IMPORT_WITHOUT, front_end, *FRAMEWORKS)
    assert said.startswith(f"ModuleNotFoundError kolovod.{extra} needs ")
    assert f"pip install 'kolovod[{extra}]'" in said


COLLECT_WITHOUT = """
import sys
import pytest
sys.modules |= dict.fromkeys(sys.argv[1:])  # as if they were not installed
sys.exit(pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", "tests"]))
"""


@pytest.mark.slow
def test_tests_need_no_framework_to_be_found() -> None:
    """What ``make test`` installs is less than what CI does: PyTorch and NumPy are enough there."""
    beside = [name for name in FRAMEWORKS if name != "torch"]
    others = ["accelerate", "flax", "lightning", "mpi4py", "optax", "pyarrow", "transformers"]
    done = subprocess.run(
        [sys.executable, "-c", COLLECT_WITHOUT, *beside, *others],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
