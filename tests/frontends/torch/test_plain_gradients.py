"""What a step asks of all its gradients in one call: which it takes, and what it says of them.

Where it does not, a training is the same by the loops of Python that stand behind it.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch_loopback import run

import kolovod.torch  # noqa: F401 - has the engine read tensors
from kolovod import _native
from kolovod.torch import DistributedOptimizer
from kolovod.torch.parameters import Parameters
from kolovod.torch.sentinel import Sentinel

has_table = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="this PyTorch does not tell where its tensors lie",
)
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def parameter(grad, dtype=torch.float32):
    made = torch.nn.Parameter(torch.zeros(3, 4, dtype=dtype))
    made.grad = grad
    return made


def strided(how):
    """A gradient of shape (3, 4) that is no plain block of memory."""
    if how == "transposed":
        return torch.randn(4, 3).T
    if how == "a part of rows":
        return torch.randn(3, 8)[:, :4]
    if how == "expanded":
        return torch.randn(1, 4).expand(3, 4)
    if how == "negative":
        return torch.randn(3, 4, dtype=torch.complex64).conj().imag.contiguous()
    if how == "sparse":
        return torch.eye(3, 4).to_sparse()
    assert how == "a subclass"
    return torch.randn(3, 4).as_subclass(type("Mine", (torch.Tensor,), {}))


@has_table
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_gradient_is_described_as_the_engine_gets_it(dtype):
    parameters = [parameter(torch.randn(3, 4).to(dtype), dtype) for _ in range(3)]
    parameters[2].grad.add_(1)
    entries, items = _native.plain_gradients(parameters, [2, 0])
    of = [parameters[2].grad, parameters[0].grad]
    code = _native.DTYPES[str(dtype).removeprefix("torch.")]
    assert entries == [(code, (3, 4), grad.data_ptr(), grad.data_ptr()) for grad in of]
    assert [(index, version, none) for index, _, version, _, none in items] == [
        (2, 1, None),
        (0, 0, None),
    ]
    assert all(item[1] is item[3] is grad for item, grad in zip(items, of, strict=True))


@has_table
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 5, 1)])
def test_shapes_with_nothing_or_one_in_them(shape):
    one = torch.nn.Parameter(torch.zeros(shape))
    one.grad = torch.ones(shape)
    entries, _ = _native.plain_gradients([one], [0])
    assert entries[0][1] == shape


@has_table
@pytest.mark.parametrize(
    "how", ["transposed", "a part of rows", "expanded", "negative", "sparse", "a subclass", None]
)
def test_what_is_no_plain_block_is_left_to_a_closer_look(how):
    grad = None if how is None else strided(how)
    if how == "negative":  # contiguous() of it makes it plain
        whole = torch.zeros(12, dtype=torch.complex64).conj().imag
        grad = torch.as_strided(whole, (3, 4), (8, 2))
        assert grad.is_neg()
    parameters = [parameter(torch.randn(3, 4)), parameter(grad)]
    assert _native.plain_gradients(parameters, [0, 1]) is None
    assert _native.plain_gradients(parameters, [0]) is not None


@has_table
def test_a_group_is_claimed_as_a_whole_or_not_at_all():
    plain, wants = torch.ones(3), torch.ones(3, requires_grad=True)
    entries, made = _native.plain_views("torch", [plain, plain[1:]], True)
    code = _native.DTYPES["float32"]
    assert [each[:3] for each in entries] == [
        (code, (3,), plain.data_ptr()),
        (code, (2,), plain.data_ptr() + 4),
    ]
    assert [each[3] for each in entries] == [new.data_ptr() for new in made]
    assert [new.shape for new in made] == [(3,), (2,)]
    assert plain._version == 0
    assert _native.plain_views("torch", [plain, wants], True) is None
    assert _native.plain_views("torch", [plain, torch.ones(2, 3).T], False) is None
    assert plain._version == 0
    entries, made = _native.plain_views("torch", [plain, wants], False)
    assert [each[2] for each in entries] == [each[3] for each in entries]
    assert made == []
    assert (plain._version, wants._version) == (1, 1)


def test_an_index_that_no_parameter_has_is_an_error():
    with pytest.raises(IndexError):
        _native.plain_gradients([parameter(torch.randn(3, 4))], [1])


def test_what_asking_for_a_gradient_raises_is_raised():
    class Refuses(torch.nn.Parameter):
        @property
        def grad(self):
            raise RuntimeError("not now")

    one = Refuses(torch.zeros(2))
    with pytest.raises(RuntimeError, match="not now"):
        _native.plain_gradients([one], [0])
    with pytest.raises(RuntimeError, match="not now"):
        _native.first_changed([one], [(0, None, 0, None, None)])


def items_of(parameters):
    grads = [each.grad for each in parameters]
    return [
        (index, grad, 0 if grad is None else grad._version, grad, None)
        for index, grad in enumerate(grads)
    ]


@pytest.mark.parametrize("change", ["none", "written", "replaced", "taken", "given"])
def test_a_change_is_found(change):
    parameters = [parameter(torch.randn(3, 4)) for _ in range(4)]
    parameters[1].grad = None
    items = items_of(parameters)
    if change == "written":
        parameters[2].grad.mul_(2)
    elif change == "replaced":
        parameters[2].grad = parameters[2].grad.clone()
    elif change == "taken":
        parameters[2].grad = None
    elif change == "given":
        parameters[1].grad = torch.zeros(3, 4)
    place = {"none": None, "given": 1}.get(change, 2)
    assert _native.first_changed(parameters, items) == place


def hash_of(tensors, begin, end):
    """The hash by Python's loop: of each tensor's part, with the hash so far as the seed."""
    state = at = 0
    for tensor in tensors:
        first, last = max(begin, at), min(end, at + tensor.nbytes)
        if first < last:
            state = _native.hash_memory(tensor.data_ptr() + first - at, last - first, state)
        at += tensor.nbytes
    return state


@has_table
def test_tensors_are_hashed_as_if_one_followed_the_other():
    draw = np.random.default_rng(3)
    tensors = [torch.randn(int(n)).to(FLOATS[n % 4]) for n in draw.integers(0, 40, 12)]
    total = sum(tensor.nbytes for tensor in tensors)
    for begin, end in [(0, total), (0, 0), (3, 3), (total, total + 9), (0, 1 << 62)]:
        assert _native.hash_tensors(tensors, begin, end) == hash_of(tensors, begin, end)
    for _ in range(50):
        begin, end = sorted(int(n) for n in draw.integers(0, total + 20, 2))
        assert _native.hash_tensors(tensors, begin, end) == hash_of(tensors, begin, end)
    tensors[5] = tensors[5].double().requires_grad_()
    assert _native.hash_tensors(tensors, 0, total) == hash_of(tensors, 0, total)
    tensors[7] = torch.randn(4, 3).T
    assert _native.hash_tensors(tensors, 0, 1 << 62) is None


@has_table
def test_the_sentinel_says_the_same_hash_by_either_way(monkeypatch):
    """Ranks may have other versions of PyTorch, or parameters of a class of their own."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 3))
    parameters = Parameters()
    parameters.add(model.named_parameters())
    parameters.thaw()
    watch = Sentinel(torch.optim.SGD(model.parameters(), lr=0.1), parameters)
    quick = watch._hash_of_weights()
    monkeypatch.setattr(_native, "hash_tensors", lambda *given: None)
    assert watch._hash_of_weights() == quick
    assert len(quick) == 8


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("idle", ["nobody", "one rank", "all"])
def test_a_training_is_the_same_by_either_way(monkeypatch, idle, passes):
    """``idle``: who makes no gradient of one of the parameters in some steps."""
    seen = []

    def spied(parameters, indices):
        seen.append(plain(parameters, indices))
        return seen[-1]

    plain = _native.plain_gradients
    monkeypatch.setattr(_native, "plain_gradients", spied)
    quick = weights_after(idle, passes)
    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        assert any(each is not None for each in seen)
        assert any(each is None for each in seen) == (idle != "nobody")
    monkeypatch.setattr(_native, "plain_gradients", lambda *given: None)
    assert all(map(torch.equal, quick, weights_after(idle, passes)))


def weights_after(idle, passes):
    torch.manual_seed(5)
    models = torch.nn.ModuleList([torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)])

    def work(kv, rank):
        model = copy.deepcopy(models)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            named_parameters=model.named_parameters(),
            backward_passes_per_step=passes,
            collectives=kv,
        )
        draw = torch.Generator().manual_seed(rank)
        for step in range(4):
            optimizer.zero_grad()
            for _ in range(passes):
                inputs = torch.randn(2, 4, generator=draw)
                loss = model[0](inputs).square().mean()
                is_idle = step % 2 == 1 and idle != "nobody" and (idle == "all" or rank == 0)
                if not is_idle:
                    loss = loss + model[1](inputs).abs().mean()
                loss.backward()
            optimizer.step()
        return [each.detach().clone() for each in model.parameters()]

    first, second = run(2, work)
    assert all(map(torch.equal, first, second))
    return first
