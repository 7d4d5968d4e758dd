"""The address of the documentation, which the package of a release has (``[project.urls]``)."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["link", "linked"]

_LABEL = "Documentation"
_PAGE = re.compile(r"\bdocs/([\w/-]+\.md(?:#[\w-]+)?)")


@lru_cache(maxsize=1)
def _address() -> str:
    # Here, since that alone takes each process a tenth of its start.
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        urls = metadata("kolovod").get_all("Project-URL") or []
    except PackageNotFoundError:  # imported from a folder of sources
        return ""
    parts = (each.partition(",") for each in urls)
    return next((url.strip().rstrip("/") for label, _, url in parts if label == _LABEL), "")


def link(page: str) -> str:
    """The address of ``page``, "errors.md#k201" say; "" if the package does not know it.

    It does not where it was built from a clone, which has the pages in ``docs``.
    """
    address = _address()
    return f"{address}/{page.replace('.md', '.html', 1)}" if address else ""


def linked(text: str) -> str:
    """``text`` with links in the place of pages, "docs/check.md#seeds" say, if that can be."""
    return _PAGE.sub(lambda found: link(found[1]) or found[0], text)
