"""Where torch's modules keep their parameters, their children and their call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from types import CodeType, MethodType
from typing import Any, Final

import torch
from torch import nn

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.torch_private.names import private_name


class Slots:
    """The entries of all `_parameters` and `_modules` of a model.

    Looking whether any holds another object takes 0.06 us each.
    """

    def __init__(self, model: nn.Module) -> None:
        found: list[tuple[dict[str, Any], str, Any]] = []
        for module in model.modules():
            for attribute in ("_parameters", "_modules"):
                entries = getattr(module, attribute, None)
                if entries is None:
                    raise UnsupportedError(
                        f"torch {torch.__version__} has no nn.Module.{attribute}; hytrain_fx needs it and was run on torch 2.11 and 2.13")
                if isinstance(entries, dict):  # a scripted module has no dict, and its entries stay
                    found += [(entries, name, value) for name, value in entries.items()]
        self._entries = [entries for entries, _, _ in found]
        self._names = [name for _, name, _ in found]
        self._values = [value for _, _, value in found]

    def are_as_found(self) -> bool:
        """Whether each holds the object that it held when this was made."""
        return all(map(is_, map(dict.get, self._entries, self._names), self._values))


_HOOKS: Final = ("forward_pre", "forward", "backward_pre", "backward")
_HOOKS_OF_ALL: Final = [private_name("torch.nn.modules.module", f"_global_{kind}_hooks") for kind in _HOOKS]
_HOOK_OPTIONS: Final = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def _code_of(method: str, of: type[nn.Module] = nn.Module) -> CodeType:
    found = getattr(of, method, None)
    if found is None:
        raise UnsupportedError(
            f"torch {torch.__version__} has no nn.{of.__name__}.{method}; hytrain_fx needs it and was run on torch 2.11 and 2.13")
    code: CodeType = found.__code__
    return code


SAVES: Final = _code_of("_save_to_state_dict")
"""Reads one module's own parameters for `state_dict()`, by `detach()`."""
LOADS: Final = _code_of("_load_from_state_dict")
"""Writes them for `load_state_dict()`, by `copy_()`."""
FAST_FORWARDS: Final = frozenset(
    _code_of("forward", of) for of in (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention))
"""In an evaluation they call one fast operator, of other bits than their usual ones.

They do not where a weight has a `__torch_function__`, for which they ask first.
"""


@dataclass(frozen=True, slots=True, eq=False)
class _Hook:
    """A hook. Equal to others of the same object, or of a method of the same object."""

    hook: Any
    options: tuple[Any, ...]

    def _key(self) -> tuple[Any, ...]:
        method = isinstance(self.hook, MethodType)
        return (id(self.hook.__self__), self.hook.__func__, self.options) if method else (id(self.hook), self.options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hook) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def hooks_of(module: nn.Module) -> tuple[_Hook, ...]:
    """The hooks that a call of this module runs, those of all modules among them.

    Two calls of it are alike where these are equal. Each is held, so that none is taken for
    another.
    """
    found = [getattr(module, f"_{kind}_hooks") for kind in _HOOKS]
    if not any(found) and not any(_HOOKS_OF_ALL):  # that of nearly every call
        return ()
    options = [getattr(module, name) for name in _HOOK_OPTIONS]
    return tuple(
        _Hook(hook, (kind, scope, *(number in of for of in options)))
        for scope, tables in enumerate((found, _HOOKS_OF_ALL))
        for kind, hooks in zip(_HOOKS, tables, strict=True)
        for number, hook in hooks.items()
    )


def plain_call(model: nn.Module) -> MethodType:
    """What `model(...)` calls when nothing is compiled."""
    call: MethodType | None = getattr(model, "_call_impl", None)
    if call is None:
        raise UnsupportedError(
            f"torch {torch.__version__} has no nn.Module._call_impl; hytrain_fx needs it and was run on torch 2.11 and 2.13")
    return call


def compiled_call(model: nn.Module) -> Any:
    """What `model(...)` calls when the model is compiled in place, else None."""
    if not hasattr(nn.Module, "_compiled_call_impl"):
        raise UnsupportedError(f"torch {torch.__version__} has no nn.Module._compiled_call_impl; hytrain_fx was run on torch 2.11 and 2.13")
    call: Any = model._compiled_call_impl
    return call


def set_compiled_call(model: nn.Module, call: Callable[..., Any] | None) -> None:
    """Make `model(...)` call this instead; None makes it a plain model again."""
    model._compiled_call_impl = call
