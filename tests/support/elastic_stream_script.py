"""An elastic job that reads a stream: which samples count, while its processes kill themselves.

Run by the launcher: ``elastic_stream_script.py KIND EPOCHS 2:0:3,0:1:5``: the process that begins
in slot 2 ends in epoch 0 in the middle of the step after three, that in slot 0 in epoch 1 after
five.
``KIND``: "files", a FileParts alone, "recomputed", the same where a step is computed again, or
"loader", in a StatefulDataLoader with two workers. A
process that comes to the end prints one line of JSON: how often each sample of each epoch counts in
its results.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import kolovod.numpy as kv
from kolovod import elastic

FILES = [3, 9, 0, 4, 2, 15, 1, 3, 12, 6, 4, 8]
"""Files that are numbers, and have so many samples."""
PARTS, BATCH = 7, 2
SAMPLES = sum(FILES)


def read(file: int) -> Iterator[int]:
    """The numbers of the file's samples."""
    first = sum(FILES[:file])
    return iter(range(first, first + FILES[file]))


def files(part: int, parts: int, epoch: int) -> Any:
    return elastic.FileParts(range(len(FILES)), read, part, parts, epoch, batch_size=BATCH)


def loader(part: int, parts: int, epoch: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset: Any = elastic.FileParts(range(len(FILES)), read, part, parts, epoch)
    return StatefulDataLoader(dataset, BATCH, num_workers=2)


MAKES: dict[str, Callable[[int, int, int], Any]] = {
    "files": files,
    "recomputed": files,
    "loader": loader,
}


def ends_of(text: str) -> set[tuple[int, int]]:
    """Epoch and step of those ends that are this process's."""
    slot, begins = int(os.environ["KOLOVOD_SLOT"]), bool(os.environ["KOLOVOD_FIRST_HOSTS"])
    plan = [tuple(map(int, part.split(":"))) for part in text.split(",") if part]
    return {(epoch, step) for of, epoch, step in plan if of == slot and begins}


def main() -> None:
    kind, epochs, ends = sys.argv[1], int(sys.argv[2]), ends_of(sys.argv[3])
    if kind == "loader":
        import torch  # noqa: F401  (others would wait for it later)
    kv.init()
    stream = elastic.ElasticStream(MAKES[kind], PARTS, snapshot_every=2)
    state = elastic.State(stream=stream, epoch=0, used=[])

    @elastic.run(redo="recompute" if kind == "recomputed" else "repeat")
    def train(state: Any) -> None:
        for epoch in range(state.epoch, epochs):
            state.epoch = epoch
            stream.set_epoch(epoch)
            if len(state.used) == epoch:
                state.used.append(np.zeros(SAMPLES))
            for batch, weight in stream.steps():
                if (epoch, stream.steps_done) in ends:
                    os.kill(os.getpid(), signal.SIGKILL)
                mine, samples = np.zeros(SAMPLES), stream.samples
                batch = np.asarray(batch)
                if weight:
                    mine[batch] += 1
                value = weight * float(np.mean(batch))
                used, mean = elastic.exactly(
                    lambda mine=mine, value=value: (
                        kv.allreduce(mine, "used", kv.Sum),
                        float(kv.allreduce(np.array([value]), "mean")[0]),
                    ),
                    counts=True,
                    is_repeatable=kind != "recomputed",
                )
                state.used[epoch] += used
                if used.sum() == samples:  # else a rank was lost, and the mean is that of the rest
                    assert abs(mean - float((used * np.arange(SAMPLES)).sum() / samples)) < 1e-9
                state.commit()

    train(state)
    used = [each.tolist() for each in state.used]
    print(json.dumps({"used": used}), flush=True)


if __name__ == "__main__":
    main()
