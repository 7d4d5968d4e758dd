"""The page: whole, safe whatever a timeline holds, and with the figures of the other commands."""

from __future__ import annotations

import base64
import hashlib
import json
import unicodedata
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import planned
import pytest

from kolovod.core.spans import CHOSEN, WAIT_FOR_GRADIENTS
from kolovod.observe import summary
from kolovod.planning import plan as planning
from kolovod.planning import words
from kolovod.planning.asked import asked
from kolovod.planning.measured import measured
from kolovod.report import figures as report_figures
from kolovod.report.figures import figures
from kolovod.report.lanes import MOST_EVENTS, thinned
from kolovod.report.page import page

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!-- \u2028 \ud800 '\""
VOID = {"meta", "link", "img"}


class Seen(HTMLParser):
    """What a page has, as a browser would see it."""

    def __init__(self, made: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(made.decode())
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)
            if self.open[-1] in ("td", "th"):
                self.rows[-1][-1] += data

    def all_of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def made(events: list[dict[str, Any]]) -> Seen:
    return Seen(page(figures("t.json", events, asked("", ""))))


def evil() -> list[dict[str, Any]]:
    """Where users' names can be, something that would like to be more than a name."""
    events = planned.events((EVIL, "b"), steps=8)
    for event in events:
        facts = event.get("args", {})
        if event["name"] == "thread_name":
            facts["name"] += EVIL
        elif event["ph"] == "X" and "bucket" in facts:
            facts["dtype"] = EVIL
    return events


def test_it_loads_nothing_and_lets_only_its_own_script_act() -> None:
    seen = made(planned.events())
    allowed = ("#", "data:")
    for tag, attributes in seen.tags:
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(allowed), (tag, attributes)
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
    policy = next(m["content"] for m in seen.all_of("meta") if "http-equiv" in m) or ""
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    script = seen.texts["script"][-1]
    for directive, text in (("script-src", script), ("style-src", seen.texts["style"][0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy


@pytest.mark.parametrize("events", [planned.events(), evil()], ids=["usual", "evil"])
def test_its_structure(events: list[dict[str, Any]]) -> None:
    seen = made(events)
    ids = [attributes["id"] for _, attributes in seen.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in seen.all_of("a"):
        assert (attributes["href"] or "")[1:] in ids
    tags = [tag for tag, _ in seen.tags]
    assert [tags.count(tag) for tag in ("h1", "main", "header", "footer", "nav")] == [1] * 5
    levels = [int(tag[1]) for tag in tags if tag in ("h1", "h2", "h3")]
    assert all(after - before <= 1 for before, after in pairwise(levels))
    for attributes in seen.all_of("svg"):
        assert attributes.get("aria-label") or attributes.get("aria-hidden") == "true"
    assert all(attributes["alt"] for attributes in seen.all_of("img"))


def test_names_stay_names() -> None:
    usual, seen = made(planned.events(steps=8)), made(evil())
    assert [tag for tag, _ in seen.tags].count("script") == 2
    assert len(seen.all_of("img")) == len(usual.all_of("img")) == 1
    data = json.loads(seen.texts["script"][0])
    assert f"allreduce.g0{EVIL}" in data["texts"]
    assert dict(data["hosts"])[0] == EVIL
    shown = EVIL.replace("\ud800", "?")  # half a character is none
    assert any(shown in cell for row in seen.rows for cell in row)


@pytest.mark.parametrize(
    ("name", "markup", "shown"),
    [
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;", None),
        ("a\"b'c&amp;", "a&#34;b&#39;c&amp;amp;", None),
        ("a\x00\x1b[31m\x7f\x85", "a\\x00\\x1b[31m\\x7f\\x85", "a\\x00\\x1b[31m\\x7f\\x85"),
        ("{{ version }}{% include 'page.html' %}", None, None),
    ],
    ids=["tags", "quotes", "control", "template"],
)
def test_a_tensor_s_name_is_text(name: str, markup: str | None, shown: str | None) -> None:
    """``markup``, ``shown``: what it is in the file, and in a browser; None for itself."""
    events = planned.events((name, "b"), steps=8)
    for event in events:
        if event["name"] == "thread_name" and event["args"]["name"].startswith("allreduce.g0"):
            event["args"]["name"] = name
    text = page(figures(name, events, asked("", ""))).decode()
    assert not [each for each in text if each != "\n" and unicodedata.category(each) == "Cc"]
    if markup is not None:
        assert f'<th scope="row">{markup}</th>' in text
        assert f'<span class="file">{markup.rpartition("/")[2]}</span>' in text
        assert name not in text
    rows = [row for row in Seen(text.encode()).rows if row[0] == (shown or name)]
    assert [len(row) for row in rows] == [4, 8]  # as a host and as an operation


def test_the_figures_are_those_of_kolovod_timeline() -> None:
    events = planned.events(("a", "a", "b"), slower_ms=(0.0, 3.0, 7.0))
    seen = made(events)
    said = summary.text(summary.summarize(events))
    for line in said.splitlines()[1:4]:
        rank, host, _, time, unit, *shares = line.split()
        row = next(r for r in seen.rows if r[:2] == [f"rank {rank}", host] and len(r) == 14)
        compute, waiting, communication, hidden, last, held_up = shares
        assert [row[3], row[4], row[5]] == [f"{time} {unit}", compute, waiting]
        assert row[-2:] == [communication, hidden]
        row = next(r for r in seen.rows if r[:2] == [f"rank {rank}", host] and len(r) == 5)
        assert row[-2:] == [last, held_up]
    texts = " ".join(seen.texts["p"])
    assert next(line for line in said.splitlines() if line.startswith("Straggler")) in texts
    assert next(line for line in said.splitlines() if line.startswith("Batches")) in texts


def test_the_figures_are_those_of_kolovod_plan() -> None:
    events = planned.events(machines=("m", "n"))
    seen = made(events)
    plan = planning.make(measured(events), [2, 4, 8, 16])
    texts = " ".join(seen.texts["p"])
    for sentence in (*words.head(plan), *plan.advice):
        assert sentence in texts
    lines = words.text(plan).splitlines()
    for row in (row for row in seen.rows if len(row) == 9 and row[0].isdecimal()):
        line = next(line for line in lines if line.split()[:2] == row[:2])
        assert all(part in line for part in (*row[2:6], row[7]))
        assert ("extrapolated" in line) == bool(row[8])


def test_a_thinned_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    events = planned.events(steps=40)
    assert "Thinned" not in " ".join(made(events).texts["p"])
    monkeypatch.setattr(
        report_figures, "thinned", lambda lanes, around: thinned(lanes, around, most=100)
    )
    seen = made(events)
    data = json.loads(seen.texts["script"][0])
    shown = sum(len(row["starts"]) for row in data["rows"])
    assert 0 < shown <= 100 < MOST_EVENTS
    said = next(text for text in seen.texts["p"] if text.startswith("Thinned"))
    total = 2 * 40 * 6  # of each rank and step: two spans, two operations, two buckets
    assert f"of {total} events this page holds {shown} " in said


def test_what_it_leaves_out_it_says() -> None:
    events = planned.events(at_ms=[0.1 * at for at in range(205)], carried_ms=0.1, steps=6)
    found = figures("t.json", events, asked("", ""))
    tallest = found.slices[0]._replace(end_us=found.slices[0].start_us + 1e8)
    wide = [each._replace(last=each.first + 1) for each in (tallest, *found.slices[1:])]
    for slices, said in (
        ([tallest, *found.slices[1:]], "1 column is cut: the tallest is 100.00 s."),
        (wide, "Each column is the mean of 2 steps."),
    ):
        texts = " ".join(Seen(page(replace(found, slices=slices))).texts["p"])
        assert said in texts
        assert "the mean. 5 names that took less time are not listed." in texts


def test_choices_are_told() -> None:
    events = planned.events()
    wait = next(event for event in events if event["name"] == WAIT_FOR_GRADIENTS)
    events.append({**wait, "name": f"{CHOSEN}buckets of `1 MiB`, since <1>", "dur": 0})
    seen = made(events)
    assert "1 MiB" in seen.texts["code"]
    assert "s: buckets of , since <1>." in "".join(seen.texts["p"])


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ((125e6, 1e-4), "took a link between two hosts to carry 1 Gbit/s, and a message to take "),
        (None, "The timeline does not say how fast the links between hosts are."),
    ],
)
def test_links_where_no_plan_can_be_made(link: tuple[float, float] | None, said: str) -> None:
    texts = " ".join(made(planned.events(steps=2, link=link)).texts["p"])
    assert said in texts
    assert "No estimate can be made: " in texts


@pytest.mark.parametrize("hosts", [("a",), ("a", "a"), tuple("abcdefghijkl") * 4])
def test_few_ranks_and_many(hosts: tuple[str, ...]) -> None:
    seen = made(planned.events(hosts))
    strips = [a for a in seen.all_of("svg") if a.get("class") == "strip"]
    assert len(strips) == (0 if len(hosts) == 1 else min(32, len(hosts)))
    bars = [a for a in seen.all_of("svg") if a.get("class") == "bar"]
    assert len(bars) == len(hosts)
