"""A real gradient at one time: whether anybody has written to it since, or put another there."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch


class Noted(NamedTuple):
    """The tensor, which this does not keep alive, and its version."""

    tensor: weakref.ref[torch.Tensor]
    version: int

    @classmethod
    def now(cls, grad: torch.Tensor) -> Noted:
        """As `grad` is now."""
        return cls(weakref.ref(grad), grad._version)

    def is_of(self, grad: torch.Tensor) -> bool:
        """Whether this was that tensor, written to or not."""
        return self.tensor() is grad

    def is_still(self, grad: torch.Tensor | None) -> bool:
        """Whether that tensor is it, and nobody has written to it."""
        return grad is not None and self.tensor() is grad and self.version == grad._version


def is_as_noted(grad: torch.Tensor, noted: Noted | None) -> bool:
    """`is_still` of what may not have been noted."""
    return noted is not None and noted.is_still(grad)
