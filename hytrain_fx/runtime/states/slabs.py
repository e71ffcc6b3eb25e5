"""Host memory in blocks of the exact size, faulted in by all cores, then pinned.

torch's pinned allocator rounds up to a power of two, up to twice what is asked for; an anonymous
mapping that is registered with the driver does not. Fresh mappings read as zero, which is what
Adam's moments start from.

Registering faults in the pages that are missing, one after the other: about 1 GB/s a thread. So the
pages are made first, in parallel and 2 MiB at a time where the kernel has them to give, and
registering only walks over them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import torch

from hytrain_fx.errors import EngineError, HostMemoryError, HytrainWarning
from hytrain_fx.ir.limits import CACHE_LINE_BYTES
from hytrain_fx.runtime.affinity import allowed_cpus, threads_on
from hytrain_fx.runtime.memory import available_host_bytes
from hytrain_fx.runtime.topology import cores_of_rank, cpus_for, read_topology

_REGISTER_THREADS = 8
_PIECE_BYTES = 64 << 20  # what one thread faults in at a time
_HUGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it

_log = logging.getLogger("hytrain_fx")


@dataclass(frozen=True, slots=True)
class Pinning:
    """What pinning some slabs together took."""

    nbytes: int
    populate_us: float  # making the pages
    register_us: float  # registering them with the driver

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes pinned in a second, both parts together; 0 for nothing."""
        spent_us = self.populate_us + self.register_us
        return self.nbytes / spent_us / 1e3 if spent_us else 0.0


class HostSlab:
    """One block of host memory, handed out front to back, pinned when the device is a GPU.

    pinning    what pinning took of it and those pinned with it; None while it is not pinned by
               `pin_slabs`
    unpinned   why it could not be, and is used all the same
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.pinning: Pinning | None = None
        self.unpinned: str | None = None
        # Private: shared memory gets huge pages only where an administrator has said so.
        try:
            self._map = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, MemoryError) as error:
            raise HostMemoryError(f"the system refused {nbytes / 2**30:.2f} GiB of host memory: {error}. Raise the limit (ulimit -v, the "
                                  "container's), or keep more states on the device (gpu_states=...)") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0
        self._pinned_on: torch.device | None = None
        self._made_by = os.getpid()

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next `numel` elements of this slab as a flat tensor."""
        nbytes = numel * dtype.itemsize
        part = self._bytes[self._used : self._used + nbytes].view(dtype)
        self._used += slab_bytes(numel, dtype)
        return part

    def pieces(self) -> Iterator[tuple[int, int]]:
        """The block cut into byte ranges that different threads may fault in.

        No two ranges share a huge page.
        """
        begin, total, base = 0, self._bytes.numel(), self._bytes.data_ptr()
        while begin < total:
            end = min(total, (base + begin + _PIECE_BYTES) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES - base)
            yield begin, end
            begin = end

    def populate(self, begin: int, end: int) -> None:
        """Make the pages of these bytes, which nothing has written to yet. Releases the GIL."""
        if not _populate(self._bytes.data_ptr() + begin, end - begin):
            self._bytes[begin : end : mmap.PAGESIZE].fill_(0)

    def pin(self, device: torch.device) -> None:
        """Register the block with the GPU's driver, so that copies are asynchronous.

        Raises EngineError.

        Forked children do not have the block: the kernel would copy all of it for each of them, as
        the driver holds its pages.
        """
        self._map.madvise(mmap.MADV_DONTFORK)
        # The driver pins nothing beside some kernels. A collective's would wait for another rank,
        # which may wait here for its own.
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            result = int(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0))
        if result != 0:
            self._map.madvise(mmap.MADV_DOFORK)
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
            self._map.madvise(mmap.MADV_DOFORK)

    def require_here(self) -> None:
        """Raise EngineError in a forked child that does not have the block.

        Reading it there would end the process.
        """
        # If it is pinned, something else may have been mapped there in this process.
        if os.getpid() != self._made_by and (self._pinned_on is not None or not _is_mapped(self._bytes.data_ptr())):
            raise EngineError(
                "this process was forked from the one that compiled the model, and does not have the optimizer's states: their memory is "
                "registered with the GPU's driver, and forked processes get none of it. Read the states in the parent (state_dict() before "
                "the fork, and hand on what it gives)"
            )

    def __del__(self) -> None:
        # A slab that is dropped while registered would leave the driver a stale mapping. In a
        # forked child it is not ours.
        if getattr(self, "_pinned_on", None) is not None and self._made_by == os.getpid():
            self.unpin()


def slab_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes that `take(numel, dtype)` uses up."""
    return padded_bytes(numel * dtype.itemsize)


def padded_bytes(nbytes: int) -> int:
    """Bytes that a part of `nbytes` uses up of a slab."""
    return -(-nbytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


def pin_slabs(slabs: Sequence[HostSlab], device: torch.device, workers: int) -> Pinning | None:
    """Pin fresh slabs for a GPU and note on each what it took, or why it could not be pinned.

    For a model on the CPU nothing is done, and None returned.

    Their pages are where so many `workers` run.
    """
    if not needs_pinning(device) or not slabs:
        return None
    begin_s = time.perf_counter()
    _populate_all(slabs, device, workers)
    populated_s = time.perf_counter()
    with threads_on(allowed_cpus()), ThreadPoolExecutor(_REGISTER_THREADS) as pool:
        pinned = [slab for slab, done in zip(slabs, pool.map(partial(_pin_or_note, device), slabs), strict=True) if done]
    done_s = time.perf_counter()
    pinning = Pinning(sum(slab.nbytes for slab in pinned), (populated_s - begin_s) * 1e6, (done_s - populated_s) * 1e6)
    for slab in pinned:
        slab.pinning = pinning
    _log.info("pinned %.2f GB of host memory at %.1f GB/s: %.2f s making pages, %.2f s registering them",
              pinning.nbytes / 1e9, pinning.gb_per_s, pinning.populate_us / 1e6, pinning.register_us / 1e6)
    return pinning


def pin_factors(slab: HostSlab, device: torch.device) -> None:
    """Pin the slab that factors of gradients come to. Where that fails, warn, and note why."""
    pin_slabs([slab], device, workers=1)
    if slab.unpinned is not None:
        warnings.warn(f"{slab.unpinned}. So memory for the factors of clipping and loss scaling is left unpinned: with one of these, "
                      "step() waits until the device has made it", HytrainWarning, stacklevel=2)


def needs_pinning(device: torch.device) -> bool:
    """Whether copies to and from this device are asynchronous from pinned memory alone."""
    return device.type != "cpu"


def _pin_or_note(device: torch.device, slab: HostSlab) -> bool:
    """Whether it is pinned; the slab says why not.

    Copies from and to memory that is not are right too: the driver makes them while it is asked.
    """
    try:
        slab.pin(device)
    except EngineError as error:
        slab.unpinned = str(error)
    return slab.unpinned is None


def _populate_all(slabs: Sequence[HostSlab], device: torch.device, workers: int) -> None:
    """Make all pages, each thread on one of the cores that the workers will run on.

    A page comes from the NUMA node of the core that makes it.
    """
    topology = read_topology(device)
    cpus: SimpleQueue[int | None] = SimpleQueue()
    numbers: list[int | None] = [None] * len(allowed_cpus())
    if topology is not None:
        of_workers = cpus_for(topology, workers)
        numbers = [cpu.number for cpu in cores_of_rank(topology) if cpu.number in of_workers]
    for number in numbers or [None]:
        cpus.put(number)

    def keep_to_one() -> None:
        number = cpus.get()
        if number is not None:
            with contextlib.suppress(OSError):  # a container may forbid it; then the system chooses
                os.sched_setaffinity(0, {number})  # this thread only

    pieces = [(slab, begin, end) for slab in slabs for begin, end in slab.pieces()]
    with threads_on(allowed_cpus()), ThreadPoolExecutor(max(1, len(numbers)), initializer=keep_to_one) as pool:
        list(pool.map(lambda piece: piece[0].populate(piece[1], piece[2]), pieces))


def _populate(address: int, nbytes: int) -> bool:
    """Whether the kernel made the pages in one call.

    ctypes releases the GIL meanwhile, mmap.madvise would not.
    """
    madvise = ctypes.CDLL(None).madvise
    return int(madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE)) == 0


def _is_mapped(address: int) -> bool:
    """Whether this process has the page at `address`, in memory or not."""
    return int(ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(1), ctypes.byref(ctypes.c_ubyte()))) == 0


def require_host_memory(needed_bytes: int, limit_bytes: int | None, in_use_bytes: int = 0) -> None:
    """Raise HostMemoryError where the host cannot hold `needed_bytes`.

    It is called before anything is allocated.

    in_use_bytes   what states have of `limit_bytes` already
    """
    room = available_host_bytes() if limit_bytes is None else limit_bytes - in_use_bytes
    if needed_bytes > room:
        there = (f"{_figure(room)} are available on this host" if limit_bytes is None else
                 f"host_memory allows {_figure(limit_bytes)}" + (f", of which {_figure(in_use_bytes)} are in use" if in_use_bytes else ""))
        raise HostMemoryError(
            f"the optimizer states placed on the host need {_figure(needed_bytes)}{' more' if in_use_bytes else ''}, and {there}; "
            "keep more states on the device (k=..., gpu_states=...), or set host_memory where the figure is known to be wrong"
        )


def _figure(nbytes: int) -> str:
    """To the byte, for who sets host_memory to it."""
    return f"{nbytes} bytes" + (f" ({nbytes / 2**30:.2f} GiB)" if nbytes >= 1 << 27 else "")
