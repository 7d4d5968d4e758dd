"""The page of a report in Chromium: keys, pointers, a phone's width, dark, and no request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planned
import pytest
from chromium import DEADLINE_MS, made_browser  # noqa: F401

from kolovod.launch import cli

pytestmark = pytest.mark.frameworks
CONTRAST = """() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => parts(text).slice(0, 3).map((c) => c / 255)
    .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if ((parts(colour)[3] ?? 1) === 1) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  return [...document.querySelectorAll("body *")]
    .filter((each) => [...each.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .filter((each) => each.getClientRects().length && !each.closest("script, noscript"))
    .map((each) => {
      const [a, b] = [light(getComputedStyle(each).color), light(ground(each))];
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    });
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    events = planned.events(("a", "a", "b"), steps=30, slower_ms=(0.0, 3.0, 7.0))
    path = planned.write(folder / "t.json", events)
    assert cli.main(["report", str(path)]) == 0
    return path.with_suffix(".html")


@contextlib.contextmanager
def opened(browser: Any, path: Path, **how: Any) -> Iterator[Any]:
    """The page; at the end it must have said nothing, and asked for nothing but itself."""
    context = browser.new_context(**how)
    context.set_default_timeout(DEADLINE_MS)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_function("document.getElementById('lanes-range').textContent")
    yield page
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
    context.close()


def after(page: Any, act: Any) -> str:
    """What part of the time is shown, once ``act`` has changed it."""
    before = page.inner_text("#lanes-range")
    act()
    page.wait_for_function(
        "before => document.getElementById('lanes-range').textContent !== before", arg=before
    )
    return str(page.inner_text("#lanes-range"))


def test_by_keyboard(browser: Any, report: Path) -> None:
    with opened(browser, report, reduced_motion="reduce") as page:
        first = page.inner_text("#lanes-range")
        page.focus("#lanes-view")
        keys = page.keyboard
        whole = after(page, lambda: keys.press("Home"))
        assert whole == "0.02 s to 1.71 s: 1.69 s"  # 30 steps of 57 ms; the first event is at 20 ms
        nearer = after(page, lambda: keys.press("+"))
        later = after(page, lambda: keys.press("ArrowRight"))
        assert later.split()[0] > nearer.split()[0]
        assert after(page, lambda: keys.press("ArrowLeft")) == nearer
        assert after(page, lambda: keys.press("-")) == whole
        said = page.locator("#lanes-said")
        keys.press("ArrowDown")
        assert said.inner_text().startswith("Rank 0 on a, script: ")
        there = said.inner_text()
        keys.press("n")
        assert said.inner_text() != there
        keys.press("p")
        assert said.inner_text() == there
        for _ in range(2):
            keys.press("ArrowDown")
        assert "carried: ALLREDUCE, took 10.0 ms" in said.inner_text()
        assert "1.0 MiB: allreduce.g" in said.inner_text()
        assert after(page, lambda: keys.press("Enter")).endswith(": 15.0 ms")
        keys.press("Escape")
        assert said.inner_text() == "No event is chosen."
        assert page.get_attribute("#lanes-said", "aria-live") == "polite"
        assert after(page, lambda: page.click("button[data-do=step]")) == first


def test_by_pointer_and_wheel(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        first = page.inner_text("#lanes-range")
        page.locator("#lanes-view").scroll_into_view_if_needed()
        box = page.locator("#lanes-view canvas").bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + 60
        page.mouse.move(x, y)

        def drag() -> None:
            page.mouse.down()
            page.mouse.move(x - 100, y, steps=4)
            page.mouse.up()

        assert after(page, drag).split()[0] > first.split()[0]
        assert page.inner_text("#lanes-said") == "No event is chosen."
        page.mouse.click(x, y)  # the focus is there now
        after(page, lambda: page.mouse.wheel(0, -200))
        after(page, lambda: page.click("button[data-do=whole]"))


def test_by_two_fingers(browser: Any, report: Path) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    with opened(browser, report, **phone) as page:
        page.locator("#lanes-view").scroll_into_view_if_needed()
        box = page.locator("#lanes-view canvas").bounding_box()
        middle, y = box["x"] + box["width"] / 2, box["y"] + 80
        input_of = page.context.new_cdp_session(page)

        def touch(kind: str, apart: float) -> None:
            points = [
                {"x": middle - apart, "y": y, "id": 0},
                {"x": middle + apart, "y": y, "id": 1},
            ]
            event = {"type": kind, "touchPoints": points if apart else []}
            input_of.send("Input.dispatchTouchEvent", event)

        def pinch() -> None:
            touch("touchStart", 40)
            for apart in (60, 80, 120):
                touch("touchMove", apart)
            touch("touchEnd", 0)

        before = page.inner_text("#lanes-range")
        assert before.endswith(": 171.0 ms")
        shown = float(after(page, pinch).split()[-2])
        assert 171 / 4 < shown < 171 / 2  # the fingers are three times as far apart


def test_tables_are_sorted(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        column = "#stragglers tbody tr th"
        last = page.locator("#stragglers thead th button", has_text="held up")
        last.focus()
        page.keyboard.press("Enter")
        assert page.locator(column).all_inner_texts()[0] == "rank 2"
        page.keyboard.press("Enter")
        assert page.locator(column).all_inner_texts()[-1] == "rank 2"
        head = page.locator("#stragglers thead th[aria-sort]")
        assert head.get_attribute("aria-sort") == "ascending"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_any_screen(browser: Any, report: Path, width: int, scheme: str) -> None:
    size = {"width": width, "height": 740}
    with opened(browser, report, viewport=size, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == width
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]
        ratios = page.evaluate(CONTRAST)
        assert len(ratios) > 100
        assert min(ratios) >= 4.5
        colours = page.evaluate(
            "() => { const c = document.querySelector('#lanes-view canvas'); const d = c.getContext"
            "('2d').getImageData(0, 0, c.width, c.height).data; const seen = new Set(); for (let i "
            "= 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); return "
            "seen.size; }"
        )
        assert colours > 5  # lanes are drawn
