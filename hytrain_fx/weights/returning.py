"""Room on the device for weights that come back at the end: all of them, or none.

What is free there may lie in pieces that are too small. So memory for every weight is taken before
the first one comes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import torch

DEVICE_SHARE: Final = 0.95
"""Of the room on the device that weights may fill when all come back."""


@dataclass(frozen=True, slots=True)
class Returning:
    """Bytes of weights without memory of their own, and what device and host have for them."""

    away_bytes: int
    device_bytes: float
    host_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the device can have them all, with a margin for what lies between."""
        return self.away_bytes <= DEVICE_SHARE * self.device_bytes


class ReservedMemory:
    """Memory of one session's device, by the row that is to have it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken: dict[int, torch.Tensor] = {}

    def has(self, rows: Collection[int]) -> bool:
        """Whether memory of each of these rows was reserved, and not used."""
        return self._taken.keys() >= set(rows)

    def reserve(self, nbytes: Mapping[int, int]) -> bool:
        """Whether the device has had memory for each of these rows. Else none of it is kept."""
        try:
            for row in nbytes.keys() - self._taken.keys():
                self._taken[row] = new_memory(nbytes[row], self._device)
        except torch.OutOfMemoryError:
            self.release()
            return False
        return True

    def release(self) -> None:
        """Give back what was not used."""
        self._taken.clear()

    def memory(self, row: int, nbytes: int) -> torch.Tensor:
        """uint8, what was reserved for the row, else new memory. Raises torch.OutOfMemoryError."""
        reserved = self._taken.pop(row, None)
        return new_memory(nbytes, self._device) if reserved is None else reserved


def new_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8, not filled. Raises torch.OutOfMemoryError."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
