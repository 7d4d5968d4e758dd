"""Changes to a training, for a prediction: other codecs, buckets, batches, links. PURE."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kolovod import _native
from kolovod.errors import CommandArgumentError
from kolovod.planning.costs import Cluster, Costs, Link
from kolovod.planning.model import Request, Step

__all__ = [
    "Change",
    "batched",
    "bucketed",
    "compressed",
    "parse_change",
    "parse_hosts",
    "parse_link",
]

COMPRESSIONS = ("none", "fp16", "bf16", *_native.CODEC_BYTES)
_CASTS = {"fp16": "float16", "bf16": "bfloat16"}
_WIDE = ("float32", "float64")
_FLOATS = (*_WIDE, *_CASTS.values())
_LEAST_CODED = 1024  # elements, csrc/collectives/codec.h
_RATES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MOST_HOSTS = 1 << 17


@dataclass(frozen=True)
class Change:
    """One ``--what-if``."""

    key: str
    text: str
    """The text as it was given, ``compression=int8``."""
    of_step: Callable[[Step, Costs], Step] = lambda step, costs: step
    of_cluster: Callable[[Cluster], Cluster] = lambda cluster: cluster


def compressed(step: Step, name: str, costs: Costs) -> Step:
    """Return the step with another compression of its floats: of ``COMPRESSIONS``.

    Casts are the script's work, on the way to the engine and back; codecs are the engine's. "none"
    takes a codec away, and leaves 16-bit floats what they are: they may be the model's own.
    """
    if name not in _CASTS:
        return replace(
            step, requests=tuple(_coded(r, "" if name == "none" else name) for r in step.requests)
        )
    dtype = _CASTS[name]
    before_s = after_s = 0.0
    requests = []
    for request in step.requests:
        is_wide = request.dtype in _WIDE
        before_s += 0.5 * costs.cast_s_per_byte * request.bytes if is_wide else 0.0
        after_s += 0.5 * costs.cast_s_per_byte * request.bytes if is_wide else 0.0
        bytes_ = request.bytes * 2 // _bytes_of(request.dtype) if is_wide else request.bytes
        requests.append(
            replace(request, at_s=request.at_s + before_s, bytes=bytes_, codec="",
                    dtype=dtype if is_wide else request.dtype)
        )  # fmt: skip
    waits = (at + before_s for at in step.waits_s)
    return replace(
        step, compute_s=step.compute_s + before_s + after_s, requests=tuple(requests),
        waits_s=tuple(waits),
    )  # fmt: skip


def _bytes_of(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)


def _coded(request: Request, codec: str) -> Request:
    elements = request.bytes // _bytes_of(request.dtype)
    fits = request.dtype in _FLOATS and request.dtype != "float64"
    is_coded = bool(codec) and fits and elements >= _LEAST_CODED
    return replace(request, codec=codec if is_coded else "")


def bucketed(step: Step, bucket_bytes: int) -> Step:
    """Return the step with gradients submitted in buckets of that size (bytes), where possible.

    Smaller ones are submitted together, when the last of them is there. A larger one of several
    tensors is cut, at most into these, which are taken to be alike, and to have come one after the
    other since the former request.
    """
    pieces: list[Request] = []
    before_s = 0.0
    for request in step.requests:
        count = min(request.tensors, max(1, round(request.bytes / bucket_bytes)))
        for i in range(count):
            at_s = before_s + (request.at_s - before_s) * (i + 1) / count
            part = request.bytes * (i + 1) // count - request.bytes * i // count
            tensors = request.tensors * (i + 1) // count - request.tensors * i // count
            pieces.append(replace(request, at_s=at_s, bytes=part, tensors=tensors))
        before_s = request.at_s
    return replace(step, requests=tuple(_joined(pieces, bucket_bytes, step.waits_s)))


def _joined(
    pieces: Sequence[Request], bucket_bytes: int, waits_s: Sequence[float]
) -> list[Request]:
    """Return the pieces, with neighbours joined if alike and if nobody waits in between."""
    joined: list[Request] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.dtype, last.codec) == (piece.dtype, piece.codec)
            and last.bytes + piece.bytes <= bucket_bytes
            and not any(last.at_s <= at < piece.at_s for at in waits_s)
        ):
            joined[-1] = replace(
                piece, bytes=last.bytes + piece.bytes, tensors=last.tensors + piece.tensors
            )
        else:
            joined.append(piece)
    return joined


def batched(step: Step, times: float) -> Step:
    """Return the step with batches so many times as large: more computing, the same gradients."""
    return replace(
        step,
        compute_s=times * step.compute_s,
        requests=tuple(replace(r, at_s=times * r.at_s) for r in step.requests),
        waits_s=tuple(times * at for at in step.waits_s),
    )


# From text --------------------------------------------------------------------------------------


def parse_change(text: str) -> Change:
    """Return the change of a ``--what-if``: ``KEY=VALUE``. Raises InvalidArgumentError."""
    key, equals, value = text.partition("=")
    if not equals or key not in _KEYS:
        known = "; ".join(f"{name}={values}" for name, (values, _) in _KEYS.items())
        raise CommandArgumentError(f"--what-if {text!r}: expected KEY=VALUE, one of {known}")
    return _KEYS[key][1](text, value)


def _compression(text: str, value: str) -> Change:
    if value not in COMPRESSIONS:
        raise CommandArgumentError(f"--what-if {text!r}: expected one of {', '.join(COMPRESSIONS)}")
    return Change("compression", text, of_step=lambda step, costs: compressed(step, value, costs))


def _bucket(text: str, value: str) -> Change:
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(?:iB|B)?", value)
    bytes_ = int(float(matched[1]) * _SIZES[matched[2]]) if matched else 0
    if bytes_ < 1:
        raise CommandArgumentError(
            f"--what-if {text!r}: expected a size in bytes, as in bucket=4MiB or bucket=512K"
        )
    return Change("bucket", text, of_step=lambda step, costs: bucketed(step, bytes_))


def _batch(text: str, value: str) -> Change:
    times = _positive(text, value, "how many times as large batches are, as in batch=2")
    return Change("batch", text, of_step=lambda step, costs: batched(step, times))


def _ranks(text: str, value: str) -> Change:
    if not value.isdecimal() or not 1 <= int(value) <= _MOST_HOSTS:
        raise CommandArgumentError(f"--what-if {text!r}: expected a number of ranks, 1 or more")
    number = int(value)
    return Change("ranks", text, of_cluster=lambda cluster: replace(cluster, ranks_per_host=number))


def _cores(text: str, value: str) -> Change:
    """Return the change; each host is a machine of its own then."""
    cores = _positive(text, value, "the cores of each host, as in cores=8")
    return Change(
        "cores", text,
        of_cluster=lambda cluster: replace(cluster, cores=cores, hosts_per_machine=1),
    )  # fmt: skip


def _positive(text: str, value: str, expected: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < _MOST_HOSTS:
        raise CommandArgumentError(f"--what-if {text!r}: expected {expected}")
    return number


_KEYS: dict[str, tuple[str, Callable[[str, str], Change]]] = {
    "compression": ("|".join(COMPRESSIONS), _compression),
    "bucket": ("4MiB", _bucket),
    "batch": ("2", _batch),
    "ranks": ("4 (of each host)", _ranks),
    "cores": ("8 (of each host)", _cores),
}


def parse_link(text: str, latency_s: float) -> Link:
    """Return the link of ``10G`` or ``100M+20ms``: bits per second, and a message's latency.

    ``latency_s``: if that is not said. Raises InvalidArgumentError.
    """
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:\+(\d+(?:\.\d+)?)(us|ms|s))?", text)
    rate = float(matched[1]) * _RATES[matched[2]] if matched else 0.0
    if matched is None or not 1e3 <= rate <= 1e14:
        raise CommandArgumentError(
            f"--link {text!r}: expected bits per second, and a delay if it is long, as in 10G, "
            "100M or 1G+20ms"
        )
    if matched[3]:
        latency_s = float(matched[3]) * _TIMES[matched[4]]
    return Link(rate / 8, latency_s)


def parse_hosts(text: str) -> list[int]:
    """Return the numbers of hosts in ``2,8,64``, ascending. Raises InvalidArgumentError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= _MOST_HOSTS for part in parts):
        raise CommandArgumentError(
            f"--hosts {text!r}: expected numbers of hosts with commas between, as in 2,8,64; at "
            f"most {_MOST_HOSTS}"
        )
    return sorted({int(part) for part in parts})
