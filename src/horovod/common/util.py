"""Small things that others import from here."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any, TypeVar

from horovod.common import basics
from horovod.common.exceptions import HorovodVersionMismatchError

T = TypeVar("T")

EXTENSIONS = ["tensorflow", "torch", "mxnet"]

mpi_built = basics.mpi_built
gloo_built = basics.gloo_built
nccl_built = basics.nccl_built
ddl_built = basics.ddl_built
ccl_built = basics.ccl_built


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether that framework is installed; Kolovod needs nothing compiled for it."""
    return importlib.util.find_spec(ext_base_name) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether that framework sees a GPU."""
    if ext_base_name == "torch" and extension_available("torch"):
        import torch

        return torch.cuda.is_available()
    if ext_base_name == "tensorflow" and extension_available("tensorflow"):
        import tensorflow

        return bool(tensorflow.config.list_physical_devices("GPU"))
    return False


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """Raise ImportError unless the framework is installed."""
    framework = ext_name.rsplit(".", 1)[-1]
    if not extension_available(framework):
        raise ImportError(f"{framework} is not installed: pip install 'kolovod[{framework}]'")


@contextlib.contextmanager
def env(**kwargs: Any) -> Iterator[None]:
    """Set environment variables within this context; None leaves one as it is."""
    before = {name: os.environ.get(name) for name, value in kwargs.items() if value is not None}
    os.environ.update({name: str(kwargs[name]) for name in before})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741 - a name of Horovod's
    """``n`` neighbouring parts; the first ones have one more where they are not equal."""
    size, longer = divmod(len(l), n)
    ends = [part * size + min(part, longer) for part in range(n + 1)]
    return [l[begin:end] for begin, end in itertools.pairwise(ends)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether Adasum is possible among so many ranks."""
    return num_rank != 0 and num_rank & (num_rank - 1) == 0


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, Any], Any]:
    """Return a function that turns (op, average) into an op of ``reduce_ops``.

    ``average`` is deprecated.
    """

    def convert(op: Any, average: Any) -> Any:
        if average is None:
            return reduce_ops.Average if op is None else op
        if op is not None:
            raise ValueError(f"average={average} and op={op} say the same thing: give op only")
        warnings.warn("average is deprecated, use op instead", DeprecationWarning, stacklevel=3)
        return reduce_ops.Average if average else reduce_ops.Sum

    return convert


def is_iterable(x: Any) -> bool:
    """Return whether ``iter(x)`` is possible."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether version ``ver`` is ``target`` or later; ``target`` is written "1.2.3"."""
    if len(target.split(".")) != 3 or not all(part.isdecimal() for part in target.split(".")):
        raise ValueError(f"target is {target!r}: expected three numbers, as in 1.2.3")
    return _numbers(ver) >= _numbers(target)


def _numbers(version: str) -> list[int]:
    numbers = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = ""
        for letter in part:
            if not letter.isdecimal():
                break
            digits += letter
        numbers.append(int(digits or 0))
    return numbers + [0] * (3 - len(numbers))


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Raise HorovodVersionMismatchError if distribution ``name`` has another version.

    One that is not installed has none: a framework may come under several names.
    """
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        return
    if installed != version:
        raise HorovodVersionMismatchError(name, version, installed) from exception


def get_ext_suffix() -> str:
    """Return the ending of compiled modules' file names."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Return the path of a compiled module of that package."""
    return os.path.join(os.path.dirname(os.path.abspath(pkg_path)), *args) + get_ext_suffix()
