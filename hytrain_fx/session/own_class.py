"""What the user's optimizer has besides what every optimizer has, for the one that compile returns.

    an attribute, a method of its own        is the user's object's
    its own zero_grad, state_dict, ...       runs on that object, with ours for torch's:

        class of the user -> its bases -> ours -> torch.optim.Optimizer
                                          super().zero_grad() ends here

    its own form of anything else            is not called, and a warning says so
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import torch

from hytrain_fx.errors import HytrainWarning

OVERRIDABLE: Final = ("zero_grad", "state_dict", "load_state_dict")
# The update itself; refused after compile(); whether GradScaler may call step(), which ours says.
_ELSEWHERE: Final = ("step", "add_param_group", "_step_supports_amp_scaling")
_FROM_OUTSIDE: Final = ("grad_scale", "found_inf")  # what GradScaler leaves at the optimizer that it steps
_CONSTANTS: Final = (bool, int, float, str, type(None))


def overrides(kind: type, name: str) -> bool:
    """Whether a class of the user's, not of torch's, is the one that defines `name`."""
    owner = next((of for of in kind.__mro__ if name in vars(of)), object)
    return owner is not object and not owner.__module__.startswith("torch.")


def is_dunder(name: str) -> bool:
    """Whether Python itself asks for it, as pickling and copying do."""
    return name.startswith("__") and name.endswith("__")


def has_own(original: torch.optim.Optimizer, name: str) -> bool:
    """Whether the user's optimizer has an attribute, or its class a method that is not torch's."""
    kind = type(original)
    if is_dunder(name):
        return False
    return name in vars(original) or overrides(kind, name) or overrides(kind, "__getattr__")


def takes(original: torch.optim.Optimizer, name: str, value: object) -> bool:
    """Whether an attribute set on the returned optimizer is one of the user's.

    It has it already, or it is a constant that a step may look for.
    """
    if name in _FROM_OUTSIDE or is_dunder(name):
        return False
    return name in vars(original) or overrides(type(original), name) or (not name.startswith("_") and isinstance(value, _CONSTANTS))


def own_methods(original: torch.optim.Optimizer, ours: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """What the user's class overrides of `OVERRIDABLE`, bound.

    `super()` in them reaches `ours`, and their `self` has the attributes of `original`.
    """
    kind = type(original)
    found = [name for name in OVERRIDABLE if overrides(kind, name)]
    if not found:
        return {}

    def method(name: str) -> Callable[..., Any]:
        return lambda _, *args, **named: ours[name](*args, **named)

    base = types.new_class("Optimizer", (torch.optim.Optimizer,), exec_body=lambda body: body.update({name: method(name) for name in ours}))
    both = types.new_class(kind.__name__, (_Unnoticed, kind, base))
    view: torch.optim.Optimizer = object.__new__(both)
    view.__dict__ = vars(original)  # one dict: what either sets, both have
    return {name: getattr(both, name).__get__(view, both) for name in found}


class _Unnoticed:
    """First of its bases, so that a class of the user's is not told of one that we make."""

    def __init_subclass__(cls, **options: Any) -> None: ...


def tell_of_unused(original: torch.optim.Optimizer, returned: type, own: Collection[str]) -> None:
    """Warn of what the returned optimizer has by the same name, so that the user's is not used.

    own    the attributes that it has besides those of every optimizer
    """
    kind = type(original)
    methods = {name for name in dir(returned) if name not in (*OVERRIDABLE, *_ELSEWHERE)}
    new = {*own, *(methods - set(dir(torch.optim.Optimizer)))}
    taken = {name for name in methods | new if overrides(kind, name)} | (new & vars(original).keys())
    unused = sorted(name for name in taken if not is_dunder(name))
    if unused:
        name = f"{kind.__name__}.{unused[0]}"
        warnings.warn(f"{name} is not used by the optimizer that compile() returns, which has its own of that name. Give it another name; "
                      "zero_grad, state_dict and load_state_dict may be overridden", HytrainWarning, stacklevel=4)
