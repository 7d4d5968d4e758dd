"""When backward returns, gradients are the averages, and what a script makes of them counts."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from optimizing import Net, inputs, wrapped  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_loopback import run  # noqa: E402
from waiting import until  # noqa: E402

from kolovod.core.ops import Average, Sum  # noqa: E402
from kolovod.errors import InvalidArgumentError, MismatchError  # noqa: E402
from kolovod.torch import Compression, DistributedOptimizer, rounds  # noqa: E402

MEAN = [1.5] * 3


def halve_data(p):
    p.grad.data = p.grad.data * 0.5


def halve_storage(p):
    p.grad.untyped_storage().copy_((p.grad * 0.5).untyped_storage())


CHANGES = {
    "in place": lambda p: p.grad.mul_(0.5),
    "of .data": lambda p: p.grad.data.mul_(0.5),
    "another .data": halve_data,
    "of memory": halve_storage,
    "replaced": lambda p: setattr(p, "grad", p.grad * 0.5),
    "by numpy": lambda p: p.grad.numpy().__imul__(0.5),
}


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_backward_counts(change, compression):
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, compression=compression)
        for step in range(1, 4):
            optimizer.zero_grad()
            net(inputs(rank)).backward()
            assert net.a.grad.tolist() == net.b.grad.tolist() == MEAN
            CHANGES[change](net.a)
            optimizer.step()
            assert net.a.tolist() == [1 - step * 0.75] * 3
            assert net.b.tolist() == [1 - step * 1.5] * 3

    run(2, work)


@pytest.mark.parametrize("op", [None, Sum])
@pytest.mark.parametrize("unused", ["nowhere", "here", "by turns", "everywhere"])
def test_also_where_a_parameter_is_not_used(unused, op):
    def work(kv, rank):
        net = Net()
        options = {} if op is None else {"op": op}
        optimizer = wrapped(net, kv, **options)
        factor = 1 if op is None else 2
        for step in range(6):
            optimizer.zero_grad()
            uses = [unused == "nowhere" or (unused == "here" and r == 1)
                    or (unused == "by turns" and (step + r) % 3 > 0) for r in range(2)]  # fmt: skip
            net(inputs(rank), use_b=uses[rank]).backward()
            assert net.a.grad.tolist() == [factor * 1.5] * 3
            wanted = factor * sum(r + 1 for r in range(2) if uses[r]) / 2
            found = None if net.b.grad is None else net.b.grad.tolist()
            assert found == ([wanted] * 3 if any(uses) else None)
            before = net.a.detach().clone()
            net.a.grad.mul_(2)
            optimizer.step()
            assert (before - net.a).tolist() == [factor * 3.0] * 3

    run(2, work)


def test_two_losses_of_other_parameters_in_any_order():
    """One backward each; ranks have them in another order, or one has a loss less."""

    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        for step in range(5):
            optimizer.zero_grad()
            losses = [(net.a * inputs(rank)).sum(), (net.b * inputs(rank)).sum()]
            if (rank + step) % 2:
                losses.reverse()
            for loss in losses[: 1 if step == 3 and rank else None]:
                loss.backward()
            optimizer.step()
            if step != 3:
                assert net.a.grad.tolist() == net.b.grad.tolist() == MEAN
        return net.a.tolist(), net.b.tolist()

    first, second = run(2, work)
    assert first == second


def test_a_second_backward_adds_its_average():
    """As DDP: of a discriminator's real and generated batches, for example."""

    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        for _ in range(3):
            optimizer.zero_grad()
            net(inputs(rank)).backward()
            net.a.grad.mul_(2)
            net(inputs(rank + 2)).backward()
            assert net.a.grad.tolist() == [2 * 1.5 + 3.5] * 3
            assert net.b.grad.tolist() == [1.5 + 3.5] * 3
            optimizer.step()
            assert net.a.grad.tolist() == [6.5] * 3

    run(2, work)


def test_with_sums_it_is_refused_and_what_was_thrown_away_is_not():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv, op=Sum)
        net(inputs(rank)).backward()
        with pytest.raises(InvalidArgumentError, match=r"'[ab]' was computed again.*no_sync"):
            net(inputs(rank)).backward()
        optimizer.zero_grad()
        net(inputs(rank)).backward()
        net.zero_grad()
        net(inputs(rank)).backward()
        assert net.a.grad.tolist() == [3.0] * 3
        optimizer.step()
        optimizer.zero_grad()
        (net.a * inputs(rank)).sum().backward()
        (net.b * inputs(rank)).sum().backward()
        optimizer.step()
        assert net.a.grad.tolist() == net.b.grad.tolist() == [3.0] * 3

    run(2, work)


def test_more_passes_on_one_rank_are_an_error_on_all():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        net(inputs(rank)).backward()
        if rank == 0:
            with pytest.raises(MismatchError, match=r"has more.*begins.*equally often.*no_sync"):
                net(inputs(rank)).backward()
        else:
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(MismatchError, match=r"begins.*has more.*equally often.*no_sync"):
                net(inputs(rank)).backward()

    run(2, work)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_that_only_one_rank_makes_is_found_at_the_next_backward(steps_before):
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        for step in range(steps_before + 1):
            optimizer.zero_grad()
            net(inputs(rank)).backward()
            if rank == 0 or step < steps_before:
                optimizer.step()
        optimizer.zero_grad()
        here, there = "has stepped with", "threw away"
        if rank == 1:
            here, there = there, here
        with pytest.raises(MismatchError, match=f"this rank {here}.*another one {there}"):
            net(inputs(rank)).backward()

    run(2, work)


def test_gradients_that_all_throw_away():
    """As where the norm is not finite; by turns with steps, and by the optimizer or the module."""

    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        for step in range(8):
            net(inputs(rank)).backward()
            assert net.a.grad.tolist() == MEAN
            if step % 3:
                optimizer.step()
            (net if step % 4 == 1 else optimizer).zero_grad()
        assert net.a.tolist() == [1 - 5 * 1.5] * 3

    run(2, work)


def test_gradients_that_no_backward_made_are_averaged_in_step():
    """All of them, or some beside those of backward; also where backward comes afterwards."""

    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        for step in range(4):
            optimizer.zero_grad()
            if step == 2:
                net.b.grad = inputs(rank)
            if step:
                (net.a * inputs(rank)).sum().backward()
                assert net.a.grad.tolist() == MEAN
            else:
                net.a.grad = inputs(rank)
            if step != 2:
                net.b.grad = inputs(rank)
            optimizer.step()
            assert net.a.grad.tolist() == net.b.grad.tolist() == MEAN

    run(2, work)


def test_a_rank_without_a_batch_gets_the_average_in_step():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        for step in range(3):
            optimizer.zero_grad()
            if rank or step == 1:
                net(inputs(rank)).backward()
                assert net.a.grad.tolist() == ([1.5] if step == 1 else [1.0]) * 3
            optimizer.step()
            assert net.a.grad.tolist() == ([1.5] if step == 1 else [1.0]) * 3

    run(2, work)


class Twice(torch.nn.Module):
    """Two layers, each under a checkpoint that runs backward within backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def model_of(reentrant):
    model, drawn = Twice(reentrant), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn))
    return model


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_within_backward_is_a_part_of_it(reentrant):
    """Gradients are final after the outer one, and there is one round."""

    def batch(rank):
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(2, 4, generator=generator).requires_grad_()

    alone = model_of(reentrant)
    sum(alone(batch(rank)).square().sum() for rank in range(2)).div(2).backward()
    wanted = [p.grad for p in alone.parameters()]

    def work(kv, rank):
        model = model_of(reentrant)
        optimizer = wrapped(model, kv, lr=0.0)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch(rank)).square().sum().backward()
            assert optimizer._kolovod_reducer.state.count == 1
            torch.testing.assert_close([p.grad for p in model.parameters()], wanted)
            optimizer.step()

    run(2, work)


def test_a_hook_that_runs_backward_of_another_model():
    def work(kv, rank):
        net, other = Net(), Net()
        optimizers = [wrapped(each, kv) for each in (net, other)]

        def also(grad):
            with torch.enable_grad():
                other(inputs(rank)).backward()

        net.a.register_hook(also)
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            net(inputs(rank)).backward()
            for each in (net, other):
                assert each.a.grad.tolist() == each.b.grad.tolist() == MEAN
            for optimizer in optimizers:
                optimizer.step()

    run(2, work)


def test_a_hook_that_changes_a_gradient_on_its_way_is_told_how():
    """Before the optimizer's it may: what it makes of the rank's own gradient is averaged."""

    def work(kv, rank):
        def clamp(parameter):
            parameter.grad.clamp_(max=1.0)

        net = Net()
        net.a.register_post_accumulate_grad_hook(clamp)
        optimizer = wrapped(net, kv)
        for _ in range(2):
            optimizer.zero_grad()
            net(inputs(rank)).backward()
            assert net.a.grad.tolist() == [1.0] * 3
            assert net.b.grad.tolist() == MEAN
            optimizer.step()
        for parameter in net.parameters():  # the last one of the bucket is on its way then
            parameter.register_post_accumulate_grad_hook(clamp)
        optimizer.zero_grad()
        with pytest.raises(
            InvalidArgumentError, match=r"'[ab]' was changed within backward|another"
        ):
            net(inputs(rank)).backward()

    run(2, work)


def test_after_a_backward_that_has_failed_all_throw_away():
    def work(kv, rank):
        net = Net()
        optimizer = wrapped(net, kv)
        net(inputs(rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

        def fails(grad):
            raise ZeroDivisionError

        handle = net.a.register_hook(fails)
        with pytest.raises(ZeroDivisionError):
            net(inputs(rank)).backward()
        handle.remove()
        optimizer.zero_grad()
        net(inputs(rank)).backward()
        assert net.a.grad.tolist() == net.b.grad.tolist() == MEAN
        optimizer.step()

    run(2, work)


# Several optimizers -------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [Average, Sum])
def test_two_optimizers_of_one_parameter(op):
    """Each gradient is combined once, whichever steps first; also when one of them is given up."""
    factor = 1 if op == Average else 2

    def work(kv, rank):
        net = Net()
        plain = torch.optim.SGD([net.a, net.b], lr=1.0)
        first = DistributedOptimizer(plain, net.named_parameters(), op=op, collectives=kv)
        second = torch.optim.SGD([net.b], lr=1.0)
        second = DistributedOptimizer(second, [("b", net.b)], op=op, collectives=kv)
        for step in range(6):
            optimizers = [first] if second is None else [first, second]
            for optimizer in optimizers if step != 1 else []:
                optimizer.zero_grad()
            if step == 1:
                net.zero_grad()
            before = net.a.detach().clone(), net.b.detach().clone()
            net(inputs(rank)).backward()
            assert net.a.grad.tolist() == net.b.grad.tolist() == [factor * 1.5] * 3
            for optimizer in optimizers[:: 1 if step % 2 else -1]:
                optimizer.step()
            assert (before[0] - net.a).tolist() == [factor * 1.5] * 3
            assert (before[1] - net.b).tolist() == [len(optimizers) * factor * 1.5] * 3
            if step == 3:
                del optimizers, optimizer
                second = None

    # A process's first optimizer imports modules of PyTorch that keep it in a traceback.
    torch.optim.SGD(Net().parameters(), lr=1.0)
    run(2, work)


def test_optimizers_of_parts_that_not_every_rank_uses():
    """A body and two heads, each with an optimizer: in a step a rank uses the head of its task."""

    def work(kv, rank):
        parts = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
        optimizers = [
            DistributedOptimizer(torch.optim.SGD([part], lr=1.0), [(name, part)], collectives=kv)
            for name, part in zip("abc", parts, strict=True)
        ]
        for step in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            before = [part.detach().clone() for part in parts]
            tasks = [1 + (rank + step) % 2 if step < 4 else 1 for rank in range(2)]
            ((parts[0] + parts[tasks[rank]]) * inputs(rank)).sum().backward()
            assert parts[0].grad.tolist() == MEAN
            for optimizer in optimizers[:: 1 if (rank + step) % 3 else -1]:
                optimizer.step()
            changes = [(b - part).tolist() for b, part in zip(before, parts, strict=True)]
            wanted = [1.5] + [
                sum(r + 1 for r in range(2) if tasks[r] == head) / 2 for head in (1, 2)
            ]
            assert changes == [[value] * 3 for value in wanted]

    run(2, work)


def test_one_that_another_rank_has_given_up_is_an_error():
    def work(kv, rank):
        net, other = Net(), Net()
        optimizers = [wrapped(net, kv), wrapped(other, kv)]
        for _ in range(2):
            (net(inputs(rank)) + other(inputs(rank))).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if rank == 0:
            optimizers[1]._kolovod_reducer.close()
        text = "this one has given up" if rank == 0 else "another rank has given up"
        with pytest.raises(MismatchError, match=text):
            (net(inputs(rank)) + other(inputs(rank))).backward()

    run(2, work)


def test_those_that_all_ranks_have_given_up_are_forgotten():
    def work(kv, rank):
        net = Net()
        for _ in range(4):
            optimizer = wrapped(net, kv)
            optimizer.zero_grad()
            net(inputs(rank)).backward()
            optimizer.step()
            assert net.a.grad.tolist() == MEAN
            optimizer._kolovod_reducer.close()
        optimizer = wrapped(net, kv)
        for _ in range(2):
            optimizer.zero_grad()
            net(inputs(rank)).backward()
        return len(rounds._members[kv.world().engine])

    assert run(2, work) == [1, 1]


def test_equal_ones_are_told_apart_by_the_order_in_which_they_were_made():
    """Two heads whose parameters have the same names; each rank comes with another one."""

    def work(kv, rank):
        nets = [Net() for _ in range(2)]
        optimizers = [wrapped(net, kv) for net in nets]
        nets[rank](inputs(rank)).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert [net.a.grad.tolist() for net in nets] == [[0.5] * 3, [1.0] * 3]

    run(2, work)


def test_equal_ones_of_which_ranks_have_differently_many():
    def work(kv, rank):
        nets = [Net() for _ in range(2 + rank)]
        optimizers = [wrapped(net, kv) for net in nets]
        with pytest.raises(MismatchError, match="differently many"):
            sum(net(inputs(rank)) for net in nets[rank:2]).backward()
        del optimizers

    run(2, work)


def test_a_parameter_that_is_given_twice():
    """PyTorch warns of it, and steps twice."""

    def work(kv, rank):
        net = Net()
        with pytest.warns(UserWarning, match="duplicate parameters"):
            plain = torch.optim.SGD([net.a, net.b, net.a], lr=1.0)
        optimizer = DistributedOptimizer(plain, collectives=kv)
        for _ in range(3):
            optimizer.zero_grad()
            before = net.a.detach().clone()
            net(inputs(rank)).backward()
            assert net.a.grad.tolist() == net.b.grad.tolist() == MEAN
            optimizer.step()
            assert (before - net.a).tolist() == [3.0] * 3
        optimizer._kolovod_reducer.close()

    run(2, work)


def test_two_threads_at_once_are_an_error_on_all_ranks(monkeypatch):
    """Rank 1 has one of the two only: without the error it would wait for the other for ever."""
    is_in_round, is_refused = threading.Event(), threading.Event()
    combine = rounds._combine

    def held_open(purposes):
        if threading.current_thread().name == "first":
            is_in_round.set()
            until(is_refused.is_set, "the second thread has come")
        combine(purposes)

    monkeypatch.setattr(rounds, "_combine", held_open)

    def work(kv, rank):
        nets = [Net(), Net()]
        optimizers = [wrapped(net, kv) for net in nets]
        texts = []

        def train(net):
            with pytest.raises(MismatchError) as caught:
                net(inputs(rank)).backward()
            texts.append(str(caught.value))

        name = "first" if rank == 0 else "the only one"
        thread = threading.Thread(target=train, args=(nets[0],), name=name, daemon=True)
        thread.start()
        if rank == 0:
            until(is_in_round.is_set, "the first thread has begun its round")
            train(nets[1])
            is_refused.set()
        thread.join()
        assert len(optimizers) == 2
        return texts

    texts = run(2, work)
    assert [len(each) for each in texts] == [2, 1]
    for text in [*texts[0], *texts[1]]:
        assert "two threads of one process, first and " in text
        assert "one thread at a time call backward() and step()" in text
