"""The scripts of examples/horovod, started by horovodrun, by kolovod run, and alone.

The two launchers start a script in the same way (launch/job.py), so that each script runs under
one of them, and both start several.
"""

import ast
import re
import subprocess
import sys

import pytest
from paths import EXAMPLES

pytest.importorskip("torch", reason="PyTorch is not installed")

HOROVOD = EXAMPLES / "horovod"
HOROVODRUN = [sys.executable, "-m", "horovod.runner.launch"]
KOLOVOD = [sys.executable, "-m", "kolovod", "run"]


def run(launcher, size, script, *arguments):
    command = [sys.executable, str(HOROVOD / script), *arguments]
    if size > 1:
        command = [*launcher, "-np", str(size), *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", sorted(HOROVOD.glob("*.py")), ids=lambda path: path.stem)
def test_scripts_know_of_horovod_and_torch_only(script):
    modules = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
    assert "horovod.torch" in modules
    others = {module.split(".")[0] for module in modules} - sys.stdlib_module_names
    assert others == {"horovod", "torch"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "size", "options"),
    [
        (None, 1, []),
        (HOROVODRUN, 2, ["--fp16-allreduce"]),
        (KOLOVOD, 2, ["--use-adasum"]),
    ],
    ids=["alone", "horovodrun-fp16", "kolovod-adasum"],
)
def test_mnist(launcher, size, options):
    out = run(launcher, size, "mnist.py", "--images", "1500", *options)
    (accuracy,) = re.findall(r"epoch 1: .* accuracy ([\d.]+)%", out)
    assert float(accuracy) > 80


@pytest.mark.slow
def test_synthetic_benchmark():
    out = run(HOROVODRUN, 2, "synthetic_benchmark.py", "--num-iters", "1", "--image-size", "32")
    assert re.search(r"Total img/sec on 2 rank\(s\): [\d.,]+", out)


@pytest.mark.slow
def test_accumulation():
    losses = re.findall(r"loss ([\d.]+)", run(KOLOVOD, 2, "accumulation.py"))
    assert len(losses) == 4
    assert float(losses[-1]) < float(losses[0])


@pytest.mark.slow
def test_process_sets():
    assert "slopes by rank: [2.0, -3.0, 2.0]" in run(HOROVODRUN, 3, "process_sets.py")


@pytest.mark.parametrize(
    ("launcher", "size"),
    [
        pytest.param(None, 1, marks=pytest.mark.slow),
        pytest.param(KOLOVOD, 3, marks=pytest.mark.slow),
    ],
    ids=["alone", "kolovod"],
)
def test_uneven_data(launcher, size):
    assert f"epoch 1: rank {size - 1} was the last" in run(launcher, size, "uneven_join.py")


@pytest.mark.slow
def test_hyperparameters():
    assert "the same rate: True" in run(HOROVODRUN, 2, "hyperparameters.py")


@pytest.mark.slow
def test_elastic():
    """A host is lost after 33 batches; the others go on from the commit after 30."""
    hosts = ["--min-np", "1", "-H", "localhost:1,127.0.0.1:1"]
    out = run([*HOROVODRUN, *hosts], 2, "elastic.py", "--fail-at", "33")
    assert re.findall(r"batch (\d+): (\d) rank", out) == [("0", "2"), ("30", "1")]
    assert "1 rank(s) found [1.0, -2.0, 3.0, 0.5]" in out
