"""Checks the links of the built site: ``docs_links.py build/site [--external]``.

Without a network: every link and picture within the site is there, with its anchor, and no page
loads anything (scripts, styles, fonts, pictures) from elsewhere. With --external also whether what
is linked outside of the site answers.
"""

from __future__ import annotations

import argparse
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

TIMEOUT_S = 20.0
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
NOT_LOADED = ("canonical", "next", "prev", "edit")  # rel of a <link> that says something only


class Page(HTMLParser):
    """What a page links to, what it loads, and the anchors in it."""

    def __init__(self, text: str) -> None:
        """``text``: the page's HTML."""
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        found = {name: value or "" for name, value in attributes}
        self.anchors.update(found[name] for name in ("id", "name") if name in found)
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag in LOADED and LOADED[tag] in found and found.get("rel") not in NOT_LOADED:
            self.loaded.append(found[LOADED[tag]])


def problems_within(site: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Return what is wrong without a network, and external links with the pages that have them."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    problems, external = [], defaultdict(list)
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        for link in page.loaded:
            if "//" in link and not link.startswith("data:"):
                problems.append(f"{name} loads {link}")
        for link in page.links:
            if link.startswith(("http://", "https://")):
                external[link].append(name)
            elif ":" not in link and path.name != "404.html":
                problems += _inside(site, path, link, pages)
    return problems, external


def _inside(site: Path, path: Path, link: str, pages: dict[Path, Page]) -> list[str]:
    target, anchor = urldefrag(link)
    found = (path.parent / unquote(target)).resolve() if target else path
    if found.is_dir():
        found /= "index.html"
    name = path.relative_to(site).as_posix()
    if not found.is_file():
        return [f"{name} links to {link}, which is not there"]
    if anchor and found in pages and unquote(anchor) not in pages[found].anchors:
        return [f"{name} links to {link}, which has no such anchor"]
    return []


def answer(link: str) -> str:
    """Return why a link is broken, "" if it is not."""
    request = urllib.request.Request(urldefrag(link)[0], headers={"User-Agent": "kolovod-docs"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return ""
    except (urllib.error.URLError, OSError) as error:
        return str(error)


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--external", action="store_true", help="ask other servers, too")
    options = parser.parse_args()
    site = options.site.resolve()
    problems, external = problems_within(site)
    if options.external:
        with ThreadPoolExecutor(8) as pool:
            for link, error in zip(external, pool.map(answer, external), strict=True):
                if error:
                    problems.append(f"{link}, on {len(external[link])} pages: {error}")
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    count = len(external)
    print(
        f"{len(problems)} broken; {count} external links {'' if options.external else 'not '}asked"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
