"""Graphs that run op by op, as FX has them: what Inductor does with a graph takes most of a compilation's time.

Everything before it is torch's: Dynamo, AOTAutograd, its decompositions, the partitioner, and our rewrite of each graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.output_code import OutputCode
from torch.fx.graph import _BoxedCodeGen


class InterpretedGraph(OutputCode):
    """In the place of Inductor's code: it lets go of inputs and of values after their last use, too."""

    def __init__(self, module: fx.GraphModule) -> None:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        graph.set_codegen(_BoxedCodeGen())
        self._run: Callable[[list[Any]], Any] = fx.GraphModule(module, graph)
        self._boxed_call = True

    def __call__(self, inputs: Sequence[Any]) -> Any:
        assert isinstance(inputs, list)
        with torch.no_grad():
            return self._run(inputs)

    def post_compile(self, *args: Any) -> None:
        """Nothing is left to do."""

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """It has no kernels."""


@contextlib.contextmanager
def graphs_interpreted() -> Iterator[None]:
    """Meanwhile no graph is given to Inductor."""
    with pytest.MonkeyPatch.context() as patch, inductor_config.patch(fx_graph_cache=False):
        patch.setattr(compile_fx._InProcessFxCompile, "codegen_and_compile", lambda _, module, *rest: InterpretedGraph(module))
        yield
