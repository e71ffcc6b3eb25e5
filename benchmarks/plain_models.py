"""Models of the zoo that transformers does not have, in plain PyTorch.

Each takes a batch by name and returns its loss, as a model of one's own does.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F


class DitBlock(nn.Module):
    """Attention and an MLP, both shifted, scaled and gated by the condition (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(condition)[:, None].chunk(6, -1)
        query, key, value = self.qkv(self.norm_1(x) * (1 + scale_1) + shift_1).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + gate_1 * self.out(attended)
        return x + gate_2 * self.mlp(self.norm_2(x) * (1 + scale_2) + shift_2)  # type: ignore[no-any-return]


class Dit(nn.Module):
    """A diffusion transformer on latents [batch, channels, side, side], after DiT.

    It learns the noise that was added at times [batch] to latents of classes [batch].
    """

    frequencies: torch.Tensor

    def __init__(self, width: int, layers: int, heads: int, side: int, channels: int = 4, patch: int = 2, classes: int = 1000) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.kind = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(DitBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.head = nn.Linear(width, patch * patch * channels)
        self.register_buffer("frequencies", torch.exp(torch.linspace(0.0, -9.0, width // 2)), persistent=False)

    def forward(self, latents: torch.Tensor, noise: torch.Tensor, times: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        angles = times[:, None] * self.frequencies
        condition = self.time(torch.cat([angles.cos(), angles.sin()], -1)) + self.kind(classes)
        x = self.embed(latents + noise).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        wanted = F.pixel_unshuffle(noise, self.patch).flatten(2).transpose(1, 2)
        return F.mse_loss(self.head(self.norm(x)), wanted)


class Dlrm(nn.Module):
    """A recommender: looked-up rows of tables and an MLP of numbers, multiplied pair by pair."""

    pairs: torch.Tensor

    def __init__(self, tables: int, rows: int, width: int, hidden: int, numbers: int = 13) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = _mlp(numbers, hidden, hidden // 2, width)
        pairs = torch.triu_indices(tables + 1, tables + 1, 1)
        self.register_buffer("pairs", pairs, persistent=False)
        self.top = _mlp(width + pairs.shape[1], hidden, hidden // 2, 1)

    def forward(self, numbers: torch.Tensor, indices: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        """`indices` [tables, batch, rows looked up]."""
        dense = self.bottom(numbers)
        found = torch.stack([dense, *(table(rows) for table, rows in zip(self.tables, indices, strict=True))], 1)
        first, second = self.pairs
        products = (found @ found.transpose(1, 2))[:, first, second]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([dense, products], 1))[:, 0], clicked)


class Readout(nn.Module):
    """The next token from each state, and the loss."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(states[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class LstmLanguageModel(nn.Module):
    """An embedding, torch's own LSTM and a readout.

    torch.compile leaves a function that calls an LSTM to eager code, all of it, and compiles the
    readout.
    """

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.readout = Readout(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embed(tokens))
        return self.readout(states, tokens)  # type: ignore[no-any-return]


class MessagePassing(nn.Module):
    """Each edge's message from both of its nodes, summed at its end, changes that node."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = _mlp(2 * width, width, width)
        self.change = _mlp(2 * width, width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, nodes: torch.Tensor, begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        messages = self.message(torch.cat([nodes[begin], nodes[end]], -1))
        received = torch.zeros_like(nodes).index_add(0, end, messages)
        return nodes + self.change(torch.cat([self.norm(nodes), received], -1))  # type: ignore[no-any-return]


class GraphNetwork(nn.Module):
    """Layers of message passing between nodes with features, and a class for each node."""

    def __init__(self, features: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.layers = nn.ModuleList(MessagePassing(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, features: torch.Tensor, edges: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """`edges` [2, edges]: the numbers of the nodes at which each begins and ends."""
        nodes = self.embed(features)
        for layer in self.layers:
            nodes = layer(nodes, *edges)
        return F.cross_entropy(self.head(nodes), classes)


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for narrow, wide in itertools.pairwise(widths):
        layers += [nn.Linear(narrow, wide), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
