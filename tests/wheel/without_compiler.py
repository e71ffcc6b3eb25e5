"""Trains with the installed hytrain_fx where there is no compiler, and compares every bit.

    scripts/build-wheel --check    runs it in an empty environment

Each library that the wheel brought and that this CPU can run trains a model of one graph, with
updates that begin before step(), and one with a graph break, whose eager reads nothing sees here.
Weights are those of torch's own AdamW with its square root correctly rounded, in the plain loop.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.runtime.arithmetic import square_root
from hytrain_fx.runtime.native import build, libraries

STEPS = 4
# Inductor without code of its own: torch's operators, one by one.
OP_BY_OP = {"fallback_by_default": True}


class Net(nn.Module):
    """Two layers; with `broken` the second one is eager code."""

    def __init__(self, *, broken: bool) -> None:
        super().__init__()
        self.first, self.second, self.broken = nn.Linear(64, 1024), nn.Linear(1024, 128), broken

    def forward(self, x: Tensor) -> Tensor:
        """One graph, or a graph and a break."""
        hidden = torch.relu(self.first(x))
        if self.broken:
            torch._dynamo.graph_break()
        result: Tensor = self.second(hidden)
        return result


def trained(broken: bool, prepare: Callable[[nn.Module, Any], Any]) -> dict[str, Tensor]:
    """The weights after some steps of the ordinary loop."""
    torch.manual_seed(0)
    model = Net(broken=broken)
    optimizer = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
    for _ in range(STEPS):
        loss = (model(torch.randn(32, 64)) - torch.randn(32, 128)).square().sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def reference(broken: bool) -> dict[str, Tensor]:
    """Of the plain loop, without torch.compile and without us."""
    with patch.object(torch.Tensor, "sqrt", square_root):
        return trained(broken, lambda _model, optimizer: optimizer)


def ours(broken: bool, origin: str) -> dict[str, Tensor]:
    """The same loop with hytrain_fx; the wheel's library of that origin must carry it out."""
    compiled: list[nn.Module] = []

    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        compiled.append(model)
        _, prepared = hytrain_fx.compile(model, optimizer, options=OP_BY_OP, k=0, speculate=True)
        return prepared

    torch._dynamo.reset()
    found = trained(broken, prepare)
    engine = session_of(compiled[0]).engine
    assert (engine.name, engine.library_origin) == ("native", origin), (engine.name, engine.library_origin)
    assert broken or engine.early_counts().params, "no update began before step()"
    assert f"native engine ({origin})" in str(hytrain_fx.explain(compiled[0]))
    hytrain_fx.close(compiled[0])
    return found


def main() -> None:
    """Raises AssertionError, or HytrainWarning, for what is not as it must be."""
    warnings.simplefilter("error", hytrain_fx.HytrainWarning)
    assert "CXX" not in os.environ
    assert not [name for name in (*build.COMPILERS, "gcc", "cc", "clang", "nvcc") if shutil.which(name)], os.environ["PATH"]
    assert Path(hytrain_fx.__file__).is_relative_to(sys.prefix), hytrain_fx.__file__
    has = build.instruction_sets()
    fitting = [baseline for baseline in libraries.BASELINES if baseline.needs <= has]
    assert fitting, f"this CPU is older than {libraries.BASELINES[-1].name}: {sorted(has)}"
    for broken in (False, True):
        expected = reference(broken)
        for baseline in fitting:
            with patch.object(libraries, "BASELINES", (baseline,)):
                found = ours(broken, f"wheel, {baseline.name}")
            for name, weight in expected.items():
                assert torch.equal(found[name].view(torch.int32), weight.view(torch.int32)), (broken, baseline.name, name)
    assert not list(build.cache_dir().glob("*.so")), "a library was built"
    print(f"without a compiler: {', '.join(baseline.name for baseline in fitting)} train with the bits of the plain loop")


if __name__ == "__main__":
    main()
