"""A rank of the job that computes: ``horovodrun -np 4 python -m`` this module and a file's name."""

from __future__ import annotations

import argparse

import horovod.tensorflow as hvd
from horovod.tensorflow.data.compute_service import TfDataServiceConfig
from kolovod.tensorflow.data_service import arguments, serve


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: float) -> None:
    """Compute until the service is shut down. Raises ValueError for what cannot work."""
    hvd.init()
    serve(
        lambda config: TfDataServiceConfig.of(config).write(configfile),
        dispatchers,
        dispatcher_side,
        timeout,
    )


if __name__ == "__main__":
    given = arguments(argparse.ArgumentParser(description="A rank of a data service.")).parse_args()
    main(given.dispatchers, given.dispatcher_side, given.configfile, given.timeout)
