"""Times, sizes and rates for people."""

from __future__ import annotations

__all__ = ["bytes_text", "duration_text", "rate_text", "time_text"]


def time_text(micros: float) -> str:
    """Return a time as ``12 us``, ``3.4 ms``, ``1.20 s``."""
    if micros < 1e3:
        return f"{micros:.0f} us"
    return f"{micros / 1e3:.1f} ms" if micros < 1e6 else f"{micros / 1e6:.2f} s"


def duration_text(seconds: float) -> str:
    """Return a time as ``1:02:03``: hours, minutes, seconds."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def bytes_text(count: float) -> str:
    """Return a size as ``12 bytes``, ``3.4 MiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"


def rate_text(bytes_per_s: float) -> str:
    """Return a rate as ``10 Gbit/s``."""
    for factor, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if 8 * bytes_per_s >= factor:
            return f"{8 * bytes_per_s / factor:.3g} {unit}"
    return f"{8 * bytes_per_s / 1e3:.3g} kbit/s"
