"""Weights that do not rest in their parameters' memory.

On the host: the half of their masters that is the weight is their home. Sharded: this rank's shard
is, in 16 bits on the device wherever its states are, or as that half of its master on the host.

    the engine          writes its updates there
    a graph             finds the weight in a slot of the device, under the parameter's own storage
                        (weights/streamed_weights.py)
    the loop            finds it in memory that the parameter is given while somebody looks

The states know such a parameter by its home: what is read and written of the weight here is read
and written there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hytrain_fx.runtime.engine import RowStates


@dataclass(slots=True)
class StreamedWeight:
    """One of them.

    weight       the parameter, 16-bit
    has_memory   whether it has memory of its own now, beside slots
    current      whether that memory shows the weight of the last update
    sharded      whether its home is this rank's shard alone
    shard        its home, flat, where that is on the device; None: it is on the host
    """

    weight: torch.Tensor
    has_memory: bool = True
    current: bool = True
    sharded: bool = False
    shard: torch.Tensor | None = None

    @property
    def shows(self) -> bool:
        """Whether who reads the parameter's own memory finds the weight there."""
        return self.has_memory and self.current


def home_of(weight: torch.Tensor, states: RowStates) -> torch.Tensor:
    """The half of a master on the host that is the weight, in the parameter's shape and strides."""
    master = states.master
    return master.as_strided(weight.shape, weight.stride(), master.storage_offset())


def may_stream(weight: torch.Tensor) -> bool:
    """Whether a parameter may be given other memory: a bf16 matrix that has its memory to itself.

    Vectors stay on the device. A part of a larger memory, a file's, and memory that other processes
    share stay too.
    """
    storage = weight.untyped_storage()
    shared = weight.device.type == "cpu" and storage.is_shared()
    whole = weight.storage_offset() == 0 and storage.nbytes() == weight.numel() * weight.element_size()
    return weight.dtype == torch.bfloat16 and weight.dim() > 1 and weight.numel() > 0 and whole and storage.resizable() and not shared
