"""Tries a wheel of another processor, and the C++ tests compiled for it, under qemu-user.

Python and what it needs come from Debian's packages for that processor, unpacked into a folder, so
nothing of this system changes.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from environments import output_of

DEBIAN = {"aarch64": "arm64", "x86_64": "amd64"}
PACKAGES = ("python3", "libssl3", "libstdc++6", "zlib1g")
DOCTEST = ("/usr/include/doctest", ".venv/usr/include/doctest")
"""Where `make` finds the header of the C++ tests, or has put it."""
NOT_EMULATED = "collectives_shm_test|transport_peer_memory_test"
"""These read another process's memory (process_vm_readv), which qemu-user does not."""
LIMIT_S = 1500  # of a C++ test: an emulated processor is slow


def emulator(arch: str) -> str:
    """Return the path of qemu's emulator for programs of ``arch``; "" if there is none."""
    return shutil.which(f"qemu-{arch}-static") or shutil.which(f"qemu-{arch}") or ""


def why_not(arch: str) -> str:
    """Return why nothing for ``arch`` can run here; "" if it can."""
    if not emulator(arch):
        return f"qemu-{arch}-static is not here (Debian's qemu-user-static)"
    if not shutil.which("apt-get"):
        return f"no apt-get is here, which brings a Python for {arch}"
    return ""


def system(arch: str, folder: Path) -> Path:
    """Return a folder with a root of Debian for ``arch``: Python, OpenSSL, a C library. Made once.

    Raises CalledProcessError.
    """
    root = folder / f"root-{arch}"
    stamp = root / "complete"
    if stamp.exists() and stamp.read_text() == " ".join(PACKAGES):
        return root
    state, cache = folder / "apt" / "state", folder / "apt" / "cache"
    (state / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (cache / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    settings = {
        "APT::Architecture": DEBIAN[arch],
        "APT::Architectures::": DEBIAN[arch],
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "1",
        "Dir::Cache": cache,
        "Dir::State": state,
        "Dir::State::status": state / "status",
    }
    given = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    output_of("apt-get", *given, "-q", "update")
    how = ("--yes", "--download-only", "--no-install-recommends")
    output_of("apt-get", *given, "-q", "install", *how, *PACKAGES)
    for package in sorted((cache / "archives").glob("*.deb")):
        output_of("dpkg-deb", "--extract", str(package), str(root))
    stamp.write_text(" ".join(PACKAGES))
    return root


def python_of(root: Path) -> tuple[Path, tuple[int, int]]:
    """Return the Python in a folder that ``system`` has made, and its version."""
    (path,) = root.glob("usr/bin/python3.[0-9]*[0-9]")
    major, minor = path.name.removeprefix("python").split(".")
    return path, (int(major), int(minor))


def command(arch: str, root: Path, program: Path) -> list[str]:
    """Return what runs ``program``, one of ``root``'s."""
    return [emulator(arch), "-L", str(root), str(program)]


def with_wheel(
    arch: str, wheel: Path, version: tuple[int, int], folder: Path, pip: Sequence[str]
) -> Path:
    """Make a folder for PYTHONPATH: ``wheel`` and what it needs for ``arch``; ``pip`` installs."""
    shutil.rmtree(folder, ignore_errors=True)
    number = "{}{}".format(*version)
    platforms = [f"manylinux_2_{minor}_{arch}" for minor in (28, 27, 26, 17)]
    platforms.append(f"manylinux2014_{arch}")
    which = [word for name in platforms for word in ("--platform", name)]
    abis = ["--abi", f"cp{number}", "--abi", "abi3", "--abi", "none"]
    output_of(
        *pip, "install", "--quiet", "--target", str(folder), "--only-binary", ":all:", *which,
        "--implementation", "cp", "--python-version", number, *abis, str(wheel),
    )  # fmt: skip
    return folder


def cpp_tests(arch: str, source: Path, folder: Path, toolchain: Path, root: Path) -> str:
    """Compile the C++ tests for ``arch``, run them emulated; return ctest's last line."""
    build, tools = folder / f"tests-{arch}", Path(sys.executable).parent
    # Alone: beside it are this system's headers, which are not those of the other one.
    headers = folder / "headers"
    if not (headers / "doctest").exists():
        found = next(place for place in DOCTEST if (source / place).exists())
        shutil.copytree(source / found, headers / "doctest")
    settings = {
        "CMAKE_TOOLCHAIN_FILE": toolchain,
        "CMAKE_CROSSCOMPILING_EMULATOR": f"{emulator(arch)};-L;{root}",
        "CMAKE_MAKE_PROGRAM": tools / "ninja",
        "DOCTEST_INCLUDE_DIR": headers,
        "KOLOVOD_PYTHON": "OFF",
        "KOLOVOD_TESTS": "ON",
        "KOLOVOD_TEST_LIMIT_S": LIMIT_S,
    }
    given = [f"-D{name}={value}" for name, value in settings.items()]
    output_of(tools / "cmake", "-S", source, "-B", build, "-G", "Ninja", *given)
    output_of(tools / "cmake", "--build", build, "--", "--quiet")
    how = ("--output-on-failure", "--no-tests=error", "--label-exclude", "slow")
    said = output_of(tools / "ctest", "--test-dir", build, *how, "--exclude-regex", NOT_EMULATED)
    return next(line for line in said.splitlines() if "tests passed" in line)
