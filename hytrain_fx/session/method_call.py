"""A method of the model that is captured: `compile(model.training_step, optimizer)`.

It stays the model's method: the compiled one stands in the object, where it covers the one of the
class. `model(...)` is compiled beside it, with graphs of its own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import update_wrapper
from types import MethodType
from typing import Any, Final

import torch
from torch import nn

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.session.call_gate import CallGate

_OF_THE_CALL: Final = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")


class MethodCall:
    """Stands in the model for one of its methods. A copied or pickled model has the plain one."""

    def __init__(self, gate: CallGate, method: MethodType, name: str) -> None:
        update_wrapper(self, method)
        self.method = method
        self._gate = gate
        self._entry = gate.entry(method)
        self._name = name

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as of the gate's own call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._gate.enter(self._entry, args, kwargs)

    @property
    def __self__(self) -> object:
        """The model, as of any bound method."""
        return self.method.__self__

    def __reduce__(self) -> tuple[Any, tuple[object, str]]:
        return (getattr, (self.__self__, self._name))

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodType:
        return MethodType(self.method.__func__, copy.deepcopy(self.__self__, memo))


@dataclass(frozen=True, eq=False)
class Called:
    """What the loop calls: a model, or one of its methods by name."""

    model: Any
    method: MethodType | None = None
    name: str = ""

    def install(self, gate: CallGate) -> Any:
        """Have the model's method be the compiled one, which is returned."""
        assert self.method is not None
        call = vars(self.model)[self.name] = MethodCall(gate, self.method, self.name)
        return call


def called_of(given: Any) -> Called:
    """What was handed over. A model's forward stands for the model.

    Raises UnsupportedError for a callable that is no method of a module.
    """
    if isinstance(given, MethodCall):
        given = given.method
    if isinstance(given, nn.Module) or not callable(given):
        return Called(given)
    model = getattr(given, "__self__", None)
    name = _name(model, given) if type(given) is MethodType and isinstance(model, nn.Module) else None
    if name is None:
        found = getattr(given, "__qualname__", type(given).__name__)
        raise UnsupportedError(f"found {found}; expected a torch.nn.Module, or a method that one has (model.training_step). "
                               "Make a function of the loop a method of the model")
    return Called(model) if name in _OF_THE_CALL else Called(model, given, name)


def remove_methods(model: nn.Module) -> None:
    """Give the model its plain methods back."""
    own = vars(model)
    for name, value in tuple(own.items()):
        if isinstance(value, MethodCall):
            del own[name]
            if getattr(model, name, None) != value.method:
                own[name] = value.method  # it was the object's, not the class's


def _name(model: nn.Module, method: MethodType) -> str | None:
    """By what name the model has the method. Other attributes may compute and are not read."""
    for name, value in vars(model).items():
        if value == method or (isinstance(value, MethodCall) and value.method == method):
            return name
    for kind in type(model).__mro__:
        for name, value in vars(kind).items():
            if value is method.__func__ and getattr(model, name, None) == method:
                return name
    return None
