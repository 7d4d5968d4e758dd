"""Remedies for findings, in the words of the framework that a script trains with."""

from __future__ import annotations

from collections.abc import Mapping

from kolovod.checking.facts import Facts

__all__ = ["remedy"]

_ANY = ""
_OVER_DDP = ("lightning", "accelerate", "transformers")
_CHANGED = "see docs/gradients.md#change-gradients-yourself"
_REMEDIES = {
    "broadcast": {
        "ddp": "torch.nn.parallel.DistributedDataParallel(model) gives all ranks the weights of "
        "rank 0: make it before the first step, and change weights on all ranks alike after that",
        "torch": "after the model is made: kolovod.torch.broadcast_parameters(model.state_dict()) "
        "and broadcast_optimizer_state(optimizer)",
        "keras": "give fit() callbacks=[kolovod.keras.callbacks."
        "BroadcastGlobalVariablesCallback(root_rank=0), ...]",
        "tensorflow": "when all variables are there: kolovod.tensorflow.broadcast_variables("
        "[*model.variables, *optimizer.variables], root_rank=0)",
        "jax": "before the first step: params = kolovod.jax.broadcast_pytree(params), and the "
        "optimizer's state alike (in Flax NNX: nnx.update(model, "
        "kolovod.jax.broadcast_pytree(nnx.state(model))))",
    },
    "optimizer": {
        "ddp": "model = torch.nn.parallel.DistributedDataParallel(model), and call that, not the "
        "module in it",
        "lightning": 'Trainer(strategy="kolovod"), or "ddp"; and compute the loss in '
        "training_step()",
        "accelerate": "model, optimizer, loader = accelerator.prepare(model, optimizer, loader), "
        "and call that model, not the one in it",
        "torch": "optimizer = kolovod.torch.DistributedOptimizer(optimizer, "
        "named_parameters=model.named_parameters())",
        "keras": "model.compile(optimizer=kolovod.keras.DistributedOptimizer(optimizer))",
        "tensorflow": "tape = kolovod.tensorflow.DistributedGradientTape(tape), or "
        "kolovod.tensorflow.DistributedOptimizer(optimizer)",
        "jax": "optimizer = kolovod.jax.DistributedOptimizer(optimizer), whichever optimizer of "
        "optax it is; or grads = kolovod.jax.allreduce_pytree(grads) before its update",
    },
    "local-sgd": {
        _ANY: "after each step averager.average_parameters(model.parameters()), of averager = "
        "torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager(period, "
        "warmup_steps), or torch.distributed.optim.PostLocalSGDOptimizer(optimizer, averager)",
    },
    "gradients": {
        "torch": f"change gradients on all ranks alike, between backward() and step(); {_CHANGED}",
        "keras": "change gradients on all ranks alike, before the optimizer's apply()",
        "tensorflow": "change gradients on all ranks alike, after tape.gradient()",
        "jax": "change gradients, updates and the optimizer's state on all ranks alike: what "
        "DistributedOptimizer is given works on averages",
    },
    "batch-norm": {
        "ddp": "broadcast or average the buffers before evaluation and checkpoints; on GPUs "
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) has the statistics of all ranks",
        "torch": "kolovod.torch.SyncBatchNorm.convert_sync_batchnorm(model); or broadcast or "
        "average the buffers before evaluation and checkpoints",
        "keras": "average model.non_trainable_variables over ranks before evaluation and "
        "checkpoints; on TensorFlow kolovod.tensorflow.SyncBatchNormalization has the statistics "
        "of all ranks",
        "jax": "average them before evaluation and checkpoints: batch_stats = "
        "kolovod.jax.allreduce_pytree(batch_stats) (in Flax NNX: nnx.update(model, "
        "kolovod.jax.allreduce_pytree(nnx.state(model, nnx.BatchStat))))",
    },
    "metrics": {
        "ddp": "average them first: torch.distributed.all_reduce(loss) on all ranks, divided by "
        "their number",
        "lightning": "self.log(name, value, sync_dist=True)",
        "accelerate": 'accelerator.reduce(loss, "mean"), or gather_for_metrics, on all ranks',
        "torch": "average them first, on all ranks: kolovod.torch.allreduce(loss), or "
        "average_metrics",
        "keras": "give fit() callbacks=[..., kolovod.keras.callbacks.MetricAverageCallback()]",
        "tensorflow": "average them first, on all ranks: kolovod.tensorflow.allreduce(loss), or "
        "average_metrics",
        "jax": "average them first, on all ranks: kolovod.jax.allreduce(loss) within the step, or "
        "average_metrics",
    },
    "random-numbers": {
        _ANY: "after the model is made, add rank() to the seed, so that dropout and "
        "augmentation differ between ranks",
        "keras": "keras.utils.set_random_seed(seed + kolovod.keras.rank()), so that dropout and "
        "augmentation differ between ranks; the callback that broadcasts makes weights equal",
        "jax": "give each rank keys of its own, so that dropout and augmentation differ: "
        "jax.random.fold_in(key, kolovod.jax.rank()); and add rank() to NumPy's seed",
    },
    "loader": {
        "torch": "give the DataLoader sampler=DistributedSampler(dataset, kolovod.size(), "
        "kolovod.rank()), or kolovod.data.ShardedSampler(dataset)",
        "ddp": "give the DataLoader sampler=torch.utils.data.DistributedSampler(dataset)",
        "lightning": "leave Trainer(use_distributed_sampler=True) as it is, or give the DataLoader "
        "sampler=torch.utils.data.DistributedSampler(dataset)",
        "accelerate": "loader = accelerator.prepare(loader)",
    },
    "data": {
        _ANY: "give each rank a part of the data: kolovod.data.shard, or slices by rank()",
        "jax": "give each rank a part of the data: x[kolovod.jax.rank()::kolovod.jax.size()], y "
        "alike, or kolovod.data.shard",
    },
    "learning-rate": {
        _ANY: "compute it from what all ranks have alike: the step, kolovod's size(), a metric "
        "that was averaged over ranks",
        "keras": "compute it from what all ranks have alike: the epoch, kolovod.keras.size(), a "
        "metric that MetricAverageCallback has averaged (it comes before ReduceLROnPlateau)",
    },
}


def remedy(check: str, known: Mapping[int, Facts]) -> str:
    """Return the remedy for a finding of ``check``, by the framework that ranks train with."""
    of_check = _REMEDIES[check]
    framework = next((facts.framework for facts in known.values() if facts.framework), "torch")
    names = [framework, *(["ddp"] if framework in _OVER_DDP else []), _ANY, "torch"]
    return next(of_check[name] for name in names if name in of_check)
