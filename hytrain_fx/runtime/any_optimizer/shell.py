"""An optimizer of the user's class that holds one parameter, or a few.

So one parameter's step is that class's own code.

    optimizer              shell
    its class              the same class, its __init__ not called
    its attributes         copies
    options of a group     at present; the for-loop form
    state of a parameter   given, and read back after the step
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.runtime.own_states import Entry, leaves, map_leaves
from hytrain_fx.torch_private.optimizers import own_step

Options = dict[str, Any]

_NOT_OPTIONS = ("params", "param_names")
# Ways to compute the same step. Only the for-loop takes one parameter on any device.
_FORMS = ("foreach", "fused", "capturable")
_FIXED = (type(None), type, FunctionType, torch.dtype, torch.layout, torch.memory_format)


def options_of(group: Mapping[str, Any]) -> Options:
    """The options of a group now, tensors copied to the CPU (waits for their device).

    The form is the for-loop.
    """
    options = {key: map_leaves(value, _kept) for key, value in group.items() if key not in _NOT_OPTIONS}
    return options | {form: False for form in _FORMS if form in options}


def changed_options(before: Mapping[str, Any], after: Mapping[str, Any]) -> Options:
    """The options that a step has given its group."""
    return {key: value for key, value in after.items() if key not in _NOT_OPTIONS and not (key in before and same(value, before[key]))}


@dataclass(frozen=True)
class Shells:
    """Makes optimizers of one class and attributes.

    kind         the user's class
    attributes   what is on the user's optimizer besides what every Optimizer has
    """

    kind: type[torch.optim.Optimizer]
    defaults: Options
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Shells:
        """Like the user's optimizer is now.

        Raises UnsupportedError where its attributes hold tensors or other optimizers.
        """
        kind, common = type(optimizer), _common_attributes()
        # A callable that the class has too was put there by a scheduler, or by an earlier
        # compile(): it is for calls of the whole optimizer.
        own = {key: value for key, value in vars(optimizer).items() if key not in common and not callable(getattr(kind, key, None))}
        for key, value in own.items():
            _require_free(kind.__name__, key, value)
        return cls(kind, dict(optimizer.defaults), own)

    @property
    def reads_marks(self) -> bool:
        """Whether a step may read what is on a parameter. The steps of torch's classes do not."""
        return not all(of.__module__.startswith("torch.") for of in self.kind.__mro__ if of is not object)

    def with_attributes(self, changed: Mapping[str, Any]) -> Shells:
        """With these attributes set."""
        return replace(self, attributes={**self.attributes, **changed}) if changed else self

    def changed_attributes(self, shell: torch.optim.Optimizer) -> dict[str, Any]:
        """What the steps of a shell have set on it."""
        common, before = _common_attributes(), self.attributes
        own = {key: value for key, value in vars(shell).items() if key not in common}
        return {key: value for key, value in own.items() if not (key in before and same(value, before[key]))}

    def make(self, groups: Sequence[tuple[Options, Sequence[nn.Parameter]]], state: Mapping[torch.Tensor, Entry]) -> torch.optim.Optimizer:
        """An optimizer with these groups; `state` by parameter."""
        shell: torch.optim.Optimizer = object.__new__(self.kind)
        bare = torch.optim.Optimizer([{**options, "params": list(parameters)} for options, parameters in groups], {})
        vars(shell).update(vars(bare))
        vars(shell).update({key: _copied(value) for key, value in self.attributes.items()})
        shell.defaults = dict(self.defaults)
        shell.state = defaultdict(dict, state)
        return shell


def may_change_unseen(value: object) -> bool:
    """Whether this is equal to itself alone, and what is in it may still change."""
    kind: Any = type(value)
    return kind.__hash__ is object.__hash__ and kind.__eq__ is object.__eq__ and not isinstance(value, _FIXED)


def run_step(shell: torch.optim.Optimizer) -> None:
    """The class's own step, without the user's hooks: they are for the whole optimizer."""
    with torch.no_grad():
        own_step(shell)(shell)


@cache
def _common_attributes() -> frozenset[str]:
    return frozenset(vars(torch.optim.Optimizer([torch.zeros(1)], {})))


def _require_free(kind: str, key: str, value: Any) -> None:
    held = next((of for of in leaves(value) if isinstance(of, torch.Tensor | torch.optim.Optimizer | nn.Module)), None)
    if held is not None:
        raise UnsupportedError(
            f"{kind} keeps a {type(held).__name__} in its attribute {key!r}, so its step needs more than one parameter, its gradient and "
            "its state; hytrain_fx updates parameters one by one. Keep such tensors in optimizer.state[parameter]"
        )


def _kept(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # a lock, a file, a generator: what is no number is shared
        return value


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same. Where that cannot be told, they are not."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and _same_tensors(one, other)
    if hasattr(one, "__array_interface__"):  # NumPy's: an array is no bool
        return type(one) is type(other) and (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if type(one) in (dict, list, tuple):
        first, second = list(leaves(one)), list(leaves(other))
        return type(one) is type(other) and len(first) == len(second) and all(map(same, first, second))
    try:
        if type(one) is type(other) and may_change_unseen(one):
            return same(one.__reduce_ex__(4), other.__reduce_ex__(4))  # a shell has a copy: the same if it was copied from the same
        return bool(one == other) or bool(one != one and other != other)  # NaN equals itself
    except Exception:
        return False


def _same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN equals itself."""
    if (one.device, one.dtype, one.shape, one.layout) != (other.device, other.dtype, other.shape, other.layout):
        return False
    try:
        return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
    except RuntimeError:  # a layout that torch compares not
        return False
