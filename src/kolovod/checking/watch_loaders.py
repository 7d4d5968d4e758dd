"""Watches what PyTorch's DataLoaders yield, and the samplers that they ask."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data import dataloader as of_torch

from kolovod.checking.digests import digest_of, text_digest
from kolovod.checking.facts import Loader
from kolovod.checking.places import script_line
from kolovod.checking.recorder import Recorder

__all__ = ["begin", "step_ends"]

_MOST_EPOCHS, _MOST_BATCHES = 8, 1000  # of which digests are kept
_SHARDED = ("distributed", "shard", "elasticsampler")  # in names of classes
_yielded: list[Loader] = []
"""Those that have given a batch with gradients enabled since the last step."""


def begin(recorder: Recorder, to_array: Callable[[Any], Any]) -> None:
    """Begin to watch: PyTorch is there."""
    _watch_iteration(recorder)
    _watch_batches(recorder, to_array)
    _watch_epochs(DistributedSampler)


def step_ends() -> None:
    """An optimizer has stepped: by what these loaders have given."""
    for loader in _yielded:
        loader.trains += 1
    _yielded.clear()


def _watch_iteration(recorder: Recorder) -> None:
    facts: weakref.WeakKeyDictionary[Any, Loader] = weakref.WeakKeyDictionary()
    iterate: Any = DataLoader.__iter__
    of_loader: Any = DataLoader

    def iterating(self: Any) -> Any:
        kept = getattr(self, "_iterator", None)  # with persistent workers
        if kept is not None:
            kept._kolovod_order = []
        iterator = iterate(self)
        iterator._kolovod_given = 0
        if recorder.is_on:
            fact = facts.get(self)
            if fact is None:
                fact = facts[self] = _described(self, script_line(sys._getframe(1)))
                recorder.facts.loaders.append(fact)
            iterator._kolovod_fact = fact
            if len(fact.batches) < _MOST_EPOCHS:
                fact.orders.append(iterator.__dict__.setdefault("_kolovod_order", []))
                fact.batches.append([])
        return iterator

    of_loader.__iter__ = iterating


def _described(loader: Any, line: str) -> Loader:
    sampler = _sampler_of(loader)
    fact = Loader(line, type(loader).__name__)
    try:
        fact.length = len(loader)
    except TypeError:  # of an iterable data set
        fact.length = None
    try:
        fact.samples = len(loader.dataset)
    except (AttributeError, TypeError):
        fact.samples = None
    fact.sampler = type(sampler).__name__
    parts = (sampler, loader.batch_sampler, loader)
    names = " ".join(type(part).__name__ for part in parts).lower()
    fact.is_sharded = any(word in names for word in _SHARDED)
    fact.is_sharded |= getattr(sampler, "num_replicas", 1) > 1
    if hasattr(sampler, "set_epoch"):
        fact.shuffles_by_epoch = bool(getattr(sampler, "shuffle", True))
        _watch_epochs(type(sampler))
        fact.epochs_set = sampler.__dict__.setdefault("_kolovod_epochs", [])
    return fact


def _sampler_of(loader: Any) -> Any:
    return getattr(loader.batch_sampler, "sampler", None) or loader.sampler


def _watch_batches(recorder: Recorder, to_array: Callable[[Any], Any]) -> None:
    of_iterator: Any = of_torch._BaseDataLoaderIter
    advance, choose = of_iterator.__next__, of_iterator._next_index

    def advancing(self: Any) -> Any:
        given = self.__dict__.get("_kolovod_given", 0)
        if given >= recorder.most_batches and recorder.is_on:
            raise StopIteration
        batch = advance(self)
        self._kolovod_given = given + 1
        fact = self.__dict__.get("_kolovod_fact")
        if fact is not None and recorder.is_on and torch.is_grad_enabled():
            if fact.batches and len(fact.batches[-1]) < _MOST_BATCHES:
                fact.batches[-1].append(digest_of(batch, to_array))
            if not any(each is fact for each in _yielded):
                _yielded.append(fact)
        return batch

    def choosing(self: Any) -> Any:
        indices = choose(self)
        order = self.__dict__.setdefault("_kolovod_order", [])
        if len(order) < _MOST_BATCHES:
            known = isinstance(indices, list | int) and self._dataset_kind == 0  # a map
            order.append(text_digest(repr(indices)) if known else "")
        return indices

    of_iterator.__next__, of_iterator._next_index = advancing, choosing


def _watch_epochs(kind: Any) -> None:
    """Calls of ``set_epoch`` of a class of samplers are noted on the sampler."""
    set_epoch = kind.set_epoch
    if hasattr(set_epoch, "_kolovod_is_watched"):
        return

    def setting(self: Any, epoch: int) -> None:
        noted = self.__dict__.setdefault("_kolovod_epochs", [])
        if noted[-1:] != [epoch]:  # a class may call that which it has inherited
            noted.append(int(epoch))
        set_epoch(self, epoch)

    setting._kolovod_is_watched = True  # type: ignore[attr-defined]
    kind.set_epoch = setting
