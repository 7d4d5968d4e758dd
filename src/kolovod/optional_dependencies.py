"""Packages that front ends and clusters need beside Kolovod.

A framework is imported only by its own front end.
"""

from __future__ import annotations

import importlib.util

_PACKAGES = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow",),
    "keras": ("keras", "tf_keras"),
    "jax": ("jax",),
    "mxnet": ("mxnet",),
    "ray": ("ray",),
    "spark": ("pyspark",),
    "metrics": ("prometheus_client",),
    "tensorboard": ("tensorboard",),
    "lightning": ("lightning",),
}
"""By extra, the packages of which one must be there."""

_TITLES = {
    "torch": "PyTorch",
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "jax": "JAX",
    "mxnet": "MXNet",
    "ray": "Ray",
    "spark": "PySpark",
    "metrics": "prometheus_client",
    "tensorboard": "tensorboard",
    "lightning": "Lightning",
}

_USERS = {
    "metrics": "a metrics server",
    "tensorboard": "tensorboard_dir",
    "lightning": "kolovod.torch.lightning",
}
"""Of extras that are no package of ours: what needs them."""


def missing(extra: str) -> ImportError | None:
    """The error to raise when what ``extra`` brings is not installed, else None.

    Nothing is imported for that. A package that is there and cannot be imported says why itself.
    """
    packages = _PACKAGES[extra]
    if any(map(_is_installed, packages)):
        return None
    what = _USERS.get(extra, f"kolovod.{extra}")
    return ModuleNotFoundError(
        f"{what} needs {_TITLES[extra]}, which is not installed: pip install 'kolovod[{extra}]'",
        name=packages[0],
    )


def _is_installed(package: str) -> bool:
    """Return whether the package is there; a folder of that name without an __init__.py is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
