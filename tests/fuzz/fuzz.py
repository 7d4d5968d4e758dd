"""Runs one target of decoders.py for long: with atheris if it is there, else with changed copies.

usage: python tests/fuzz/fuzz.py TARGET [--runs N] [--seconds S] [--keep FOLDER] [--plain]

Ends with a line like libFuzzer's: "#INPUTS DONE". An input that breaks the target ends the run with
an error and is written to a file. ``--keep``: where atheris keeps what has reached something new.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["changed", "paths", "put", "with_odd_value"]

ODD = (
    *(None, True, False, 0, -1, 1 << 31, 1 << 63, 10**30, 1.5, -0.0, 1e308, float("inf")),
    *("", "0", "\ud800", "\x1b[2J", "x" * 300, "host\nhost", "127.0.0.1:0"),
    *([], {}, [[]], [0], ["0"], [None], {"rank": 0}, [0, 1, 2, 3], [3, 2], list(range(50))),
)


def changed(inputs: Sequence[bytes], source: random.Random) -> bytes:
    """A copy of one of the inputs with some bytes replaced, cut out, or taken from another."""
    data = bytearray(source.choice(inputs))
    for _ in range(source.randint(1, 4)):
        at = source.randint(0, len(data))
        to = min(len(data), at + source.randint(0, 8))
        other = source.choice(inputs)
        begin = source.randint(0, len(other))
        data[at:to] = source.choice(
            (
                b"",
                source.randbytes(to - at),
                source.choice(
                    (b"0", b"-1", b"1e999", b"null", b"[]", b"{}", b'"\\ud800"', b"9" * 30)
                ),
                other[begin : begin + source.randint(0, 40)],
            )
        )
    return bytes(data)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """To every place in a JSON value."""
    found = [path]
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        found += paths(inner, (*path, key))
    return found


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The value with ``new`` in that place."""
    if not path:
        return new
    value[path[0]] = put(value[path[0]], path[1:], new)
    return value


def with_odd_value(data: bytes, source: random.Random) -> bytes | None:
    """JSON with one value replaced by what nobody expects there; None if it is none."""
    try:
        message = json.loads(data)
        place = source.choice(paths(message)[:1000])
        parts = [message]
        for key in place:
            parts.append(parts[-1][key])
        odd = source.choice((*ODD, source.choice(parts), source.randint(-(1 << 70), 1 << 70)))
        return json.dumps(put(message, place, json.loads(json.dumps(odd)))).encode()
    except (ValueError, RecursionError):
        return None


def run_plain(target, inputs: Sequence[bytes], runs: int, seconds: float) -> int:
    """Returns how many inputs there were."""
    source = random.Random(5)
    end = time.monotonic() + seconds
    for data in inputs:
        target(data)
    for number in range(runs):
        if time.monotonic() > end:
            return number + len(inputs)
        data = changed(inputs, source)
        if number % 2:
            data = with_odd_value(source.choice(inputs), source) or data
        try:
            target(data)
        except BaseException:
            path = Path("crash")
            path.write_bytes(data)
            print(f"broken by the input in {path.absolute()}: {data[:200]!r}", file=sys.stderr)
            raise
    return runs + len(inputs)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--runs", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--keep")
    parser.add_argument("--plain", action="store_true", help="without atheris")
    options = parser.parse_args()
    atheris = None
    if not options.plain:
        with contextlib.suppress(ImportError):
            import atheris
    if atheris is not None:
        with atheris.instrument_imports(include=["kolovod", "horovod", "json", "yaml"]):
            with contextlib.suppress(ImportError):
                import yaml  # noqa: F401 - to have it instrumented
            import decoders
    else:
        import decoders
    target = decoders.TARGETS[options.target]

    def quiet(data: bytes) -> None:
        # What a decoder says to the user on standard error is not for whoever reads the log.
        with contextlib.redirect_stderr(io.StringIO()):
            target(data)

    if atheris is None:
        inputs = decoders.corpus(options.target)
        print(f"#{run_plain(quiet, inputs, options.runs, options.seconds)}\tDONE")
        return 0
    folders = [options.keep] if options.keep else []
    arguments = [
        f"-max_total_time={max(1, round(options.seconds))}",
        f"-runs={options.runs}",
        "-max_len=4096",
        "-print_final_stats=1",
        *folders,
        str(decoders.CORPUS / options.target),
    ]

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        source = random.Random(seed)
        odd = with_odd_value(data, source) if seed % 2 else None
        return atheris.Mutate(data, max_size) if odd is None else odd[:max_size]

    atheris.Setup([sys.argv[0], *arguments], quiet, custom_mutator=mutate)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
