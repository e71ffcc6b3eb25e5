"""Small models of the shapes that the rewrite has to meet, with batches.

Every forward returns a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Batches = list[tuple[Any, ...]]
VOCABULARY = 19


class Mlp(nn.Module):
    """Plain attributes and a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.last = nn.Linear(8, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(torch.relu(self.first(x)))).square().mean()  # type: ignore[no-any-return]


class ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


class Cnn(nn.Module):
    """A residual net with running statistics, blocks in nested Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = nn.Sequential(ConvBlock(4), ConvBlock(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layer1(self.stem(x)).mean((2, 3))), y)


class GptBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Tied embedding and head.

    The blocks may be checkpointed, or a graph break may come between the blocks and the head.
    """

    def __init__(self, checkpointed: bool = False, broken: bool = False, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.h = nn.ModuleList(GptBlock(width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight
        self.checkpointed, self.broken = checkpointed, broken

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        if self.broken:
            torch._dynamo.graph_break()
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Adapted(nn.Module):
    """A frozen base with low-rank adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(6, 2, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2, 6, bias=False) for _ in range(2))
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + up(down(x)))
        return x.square().mean()


class Autocast(nn.Module):
    """fp32 parameters that are used through casts to bfloat16."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            return self.inner(tokens)  # type: ignore[no-any-return]


def mlp() -> tuple[nn.Module, Batches]:
    return Mlp(), [(torch.randn(5, 6),) for _ in range(3)]


def cnn() -> tuple[nn.Module, Batches]:
    return Cnn(), [(torch.randn(2, 3, 6, 6), torch.randint(0, 3, (2,))) for _ in range(3)]


def gpt(length: int = 6, **options: Any) -> tuple[nn.Module, Batches]:
    return Gpt(**options), [(torch.randint(0, VOCABULARY, (2, length)),) for _ in range(3)]


def checkpointed_gpt() -> tuple[nn.Module, Batches]:
    return gpt(checkpointed=True)


def broken_gpt() -> tuple[nn.Module, Batches]:
    return gpt(broken=True)


def adapted() -> tuple[nn.Module, Batches]:
    return Adapted(), [(torch.randn(5, 6),) for _ in range(3)]


def bf16_gpt() -> tuple[nn.Module, Batches]:
    model, batches = gpt()
    return model.to(torch.bfloat16), batches


def autocast_gpt() -> tuple[nn.Module, Batches]:
    model, batches = gpt()
    return Autocast(model), batches


CASES: dict[str, Callable[[], tuple[nn.Module, Batches]]] = {
    "mlp": mlp,
    "cnn": cnn,
    "gpt": gpt,
    "checkpointed gpt": checkpointed_gpt,
    "adapters": adapted,
    "bf16 gpt": bf16_gpt,
    "autocast gpt": autocast_gpt,
}
