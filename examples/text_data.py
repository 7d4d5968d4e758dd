"""What the text examples share: the characters of Python's own standard library, and options."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # anything else becomes a question mark
HELD_OUT = 0.05  # of the text


def positive(text: str) -> int:
    """A number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def options(description: str) -> argparse.ArgumentParser:
    """Those of every example."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=positive, default=300, help="of the optimizer")
    parser.add_argument("--batch-size", type=positive, default=16, help="windows per process")
    parser.add_argument("--context", type=positive, default=64, help="characters in a window")
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--width", type=positive, default=128, help="a multiple of 32")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate for one process")
    parser.add_argument("--warmup", type=positive, default=50, help="steps to the full rate")
    parser.add_argument("--characters", type=positive, default=2_000_000, help="of text to read")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--report-every", type=positive, default=50, help="steps")
    return parser


def load_text(characters: int) -> tuple[Any, Any]:
    """Training text and held out text as numbers of ALPHABET, the same on every rank."""
    parts, left = [], characters
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        part = path.read_text(encoding="utf-8", errors="replace")[:left]
        parts.append(part)
        left -= len(part)
        if left == 0:
            break
    numbers = {character: number for number, character in enumerate(ALPHABET)}
    unknown = numbers["?"]
    text = np.array([numbers.get(character, unknown) for character in "".join(parts)], np.int32)
    cut = int(len(text) * (1 - HELD_OUT))
    return text[:cut], text[cut:]


def draw(text: Any, shape: tuple[int, ...], context: int, seed: int) -> Any:
    """Random windows (*shape, context + 1) of a text: the last character follows the others."""
    starts = np.random.default_rng(seed).integers(len(text) - context, size=(*shape, 1))
    return text[starts + np.arange(context + 1)]
