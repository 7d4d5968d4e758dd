"""Jobs whose ranks may end, come and leave while they run, and lose no step by it.

::

    import kolovod.torch as kv
    from kolovod import elastic

    kv.init()
    optimizer = kv.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = elastic.State(model=model, optimizer=optimizer, step=0)

    @elastic.run
    def train(state):
        while state.step < 1000:
            ...
            optimizer.step()
            state.step += 1
            state.commit()

    train(state)

and ``kolovod run --elastic -np 4 python train.py``. Who decides, and why nothing is lost, is in
``coordination.consensus`` and ``steps``.
"""

from kolovod.elastic.file_parts import FileParts
from kolovod.elastic.membership_log import LoggedStep, MembershipLog
from kolovod.elastic.process_sets import ProcessSet
from kolovod.elastic.running import run
from kolovod.elastic.sampler import ElasticSampler
from kolovod.elastic.sampling import global_batch
from kolovod.elastic.state import State, share_by
from kolovod.elastic.steps import exactly
from kolovod.elastic.stream import ElasticStream

__all__ = [
    "ElasticSampler",
    "ElasticStream",
    "FileParts",
    "LoggedStep",
    "MembershipLog",
    "ProcessSet",
    "State",
    "exactly",
    "global_batch",
    "run",
    "share_by",
]
