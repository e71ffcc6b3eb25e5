"""What any optimizer keeps for one row, under its own names.

Tensors of any shape rest with the row, scalar tensors on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Entry = dict[str, Any]
"""`optimizer.state[parameter]`: tensors, scalars, and nests of them."""


@dataclass(slots=True)
class OwnStates:
    """An optimizer's entry for one row, next to its master; None before the first step."""

    entry: Entry | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that rest with the row."""
        return sum(leaf.nbytes for leaf in leaves(self.entry) if is_tensor(leaf))

    def take(self, other: OwnStates, device: torch.device) -> None:
        """Become the other's states, tensors on this device."""
        self.entry = map_leaves(other.entry, lambda leaf: leaf.to(device) if is_tensor(leaf) else leaf)


def is_scalar(leaf: object) -> bool:
    """Whether a leaf of an entry is a scalar tensor such as `step`.

    Such a leaf is on the CPU, whatever the parameter's device is.
    """
    return isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.device.type == "cpu"


def is_tensor(leaf: object) -> bool:
    """Whether a leaf of an entry rests with the row."""
    return isinstance(leaf, torch.Tensor) and not is_scalar(leaf)


# ---- Values nested in plain dicts, lists and tuples ----
#
# Optimizers keep them for a parameter, and torch operations take them.


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest with every leaf changed."""
    if type(value) is dict:
        return {key: map_leaves(of, change) for key, of in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map_leaves(of, change) for of in value)
    return change(value)


def leaves(value: Any) -> Iterator[Any]:
    """Every leaf, in the order of `map_leaves`."""
    if type(value) is dict:
        value = list(value.values())
    if type(value) in (tuple, list):
        for of in value:
            yield from leaves(of)
    else:
        yield value


def frozen(value: Any) -> Hashable:
    """The nest as a value that can be a key; leaves must be hashable. Raises TypeError."""
    if type(value) is dict:
        return ("dict", *((key, frozen(of)) for key, of in value.items()))
    if type(value) in (tuple, list):
        return (type(value).__name__, *(frozen(of) for of in value))
    hash(value)
    return (type(value), value)
