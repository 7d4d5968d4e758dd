"""What is particular to PyTorch's tensors; the verbs themselves are in test_conformance.py."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks as run_ranks  # noqa: E402
from torch_loopback import run  # noqa: E402

import kolovod.torch as kvt  # noqa: E402
from kolovod.core.objects import Objects  # noqa: E402
from kolovod.core.ops import Sum  # noqa: E402
from kolovod.errors import InvalidArgumentError, MismatchError  # noqa: E402
from kolovod.testing.loopback import loopback  # noqa: E402
from kolovod.torch import Compression, TorchCollectives, TorchFrontend  # noqa: E402
from kolovod.torch.functions import Functions  # noqa: E402
from kolovod.torch.parameters import Parameters  # noqa: E402

# verbs --------------------------------------------------------------------------------------------


def test_memory_that_is_not_dense_row_by_row():
    base = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    tensors = [
        lambda: base.clone().contiguous(memory_format=torch.channels_last),
        lambda: base.clone().transpose(1, 3),
        lambda: base.clone()[:, 1:, ::2],
        lambda: base[:1, :1, :1, :1].expand(1, 1, 6, 1),
    ]

    def work(kv, rank):
        for make in tensors:
            tensor = make() * (rank + 1)
            assert torch.equal(kv.allreduce(tensor, op=Sum), make() * 3)
            assert torch.equal(kv.allreduce_async(tensor, op=Sum).wait(), make() * 3)
            strides = tensor.stride()
            assert kv.allreduce_(tensor, op=Sum) is tensor
            assert torch.equal(tensor, make() * 3)
            assert tensor.stride() == strides
            assert kv.broadcast_(tensor.mul_(rank + 1), 1) is tensor
            assert torch.equal(tensor, make() * 6)

    run(2, work)


def test_the_imaginary_part_of_a_conjugate_is_negated():
    def work(kv, rank):
        tensor = torch.tensor([1 + 2j]).conj().imag
        assert tensor.is_neg()
        assert kv.allreduce(tensor, op=Sum).tolist() == [-4.0]
        kv.allreduce_(tensor, op=Sum)
        assert tensor.tolist() == [-4.0]

    run(2, work)


def test_parameters_work_in_place_and_results_carry_no_history():
    def work(kv, rank):
        parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
        assert kv.broadcast_(parameter, 1) is parameter
        assert parameter.tolist() == [1, 1, 1]
        assert parameter.requires_grad
        assert not kv.allreduce_async(parameter).wait().requires_grad
        with torch.no_grad():
            assert not kv.allreduce(parameter).requires_grad

    run(2, work)


def test_backward_notices_that_a_saved_tensor_was_changed_in_place():
    def work(kv, rank):
        x = torch.ones(3, requires_grad=True)
        saved = x * 2
        y = (saved * saved).sum()
        kv.allreduce_(saved.detach(), op=Sum)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()

    run(2, work)


def test_inference_tensors():
    def work(kv, rank):
        with torch.inference_mode():
            tensor = torch.ones(2)
            kv.allreduce_(tensor, op=Sum)
            return kv.allreduce(tensor, op=Sum).tolist()

    assert run(2, work) == [[4, 4], [4, 4]]


BAD = {
    "an array": (lambda: np.ones(2), "not ndarray"),
    "bits": (lambda: torch.empty(2, dtype=torch.bits8), "bits8 is not supported"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "to_dense"),
    "meta": (lambda: torch.ones(2, device="meta"), "on meta.*host memory"),
}


@pytest.mark.parametrize("label", BAD)
def test_tensors_that_the_engine_cannot_take(label):
    make, text = BAD[label]
    with loopback(1, TorchFrontend()) as world:
        kv = TorchCollectives(TorchFrontend(), world.collectives[0].world)
        for verb in (kv.allreduce, kv.allreduce_, kv.broadcast, kv.allgather, kv.allreduce_async):
            with pytest.raises(InvalidArgumentError, match=text):
                verb(make())
        assert kv.allreduce(torch.ones(2)).tolist() == [1, 1]


# starting equal -----------------------------------------------------------------------------------


def small_net(seed):
    generator = torch.Generator().manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    with torch.no_grad():
        for value in net.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.rand(value.shape, generator=generator))
            else:
                value.fill_(seed)
    return net


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_parameters(root):
    def work(kv, rank):
        functions = Functions(kv)
        for params_of in (
            lambda net: net.state_dict(),
            lambda net: list(net.state_dict().items()),
            lambda net: net.named_parameters(),
        ):
            net, wanted = small_net(rank), small_net(root)
            functions.broadcast_parameters(params_of(net), root)
            pairs = zip(dict(params_of(net)).items(), dict(params_of(wanted)).values(), strict=True)
            for (name, got), value in pairs:
                assert torch.equal(got, value), name

    run(3, work)


def test_broadcast_parameters_of_different_models_fails_on_every_rank():
    def work(kv, rank):
        net = small_net(0)
        state = dict(net.state_dict())
        if rank == 1:
            state["2.extra"] = torch.ones(1)
        with pytest.raises(MismatchError, match=r"rank 1 has '2.extra'"):
            Functions(kv).broadcast_parameters(state)
        state["0.weight"] = torch.ones(5 + rank)
        state.pop("2.extra", None)
        with pytest.raises(MismatchError, match=r"'0.weight' \(\(5,\).*'0.weight' \(\(6,\)"):
            Functions(kv).broadcast_parameters(state)
        Functions(kv).broadcast_parameters(net.state_dict())

    run(2, work)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (3, "params is a int"),
        ([torch.ones(1)], "a Tensor instead of"),
        ({"a": 1}, r"params\['a'\]"),
    ],
)
def test_broadcast_parameters_of_something_else(params, text):
    with loopback(1, TorchFrontend()) as world:
        functions = Functions(TorchCollectives(TorchFrontend(), world.collectives[0].world))
        with pytest.raises(InvalidArgumentError, match=text):
            functions.broadcast_parameters(params)


OPTIMIZERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=lr),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr, betas=(lr, 0.99), amsgrad=True),
    "tensor lr": lambda p, lr: torch.optim.Adam(p, lr=torch.tensor(lr), capturable=False),
    "lbfgs": lambda p, lr: torch.optim.LBFGS(p, lr=lr),
    "adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr),
}


def train(net, optimizer, steps):
    inputs = torch.linspace(-1, 1, 15).reshape(5, 3)

    def closure():
        optimizer.zero_grad()
        loss = net(inputs).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def same(a, b):
    """Whether two states are equal, tensors bitwise."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_broadcast_optimizer_state(kind, steps):
    def work(kv, rank):
        net = small_net(7)
        optimizer = OPTIMIZERS[kind](net.parameters(), 0.25 * (rank + 1))
        train(net, optimizer, steps if rank == 1 else 2 * (rank == 2))
        parameters = copy.deepcopy(net.state_dict())
        grads = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        before = copy.deepcopy(optimizer.state_dict())
        Functions(kv).broadcast_optimizer_state(optimizer, root_rank=1)
        assert same(dict(parameters), dict(net.state_dict()))  # no step was taken
        assert same(grads, [p.grad for p in net.parameters()])
        return before, optimizer.state_dict()

    states = run(3, work)
    wanted = states[1][0]
    for _, after in states:
        assert same(after, wanted)


def test_broadcast_optimizer_state_of_different_models_fails_on_every_rank():
    def work(kv, rank):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2 + rank))], lr=1.0)
        with pytest.raises(MismatchError, match=re.escape("((3,),)")):
            Functions(kv).broadcast_optimizer_state(optimizer)

    run(2, work)


def test_broadcast_object_with_tensors():
    def work(kv, rank):
        got = Objects(kv.world).broadcast_object({"t": torch.full((2,), rank)}, 1)
        assert got["t"].tolist() == [1, 1]
        assert [int(t) for t in Objects(kv.world).allgather_object(torch.tensor(rank))] == [0, 1]

    run(2, work)


# compression --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compression", "narrow"),
    [(Compression.fp16, torch.float16), (Compression.bf16, torch.bfloat16)],
)
def test_compression(compression, narrow):
    for dtype in (torch.float32, torch.float64):
        values = torch.tensor([1.0, 1 / 3, -1000.0], dtype=dtype)
        sent, context = compression.compress(values)
        assert sent.dtype is narrow
        back = compression.decompress(sent, context)
        assert back.dtype is dtype
        assert torch.equal(back, values.to(narrow).to(dtype))
    for dtype in (torch.int32, torch.float16, torch.bfloat16):
        values = torch.ones(2, dtype=dtype)
        sent, context = compression.compress(values)
        assert sent is values
        assert compression.decompress(sent, context) is values


def test_no_compression():
    values = torch.ones(2)
    assert Compression.none.compress(values) == (values, None)
    assert Compression.none.decompress(values, None) is values


# the process's own world --------------------------------------------------------------------------


def test_every_exported_name_exists():
    for name in kvt.__all__:
        assert getattr(kvt, name) is not None


def on_a_real_rank(rank):
    kvt.init()
    assert kvt.allreduce(torch.full((2,), float(rank))).tolist() == [0.5, 0.5]
    net = small_net(rank)
    kvt.broadcast_parameters(net.state_dict())
    assert same(dict(net.state_dict()), dict(small_net(0).state_dict()))
    assert kvt.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    x = torch.ones(2, requires_grad=True)
    kvt.allreduce(x, op=Sum).sum().backward()
    kvt.shutdown()
    return x.grad.tolist()


def test_real_processes():
    assert run_ranks(2, on_a_real_rank) == [[2, 2], [2, 2]]


@pytest.mark.parametrize(
    "call",
    [
        lambda kv, x: torch.vmap(lambda each: kv.allreduce(each))(x),
        lambda kv, x: torch.vmap(lambda each: kv.allreduce_async(each).wait())(x),
        lambda kv, x: torch.func.grad(lambda each: kv.allreduce(each).sum())(x),
        lambda kv, x: torch.func.jvp(lambda each: kv.allgather(each), (x,), (x,)),
    ],
    ids=["vmap", "vmap async", "grad", "jvp"],
)
def test_within_transforms_of_torch_func_one_error_says_where_to_call_it(call):
    with loopback(1, TorchFrontend()) as world:
        kv = TorchCollectives(TorchFrontend(), world.collectives[0].world)
        with pytest.raises(InvalidArgumentError, match="call it outside, on the whole batch"):
            call(kv, torch.ones(2, 3))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_with_what_to_give_instead(layout):
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
    refused = pytest.raises(
        InvalidArgumentError, match=r"is nested .* 2 parts .*tensor\.unbind\(\)"
    )
    with loopback(1, TorchFrontend()) as world:
        kv = TorchCollectives(TorchFrontend(), world.collectives[0].world)
        for call in (kv.allreduce, kv.allreduce_, kv.allgather, kv.alltoall, kv.reducescatter):
            with refused:
                call(nested)
        with refused:
            kv.broadcast(nested, 0)
        with refused:
            kv.grouped_allreduce([torch.ones(2), nested])
        with refused:
            Functions(kv).broadcast_parameters({"sequences": nested})
        padded = torch.nested.to_padded_tensor(nested, 0.0)
        assert kv.allreduce(padded).equal(padded)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_parameter_is_refused_by_its_name():
    table = torch.nn.Parameter(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]))
    with pytest.raises(InvalidArgumentError, match="the parameter 'table' is nested"):
        Parameters().add([("table", table)])


def test_only_who_gives_a_sparse_tensor_is_told_of_embeddings():
    with loopback(1, TorchFrontend()) as world:
        kv = TorchCollectives(TorchFrontend(), world.collectives[0].world)
        with pytest.raises(InvalidArgumentError, match="embedding makes sparse gradients only"):
            kv.reducescatter(torch.eye(3).to_sparse())
        for other in (torch.eye(3).to_sparse_csr(), torch.eye(3).to_mkldnn()):
            with pytest.raises(InvalidArgumentError, match=r"(?m)use \.to_dense\(\)$"):
                kv.allreduce(other)


@pytest.mark.parametrize("wrong", [3.0, None])
def test_what_is_no_tensor_among_those_that_want_gradients(wrong):
    with loopback(1, TorchFrontend()) as world:
        kv = TorchCollectives(TorchFrontend(), world.collectives[0].world)
        with pytest.raises(InvalidArgumentError, match=r"need a torch\.Tensor, not"):
            kv.grouped_allreduce([torch.ones(2, requires_grad=True), wrong])
