"""What is private of tracing a graph only to look at it, and of who else holds a tensor.

    look_at(gm, inputs, look)    AOTAutograd traces forward and backward in one graph; `look` sees
                                 it, nothing is compiled
    traced_as_before(gm)         a copy of a graph is compiled again, when Dynamo has ended
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from sys import getrefcount
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.torch_private.compiling import autograd_cache_off
from hytrain_fx.torch_private.names import private_name
from hytrain_fx.torch_private.tensors import use_count, without_torch_function

S = TypeVar("S")
_ENTER_AUTOCAST: Final = "_enter_autocast"  # how Dynamo writes `with torch.autocast(...)` inside of a model down


class _Looked(BaseException):
    """Ends the trace; nothing in torch catches it."""

    def __init__(self, seen: object) -> None:
        self.seen = seen


def look_at(gm: fx.GraphModule, inputs: Sequence[Any], look: Callable[[fx.GraphModule], S]) -> S:
    """What `look` says of the graph that AOTAutograd would hand on, with Inductor's decompositions.

    It is forward and backward in one where a gradient is wanted, else the forward. Nothing of `gm`
    is changed.
    """
    trace = private_name("torch._functorch.aot_autograd", "aot_module_simplified")
    decompositions = private_name("torch._inductor.decomposition", "select_decomp_table")()

    def looked(graph: fx.GraphModule, *_: Any, **__: Any) -> Any:
        raise _Looked(look(graph))

    try:
        with autograd_cache_off():
            trace(gm, inputs, fw_compiler=looked, inference_compiler=looked, partition_fn=looked, decompositions=decompositions)
    except _Looked as end:
        return end.seen  # type: ignore[return-value]
    raise UnsupportedError(f"torch {torch.__version__} traced a graph without handing it on; hytrain_fx was run on torch 2.11 and 2.13")


def copy_of_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A module with the same nodes, and the same tensors that these were traced with."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, copied)


@contextmanager
def traced_as_before(gm: fx.GraphModule) -> Iterator[list[Any]]:
    """Within it a copy of what Dynamo captured may be compiled, though Dynamo has ended.

    Gives the fake inputs that Dynamo traced with.
    """
    inputs = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    mode = private_name("torch._guards", "detect_fake_mode")(inputs)
    with private_name("torch._guards", "tracing")(private_name("torch._guards", "TracingContext")(mode)):
        yield inputs


def may_autocast(gm: fx.GraphModule, device: torch.device) -> bool:
    """Whether autocast to bfloat16 is on for what Dynamo has just traced, or entered in it."""
    if torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.bfloat16:
        return True
    return any(node.op == "call_function" and getattr(node.target, "__name__", "") == _ENTER_AUTOCAST for node in gm.graph.nodes)


def traced_form(tensor: Tensor, *, requires_grad: bool) -> Tensor:
    """A tensor of this form for AOTAutograd to trace with, instead of an input of Dynamo's.

    Its sizes are fixed.
    """
    context = private_name("torch._guards", "TracingContext").try_get()
    if context is None or context.fake_mode is None:
        raise UnsupportedError(f"torch {torch.__version__} compiles a graph without a fake mode; hytrain_fx was run on torch 2.11 and 2.13")
    with without_torch_function():
        fake: Tensor = context.fake_mode.from_tensor(tensor.detach(), static_shapes=True)
    return fake.requires_grad_(requires_grad)


def storage_uses_reader() -> tuple[Callable[[Tensor], int], int]:
    """A function that counts the references to a tensor's storage: each tensor of it is one, its
    Python object too where somebody keeps it, and the asking some. And the count of a tensor that
    is alone.

    Called `without_torch_function` for a guarded parameter.
    """
    count: Callable[[int], int] = private_name("torch._C", "_storage_Use_Count")

    def uses_of(tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        return count(storage._cdata) + getrefcount(storage)

    return uses_of, uses_of(torch.zeros(1, device="cpu"))


def is_held_alone(parameter: nn.Parameter, accumulator: Node | None) -> bool:
    """Whether nobody but the model holds this parameter's memory.

    No view, no NumPy alias, no graph that has saved it.

    `accumulator` is its AccumulateGrad node, which refers to it too; None where it requires no
    gradient.
    """
    uses_of, alone = storage_uses_reader()
    with without_torch_function():
        return uses_of(parameter) <= alone and use_count(parameter) <= (1 if accumulator is None else 2)
