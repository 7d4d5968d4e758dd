"""The HTML of a report, from its figures and the files beside this one. PURE, but for those.

Nothing is loaded from elsewhere, and the page's own rule (Content-Security-Policy) lets only the
one script and the one style sheet act that are in it.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from pathlib import PurePath
from string import Template

from kolovod.report.figures import Figures
from kolovod.report.markup import as_json, file_text
from kolovod.report.sections import sections
from kolovod.version import __version__

__all__ = ["page"]

_SCRIPTS = ("lanes.js", "tables.js")


def page(figures: Figures) -> bytes:
    """A whole file of HTML, in UTF-8."""
    script = "\n".join(file_text(name) for name in _SCRIPTS)
    style = file_text("page.css")
    made = Template(file_text("page.html")).substitute(
        title=escape(PurePath(figures.file).name),
        verdict=escape(figures.verdict),
        script=script,
        style=style,
        script_hash=_hash(script),
        style_hash=_hash(style),
        sections=sections(figures),
        lanes=as_json(figures.lanes),
        version=escape(__version__),
    )
    return made.encode("utf-8", "replace")  # JSON may hold half a character, UTF-8 cannot


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
