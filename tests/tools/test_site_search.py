"""The search of the documentation's site, where its folder is opened without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chromium import DEADLINE_MS, made_browser  # noqa: F401

SHIM = Path(__file__).parents[2] / "docs" / "javascripts" / "iframe-worker.js"
PAGE = """<!DOCTYPE html>
<script src="iframe-worker.js"></script>
<p></p>
<script>
  const worker = new Worker("worker.js");
  worker.addEventListener("message", ({data}) => document.querySelector("p").append(data, " "));
  for (const number of [1, 2, 3]) worker.postMessage(number);
</script>
"""
WORKER = 'addEventListener("message", ({data}) => postMessage(`${data} twice is ${2 * data}`));'

pytestmark = pytest.mark.frameworks


def test_a_file_has_a_worker(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(PAGE)
    (tmp_path / "worker.js").write_text(WORKER)
    (tmp_path / SHIM.name).write_text(SHIM.read_text())
    page = browser.new_page()
    page.set_default_timeout(DEADLINE_MS)
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_function("document.querySelector('p').textContent.includes('6')")
    assert page.inner_text("p") == "1 twice is 2 2 twice is 4 3 twice is 6"
