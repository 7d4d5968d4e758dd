"""Three nets of different shapes of gradient, written in plain torch.

| name | parameters, tensors | what it stresses |
|---|---|---|
| resnet50 | 25.6 M, 161 | bandwidth: 102 MB of gradients a step |
| transformer | 9.7 M, 66 | a mix, with large matrices late in the backward pass |
| mlp | 0.5 M, 500 | the cost of each tensor: 500 gradients of 2 to 8 KB |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with a shortcut; four times ``width`` channels leave."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()

        def convolution(inputs: int, outputs: int, kernel: int, step: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, kernel, step, padding=kernel // 2, bias=False),
                nn.BatchNorm2d(outputs),
            )

        self.reduce = convolution(channels, width, 1, 1)
        self.spatial = convolution(width, width, 3, stride)
        self.expand = convolution(width, 4 * width, 1, 1)
        same = stride == 1 and channels == 4 * width
        self.shortcut = nn.Identity() if same else convolution(channels, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, H, W] -> [N, 4 * width, H / stride, W / stride]."""
        hidden = torch.relu(self.spatial(torch.relu(self.reduce(x))))
        return torch.relu(self.expand(hidden) + self.shortcut(x))


def resnet50() -> nn.Module:
    """Return a residual net of 50 layers: [N, 3, 64, 64] -> [N, 1000]."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 2 if block == 0 and stage > 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class Transformer(nn.Module):
    """Encoder layers over embedded tokens: [N, positions] -> [N, tokens, positions]."""

    def __init__(
        self,
        width: int = 384,
        layers: int = 5,
        heads: int = 6,
        tokens: int = 1024,
        positions: int = 64,
        *,
        is_causal: bool = False,
    ) -> None:
        super().__init__()
        self._is_causal = is_causal
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(0.02 * torch.randn(positions, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next token, with the classes second as cross_entropy wants them."""
        causal = self._is_causal
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if causal else None
        hidden = self.embedding(x) + self.position
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=causal)
        scores: Tensor = self.head(self.norm(hidden))
        return scores.transpose(1, 2)


class Mlp(nn.Module):
    """250 small layers, each with a shortcut: [N, 44] -> [N, 44]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(44, 44) for _ in range(250))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` and what each layer makes of it, added."""
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return x


def images(generator: torch.Generator) -> Batch:
    """Return 4 random pictures of 64x64 with classes."""
    pictures = torch.randn(4, 3, 64, 64, generator=generator)
    return pictures, torch.randint(0, 1000, (4,), generator=generator)


def tokens(generator: torch.Generator) -> Batch:
    """Return 4 random texts of 64 tokens, each token to be followed by a random one."""
    text = torch.randint(0, 1024, (4, 65), generator=generator)
    return text[:, :-1], text[:, 1:]


def vectors(generator: torch.Generator) -> Batch:
    """Return 32 random vectors with classes."""
    inputs = torch.randn(32, 44, generator=generator)
    return inputs, torch.randint(0, 44, (32,), generator=generator)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Batch]]] = {
    "resnet50": (resnet50, images),
    "transformer": (Transformer, tokens),
    "mlp": (Mlp, vectors),
}
