"""What is private of torch's operators.

Their names and schemas, each one as it runs, and what it gives for fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, fx

from hytrain_fx.torch_private.names import private_name


def every_operation(call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> AbstractContextManager[Any]:
    """Within it every torch operation goes to `call(operation, args, kwargs)`.

    That returns the result, and may run the operation.
    """
    mode: Any = private_name("torch.utils._python_dispatch", "TorchDispatchMode")

    class Operations(mode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
            return call(func, args, kwargs or {})

    return cast(AbstractContextManager[Any], Operations())


@dataclass(frozen=True, slots=True)
class Signature:
    """What an operation's schema says of its arguments, by position or name.

    Which take any number, which tensors are written.
    """

    numbers: frozenset[int | str]
    written: frozenset[int | str]


@cache
def signature_of(operation: Any) -> Signature:
    """The signature of an operation as `every_operation` hands it out."""
    numeric = (private_name("torch._C", "NumberType"), private_name("torch._C", "TensorType"))
    numbers: set[int | str] = set()
    written: set[int | str] = set()
    for position, argument in enumerate(operation._schema.arguments):
        keys = (position, argument.name)
        of = argument.type.getElementType() if argument.type.kind() in ("OptionalType", "ListType") else argument.type
        if isinstance(of, numeric):
            numbers.update(keys)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.update(keys)
    return Signature(frozenset(numbers), frozenset(written))


def operator_name(target: Any) -> str | None:
    """`aten.mul.Tensor`, without `.default`, of a function that a graph may call under Inductor.

    None for any other function.
    """
    overload, higher_order = (private_name("torch._ops", name) for name in ("OpOverload", "HigherOrderOperator"))
    if isinstance(target, overload | higher_order):
        return str(target).removesuffix(".default")
    scalar = getattr(target, "__module__", "") in ("_operator", "math", "torch")  # of sizes: operator.mul, torch.sym_max
    return str(target.__name__) if scalar else None


def size_hint(size: object) -> int:
    """The size seen while tracing: an int itself, or what a symbolic size stood for.

    1 where there is none.
    """
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if hint is not None else 1


def fake_tensors() -> Any:
    """A FakeTensorMode: within it tensors are computed without memory or values.

    So are those that its `from_tensor` gives for others.
    """
    return private_name("torch._subclasses.fake_tensor", "FakeTensorMode")()


def fake_result(node: fx.Node) -> Any:
    """What a call in a traced graph gives for the fake results of its arguments.

    Raises what the operator's fake kernel raises.
    """
    mode = private_name("torch._guards", "detect_fake_mode")([other.meta.get("val") for other in node.graph.nodes])

    def value(argument: fx.Node) -> Any:
        if argument.op != "get_attr":
            return argument.meta["val"]
        held = getattr(argument.graph.owning_module, str(argument.target))
        return mode.from_tensor(held) if isinstance(held, Tensor) else held

    call: Callable[..., Any] = node.target  # type: ignore[assignment]
    with mode, torch.no_grad():
        return call(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))
