"""Host memory in blocks of the exact size, pinned once and in parallel.

torch's pinned allocator rounds up to a power of two, up to twice what is asked for; an anonymous mapping that is registered
with the driver does not. Fresh mappings read as zero, which is what Adam's moments start from.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil
import torch

from hytrain_fx.errors import EngineError, HostMemoryError

ALIGN_BYTES = 64  # a cache line, and the widest vector register
_PIN_THREADS = 8


class HostSlab:
    """One block of host memory, handed out front to back, pinned when the device is a GPU."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0
        self._pinned_on: torch.device | None = None

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next `numel` elements of this slab as a flat tensor."""
        nbytes = numel * dtype.itemsize
        part = self._bytes[self._used : self._used + nbytes].view(dtype)
        self._used += slab_bytes(numel, dtype)
        return part

    def pin(self, device: torch.device) -> None:
        """Register the block with the GPU's driver, so that copies are asynchronous. Raises EngineError."""
        with torch.cuda.device(device):
            result = int(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0))
        if result != 0:
            raise EngineError(
                f"pinning {self.nbytes / 2**30:.2f} GiB of host memory failed (CUDA error {result}); "
                "raise the limit on locked memory (ulimit -l) or keep more states on the device (gpu_states=...)"
            )
        self._pinned_on = device

    def unpin(self) -> None:
        """Take the registration back; nothing may be copying from or to the block."""
        if self._pinned_on is not None:
            with torch.cuda.device(self._pinned_on):
                torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._pinned_on = None

    def __del__(self) -> None:
        # A slab that is dropped while registered would leave the driver a stale mapping.
        if getattr(self, "_pinned_on", None) is not None:
            self.unpin()


def slab_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes that `take(numel, dtype)` uses up."""
    return -(-numel * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES


def pin_slabs(slabs: Sequence[HostSlab], device: torch.device) -> None:
    """Pin slabs side by side: one thread pins about 1 GiB a second, the pages being faulted in as it goes."""
    if device.type == "cpu" or not slabs:
        return
    with ThreadPoolExecutor(_PIN_THREADS) as pool:
        list(pool.map(lambda slab: slab.pin(device), slabs))


def require_host_memory(needed_bytes: int, limit_bytes: int | None) -> None:
    """Raise HostMemoryError, before anything is allocated, where the host cannot hold `needed_bytes`."""
    available = psutil.virtual_memory().available if limit_bytes is None else limit_bytes
    if needed_bytes > available:
        source = "are available on this host" if limit_bytes is None else "are allowed by host_memory"
        raise HostMemoryError(
            f"the optimizer states placed on the host need {needed_bytes / 2**30:.2f} GiB, {available / 2**30:.2f} GiB {source}; "
            "keep more states on the device (k=..., gpu_states=...), or set host_memory where the figure is known to be wrong"
        )
