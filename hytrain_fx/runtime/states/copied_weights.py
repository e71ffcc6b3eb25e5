"""Fp32 weights that the device has in 16 bits.

Graphs read a bf16 copy; the fp32 memory is there only while somebody looks.

    resident row       the parameter's memory is the master; the update writes it and the copy
    row on the host    the masters are in halves there (split_master.py); the parameter's memory is
                       given back, and filled again from copy, low half and sign when it is asked
                       for

A parameter whose memory is given back keeps its shape, strides and dtype, its storage has no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from hytrain_fx.ir.limits import CHUNK_PARAMS
from hytrain_fx.runtime.engine import RowStates
from hytrain_fx.runtime.states.split_master import join


@dataclass(slots=True)
class CopiedWeight:
    """One of them.

    weight     the parameter, fp32
    copy       bf16, strides as the parameter's
    current    whether the parameter's memory has what the last update made
    """

    weight: torch.Tensor
    copy: torch.Tensor
    current: bool = True

    @property
    def has_memory(self) -> bool:
        """Whether the parameter has its fp32 memory now."""
        return self.weight.untyped_storage().nbytes() != 0

    def take_memory(self) -> None:
        """Give the parameter fp32 memory, of no values yet, where it has none."""
        if not self.has_memory:
            self.weight.untyped_storage().resize_(self.weight.numel() * self.weight.element_size())

    def give_memory_back(self) -> None:
        """Give the memory back; nobody else may hold it."""
        self.weight.untyped_storage().resize_(0)
        self.current = False


class CopiedWeights:
    """By row."""

    def __init__(self) -> None:
        self._of: dict[int, CopiedWeight] = {}
        self.tensors: dict[int, torch.Tensor] = {}  # the copies by row

    def __contains__(self, row: object) -> bool:
        return row in self._of

    def __getitem__(self, row: int) -> CopiedWeight:
        return self._of[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def add(self, row: int, weight: torch.Tensor) -> torch.Tensor:
        """Make the copy of a weight."""
        copy = weight.detach().to(torch.bfloat16)  # the same strides: the weight is dense
        self._of[row] = CopiedWeight(weight, copy)
        self.tensors[row] = copy
        return copy

    def updated(self, rows: Iterable[int]) -> None:
        """Note that the copies of these rows, on the host, are about to change."""
        for row in rows:
            self._of[row].current = False

    def fill(self, row: int, states: RowStates) -> None:
        """Write the master of a row at rest, in halves, into the parameter's memory.

        The parameter's version is counted up.
        """
        of = self._of[row]
        of.take_memory()
        target, copy = _flat(of.weight), _flat(of.copy)
        assert states.low is not None
        state = states.marked()
        for begin in range(0, copy.numel(), CHUNK_PARAMS):
            part = slice(begin, begin + CHUNK_PARAMS)
            low, marked = states.low[part].to(copy.device), state[part].to(copy.device)
            target[part].copy_(join(copy[part], low, marked))
        of.current = True


def owns_memory(weight: torch.Tensor) -> bool:
    """Whether the weight is fp32 and may give its memory back.

    The memory must not be a part of a larger one, a file's, or shared with another process.
    """
    storage = weight.untyped_storage()
    shared = weight.device.type == "cpu" and storage.is_shared()
    whole = weight.storage_offset() == 0 and storage.nbytes() == weight.numel() * weight.element_size()
    return weight.dtype == torch.float32 and whole and storage.resizable() and not shared


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))
