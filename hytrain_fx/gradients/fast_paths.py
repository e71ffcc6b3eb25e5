"""What a stand-in gradient answers without its values.

Metadata, norms, scaling, zeroing, detaching.

    norm, _foreach_norm                      the norm taken at offload; if none was, a copy comes
                                             back for this one answer and is dropped
    mul_, _foreach_mul_, div_ by 2, 3, ...   one more logged factor
    _amp_foreach_non_finite_check_...        found_inf from the inf-norm, 1 / scale logged as a
                                             factor (float32 gradients)
    zero_, _foreach_zero_                    the state becomes zeroed
    detach, .data                            another stand-in of the same gradient
    to, cpu, double, ...                     a converted copy; of a gradient that step() has used
                                             another stand-in

Every function here gives what torch gives on the real gradients, bit for bit, or NotImplemented:
then the real tensor is brought back. Lists may mix stand-ins and real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from torch import Tensor

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.gradients.divisors import reciprocal
from hytrain_fx.gradients.factors import Factor, Form, Scaling, effective_factor
from hytrain_fx.gradients.rows import norm_of_shard
from hytrain_fx.gradients.shards import GradientShards
from hytrain_fx.gradients.state import GradState, state_of
from hytrain_fx.runtime.states.store import is_dense
from hytrain_fx.torch_private.compiling import is_tracing
from hytrain_fx.torch_private.names import private_function
from hytrain_fx.torch_private.tensors import metadata_functions, property_reader, without_torch_function

_foreach_norm: Final = private_function("_foreach_norm")
_foreach_mul_: Final = private_function("_foreach_mul_")
_foreach_zero_: Final = private_function("_foreach_zero_")
_unscale_: Final = private_function("_amp_foreach_non_finite_check_and_unscale_")
_takes_data: Final = private_function("_has_compatible_shallow_copy_type")

_dtype_of: Final = property_reader("dtype")
_device_of: Final = property_reader("device")
_layout_of: Final = property_reader("layout")

_Args = Sequence[Any]
_Kwargs = Mapping[str, Any]
_Answer = Callable[[Callable[..., Any], _Args, _Kwargs], Any]


def answer_fast(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    """The answer of `func` without bringing a gradient back for good, or NotImplemented."""
    answer = _ANSWERS.get(func)
    return NotImplemented if answer is None else answer(func, args, kwargs)


def _metadata(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    state = state_of(args[0])
    if state is None or state.real is not None:
        return NotImplemented
    with without_torch_function():
        return func(*args, **kwargs)


def _storage(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    """Dynamo describes each parameter with the storage of its `.grad`.

    The stand-in's own, which has no memory, saves bringing all gradients back.
    """
    return _metadata(func, args, kwargs) if is_tracing() else NotImplemented


def _requires_grad_(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    if (args[1:] or tuple(kwargs.values())) != (False,):
        raise UnsupportedError("requires_grad_() of a gradient that is held on the host: take p.grad.clone().requires_grad_() instead")
    return args[0]


def _set_requires_grad(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    _requires_grad_(func, args, kwargs)


def _detach(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    return args[0].shared() if _untouched(args[0]) else NotImplemented


def _detach_(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    return args[0] if _untouched(args[0]) else NotImplemented


def _untouched(value: object) -> bool:
    state = state_of(value)
    return state is not None and state.real is None


# --- norms


def _norm(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    order = _order_asked(args, kwargs)
    state = state_of(args[0]) if args else None
    if order is None or state is None or state.real is not None:
        return NotImplemented
    return _norm_of(state, order, foreach=False) if state.source.shards is None else _norms_of_shards([state], order)[0]


def _order_asked(args: _Args, kwargs: _Kwargs) -> float | None:
    """The order of a whole-tensor norm without further options, else None.

    `norm(g)`, `norm(g, 1)`, `norm(g, p="fro", dim=None)` are such norms.
    """
    options = dict(kwargs)
    given = [*args[1:], *(options.pop(name) for name in ("p", "ord") if name in options)]
    if len(given) > 1 or any(value is not _NO_OPTION.get(name, ...) for name, value in options.items()):
        return None
    order = given[0] if given else 2.0
    if order == "fro":
        return 2.0
    return float(order) if type(order) in (int, float) else None


_NO_OPTION: Final = MappingProxyType({"dim": None, "keepdim": False, "dtype": None, "out": None})


def _foreach_norms(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    order = _order_asked(args, kwargs)
    if order is None or not _one_kind(args[0]):
        return NotImplemented
    reals = [tensor for tensor in args[0] if not _untouched(tensor)]
    norms_of_reals = iter(func(_real(reals), order) if reals else ())
    result: list[Tensor] = []
    of_shards = iter(_norms_of_shards([of for of in map(state_of, args[0]) if of and of.real is None and of.source.shards], order))
    for tensor in args[0]:
        state = state_of(tensor)
        if state is None or state.real is not None:
            result.append(next(norms_of_reals))
        else:
            result.append(next(of_shards) if state.source.shards else _norm_of(state, order, foreach=True))
    return result


def _norms_of_shards(states: Sequence[GradState], order: float) -> list[Tensor]:
    """Of gradients of which each rank has a shard: asked of all ranks at once."""
    if order == 0.0:  # how many are not zero: no norm of norms
        return [torch.linalg.vector_norm(state.copy_out(), order) for state in states]
    found: list[Tensor] = []
    for state in states:
        scale = state.scale
        norm = None if scale is None else state.source.norm(order, True, scale)
        if norm is None:
            norm = norm_of_shard(state.copy_home(), order)
            if scale is not None:
                state.source.note_norm_wanted(order, True, scale)
        found.append(norm)
    if not states or (shards := states[0].source.shards) is None:
        return found
    wanted = [cast(Tensor, state.parameter()).dtype for state in states]
    return [norm.to(dtype) for norm, dtype in zip(shards.norms(found, order), wanted, strict=True)]


def _norm_of(state: GradState, order: float, *, foreach: bool) -> Tensor:
    scale = state.scale
    norm = None if scale is None else state.source.norm(order, foreach, scale)
    if norm is not None:
        return norm
    copy = state.copy_out()
    norm = cast(Tensor, _foreach_norm([copy], order)[0] if foreach else torch.linalg.vector_norm(copy, order))
    if scale is not None:  # after the norm was taken: an empty gradient has no inf-norm, torch raises
        state.source.note_norm_wanted(order, foreach, scale)
    return norm


def _one_kind(tensors: object) -> bool:
    """Whether a foreach call handles each of these as it would alone.

    On CUDA one odd tensor sends the whole list to another kernel.
    """
    if not isinstance(tensors, (list, tuple)) or not tensors:
        return False
    with without_torch_function():
        alike = all(len(set(map(read, tensors))) == 1 for read in (_dtype_of, _device_of, _layout_of))
        strided = alike and _layout_of(tensors[0]) == torch.strided
        return strided and (all(map(Tensor.is_contiguous, tensors)) or all(map(is_dense, tensors)))


# --- scaling


def _mul_(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    if len(args) != 2 or kwargs:
        return NotImplemented
    state = state_of(args[0])
    if state is None or state.real is not None:
        return NotImplemented
    factor = _effective(args[0], args[1], Scaling(func, Form.ONE))
    return args[0] if factor is not None and state.log(factor) else NotImplemented


def _div_(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    """By a whole number, as a pipeline's schedule divides by its micro-batches.

    Where that is a product, bit for bit.
    """
    state = state_of(args[0]) if len(args) == 2 and not kwargs else None
    if state is None or state.real is not None:
        return NotImplemented
    with without_torch_function():
        factor = reciprocal(args[1], args[0].dtype, args[0].device, args[0].dim())
    return args[0] if factor is not None and state.log(factor) else NotImplemented


def _foreach_muls(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    if len(args) != 2 or kwargs or not isinstance(args[0], (list, tuple)):
        return NotImplemented
    tensors, scale = args
    if isinstance(scale, (list, tuple)):
        return NotImplemented if len(scale) != len(tensors) or _share_one(tensors, scale) else _mul_each(func, tensors, scale)
    snapshots: dict[tuple[torch.dtype, torch.device, bool], Factor | None] = {}  # one copy of a device tensor for the whole list
    scaling = Scaling(func, Form.LIST, _one_kind(tensors))
    rest: list[Tensor] = []
    with without_torch_function():  # metadata of many tensors
        for tensor in tensors:
            state = state_of(tensor)
            if state is None or state.real is not None:
                rest.append(tensor)
                continue
            key = (tensor.dtype, tensor.device, tensor.dim() == 0)
            if key not in snapshots:
                snapshots[key] = effective_factor(scale, scaling, tensor.dtype, tensor.device, tensor.dim())
            factor = snapshots[key]
            if factor is None or not state.log(factor):
                rest.append(tensor)
    if rest:
        func(_real(rest), scale)
    return tensors


def _share_one(tensors: Sequence[Tensor], scales: Sequence[Any]) -> bool:
    """Whether the order within the list matters, because a tensor is both scaled and a scale."""
    scaled = {id(tensor) for tensor in tensors}
    return any(id(scale) in scaled or state_of(scale) is not None for scale in scales)


def _mul_each(func: Callable[..., Any], tensors: Sequence[Tensor], scales: Sequence[Any]) -> Any:
    scaling = Scaling(func, Form.LISTS, _one_kind(tensors))
    rest: list[tuple[Tensor, Any]] = []
    for tensor, scale in zip(tensors, scales, strict=True):
        state = state_of(tensor)
        factor = _effective(tensor, scale, scaling) if state is not None and state.real is None else None
        if state is None or factor is None or not state.log(factor):
            rest.append((tensor, scale))
    if rest:
        func(_real([tensor for tensor, _ in rest]), _real([scale for _, scale in rest]))
    return tensors


def _unscale(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    """`_amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)`.

    An inf or nan anywhere shows in the inf-norm.
    """
    if len(args) != 3 or kwargs or not _one_kind(args[0]) or args[0][0].dtype != torch.float32:
        return NotImplemented
    grads, found_inf, inv_scale = args
    is_number = type(inv_scale) is Tensor and inv_scale.numel() == 1
    factor = _effective(grads[0], inv_scale.reshape(()), Scaling(Tensor.mul_, Form.ONE)) if is_number else None
    rest: list[Tensor] = []
    norms: list[Tensor] = []
    shards: GradientShards | None = None
    for grad in grads:
        state = state_of(grad)
        if factor is None or state is None or state.real is not None or state.scale is None or grad.numel() == 0:
            rest.append(grad)
            continue
        norm = state.source.norm(float("inf"), True, state.scale)
        shards = shards or state.source.shards
        if norm is None:
            state.source.note_norm_wanted(float("inf"), True, state.scale)
            func([state.copy_home()], found_inf, inv_scale)
        else:
            norms.append(norm)
        state.log(factor)
    if norms:
        found_inf.masked_fill_(~torch.isfinite(torch.stack(norms)).all(), 1.0)
    if shards is not None:
        found_inf.fill_(shards.largest(found_inf))
    if rest:
        func(_real(rest), found_inf, inv_scale)


def _effective(grad: Tensor, factor: object, scaling: Scaling) -> Factor | None:
    with without_torch_function():
        return effective_factor(factor, scaling, grad.dtype, grad.device, grad.dim())


def _real(values: list[Any]) -> list[Any]:
    """The list with each stand-in brought back."""
    result: list[Any] = []
    for value in values:
        state = state_of(value)
        result.append(value if state is None else state.materialize())
        if state is not None:
            state.become_parameter_grad()
    return result


# --- zeroing


def _zero_(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    state = state_of(args[0])
    if state is None or state.real is not None:
        return NotImplemented
    state.zero(args[0])
    return args[0]


def _foreach_zero(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    if len(args) != 1 or kwargs:
        return NotImplemented
    rest: list[Tensor] = []
    for tensor in args[0]:
        state = state_of(tensor)
        if state is None or state.real is not None:
            rest.append(tensor)
        else:
            state.zero(tensor)
    if rest:
        func(_real(rest))
    return args[0]


# --- another device or dtype


def _convert(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    """Another stand-in of a gradient that `step()` has used.

    `model.cpu()` converts gradients that nobody reads any more.
    """
    grad, state = args[0], state_of(args[0])
    if state is None or state.real is not None:
        return NotImplemented
    with without_torch_function():
        size = (1, *grad.shape[1:]) if grad.dim() else ()
        probe = torch.empty_strided(size, grad.stride(), dtype=grad.dtype, device=grad.device)
        like = func(probe, *args[1:], **kwargs)
    if like is probe:
        return grad
    return func(state.copy_out(), *args[1:], **kwargs) if state.source.is_live() else grad.shared(like.dtype, like.device)


def _may_take_data(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    """`nn.Module._apply` asks before it writes a converted gradient into `p.grad.data`.

    It writes in C++, where a stand-in has no memory.

    Where it may not, it assigns to `p.grad`.
    """
    return False if any(state_of(value) is not None for value in args) else NotImplemented


_CONVERSIONS: Final = (Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16)

_ANSWERS: Final[Mapping[Callable[..., Any], _Answer]] = MappingProxyType(
    {
        **dict.fromkeys(metadata_functions(), _metadata),
        Tensor.untyped_storage: _storage,
        Tensor.requires_grad_: _requires_grad_,
        Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
        Tensor.detach: _detach,
        torch.detach: _detach,
        Tensor.data.__get__: _detach,  # type: ignore[attr-defined]
        _takes_data: _may_take_data,
        **dict.fromkeys(_CONVERSIONS, _convert),
        Tensor.detach_: _detach_,
        torch.detach_: _detach_,
        Tensor.norm: _norm,
        torch.norm: _norm,
        torch.linalg.vector_norm: _norm,
        _foreach_norm: _foreach_norms,
        Tensor.mul_: _mul_,
        Tensor.__imul__: _mul_,
        Tensor.div_: _div_,
        Tensor.__itruediv__: _div_,
        _foreach_mul_: _foreach_muls,
        _unscale_: _unscale,
        Tensor.zero_: _zero_,
        torch.zero_: _zero_,
        _foreach_zero_: _foreach_zero,
    }
)
