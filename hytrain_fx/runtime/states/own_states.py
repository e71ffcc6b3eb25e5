"""What any optimizer keeps for one row, under its own names: tensors of any shape where the row rests, scalar tensors on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hytrain_fx.runtime.states.leaves import leaves, map_leaves

Entry = dict[str, Any]
"""`optimizer.state[parameter]`: tensors, scalars, and nests of them."""


@dataclass(slots=True)
class OwnStates:
    """An optimizer's entry for one row, beside its master; None before the first step."""

    entry: Entry | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that rest with the row."""
        return sum(leaf.nbytes for leaf in leaves(self.entry) if is_tensor(leaf))

    def take(self, other: OwnStates, device: torch.device) -> None:
        """Become the other's states, tensors on this device."""
        self.entry = map_leaves(other.entry, lambda leaf: leaf.to(device) if is_tensor(leaf) else leaf)


def is_scalar(leaf: object) -> bool:
    """Whether a leaf of an entry is a scalar tensor of torch's kind (`step`): on the CPU whatever the parameter's device is."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.device.type == "cpu"


def is_tensor(leaf: object) -> bool:
    """Whether a leaf of an entry rests with the row."""
    return isinstance(leaf, torch.Tensor) and not is_scalar(leaf)
