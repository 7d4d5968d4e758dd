"""``kolovod explain``: what causes an error, and what to do."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence

from kolovod.documentation import link
from kolovod.errors import CommandArgumentError
from kolovod.explanations import EXPLANATIONS, Explanation, find

__all__ = ["add", "text_of"]

_COLUMNS = 80


def add(parser: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    parser.description = (
        "Print cause and cure of an error by its code, or of all that are of a class. "
        "Without one, list the codes."
    )
    parser.set_defaults(act=_explain)
    text = "as K201, or the name of a class, as MismatchError"
    parser.add_argument("error", nargs="?", default="", metavar="CODE", help=text)


def _explain(options: argparse.Namespace) -> int:
    if not options.error:
        print(_list(EXPLANATIONS))
        return 0
    found = find(options.error)
    if not found:
        raise CommandArgumentError(
            f"{options.error!r} is no code of an error, nor a class of errors that has one: "
            "`kolovod explain` lists them"
        )
    print("\n\n".join(map(text_of, found)))
    return 0


def _list(explanations: Sequence[Explanation]) -> str:
    return "\n".join(f"{each.code}  {each.title} ({_classes(each)})" for each in explanations)


def _classes(each: Explanation) -> str:
    return ", ".join(each.classes)


def text_of(each: Explanation) -> str:
    """Return the explanation as text for a terminal."""
    page, messages = each.page, f"errors.md#{each.code.lower()}"
    parts = [
        f"{each.code}: {each.title} ({_classes(each)})",
        f"Cause: {each.cause}",
        f"Cure: {each.cure}",
        f"In the documentation: {link(page) or page}; its messages: {link(messages) or messages}",
    ]
    return "\n".join(
        textwrap.fill(part, _COLUMNS, break_long_words=False, break_on_hyphens=False)
        for part in parts
    )
