"""PyTorch's verbs that are one function of the engine's module: which tensors they take.

tests/core/test_short_verbs.py has what does not depend on the framework.
"""

from __future__ import annotations

import inspect
import sys
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from waiting import until

import kolovod.torch
from kolovod import _native
from kolovod.core.collectives import Collectives
from kolovod.core.handles import Handle, held_buffers
from kolovod.core.ops import Sum
from kolovod.core.short_verbs import ShortVerbs
from kolovod.errors import InvalidArgumentError
from kolovod.testing.loopback import loopback
from kolovod.torch import frontend as torch_frontend
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.frontend import DTYPES, TorchFrontend, let_engine_read

OF_ROWS = "allgather", "alltoall", "reducescatter"
STARTED = "allreduce_async_", "broadcast_async_"
NEW = "allreduce", "broadcast", "allreduce_async", "broadcast_async", *OF_ROWS
IN_PLACE = "allreduce_", "broadcast_", *STARTED
SHORT = [*NEW, *IN_PLACE]
KNOWN = [dtype for dtype, code in DTYPES.items() if code in _native.DTYPES.values()]

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="this PyTorch does not tell where its tensors lie",
)


class Whole(Exception):
    """The verb for all cases was called."""


def done(result):
    if isinstance(result, tuple):  # with the rows of each rank
        return result[0]
    return result.wait() if isinstance(result, Handle) else result


@pytest.fixture
def alone():
    """The short verbs of a world of one rank, and nothing behind them."""
    held_buffers.sweep()
    with loopback(1) as world:
        collectives = TorchCollectives(TorchFrontend(), world.collectives[0].world)
        for name in [*SHORT, "barrier"]:
            setattr(collectives, name, refusing(getattr(collectives, name)))
        yield ShortVerbs(collectives, __name__)


def refusing(verb):
    def whole(*args, **keywords):
        raise Whole(args, keywords)

    whole.__signature__ = inspect.signature(verb)
    return whole


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("dtype", KNOWN, ids=str)
def test_plain_tensors_of_all_dtypes_go_the_short_way(alone, name, dtype):
    for shape in [(), (0,), (3,), (2, 3), (2, 0, 3), (1, 3, 1), (600, 2), (9000, 3)]:
        if name in OF_ROWS and (0 in shape[1:] or not shape):
            continue
        tensor = torch.ones(shape, dtype=dtype)
        extra = {"op": Sum} if "reduce" in name else {}
        result = done(getattr(alone, name)(tensor, **extra))
        assert (result is tensor) == name.endswith("_")
        assert (result.shape, result.dtype) == (tensor.shape, dtype)
        assert not result.requires_grad
        assert torch.equal(result, torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("name", IN_PLACE)
def test_autograd_knows_of_what_was_written(alone, name):
    tensor = torch.ones(3)
    weight = torch.ones(3, requires_grad=True)
    product = tensor * weight
    done(getattr(alone, name)(tensor))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    for each in (weight, torch.nn.Parameter(torch.ones(3))):
        before = each._version
        assert done(getattr(alone, name)(each)) is each
        assert each._version > before


@pytest.mark.parametrize("name", NEW)
def test_what_wants_a_gradient_is_for_the_whole_verb(alone, name):
    for tensor in [torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(3))]:
        with pytest.raises(Whole):
            getattr(alone, name)(tensor)
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    result = done(getattr(alone, name)(frozen))
    assert type(result) is torch.Tensor
    assert not result.requires_grad


class Kind(torch.Tensor):
    """A kind of tensor."""


def without_memory():
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


OTHERS = {
    "columns first": lambda: torch.ones(2, 3).T,
    "with gaps": lambda: torch.ones(9)[::2],
    "expanded": lambda: torch.ones(1).expand(3),
    "negated": lambda: torch.ones(3, dtype=torch.complex64).conj().imag.contiguous()._neg_view(),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "channels last": lambda: torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "meta": lambda: torch.ones(3, device="meta"),
    "zeros": lambda: torch._efficientzerotensor(3),
    "without memory": without_memory,
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(3)),
    "subclass": lambda: torch.ones(3).as_subclass(Kind),
    "number": lambda: 3,
    "nothing": lambda: None,
    "NumPy's": lambda: torch.ones(3).numpy(),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", SHORT)
def test_other_tensors_are_for_the_whole_verb(alone, name, kind):
    tensor = OTHERS[kind]()
    with pytest.raises(Whole) as caught:
        getattr(alone, name)(tensor, name="n")
    args, keywords = caught.value.args
    assert args[0] is tensor
    assert keywords == {"name": "n"}


def test_those_of_a_transform_are_for_the_whole_verb(alone):
    for name in SHORT:
        verb = getattr(alone, name)
        for transform in (torch.vmap, torch.func.grad):
            with pytest.raises(Whole):
                transform(lambda tensor, verb=verb: verb(tensor).sum())(torch.ones(3))


def test_under_a_mode_that_makes_other_tensors_it_is_for_the_whole_verb(alone):
    tensor = torch.ones(3)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(Whole):
        alone.allreduce(tensor)


def test_what_is_raised_under_a_mode_is_heard(alone):
    class Raising(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            raise KeyboardInterrupt

    tensor = torch.ones(3)
    for name in SHORT:
        with Raising(), pytest.raises(KeyboardInterrupt):
            getattr(alone, name)(tensor)


def test_in_inference_mode(alone):
    with torch.inference_mode():
        tensor = torch.ones(3)
        assert alone.allreduce_(tensor) is tensor
        assert alone.allreduce(tensor).is_inference()
    assert alone.broadcast_(tensor) is tensor


def test_a_tensor_that_shares_its_memory_until_it_is_written_gets_its_own(alone):
    tensor = torch.ones(3)
    copy = torch._lazy_clone(tensor)
    alone.allreduce_(copy, op=Sum, prescale_factor=7.0)
    assert tensor.tolist() == [1, 1, 1]
    assert copy.tolist() == [7, 7, 7]


@pytest.mark.parametrize("name", ["allreduce_async", "broadcast_async", *STARTED])
def test_memory_stays_until_the_operation_is_over(alone, name):
    for later in ("wait", "drop"):
        tensor = torch.ones(3)
        storage = tensor.untyped_storage()
        handle = getattr(alone, name)(tensor)
        assert not storage.resizable()
        with pytest.raises(InvalidArgumentError, match="moved to shared memory"):
            tensor.share_memory_()
        second = getattr(alone, name)(tensor)
        done(second)
        del second
        assert not storage.resizable()
        if later == "wait":
            done(handle)
        del handle
        until(lambda kept=storage: held_buffers.sweep() or kept.resizable())
        tensor.share_memory_()


@pytest.mark.parametrize("named", [None, "mine"])
@pytest.mark.parametrize("name", STARTED)
def test_a_tensor_with_other_memory_is_told_as_by_the_whole_verb(name, named):
    with loopback(1, TorchFrontend()) as world:
        whole = TorchCollectives(TorchFrontend(), world.collectives[0].world)
        said = []
        for verbs in (whole, ShortVerbs(whole, __name__)):
            tensor = torch.ones(3)
            handle = getattr(verbs, name)(tensor, name=named)
            tensor.data = torch.zeros(3)
            with pytest.raises(InvalidArgumentError, match="other memory") as caught:
                handle.wait()
            said.append(str(caught.value))
            same = torch.ones(3)
            handle = getattr(verbs, name)(same, name=named)
            same.resize_(1, 3)  # another shape of the same memory
            assert handle.wait() is same
            empty = torch.ones(0)
            handle = getattr(verbs, name)(empty, name=named)
            empty.data = torch.ones(0)
            assert handle.wait() is empty
        assert said[0] == said[1]
        assert isinstance(getattr(verbs, name), _native.ShortVerb)


def test_nothing_refers_to_a_tensor_when_its_operation_is_over(alone):
    for name in STARTED:
        tensor = torch.ones(3)
        before = sys.getrefcount(tensor), sys.getrefcount(tensor.untyped_storage())
        for _ in range(5):
            assert getattr(alone, name)(tensor, name="a name").wait() is tensor
        assert (sys.getrefcount(tensor), sys.getrefcount(tensor.untyped_storage())) == before
        gone = weakref.ref(tensor)
        handle = getattr(alone, name)(tensor)
        del tensor, handle
        until(lambda gone=gone: held_buffers.sweep() or gone() is None)


def test_an_error_of_the_engine_is_the_public_one(alone):
    with pytest.raises(InvalidArgumentError, match="root rank 5 is not in"):
        alone.broadcast(torch.ones(3), 5)


def test_groups_and_rows_that_come_later_use_the_verb_for_all_cases():
    for name in ("allgather_async", "alltoall_async", "grouped_allreduce"):
        assert inspect.ismethod(getattr(kolovod.torch, name))
    for name in [*SHORT, "barrier"]:
        assert isinstance(getattr(kolovod.torch, name), _native.ShortVerb)
        assert getattr(kolovod.torch, name).__doc__ == getattr(Collectives, name).__doc__


def test_without_pytorchs_table_all_goes_the_whole_way(alone, monkeypatch):
    tensor = torch.ones(3)
    try:
        samples = [(tensor, DTYPES[torch.float64], (3,), tensor.data_ptr(), True, True)]
        take = (torch.empty_like, TorchFrontend().claim, samples)
        exchange = torch.Tensor.__dlpack_c_exchange_api__
        for table in (exchange, object()):
            assert not _native.use_torch((torch.Tensor,), table, *take)
            with pytest.raises(Whole):
                alone.allreduce(tensor)
    finally:
        assert let_engine_read()
    assert alone.allreduce(tensor).tolist() == [1, 1, 1]
    monkeypatch.setattr(torch_frontend.torch, "Tensor", object)
    assert not let_engine_read()
