"""The HTML of a report: its figures in the templates beside this file. PURE, but for those.

Jinja escapes whatever a timeline brings. Nothing is loaded from elsewhere, and the page's own rule
(Content-Security-Policy) lets only the one script and the one style sheet act that are in it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import PurePath

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kolovod.observe.units import bytes_text, rate_text, time_text
from kolovod.printable import printable
from kolovod.report import charts
from kolovod.report.figures import Figures
from kolovod.report.sections import sections
from kolovod.version import __version__

__all__ = ["page"]

_SCRIPTS = ("lanes.js", "tables.js")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CODE = re.compile(r"`([^`]+)`")


def page(figures: Figures) -> bytes:
    """A whole file of HTML, in UTF-8."""
    script = "\n".join(_file_text(name) for name in _SCRIPTS)
    style = _file_text("page.css")
    template = _environment().get_template("page.html")
    made = template.render(
        sections(figures),
        title=PurePath(figures.file).name,
        script=script,
        style=style,
        script_hash=_hash(script),
        style_hash=_hash(style),
        version=__version__,
    )
    return made.encode("utf-8", "replace")  # JSON may hold half a character, UTF-8 cannot


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader(__package__, "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_written_out,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    made.filters |= {
        "bytes": bytes_text,
        "listed": _listed,
        "percent": lambda share, digits=0: f"{share:.{digits}%}",
        "pieces": _CODE.split,  # every second one stands between backquotes
        "rate": rate_text,
        "seconds": lambda micros: f"{micros / 1e6:.3f} s",
        "time": time_text,
    }
    made.globals |= {"HEIGHT": charts.HEIGHT, "WIDTH": charts.WIDTH}
    return made


def _written_out(value: object) -> object:
    """Write out control characters but tabs and ends of lines: HTML may not have them."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return _CONTROL.sub(lambda found: printable(found[0]), value)


def _listed(numbers: Sequence[int]) -> str:
    """``0 to 3``; ``0, 2, 3`` where one is missing."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _file_text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
