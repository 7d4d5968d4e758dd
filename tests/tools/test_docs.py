"""Every Python block of the README and of the documentation runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from textwrap import dedent

import docs_members
import pytest
from docs_frames import FRAMES
from frameworks import is_installed
from paths import ROOT

pytestmark = pytest.mark.frameworks

DOCS = ROOT / "docs"
ELSEWHERE = {
    "ray": "tests/clusters/test_guides.py",
    "spark": "tests/clusters/test_guides.py",
    "tensorflow-0": "tests/frontends/tensorflow/test_tf_data_service.py: it needs another job",
}
"""Where blocks run that need more than this."""
ELASTIC = ["--elastic", "-np", "2"]
FLAGS = {
    "failures": ["-np", "3", "--keep-going"],
    "process-sets": ["-np", "3"],
    "debug-a-hang": ["-np", "2", "--late-report-s=2"],
    "late-ranks": ["-np", "1"],
    "elastic-reference-2": ["--elastic", "-np", "3"],
    "elastic": ELASTIC,
    "elastic-reference": ELASTIC,
    "elastic-data": ELASTIC,
    "torch-distributed-1": ELASTIC,
    "torch-distributed-3": [*ELASTIC, "--replica-size", "2"],
    "checkpoints-4": ELASTIC,
}
"""By page, or block; else two ranks."""
CHANGED = {"from-ddp-0": ('init_process_group("gloo")', 'init_process_group("kolovod")')}
"""By block: the one change that its page advises, so that it runs as a reader would have it.

Gloo is not run here: a thread of it may hold the last all-reduce's tensors when the interpreter is
about to end, and PyTorch 2.13 aborts then (pytorch/pytorch#179291; one run in ten with busy
processes beside it and Gloo's threads scheduled last).
"""
FRAMEWORKS = ("torch", "torchdata", "tensorflow", "keras", "jax", "optax", "mxnet")
FAST = ("numpy", "point-to-point", "process-sets")  # these import no framework
TIMEOUT_S = 100


def blocks():
    """Name and page of each block, and the block; slow where a framework is imported."""
    for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("start/*.md"))]:
        found = re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.S | re.M)
        for number, code in enumerate(found):
            where = "start-" if page.parent.stem == "start" else ""
            name = f"{where}{page.stem}-{number}"
            if ELSEWHERE.keys().isdisjoint({name, page.stem}):
                marks = [] if page.stem in FAST else [pytest.mark.slow]
                yield pytest.param(name, page, dedent(code), id=name, marks=marks)


def has_gpu():
    import torch

    return torch.cuda.is_available()


def run(command, folder):
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        cwd=folder,  # where some write files
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def numbers(said):
    """The epochs, or steps, that are kept, in the order in which rank 0 says so."""
    return [int(number) for number in re.findall(r"(?:epoch|step) (\d+)", said)]


@pytest.mark.parametrize(("name", "page", "code"), list(blocks()))
def test_a_block_runs(tmp_path, name, page, code):
    before, after = FRAMES.get(name, ("", ""))
    old, new = CHANGED.get(name, ("", ""))
    assert old in code
    code = f"{before}\n{code.replace(old, new)}\n{after}"
    missing = [f for f in FRAMEWORKS if re.search(rf"\b{f}\b", code) and not is_installed(f)]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    if "cuda" in code and not has_gpu():
        pytest.skip("no GPU is here")
    script = tmp_path / "train.py"
    script.write_text(code)
    command = [sys.executable, str(script)]
    if "kolovod.run(" not in code:
        flags = FLAGS.get(name, FLAGS.get(page.stem, ["-np", "2"]))
        command = [sys.executable, "-m", "kolovod", "run", *flags, "--", *command]
    ended = run(command, tmp_path)
    if page.stem == "checkpoints":
        again = run(["3" if word == "2" else word for word in command], tmp_path)
        assert numbers(again.stdout)[0] > numbers(ended.stdout)[-1]  # it has gone on
    if page.stem == "debug-a-hang":
        assert "rank 1" in ended.stderr
        assert "in load_a_batch" in ended.stderr
    if name == "not-finite-0":
        assert "gradients of rank 1 are not finite (inf or nan) in step 4" in ended.stderr
    if page.stem == "failures":
        assert "rank 1 of 2: [2.]" in ended.stdout


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("kolovod", "numpy"),
        ("kolovod.numpy", "numpy"),
        ("kolovod.torch", "torch"),
        ("kolovod.metrics", "numpy"),
        ("kolovod.errors", "numpy"),
        ("kolovod.testing", "numpy"),
        ("kolovod.ray", "ray"),
        ("kolovod.spark", "pyspark"),
        ("horovod.ray", "ray"),
        ("horovod.spark", "pyspark"),
    ],
)
def test_the_reference_has_every_public_name(name, needs):
    if not is_installed(needs):
        pytest.skip(f"{needs} is not installed")
    exported = set(import_module(name).__all__)
    assert set(docs_members.public_names(name)) == exported
    page = name.removeprefix("kolovod.").replace(".", "-")
    filled = docs_members.filled((DOCS / "reference" / f"{page}.md").read_text())
    for public in exported - {*docs_members.OPS, *docs_members.LEFT_OUT}:
        assert re.search(rf"::: [a-z._]*\.{public}\n|\[kolovod\.{public}\]", filled), public
