"""Chromium, driven by Playwright; a file of tests that imports this is skipped without both."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

__all__ = ["DEADLINE_MS", "made_browser"]

_api = pytest.importorskip(
    "playwright.sync_api", reason="needs Playwright: pip install 'kolovod[test-browser]'"
)
_found = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
if not (_chromium := next(_found, "")):
    pytest.skip("needs Chromium: apt-get install chromium", allow_module_level=True)
DEADLINE_MS = 60_000


@pytest.fixture(name="browser")
def made_browser() -> Iterator[Any]:
    """A browser that has just been started."""
    with _api.sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=_chromium, args=["--no-sandbox"], timeout=DEADLINE_MS
        )
        yield running
        running.close()
