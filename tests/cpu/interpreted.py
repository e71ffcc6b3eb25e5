"""Graphs that run op by op, as FX has them.

Inductor's work on a graph takes most of a compilation's time.

Everything before it is torch's: Dynamo, AOTAutograd, its decompositions, the partitioner, and our
rewrite of each graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import compile_fx
from torch.fx.graph import _BoxedCodeGen

from hytrain_fx.torch_private.compiling import autograd_cache_off


def interpreted(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[[list[Any]], Any]:
    """Called instead of Inductor.

    The result frees inputs and values after their last use, as Inductor's code does.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.set_codegen(_BoxedCodeGen())
    run = fx.GraphModule(module, graph)

    def call(args: list[Any]) -> Any:
        with torch.no_grad():
            return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


@contextlib.contextmanager
def graphs_interpreted() -> Iterator[None]:
    """No thread gives a graph to Inductor meanwhile.

    None comes from torch's cache either: it may hold the plain model's graph of an earlier module,
    which has other bits than ours.
    """
    with pytest.MonkeyPatch.context() as patch, autograd_cache_off():
        patch.setattr(compile_fx, "_compile_fx_inner", interpreted)
        yield
