"""A replica group of bench/slow_links.py with torchft's DiLoCo: ``slow_links_torchft.py OPTIONS``.

Runs in an environment of its own (bench/elastic.py says how to make it), as torchft's documentation
shows: a manager over gloo with synchronous quorum. Prints JSON: the bytes that this host's
interface has sent, and in how many rounds.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
from typing import Any

import machine
import torch
from models import Transformer
from text_model import LEARNING_RATE, Texts, char_transformer, loss_of
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main() -> None:
    """Train; the first round warms up: the managers meet in it."""
    from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

    options: dict[str, Any] = json.loads(sys.argv[1])
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    torch.manual_seed(options["seed"])
    model, texts, host = char_transformer(), Texts(), socket.gethostname()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=options["size"],
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=options["lighthouse"],
        replica_id=f"r{options['rank']}_",
        hostname=host,
    )
    inner = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    parts = _fragments(model, options["fragments"])
    outer = [torch.optim.SGD(part.parameters(), **options["outer"]) for part in parts]
    every = options["sync_every"]
    before = 0
    with DiLoCo(
        manager, parts, inner, outer, sync_every=every, fragment_sync_delay=options["delay"]
    ):
        for step in range(options["steps"]):
            if step == every:
                before = machine.sent_bytes()
            inner.zero_grad()
            batch = texts.batch(options["seed"], options["rank"], step, options["texts"])
            torch.autograd.backward(loss_of(model, batch))
            inner.step()
    sent = machine.sent_bytes() - before
    print(json.dumps({"sent": sent, "rounds": options["steps"] // every - 1}), flush=True)
    manager.shutdown(wait=False)


def _fragments(model: Transformer, count: int) -> list[nn.Module]:
    """Return modules that have all parameters between them: torchft takes no list of parameters."""
    if count == 1:
        return [model]
    position = nn.ParameterList([model.position])
    return [
        nn.ModuleList([model.embedding, model.layers[0], position]),
        nn.ModuleList([model.layers[1], model.norm, model.head]),
    ]


if __name__ == "__main__":
    main()
