"""The native engine (csrc/bind/module.cc). Private: the public surface is ``kolovod``.

Pointers are integers (addresses of host memory). The caller keeps every buffer alive and unmoved
until the operation has completed. All calls release the GIL while they wait.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypedDict, final

class VerbTraits(TypedDict):
    """What there is to know of a verb."""

    number: int
    tensors: Literal["none", "one", "any"]
    reduces: bool
    """It combines the ranks' elements: it has an op and factors."""
    fuses: bool
    """Tensors of several operations are reduced as one range."""
    makes_outputs: bool
    """Only the engine knows how large the results are."""
    has_root: bool
    has_splits: bool
    """It says how many rows go to each rank."""
    rows_differ: bool
    """Ranks may differ in the first dimension."""
    is_transfer: bool
    """It moves from one rank to another, without the others."""
    allows_joined: bool
    """Ranks that have joined take part with zeros."""

class DTypeTraits(TypedDict):
    """What there is to know of a dtype."""

    number: int
    bytes: int
    kind: Literal["bool", "integer", "float"]
    accumulator: str
    """The dtype in which the ranks' elements are combined."""
    mean_accumulator: str
    """The same for Average."""
    scales: bool
    """Average and factors are allowed."""
    adasum: bool

class EngineError(Exception):
    """``args == (code, message)``; codes are listed in ``kolovod.errors``."""

def libcrypto() -> str:
    """The version of the machine's libcrypto. EngineError, saying why, if there is none."""

def offered_ciphers() -> int:
    """Those that this host does well, as bits: 1 AES-256-GCM, 2 ChaCha20-Poly1305.

    EngineError without libcrypto.
    """

@final
class RecordKeys:
    """The keys of both directions of one connection, and their cipher."""

@final
class Agreement:
    """What both ends of a connection know after a key exchange."""

    def keys(self, purpose: str) -> RecordKeys:
        """Those for one use of the connection; other uses have others."""

@final
class KeyExchange:
    """One end's part of an X25519 exchange, for one connection. EngineError without libcrypto."""

    def __init__(self) -> None: ...
    @property
    def public(self) -> bytes:
        """32 bytes for the other end."""

    def agree(
        self, session: bytes, others_public: bytes, cipher: int, is_server: bool
    ) -> Agreement:
        """With the handshake's ``session`` key. EngineError if ``others_public`` is no key."""

@final
class MessageSealer:
    """Both directions of a connection, for messages that are one record each (docs/wire.md)."""

    def __init__(self, keys: RecordKeys) -> None: ...
    def seal(self, body: bytes) -> bytes:
        """The next record to send: 20 bytes longer."""

    def open(self, record: bytes) -> bytes | None:
        """The body of the next record from there; None if it is not that."""

@final
class ConnectionBroker:
    """Where an engine asks for connections to ranks of other hosts, and finds them.

    ``fileno()`` is readable when ``wanted()`` has something to say, or after ``close``.
    """

    def __init__(self) -> None: ...
    def fileno(self) -> int: ...
    def wanted(self) -> list[tuple[int, int]]:
        """Ranks to which a connection is needed, and which one of several; each told once."""

    def connected(self, peer: int, stripe: int, fd: int, keys: RecordKeys | None = None) -> None:
        """Take over ``fd``, a connected stream socket to ``peer``; once closed, close it.

        ``stripe``: which connection to it, from 0. ``keys``: what passes is sealed with them.
        """

    def failed(self, text: str) -> None:
        """End the world: there will be no connection that it needs, as ``text`` says."""

    def close(self) -> None: ...
    def forget(self) -> None:
        """In a forked child: close the descriptors."""

    @property
    def closed(self) -> bool: ...

@final
class Engine:
    """One rank's engine. ``segment_fd == -1`` with ``size == 1`` needs no segment from outside.

    ``peers[r] == (pidfd, description)`` for every rank, own rank included; a pidfd of -1 means that
    the death of that rank is not watched by the engine. Descriptors are duplicated.
    The constructor returns once all ranks have attached the segment, or raises EngineError
    (naming the missing ranks) after ``config["start_timeout_ms"]``.
    ``ranks``, ``world``: of a process set its members' numbers in the world, and the world's
    engine; both end together when a rank is lost.
    ``hosts``: by rank a number for its host, () for one host. With several, ``control_fds``:
    connected stream sockets which the engine takes over, by host (from a host's first rank to those
    of its ``tree_neighbours``, else -1), ``control_keys``, what each of them is encrypted with
    (None or an empty sequence: not at all), and ``links``, an object with a ``broker``, where the
    engine gets connections for data, ``close``, called when it is shut down, and ``forget``.
    ``external="host"``: after ``hand_over`` buckets are handed to ``next_bucket`` instead of the
    own collectives. ``"gpu"``: there are tensors on a GPU, whose buckets go there; one GPU for a
    rank. ``""``: neither.
    ``stacks``: asked for the main thread's stack when this rank is late.
    ``last_operations_prefix``: what the names of the files begin with (folder included) that are
    written when the world ends by a failure; "" writes none.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        epoch: int,
        segment_fd: int,
        peers: Sequence[tuple[int, str]],
        config: Mapping[str, int],
        external: str = "",
        ranks: Sequence[int] = (),
        world: Engine | None = None,
        hosts: Sequence[int] = (),
        control_fds: Sequence[int] = (),
        control_keys: Sequence[RecordKeys | None] = (),
        links: Any = None,
        stacks: StackSource | None = None,
        last_operations_prefix: str = "",
    ) -> None: ...
    def submit(
        self,
        verb: int,
        name: str | None,
        tensors: Sequence[tuple[int, tuple[int, ...], int, int]],
        op: int,
        prescale: float,
        postscale: float,
        root: int,
        blocking: bool,
        splits: Sequence[int] = (),
        out_bytes: Sequence[int] = (),
        tells_lines: bool = False,
        /,
    ) -> int:
        """Queue one request and return its handle (> 0).

        ``tensors``: (dtype, shape, input pointer, output pointer); several make a group. Output may
        equal input. For allgather, alltoall and reducescatter the engine allocates the outputs (see
        ``output``), or ``out_bytes`` says how large the memory at each output pointer is; another
        size than the result's is an error of ``wait``. ``splits``: alltoall, rows for each rank.
        ``name``: None or "" means unnamed (the engine numbers it). ``root``: of a broadcast only.
        ``blocking``: the caller will wait at once, so no other thread is woken for it.
        ``tells_lines``: an unnamed one carries the script's lines (``use_call_lines``).
        Raises EngineError at once for a duplicate name, a bad argument, a lost or left rank.
        """

    def run(
        self,
        verb: int,
        name: str | None,
        tensors: Sequence[tuple[int, tuple[int, ...], int, int]],
        op: int,
        prescale: float,
        postscale: float,
        root: int,
        splits: Sequence[int],
        tells_lines: bool,
        buffers: object,
        finish: Callable[[Engine, int], Any] | None,
        /,
    ) -> Any:
        """Submit, wait without limit, and release; return ``finish(engine, handle)``, or None.

        If the operation may go on when this raises, ``buffers`` are given to ``use_keeper``'s.
        """

    def wait(self, handle: int, timeout_s: float, drives: bool = False) -> None:
        """Return when done; EngineError when failed; ``timeout_s < 0`` waits without limit.

        Without a limit the caller drives; with one it leaves that to the engine's thread, unless
        ``drives``: for the price that a limit which is over in the middle of a bucket ends the
        world.

        Python signals are served at least every 100 ms. After a timeout the operation is still
        pending and may be waited for again. A finished handle stays until ``release``.
        """

    def poll(self, handle: int) -> bool: ...
    def release(self, handle: int) -> bool:
        """Forget a handle. True: it is done, its buffers are no longer used. False: pending."""

    def output(self, handle: int, index: int) -> Any:
        """Output ``index`` that the engine made; call once each.

        An array of bytes that owns its memory, 64-byte aligned; of tensors on a GPU what was given
        to ``keep_output``, or None.
        """

    def rows(self, handle: int, index: int) -> list[int]:
        """Rows that each rank contributed to a completed allgather, or sent here in an alltoall.

        Of a completed join: the rank that came last.
        """

    def hand_over(self) -> None:
        """External engines: from now on ``next_bucket`` gets all buckets; call it on all ranks."""

    def next_bucket(self, timeout_s: float) -> dict[str, Any] | None:
        """External engines: the next bucket, None on timeout; EngineError once shut down.

        Keys: token, verb, dtype, op, prescale, postscale, root (rank), name (first tensor's name),
        device (number of the GPU that this rank's tensors are on, else -1), tensors, a list of
        (input pointer, output pointer, element count), and sizes. On a GPU pointers of 0 stand for
        zeros (this rank has joined), and the output pointers of verbs that make outputs are for
        ``keep_output``. For Average,
        op is Average and the division by size is the callee's. sizes: of an allgather the bytes of
        each rank, of an alltoall the bytes that this rank sends to each (the element counts are 0
        then); of a reducescatter the elements of each rank's part. Of an alltoall also received,
        the bytes that each rank sends to this one, and total, those of all to all.
        """

    def open_bucket(self, token: int) -> None:
        """Begin to touch the memory of a bucket's tensors; end soon, with ``close_bucket``.

        Raises EngineError when the bucket was given up: its memory may be gone.
        """
    def close_bucket(self) -> None:
        """The memory is not touched any more."""
    def keep_output(self, address: int, tensor: Any) -> None:
        """``tensor`` is the output of the bucket at hand for this output pointer, on a GPU."""
    def bucket_done(self, token: int, error: str) -> None:
        """``error == ""``: success."""

    def pending(self) -> int:
        """Operations that were submitted here and are not complete."""

    def say_waits(self, text: bytes) -> bool:
        """Tell all ranks of the world what this one waits for; b"": it goes on. False: too long."""

    def read_waits(self) -> list[tuple[int, int, bytes]]:
        """(rank, a number that changes with the text, the text) of those that wait."""

    def standing(self) -> tuple[int, bool, list[tuple[int, str]]]:
        """Buckets begun; whether all that is pending is known; name's hash and verb of each."""

    def describe(self, handle: int) -> tuple[str, str] | None:
        """Name and verb of an operation; None for an unknown one."""

    def asks(self, handle: int) -> tuple[str, int] | None:
        """Verb and peer (-1: any) of a message that the other end may never meet; None: else."""

    def exchanged(self) -> list[tuple[int, int, int, int]]:
        """By rank: messages sent to it, seen of it; its offers answered, its answers to ours."""

    def refuse(self, reason: str) -> None:
        """Every pending and later operation fails as a mismatch, on every rank."""

    def abort(self, message: str) -> None:
        """Fail every pending and later operation on every rank, naming this rank as the cause."""

    def shutdown(self) -> None:
        """Leave the world; operations pending here fail, on every rank. Idempotent."""

    def forget(self) -> None:
        """In a forked child: what is the parent's (thread, segment) is never touched again."""

    def sent_bytes(self) -> list[int]:
        """By rank: bytes of data, without headers, sent over the connection to it."""

    def stats(self) -> dict[str, int]: ...
    def c_handle(self) -> int:
        """The address that C programs know as ``kolovod_engine*`` (csrc/include/kolovod.h)."""

    def last_operations(self, after: int = 0) -> list[dict[str, Any]]:
        """What ``kolovod.last_operations`` documents, but times in ns of CLOCK_MONOTONIC, or 0.

        Those with a number above ``after``.
        """

    def keep_exact_times(self, exact: bool) -> None:
        """While anybody wants it these times are exact for small operations; else up to 4 ms late.

        False takes back one True.
        """

    def last_late_report(self) -> str:
        """The last report on late ranks that this rank wrote to standard error; "" if none."""

@final
class StackSource:
    """Sends ``signum`` to the main thread, whose handler writes a stack into a pipe.

    ``read_fd`` is the pipe's other end, not blocking; the caller keeps it open.
    """

    def __init__(self, signum: int, read_fd: int) -> None: ...

@final
class LoopbackWorld:
    """Ranks in this process, over anonymous segments and sockets (the real code)."""

    def __init__(self, hosts: Sequence[int], config: Mapping[str, int]) -> None:
        """``hosts``: by rank a number for its host; ranks of one share a segment."""

    def engine(self, rank: int) -> Engine:
        """The engine of ``rank``; the first call for each rank must be made from its own thread."""

    def make_set(self, members: Sequence[int]) -> LoopbackWorld:
        """A process set of ``members`` (ascending), whose ranks are positions among them."""

    def kill(self, rank: int) -> None:
        """From now on rank behaves as a dead process does: it does nothing, and its pidfd fires."""

    def delay(self, rank: int, delay_us: int) -> None:
        """Sleep this long before every announcement and every data flag of rank."""

    def drop(self, rank: int, count: int) -> None:
        """Lose the next ``count`` announcements of rank."""

def segment_bytes(on_host: int, size: int, config: Mapping[str, int]) -> int:
    """How large a segment must be (bytes, a multiple of the page size)."""

def tree_neighbours(hosts: int, host: int) -> list[int]:
    """Of a host: its neighbours in the tree of leaders, the one nearer to host 0 first."""

def allreduce_between_hosts(
    bytes: int, hosts: int, dtype: int, latency_us: float, bytes_per_us: float
) -> tuple[str, int, int, int]:
    """What an allreduce by Average among ``hosts`` sends (csrc/collectives/select.h).

    The algorithm that the ranks choose, the messages that must follow each other, and the messages
    and bytes of the member that has most of them. ValueError for numbers out of range.
    """

def why_not(dtype: int, verb: int, op: int, has_factors: bool) -> str:
    """Why an operation cannot be done with one of ``FURTHER_DTYPES``; "" if it can."""

def hash_memory(address: int, bytes: int, seed: int = 0) -> int:
    """64 bits that differ where the bytes do; not against somebody who chooses them."""

def hash_tensors(tensors: list[Any], begin: int, end: int) -> int | None:
    """``hash_memory`` of PyTorch's ``tensors`` one after the other, from byte ``begin`` to ``end``.

    None: one of them is no plain block in host memory, or PyTorch is older than 2.9.
    """

def plain_views(
    framework: str, tensors: list[Any], makes: bool
) -> tuple[list[tuple[int, tuple[int, ...], int, int]], list[Any]] | None:
    """The tensors of a group, as ``Engine.submit`` gets them; and with ``makes`` the new results.

    Else they are claimed, and results take their places. ``framework``: "numpy" or "torch". None:
    one is no plain block of host memory, or wants a gradient.
    """

def plain_gradients(
    parameters: list[Any], indices: list[int]
) -> tuple[list[tuple[int, tuple[int, ...], int, int]], list[Any]] | None:
    """The gradients of the parameters at ``indices``, as ``Engine.submit`` gets them; and as Items.

    Results take the gradients' place (kolovod/torch/buckets.py has Item). None: a gradient is
    missing or is no plain block in host memory, or PyTorch is older than 2.9.
    """

def first_changed(parameters: list[Any], items: list[Any]) -> int | None:
    """The place of the first Item whose parameter has another gradient by now, or a changed one."""

def which_not_finite(
    tensors: Sequence[tuple[int, tuple[int, ...], int, int]],
    beginning: int,
    begin: int,
    due: tuple[int, int],
) -> tuple[list[int], int]:
    """The places of those that hold inf or nan, in host memory, and the bytes of all ``tensors``.

    ``tensors``: as the engine gets them. Of one that begins within ``due``, in bytes counted from
    ``begin``, all elements are looked at, of others the first ``beginning``.
    """

def use_call_lines(kind_of: Callable[[str], int] | None) -> None:
    """Unnamed operations carry the script's lines; None: none.

    ``kind_of(file)``: 0 for a library's, which are left out, 1 for the script's, 2 where lines end.
    """

def use_keeper(keep: Callable[[Engine, int, object], None]) -> None:
    """Have ``keep(engine, handle, buffers)`` called where ``Engine.run`` fails after submission."""

def calls_under_way() -> int:
    """Return how many threads are in a call of an engine that may take long."""

def forget_calls() -> None:
    """Count anew, in a forked child: it has none of the other threads."""

def use_handles(
    spans: object,
    failed: Callable[[EngineError], NoReturn],
    refused: Callable[[object], NoReturn],
) -> None:
    """Have handles tell ``spans.waited(start_ns)`` of waits where ``spans.on`` is set.

    ``failed``: raises the public error for an EngineError. ``refused``: raises for a time limit
    that is none, and, given None, for a second wait.
    """

class Handle:
    """An operation's number and what refers to its buffers (csrc/bind/handle.h)."""

    def __new__(
        cls, engine: Engine, number: int, buffers: object, result: object, finish: object, /
    ) -> Handle: ...
    def poll(self) -> bool:
        """See ``kolovod.Handle``."""

    def wait(self, timeout_s: float | None = None) -> Any:
        """See ``kolovod.Handle``."""

class HeldStorage:
    """Keeps PyTorch's ``storage``, which is at address ``at``, from being resized while it lives.

    ``mark``: how many bytes behind ``at`` PyTorch says whether it may be; -1: not known.
    """

    def __init__(self, storage: object, at: int, mark: int) -> None: ...
    @staticmethod
    def is_in_use(at: int) -> bool:
        """True if one lives for the storage at this address."""

class ShortVerb:
    """A verb as one call, for one plain tensor and all ranks (csrc/bind/short_verb.h).

    ``verb``: its number. ``form``: 0 without a tensor, 1 into a new one, 2 in place, 3 and 4: the
    same two, and a handle is returned at once, 5: into a new one of another number of rows, 6: the
    same, and a list of the rows of each rank.
    ``parameters``: the names of those that it has.
    ``refers_to``: the verb for all other cases, which gets the same arguments; what returns the
    world; what raises the public error for an EngineError; a container of buffers that are to be
    let go of first, by the verb for all cases; the log of spans; the class of handles;
    ``Frontend.from_bytes``; where tensors may be given other memory, ``Holder.hold`` and what
    raises if one was (of tensor, address, name), else None twice.
    ``is_torch``: the tensors are PyTorch's, else NumPy's.
    """

    def __new__(
        cls,
        verb: int,
        form: int,
        parameters: tuple[str, ...],
        refers_to: tuple[object, ...],
        is_torch: bool,
        /,
    ) -> ShortVerb: ...
    def __call__(self, *args: object, **keywords: object) -> Any: ...

def use_numpy(
    ndarray: type,
    dtypes: dict[Any, int],
    empty: Callable[..., Any],
    samples: list[tuple[Any, int, tuple[int, ...], int, bool, bool]],
) -> bool:
    """Have short verbs read arrays of class ``ndarray``, and make results by ``empty``.

    ``dtypes``: the numbers of those that they take. ``samples``: arrays, and for each the number of
    its dtype, its shape and address, and whether it may be an input and an output. Returns False,
    and no array is taken, if one does not lie in memory as the samples say.
    """

def use_torch(
    types: tuple[type, ...],
    exchange: object,
    empty_like: Callable[..., Any],
    claim: Callable[[Any], None],
    samples: list[tuple[Any, int, tuple[int, ...], int, bool, bool]],
) -> bool:
    """Have short verbs read tensors of exactly these ``types``, as ``use_numpy`` does arrays.

    ``exchange``: PyTorch's table of functions for DLPack. ``claim``: is called with a tensor before
    the engine writes it.
    """

def watch_long_waits(hook: Callable[[Engine, int, bool], None] | None) -> None:
    """Call ``hook(engine, handle, True)`` on a thread that waits, every 100 ms once it is long.

    And ``hook(engine, handle, False)`` before it goes on. Not for waits in signal handlers.
    """

def config_defaults() -> dict[str, int]:
    """Every field of the C++ Config with its default; config.py must name each exactly once."""

def publish(process_set: int, engine: Engine | None) -> None:
    """What ``kolovod_current(process_set)`` gives to ops inside graphs; 0 is the world."""

def register_tensorflow_ops() -> str:
    """Make the op KolovodAllreduce known to the TensorFlow in this process; "" or what is wrong."""

def xla_collective_handler(major: int, minor: int) -> int:
    """The address of the handler of allreduce for this version of XLA's FFI; 0: not known."""

def on_unlike_in_programs(tell: Callable[[str, bytes, int, int], None]) -> None:
    """Have ``tell(about, table, columns, rank)`` called where a program finds that ranks differ.

    ``table``: int32, a row for each rank, whose first number is 0 where a rank has joined. What it
    raises is the program's error.
    """

PROTOCOL: int
RELEASE: str
ON_DEVICE: int
DEVICE_SHIFT: int
CODEC_SHIFT: int
"""Ranks with another one do not understand each other (csrc/base/version.h)."""
VERBS: dict[str, int]
DTYPES: dict[str, int]
FURTHER_DTYPES: dict[str, int]
"""Dtypes of front ends that the engine sees as others: complex64 as pairs of float32, for example.

They can be sent; complex ones also be combined by Sum and Average, unsigned ones by Sum and Product
without factors.
"""
VERB_TRAITS: dict[str, VerbTraits]
"""By name: the table of verbs (csrc/base/verb_traits.h)."""
DTYPE_TRAITS: dict[str, DTypeTraits]
"""By name: the table of dtypes (csrc/base/dtype_traits.h)."""
OPS: dict[str, int]
CODECS: dict[str, int]
CODEC_BYTES: dict[str, int]
MOST_STRIPES: int
"""Connections for data between two ranks, at most."""
"""By name: what 256 elements take between hosts, encoded (csrc/collectives/codec.h)."""
STATUS: dict[str, int]
