"""Scripts that ``kolovod init`` changes: what is expected of each, and running them as ranks do.

python tests/support/migrated.py              # writes tests/migrate/expected anew
python tests/support/migrated.py SCRIPT       # as a rank: runs it, and says how it ended
"""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "migrate" / "scripts"
EXPECTED = ROOT / "tests" / "migrate" / "expected"
CORPUS = ROOT / "tests" / "migrate" / "corpus"
"""Scripts as people write them, each of which prints its accuracy on data that it has not seen."""
RENAMED = ("horovod_keras", "horovod_tensorflow", "horovod_torch")
"""Those that are also tried with --rename."""
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
DEADLINE_S = 180


def cases() -> list[tuple[str, bool]]:
    """The name of each script, and whether with --rename."""
    names = sorted(path.stem for path in SCRIPTS.glob("*.py"))
    return [(name, False) for name in names] + [(name, True) for name in RENAMED]


def expected_file(name: str, rename: bool) -> Path:
    return EXPECTED / f"{name}{'_renamed' if rename else ''}.txt"


def proposed(name: str, rename: bool) -> Any:
    """What is proposed for a script."""
    from kolovod.migrate.proposal import propose

    path = SCRIPTS / f"{name}.py"
    return propose(path.read_bytes(), path.name, rename=rename)


def text(name: str, rename: bool) -> str:
    """A proposal, whole, as the user sees it."""
    from kolovod.migrate import words

    made = proposed(name, rename)
    old = (SCRIPTS / f"{name}.py").read_bytes()
    parts = [
        f"{made.what}: {made.outcome.value}: {made.summary}",
        words.diff(f"{name}.py", old, made, colored=False),
        words.remarks("Why:", made.reasons),
        words.remarks("Needed:", made.needs),
        words.remarks("Look:", made.looks),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def run_on_two_ranks(script: Path) -> tuple[list[tuple[str, int]], str]:
    """By rank a digest of the weights at the end and the steps; and what the ranks wrote."""
    return run_ranks(script, 2)


def run_ranks(script: Path, size: int) -> tuple[list[tuple[str, int]], str]:
    """As ``run_on_two_ranks``, on so many."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kolovod", "run", "-np", str(size), "--"),
            *(sys.executable, __file__, str(script)),
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=script.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", **QUIET},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"\[(\d)\]<stdout>:ended with (\w+) after (\d+) steps", done.stdout)
    ends = {int(rank): (digest, int(steps)) for rank, digest, steps in found}
    assert sorted(ends) == list(range(size)), done.stdout + done.stderr
    return [ends[rank] for rank in range(size)], done.stdout


def run_alone(script: Path) -> str:
    """Run a script that starts its ranks itself; return what it wrote."""
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True, text=True, timeout=DEADLINE_S, cwd=script.parent, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracy(said: str) -> float:
    """The last one that a script has printed."""
    return float(re.findall(r"accuracy (-?[\d.]+)", said)[-1])


# As a rank ---------------------------------------------------------------------------------------


def _run(path: str) -> None:
    """Run a script with random numbers that differ from rank to rank, and say how it ended."""
    import random

    import numpy as np

    seed = 100 + int(os.environ.get("KOLOVOD_RANK", "0"))
    random.seed(seed)
    np.random.seed(seed)
    source = Path(path).read_text()
    sys.argv = [path]
    if "torch.optim" in source:
        weights, steps = _run_torch(path, seed)
    elif "keras" in source or "tensorflow" in source:
        weights, steps = _run_keras(path, seed)
    elif "jax" in source or "optax" in source:
        weights, steps = _run_jax(path)
    else:
        weights, steps = _run_torch(path, seed)
    assert weights
    digest = hashlib.sha256()
    for each in weights:
        digest.update(np.ascontiguousarray(each).tobytes())
    print(f"ended with {digest.hexdigest()} after {steps} steps", flush=True)


def _run_torch(path: str, seed: int) -> tuple[list[Any], int]:
    import torch
    from torch.optim import optimizer as optimizers

    torch.manual_seed(seed)
    made: list[torch.optim.Optimizer] = []
    steps: list[object] = []
    original = torch.optim.Optimizer.__init__

    def init(self: torch.optim.Optimizer, *arguments: Any) -> None:
        original(self, *arguments)
        made.append(self)

    torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign]
    optimizers.register_optimizer_step_post_hook(lambda each, *_: steps.append(each))
    runpy.run_path(path, run_name="__main__")
    parameters = [p for each in made for group in each.param_groups for p in group["params"]]
    return [p.detach().float().numpy() for p in parameters], len(steps)


def _run_keras(path: str, seed: int) -> tuple[list[Any], int]:
    """Take what an optimizer was made for, since not every model is fitted."""
    os.environ.setdefault("KERAS_BACKEND", _backend(path))
    import keras

    keras.utils.set_random_seed(seed)
    built: list[Any] = []
    original = keras.optimizers.Optimizer.build

    def build(self: Any, variables: Any) -> Any:
        built.append((self, variables))
        return original(self, variables)

    keras.optimizers.Optimizer.build = build
    runpy.run_path(path, run_name="__main__")
    weights = [keras.ops.convert_to_numpy(each) for _, variables in built for each in variables]
    return weights, sum(int(each) for each in {id(o): o.iterations for o, _ in built}.values())


def _backend(path: str) -> str:
    """The backend that a script of Keras asks for before it imports that."""
    found = re.search(r"""KERAS_BACKEND["'](?:\] = |, )["'](\w+)""", Path(path).read_text())
    return found[1] if found else "tensorflow"


def _run_jax(path: str) -> tuple[list[Any], int]:
    """Take what the ranks wait for at the end, which is no global name where a function trains."""
    import jax
    import numpy as np

    waited: list[Any] = []
    original = jax.block_until_ready

    def block_until_ready(tree: Any) -> Any:
        waited.append(tree)
        return original(tree)

    jax.block_until_ready = block_until_ready
    names = runpy.run_path(path, run_name="__main__")
    trees = waited[-1:] or [names.get("params")]
    found = [np.asarray(leaf) for leaf in jax.tree.leaves(trees) if hasattr(leaf, "shape")]
    return found or [np.zeros(0)], 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _run(sys.argv[1])
    else:
        EXPECTED.mkdir(exist_ok=True)
        for each in cases():
            expected_file(*each).write_text(text(*each))
