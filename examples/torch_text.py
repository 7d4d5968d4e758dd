"""Train a small transformer on the characters of real text: Python's own standard library.

    kolovod run -np 2 python examples/torch_text.py
    python examples/torch_text.py                      # the same script as a single process

``--accumulate 4`` sums the gradients of four passes before they travel, ``--bf16`` computes in
bfloat16, ``--compression bf16`` sends it. What makes a script distributed is marked [1] to [5].
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time

import text_data
import torch
from rich.console import Console
from torch.nn import functional

import kolovod.torch as kv

HELD_OUT_WINDOWS = 128  # of each process


class Transformer(torch.nn.Module):
    """Predicts every next character of a window from those before it."""

    def __init__(self, context: int, layers: int, width: int) -> None:
        """``width``: of the embedding; one head for each 32."""
        super().__init__()
        self.characters = torch.nn.Embedding(len(text_data.ALPHABET), width)
        self.positions = torch.nn.Embedding(context, width)
        layer = torch.nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, len(text_data.ALPHABET))
        future = torch.nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("future", future, persistent=False)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Logits (batch, length, characters) for ``windows`` (batch, length), of the next ones."""
        length = windows.shape[1]
        hidden = self.characters(windows) + self.positions.weight[:length]
        hidden = self.layers(hidden, mask=self.future[:length, :length], is_causal=True)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def loss_of(net: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, in nats, of each character given those before it in its window."""
    logits = net(windows[:, :-1]).flatten(0, 1)
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    return functional.cross_entropy(logits, windows[:, 1:].flatten())


@torch.no_grad()
def bits_per_character(net: torch.nn.Module, windows: torch.Tensor) -> float:
    """Averaged over all ranks' windows."""
    net.eval()
    mean = kv.allreduce(loss_of(net, windows).double(), "bits").item()
    net.train()
    return float(mean) / math.log(2)


def train(arguments: argparse.Namespace, workers: int, console: Console) -> torch.nn.Module:
    """Train as ``workers`` processes do; this world may have as many ranks, or be a single one."""
    training, held_out = text_data.load_text(arguments.characters)
    context, seed = arguments.context, arguments.seed
    shape = (arguments.steps, arguments.accumulate, arguments.batch_size * workers)
    # [2] Shard the data: all ranks draw alike, and each takes its own part.
    own = slice(kv.rank(), None, kv.size())
    windows = torch.tensor(text_data.draw(training, shape, context, seed)[:, :, own]).long()
    test = text_data.draw(held_out, (HELD_OUT_WINDOWS * workers,), context, seed)[own]
    torch.manual_seed(seed + kv.rank())
    net = Transformer(context, arguments.layers, arguments.width)
    # [3] Scale the learning rate: Adam's steps bear the square root of the workers.
    optimizer = torch.optim.AdamW(net.parameters(), lr=arguments.lr * math.sqrt(workers))
    # [4] Average the gradients, after as many passes as were asked for.
    optimizer = kv.DistributedOptimizer(
        optimizer,
        named_parameters=net.named_parameters(),
        compression=getattr(kv.Compression, arguments.compression),
        backward_passes_per_step=arguments.accumulate,
    )
    # [5] Start equal: rank 0's values everywhere.
    kv.broadcast_parameters(net.state_dict())
    kv.broadcast_optimizer_state(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / arguments.warmup)
    )
    narrow = torch.autocast("cpu", torch.bfloat16) if arguments.bf16 else contextlib.nullcontext()
    count = sum(parameter.numel() for parameter in net.parameters())
    console.print(f"{count:,} parameters, {len(training):,} characters, {kv.size()} process(es)")
    started = time.perf_counter()
    for step, passes in enumerate(windows, start=1):
        optimizer.zero_grad()
        for batch in passes:
            with narrow:
                loss = loss_of(net, batch) / arguments.accumulate
            loss.backward()
        optimizer.step()
        scheduler.step()
        if step % arguments.report_every == 0 or step == arguments.steps:
            bits = bits_per_character(net, torch.tensor(test).long())
            rate = step * shape[1] * shape[2] * context / (time.perf_counter() - started)
            console.print(
                f"step {step:4}/{arguments.steps}  {bits:5.3f} bits per character held out"
                f"  {rate:9,.0f} characters/s"
            )
    return net


@torch.no_grad()
def write(net: torch.nn.Module, count: int, context: int, seed: int) -> str:
    """``count`` characters that the net makes up."""
    net.eval()
    generator = torch.Generator().manual_seed(seed)
    numbers = [0]
    for _ in range(count):
        logits = net(torch.tensor([numbers[-context:]]))[0, -1]
        drawn = torch.multinomial(functional.softmax(logits, dim=0), 1, generator=generator)
        numbers.append(int(drawn))
    return "".join(text_data.ALPHABET[number] for number in numbers[1:])


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = text_data.options(__doc__.splitlines()[0])
    parser.add_argument("--accumulate", type=text_data.positive, default=1, help="passes in a step")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--compression", choices=["none", "fp16", "bf16"], default="none")
    parser.add_argument("--sample", type=int, default=0, help="characters to write at the end")
    return parser.parse_args()


def main() -> None:
    """Train; with --sample, show what the net writes."""
    arguments = parse_arguments()
    # [1] Join the other processes; without the launcher this is a world of one.
    kv.init()
    console = Console(quiet=kv.rank() != 0, highlight=False, soft_wrap=True)
    net = train(arguments, kv.size(), console)
    if arguments.sample > 0 and kv.rank() == 0:
        print(write(net, arguments.sample, arguments.context, arguments.seed))
    kv.shutdown()


if __name__ == "__main__":
    main()
