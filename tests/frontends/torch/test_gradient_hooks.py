"""Communication hooks of an optimizer, PyTorch's and ours, and PowerSGD against one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import run_torch_ranks
from optimizing import Net, inputs, wrapped
from test_growing import growing
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch_loopback import run

import kolovod.torch as kv
from kolovod.errors import InvalidArgumentError

STEPS = 5
SHAPES = {"wide": (12, 30), "bias": (30,), "deep": (6, 4, 5), "thin": (40, 2)}


def gradient(name, step, rank, dtype=torch.float64):
    drawn = torch.Generator().manual_seed(1000 * step + 10 * rank + len(name))
    return torch.randn(SHAPES[name], generator=drawn, dtype=torch.float64).to(dtype)


class Model(torch.nn.Module):
    """Parameters whose gradients are what is asked for."""

    def __init__(self, dtypes=None):
        super().__init__()
        for name, shape in SHAPES.items():
            dtype = (dtypes or {}).get(name, torch.float64)
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def backward(self, step, rank, names=tuple(SHAPES), factor=1.0):
        """In the order of ``names``, from the last to the first."""
        losses = []
        for name in names:
            parameter = getattr(self, name)
            wanted = factor * gradient(name, step, rank, parameter.dtype)
            losses.append((parameter * wanted).sum().double())
        torch.stack(losses).sum().backward()


def averaging(state, bucket):
    state.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
    assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
    return bucket.average(bucket.buffer())


@pytest.mark.parametrize("groups", [None, 3])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_hook_that_averages(passes, groups):
    """As without one, with two dtypes, and a gradient that one rank lacks."""
    dtypes = {"deep": torch.float32}

    def work(verbs, rank):
        found = []
        calls: list[Any] = []
        for has_hook in (False, True):
            model = Model(dtypes)
            optimizer = wrapped(
                model, verbs, lr=0.1, backward_passes_per_step=passes, groups=groups
            )
            if has_hook:
                optimizer.register_comm_hook(calls, averaging)
            for step in range(STEPS):
                optimizer.zero_grad()
                names = [n for n in SHAPES if rank or step % 2 or n != "bias"]
                for _ in range(passes):
                    model.backward(step, rank, names if rank else names[::-1])
                optimizer.step()
                found.append([p.grad.clone() for p in model.parameters()])
            found.append([p.detach().clone() for p in model.parameters()])
        assert all(
            torch.equal(ours, plain)
            for one, other in zip(found[: STEPS + 1], found[STEPS + 1 :], strict=True)
            for ours, plain in zip(one, other, strict=True)
        )
        return calls

    first, second = run(2, work)
    assert first == second  # in the same order, whatever order backward has
    buckets = len(set(first))
    assert first == [*sorted(set(first))] * STEPS
    assert [is_last for _, is_last, _ in first[:buckets]] == [False] * (buckets - 1) + [True]
    assert buckets == (2 if groups is None else 4)  # one dtype each


def test_a_buffer_may_be_replaced():
    def half(state, bucket):
        bucket.set_buffer(bucket.buffer().half())
        assert all(g.dtype == torch.float16 for g in bucket.gradients())
        return bucket.average(bucket.buffer())

    def work(verbs, rank):
        net = Net()
        optimizer = wrapped(net, verbs, lr=0.0)
        optimizer.register_comm_hook(None, half)
        net(inputs(rank)).backward()
        optimizer.step()
        assert net.a.grad.dtype == torch.float32
        assert net.a.grad.tolist() == [1.5] * 3

    run(2, work)


def test_what_is_thrown_away_is_sent_again():
    def work(verbs, rank):
        net, calls = Net(), []
        optimizer = wrapped(net, verbs, lr=0.0)
        optimizer.register_comm_hook(calls, averaging)
        for step in range(3):
            net(inputs(rank)).backward()
            if step:
                net.zero_grad()
                net(inputs(rank + 6)).backward()
            optimizer.step()
            assert net.a.grad.tolist() == [7.5 if step else 1.5] * 3
            optimizer.zero_grad()
            net(inputs(rank)).backward()  # all drop it
            optimizer.zero_grad()

    run(2, work)


def test_what_hooks_are_refused_for():
    def work(verbs, rank):
        for options, text in [
            ({"compression": kv.Compression.fp16}, "compression none"),
            ({"op": kv.Sum}, "op Average"),
            ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor 1"),
            ({"sparse_as_dense": True}, "without sparse_as_dense"),
            ({"op": kv.Adasum}, "steps are combined"),
        ]:
            with pytest.raises(InvalidArgumentError, match=text):
                wrapped(Net(), verbs, **options).register_comm_hook([], averaging)
        net = Net()
        optimizer = wrapped(net, verbs)
        with pytest.raises(InvalidArgumentError, match="hook is a str"):
            optimizer.register_comm_hook(None, "allreduce")
        optimizer.register_comm_hook([], averaging)
        with pytest.raises(InvalidArgumentError, match="second time"):
            optimizer.register_comm_hook([], averaging)
        net = Net()
        late = wrapped(net, verbs)
        net(inputs(rank)).backward()
        late.step()
        with pytest.raises(InvalidArgumentError, match="after gradients"):
            late.register_comm_hook([], averaging)

    run(2, work)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda bucket: None, "returned a NoneType"),
        (lambda bucket: bucket.average(torch.zeros(2)), "of 2 elements: the bucket's buffer has 6"),
        (lambda bucket: verb_of_no_tensor(), "came to a int"),
    ],
)
def test_what_a_hook_may_not_return(returned, text):
    def work(verbs, rank):
        net = Net()
        optimizer = wrapped(net, verbs)
        optimizer.register_comm_hook(None, lambda state, bucket: returned(bucket))
        with pytest.raises(InvalidArgumentError, match=text):
            net(inputs(rank)).backward()

    run(2, work)


def verb_of_no_tensor():
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(3)
    return future


def test_a_sparse_gradient_is_refused_on_all_ranks():
    def work(verbs, rank):
        layer = torch.nn.Embedding(4, 4, sparse=True)
        optimizer = wrapped(layer, verbs, lr=0.0)
        optimizer.register_comm_hook([], averaging)
        with pytest.raises(InvalidArgumentError, match=r"'weight' is sparse"):
            layer(torch.tensor([rank])).sum().backward()

    run(2, work)


def distributed(rank: int, kind: str, path: str) -> None:
    kv.init()
    store = dist.FileStore(path, kv.size())
    dist.init_process_group("kolovod", store=store, rank=rank, world_size=kv.size())
    model, plain = Model(), Model()
    optimizer = wrapped(model, None, lr=0.0)
    reference = wrapped(plain, None, lr=0.0)
    if kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2
        )
        optimizer.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif kind == "fp16":
        optimizer.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        optimizer.register_comm_hook(None, default_hooks.allreduce_hook)
    for step in range(STEPS):
        for each, wrapped_one in ((model, optimizer), (plain, reference)):
            wrapped_one.zero_grad()
            each.backward(step, rank)
            wrapped_one.step()
        for name in SHAPES:
            ours, exact = getattr(model, name).grad, getattr(plain, name).grad
            everyone = kv.allgather(ours[None])
            assert torch.equal(everyone[0], everyone[1])
            if kind == "fp16":
                torch.testing.assert_close(ours, exact, rtol=2e-3, atol=2e-3)
                assert not torch.equal(ours, exact)
            elif kind == "powersgd" and step >= 2 and name in ("wide", "deep"):
                assert torch.linalg.matrix_rank(ours.view(SHAPES[name][0], -1)) == 2
            else:
                torch.testing.assert_close(ours, exact)
    dist.destroy_process_group()


@pytest.mark.skipif(
    not hasattr(dist.AllreduceOptions(), "asyncOp"), reason="our group needs PyTorch 2.8"
)
@pytest.mark.parametrize("kind", ["allreduce", "fp16", "powersgd"])
def test_hooks_of_pytorch(kind: str, tmp_path: Path) -> None:
    run_torch_ranks(2, distributed, kind, str(tmp_path / "store"))


class Alone:
    """PowerSGD of one matrix as the paper has it, with all ranks in one process."""

    def __init__(self, q):
        self.q, self.errors = q, None

    def step(self, matrices):
        errors = self.errors or [torch.zeros_like(m) for m in matrices]
        given = [m + e for m, e in zip(matrices, errors, strict=True)]
        p = torch.linalg.qr(sum(m @ self.q for m in given) / len(given))[0]
        self.q = sum(m.T @ p for m in given) / len(given)
        result = p @ self.q.T
        self.errors = [m - result for m in given]
        return result


def matrices_of(name, step, size):
    return [gradient(name, step, r).reshape(SHAPES[name][0], -1) for r in range(size)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("rank", "warm"), [(2, 0), (1, 2)])
def test_power_sgd(size, rank, warm):
    sent = ["wide", "deep"]
    # Places in the only bucket, in which the last parameter comes first; "deep" is drawn first.
    drawn = torch.Generator().manual_seed(0x5EED)
    starts = {}
    for name in reversed(sent):
        columns = gradient(name, 0, 0)[0].numel()
        starts[name] = torch.randn(columns, rank, generator=drawn).double()
    alone = {name: Alone(starts[name]) for name in sent}
    wanted = []
    for step in range(STEPS):
        means = {n: sum(gradient(n, step, r) for r in range(size)) / size for n in SHAPES}
        if step > warm:  # the first step finds out the order, in buckets that are cut after it
            for name in sent:
                product = alone[name].step(matrices_of(name, step, size))
                means[name] = product.view(SHAPES[name])
        elif step == warm:
            for name in sent:
                means[name] = alone[name].step(matrices_of(name, step, size)).view(SHAPES[name])
        wanted.append(means)

    def work(verbs, r):
        model = Model()
        optimizer = wrapped(model, verbs, lr=0.0)
        hook = kv.PowerSGD(rank, warm_up_steps=warm)
        optimizer.register_comm_hook(None, hook)
        for step in range(STEPS):
            if step == warm + 2:  # a later run, from a checkpoint
                state = copy.deepcopy(hook.state_dict())
                model = Model()
                optimizer = wrapped(model, verbs, lr=0.0)
                hook = kv.PowerSGD(rank, warm_up_steps=warm)
                hook.load_state_dict(state)
                optimizer.register_comm_hook(None, hook)
            optimizer.zero_grad()
            model.backward(step, r)
            optimizer.step()
            for name in SHAPES:
                torch.testing.assert_close(
                    getattr(model, name).grad, wanted[step][name], rtol=1e-9, atol=1e-9
                )
        return [p.grad.clone() for p in model.parameters()]

    results = run(size, work)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_power_sgd_sends_few_bytes_and_keeps_infinities():
    numbers: list[int] = []

    def work(verbs, rank):
        model = Model()
        optimizer = wrapped(model, verbs, lr=0.0)
        hook = kv.PowerSGD(2, warm_up_steps=0)

        def counting(state, bucket):
            average = bucket.average
            bucket.average = lambda t: numbers.append(t.numel()) or average(t)
            return hook(state, bucket)

        optimizer.register_comm_hook(None, counting)
        for step in range(3):
            optimizer.zero_grad()
            model.backward(step, rank, factor=float("inf") if step == 1 and rank else 1.0)
            optimizer.step()
            assert bool(model.wide.grad.isfinite().all()) == (step != 1)
            assert bool(model.bias.grad.isfinite().all()) == (step != 1)

    run(2, work)
    whole = 30 + 40 * 2  # of "thin" a product is not twice as small
    assert sorted(set(numbers)) == [(30 + 20) * 2, (12 + 6) * 2 + whole]


def test_power_sgd_in_another_world_begins_anew():
    def work(verbs, rank, enter):
        model = Model()
        optimizer = wrapped(model, verbs, lr=0.0)
        hook = kv.PowerSGD(1, warm_up_steps=0)
        optimizer.register_comm_hook(None, hook)
        found = []
        for name in ("both", "again"):
            enter(name)
            for step in range(2):
                optimizer.zero_grad()
                model.backward(step, rank)
                optimizer.step()
                found.append(model.wide.grad.clone())
            enter("alone")
            optimizer.zero_grad()
            model.backward(0, rank)
            optimizer.step()
            assert torch.equal(model.wide.grad, gradient("wide", 0, rank))
        assert len(hook.state_dict()["buckets"]) == 1
        return found

    for found in growing(work):
        assert torch.equal(found[0], found[2])  # of matrices drawn alike, without errors
        assert torch.equal(found[1], found[3])
        assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"rank": 1.5}, "rank is 1.5"),
        ({"warm_up_steps": -1}, "warm_up_steps is -1"),
        ({"least_ratio": 0.5}, "least_ratio is 0.5"),
    ],
)
def test_what_power_sgd_is_refused_for(options, text):
    with pytest.raises(InvalidArgumentError, match=text):
        kv.PowerSGD(**options)
    with pytest.raises(InvalidArgumentError, match="rank=3"):
        kv.PowerSGD(4).load_state_dict(kv.PowerSGD(3).state_dict())
