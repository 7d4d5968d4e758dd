"""Writes where the project is into pyproject.toml and README.md, for the package of a release.

    python scripts/project_urls.py REPOSITORY DOCUMENTATION

Who releases it knows these addresses (.github/workflows/release.yml); the repository does not name
them, since a fork has others. They are in the metadata of the package then, and errors end with a
link into the documentation (src/kolovod/documentation.py). README.md is the project's page on PyPI,
where links into the repository lead nowhere.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import recipes

ROOT = Path(__file__).resolve().parents[1]
_ADDRESS = re.compile(r"https://[\w.-]+(/[\w.~-]+)*/?")
_LINK = re.compile(r"(?P<picture>!?)(?P<text>\[[^\]]*\])\((?!https?:|#)(?P<target>[^)]+)\)")
_NEXT = "\n[project.scripts]\n"


def with_urls(pyproject: str, repository: str, documentation: str) -> str:
    """Return the text of pyproject.toml with them. Raises ValueError for what is no address."""
    for address in (repository, documentation):
        if not _ADDRESS.fullmatch(address):
            raise ValueError(f"{address!r}: expected an address, https://HOST/PATH")
    if "\n[project.urls]\n" in pyproject or pyproject.count(_NEXT) != 1:
        raise ValueError("pyproject.toml has [project.urls] already, or no [project.scripts]")
    urls = {
        "Documentation": documentation,
        "Repository": repository,
        "Issues": f"{repository.rstrip('/')}/issues",
        "Changelog": f"{repository.rstrip('/')}/blob/main/CHANGELOG.md",
    }
    lines = "".join(f'{label} = "{address}"\n' for label, address in urls.items())
    return pyproject.replace(_NEXT, f"\n[project.urls]\n{lines}{_NEXT}")


def with_links(readme: str, repository: str, documentation: str, tag: str) -> str:
    """Return the text of README.md with links to the repository, and pictures from the site."""
    pages = f"{repository.rstrip('/')}/blob/{tag}"
    pictures = f"{documentation.rstrip('/')}/repository"

    def replaced(link: re.Match[str]) -> str:
        folder = pictures if link["picture"] else pages
        return f"{link['picture']}{link['text']}({folder}/{link['target']})"

    return _LINK.sub(replaced, readme)


def main(arguments: list[str]) -> int:
    """Write the addresses."""
    if len(arguments) != 2:
        sys.exit(__doc__)
    repository, documentation = arguments
    pyproject, readme = ROOT / "pyproject.toml", ROOT / "README.md"
    text = pyproject.read_text()
    pyproject.write_text(with_urls(text, repository, documentation))
    tag = f"v{recipes.version_of(text)}"
    readme.write_text(with_links(readme.read_text(), repository, documentation, tag))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
