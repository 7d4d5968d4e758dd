"""The verbs as ops of a TensorFlow graph (csrc/bind/tf_ops.cc), without gradients.

Ops are made with public functions alone. Their kernels are asynchronous: all those of a graph whose
inputs are ready are on their way together, and the engine fuses them.

What all functions take: ``name``: None names the operation after its node, so that ranks which
build the same graph agree, however often each of them has traced it. ``process_set``: the
number of one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import tensorflow as tf

from kolovod import _native
from kolovod.core import deadlocks
from kolovod.core.call_lines import are_told, is_of_script, line_of, traced_line
from kolovod.core.codecs import in_digits
from kolovod.core.ops import Sum
from kolovod.core.submission import Request, check_arguments, check_further
from kolovod.core.verbs import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST, VERBS
from kolovod.errors import FrontEndArgumentError
from kolovod.tensorflow.frontend import code_of

_TOO_LARGE_TO_COPY = 1024  # elements; up to 128 are
_FROM_ANY_LINE = ("KolovodBarrier", "KolovodJoin", "KolovodFact")  # nothing is combined wrongly
_TRACERS = tuple(
    os.sep.join(("", "tensorflow", "python", *part.split("/"), ""))
    for part in ("eager/polymorphic_function",)
)
_JOINS, _ANCHORS = "kolovod.joins", "kolovod.anchors"  # a graph's collections
_of_the_forward_op: ContextVar[tf.Tensor | None] = ContextVar("kolovod.anchor", default=None)


def register() -> None:
    """Make the ops known to TensorFlow. Raises ImportError when they cannot be."""
    error = _native.register_tensorflow_ops()
    if error:
        raise ImportError(f"kolovod.tensorflow with TensorFlow {tf.__version__}: {error}")
    own = Path(tf.__file__).resolve().parent
    shared = Path(tf.sysconfig.get_lib()).resolve()  # elsewhere in conda
    deadlocks.waits_within(f"{own}/", f"{shared}/libtensorflow")


def run(
    request: Request, tensors: Sequence[Any], process_set: int
) -> tuple[list[tf.Tensor], tf.Tensor | None]:
    """Any verb that makes new tensors, on ``tensors`` as one group.

    ``request.splits``: a tensor or a list of whole numbers, one for each rank, or None for equal
    parts. Its process set is not looked at. Returns the results, and an int64 vector or None: of an
    allgather, for each tensor, the first row that is this rank's; of an alltoall, the rows
    received, by rank.
    """
    given = _converted(tensors)
    if not given:
        return [], None
    inputs = [_as_sent(tensor, request) for tensor in given]
    verb, types = request.verb, [tensor.dtype for tensor in inputs]
    attribute = tf.compat.v1.AttrValue
    enums = [dtype.as_datatype_enum for dtype in types]
    attributes: dict[str, Any] = {"T": attribute(list=attribute.ListValue(type=enums))}
    has_rows = verb in (ALLGATHER, ALLTOALL)
    if verb.reduces:
        attributes |= _reduction(request.op, (request.prescale, request.postscale))
        if verb is ALLREDUCE:
            codecs = in_digits(request.codecs, len(inputs))
            attributes["codecs"] = attribute(s=codecs.encode())
    elif verb is BROADCAST:
        check_arguments(None, Sum, 1.0, 1.0, request.root)
        attributes["root"] = _int(request.root)
    elif verb is ALLTOALL:
        attributes["T"] = attribute(type=enums[0])
        inputs = [*inputs, _splits(request.splits)]
    outputs = [*types, tf.int64] if has_rows else types
    node = _node(
        f"Kolovod{verb.name.capitalize()}", inputs, outputs, request.name, process_set, attributes
    )
    made = node.outputs[: len(given)]
    results = [
        made if made.dtype == tensor.dtype else tf.bitcast(made, tensor.dtype)
        for made, tensor in zip(made, given, strict=True)
    ]
    return (results, node.outputs[-1]) if has_rows else (results, None)


def request_of(node: tf.Operation) -> Request:
    """Return the request of which ``run`` has made ``node``, without splits."""
    verb = VERBS[node.type.removeprefix("Kolovod").lower()]
    request = Request(verb, node.get_attr("tensor_name").decode() or None)
    if verb.reduces:
        bits = struct.pack("<qq", node.get_attr("prescale_bits"), node.get_attr("postscale_bits"))
        prescale, postscale = struct.unpack("<dd", bits)
        request = request._replace(op=node.get_attr("op"), prescale=prescale, postscale=postscale)
        if verb is ALLREDUCE:
            codecs = tuple(map(int, node.get_attr("codecs").decode()))
            request = request._replace(codecs=codecs)
    return request._replace(root=node.get_attr("root")) if verb is BROADCAST else request


def barrier(name: str | None, process_set: int) -> None:
    """Add an operation that is run though nothing depends on it."""
    _node("KolovodBarrier", [], [], name, process_set, {})


def join(process_set: int) -> tf.Tensor:
    """An int32 scalar: the place in the set of the rank that came last.

    Runs when the operations of this graph that were made before are complete, and before those that
    are made later.
    """
    graph = tf.compat.v1.get_default_graph()
    before = [node for node in graph.get_operations() if node.type.startswith("Kolovod")]
    with tf.control_dependencies(before):
        node = _node("KolovodJoin", [], [tf.int32], None, process_set, {})
    graph.add_to_collection(_JOINS, node)
    (last,) = node.outputs
    return last


def fact(fact: str, process_set: int = 0, name: str | None = None) -> tf.Tensor:
    """An int32 scalar, asked for when the op is run. ``name``: the node's.

    ``fact``: ``rank``, ``size``, ``local_rank``, ``local_size``, ``cross_rank``, ``cross_size`` of
    the set, or ``included``: 1 if this rank is in it, else 0.
    """
    attributes = {"fact": tf.compat.v1.AttrValue(s=fact.encode())}
    node = _node("KolovodFact", [], [tf.int32], None, process_set, attributes, label=name)
    (value,) = node.outputs
    return value


def _converted(tensors: Sequence[Any]) -> list[tf.Tensor]:
    converted = [tf.convert_to_tensor(tensor) for tensor in tensors]
    for tensor in converted:
        code_of(tensor.dtype)  # TensorFlow's own error shows the op's definition
    return converted


_SAME_BITS = {
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.float32,  # a pair, which is one more dimension
    tf.complex128: tf.float64,
}
"""The dtypes that the ops take instead of those that the engine does not know."""


def _as_sent(tensor: tf.Tensor, request: Request) -> tf.Tensor:
    same = _SAME_BITS.get(tensor.dtype)
    if same is None:
        return tensor
    check_further(code_of(tensor.dtype), request)
    if request.verb.makes_outputs and tensor.shape.rank == 0:
        raise FrontEndArgumentError(
            f"{request.verb}: a scalar has no first dimension to join or split along; reshape it "
            "to (1,)"
        )
    return tf.bitcast(tensor, same)


def _reduction(op: int, scales: tuple[float, float]) -> dict[str, Any]:
    try:
        bits = [_bits(scale) for scale in scales]
    except (struct.error, OverflowError):
        check_arguments(None, op, *scales, 0)
        raise
    if op not in _native.OPS.values():
        check_arguments(None, op, *scales, 0)
    return {"op": _int(op), "prescale_bits": _int(bits[0]), "postscale_bits": _int(bits[1])}


def _splits(splits: Any) -> tf.Tensor:
    if splits is None:
        splits = tf.zeros([0], tf.int64)
    elif not isinstance(splits, tf.Tensor):
        splits = tf.convert_to_tensor(splits, tf.int64)
    elif not splits.dtype.is_integer:
        raise FrontEndArgumentError(f"splits are of {splits.dtype.name}: give whole numbers")
    return tf.cast(splits, tf.int64)


def _node(
    op_type: str,
    inputs: list[tf.Tensor],
    output_types: list[tf.DType],
    name: str | None,
    process_set: int,
    attributes: dict[str, Any],
    label: str | None = None,
) -> tf.Operation:
    check_arguments(name, Sum, 1.0, 1.0, 0)
    graph = tf.compat.v1.get_default_graph()
    attribute = tf.compat.v1.AttrValue
    label = label or (op_type if name else _node_name(process_set))
    anchor = _anchor_of_session() if is_of_session() else _anchor_in(graph)
    common = {
        "process_set": _int(process_set),
        "tensor_name": attribute(s=(name or "").encode()),
        "called_from": attribute(s=_line_of(op_type, name).encode()),
        # Two ops of one graph that are alike but for this are two operations.
        "unique_name": attribute(s=graph.unique_name(label, mark_as_used=False).encode()),
        "_XlaCompile": attribute(b=False),  # automatic clustering leaves it out
    }
    with tf.control_dependencies(graph.get_collection(_JOINS)):
        return graph.create_op(
            op_type,
            [anchor, *inputs],
            output_types,
            name=label,
            attrs={**common, **attributes},
        )


def _line_of(op_type: str, name: str | None) -> str:
    """Return the line of the script, where a graph asks for an operation without a name.

    What AutoGraph has made of a function has other lines in a file of its own, but TensorFlow knows
    those that they come from: it says so of the node which is made there.
    """
    if name or op_type in _FROM_ANY_LINE or not are_told():
        return ""
    line, frame, outside = traced_line(_is_border), sys._getframe(1), 0
    if line:
        return line
    while frame is not None and not _is_border(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    while frame is not None:
        outside += is_of_script(frame.f_code.co_filename)
        frame = frame.f_back  # type: ignore[assignment]
    lines = [each for each in tf.no_op("kolovod_line").traceback if is_of_script(each[0])]
    return line_of(*lines[-1][:2]) if len(lines) > outside else ""


def _is_border(file: str) -> bool:
    """Return whether TensorFlow calls functions from ``file`` that it traces."""
    return any(part in file for part in _TRACERS)


def _node_name(process_set: int) -> str:
    """Return the name of an unnamed operation's node; TensorFlow appends a number to it.

    It is the same for all verbs: ranks that ask for different ones at one place of a graph meet
    there, and each hears what the others asked for. Each set has a name of its own: a rank that is
    not in one leaves those operations out. Named operations are not counted, since ranks may differ
    in them.
    """
    return f"kolovod_set{process_set}" if process_set else "kolovod"


@contextlib.contextmanager
def anchored(anchor: tf.Tensor | None) -> Iterator[None]:
    """Within this context a gradient's ops have ``anchor``, that of what was differentiated."""
    token = _of_the_forward_op.set(anchor)
    try:
        yield
    finally:
        _of_the_forward_op.reset(token)


def own_anchor() -> tf.Tensor | None:
    """The anchor for ``anchored``, of ops that are made now; None where they need none."""
    if tf.executing_eagerly() or is_of_session():
        return None
    return _copied(tf.compat.v1.get_default_graph())


def _anchor_in(graph: tf.Graph) -> tf.Tensor:
    """Return an input for an op of ``graph``, which is no op of constants only then.

    Such an op TensorFlow runs once, while it optimizes the graph, and keeps the result. A tensor
    from outside becomes an argument of the function, unless it is so small that it is copied in.

    The gradient of a loop or of a branch has no place for a tensor from outside: it takes what the
    loop has, and what the graph around has. So a gradient's ops have the anchor of the ops that it
    is that of, and those in a loop or a branch one of the graph around it.
    """
    given = _of_the_forward_op.get()
    if given is not None:
        return given
    if getattr(graph, "is_control_flow_graph", False):
        return _copied(graph.outer_graph)
    return _anchor()


def _copied(graph: tf.Graph) -> tf.Tensor:
    """The anchor as a tensor of ``graph``."""
    given = _of_the_forward_op.get()
    # Collections are inherited by functions within, to which the tensors of this one mean nothing.
    known = [anchor for anchor in graph.get_collection(_ANCHORS) if anchor.graph is graph]
    if given is None and known:
        return known[0]
    with graph.as_default(), tf.control_dependencies(None), tf.device("CPU:0"):
        anchor = tf.identity(_anchor_in(graph), name="kolovod_anchor")
    if given is None:
        graph.add_to_collection(_ANCHORS, anchor)
    return anchor


@functools.cache
def _anchor() -> tf.Tensor:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.zeros([_TOO_LARGE_TO_COPY], tf.uint8)


def is_of_session() -> bool:
    """Return whether the graph that is being built is one of TensorFlow 1."""
    return not tf.compat.v1.executing_eagerly_outside_functions()


def _anchor_of_session() -> tf.Tensor:
    """Return a tensor that is never constant, for a graph of TensorFlow 1, which has no arguments.

    It asks for a state of the session, and always gets the same answer: the time, say, is refused
    where a script has called ``tf.config.experimental.enable_op_determinism``.
    """
    with tf.device("CPU:0"):
        never_set = tf.raw_ops.VarHandleOp(dtype=tf.uint8, shape=[], shared_name="kolovod_anchor")
        return tf.cast(tf.raw_ops.VarIsInitializedOp(resource=never_set), tf.uint8)


def _int(value: int) -> Any:
    return tf.compat.v1.AttrValue(i=int(value))


def _bits(value: float) -> int:
    """A float64 as the integer of the same bits; TensorFlow's own float attribute has 32."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits
