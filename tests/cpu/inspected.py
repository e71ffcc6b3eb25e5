"""A 32-layer model after some steps, inspected, with what torch itself counted in its graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hytrain_fx
from hytrain_fx.capture.captured_graph import CapturedGraph
from hytrain_fx.explain.graphs.inspection import Inspection
from hytrain_fx.ir.pass_record import PipelineRecord
from hytrain_fx.passes.pipeline import run_passes
from hytrain_fx.session import graphs

from .explained import compiled
from .models import Batches

LAYERS = 32


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Deep(nn.Module):
    def __init__(self, layers: int = LAYERS, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 16, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def deep() -> tuple[nn.Module, Batches]:
    return Deep(), [(torch.randint(0, 16, (2, 3)),)]


@dataclass
class Counted:
    """Nodes of each graph after the passes: how many, and how many of each operator of ours."""

    nodes: dict[str, int] = field(default_factory=dict)
    ops: dict[str, Counter[str]] = field(default_factory=dict)

    def count(self, graph: CapturedGraph) -> None:
        targets = [str(node.target) for node in graph.module.graph.nodes]
        self.nodes[graph.name] = len(targets)
        self.ops[graph.name] = Counter(name.split(".")[1] for name in targets if name.startswith("hytrain_fx."))


@contextmanager
def inspected() -> Iterator[tuple[Inspection, Counted]]:
    """Train the model until a plan in force has layers on the device, on the CPU and on both."""
    counted = Counted()

    def rewrite_counted(graph: CapturedGraph, **options: Any) -> PipelineRecord:
        record = run_passes(graph, **options)
        counted.count(graph)
        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "rewrite", rewrite_counted)
        with compiled(deep, k=2, stream=0.3, warmup_steps=3) as (model, step):  # one step may have no update in it
            for _ in range(8):
                step()
            yield hytrain_fx.inspect(model), counted
