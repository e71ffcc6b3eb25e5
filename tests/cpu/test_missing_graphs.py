"""Graphs that would silently be missing or another's.

Models that Dynamo leaves out, and caches on disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), lambda: nn.TransformerEncoderLayer(4, 2, 8)])
def test_a_model_of_torchs_own_class_is_compiled_too(make: Callable[[], nn.Module]) -> None:
    """Dynamo skips frames of torch.nn.

    Module.compile() would silently leave an nn.Sequential uncompiled.
    """
    torch._dynamo.reset()
    model = make()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0)
    model(torch.ones(2, 3, 4)).square().sum().backward()
    optimizer.step()
    assert session_of(model).nodes.runs["grad_offload"] == len(list(model.parameters()))
    hytrain_fx.close(model)


def test_the_tenth_model_of_a_class_is_compiled_too() -> None:
    """Dynamo allows eight compiled versions of a function; each model counts for itself."""
    torch._dynamo.reset()
    models = []
    for _ in range(10):
        model = nn.Sequential(nn.Linear(2, 1))
        hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0, workers=1)
        model(torch.ones(1, 2)).sum().backward()
        models.append(model)
    assert [session_of(model).nodes.runs["backward_end"] for model in models] == [1] * 10
    for model in models:
        hytrain_fx.close(model)


SCRIPT = """
import sys, torch, hytrain_fx, torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters
torch._inductor.config.fallback_by_default = True  # the graphs are the subject, not their kernels
torch.set_num_threads(1)
torch.manual_seed(0)
class Net(nn.Module):  # of torch's own classes the plain model would not be compiled
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
    def forward(self, x):
        return self.last(self.first(x))
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if sys.argv[1] == "ours":
    model, optimizer = hytrain_fx.compile(model, optimizer, k=0)
else:
    model.compile()
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    assert (type(model.first.weight.grad).__name__ == "GradStandIn") == (sys.argv[1] == "ours")
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    print([round(float(p.sum()), 5) for p in model.parameters()])
caches = counters["aot_autograd"] + counters["inductor"]
print(*(sum(n for name, n in caches.items() if name.endswith(end)) for end in ("cache_hit", "cache_miss")))
"""


@pytest.mark.sample(0)
@pytest.mark.parametrize("order", ["plain ours plain", "ours plain ours"])
def test_graphs_on_disk_are_not_taken_for_each_other(order: str, tmp_path: Path) -> None:
    """Plain and rewritten graphs share the caches on disk, and none finds the other kind's.

    Each process runs its own kind, in any order. The third finds what the first has left.
    """
    weights, found, missed = set(), [], []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for kind in order.split():
        done = subprocess.run([sys.executable, "-c", SCRIPT, kind], capture_output=True, text=True, timeout=240, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        printed, counts = done.stdout.splitlines()
        weights.add(printed)
        found.append(int(counts.split()[0]))
        missed.append(int(counts.split()[1]))
    assert len(weights) == 1
    assert [n > 0 for n in found] == [False, False, True]
    assert [n > 0 for n in missed] == [True, True, False]
