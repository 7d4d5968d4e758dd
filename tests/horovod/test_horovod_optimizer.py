"""Horovod's DistributedOptimizer with each option, against one process with all the data."""

import copy
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks as run_ranks  # noqa: E402
from torch import nn  # noqa: E402

import horovod.torch as hvd  # noqa: E402

STEPS, BATCH = 3, 4


def new_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step, rank):
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(BATCH, 5, generator=draw), torch.randint(0, 3, (BATCH,), generator=draw)


def expected(size, passes=1, factor=1.0):
    """One process that sees every rank's batches."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            for rank in range(size):
                inputs, target = batch(passes * step + part, rank)
                loss = nn.functional.cross_entropy(model(inputs), target)
                (loss * factor / size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def trained(rank, passes=1, **options):
    model = new_model()
    if callable(options.get("groups")):
        options = {**options, "groups": options["groups"](model)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes,
        **options,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            inputs, target = batch(passes * step + part, rank)
            nn.functional.cross_entropy(model(inputs), target).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def pairs(model):
    first, second = list(model[0].parameters()), list(model[2].parameters())
    return [[first[0], second[1]], [first[1]]]


OPTIONS = {
    "plain": {},
    "sum": {"op": hvd.Sum},
    "fp16": {"compression": hvd.Compression.fp16},
    "passes": {"passes": 2},
    "predivide": {"gradient_predivide_factor": 2.0},
    "groups": {"groups": 2},
    "many groups": {"groups": 99},
    "lists": {"groups": pairs},
    "predivide with groups": {"gradient_predivide_factor": 2.0, "groups": pairs},
}


def train_all(rank, size):
    hvd.init()
    for label, options in OPTIONS.items():
        factor = size if options.get("op") == hvd.Sum else 1.0
        wanted = expected(size, options.get("passes", 1), factor)
        tolerance = 5e-3 if label == "fp16" else 1e-5
        for mine, theirs in zip(trained(rank, **options), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance, msg=label)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        trained(rank, num_groups=2)
    check_sparse(rank, size)
    check_adasum(rank, size)
    check_clipping_and_accumulation(rank, size)
    check_errors()
    if size == 2:
        check_sparse_in_the_next_world(rank)
    return True


def check_sparse(rank, size):
    """An embedding whose rows some ranks touch and others do not; rank 0 skips it at first."""
    for as_dense in (False, True):
        torch.manual_seed(1)
        table = nn.Embedding(10, 3, sparse=True)
        head = nn.Linear(3, 1)
        whole, whole_head = copy.deepcopy(table), copy.deepcopy(head)
        named = [("table", table.weight), *head.named_parameters()]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([table.weight, *head.parameters()], lr=0.5),
            named_parameters=named,
            sparse_as_dense=as_dense,
        )
        plain = torch.optim.SGD([whole.weight, *whole_head.parameters()], lr=0.5)
        for step in range(3):
            for one in (optimizer, plain):
                one.zero_grad()

            def loss(rank, table, head, step=step):
                rows = table(torch.tensor([rank, rank + 1, 9]))
                if rank == 0 and step == 0 and size > 1:
                    rows = torch.ones(3, 3)
                return head(rows).sum()

            loss(rank, table, head).backward()
            optimizer.step()
            for r in range(size):
                (loss(r, whole, whole_head) / size).backward()
            plain.step()
            torch.testing.assert_close(table.weight, whole.weight)
            torch.testing.assert_close(head.weight, whole_head.weight)


def check_sparse_in_the_next_world(rank):
    """Rank 0 comes with what it knows; rank 1, with a new optimizer, has no gradient yet."""
    table = nn.Embedding(4, 2, sparse=True)
    nn.init.zeros_(table.weight)

    def wrapped():
        sgd = torch.optim.SGD(table.parameters(), lr=1.0)
        return hvd.DistributedOptimizer(sgd, named_parameters=table.named_parameters())

    optimizer = wrapped()
    table(torch.tensor([rank])).sum().backward()
    optimizer.step()
    hvd.shutdown()
    hvd.init()
    optimizer = optimizer if rank == 0 else wrapped()
    optimizer.zero_grad()
    optimizer.step()
    table(torch.tensor([rank])).sum().backward()
    optimizer.step()
    assert table.weight.tolist() == [[-1.0] * 2] * 2 + [[0.0] * 2] * 2


def check_adasum(rank, size):
    """Equal gradients: the step of one rank. Orthogonal ones: the sum of the steps."""
    if size & (size - 1):
        with pytest.raises(NotImplementedError, match="needs 2, 4, 8"):
            hvd.DistributedOptimizer(
                torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), op=hvd.Adasum
            )
        with pytest.raises(NotImplementedError, match="not 3"):
            hvd.allreduce(torch.ones(1), op=hvd.Adasum)
        return
    for own, wanted in ((lambda p: p.sum(), -1.0), (lambda p: p[rank], -1.0)):
        parameter = nn.Parameter(torch.zeros(size))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces optimizer.step
        optimizer = hvd.DistributedOptimizer(optimizer, [("p", parameter)], op=hvd.Adasum)
        assert type(copy.deepcopy(optimizer)) is torch.optim.SGD
        with pytest.raises(ValueError, match="already distributed"):
            hvd.DistributedOptimizer(optimizer)
        late = nn.Parameter(torch.zeros(size))
        optimizer.add_param_group({"params": [late]})
        (own(parameter) + own(late)).backward()
        optimizer.synchronize()
        optimizer.step()
        assert torch.equal(late, parameter)
        torch.testing.assert_close(parameter.detach(), torch.full((size,), wanted))
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
        with pytest.raises(AssertionError), optimizer.skip_synchronize():
            pass


def check_clipping_and_accumulation(rank, size):
    """Horovod's recipe, and without it; passes that are counted, and passes within no_sync."""

    def loop(model, optimizer, ranks, how):
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(2):
                for r in ranks:
                    inputs, target = batch(2 * step + part, r)
                    loss = nn.functional.cross_entropy(model(inputs), target) / len(ranks)
                    with optimizer.no_sync() if how == "no_sync" and not part else nullcontext():
                        loss.backward()
            if how == "recipe":
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            with optimizer.skip_synchronize() if how == "recipe" else nullcontext():
                optimizer.step()

    plain = new_model()
    loop(plain, torch.optim.SGD(plain.parameters(), lr=0.1), range(size), "plain")
    for how in ("recipe", "default", "no_sync"):
        model = new_model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            backward_passes_per_step=1 if how == "no_sync" else 2,
        )
        loop(model, optimizer, [rank], how)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5, msg=how)


def check_errors():
    model = new_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    wrong = (
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"named_parameters": named[:-1]}, "lacks 1"),
        ({"named_parameters": [*named, ("0.weight", named[1][1])]}, "two parameters named"),
        ({"named_parameters": [1]}, "instead of"),
        ({"groups": -1}, "groups is -1"),
        ({"groups": "two"}, "groups is 'two'"),
        ({"groups": [[torch.ones(1)]]}, "which the optimizer does not change"),
        ({"groups": [[named[0][1]], [named[0][1]]]}, "groups 0 and 1"),
    )
    for options, text in wrong:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(sgd, **{"named_parameters": named, **options})
    if hvd.size() > 1:
        ps = hvd.add_process_set([0])
        with pytest.raises(NotImplementedError, match="Adasum"):
            hvd.DistributedOptimizer(sgd, op=hvd.Adasum, process_set=ps)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_trains_as_one_process_would(size):
    assert all(run_ranks(size, train_all, size, timeout_s=110))
