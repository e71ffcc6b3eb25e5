"""The private torch surface in one place: what a new torch release can break is here and nowhere else.

Each function names what it reaches for and raises `UnsupportedError` with the torch version when it
is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from typing import Any, Final, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node, get_gradient_edge

from hytrain_fx.errors import UnsupportedError

_OLDEST: Final = (2, 11)
_NEWEST: Final = (2, 13)

without_torch_function: Final = torch._C.DisableTorchFunctionSubclass
"""A context manager: inside, no subclass's `__torch_function__` is consulted, the plain method or property of `Tensor` runs."""


def require_release() -> None:
    """Raises UnsupportedError where torch is older than 2.11; warns where it is newer than what hytrain_fx was run on."""
    release = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if release < _OLDEST:
        raise UnsupportedError(f"torch {torch.__version__} is too old: hytrain_fx needs torch 2.11 or newer; pip install --upgrade torch")
    if release > _NEWEST:
        warnings.warn(f"hytrain_fx was run on torch 2.11 to 2.13, this is {torch.__version__}: run its test suite (./scripts/test) before "
                      "you rely on it", stacklevel=3)


def private_function(name: str) -> Callable[..., Any]:
    """`torch.<name>`, an underscored function without a public twin (`_foreach_mul_`). Raises UnsupportedError."""
    function = getattr(torch, name, None)
    if function is None:
        raise UnsupportedError(f"torch {torch.__version__} has no torch.{name}; hytrain_fx needs it and was run on torch 2.11 and 2.13")
    return cast(Callable[..., Any], function)


def metadata_functions() -> frozenset[Callable[..., Any]]:
    """What `__torch_function__` sees for reads that need no values of the tensor: shape, dtype, device, autograd's fields, hash."""
    properties = (
        *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "name", "output_nr", "_version"),
        *("requires_grad", "is_leaf", "grad_fn", "grad", "_grad", "grad_dtype", "retains_grad"),
        *("_backward_hooks", "_post_accumulate_grad_hooks"),
        *("is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_mtia"),
        *("is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_nested"),
    )
    methods = (
        *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "get_device"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_conj", "is_neg", "_is_view"),
        *("__len__", "__hash__", "__dir__"),
    )
    return frozenset(
        [getattr(Tensor, name).__get__ for name in properties if hasattr(Tensor, name)]
        + [getattr(Tensor, name) for name in methods if hasattr(Tensor, name)]
        + [torch.numel, torch.is_floating_point, torch.is_complex]
    )


def is_tracing() -> bool:
    """Whether torch.compile is building a graph on this thread right now."""
    return _private("torch._guards", "TracingContext").try_get() is not None


def wrapper_tensor(cls: type[Tensor], size: torch.Size, strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of class `cls` with metadata only; its memory may not be written through a raw pointer (C++ extensions get an error)."""
    tensor = torch.Tensor._make_wrapper_subclass(cls, size, strides=strides, dtype=dtype, device=device)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


use_count: Final[Callable[[Tensor], int]] = Tensor._use_count  # type: ignore[attr-defined]
"""How many references C++ counts to a tensor; the Python object is one. Call it `without_torch_function`."""


def allow_in_foreach(cls: type[Tensor]) -> None:
    """Let `clip_grad_norm_(foreach=None)` take its foreach form for `cls` too, as DTensor does: the forms differ in bits on CUDA."""
    from torch.utils import _foreach_utils

    supported = getattr(_foreach_utils, "_foreach_supported_types", None)
    if not isinstance(supported, list):
        raise UnsupportedError(f"torch {torch.__version__} has no list torch.utils._foreach_utils._foreach_supported_types")
    if cls not in supported:
        supported.append(cls)


def compile_fx(gm: fx.GraphModule, inputs: Sequence[Any], inner_compile: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Run Inductor's front half (AOTAutograd, decompositions, partitioner), handing each graph to `inner_compile`.

    `options` are Inductor config patches; they also hold for the backward graph, which is compiled
    later.
    """
    run = _private("torch._inductor.compile_fx", "compile_fx")
    return run(gm, inputs, inner_compile=inner_compile, config_patches=options or None)


def compile_fx_inner(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Run Inductor's back half on one graph: lowering, scheduling, code generation."""
    return _private("torch._inductor.compile_fx", "compile_fx_inner")(gm, inputs, **kwargs)


def property_reader(name: str) -> Callable[[Tensor], Any]:
    """What reads a property of a tensor in C, for `map` over many tensors. Raises UnsupportedError."""
    found = getattr(Tensor, name, None)
    if found is None:
        raise UnsupportedError(f"torch {torch.__version__} has no Tensor.{name}; hytrain_fx needs it and was run on torch 2.11 and 2.13")
    return cast(Callable[[Tensor], Any], found.__get__)


_hooks_of: Final = property_reader("_backward_hooks")
get_grad: Final[Callable[[Tensor], Tensor | None]] = property_reader("grad")
"""`.grad` read in C, whatever the class of the parameter. Call it `without_torch_function`."""
set_grad: Final[Callable[[Tensor, Tensor | None], None]] = vars(torch._C.TensorBase)["grad"].__set__
"""`.grad` written in C, whatever the class of the parameter. Call it `without_torch_function`."""
delete_grad: Final[Callable[[Tensor], None]] = vars(torch._C.TensorBase)["grad"].__delete__


def any_tensor_hooks(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a tensor hook is on any of them, at 0.05 us each. Call it `without_torch_function`: looking is no access to the values."""
    return any(map(_hooks_of, parameters))


class LeafGradient(Enum):
    """What the running backward does with the gradient of a leaf."""

    ACCUMULATED = "added to .grad"
    RETURNED = "handed to the caller of torch.autograd.grad"
    UNWANTED = "not among the inputs that were asked for"


def accumulator(leaf: Tensor) -> Node:
    """The AccumulateGrad node of a leaf: one and the same for as long as somebody holds it."""
    with without_torch_function():
        return get_gradient_edge(leaf).node


def will_all_accumulate(accumulators: Iterable[Node]) -> bool:
    """Whether the backward that runs on this thread runs all of these; True outside of a backward."""
    if running_backward() == -1:
        return True
    try:
        return all(map(_private("torch._C", "_will_engine_execute_node"), accumulators))
    except RuntimeError:  # of torch.autograd.grad
        return False


def leaf_gradient(accumulator: Node) -> LeafGradient:
    """What the backward that runs on this thread does with this leaf's gradient."""
    try:
        runs = _private("torch._C", "_will_engine_execute_node")(accumulator)
    except RuntimeError:  # its way to say that a leaf's gradient is captured
        return LeafGradient.RETURNED
    return LeafGradient.ACCUMULATED if runs else LeafGradient.UNWANTED


def running_backward() -> int:
    """Which backward runs on this thread: a number of its own, -1 outside of one."""
    return int(_graph_task_id()())


def current_stream_of(device: torch.device) -> Callable[[], int]:
    """What gives the handle of a CUDA device's current stream, in a tenth of the time of `torch.cuda.current_stream`."""
    return partial(_private("torch._C", "_cuda_getCurrentRawStream"), device.index)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have `call` called when the backward that runs on this thread has added all gradients; never if it ends in an error."""
    _private("torch.autograd.variable", "Variable")._execution_engine.queue_callback(call)


Edit = Callable[[Sequence[Any]], Sequence[Any]]
"""Makes other results of a compiled graph's."""


def boxed_within(around: Callable[[], AbstractContextManager[Edit | None]], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled` run inside `around()`, with the calling convention of Inductor's output: one list of arguments, emptied by the callee.

    What `around()` gives edits the results, if it gives anything.
    """

    def run(args: list[Any]) -> Any:
        with around() as edit:
            results = compiled(args)
            return results if edit is None else edit(results)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def autograd_cache_off() -> Iterator[None]:
    """Keep AOTAutogradCache out: it is consulted before `inner_compile`, and its key does not know of a rewrite."""
    with _private("torch._functorch", "config").patch(enable_autograd_cache=False):
        yield


@contextlib.contextmanager
def layouts_kept() -> Iterator[None]:
    """Keep Inductor from copying convolution weights to channels-last where the graph begins, ahead of any node (`layout_optimization`)."""
    with _private("torch._inductor", "config").patch(layout_optimization=False):
        yield


def plain_input(desc: object) -> int | None:
    """The position in the backend's example inputs that a placeholder's `meta["desc"]` names, or None."""
    plain = _private("torch._functorch._aot_autograd.descriptors", "PlainAOTInput")
    return int(desc.idx) if isinstance(desc, plain) else None


def gradient_of(desc: object) -> int | None:
    """The position in the backend's example inputs whose gradient an output's descriptor names, or None."""
    grad = _private("torch._functorch._aot_autograd.descriptors", "GradAOTOutput")
    return plain_input(desc.grad_of) if isinstance(desc, grad) else None


def gradient_hooks(parameter: nn.Parameter) -> tuple[Callable[..., Any], ...]:
    """The tensor hooks and the post-accumulate hooks registered on a parameter."""
    found: list[Callable[..., Any]] = []
    with without_torch_function():  # looking is no access to the values
        for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(parameter, attribute, None)
            found += list(hooks.values()) if hooks else []
    return tuple(found)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run around this optimizer's `step`, its own or those of every optimizer."""
    of_all = [_private("torch.optim.optimizer", f"_global_optimizer_{when}_hooks") for when in ("pre", "post")]
    return any((*of_all, optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks))


def asked_by_grad_scaler() -> bool:
    """Whether what calls this was called by an attribute that `GradScaler.step` looks up."""
    frame = sys._getframe(3)  # this function, what asks, the property
    return frame.f_code is torch.amp.GradScaler.step.__code__


def load_state_dict_hooks(optimizer: torch.optim.Optimizer) -> tuple[tuple[Callable[..., Any], ...], tuple[Callable[..., Any], ...]]:
    """The hooks registered to run before and after `optimizer.load_state_dict()`."""
    kinds = []
    for attribute in ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"):
        hooks = getattr(optimizer, attribute, None)
        if hooks is None:
            raise UnsupportedError(f"torch {torch.__version__} has no Optimizer.{attribute}; hytrain_fx was run on torch 2.11 and 2.13")
        kinds.append(tuple(hooks.values()))
    return kinds[0], kinds[1]


def every_operation(call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> AbstractContextManager[Any]:
    """Within it every torch operation goes to `call(operation, args, kwargs)`, which returns its result; there it may run it."""
    mode: Any = _private("torch.utils._python_dispatch", "TorchDispatchMode")

    class Operations(mode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
            return call(func, args, kwargs or {})

    return cast(AbstractContextManager[Any], Operations())


@dataclass(frozen=True, slots=True)
class Signature:
    """What an operation's schema says of its arguments, by position or name: which take any number, which tensors are written."""

    numbers: frozenset[int | str]
    written: frozenset[int | str]


@cache
def signature_of(operation: Any) -> Signature:
    """The signature of an operation as `every_operation` hands it out."""
    numeric = (_private("torch._C", "NumberType"), _private("torch._C", "TensorType"))
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


def memory_of(tensor: Tensor) -> int:
    """Which memory a tensor is a view of, as a number: the same for two tensors that share it, also where they are on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def own_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """The `step` that the optimizer's class has, without the hooks that torch puts around it."""
    step: Any = type(optimizer).step
    return cast(Callable[[torch.optim.Optimizer], Any], step.__wrapped__ if getattr(step, "hooked", False) else step)


def size_hint(size: object) -> int:
    """The size seen while tracing: an int itself, or what a symbolic size stood for; 1 where there is none."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if hint is not None else 1


def fake_tensors() -> Any:
    """A FakeTensorMode: within it tensors are computed without memory or values, also those that its `from_tensor` gives for others."""
    return _private("torch._subclasses.fake_tensor", "FakeTensorMode")()


def operator_name(target: Any) -> str | None:
    """`aten.mul.Tensor`, without `.default`, of a function that a graph may call under Inductor; None of any other function."""
    overload, higher_order = (_private("torch._ops", name) for name in ("OpOverload", "HigherOrderOperator"))
    if isinstance(target, overload | higher_order):
        return str(target).removesuffix(".default")
    scalar = getattr(target, "__module__", "") in ("_operator", "math", "torch")  # of sizes: operator.mul, torch.sym_max
    return str(target.__name__) if scalar else None


def fake_result(node: fx.Node) -> Any:
    """What a call in a traced graph gives for the fake results of its arguments; raises what the operator's fake kernel raises."""
    mode = _private("torch._guards", "detect_fake_mode")([other.meta.get("val") for other in node.graph.nodes])

    def value(argument: fx.Node) -> Any:
        if argument.op != "get_attr":
            return argument.meta["val"]
        held = getattr(argument.graph.owning_module, str(argument.target))
        return mode.from_tensor(held) if isinstance(held, Tensor) else held

    call: Callable[..., Any] = node.target  # type: ignore[assignment]
    with mode, torch.no_grad():
        return call(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))


@cache  # every inserted node asks for it
def _graph_task_id() -> Callable[[], int]:
    return cast(Callable[[], int], _private("torch._C", "_current_graph_task_id"))


def _private(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise UnsupportedError(
            f"torch {torch.__version__} has no {module}.{name}; hytrain_fx needs it and was run on torch 2.11 and 2.13"
        ) from None


def compiled_call_of(
    model: nn.Module,
    backend: Callable[..., Any],
    dynamic: bool | None,
    mode: str | None,
    options: dict[str, Any],
    on_eager: Callable[[], None],
) -> Callable[..., Any]:
    """The compiled call of `model`, as `model.compile(...)` makes it; each one captures its own graphs.

    `on_eager` is called before a run that is not one graph from end to end: a graph break, or
    Dynamo gave up (recompile limit).

    `Module.compile` compiles `_call_impl`. Dynamo skips that frame, and the forward too where it is
    torch's own (nn.Sequential): the model would run uncompiled. So a frame of ours stands before
    it, with a code object of its own: recompiles are counted and limited by code object, and the
    ninth model of a class would run uncompiled too. Dynamo looks compiled code up by code object
    and backend, also that of a forward split by graph breaks: with a backend function of its own, a
    second call finds none of the first one's.
    """

    def own_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        return backend(gm, example_inputs, **kwargs)

    # What run_model calls Dynamo would compile, and CUDA's current stream is another object in
    # compiled code.
    told = torch.compiler.disable(on_eager)

    # Dynamo traces into this frame but, marked so, leaves it alone where it is run: then it is
    # plain Python.
    def run_model(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            told()
        return model._call_impl(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        return run_model(*args, **kwargs)

    _private("torch._dynamo.eval_frame", "skip_code")(run_model.__code__)
    # The name is part of what automatic dynamic shapes are remembered by.
    code = call.__code__.replace(co_name=f"call_{type(model).__name__}")
    own = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, backend=own_backend, dynamic=dynamic, mode=mode, options=options or None)
    return compiled


def compiled_call(model: nn.Module) -> Any:
    """What `model(...)` calls when the model is compiled in place, else None."""
    if not hasattr(nn.Module, "_compiled_call_impl"):
        raise UnsupportedError(f"torch {torch.__version__} has no nn.Module._compiled_call_impl; hytrain_fx was run on torch 2.11 and 2.13")
    call: Any = model._compiled_call_impl
    return call


def set_compiled_call(model: nn.Module, call: Callable[..., Any] | None) -> None:
    """Make `model(...)` call this instead; None makes it a plain model again."""
    model._compiled_call_impl = call


def raised_in_backend(error: Exception) -> Exception | None:
    """What a backend raised, of an error that Dynamo made of it; None where it is another error."""
    made: type[Exception] = _private("torch._dynamo.exc", "BackendCompilerFailed")
    return getattr(error, "inner_exception", None) if isinstance(error, made) else None


def increment_versions(tensors: Sequence[Tensor]) -> None:
    """Mark tensors as written, so that a backward through their old values is torch's own error."""
    torch.autograd.graph.increment_version(tensors)
