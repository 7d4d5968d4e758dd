"""A bucket's way there and back: compressed, sent by a framework's verbs, decompressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kolovod.core.codecs import Codec
from kolovod.core.ops import Average, Op, Sum
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.compression import Compressor, Payload, payload_of
from kolovod.gradients.spec import ReduceSpec

Wait = Callable[[], Sequence[Any]]
Submit = Callable[[str, str, "list[Any]", Sequence[Codec]], Wait]
"""Starts a grouped verb (allreduce, allgather, reducescatter) of tensors, under a name, with the
codecs of an allreduce; what it returns waits for the results."""


Packed = tuple[str, Payload]
"""The key of a gradient, and what is sent of it."""


def by(verbs: Any, spec: ReduceSpec, *, in_place: bool = False, at_once: bool = False) -> Submit:
    """Return a function that submits through ``verbs``, a framework's Collectives.

    ``in_place``: the tensors may be overwritten. ``at_once``: it uses the verbs that return
    results.
    """

    def submit(verb: str, name: str, tensors: list[Any], codecs: Sequence[Codec]) -> Wait:
        how: tuple[Any, ...] = ()
        suffix = "" if at_once else "_async"
        if verb != "allgather":
            how = spec.op, spec.prescale, spec.postscale
        if verb == "allreduce":
            suffix += "_" if in_place else ""
        call = getattr(verbs, f"grouped_{verb}{suffix}")
        compressed = {"compression": codecs} if any(codecs) else {}
        started = call(tensors, name or None, *how, spec.process_set, **compressed)
        return (lambda: started) if at_once else started.wait

    return submit


def scaling(verbs: Any, spec: ReduceSpec) -> Callable[[Any], Any]:
    """Return a function that scales a sum of gathered tensors as ``spec`` says."""
    return lambda total: total * spec.scale_of_sum(1.0 / verbs.membership(spec.process_set).size)


def start(
    spec: ReduceSpec,
    name: str,
    gradients: Sequence[tuple[str, Any]],
    submit: Submit,
    scaled: Callable[[Any], Any],
    further: Sequence[Any] = (),
) -> Callable[[], list[Any]]:
    """Send a bucket; what is returned waits for its gradients, combined, in their order.

    ``gradients``: each with its key. ``submit``: is called once for each verb that is needed, the
    operations being called ``name`` or, where there are two, ``name`` with a suffix.
    ``scaled``: makes of a sum over the ranks what ``spec`` makes of it. ``further``: tensors that
    are combined beside them, as they are; the results come last. Raises InvalidArgumentError for a
    compressor whose payloads cannot be combined so.
    """
    payloads = packed(spec.compressor, gradients)
    return start_packed(spec, name, payloads, submit, scaled, further)


def packed(compressor: Compressor, gradients: Sequence[tuple[str, Any]]) -> list[Packed]:
    """Return the payloads of ``gradients``, each with its key."""
    return [(key, payload_of(compressor, key, gradient, gradient)) for key, gradient in gradients]


def start_packed(
    spec: ReduceSpec,
    name: str,
    payloads: Sequence[Packed],
    submit: Submit,
    scaled: Callable[[Any], Any],
    further: Sequence[Any] = (),
) -> Callable[[], list[Any]]:
    """``start`` with what ``packed`` has returned.

    It may be sent more than once if ``submit`` leaves its tensors as they are.
    """
    compressor = spec.compressor
    reduced, gathered = _by_verb([payload for _, payload in payloads])
    codecs = [codec for codec, _ in reduced] + [Codec.none] * len(further)
    sent = [tensor for _, tensor in reduced] + [*further]
    if gathered and spec.op not in (Average, Sum):
        raise FrontEndArgumentError(
            f"op {Op(spec.op).name} combines what is reduced, but {type(compressor).__name__} has "
            "its payloads gathered: give Average or Sum"
        )
    of_reduced = submit("allreduce", name, sent, codecs) if sent else tuple
    second = f"{name}.gathered" if sent else name
    of_gathered = submit("allgather", second, gathered, ()) if gathered else tuple

    def wait() -> list[Any]:
        combined, rows = iter(of_reduced()), iter(of_gathered())
        results = []
        for key, payload in payloads:
            is_reduced = payload.verb == "allreduce"
            received = combined if is_reduced else rows
            own = [next(received) for _ in payload.tensors]
            result = compressor.decompress(key, payload, own)
            results.append(result if is_reduced else scaled(result))
        return [*results, *combined]

    return wait


def refuse_state(compressor: Compressor, where: str) -> None:
    """Raise InvalidArgumentError for a compressor that cannot work in a traced program."""
    if compressor.keeps_state:
        raise FrontEndArgumentError(
            f"compression is a {type(compressor).__name__}, which keeps a state from step to step, "
            f"but {where} is traced once: use Compression.none, .fp16 or .bf16 there"
        )


def _by_verb(payloads: Sequence[Payload]) -> tuple[list[tuple[Codec, Any]], list[Any]]:
    """The tensors to be reduced, each with its codec, and those to be gathered."""
    reduced: list[tuple[Codec, Any]] = []
    gathered: list[Any] = []
    for payload in payloads:
        if payload.verb == "allreduce":
            reduced.extend((payload.codec, tensor) for tensor in payload.tensors)
        else:
            gathered.extend(payload.tensors)
    return reduced, gathered
