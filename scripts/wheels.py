"""Builds the wheels and the source distribution of a release, and tries each: `make wheels`.

    python scripts/wheels.py --output dist           all of them
    python scripts/wheels.py --arch x86_64 --tag cp311-cp311    only those

A wheel is compiled by Zig's Clang (the ziglang package), which has the headers of old versions of
glibc for each processor: so it needs glibc 2.28, as manylinux_2_28 says, wherever it was built.
There is one for each Python before 3.12 and one, of the stable ABI, for all from 3.12 on; a Python
of each kind must be at hand, on the PATH, in pyenv's folder or by --python.

Tried is: what it needs of glibc (auditwheel) and of Python (abi3audit), the time to install it
where NumPy is, `kolovod --version` and a sum of two ranks in a new environment of each Python at
hand; with the newest TensorFlow, Keras and JAX a program of two ranks, in whose graphs the module
is called by libraries of another compiler; for aarch64 the C++ tests and the sum, under qemu-user
with Debian's Python for arm64, if qemu-aarch64-static and apt-get are here. The source distribution
is built once more with --no-index, from build requirements that are there.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import emulated
from environments import ROOT, output_of

FOLDER = ROOT / "build" / "wheels"
GLIBC = (2, 28)
ARCHS = ("x86_64", "aarch64")
STABLE_ABI_FROM = (3, 12)
OLDEST = (3, 10)
INSTALL_LIMIT_S = 5.0
BUILD_REQUIREMENTS = (
    "pip>=23.1",
    "scikit-build-core>=0.11",
    "nanobind>=2.4",
    "cmake>=3.22",
    "ninja",
)
SUM = """
import platform, sys
import numpy as np
import kolovod
kolovod.init()
total = kolovod.allreduce(np.arange(100_000, dtype=np.float32) + kolovod.rank(), op=kolovod.Sum)
assert total[-1] == 2 * 99_999 + 1, total
print(kolovod.rank(), platform.machine(), sys.version.split()[0], "ok")
"""
FRAMEWORKS = ("tensorflow-cpu", "keras>=3", "jax", "optax")
GRAPHS = """
import jax, keras, numpy as np, tensorflow as tf
import kolovod.jax, kolovod.keras, kolovod.tensorflow
kolovod.init()
rank = kolovod.rank()

@tf.function
def of_tensorflow(x):
    sums = [kolovod.tensorflow.allreduce(x + i, op=kolovod.Sum) for i in range(50)]
    return tf.stack(sums), kolovod.tensorflow.allgather(x[: rank + 1])

@jax.jit
def of_jax(x):
    return kolovod.jax.allreduce(x, op=kolovod.Sum)

for step in range(20):
    sums, rows = of_tensorflow(tf.fill([7], float(rank + step)))
    np.testing.assert_array_equal(sums[49], np.full(7, 2 * step + 99, np.float32))
    assert rows.shape == (3,), rows
    np.testing.assert_array_equal(of_jax(jax.numpy.full(5, rank + step)), np.full(5, 2 * step + 1))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(kolovod.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
x = np.random.default_rng(rank).normal(size=(40, 4))
start = kolovod.keras.callbacks.BroadcastGlobalVariablesCallback(0)
model.fit(x, x.sum(axis=1), batch_size=10, verbose=0, callbacks=[start])
weights = kolovod.allgather_object([float(each.sum()) for each in model.get_weights()])
assert weights[0] == weights[1], weights
print(keras.backend.backend(), tf.__version__, jax.__version__, "ok")
"""


class Interpreter(NamedTuple):
    """A Python at hand."""

    path: Path
    version: tuple[int, int]

    @property
    def tag(self) -> str:
        """The tag of the wheel that serves it: cp311-cp311, or cp312-abi3."""
        return tag_of(self.version)


def tag_of(version: tuple[int, int]) -> str:
    """Return the tag of the wheel that serves this version of Python."""
    if version >= STABLE_ABI_FROM:
        return "cp{}{}-abi3".format(*STABLE_ABI_FROM)
    return "cp{0}{1}-cp{0}{1}".format(*version)


class Failed(RuntimeError):
    """A wheel cannot be built, or does not do what it must."""


def interpreters(given: Sequence[Path]) -> list[Interpreter]:
    """Return the Pythons at hand, one of each version, the oldest first."""
    names = [f"python3.{minor}" for minor in range(OLDEST[1], 30)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [*given, Path(sys.executable), *sorted(pyenv.glob("versions/*/bin/python3"))]
    found += [Path(known) for name in names if (known := shutil.which(name))]
    by_version: dict[tuple[int, int], Interpreter] = {}
    for path in found:
        asked = "import sys; print(*sys.version_info[:2], sys.implementation.name)"
        done = subprocess.run([path, "-c", asked], capture_output=True, text=True, check=False)
        major, minor, kind = [*done.stdout.split(), "0", "0", ""][:3]
        version = int(major), int(minor)
        if kind == "cpython" and version >= OLDEST:
            by_version.setdefault(version, Interpreter(path, version))
    return [by_version[version] for version in sorted(by_version)]


def builders(found: Sequence[Interpreter]) -> dict[str, Interpreter]:
    """Return by tag the Python that the wheel is built with. Raises Failed where one is missing."""
    by_tag: dict[str, Interpreter] = {}
    for each in found:
        by_tag.setdefault(each.tag, each)
    wanted = [tag_of((3, minor)) for minor in range(OLDEST[1], STABLE_ABI_FROM[1] + 1)]
    if missing := [tag for tag in wanted if tag not in by_tag]:
        raise Failed(
            f"no Python at hand builds {', '.join(missing)}: found "
            f"{', '.join(str(each.path) for each in found)}; give others by --python PATH"
        )
    return by_tag


def environment(python: Path, folder: Path, packages: Sequence[str]) -> Path:
    """Make a virtual environment with these packages, once; return its Python."""
    inside = folder / "bin" / "python"
    stamp = folder / "installed"
    if not stamp.exists() or stamp.read_text() != "\n".join(packages):
        shutil.rmtree(folder, ignore_errors=True)
        output_of(python, "-m", "venv", folder)
        output_of(inside, "-m", "pip", "install", "--quiet", *packages)
        stamp.write_text("\n".join(packages))
    return inside


def toolchain(arch: str) -> Path:
    """Write CMake's toolchain file for ``arch``: Zig's compilers, whose target a script gives."""
    folder = FOLDER / "toolchains"
    folder.mkdir(parents=True, exist_ok=True)
    target = f"{arch}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    for language in ("cc", "c++"):
        script = folder / f"{arch}-{language}"
        script.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {language} -target {target} "$@"\n'
        )
        script.chmod(0o755)
    file = folder / f"{arch}.cmake"
    file.write_text(
        "set(CMAKE_SYSTEM_NAME Linux)\n"
        f"set(CMAKE_SYSTEM_PROCESSOR {arch})\n"
        f'set(CMAKE_C_COMPILER "{folder}/{arch}-cc")\n'
        f'set(CMAKE_CXX_COMPILER "{folder}/{arch}-c++")\n'
        # nanobind uses stderr, which Python.h does not declare where the ABI is the stable one.
        'set(CMAKE_CXX_FLAGS_INIT "-include stdio.h")\n'
    )
    return file


def build(arch: str, tag: str, python: Interpreter, output: Path) -> Path:
    """Build the wheel of ``tag`` for ``arch``, checked, in ``output``."""
    place = FOLDER / f"{tag}-{arch}"
    shutil.rmtree(place / "raw", ignore_errors=True)
    inside = environment(python.path, FOLDER / f"build-{tag}", BUILD_REQUIREMENTS)
    _, abi = tag.split("-")
    suffix = f".cpython-{abi.removeprefix('cp')}-{arch}-linux-gnu.so"
    if abi == "abi3":
        suffix = ".abi3.so"
    variables = {
        "_PYTHON_HOST_PLATFORM": f"linux-{arch}",
        "SETUPTOOLS_EXT_SUFFIX": suffix,
        "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count()),
    }
    output_of(
        inside, "-m", "pip", "wheel", ROOT, "--no-deps", "--no-build-isolation", "--quiet",
        "--wheel-dir", place / "raw",
        "-C", f"build-dir={place / 'cmake'}",
        "-C", f"cmake.define.CMAKE_TOOLCHAIN_FILE={toolchain(arch)}",
        variables=variables,
    )  # fmt: skip
    (raw,) = (place / "raw").glob("*.whl")
    needs_at_most(raw, arch)
    if abi == "abi3":
        output_of(sys.executable, "-m", "abi3audit", "--strict", raw)
    platform_tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{arch}"
    tags = ("--remove", "--platform-tag", platform_tag)
    name = output_of(sys.executable, "-m", "wheel", "tags", *tags, raw).split()[-1]
    named = raw.with_name(name)
    if f"-{tag}-" not in name or not holds(named, f"kolovod/_native{suffix}"):
        raise Failed(f"{name} should be of {tag}, with a module that ends in {suffix}")
    return Path(shutil.move(named, output / name))


def holds(wheel: Path, file: str) -> bool:
    """Return whether ``file`` is in it."""
    with zipfile.ZipFile(wheel) as archive:
        return file in archive.namelist()


def needs_at_most(wheel: Path, arch: str) -> None:
    """Raise Failed where ``wheel`` needs a newer glibc, or another library."""
    said = " ".join(output_of(sys.executable, "-m", "auditwheel", "show", wheel).split())
    found = re.search(rf'"manylinux_(\d+)_(\d+)_{arch}"', said)
    if found is None or (int(found[1]), int(found[2])) > GLIBC:
        raise Failed(f"{wheel.name} needs more than glibc {GLIBC[0]}.{GLIBC[1]}: {said}")


def tried(wheel: Path, python: Interpreter) -> str:
    """Install in a new environment with NumPy, and use it; return what was seen."""
    place = FOLDER / "try" / "{}.{}".format(*python.version)
    shutil.rmtree(place, ignore_errors=True)
    inside = environment(python.path, place, ["numpy>=1.23"])
    begin = time.monotonic()
    output_of(inside, "-m", "pip", "install", "--quiet", wheel)
    took_s = time.monotonic() - begin
    if took_s > INSTALL_LIMIT_S:
        print(f"  {took_s:.1f} s to install: more than {INSTALL_LIMIT_S:g}", file=sys.stderr)
    return f"installed in {took_s:.1f} s; {two_ranks(inside, [inside])}"


def tried_elsewhere(arch: str, wheel: Path, tag: str, found: Sequence[Interpreter]) -> str:
    """Try the same for another processor, emulated, if that can be here."""
    if why := emulated.why_not(arch):
        return f"not tried: {why}"
    root = emulated.system(arch, FOLDER)
    python, version = emulated.python_of(root)
    launcher = next((each for each in found if each.version == version), None)
    if Interpreter(python, version).tag != tag or launcher is None:
        return f"not tried: Debian has Python {version[0]}.{version[1]} for {arch}"
    place = FOLDER / "try" / "{}.{}".format(*version)
    inside = place / "bin" / "python"  # with the wheel of this machine, which has the launcher
    if not inside.exists():
        return f"not tried: the launcher is that of the {tag} wheel for {platform.machine()}"
    pip = [sys.executable, "-m", "pip"]
    packages = emulated.with_wheel(arch, wheel, version, FOLDER / f"packages-{arch}", pip)
    ranks = emulated.command(arch, root, python)
    return two_ranks(inside, ["env", f"PYTHONPATH={packages}", *ranks])


def cpp_tests(arch: str) -> str:
    """Return what the C++ tests say on another processor."""
    if why := emulated.why_not(arch):
        return f"not run: {why}"
    return emulated.cpp_tests(arch, ROOT, FOLDER, toolchain(arch), emulated.system(arch, FOLDER))


def with_frameworks(wheel: Path, python: Interpreter) -> str:
    """Use it in graphs of TensorFlow, Keras and JAX; return with which."""
    place = FOLDER / "frameworks"
    inside = environment(python.path, place, FRAMEWORKS)
    output_of(inside, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", wheel)
    output_of(inside, "-m", "pip", "install", "--quiet", wheel)  # what it depends on
    script = FOLDER / "graphs.py"
    script.write_text(GRAPHS)
    run = (inside, "-m", "kolovod", "run", "-np", "2", "--", inside, script)
    out = output_of(*run, cwd=FOLDER)
    said = [line.split(":", 1)[1] for line in out.splitlines() if line.endswith(" ok")]
    if len(said) != 2:
        raise Failed(f"two ranks wrote\n{out}")
    return said[0].strip()


def two_ranks(launcher: Path, python: Sequence[str | Path]) -> str:
    """Return a sum of two ranks, each started by ``python``, with ``launcher``'s kolovod."""
    script = FOLDER / "sum.py"
    script.write_text(SUM)
    said = output_of(launcher, "-m", "kolovod", "--version").strip()
    out = output_of(launcher, "-m", "kolovod", "run", "-np", "2", "--", *python, script, cwd=FOLDER)
    if out.count(" ok") != 2:
        raise Failed(f"two ranks wrote\n{out}")
    return f"{said}: {out.split(':', 1)[1].splitlines()[0].strip()}"


def source(output: Path, python: Interpreter) -> Path:
    """Build the source distribution, and once more without an index."""
    output_of(sys.executable, "-m", "build", "--quiet", "--sdist", "--outdir", output, ROOT)
    (made,) = output.glob("kolovod-*.tar.gz")
    with tarfile.open(made) as archive:
        built = [name for name in archive.getnames() if "/build/" in name]
    if built:
        raise Failed(f"{made.name} holds what was built here: {built[0]} and {len(built) - 1} more")
    inside = environment(python.path, FOLDER / f"build-{python.tag}", BUILD_REQUIREMENTS)
    place = FOLDER / "from-source"
    shutil.rmtree(place, ignore_errors=True)
    output_of(
        inside, "-m", "pip", "wheel", made, "--no-index", "--no-deps", "--no-build-isolation",
        "--quiet", "--wheel-dir", place,
    )  # fmt: skip
    return made


def main() -> int:
    """Build and try; 1 and the reason where something fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="FOLDER")
    parser.add_argument("--arch", action="append", choices=ARCHS, help="by default all")
    parser.add_argument("--tag", action="append", help="such as cp312-abi3; by default all")
    parser.add_argument("--python", type=Path, action="append", default=[], metavar="PATH")
    parser.add_argument("--no-sdist", action="store_true")
    parser.add_argument("--no-cpp-tests", action="store_true", help="of another processor")
    options = parser.parse_args()
    try:
        found = interpreters(options.python)
        by_tag = builders(found)
        if unknown := set(options.tag or by_tag) - set(by_tag):
            raise Failed(f"--tag {', '.join(unknown)}: there are {', '.join(by_tag)}")
        FOLDER.mkdir(parents=True, exist_ok=True)
        options.output.mkdir(parents=True, exist_ok=True)
        for old in options.output.glob("kolovod-*"):
            old.unlink()
        # First this machine's, with which those of the other one are launched.
        own_first = sorted(options.arch or ARCHS, key=lambda arch: arch != platform.machine())
        for arch in own_first:
            for tag in options.tag or by_tag:
                begin = time.monotonic()
                wheel = build(arch, tag, by_tag[tag], options.output)
                size = wheel.stat().st_size / 1e6
                print(f"{wheel.name}: {size:.1f} MB, {time.monotonic() - begin:.0f} s", flush=True)
                if arch == platform.machine():
                    for each in found:
                        if each.tag == tag:
                            print(f"  {each.path}: {tried(wheel, each)}", flush=True)
                        if each.tag == tag and each.version == sys.version_info[:2]:
                            print(f"  frameworks: {with_frameworks(wheel, each)}", flush=True)
                else:
                    print(f"  {tried_elsewhere(arch, wheel, tag, found)}", flush=True)
            if arch != platform.machine() and not options.no_cpp_tests:
                print(f"C++ tests for {arch}: {cpp_tests(arch)}", flush=True)
        if not options.no_sdist:
            made = source(options.output, found[-1])
            print(f"{made.name}: builds without an index", flush=True)
    except Failed as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"wheels: {error}:\n{error.output[-4000:]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
