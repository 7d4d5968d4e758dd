"""Says which version of PyTorch has changed what it does not document, and Kolovod uses."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kolovod.private_apis import torch as private  # noqa: E402


def test_a_backward_pass_has_a_number_a_node_and_an_end():
    seen: list[object] = []

    def look(grad):
        seen.append((private.current_backward(), private.current_node() is not None))
        private.when_backward_ends(lambda: seen.append("end"))

    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(look)
    assert private.current_backward() == private.NO_BACKWARD
    assert private.current_node() is None
    (x * 2).sum().backward()
    ((number, is_within), end) = seen
    assert number != private.NO_BACKWARD
    assert is_within
    assert end == "end"
    with pytest.raises(RuntimeError, match="during backward"):
        private.when_backward_ends(lambda: None)


def test_the_outermost_function_that_has_begun_a_pass_within_is_found():
    found: list[object] = []

    class Within(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                inner = torch.ones(1, requires_grad=True)
                inner.register_hook(lambda _: found.append(private.outer_node()))
                inner.sum().backward()
            return grad

    x = torch.ones(1, requires_grad=True)
    result = Within.apply(x)
    result.sum().backward()
    assert found == [result.grad_fn]
    assert private.outer_node() is None


def test_where_a_thread_waits_for_backward_has_code():
    assert len(private.BACKWARD) == 3


def test_a_grad_scaler_is_known_when_it_asks_for_parameters():
    asked: list[bool] = []

    class Asked(torch.optim.SGD):
        @property
        def param_groups(self):
            asked.append(private.is_unscaling(1))
            return self.__dict__["param_groups"]

        @param_groups.setter
        def param_groups(self, groups):
            self.__dict__["param_groups"] = groups

    x = torch.ones(1, requires_grad=True)
    optimizer = Asked([x], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(x.sum()).backward()
    asked.clear()
    _ = optimizer.param_groups
    assert asked == [False]
    asked.clear()
    scaler.unscale_(optimizer)
    assert True in asked


def test_memory_that_one_tensor_has_is_told_from_memory_of_two():
    assert private.references_to_storage is not None
    tensor = torch.ones(3)

    def count():
        return private.references_to_storage(tensor.untyped_storage()._cdata)

    alone = count()
    other = tensor.view(3)
    assert count() > alone
    del other
    assert count() == alone


def test_a_tensor_under_a_transform_is_known():
    seen: list[bool] = []

    def look(x):
        seen.append(private.is_in_transform(x))
        return x.sum()

    torch.func.grad(look)(torch.ones(2))
    look(torch.ones(2))
    assert seen == [True, False]


def test_torch_function_can_be_left_out():
    class Own(torch.Tensor):
        __torch_function__ = private.returns_plain_tensors

    class Asked(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.calls += 1
            return super().__torch_function__(function, types, args, kwargs or {})

    assert type(torch.ones(2).as_subclass(Own) + 1) is torch.Tensor
    tensor = torch.ones(2).as_subclass(Asked)
    with private.no_torch_function():
        torch.add(tensor, 1)
    assert Asked.calls == 0
    torch.add(tensor, 1)
    assert Asked.calls == 1


def test_older_versions_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0a0+git1234")
    private.warn_of_older()
    monkeypatch.setattr(torch, "__version__", "2.1.2+cu121")
    with pytest.warns(
        UserWarning, match=r"PyTorch 2\.1\.2\+cu121; .* before 2\.6, .* wrong gradients"
    ):
        private.warn_of_older()
