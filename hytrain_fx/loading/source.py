"""Where the values of a model on the meta device come from: what `compile(loader=...)` takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from hytrain_fx.errors import UnsupportedError


class Form(NamedTuple):
    """What a source has of a tensor, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorSource(ABC):
    """Gives the tensors of a model, one at a time."""

    @property
    @abstractmethod
    def described(self) -> str:
        """What it is, for messages."""

    @abstractmethod
    def forms(self) -> Mapping[str, Form] | None:
        """All that it has, by name; None where it can only be asked.

        A source that lists its tensors gives a model all of them, else those without values.
        """

    @abstractmethod
    def reading(self, name: str, meta: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """The values of one tensor on the CPU, of any dtype, which are read within the context.

        name    one that the model's state_dict() has it by
        meta    the tensor of the model, on the meta device
        """

    @abstractmethod
    def opened(self) -> None:
        """Called before a model is checked: a source that was changed meanwhile looks again."""


class AskedSource(TensorSource):
    """A function of the user's: name -> tensor."""

    def __init__(self, ask: Callable[[str], Any]) -> None:
        self._ask = ask

    @property
    def described(self) -> str:
        """As there."""
        return f"loader {getattr(self._ask, '__name__', type(self._ask).__name__)}"

    def forms(self) -> None:
        """Nothing is known before it is asked."""
        return

    def opened(self) -> None:
        """Nothing is known before it is asked."""

    @contextmanager
    def reading(self, name: str, meta: torch.Tensor) -> Iterator[torch.Tensor]:
        """What the function returns. Raises UnsupportedError where that is no tensor."""
        found = self._ask(name)
        if not isinstance(found, torch.Tensor) or found.is_meta:
            kind = "a tensor on the meta device" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
            raise UnsupportedError(f"{self.described} gave {kind} for {name}; expected a tensor with values")
        yield found.detach()


def require_form(name: str, found: Form, wanted: torch.Tensor, where: str) -> None:
    """Raise UnsupportedError where such a tensor cannot be the values of `wanted`.

    Floats of 16 bits and more are converted, as `load_state_dict` does it.
    """
    if found.shape != tuple(wanted.shape):
        raise UnsupportedError(f"{name} has shape {found.shape} in {where}; the model's has {tuple(wanted.shape)}. Make the model with the "
                               "configuration of its weights")
    if found.dtype != wanted.dtype and not (_is_wide_float(found.dtype) and _is_wide_float(wanted.dtype)):
        raise UnsupportedError(f"{name} is {found.dtype} in {where}; the model's is {wanted.dtype}, and only floats of 16 bits and more "
                               "are converted. Quantised weights are made floats first")


def _is_wide_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1
