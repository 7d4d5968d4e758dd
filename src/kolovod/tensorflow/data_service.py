"""A tf.data service: processes of their own prepare data for those that train.

One job computes: its ranks run a worker of tf.data each, some of them a dispatcher, too, and one
writes a file that says where they are. The other job trains: its ranks read that file, and send
their dataset there::

    kolovod run -np 4 python -m kolovod.tensorflow.data_service service.json
    kolovod run -np 2 python train.py

    config = DataServiceConfig.read("service.json", wait_s=60)
    dataset = distribute(dataset, config, kv.rank())
    ...
    config.client().shutdown()  # on one rank, when no rank reads any more

tf.data's own servers have no authentication: whoever reaches their ports can use them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import tensorflow as tf

from kolovod.config import load
from kolovod.core import rank_info
from kolovod.errors import (
    DataServiceError,
    FrontEndArgumentError,
)
from kolovod.lifecycle import init
from kolovod.net.addresses import LOOPBACK, endpoint, interface_to, own_addresses
from kolovod.net.channel import new_secret
from kolovod.numpy import broadcast_object
from kolovod.tensorflow.directory import Directory, DirectoryClient

SIDES = ("compute", "training")
_POLL_S = 0.1


@dataclass(frozen=True)
class DataServiceConfig:
    """The facts that ranks need to use a data service; it holds a secret."""

    dispatchers: int
    """1 for all ranks that train; else as many as there are of these, one for each."""
    workers_per_dispatcher: int
    dispatcher_side: str
    """The job in which dispatchers run: "compute" or "training"."""
    address: str
    """The addresses of the directory, "ip:port,ip:port"."""
    secret: str
    timeout_s: float = 60.0
    """The seconds to wait for servers to start."""

    def __post_init__(self) -> None:
        """Raise InvalidArgumentError for what cannot work."""
        for name in ("dispatchers", "workers_per_dispatcher"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise FrontEndArgumentError(f"{name} is {getattr(self, name)!r}: give an int >= 1")
        if self.dispatcher_side not in SIDES:
            raise FrontEndArgumentError(
                f"dispatcher_side is {self.dispatcher_side!r}: give 'compute' or 'training'"
            )

    def client(self) -> DirectoryClient:
        """Return a client that finds the service's servers."""
        return DirectoryClient(self.address, self.secret, self.timeout_s)

    def write(self, path: str | Path) -> None:
        """Write it to a file that this user alone may read; readers never see a part of it."""
        write_privately(path, asdict(self))

    @staticmethod
    def read(path: str | Path, wait_s: float = 0.0) -> DataServiceConfig:
        """Read it from that file, which may come within ``wait_s``.

        Raises BootstrapError if it does not, or has another content.
        """
        found = read_when_there(path, wait_s)
        names = {field.name for field in fields(DataServiceConfig)}
        if not isinstance(found, dict) or set(found) != names:
            raise DataServiceError(f"{path} does not describe a data service")
        return DataServiceConfig(**found)


def serve(
    announce: Callable[[DataServiceConfig], None],
    dispatchers: int = 1,
    dispatcher_side: str = "compute",
    timeout_s: float = 60.0,
) -> None:
    """Compute until somebody calls ``shutdown`` of the config's client.

    All ranks of the computing job call it after ``init()``; rank 0 calls ``announce``, as a rule to
    write the config to a file. Raises InvalidArgumentError, on every rank, for what cannot work;
    BootstrapError.
    """
    size = rank_info.size()
    if type(dispatchers) is not int or dispatchers < 1 or size % dispatchers:
        raise FrontEndArgumentError(
            f"dispatchers is {dispatchers!r}: the number of ranks, {size}, must be a multiple of it"
        )
    with contextlib.ExitStack() as stack:
        config = None
        if rank_info.rank() == 0:
            workers, secret = size // dispatchers, new_secret()
            hosts = [*own_addresses(load(os.environ).interface_names), LOOPBACK]
            directory = Directory(dispatchers, workers, secret, list(dict.fromkeys(hosts)))
            stack.callback(directory.close)
            config = DataServiceConfig(
                dispatchers, workers, dispatcher_side, directory.address, secret, timeout_s
            )
            announce(config)
        run_worker(broadcast_object(config), rank_info.rank())


def run_worker(config: DataServiceConfig, index: int) -> None:
    """Run worker ``index`` of a service until its directory closes.

    With dispatchers on the computing side, the first of each dispatcher's workers runs that, too.
    """
    client = config.client()
    number, place = divmod(index, config.workers_per_dispatcher)
    with contextlib.ExitStack() as stack:
        if config.dispatcher_side == "compute" and place == 0:
            stack.enter_context(_dispatcher(config, number))
        address = client.wait_for_dispatcher_registration(number)
        host = interface_to(config.address)
        server = tf.data.experimental.service.WorkerServer(
            tf.data.experimental.service.WorkerConfig(
                dispatcher_address=address.removeprefix("grpc://"),
                worker_address=f"[{host}]:%port%" if ":" in host else f"{host}:%port%",
                heartbeat_interval_ms=1000,
                dispatcher_timeout_ms=int(1000 * config.timeout_s),
            )
        )
        stack.callback(_stop, server)
        client.register_worker_for_dispatcher(number, index)
        client.wait_for_shutdown()


@contextlib.contextmanager
def data_service(config: DataServiceConfig, rank: int) -> Iterator[str]:
    """Yield the address of the dispatcher for this ``rank`` of those that train.

    With dispatchers on the training side it runs here: on rank 0, or with several on each rank; it
    ends with the block. Raises InvalidArgumentError if there is none for this rank,
    StartTimeoutError if the service is not there in time.
    """
    if not 0 <= rank < config.dispatchers and config.dispatchers > 1:
        raise FrontEndArgumentError(
            f"rank {rank} trains, but the service has {config.dispatchers} dispatchers, one for "
            "each that trains: start it with --dispatchers 1, or as many as there are ranks"
        )
    client = config.client()
    number = rank if config.dispatchers > 1 else 0
    with contextlib.ExitStack() as stack:
        if config.dispatcher_side == "training" and rank == number:
            stack.enter_context(_dispatcher(config, number))
        address = client.wait_for_dispatcher_registration(number)
        client.wait_for_dispatcher_worker_registration(number)
        yield address


def distribute(
    dataset: tf.data.Dataset,
    config: DataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """``dataset``, computed by the service, for ``rank`` of the ``size`` that train.

    ``processing_mode``: as of tf.data.experimental.service.distribute. ``reuse_dataset``: ranks of
    one dispatcher share one iteration of the data; ``round_robin``: each gets a batch in turn.
    Raises InvalidArgumentError for dispatchers on the training side: use ``data_service``.
    """
    if config.dispatcher_side == "training":
        raise FrontEndArgumentError(
            "the dispatcher is on the training side and must live as long as the dataset is read: "
            "use tf.data.experimental.service.distribute within data_service()"
        )
    in_turn = reuse_dataset and round_robin
    if in_turn and size is None:
        raise FrontEndArgumentError("round_robin goes through all that train: give size, how many")
    with data_service(config, rank) as address:
        distributed = tf.data.experimental.service.distribute(
            processing_mode=processing_mode,
            service=address,
            job_name="job" if reuse_dataset else None,
            consumer_index=rank if in_turn else None,
            num_consumers=size if in_turn else None,
        )
        return dataset.apply(distributed)


@contextlib.contextmanager
def _dispatcher(config: DataServiceConfig, number: int) -> Iterator[None]:
    server = tf.data.experimental.service.DispatchServer()
    try:
        port = int(server.target.rsplit(":", 1)[1])
        address = f"grpc://{endpoint(interface_to(config.address), port)}"
        config.client().register_dispatcher(number, address)
        yield
    finally:
        _stop(server)


def _stop(server: Any) -> None:
    server._stop()  # there is no public way in all versions


def write_privately(path: str | Path, content: Any) -> None:
    """Write JSON to a file that this user alone may read; readers never see a part of it."""
    target = Path(path).absolute()
    fd, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(content, file)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def read_when_there(path: str | Path, wait_s: float) -> Any:
    """The JSON in a file, which may come within ``wait_s``. Raises BootstrapError."""
    deadline = time.monotonic() + wait_s
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise DataServiceError(f"the data service's {path} cannot be read: {error}") from error


def arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments that the command line of a computing job takes."""
    parser.add_argument("configfile", help="the file to write, for those who train")
    parser.add_argument("--dispatchers", type=int, default=1, help="1, or one for each that trains")
    parser.add_argument(
        "--dispatcher-side", choices=SIDES, default="compute", help="where dispatchers run"
    )
    parser.add_argument("--timeout", type=float, default=60, help="seconds for servers to start")
    return parser


def main() -> None:
    """Be a rank of the job that computes."""
    given = arguments(argparse.ArgumentParser(description="A rank of a data service.")).parse_args()
    init()
    serve(
        lambda config: config.write(given.configfile),
        given.dispatchers,
        given.dispatcher_side,
        given.timeout,
    )


if __name__ == "__main__":
    main()
