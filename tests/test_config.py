"""kolovod.config: the knob table, and what reads it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT

from kolovod import _native
from kolovod.config import KNOBS, Knob, Settings, load, parse_bool
from kolovod.errors import InvalidArgumentError


def test_the_engine_has_the_same_fields_and_defaults() -> None:
    assert load({}).engine_config() == _native.config_defaults()


def test_the_engine_allows_as_many_connections() -> None:
    (knob,) = (knob for knob in KNOBS if knob.name == "connections")
    assert knob.maximum == _native.MOST_STRIPES


def test_names_are_unique_and_documented() -> None:
    names = [name for knob in KNOBS for name in (knob.environment, *knob.aliases)]
    assert not set(names) & {knob.off for knob in KNOBS}
    assert len(names) == len(set(names))
    flags = [knob.flag for knob in KNOBS if knob.flag]
    assert len(flags) == len(set(flags))
    for knob in KNOBS:
        assert knob.environment.startswith("KOLOVOD_")
        assert knob.text.endswith(".")
        # Units are said, in the name or beside it.
        assert knob.type in (str, bool) or knob.unit


def test_defaults_are_legal() -> None:
    for knob in KNOBS:
        assert knob.parse(str(knob.default), knob.environment) == knob.default


def test_values_come_from_the_environment() -> None:
    settings = load(
        {"KOLOVOD_FUSION_BYTES": "4096", "KOLOVOD_BACKEND": "mpi", "KOLOVOD_START_TIMEOUT_S": "2.5"}
    )
    assert (settings.fusion_bytes, settings.backend) == (4096, "mpi")
    assert settings.engine_config()["fusion_bytes"] == 4096
    assert settings.engine_config()["start_timeout_ms"] == 2500


def test_aliases_of_horovod_and_who_wins() -> None:
    assert load({"HOROVOD_FUSION_THRESHOLD": "123"}).fusion_bytes == 123
    both = {"HOROVOD_FUSION_THRESHOLD": "123", "KOLOVOD_FUSION_BYTES": "456"}
    assert load(both).fusion_bytes == 456


def test_the_limits_for_late_ranks_and_what_switches_them_off() -> None:
    horovods = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90",
    }
    settings = load({**horovods, "HOROVOD_STALL_CHECK_DISABLE": "0"})
    assert (settings.late_report_s, settings.late_failure_s) == (30.0, 90.0)
    assert settings.engine_config()["late_report_ms"] == 30_000
    assert settings.engine_config()["late_failure_ms"] == 90_000
    for true in ("1", "2", "true", "on"):
        settings = load({**horovods, "HOROVOD_STALL_CHECK_DISABLE": true})
        assert (settings.late_report_s, settings.late_failure_s) == (0.0, 0.0)
    for false in ("-1", "no"):
        assert load({**horovods, "HOROVOD_STALL_CHECK_DISABLE": false}).late_report_s == 30.0
    settings = load({"HOROVOD_STALL_CHECK_DISABLE": "1", "KOLOVOD_LATE_REPORT_S": "0.0001"})
    assert settings.engine_config()["late_report_ms"] == 1
    with pytest.raises(InvalidArgumentError, match="HOROVOD_STALL_CHECK_DISABLE='perhaps'"):
        load({"HOROVOD_STALL_CHECK_DISABLE": "perhaps"})


def test_an_empty_variable_is_unset() -> None:
    assert load({"KOLOVOD_FUSION_BYTES": " "}) == Settings()


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("KOLOVOD_FUSION_BYTES", "many", "whole number of bytes"),
        ("KOLOVOD_FUSION_BYTES", "-1", "at least 0"),
        ("KOLOVOD_FUSION_BYTES", "1e6", "whole number"),
        ("KOLOVOD_FUSION_BYTES", "9" * 40, "at most|at least"),
        ("HOROVOD_FUSION_THRESHOLD", "x", "whole number"),
        ("KOLOVOD_CHUNK_SLOTS", "1", "at least 3"),
        ("KOLOVOD_START_TIMEOUT_S", "nan", "at least"),
        ("KOLOVOD_START_TIMEOUT_S", "soon", "a number of seconds"),
        ("KOLOVOD_BACKEND", "smoke", "native, mpi, gloo"),
        ("HOROVOD_THREAD_AFFINITY", "0;1", "core numbers, as 0,1"),
        ("KOLOVOD_THREAD_AFFINITY", "0,", "core numbers, as 0,1"),
    ],
)
def test_a_bad_value_is_named(variable: str, value: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason) as caught:
        load({variable: value})
    assert variable in str(caught.value)
    assert repr(value) in str(caught.value)


@given(st.sampled_from(KNOBS), st.text(max_size=20))
def test_any_text_is_a_legal_value_or_refused(knob: Knob, text: str) -> None:
    variable = knob.environment
    try:
        settings = load({variable: text})
    except InvalidArgumentError as error:
        message: str | None = str(error)
    else:
        message = None
        assert all(-(1 << 63) <= v < 1 << 63 for v in settings.engine_config().values())
    assert message is None or variable in message


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_true(text: str) -> None:
    assert parse_bool(text, "X") is True


@pytest.mark.parametrize("text", ["0", "False", "no", "OFF"])
def test_false(text: str) -> None:
    assert parse_bool(text, "X") is False


@pytest.mark.parametrize("text", ["", "2", "maybe", "truee"])
def test_neither(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"X=.*1/0, true/false"):
        parse_bool(text, "X")


def test_the_documentation_is_current() -> None:
    script = ROOT / "scripts" / "knobs.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
