"""What a launcher advises where a rank fails with a usual mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

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
