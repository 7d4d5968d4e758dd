"""Train on a Spark DataFrame: written as Parquet files, of which each rank reads its row groups.

    python examples/spark_parquet.py                                       # local[2]
    python examples/spark_parquet.py --master 'local-cluster[2,1,1024]'    # two executors

The DataFrame has scikit-learn's handwritten digits, 64 numbers and a label in each row. Files are
in a folder that all hosts share; on one host any folder is. docs/spark.md explains the parts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch.nn import functional

import kolovod.data
import kolovod.spark

BATCH = 32
TEST_EVERY = 5  # of five row groups, one is to test with


def digits(session: SparkSession) -> DataFrame:
    """Columns "pixels" (64 numbers from 0 to 1) and "label"."""
    data = load_digits()
    rows = zip((data.data / 16.0).tolist(), data.target.tolist(), strict=True)
    return session.createDataFrame(list(rows), "pixels array<float>, label int")


def write(frame: DataFrame, folder: str, partitions: int) -> None:
    """One file for each partition, each with row groups small enough to be dealt out."""
    writer = frame.repartition(partitions, "label").write.mode("overwrite")
    writer.option("parquet.block.row.count.limit", 50).parquet(folder)


def row_groups(folder: str) -> list[tuple[Path, int]]:
    """All of the folder's, in the same order on each rank."""
    files = sorted(Path(folder).glob("*.parquet"))
    return [(file, group) for file in files for group in range(pq.ParquetFile(file).num_row_groups)]


def read(groups: list[tuple[Path, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels (rows, 64) and labels (rows,) of these row groups."""
    tables = [pq.ParquetFile(file).read_row_group(group) for file, group in groups]
    pixels = [np.stack(t["pixels"].to_numpy()) for t in tables if t.num_rows]
    labels = [t["label"].to_numpy() for t in tables if t.num_rows]
    return torch.from_numpy(np.concatenate(pixels)), torch.from_numpy(np.concatenate(labels)).long()


def batches(
    pixels: torch.Tensor, labels: torch.Tensor, count: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """``count`` of them, in a new order; a rank with fewer rows begins again."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    order = order.repeat(count * BATCH // len(order) + 1)[: count * BATCH]
    for rows in order.split(BATCH):
        yield pixels[rows], labels[rows]


def train(folder: str, epochs: int) -> tuple[int, float]:
    """On each rank: how many row groups it has read, and the accuracy on those left out."""
    import kolovod.torch as kv

    kv.init()
    groups = row_groups(folder)
    training = [group for at, group in enumerate(groups) if at % TEST_EVERY]
    own = list(kolovod.data.shard(training, kv.rank(), kv.size()))
    pixels, labels = read(own)
    test_pixels, test_labels = read(groups[::TEST_EVERY])
    # All ranks make the same number of steps, though one may have a row group more.
    steps = int(kv.allreduce(torch.tensor([-(-len(labels) // BATCH)]), op=kv.Max))

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    kv.broadcast_parameters(model.state_dict())
    optimizer = kv.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=2e-3), named_parameters=model.named_parameters()
    )
    for epoch in range(epochs):
        for x, y in batches(pixels, labels, steps, seed=epoch * kv.size() + kv.rank()):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if kv.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        right = (model(test_pixels).argmax(1) == test_labels).float().mean()
    return len(own), float(right)


def main() -> None:
    """Write the files, and train."""
    parser = argparse.ArgumentParser(description="Train on a Spark DataFrame.")
    parser.add_argument("--master", default="local[2]", help="of Spark [local[2]]")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", help="where the files go; by default a temporary one")
    options = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else the tasks' is the path's
    session = (
        SparkSession.builder.master(options.master)
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or f"{temporary}/digits"
        write(digits(session), folder, partitions=4)
        results = kolovod.spark.run(train, (folder, options.epochs), num_proc=options.ranks)
    for rank, (count, right) in enumerate(results):
        print(f"rank {rank}: {count} row groups, accuracy {right:.3f}")
    session.stop()


if __name__ == "__main__":
    main()
