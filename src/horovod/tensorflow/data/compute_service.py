"""Horovod's names for a tf.data service between jobs; see kolovod.tensorflow.data_service."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

import horovod.tensorflow as hvd
from kolovod.errors import FrontEndArgumentError
from kolovod.net.addresses import endpoint, split_addresses
from kolovod.tensorflow import data_service
from kolovod.tensorflow.directory import DirectoryClient

__all__ = [
    "ComputeClient",
    "TfDataServiceConfig",
    "compute_worker_fn",
    "send_to_data_service",
    "tf_data_service",
]

_WAIT_S = 600.0


class ComputeClient(DirectoryClient):
    """Finds the servers of a service, says that there are more, and has it shut down."""

    def __init__(
        self,
        compute_addresses: Mapping[str, Sequence[tuple[str, int]]],
        key: bytes,
        verbose: int = 1,
        timeout: float = 60.0,
    ) -> None:
        """The first two are ``addresses`` and ``key`` of a TfDataServiceConfig."""
        super().__init__(_places(compute_addresses), key.hex(), timeout)


def _places(addresses: Mapping[str, Sequence[tuple[str, int]]]) -> str:
    return ",".join(endpoint(*place) for listed in addresses.values() for place in listed)


@dataclass(frozen=True)
class TfDataServiceConfig:
    """The place of a service. ``addresses``: (ip, port) by interface; ``timeout`` in seconds."""

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Mapping[str, Sequence[tuple[str, int]]]
    key: bytes
    timeout: int = 60

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Return the client that finds its servers, and has the service shut down."""
        return ComputeClient(self.addresses, self.key, verbose, self.timeout)

    def config(self) -> data_service.DataServiceConfig:
        """Return the configuration as Kolovod has it."""
        return data_service.DataServiceConfig(
            self.dispatchers,
            self.workers_per_dispatcher,
            self.dispatcher_side,
            _places(self.addresses),
            self.key.hex(),
            self.timeout,
        )

    @staticmethod
    def of(config: data_service.DataServiceConfig) -> TfDataServiceConfig:
        """Return the configuration as Horovod has it."""
        return TfDataServiceConfig(
            config.dispatchers,
            config.workers_per_dispatcher,
            config.dispatcher_side,
            {"all": split_addresses(config.address)},
            bytes.fromhex(config.secret),
            int(config.timeout_s),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a dict that can be written as JSON."""
        return {**asdict(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """Make a configuration from what ``to_dict`` returned."""
        addresses = {
            name: [(str(host), int(port)) for host, port in listed]
            for name, listed in config["addresses"].items()
        }
        changed = {"addresses": addresses, "key": bytes.fromhex(config["key"])}
        return TfDataServiceConfig(**{**config, **changed})

    def write(self, filename: str) -> None:
        """Write it to a file that this user alone may read."""
        data_service.write_privately(filename, self.to_dict())

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        """Read it from that file; ``wait_for_file_creation``: which may come within ten minutes."""
        found = data_service.read_when_there(filename, _WAIT_S if wait_for_file_creation else 0.0)
        try:
            return TfDataServiceConfig.from_dict(found)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FrontEndArgumentError(
                f"{filename} does not describe a data service: {error!r}"
            ) from error


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Yield the address of the dispatcher for this rank of those that train."""
    with data_service.data_service(compute_config.config(), rank) as address:
        yield address


def send_to_data_service(
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """``dataset``, computed by the service. RuntimeError for dispatchers on the training side."""
    config = compute_config.config()
    return data_service.distribute(
        dataset, config, rank, size, processing_mode, reuse_dataset, round_robin
    )


tf.data.Dataset.send_to_data_service = send_to_data_service  # scripts call it as a method


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Be this rank's worker of the service, until that shuts down."""
    hvd.init()
    data_service.run_worker(compute_config.config(), hvd.rank())
