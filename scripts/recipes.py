"""Writes the release into examples/recipes, for conda, Spack and EasyBuild.

    python scripts/recipes.py                                          the version
    python scripts/recipes.py kolovod-0.1.0.tar.gz ADDRESS HOMEPAGE    what was published, and where

The version is pyproject.toml's. Without what was published conda's recipe builds the clone, and the
checksum of the others is zeros. ADDRESS: where the source distribution can be fetched. What else
the recipes share with pyproject.toml, tests/tools/test_recipes.py compares.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "recipes"


class Release(NamedTuple):
    """The facts of a release that recipes name."""

    version: str
    checksum: str = "0" * 64
    """SHA-256 of the source distribution."""
    address: str = ""
    """Of the source distribution; "": there is none yet."""
    homepage: str = "https://kolovod.example"


_CONDA = "conda/recipe.yaml"
_CLONE = "path: ../../.."
_TEXT, _WORD = r"[^'\"\n]*", r"[\w.+]*"
# Of each recipe's file, in which place which field is: what stands before it, and what it is like.
_PLACES = {
    _CONDA: {
        "version": (r'\n  version: "', _WORD),
        "homepage": (r"\n  homepage: ", _TEXT),
    },
    "spack/spack_repo/kolovod/packages/py_kolovod/package.py": {
        "version": (r'\n    version\("', _WORD),
        "checksum": (r'\n    version\("[^"]*", sha256="', _WORD),
        "homepage": (r'\n    homepage = "', _TEXT),
    },
    "easybuild/Kolovod-*.eb": {
        "version": (r"\nversion = '", _WORD),
        "checksum": (r"\n    \('kolovod', version, {\n        'checksums': \['", _WORD),
        "homepage": (r"\nhomepage = '", _TEXT),
    },
}
_CONDA_SOURCE = re.compile(r"(?<=\nsource:\n)(?:  .*\n)+")


def version_of(pyproject: str) -> str:
    """Return the version in the text of pyproject.toml."""
    (found,) = re.findall(r'^version = "(.*)"$', pyproject, re.MULTILINE)
    return str(found)


def path_of(recipe: str) -> Path:
    """Return a recipe's file; the name of EasyBuild's has the version in it."""
    (found,) = FOLDER.glob(recipe)
    return found


def written() -> dict[str, set[str]]:
    """Return what the recipes have of each field: one value where they agree."""
    found: dict[str, set[str]] = {}
    for recipe, places in _PLACES.items():
        text = path_of(recipe).read_text()
        for field, (before, value) in places.items():
            found.setdefault(field, set()).update(re.findall(f"{before}({value})", text))
    return found


def write(release: Release) -> None:
    """Put the facts into all recipes."""
    for recipe, places in _PLACES.items():
        path = path_of(recipe)
        text = path.read_text()
        for field, (before, value) in places.items():
            text = re.sub(f"({before}){value}", rf"\g<1>{getattr(release, field)}", text)
        if recipe == _CONDA:
            source = f"url: {release.address}\n  sha256: {release.checksum}"
            source = f"  {source if release.address else _CLONE}\n"
            text = _CONDA_SOURCE.sub(source, text)
        path.write_text(text)
        path.rename(
            path.with_name(re.sub(r"^(Kolovod-)[^-]+", rf"\g<1>{release.version}", path.name))
        )


def main(arguments: list[str]) -> int:
    """Write the version, and where the source distribution was published."""
    version = version_of((ROOT / "pyproject.toml").read_text())
    if not arguments:
        write(Release(version))
        return 0
    if len(arguments) != 3:
        sys.exit(__doc__)
    source, address, homepage = Path(arguments[0]), *arguments[1:]
    if source.name != f"kolovod-{version}.tar.gz":
        sys.exit(f"expected kolovod-{version}.tar.gz, got {source.name}")
    checksum = hashlib.sha256(source.read_bytes()).hexdigest()
    write(Release(version, checksum, address, homepage))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
