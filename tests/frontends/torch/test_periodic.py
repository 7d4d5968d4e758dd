"""LocalSGD and DiLoCo: against the same in one process, and what they are refused for."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from forked import run_torch_ranks
from torch_loopback import run

import kolovod.torch as kv
from kolovod.core.transaction import use_transaction
from kolovod.errors import InvalidArgumentError, MismatchError

RANKS = 3


def model_of(seed=1):
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 5), torch.nn.Linear(5, 2)
    ).double()
    drawn = torch.Generator().manual_seed(seed)  # ranks are threads, which share the global one
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.4, 0.4, generator=drawn)
    return model


def batch_of(rank, step):
    return torch.randn(
        4, 6, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64
    )


def compute(model, rank, step):
    model.zero_grad()
    model(batch_of(rank, step)).square().mean().backward()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def nesterov(model):
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_close(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def assert_all_alike(work):
    first, *others = run(RANKS, work)
    for found in others:
        assert all(map(torch.equal, found, first))


def average(models, warm=False):
    """The mean of the parameters, or of the gradients, in place."""
    for each in zip(*(m.parameters() for m in models), strict=True):
        tensors = [p.grad if warm else p.data for p in each]
        mean = sum(tensors) / len(tensors)
        for tensor in tensors:
            tensor.copy_(mean)


def local_sgd_alone(steps, every, warm):
    models = [model_of() for _ in range(RANKS)]
    optimizers = [adam(model) for model in models]
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            compute(model, rank, step)
        if step <= warm:
            average(models, warm=True)
        for optimizer in optimizers:
            optimizer.step()
        if step >= warm and (step - warm) % every == 0:
            average(models)
    return [values(model) for model in models]


@pytest.mark.parametrize(("steps", "every", "warm"), [(8, 4, 0), (11, 4, 3), (5, 1, 0), (6, 9, 2)])
def test_local_sgd(steps, every, warm):
    wanted = local_sgd_alone(steps, every, warm)

    def work(verbs, rank):
        model = model_of()
        optimizer = adam(model)
        local_sgd = kv.LocalSGD(model, optimizer, every, warm_up_steps=warm, verbs=verbs)
        for step in range(1, steps + 1):
            compute(model, rank, step)
            optimizer.step()
        found = values(model)
        local_sgd.synchronize()
        return found, values(model)

    results = run(RANKS, work)
    for (found, _), alone in zip(results, wanted, strict=True):
        assert_close(found, alone)
    for _, after in results[1:]:
        assert all(map(torch.equal, after, results[0][1]))


def diloco_alone(steps, every, *, fragments, delay, share, warm):
    """As the papers say it, with all ranks' models in one process."""
    models = [model_of() for _ in range(RANKS)]
    inner = [adam(model) for model in models]
    common = model_of()
    outer = nesterov(common)
    pending = {}
    count = len(list(common.parameters()))
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            compute(model, rank, step)
        if step <= warm:
            average(models, warm=True)
        for optimizer in inner:
            optimizer.step()
        since = step - warm
        if since == 0:
            common.load_state_dict(models[0].state_dict())
        for f in range(fragments):
            turn = (f + 1) * every // fragments
            if since >= turn and (since - turn) % every == 0:
                pending[f] = step + delay, {
                    place: sum(
                        list(common.parameters())[place].data - list(m.parameters())[place].data
                        for m in models
                    ) / RANKS
                    for place in range(f, count, fragments)
                }  # fmt: skip
        for f in sorted(f for f, (due, _) in pending.items() if due <= step):
            gradients = pending.pop(f)[1]
            outer.zero_grad(set_to_none=True)
            for place, gradient in gradients.items():
                list(common.parameters())[place].grad = gradient
            outer.step()
            for model, place in itertools.product(models, gradients):
                own = list(model.parameters())[place].data
                together = list(common.parameters())[place].data
                own.copy_((1 - share) * together + share * own)
    return [values(model) for model in models]


@pytest.mark.parametrize("delay", [0, 2])
def test_what_has_not_changed_is_not_synchronised_again(delay):
    """The outer optimizer would take a step of its momentum alone."""

    def work(verbs, rank):
        model = model_of()
        inner = adam(model)
        diloco = kv.DiLoCo(
            model,
            inner,
            nesterov(model),
            4,
            fragment_sync_delay=delay,
            local_share=0.0,
            verbs=verbs,
        )
        diloco.synchronize()
        assert_close(values(model), values(model_of()))
        for step in range(1, 9 + delay):
            compute(model, rank, step)
            inner.step()
        before = values(model)
        diloco.synchronize()
        assert all(map(torch.equal, values(model), before))
        compute(model, rank, 20)
        inner.step()
        diloco.synchronize()
        after = values(model)
        assert not any(map(torch.equal, after, before))
        diloco.synchronize()
        assert all(map(torch.equal, values(model), after))
        return after

    results = run(RANKS, work)
    for after in results[1:]:
        assert all(map(torch.equal, after, results[0]))


CASES = {
    "plain": {},
    "two fragments": {"fragments": 2},
    "late": {"delay": 2, "share": 0.5},
    "fragments that are late": {"fragments": 3, "delay": 1, "share": 0.25},
    "warmed up": {"fragments": 2, "warm": 4},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_diloco(case):
    options = {"fragments": 1, "delay": 0, "share": 0.0, "warm": 0, **case}
    wanted = diloco_alone(17, 4, **options)

    def work(verbs, rank):
        model = model_of()
        inner, outer = adam(model), nesterov(model)
        diloco = kv.DiLoCo(
            model, inner, outer, 4, fragments=options["fragments"],
            fragment_sync_delay=options["delay"], local_share=options["share"],
            warm_up_steps=options["warm"], verbs=verbs,
        )  # fmt: skip
        for step in range(1, 18):
            compute(model, rank, step)
            gradients = [p.grad.clone() for p in model.parameters()]
            inner.step()
            if step > options["warm"]:
                assert all(map(torch.equal, gradients, [p.grad for p in model.parameters()]))
        found = values(model)
        diloco.synchronize()
        return found, values(model)

    results = run(RANKS, work)
    for (found, _), alone in zip(results, wanted, strict=True):
        assert_close(found, alone)
    for _, after in results[1:]:
        assert all(map(torch.equal, after, results[0][1]))


def test_with_plain_steps_outside_it_is_local_sgd():
    def work(verbs, rank):
        found = []
        for which in ("local", "diloco"):
            model = model_of()
            optimizer = adam(model)
            if which == "local":
                kv.LocalSGD(model, optimizer, 3, verbs=verbs)
            else:
                outer = torch.optim.SGD(model.parameters(), lr=1.0)
                kv.DiLoCo(model, optimizer, outer, 3, verbs=verbs)
            for step in range(9):
                compute(model, rank, step)
                optimizer.step()
            found.append(values(model))
        return found

    for local, diloco in run(2, work):
        assert_close(local, diloco)


@pytest.mark.parametrize("saved_after", [5, 6, 9])
def test_going_on_from_a_checkpoint(saved_after):
    """Also of one that was written while a fragment was on its way."""

    def begin(verbs):
        model = model_of()
        inner, outer = adam(model), nesterov(model)
        diloco = kv.DiLoCo(model, inner, outer, 5, fragments=2, fragment_sync_delay=2, verbs=verbs)
        return model, inner, diloco

    def work(verbs, rank):
        model, inner, diloco = begin(verbs)
        saved = None
        for step in range(1, 14):
            compute(model, rank, step)
            inner.step()
            if step == saved_after:
                parts = model.state_dict(), inner.state_dict(), diloco.state_dict()
                saved = copy.deepcopy(parts)
        wanted = values(model)
        diloco.close()
        model, inner, diloco = begin(verbs)
        for part, state in zip((model, inner, diloco), saved, strict=True):
            part.load_state_dict(state)
        for step in range(saved_after + 1, 14):
            compute(model, rank, step)
            inner.step()
        assert all(map(torch.equal, values(model), wanted))
        with pytest.raises(InvalidArgumentError, match="not of DiLoCo with this model"):
            diloco.load_state_dict({"steps": 3})
        with pytest.raises(InvalidArgumentError, match=r"fragment 7 on its way, but .* into"):
            diloco.load_state_dict({**saved[2], "on_its_way": {7: (3, [])}})

    run(2, work)


def unfreeze(model, optimizer):
    model[0].requires_grad_(True)


def append(model, optimizer):
    model.append(torch.nn.Linear(2, 2).double())
    with torch.no_grad():
        model[4].weight.fill_(0.25)
        model[4].bias.fill_(0.5)
    optimizer.add_param_group({"params": list(model[4].parameters())})


def replace(model, optimizer):
    before = set(model[3].parameters())
    model[3] = model_of(seed=2)[3]
    others = [p for p in optimizer.param_groups[0]["params"] if p not in before]
    optimizer.param_groups[0]["params"] = [*others, *model[3].parameters()]


@pytest.mark.parametrize("change", [unfreeze, append, replace])
def test_what_a_model_trains_later_is_averaged_too(change):
    def work(verbs, rank):
        model = model_of()
        model[0].requires_grad_(change is not unfreeze)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kv.LocalSGD(model, optimizer, 2, verbs=verbs)
        for step in range(1, 5):
            if step == 3:
                change(model, optimizer)
            compute(model, rank, step)
            optimizer.step()
        return values(model)

    assert_all_alike(work)


def test_what_is_frozen_after_a_step_is_averaged_once_more():
    def work(verbs, rank):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kv.LocalSGD(model, optimizer, 2, verbs=verbs)
        for step in range(1, 3):
            model[0].requires_grad_(step == 1)
            compute(model, rank, step)
            optimizer.step()
        return values(model)

    assert_all_alike(work)


@pytest.mark.parametrize("change", [append, "another optimizer"])
def test_diloco_refuses_what_others_would_not_see(change):
    def work(verbs, rank):
        model = model_of()
        whole = change is append
        inner = torch.optim.SGD((model if whole else model[0]).parameters(), lr=0.1)
        other = torch.optim.SGD(model[3].parameters(), lr=0.1)
        kv.DiLoCo(model, inner, nesterov(model), 2, verbs=verbs)
        if whole:
            append(model, inner)
        for step in range(1, 3):
            compute(model, rank, step)
            other.step()
            if step == 1:
                inner.step()
        name = "4.weight, 4.bias" if whole else "3.weight, 3.bias"
        with pytest.raises(InvalidArgumentError, match=f"{name}: trained by now, .*close"):
            inner.step()

    run(RANKS, work)


def test_parameters_that_are_not_the_models():
    model, other = model_of(), torch.nn.Parameter(torch.ones(7))
    optimizer = adam(model)
    optimizer.add_param_group({"params": [other]})
    with pytest.raises(
        InvalidArgumentError, match=r"optimizer has .* shape \(7,\) that is not the"
    ):
        kv.LocalSGD(model, optimizer, 2)
    with pytest.raises(InvalidArgumentError, match=r"inner has .* shape \(7,\) that is not the"):
        kv.DiLoCo(model, optimizer, nesterov(model), 2)


def test_in_the_warm_up_gradients_stay_what_they_are():
    """A parameter without a gradient on any rank has none, and a sparse one is sparse."""

    def work(verbs, rank):
        model = torch.nn.ModuleDict(
            {"table": torch.nn.Embedding(4, 2, sparse=True), "last": torch.nn.Linear(2, 1)}
        )
        model["unused"] = torch.nn.Linear(1, 1)
        model["once"] = torch.nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        kv.LocalSGD(model, optimizer, 2, warm_up_steps=2, verbs=verbs)
        loss = model["last"](model["table"](torch.tensor([rank]))).sum()
        if rank == 0:
            loss = loss + model["once"](torch.ones(1, 1)).sum()
        loss.backward()
        optimizer.step()
        assert [p.grad for p in model["unused"].parameters()] == [None, None]
        assert model["once"].weight.grad.item() == 0.25
        grad = model["table"].weight.grad
        assert grad.layout == torch.sparse_coo
        return grad.to_dense().tolist()

    assert run(4, work) == [[[0.125, 0.125]] * 4] * 4


def test_running_statistics_are_averaged():
    def work(verbs, rank):
        model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3)).double()
        model.load_state_dict(torch.nn.Sequential(*model).state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if rank < 2:
            outer = torch.optim.SGD(model.parameters(), lr=1.0)
        kv.DiLoCo(model, optimizer, outer, 2, verbs=verbs)
        for step in range(2):
            compute(model, rank, step)
            optimizer.step()
        return model[1].running_mean, int(model[1].num_batches_tracked)

    (mean, counted), (other, _) = run(2, work)
    assert torch.equal(mean, other)
    assert counted == 2


def test_alone_it_looks_ahead():
    def work(verbs, rank):
        model = model_of()
        inner = adam(model)
        kv.DiLoCo(model, inner, nesterov(model), 4, verbs=verbs)
        other = model_of()
        plain = adam(other)
        for step in range(4):
            compute(model, rank, step)
            compute(other, rank, step)
            inner.step()
            plain.step()
        # From what there was, 0.7 * (1 + 0.9) of the way.
        for start, went, own in zip(
            model_of().parameters(), other.parameters(), values(model), strict=True
        ):
            torch.testing.assert_close(own, start.data + 1.33 * (went.data - start.data))

    run(1, work)


def test_ranks_that_differ():
    def work(verbs, rank):
        def step(model, **options):
            optimizer = adam(model)
            periodic = kv.LocalSGD(model, optimizer, verbs=verbs, **options)
            compute(model, rank, 0)
            try:
                optimizer.step()
            finally:
                periodic.close()

        with pytest.raises(MismatchError, match="sync_every"):
            step(model_of(), sync_every=2 + rank)
        with pytest.raises(MismatchError, match=r"the values of 0.weight"):
            step(model_of(seed=rank), sync_every=2)
        step(model_of(), sync_every=1)

    run(2, work)


def test_what_is_refused():
    model = model_of()
    inner, outer = adam(model), nesterov(model)
    for wrong, match in (
        ({"sync_every": 0}, "sync_every is 0: give an int of at least 1"),
        ({"sync_every": True}, "sync_every is True"),
        ({"fragments": 7}, "fragments is 7: there are 6 parameters and 4 steps"),
        ({"fragments": [list(model.parameters())[1:]]}, "each of the model's parameters"),
        ({"fragment_sync_delay": 4}, "must be less than sync_every, which is 4"),
        ({"local_share": 1.5}, "local_share is 1.5"),
        ({"warm_up_steps": -1}, "warm_up_steps is -1"),
        ({"outer": torch.optim.SGD([torch.zeros(1)], lr=1.0)}, "outer has 1 parameters, and the"),
        ({"inner": None}, "inner is a NoneType: give a torch.optim.Optimizer"),
        ({"model": "m"}, "model is a str"),
    ):  # fmt: skip
        given = {"model": model, "inner": inner, "outer": outer, "sync_every": 4, **wrong}
        with pytest.raises(InvalidArgumentError, match=match):
            kv.DiLoCo(**given)
    for parameter in model.parameters():
        parameter.requires_grad = False
    with pytest.raises(InvalidArgumentError, match="no parameter that is trained"):
        kv.LocalSGD(model, inner, 2)
    model = model_of()
    with pytest.raises(InvalidArgumentError, match="none of LocalSGD's"):
        kv.LocalSGD(model, adam(model), 2).load_state_dict({})


def in_an_elastic_job(rank):
    kv.init()
    use_transaction(SimpleNamespace(is_elastic=True))
    model = model_of()
    optimizer = adam(model)
    kv.LocalSGD(model, optimizer, 2)
    compute(model, rank, 0)
    with pytest.raises(
        InvalidArgumentError, match="local_sgd is not in the state of this elastic job"
    ):
        optimizer.step()
    use_transaction(None)
    kv.barrier()
    kv.shutdown()


def test_an_elastic_job_that_does_not_know_of_it_is_refused():
    run_torch_ranks(2, in_an_elastic_job)


def between_hosts(rank, compression):
    """Synchronous within a host, DiLoCo between the two, in four bits."""
    kv.init()
    host = [kv.add_process_set(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    inner = kv.DistributedOptimizer(adam(model), model.named_parameters(), process_set=host)
    compression = getattr(kv.Compression, compression)
    diloco = kv.DiLoCo(model, inner, nesterov(model), 4, fragments=2, compression=compression)
    for step in range(10):
        inner.zero_grad()
        data = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        model(data).square().mean().backward()
        inner.step()
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    of_all = kv.allgather(mine[None])
    assert torch.equal(of_all[0], of_all[1])
    assert torch.equal(of_all[2], of_all[3])
    diloco.synchronize()
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    of_all = kv.allgather(mine[None])
    assert all(torch.equal(of_all[0], each) for each in of_all)
    kv.shutdown()
    return mine.numpy()


@pytest.mark.frameworks
def test_between_hosts_with_ranks_that_step_together():
    hosts = ["a", "a", "b", "b"]
    exact = run_torch_ranks(4, between_hosts, "none", hosts=hosts)[0]
    coded = run_torch_ranks(4, between_hosts, "int4", hosts=hosts)[0]
    assert 0 < abs(exact - coded).max() < 0.05
