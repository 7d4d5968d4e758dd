"""Makes the pages of the site that are no files in docs/; mkdocs calls the functions on_*.

README.md becomes the first page. A file of the repository that a page links to (a result, an
example) becomes a page under repository/, so that every link can be checked, and works without a
network. reference/command-line.md has the commands' help, errors.md the messages of all errors.

Links are written as they work in the repository: relative to the file they stand in.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import docs_members  # noqa: E402
import error_messages  # noqa: E402

HOME = "index.md"
COMMANDS = "reference/command-line.md"
ERRORS = "errors.md"
# The groups of links [text](target) and ![text](target); inline code is left alone.
LINK = re.compile(r"(`[^`]*`)|(\]\()([^)\s#]*)(#[^)\s]*)?(\))")
PICTURES = (".svg", ".png")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "sh", ".cc": "cpp", ".h": "cpp"}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made, and those of files that any page links to."""
    files.append(File.generated(config, COMMANDS, content=_commands()))
    files.append(File.generated(config, ERRORS, content=error_messages.page()))
    todo = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    todo += [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    seen = set(todo)
    for path in todo:  # grows
        page = _page_of(path)
        if files.get_file_from_path(page) is None:
            files.append(_generated(config, path, page))
        if path.suffix == ".md" and path.exists():
            for target in _targets(path):
                if target not in seen and target.is_file():
                    seen.add(target)
                    todo.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links that work in the repository into those that work in the site."""
    del config, files
    origin = _origin(page.file.src_uri)

    def changed(target: str) -> str:
        path = (origin.parent / target).resolve()
        if not target or "://" in target or not path.is_relative_to(ROOT) or not path.is_file():
            return target
        return posixpath.relpath(_page_of(path), posixpath.dirname(page.file.src_uri) or ".")

    def replaced(match: re.Match[str]) -> str:
        code, opening, target, anchor, closing = match.groups()
        return code or f"{opening}{changed(target)}{anchor or ''}{closing}"

    markdown = docs_members.filled(markdown)
    return "".join(
        line if is_code else LINK.sub(replaced, line) for line, is_code in _lines(markdown)
    )


def _page_of(path: Path) -> str:
    """Return where the site has a file of the repository."""
    if path == ROOT / "README.md":
        return HOME
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    page = f"repository/{path.relative_to(ROOT).as_posix()}"
    return page if path.suffix in (".md", *PICTURES) else f"{page}.md"


def _origin(page: str) -> Path:
    """Return the file of the repository that a page shows: its links are relative to that."""
    if page == HOME:
        return ROOT / "README.md"
    if page.startswith("repository/"):
        return ROOT / page.removeprefix("repository/")
    return ROOT / "docs" / page


def _generated(config: Any, path: Path, page: str) -> File:
    if path.suffix in PICTURES:
        return File.generated(config, page, content=path.read_bytes())
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        name = path.relative_to(ROOT).as_posix()
        text = f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"
    return File.generated(config, page, content=text)


def _targets(path: Path) -> Iterator[Path]:
    """Return what a page links to in the repository."""
    for line, is_code in _lines(path.read_text(encoding="utf-8")):
        for match in [] if is_code else LINK.finditer(line):
            target = match.group(3)
            if target and "://" not in target:
                found = (path.parent / target).resolve()
                if found.is_relative_to(ROOT):
                    yield found


def _lines(markdown: str) -> Iterator[tuple[str, bool]]:
    """Return lines with their ends, and whether each is of a fenced code block."""
    fence = ""
    for line in markdown.splitlines(keepends=True):
        mark = re.match(r"\s*(`{3,}|~{3,})", line)
        if fence:
            yield line, True
            fence = "" if mark and mark.group(1).startswith(fence) else fence
        else:
            fence = mark.group(1) if mark else ""
            yield line, bool(mark)


def _commands() -> str:
    """Return the help of each command, from the installed package."""
    parts = ["# Commands\n", "`python -m kolovod` is the same as `kolovod`.\n"]
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHON_COLORS": "0"}
    for title, module, arguments in (
        ("kolovod", "kolovod", []),
        ("kolovod run", "kolovod", ["run"]),
        ("kolovod doctor", "kolovod", ["doctor"]),
        ("kolovod manifest", "kolovod", ["manifest"]),
        ("kolovod timeline", "kolovod", ["timeline"]),
        ("kolovod report", "kolovod", ["report"]),
        ("kolovod plan", "kolovod", ["plan"]),
        ("horovodrun", "horovod.runner.launch", []),
    ):
        command = [sys.executable, "-m", module, *arguments, "--help"]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ended.returncode or not ended.stdout:
            raise SystemExit(f"{title} --help failed: is kolovod installed here?\n{ended.stderr}")
        parts.append(f"## `{title}`\n\n```text\n{ended.stdout.rstrip()}\n```\n")
    return "\n".join(parts)
