"""GradScaler without a wait: what it leaves at the optimizer instead of reading it.

    scaler.step(optimizer)
        as a rule, and the launching thread waits for the whole backward:
            found_inf.item() == 0: optimizer.step()
        where `_step_supports_amp_scaling`, and step() is called in any case:
            optimizer.grad_scale, optimizer.found_inf = ...
            optimizer.step()

Both are tensors on the device. Gradients are scaled as by `unscale_`, and the engine updates
nothing where `found_inf` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from hytrain_fx.torch_private.names import private_function
from hytrain_fx.torch_private.optimizers import asking_grad_scaler, has_step_hooks
from hytrain_fx.torch_private.tensors import get_grad

_foreach_mul_: Final = private_function("_foreach_mul_")
_unscale_: Final = private_function("_amp_foreach_non_finite_check_and_unscale_")


def steps_without_wait(optimizer: torch.optim.Optimizer, before: Callable[[torch.amp.GradScaler], None]) -> bool:
    """Whether GradScaler may call step() for a step that is to be skipped.

    The engine can leave such a step out.

    Not where somebody would see that call: through a hook, or a `step` of their own instead of
    ours (a scheduler's only counts). Others than GradScaler that ask (Lightning, whether gradients
    must be unscaled before clipping) want to do that themselves.

    before   called with the GradScaler that asks
    """
    scaler = asking_grad_scaler()
    if scaler is None:
        return False
    before(scaler)
    return not is_watched(optimizer)


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody would see a call of `step()`: so it is not called for a step left out."""
    own = vars(optimizer).get("step")
    is_own = own is not None and not hasattr(own, "_wrapped_by_lr_sched") and getattr(own, "__func__", None) is not type(optimizer).step
    return is_own or has_step_hooks(optimizer)


@contextmanager
def left_by_scaler(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[torch.Tensor | None]:
    """Scale the gradients as GradScaler asks.

    Gives what says, on `device`, whether this step is left out; None without GradScaler.

    Raises ValueError for fp16 gradients that are still scaled, as `unscale_` does, and
    AssertionError where there is no gradient, as GradScaler does. It takes back what it left only
    if step() returns, so an error here does.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    grad_scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
    try:
        if grad_scale is not None:
            _unscale(optimizer, grad_scale)
        if found_inf is None:
            yield None
        elif isinstance(found_inf, torch.Tensor):
            yield found_inf.detach().reshape(()).to(device, torch.float32, non_blocking=True)
        else:
            raise AssertionError("No inf checks were recorded for this optimizer.")
    except BaseException:
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)
        raise


@torch.no_grad()
def _unscale(optimizer: torch.optim.Optimizer, grad_scale: torch.Tensor) -> None:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = get_grad(parameter)
            if grad is not None:
                by_dtype.setdefault(grad.dtype, []).append(grad)
    if torch.float16 in by_dtype:
        raise ValueError("Attempting to unscale FP16 gradients.")  # torch's words, for which scripts may look
    inverse = grad_scale.double().reciprocal().float()  # as GradScaler.unscale_ has it
    for dtype, grads in by_dtype.items():
        if dtype == torch.float32:  # the product is the same, and stand-ins log it also where they were checked before
            _foreach_mul_(grads, inverse.reshape(()))
        else:
            _unscale_(grads, torch.zeros_like(inverse), inverse)
