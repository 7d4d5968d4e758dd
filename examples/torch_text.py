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
import sysconfig
import time
from pathlib import Path

import torch
from rich.console import Console
from torch.nn import functional

import kolovod.torch as kv

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # anything else becomes a question mark
HELD_OUT = 0.05  # of the text


def positive(text: str) -> int:
    """A number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=300, help="of the optimizer")
    parser.add_argument("--batch-size", type=positive, default=16, help="windows per process")
    parser.add_argument("--accumulate", type=positive, default=1, help="passes in one step")
    parser.add_argument("--context", type=positive, default=64, help="characters in a window")
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--width", type=positive, default=128, help="a multiple of 32")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate for one process")
    parser.add_argument("--warmup", type=positive, default=50, help="steps to the full rate")
    parser.add_argument("--characters", type=positive, default=2_000_000, help="of text to read")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--compression", choices=["none", "fp16", "bf16"], default="none")
    parser.add_argument("--report-every", type=positive, default=50, help="steps")
    parser.add_argument("--sample", type=int, default=0, help="characters to write at the end")
    return parser.parse_args()


def load_text(characters: int) -> torch.Tensor:
    """The sources in alphabetical order as numbers of ALPHABET, the same on every rank."""
    parts, left = [], characters
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        part = path.read_text(encoding="utf-8", errors="replace")[:left]
        parts.append(part)
        left -= len(part)
        if left == 0:
            break
    numbers = {character: number for number, character in enumerate(ALPHABET)}
    unknown = numbers["?"]
    return torch.tensor([numbers.get(character, unknown) for character in "".join(parts)])


class Transformer(torch.nn.Module):
    """Predicts every next character of a window from those before it."""

    def __init__(self, context: int, layers: int, width: int) -> None:
        """``width``: of the embedding; one head for each 32."""
        super().__init__()
        self.characters = torch.nn.Embedding(len(ALPHABET), width)
        self.positions = torch.nn.Embedding(context, width)
        layer = torch.nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, len(ALPHABET))
        future = torch.nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("future", future, persistent=False)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Logits (batch, length, characters) for ``windows`` (batch, length), of the next ones."""
        length = windows.shape[1]
        hidden = self.characters(windows) + self.positions.weight[:length]
        hidden = self.layers(hidden, mask=self.future[:length, :length], is_causal=True)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class Windows:
    """Random windows of a text, each with the characters that follow."""

    def __init__(self, text: torch.Tensor, context: int, seed: int) -> None:
        """[2] Shard the data: every rank draws windows of its own, from its own ``seed``."""
        self._text, self._context = text, context
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``count`` windows (count, context), and the same one character further on."""
        last = len(self._text) - self._context
        starts = torch.randint(last, (count, 1), generator=self._generator)
        windows = self._text[starts + torch.arange(self._context + 1)]
        return windows[:, :-1], windows[:, 1:]


def loss_of(net: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy, in nats."""
    windows, following = batch
    return functional.cross_entropy(net(windows).flatten(0, 1).float(), following.flatten())


@torch.no_grad()
def bits_per_character(net: torch.nn.Module, held_out: Windows, batches: int, size: int) -> float:
    """On text that the net has not seen, averaged over all ranks' windows."""
    net.eval()
    total = sum(loss_of(net, held_out.draw(size)).item() for _ in range(batches))
    net.train()
    mean = kv.allreduce(torch.tensor(total / batches, dtype=torch.float64), "bits").item()
    return float(mean) / math.log(2)


def train(arguments: argparse.Namespace, console: Console) -> torch.nn.Module:
    """Train, reporting on rank 0."""
    rank, workers = kv.rank(), kv.size()
    text = load_text(arguments.characters)
    cut = int(len(text) * (1 - HELD_OUT))
    training = Windows(text[:cut], arguments.context, arguments.seed + rank)
    held_out = Windows(text[cut:], arguments.context, arguments.seed + 1000 + rank)
    torch.manual_seed(arguments.seed + rank)
    net = Transformer(arguments.context, arguments.layers, arguments.width)
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
    console.print(f"{count:,} parameters, {cut:,} characters, {workers} process(es)")
    started = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        optimizer.zero_grad()
        for _ in range(arguments.accumulate):
            with narrow:
                loss = loss_of(net, training.draw(arguments.batch_size)) / arguments.accumulate
            loss.backward()
        optimizer.step()
        scheduler.step()
        if step % arguments.report_every == 0 or step == arguments.steps:
            bits = bits_per_character(net, held_out, 8, arguments.batch_size)
            seen = step * workers * arguments.accumulate * arguments.batch_size * arguments.context
            rate = seen / (time.perf_counter() - started)
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
    return "".join(ALPHABET[number] for number in numbers[1:])


def main() -> None:
    """Train; with --sample, show what the net writes."""
    arguments = parse_arguments()
    # [1] Join the other processes; without the launcher this is a world of one.
    kv.init()
    console = Console(quiet=kv.rank() != 0, highlight=False, soft_wrap=True)
    net = train(arguments, console)
    if arguments.sample > 0 and kv.rank() == 0:
        print(write(net, arguments.sample, arguments.context, arguments.seed))
    kv.shutdown()


if __name__ == "__main__":
    main()
