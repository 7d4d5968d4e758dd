"""Which release this is, as the native engine knows it.

The package's metadata say the same, but take each process a tenth of its start to read.
"""

from __future__ import annotations

from kolovod import _native

__all__ = ["__version__"]

__version__ = _native.RELEASE
