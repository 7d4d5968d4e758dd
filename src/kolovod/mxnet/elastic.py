"""MXNet's blocks, parameters and trainers in the state of an elastic job."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from kolovod.core.objects import Objects
from kolovod.core.world import current
from kolovod.elastic import share_by
from kolovod.errors import FrontEndArgumentError
from kolovod.mxnet.functions import Functions

__all__ = ["share_in_elastic_jobs"]


def share_in_elastic_jobs(functions: Functions) -> None:
    """Let ``kolovod.elastic.State`` hold blocks, parameters and trainers.

    Ranks that join get rank 0's.
    """

    def share_parameters(name: str, value: Any) -> Any:
        """Return ``value``, a block or its ``collect_params()``, with rank 0's values."""
        block = isinstance(value, mx.gluon.Block)
        parameters = value.collect_params() if block else value
        for parameter in parameters.values():
            if parameter._deferred_init:
                raise FrontEndArgumentError(
                    f"state.{name}: {parameter.name} gets its shape at the first forward: call the "
                    "network once before elastic.run, on all ranks"
                )
        # By place: the names that Gluon makes up differ between a rank that joins and the others.
        values = enumerate(parameters.values())
        functions.broadcast_parameters({str(i): parameter for i, parameter in values})
        return value

    def share_trainer(name: str, trainer: Any) -> Any:
        """Give ``trainer`` what rank 0's optimizer keeps, its count of steps included."""
        if not trainer._kv_initialized:
            trainer._init_kvstore()
        updaters = trainer._updaters
        mine = updaters[0].get_states(dump_optimizer=True)
        states = Objects(current).broadcast_object(mine, 0, f"elastic.{name}")
        if states != mine:
            for updater in updaters:
                updater.set_states(states)
                updater.optimizer = updaters[0].optimizer
            trainer._optimizer = updaters[0].optimizer
            trainer._optimizer.param_dict = dict(enumerate(trainer._params))
        return trainer

    share_by(lambda value: isinstance(value, mx.gluon.Block), share_parameters, within=True)
    share_by(lambda value: isinstance(value, mx.gluon.ParameterDict), share_parameters, within=True)
    share_by(lambda value: isinstance(value, mx.gluon.Trainer), share_trainer, within=True)
