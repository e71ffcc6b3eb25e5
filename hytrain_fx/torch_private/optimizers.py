"""What is private of torch's optimizers: the hooks around their methods, who calls `step`, and what
a GradScaler has found.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, cast

import torch

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.torch_private.names import private_name

_HOOKS: Final = "_optimizer_{}_hooks"


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run around this optimizer's `step`, its own or those of every optimizer."""
    of_all = [private_name("torch.optim.optimizer", f"_global_optimizer_{when}_hooks") for when in ("pre", "post")]
    return any((*of_all, optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks))


def asking_grad_scaler() -> torch.amp.GradScaler | None:
    """The GradScaler in whose `step` a property is looked up; None elsewhere.

    Called by a function that the property calls.
    """
    frame = sys._getframe(3)  # this function, what asks, the property
    asks = frame.f_code is torch.amp.GradScaler.step.__code__
    return cast(torch.amp.GradScaler, frame.f_locals["self"]) if asks else None


def found_infs(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *, unscales: bool) -> list[torch.Tensor]:
    """What tells `step` and `update` of this scaler whether gradients hold an inf.

    One element each, by device. They may be written to. Raises UnsupportedError where torch keeps
    these elsewhere.

    unscales   the gradients are unscaled on the way, if they are not yet. Else they stay as they
               are, and a later `step` looks at them again
    """
    try:
        state = scaler._per_optimizer_states[id(optimizer)]
        if state["stage"].name == "READY":
            scaler.unscale_(optimizer) if unscales else scaler._check_inf_per_device(optimizer)
        return list(state["found_inf_per_device"].values())
    except (AttributeError, KeyError) as error:
        raise _elsewhere(error) from error


def iteration_of(scaler: torch.amp.GradScaler) -> object:
    """The same object until this scaler's `update()`, another one after it.

    Raises UnsupportedError as `found_infs` does.
    """
    try:
        return scaler._per_optimizer_states
    except AttributeError as error:
        raise _elsewhere(error) from error


def _elsewhere(error: Exception) -> UnsupportedError:
    return UnsupportedError(f"torch {torch.__version__} keeps what a GradScaler has found elsewhere ({error}); "
                            "hytrain_fx was run on torch 2.11 and 2.13")


def load_state_dict_hooks(optimizer: torch.optim.Optimizer) -> tuple[tuple[Callable[..., Any], ...], tuple[Callable[..., Any], ...]]:
    """The hooks registered to run before and after `optimizer.load_state_dict()`."""
    before, after = (_hooks(optimizer, f"load_state_dict_{when}") for when in ("pre", "post"))
    return tuple(before.values()), tuple(after.values())


def hand_over_hooks(old: torch.optim.Optimizer, new: torch.optim.Optimizer, refuse: Callable[..., None]) -> None:
    """All hooks registered on `old`, also from now on, are hooks of `new`.

    Raises UnsupportedError.

    refuse   runs before the `step` that the class of `old` has, alone
    """
    owner = getattr(old.register_step_pre_hook, "__self__", old)  # another one where `old` was handed over before
    for kind in ("step", "state_dict", "load_state_dict"):
        for when in ("pre", "post"):
            setattr(new, _HOOKS.format(f"{kind}_{when}"), _hooks(owner, f"{kind}_{when}"))
    setattr(old, _HOOKS.format("step_pre"), OrderedDict())
    torch.optim.Optimizer.register_step_pre_hook(old, refuse)
    old.register_step_pre_hook = new.register_step_pre_hook  # type: ignore[method-assign]


def _hooks(optimizer: torch.optim.Optimizer, kind: str) -> dict[int, Callable[..., Any]]:
    name = _HOOKS.format(kind)
    hooks = getattr(optimizer, name, None)
    if hooks is None:
        raise UnsupportedError(f"torch {torch.__version__} has no Optimizer.{name}; hytrain_fx was run on torch 2.11 and 2.13")
    return cast(dict[int, Callable[..., Any]], hooks)


def own_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """The `step` that the optimizer's class has, without the hooks that torch puts around it."""
    step: Any = type(optimizer).step
    return cast(Callable[[torch.optim.Optimizer], Any], step.__wrapped__ if getattr(step, "hooked", False) else step)
