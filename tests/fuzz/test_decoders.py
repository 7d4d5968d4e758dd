"""The decoders meet what real processes have sent, that with changes, and JSON of any shape."""

from __future__ import annotations

import json
import random

import pytest
from decoders import TARGETS, corpus
from fuzz import changed, paths, put
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(st.characters(), max_size=20)
    | st.sampled_from(["\ud800", "\x1b[2J", "x" * 300, -1, 0, 1, 1 << 63, 1e308, True])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5)
    ),
    max_leaves=20,
)
OF_JSON = [name for name in TARGETS if name not in ("config_file", "environment", "record")]
OF_JSON = [name for name in OF_JSON if not name.startswith(("handshake", "frames"))]
QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


@pytest.mark.parametrize("name", TARGETS)
def test_captured_messages_with_changes(name: str) -> None:
    inputs = corpus(name)
    source = random.Random(name)
    for data in (b"", *inputs, *(changed(inputs, source) for _ in range(300))):
        TARGETS[name](data)


@pytest.mark.parametrize("name", OF_JSON)
def test_a_real_message_with_a_value_that_nobody_expects(name: str) -> None:
    real = [json.loads(data) for data in corpus(name)]

    @QUICK
    @given(st.data())
    def try_it(data: st.DataObject) -> None:
        message = json.loads(json.dumps(data.draw(st.sampled_from(real))))
        place = data.draw(st.sampled_from(paths(message)))
        TARGETS[name](json.dumps(put(message, place, data.draw(VALUES))).encode())

    try_it()


@pytest.mark.parametrize("name", OF_JSON)
@pytest.mark.parametrize(
    "data",
    [
        b"[" * 50_000,
        b'{"a":' * 9_000 + b"1" + b"}" * 9_000,
        b"9" * 10_000,
        b'{"rank": NaN}',
        b"\xff\xfe",
        b'"\\ud800"',
    ],
    ids=["deep", "deep_objects", "huge_number", "nan", "no_utf8", "surrogate"],
)
def test_json_that_breaks_parsers(name: str, data: bytes) -> None:
    TARGETS[name](data)


def test_a_few_lines_of_yaml_that_stand_for_gigabytes() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    everywhere = [
        "\n".join(lines),
        "\n".join([*lines, "controller: *a11"]),
        "x: &x [1]\n" + "\n".join(lines[:1] + lines[1:] + ["params: *a11"]),
        f"params: {{cycle_time_ms: &a0 {[[1] * 9] * 9}, fusion_threshold_mb: [*a0, *a0]}}",
        "library_options: {thread_affinity: []}",
        "? " * 3000 + "x",
        "[" * 20_000,
    ]
    for text in everywhere:
        TARGETS["config_file"](text.encode())
