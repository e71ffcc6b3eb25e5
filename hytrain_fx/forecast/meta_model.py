"""The shape of any model, from a function that makes it.

The model is built on the meta device, so no weight is ever allocated.

Units are those that a training run would place (`capture/units.py`). With example inputs the model
runs forward once, on fake tensors:

    matmul_params      FLOPs of matrix products and convolutions / 2 / tokens
    attention_width    FLOPs of batched products and attention / 4 / (tokens * sequence); a causal
                       mask saves nothing here
    saved_values       elements that autograd saves, each memory once, parameters left out / tokens

Autograd in eager mode saves more than a compiled graph, so activations are an upper bound. Without
inputs every weight of a Linear or a convolution is multiplied once a token and its output is saved;
attention is then not known.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from hytrain_fx.capture.units import group_units
from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.shapes import Counted, ModelShape, UnitShape
from hytrain_fx.torch_private.operators import fake_tensors

_PRODUCTS = {"mm", "addmm", "convolution", "_convolution", "_grouped_mm"}
_CONTEXT = 2048  # where there are no inputs


@dataclass
class _Work:
    """What one unit does for all example tokens."""

    product_flops: float = 0.0
    attention_flops: float = 0.0
    saved_values: float = 0.0
    output_values: float = 0.0


@dataclass
class _Run:
    """Work by unit while the model runs; `unit` is the one that runs now."""

    unit: str = ""
    of_unit: dict[str, _Work] = field(default_factory=lambda: defaultdict(_Work))


def shape_of_factory(path: str) -> ModelShape:
    """The shape of what `package.module:factory` returns.

    That is a module, or a module and its example inputs (a tensor, a tuple or a dict).

    The package is searched for in the current directory, too. Raises ConfigError where there is no
    such function or it returns anything else.
    """
    model, inputs = made_by(path, torch.device("meta"))
    return shape_of(model, path.partition(":")[2], inputs)


def made_by(path: str, device: torch.device) -> tuple[nn.Module, Any]:
    """The model that `package.module:factory` makes on a device, and its example inputs or None.

    Raises ConfigError as `shape_of_factory`.
    """
    module_name, _, name = path.partition(":")
    made = _called(_factory(path, module_name, name), path, device)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{path} returned {type(made).__name__}, expected a torch.nn.Module, or a pair of one and its example inputs")
    return model, inputs


def shape_of(model: nn.Module, name: str, inputs: Any = None, *, counted: Counted | None = None) -> ModelShape:
    """The shape of a module, on the meta device or any other.

    Example `inputs` are the arguments of its forward, `counted` what a micro-batch has many of
    (None = what the inputs look like).

    Raises ConfigError where nothing in it is trained, or where it does not run.
    """
    parameters = {key: p for key, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ConfigError(f"{name} has no parameters that require grad: there is nothing to train")
    names = list(parameters)
    units = group_units(model, names)
    numels = [p.numel() for p in parameters.values()]
    paths = list(dict.fromkeys(unit.name for unit in units))
    tokens, sequence = 1, 0
    if inputs is None:
        work = _guessed(model, {names[row]: unit.name for unit in units for row in unit.rows})
    else:
        args, kwargs = arguments_of(inputs)
        tokens, sequence = (1, 0) if counted == "samples" else tokens_of(args, kwargs)
        work = _observed(model, paths, args, kwargs)
    shapes = []
    for unit in units:
        params = sum(numels[row] for row in unit.rows)
        done = work[unit.name]
        attention = done.attention_flops / (4 * tokens * sequence) if sequence else 0
        # attention within a sample grows with the samples alone, as products do
        product_flops = done.product_flops + (0 if sequence else done.attention_flops)
        shapes.append(UnitShape(unit.number, unit.name, params, round(product_flops / 2 / tokens), round(attention),
                                round(done.saved_values / tokens), round(done.output_values / tokens)))
    samples = counted == "samples" or (inputs is not None and not sequence)
    return ModelShape(name, tuple(shapes), 1 if samples else sequence or _CONTEXT, vocab=0, causal=False,
                      counted="samples" if samples else "tokens")


def _factory(path: str, module_name: str, name: str) -> Callable[[], Any]:
    with _current_directory():
        try:
            found = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be had: {error}; expected package.module:function") from error
    if not callable(found):
        raise ConfigError(f"{path} is {type(found).__name__}, expected a function without arguments")
    function: Callable[[], Any] = found
    return function


def _called(factory: Callable[[], Any], path: str, device: torch.device) -> Any:
    try:
        with device:
            return factory()
    except TypeError as error:
        raise ConfigError(f"{path} could not be called: {error}; expected a function without arguments") from error


@contextmanager
def _current_directory() -> Iterator[None]:
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as positional arguments and those by name."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


def tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Tokens and the length of a sequence.

    Of ids [batch, sequence] and vectors [batch, sequence, width] all count; of other inputs
    samples.
    """
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    if first is None or not first.dim():
        raise ConfigError("found no tensor with a batch among the example inputs, expected at least one")
    ids = not first.is_floating_point() and first.dim() >= 2
    if ids or first.dim() == 3:
        return first.shape[0] * first.shape[1], int(first.shape[1])
    return int(first.shape[0]), 0


def _guessed(model: nn.Module, unit_of: Mapping[str, str]) -> dict[str, _Work]:
    work: dict[str, _Work] = defaultdict(_Work)
    for name, unit in unit_of.items():
        module = model.get_submodule(name.rpartition(".")[0])
        weight = model.get_parameter(name)
        if weight.dim() > 1 and not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            done = work[unit]
            done.product_flops += 2 * weight.numel()
            done.saved_values += weight.shape[0]
            done.output_values = weight.shape[0]
    return work


def _observed(model: nn.Module, paths: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, _Work]:
    run = _Run()
    fake = fake_tensors()
    state = {name: fake.from_tensor(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    args, kwargs = ([_faked(fake, value) for value in args], {key: _faked(fake, value) for key, value in kwargs.items()})
    own = {_memory(tensor) for tensor in state.values()}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        memory, storage = _memory(tensor), tensor.untyped_storage()
        if memory not in own and memory not in kept:
            kept[memory] = storage
            run.of_unit[run.unit].saved_values += storage.nbytes() / tensor.element_size()
        return tensor

    hooks = []
    for path in paths:
        module = model.get_submodule(path)
        hooks.append(module.register_forward_pre_hook(_entering(run, path)))
        hooks.append(module.register_forward_hook(_leaving(run, path)))
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_flops})
    try:
        with fake, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), counter:
            torch.func.functional_call(model, state, tuple(args), kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(f"the model does not run on fake tensors with its example inputs: {error}; return the model alone") from error
    finally:
        for hook in hooks:
            hook.remove()
    _put_flops(run, counter.get_flop_counts(), type(model).__name__, paths)
    return run.of_unit


def _grouped_flops(rows: Sequence[int], weights: Sequence[int], *_: Any, **__: Any) -> int:
    """Each row, a token on its way to one expert, is multiplied by one expert's weights."""
    return 2 * rows[-2] * weights[-2] * weights[-1]


def _put_flops(run: _Run, counts: Mapping[str, Mapping[Any, int]], root: str, paths: Sequence[str]) -> None:
    """Each unit's own FLOPs; those of no unit (a tied head's product) are the last unit's."""
    own = {path: Counter(counts.get(f"{root}.{path}" if path else root, {})) for path in {*paths, ""}}
    whole = {path: Counter(flops) for path, flops in own.items()}
    for path in paths:
        outer = max((other for other in own if other != path and _is_within(path, other)), key=len, default=None)
        if outer is not None:
            own[outer].subtract(whole[path])
    outside = Counter[Any]() if "" in paths else own.pop("")
    own[paths[-1]].update(outside)
    for path, flops_of in own.items():
        for operator, flops in flops_of.items():
            if operator.__name__ in _PRODUCTS:
                run.of_unit[path].product_flops += flops
            else:
                run.of_unit[path].attention_flops += flops


def _is_within(path: str, outer: str) -> bool:
    return not outer or path.startswith(f"{outer}.")


def _faked(fake: Any, value: Any) -> Any:
    return fake.from_tensor(value) if isinstance(value, torch.Tensor) else value


def _memory(tensor: torch.Tensor) -> int:
    """What tells its memory from other tensors' while both live: meta memory has no address."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)


def _entering(run: _Run, path: str) -> Callable[..., None]:
    def enter(*_: Any) -> None:
        run.unit = path

    return enter


def _leaving(run: _Run, path: str) -> Callable[..., None]:
    def leave(_module: nn.Module, _inputs: Any, output: Any) -> None:
        first = _first_tensor(output)
        run.of_unit[path].output_values = 0 if first is None else first.numel()

    return leave


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return next((tensor for part in parts if (tensor := _first_tensor(part)) is not None), None)
