"""`.grad` of a parameter whose gradient went to the host.

Metadata at once, values only when somebody asks.

    p.grad                           a GradStandIn: shape, dtype, device, strides; no memory
    clip_grad_norm_, unscale_        clean -> scaled: answered from norms taken at offload; the
                                     scaling is logged as a factor
    zero_()                          -> zeroed: noted
    p.grad.abs(), p.grad += x, ...   -> real: the gradient comes back, p.grad becomes that tensor

`.detach()` and `.data` give another stand-in of the same gradient. The fast answers are in
`fast_paths`; whatever is not there runs on the real tensor, so a missing fast path costs time and
nothing else. Reads that torch cannot hand to Python fail loudly: the raw pointer of a stand-in
raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hytrain_fx.gradients.factors import Factor
from hytrain_fx.gradients.fast_paths import answer_fast
from hytrain_fx.gradients.state import GradSource, GradState, ZeroSource
from hytrain_fx.torch_private import tensors


class GradStandIn(Tensor):
    """Stands in as `parameter.grad`: same shape, strides, dtype, device; `requires_grad` False.

    Its values are with `source`.

    Of `parameter` it takes the metadata, and that one's `.grad` becomes the real tensor once it is
    brought back.
    """

    grad_state: GradState

    @staticmethod
    def __new__(cls, parameter: Tensor, source: GradSource) -> GradStandIn:
        standin = tensors.wrapper_tensor(cls, parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
        standin.grad_state = GradState(parameter, source)  # type: ignore[attr-defined]
        return cast(GradStandIn, standin)

    @property
    def materialized(self) -> Tensor | None:
        """The real tensor once somebody needed the values (it then holds them), else None."""
        return self.grad_state.real

    @property
    def factors(self) -> tuple[Factor, ...]:
        """Logged factors, applied to the source's values in order.

        Each is `round(float32(g) * factor)`.
        """
        return self.grad_state.factors

    @property
    def zeroed(self) -> bool:
        """Whether `zero_()` was the last write to the values.

        Factors may follow; a real tensor has none.
        """
        return self.grad_state.real is None and isinstance(self.grad_state.source, ZeroSource)

    def shared(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> GradStandIn:
        """Another stand-in of the same gradient, as `.detach()` and `.data` give.

        Only of a used one with another dtype or device.
        """
        with tensors.without_torch_function():
            form = (self.shape, self.stride(), dtype or self.dtype, device or self.device)
            twin = tensors.wrapper_tensor(GradStandIn, *form)
        twin.grad_state = self.grad_state  # type: ignore[attr-defined]
        return cast(GradStandIn, twin)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        state = self.grad_state
        if state.real is not None:
            return repr(state.real)
        known = "zeroed" if self.zeroed else "on the host" if state.source.is_live() else "gone"
        scaled = f", {len(state.factors)} factors logged" if state.factors else ""
        with tensors.without_torch_function():
            return f"GradStandIn({tuple(self.shape)}, dtype={self.dtype}, device='{self.device}', {known}{scaled})"

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled code would read the memory a stand-in does not have
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        answer = answer_fast(func, args, kwargs)
        return answer if answer is not NotImplemented else run_on_real(func, args, kwargs, into_parameter=True)

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default and cast(GradStandIn, args[0]).grad_state.real is None:
            return cast(GradStandIn, args[0]).shared()
        # C++ may hold a reference to the slot of p.grad right now (AccumulateGrad does), so the
        # parameter is left alone.
        return run_on_real(func, args, {} if kwargs is None else kwargs, into_parameter=False)


def run_on_real(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, into_parameter: bool) -> Any:
    """`func` with every stand-in replaced by its real tensor.

    Where it returns such a tensor itself, the stand-in is returned.
    """
    standins: dict[int, GradStandIn] = {}

    def real_of(value: Any) -> Any:
        if isinstance(value, GradStandIn):
            real = value.grad_state.materialize()
            standins.setdefault(id(real), value)
            return real
        if type(value) in (list, tuple):
            return type(value)([real_of(item) for item in value])
        if type(value) is dict:
            return {key: real_of(item) for key, item in value.items()}
        return value

    def standin_of(value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)([standin_of(item) for item in value])
        return standins.get(id(value), value)

    result = func(*[real_of(arg) for arg in args], **{key: real_of(arg) for key, arg in kwargs.items()})
    for standin in standins.values():
        if into_parameter:
            standin.grad_state.become_parameter_grad()
        else:
            standin.grad_state.added = True
    return standin_of(result)


tensors.allow_in_foreach(GradStandIn)
