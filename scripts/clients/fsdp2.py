"""PyTorch's FSDP2 (``fully_shard``) with a small transformer, over the backend that is named.

    torchrun --nproc-per-node 2 fsdp2.py kolovod FOLDER
    torchrun --nproc-per-node 4 fsdp2.py kolovod FOLDER --replicas 2

Some layers compute in bfloat16, others in float32; with replicas the mesh has two dimensions.
"""

import argparse

import numpy
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WORDS, LENGTH, WIDTH = 40, 12, 48


class Transformer(torch.nn.Module):
    """Guesses at each place what stood three places before."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.places = torch.nn.Parameter(0.5 * torch.randn(LENGTH, WIDTH))
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(3)
        )
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("folder")
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    torch.distributed.init_process_group(options.backend)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shape, names = (size,), ("shards",)
    if options.replicas > 1:
        shape, names = (options.replicas, size // options.replicas), ("replicas", "shards")
    mesh = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(5)
    model = Transformer()
    half = MixedPrecisionPolicy(
        torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    for number, block in enumerate(model.blocks):
        fully_shard(block, mesh=mesh, mp_policy=half if number == 1 else MixedPrecisionPolicy())
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    draw = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        tokens = torch.randint(WORDS, (16, LENGTH), generator=draw)
        outputs = model(tokens)[:, 3:].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(outputs, tokens[:, :-3].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    gathered = torch.zeros(size * len(losses))
    torch.distributed.all_gather_into_tensor(gathered, torch.stack(losses))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    numpy.savez(
        f"{options.folder}/rank{rank}.npz",
        backend=torch.distributed.get_backend(),
        size=size,
        loss=gathered.reshape(size, -1)[:, -5:].mean(),
        **{f"weights.{name}": value.numpy() for name, value in whole.items()},
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
