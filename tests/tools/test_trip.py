"""docs/trip.md: the paths and the names that it gives are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trip.md"
_FOLDERS = ("src", "csrc", "tests", "bench", "scripts", "docs", "examples")
_CODE = re.compile(r"`([^`]+)`")
_FILE = re.compile(r"([\w./-]+\.\w+)(?:: (\S+))?")


def named(text: str) -> list[tuple[str, str]]:
    """Each path, and the name of code in it ("" for the file itself), of a page's ``text``."""
    found = []
    for code in _CODE.findall(re.sub(r"\s*\n\s*", " ", text)):
        if match := _FILE.fullmatch(code):
            path, name = match[1], match[2] or ""
            if name or "/" in path:
                found.append((path, name))
        else:
            assert "/" not in code, f"`{code}` is not a path, nor a path, a colon and a name"
    return found


def names_of(source: str) -> set[str]:
    """What a module of Python defines: ``name``, and ``Class.name`` of what a class does."""
    found: set[str] = set()

    def note(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                note(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            found.update(prefix + each.id for each in targets if isinstance(each, ast.Name))

    note(ast.parse(source).body, "")
    return found


def is_in(name: str, path: Path) -> bool:
    """True if the file ``path`` defines ``name``; of C++, a class, or a function with that name."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return name in names_of(source)
    start = rf"^\s*(?:class|struct)\s+{name}\b[^;]*\{{|^\w[\w:<>*&, ]*\s{name}\("
    return re.search(start, source, re.MULTILINE) is not None


def test_every_path_and_name_is_there() -> None:
    found = named(PAGE.read_text(encoding="utf-8"))
    assert len(found) > 60
    assert sum(name != "" for _, name in found) > 40
    for path, name in found:
        assert path.partition("/")[0] in _FOLDERS, f"{path} does not begin at the root"
        assert (ROOT / path).is_file(), f"{path} is not there"
        assert not name or is_in(name, ROOT / path), f"{path} has no {name}"


def test_a_page_is_read() -> None:
    assert named("`a/b.py: C.d` and\n`a/b.h:\n  E::F`, `a/b.cc`; `x = 1`, `c.py`") == [
        ("a/b.py", "C.d"),
        ("a/b.h", "E::F"),
        ("a/b.cc", ""),
    ]
    with pytest.raises(AssertionError, match="is not a path"):
        named("`a/b.py C`")


def test_names_are_found(tmp_path: Path) -> None:
    module, header = tmp_path / "a.py", tmp_path / "a.h"
    module.write_text("X = 1\nY: int = 2\nclass A:\n    def b(self): Z = 3\nasync def c(): ...\n")
    header.write_text("class A;\nclass B : public A {\n};\nStatus B::C(int d) {\n  E(d);\n}\n")
    assert [each for each in ("X", "Y", "A", "A.b", "c", "b", "Z") if is_in(each, module)] == [
        *("X", "Y", "A", "A.b", "c")
    ]
    assert [each for each in ("A", "B", "B::C", "C", "E") if is_in(each, header)] == ["B", "B::C"]
