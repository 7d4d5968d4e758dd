"""What a launcher advises where a rank fails with a usual mistake."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from launched import run

from kolovod.launch.other_python import advice
from kolovod.migrate.cures import CURES, cure_of

SAID = "AttributeError: 'Mean' object has no attribute 'reset_states'. Did you mean: 'reset_state'?"


@pytest.mark.parametrize(
    ("text", "said", "cure"),
    [
        ("import horovod.keras as hvd\n", SAID, "`metric.reset_state()`"),
        ("import keras\n", SAID, ""),  # of a script that has never known another Keras
        ("import horovod.keras as hvd\n", "ValueError: loss is nan", ""),
        (None, SAID, ""),
    ],
)
def test_old_scripts(tmp_path: Path, text: str | None, said: str, cure: str) -> None:
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)
    found = advice(["python", str(script)], said)
    assert found.endswith(cure)
    assert bool(found) == bool(cure)


def test_each_message_has_its_own_cure() -> None:
    """None is a part of another one, which would hide it."""
    for message in CURES:
        assert [other for other in CURES if other in message] == [message]


def test_a_cure_says_what_the_page_calls_a_way() -> None:
    for message in CURES:
        found = cure_of(message)
        assert ("way 3" in found) == ("way 3 is `import tensorflow.compat.v1 as tf`" in found)
        assert ("way 2" in found) == ("way 2 is `pip install tf_keras`" in found)
    assert "way 3 is" in cure_of("module 'tensorflow' has no attribute 'Session'")


@pytest.mark.parametrize("module", ["queue", "select"])
def test_a_file_that_hides_a_module_of_pythons_own_is_named(module: str, tmp_path: Path) -> None:
    """One that Kolovod needs when it is imported, and one that it needs later."""
    (tmp_path / f"{module}.py").write_text("x = 1\n")
    script = tmp_path / "train.py"
    script.write_text("import kolovod\n\nkolovod.init()\n")
    done = run("run", "-np", "2", "--", sys.executable, str(script))
    assert done.returncode == 1
    text = f"{tmp_path / module}.py hides Python's own module '{module}', which libraries import"
    assert text in done.stderr


@pytest.mark.parametrize(
    ("name", "script_name", "code"),
    [
        ("kolovod", "kolovod", "import kolovod.numpy"),
        ("cloudpickle", "train", "import cloudpickle; cloudpickle.dumps"),
    ],
)
def test_a_file_that_hides_a_package_is_named(
    name: str, script_name: str, code: str, tmp_path: Path
) -> None:
    """The script itself, as a first try of a library is often called; and one beside it."""
    hiding = tmp_path / f"{name}.py"
    hiding.write_text("")
    script = tmp_path / f"{script_name}.py"
    script.write_text(f"{code}\n")
    done = run("run", "-np", "1", "--", sys.executable, str(script))
    assert done.returncode == 1
    assert f"{hiding} hides the package '{name}', which libraries import" in done.stderr


@pytest.mark.parametrize(
    ("ranks", "module", "flags"),
    [
        (2, "kolovod", []),
        pytest.param(1, "horovod", [], marks=pytest.mark.slow),
        pytest.param(2, "kolovod", ["--elastic"], marks=pytest.mark.slow),
    ],
)
def test_a_python_without_the_package_is_named_with_the_launchers(
    ranks: int, module: str, flags: list[str]
) -> None:
    bare = [sys.executable, "-I", "-S", "-c"]  # without any packages
    done = run("run", "-np", str(ranks), *flags, "--", *bare, f"import {module}.torch")
    assert done.returncode == 1
    assert re.search(
        rf"^kolovod: {re.escape(sys.executable)} has no module {module}; this launcher is that of "
        rf"{re.escape(sys.executable)}: start the script by ",
        done.stderr,
        re.MULTILINE,
    )
    other = run("run", "-np", str(ranks), *flags, "--", *bare, f"import {module}_not")
    assert other.returncode == 1
    assert "has no module" not in other.stderr
