"""Lazy modules, whose parameters have no shape before the first batch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_loopback import run  # noqa: E402

from kolovod.errors import InvalidArgumentError  # noqa: E402
from kolovod.torch import DistributedOptimizer  # noqa: E402
from kolovod.torch.functions import Functions  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")


def test_they_are_averaged_from_the_first_batch_on():
    def work(kv, rank):
        model = torch.nn.LazyLinear(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), collectives=kv
        )
        inputs = torch.full((1, 3), rank + 1.0)
        for step in range(3):
            optimizer.zero_grad()
            output = model(inputs)
            if step == 0:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(0.5)
                output = model(inputs)
            output.sum().backward()
            optimizer.step()
        return [parameter.detach().unique().tolist() for parameter in model.parameters()]

    # Three steps of 0.1 against a gradient of 1.5 (the mean input) and of 1.
    for weight, bias in run(2, work):
        assert weight == pytest.approx([0.05])
        assert bias == pytest.approx([0.2])


def test_there_is_nothing_to_broadcast_before():
    def work(kv, rank):
        model = torch.nn.LazyLinear(2)
        text = r"params\['bias'\] has no values yet.*give the model a batch first"
        with pytest.raises(InvalidArgumentError, match=text):
            Functions(kv).broadcast_parameters(model.state_dict())

    run(2, work)
