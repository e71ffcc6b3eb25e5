"""What the tests of the integrations share.

    example         a script of examples/ as a module
    rounded_root    torch's AdamW with its square root correctly rounded
    nodes_ran       whether all gradients of a model went through the inserted nodes
    once            runs by name, each done once in a module
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.runtime.arithmetic import square_root

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
R = TypeVar("R")


def example(name: str, *needs: str) -> Any:
    """examples/`name`.py as a module; skips where a package that it needs is missing."""
    for package in needs:
        pytest.importorskip(package, reason=f"{package} is not installed")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def rounded_root() -> Iterator[None]:
    """torch's AdamW with its square root correctly rounded, as ours is (MKL's is not)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sqrt", square_root, raising=False)
        yield


def nodes_ran(model: nn.Module) -> bool:
    """Whether every gradient went through the inserted nodes."""
    found = hytrain_fx.explain(model)
    return found.node_runs["cpu_step"] > 0 and not found.not_offloaded


def once(run: Callable[..., R]) -> Callable[..., R]:
    """`run`, whose result is kept for its arguments; each run compiles for itself."""

    @functools.cache
    def kept(*arguments: Any) -> R:
        torch._dynamo.reset()
        with rounded_root():
            return run(*arguments)

    return kept
