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
RENAMED = ("horovod_keras", "horovod_tensorflow", "horovod_torch")
"""Those that are also tried with --rename."""
DEADLINE_S = 110


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
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kolovod", "run", "-np", "2", "--"),
            *(sys.executable, __file__, str(script)),
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=script.parent,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"\[(\d)\]<stdout>:ended with (\w+) after (\d+) steps", done.stdout)
    ends = {int(rank): (digest, int(steps)) for rank, digest, steps in found}
    assert sorted(ends) == [0, 1], done.stdout
    return [ends[0], ends[1]], done.stdout


# As a rank ---------------------------------------------------------------------------------------


def _run(path: str) -> None:
    """Run a script with random numbers that differ from rank to rank, and say how it ended."""
    seed = 100 + int(os.environ.get("KOLOVOD_RANK", "0"))
    source = Path(path).read_text()
    sys.argv = [path]
    if "keras" in source or "tensorflow" in source:
        weights, steps = _run_keras(path, seed)
    elif "jax" in source:
        weights, steps = _run_jax(path, seed)
    else:
        weights, steps = _run_torch(path, seed)
    assert weights
    digest = hashlib.sha256()
    for each in weights:
        digest.update(each.tobytes())
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
    return [p.detach().numpy() for p in parameters], len(steps)


def _run_keras(path: str, seed: int) -> tuple[list[Any], int]:
    import keras

    keras.utils.set_random_seed(seed)
    fitted: list[Any] = []
    original = keras.Model.fit

    def fit(self: Any, *arguments: Any, **options: Any) -> Any:
        fitted.append(self)
        return original(self, *arguments, **options)

    keras.Model.fit = fit
    names = runpy.run_path(path, run_name="__main__")
    if fitted:
        (model,) = fitted
        return model.get_weights(), int(model.optimizer.iterations)
    return names["model"].get_weights(), int(names["optimizer"].iterations)


def _run_jax(path: str, seed: int) -> tuple[list[Any], int]:
    import jax
    import numpy as np

    np.random.seed(seed)
    names = runpy.run_path(path, run_name="__main__")
    return [np.asarray(leaf) for leaf in jax.tree.leaves(names["params"])], 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _run(sys.argv[1])
    else:
        EXPECTED.mkdir(exist_ok=True)
        for each in cases():
            expected_file(*each).write_text(text(*each))
