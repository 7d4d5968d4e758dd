"""Batch normalisation over the batches of all ranks.

Means and variances are those of all ranks' samples together, each rank weighted by how many it has
(Chan, Golub and LeVeque, 1979, for adding up sums of squared deviations without cancellation).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kolovod.core.ops import Sum
from kolovod.core.process_sets import ProcessSet
from kolovod.errors import FrontEndArgumentError
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.verbs import collectives


class SyncBatchNorm(_BatchNorm):
    """torch.nn.BatchNorm1d, 2d or 3d whose batch is that of all ranks, on any device.

    In evaluation with running statistics, in a world of one and on ranks that are not of
    ``process_set`` it is plain batch normalisation. All ranks must call it equally often, in
    forward and in backward.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet | None = None,
        verbs: TorchCollectives | None = None,
    ) -> None:
        """Take the arguments of torch.nn.BatchNorm2d, and a process set.

        ``verbs``: over another world than the process's (tests).
        """
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set
        self._verbs = verbs

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise FrontEndArgumentError(
                f"input has shape {tuple(input.shape)}: expected (samples, {self.num_features}, "
                "...)"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise ``input`` of shape (samples, features, ...); a rank may have no samples."""
        group = self.process_set
        is_member = group is None or group.included()
        batches = self.training or (self.running_mean is None and self.running_var is None)
        verbs = self._verbs or collectives
        if not batches or not is_member or verbs.membership(group).size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        result, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, verbs, group
        )
        if self.training and self.track_running_stats:
            self._track(mean, variance, float(count))
        return result  # type: ignore[no-any-return]

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        if count == 0:
            return
        if self.momentum is None:
            assert self.num_batches_tracked is not None
            share = 1.0 / float(self.num_batches_tracked)
        else:
            share = self.momentum
        unbiased = variance * (count / max(count - 1, 1))
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)

    @classmethod
    def convert_sync_batchnorm(
        cls,
        module: nn.Module,
        process_set: ProcessSet | None = None,
        *,
        verbs: TorchCollectives | None = None,
    ) -> nn.Module:
        """Replace every BatchNorm in ``module``, or ``module`` itself, by one of these.

        Parameters, buffers and mode are taken over.
        """
        result = module
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            made = cls(
                module.num_features, module.eps, module.momentum, module.affine,
                module.track_running_stats, process_set=process_set, verbs=verbs,
            )  # fmt: skip
            made.weight, made.bias = module.weight, module.bias
            made.running_mean, made.running_var = module.running_mean, module.running_var
            made.num_batches_tracked = module.num_batches_tracked
            made.training = module.training
            result = made
        for name, child in module.named_children():
            converted = cls.convert_sync_batchnorm(child, process_set, verbs=verbs)
            result.add_module(name, converted)
        return result


class _Normalise(torch.autograd.Function):
    """(input, weight, bias, eps, verbs, group) -> result, and mean, variance, count of all."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        verbs: TorchCollectives,
        group: ProcessSet | None,
    ) -> tuple[torch.Tensor, ...]:
        features = input.shape[1]
        count = input.numel() // features
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        x = input.transpose(0, 1).reshape(features, -1).to(wide)
        mean = x.mean(1) if count else x.new_zeros(features)
        deviations = (x - mean[:, None]).square().sum(1)
        said = torch.cat([x.new_tensor([float(count)]), mean, deviations])[None]
        everything = verbs.allgather(said, process_set=group)
        counts = everything[:, :1]
        means, sums = everything[:, 1 : features + 1], everything[:, features + 1 :]
        total = counts.sum().clamp(min=1)
        mean = (counts * means).sum(0) / total
        variance = (sums.sum(0) + (counts * (means - mean).square()).sum(0)) / total
        scale = (variance + eps).rsqrt()
        normal = (x - mean[:, None]) * scale[:, None]
        shape = [1, features] + [1] * (input.dim() - 2)
        normal = normal.reshape(features, input.shape[0], *input.shape[2:]).transpose(0, 1)
        result = normal if weight is None else normal * weight.to(wide).view(shape)
        if bias is not None:
            result = result + bias.to(wide).view(shape)
        ctx.save_for_backward(normal, weight, scale, total)
        ctx.call = verbs, group, input.dtype
        count_of_all = counts.sum()
        ctx.mark_non_differentiable(mean, variance, count_of_all)
        return result.to(input.dtype), mean, variance, count_of_all

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        normal, weight, scale, total = ctx.saved_tensors
        verbs, group, dtype = ctx.call
        features = normal.shape[1]
        shape = [1, features] + [1] * (normal.dim() - 2)
        rest = [d for d in range(normal.dim()) if d != 1]
        grad = grad.to(normal.dtype)
        sums = torch.cat([grad.sum(rest), (grad * normal).sum(rest)])
        own_bias, own_weight = sums[:features].clone(), sums[features:].clone()
        verbs.allreduce_(sums, op=Sum, process_set=group)
        mean_grad, mean_product = sums[:features] / total, sums[features:] / total
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        input_grad = (
            grad - mean_grad.view(shape) - normal * mean_product.view(shape)
        ) * factor.view(shape)
        needs = ctx.needs_input_grad
        return (
            input_grad.to(dtype) if needs[0] else None,
            own_weight.to(weight.dtype) if weight is not None and needs[1] else None,
            own_bias.to(dtype if weight is None else weight.dtype) if needs[2] else None,
            None,
            None,
            None,
        )
