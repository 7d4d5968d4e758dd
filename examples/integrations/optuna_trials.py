"""Optuna: each trial is a training on all ranks; rank 0 chooses, and may end a trial early.

    kolovod run -np 2 -- python examples/integrations/optuna_trials.py

Needs ``pip install 'kolovod[integrations]'``. Only rank 0 has the study, and its storage.
"""

import optuna
import torch
from sklearn.datasets import load_digits
from torch.nn import functional

import kolovod.torch as kv

TRIALS, EPOCHS = 6, 3

kv.init()
images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float() / 16
mine = torch.arange(1437)[kv.rank() :: kv.size()][: 1437 // kv.size()]


def train(trial: optuna.Trial | None, rate: float, width: int) -> float | None:
    """The accuracy on held-out images; None if rank 0, which has the trial, ended it early."""
    torch.manual_seed(1)
    first, last = torch.nn.Linear(64, width), torch.nn.Linear(width, 10)
    net = torch.nn.Sequential(first, torch.nn.ReLU(), last)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    optimizer = kv.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    for epoch in range(EPOCHS):
        for part in mine.split(32):
            optimizer.zero_grad()
            functional.cross_entropy(net(images[part]), labels[part]).backward()
            optimizer.step()
        accuracy = (net(images[1437:]).argmax(1) == labels[1437:]).float().mean().item()
        if trial is not None:
            trial.report(accuracy, epoch)
        if kv.broadcast_object(trial is not None and trial.should_prune()):
            return None
    return accuracy


pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
sampler = optuna.samplers.TPESampler(seed=3)
study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
for _ in range(TRIALS):
    trial = study.ask() if kv.rank() == 0 else None
    chosen = trial and {
        "rate": trial.suggest_float("rate", 1e-3, 0.5, log=True),
        "width": trial.suggest_int("width", 4, 64, log=True),
    }
    chosen = kv.broadcast_object(chosen)  # the same on every rank
    accuracy = train(trial, **chosen)
    print(f"rank {kv.rank()} of {kv.size()}: {chosen} -> {accuracy}")
    if trial is not None:
        ended_early = optuna.trial.TrialState.PRUNED if accuracy is None else None
        study.tell(trial, accuracy, state=ended_early)
if kv.rank() == 0:
    print(f"best of {len(study.trials)}: accuracy {study.best_value:.3f}, {study.best_params}")
