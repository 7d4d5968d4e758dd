"""horovodrun --config-file: flags in a YAML file.

::

    controller: gloo            # or mpi
    params:
      fusion_threshold_mb: 32
    stall_check:
      warning_time_seconds: 30
"""

from __future__ import annotations

import argparse
import reprlib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from horovod.runner.flags import FLAGS, SWITCHES
from kolovod.notices import report_to_stderr

__all__ = ["SECTIONS", "apply_config_file"]

SECTIONS: dict[str, dict[str, str]] = {
    "params": {
        name: name
        for name in ("fusion_threshold_mb", "cycle_time_ms", "cache_capacity",
                     "hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce")
    },
    "autotune": {
        "enabled": "autotune",
        **{name: f"autotune_{name}"
           for name in ("log_file", "warmup_samples", "steps_per_sample",
                        "bayes_opt_max_samples", "gaussian_process_noise")},
    },
    "timeline": {"filename": "timeline_filename", "mark_cycles": "timeline_mark_cycles"},
    "stall_check": {
        "enabled": "no_stall_check",
        "warning_time_seconds": "stall_check_warning_time_seconds",
        "shutdown_time_seconds": "stall_check_shutdown_time_seconds",
    },
    "library_options": {
        name: name
        for name in ("mpi_threads_disable", "num_nccl_streams", "thread_affinity",
                     "gloo_timeout_seconds")
    },
    "logging": {"level": "log_level", "with_timestamp": "log_with_timestamp"},
}  # fmt: skip
"""For each key of each section the flag's name in the result of ``parse_args``."""

_MOST_SHOWN = 100
_OPPOSITE = {"no_stall_check"}  # the key says what is on, the flag what is off
_FLAGS = {flag.dest: flag for flag in FLAGS}
_SWITCHES = {switch.dest: switch for switch in SWITCHES}


def apply_config_file(options: argparse.Namespace, file: str) -> None:
    """Set the ``options`` that the command line does not set to what ``file`` says.

    Keys that are unknown are left out, and named on standard error: Horovod reads files that are
    for others, too. Raises ValueError naming the file, and the key of the value that is wrong.
    """
    sections = _known(_mapping(_read(file), file), ["controller", *SECTIONS], file)
    controller = sections.pop("controller", None)
    if controller not in (None, "gloo", "mpi"):
        raise ValueError(
            f"{file}: No such controller supported: {_shown(controller)}; expected gloo or mpi"
        )
    if controller is not None and not (options.use_gloo or options.use_mpi or options.use_jsrun):
        setattr(options, f"use_{controller}", True)
    for section, given in sections.items():
        if given is None:  # a section with nothing in it
            continue
        dests = SECTIONS[section]
        values = _mapping(given, f"{file}: {section}")
        for key, value in _known(values, list(dests), f"{file}: {section}").items():
            what = f"{file}: {section}: {key}"
            if value is not None:
                parsed = _value(dests[key], value, f"{what}={_shown(value)}")
                if getattr(options, dests[key]) is None:
                    setattr(options, dests[key], parsed)


def _read(file: str) -> Any:
    try:
        from yaml import YAMLError, safe_load
    except ImportError:
        raise ValueError(
            f"--config-file {file}: reading YAML needs PyYAML: pip install 'kolovod[yaml]'"
        ) from None
    try:
        return safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, OverflowError, RecursionError, TypeError, YAMLError) as error:
        raise ValueError(f"--config-file {file} cannot be read: {error}") from None


def _shown(value: Any) -> str:
    """A part of ``value``: with YAML's aliases a few lines can stand for gigabytes."""
    text = reprlib.repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _mapping(value: Any, what: str) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{what}: expected lines of the form key: value, not {_shown(value)}")
    return dict(value)


def _known(given: dict[Any, Any], names: list[str], what: str) -> dict[str, Any]:
    """Return the items of ``given`` that are among ``names``; report the others."""
    unknown = [_shown(name).strip("'") for name in given if name not in names]
    if unknown:
        meant = [match for name in unknown for match in get_close_matches(name, names, 1)]
        hint = f"; did you mean {', '.join(meant)}?" if meant else ""
        text = f"{what}: left out, since unknown: {', '.join(unknown)}; known: {', '.join(names)}"
        report_to_stderr(f"{text}{hint}")
    return {name: value for name, value in given.items() if name in names}


def _value(dest: str, value: Any, what: str) -> Any:
    if dest in _FLAGS:
        items = value if isinstance(value, list) and _FLAGS[dest].kind is str else [value]
        if not all(isinstance(item, str | int | float) for item in items):
            raise ValueError(f"{what}: expected one value")
        value = ",".join(map(str, items)) if items is value else value  # cores
        return _FLAGS[dest].checked(value, what)
    assert dest in _SWITCHES
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise ValueError(f"{what}: expected true or false")
    return bool(value) != (dest in _OPPOSITE)
