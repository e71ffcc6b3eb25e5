"""Host memory: exact, zero, faulted in by pieces, registered and given back."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.errors import EngineError
from hytrain_fx.runtime.states import slabs
from hytrain_fx.runtime.states.slabs import HostSlab, Pinning, pin_slabs, slab_bytes
from hytrain_fx.runtime.topology import LogicalCpu, Topology

GPU = torch.device("cuda", 0)


def resident_share(slab: HostSlab) -> float:
    """Share of a slab's pages that are in memory."""
    pages = -(-slab._bytes.numel() // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(slab._bytes.data_ptr()), ctypes.c_size_t(slab._bytes.numel()), found) == 0
    return sum(page & 1 for page in found) / pages


@dataclass
class Driver:
    """Stands for the CUDA runtime: what is registered, and whether every page was there by then.

    idle   for each wait for the device: how many blocks were registered before it
    """

    slabs: list[HostSlab] = field(default_factory=list)
    registered: dict[int, int] = field(default_factory=dict)
    shares: list[float] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    result: int = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered[address] = nbytes
        self.shares += [resident_share(slab) for slab in self.slabs if slab._bytes.data_ptr() == address]
        return self.result

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: found.idle.append(len(found.registered)))
    monkeypatch.setattr(slabs, "read_topology", lambda _: None)
    return found


@settings(deadline=None, max_examples=30)
@given(nbytes=st.integers(0, 400 << 20))
def test_pieces_tile_the_block_and_share_no_huge_page(nbytes: int) -> None:
    """From the first byte to the last, cut at addresses that are multiples of 2 MiB."""
    slab = HostSlab(nbytes)
    pieces = list(slab.pieces())
    assert pieces[0][0] == 0
    assert pieces[-1][1] == max(nbytes, mmap.PAGESIZE)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(pieces))
    assert all((slab._bytes.data_ptr() + begin) % (2 << 20) == 0 for begin, _ in pieces[1:])
    assert all(0 < end - begin <= 64 << 20 for begin, end in pieces)


@pytest.mark.parametrize("old_kernel", [False, True])
def test_populated_pages_are_in_memory_and_zero(old_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one call of the kernel, or by touching each page where the kernel has no such call."""
    if old_kernel:
        monkeypatch.setattr(slabs, "_populate", lambda address, nbytes: False)
    slab = HostSlab(9 << 20)
    assert resident_share(slab) == 0
    for begin, end in slab.pieces():
        slab.populate(begin, end)
    assert resident_share(slab) == 1
    assert not slab.take(9 << 20, torch.uint8).any()


@pytest.mark.parametrize("topology", [None, Topology(tuple(LogicalCpu(n, n, 0) for n in sorted(os.sched_getaffinity(0))))])
def test_slabs_are_in_memory_before_they_are_registered(topology: Topology | None, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registering finds every page there, and the launching thread keeps its CPUs.

    The device is idle by then. Each slab knows what pinning took.
    """
    monkeypatch.setattr(slabs, "read_topology", lambda _: topology)
    before = os.sched_getaffinity(0)
    driver.slabs = [HostSlab(5 << 20), HostSlab(70 << 20), HostSlab(100)]
    pinning = pin_slabs(driver.slabs, GPU, 1)
    assert pinning is not None
    assert driver.shares == [1, 1, 1]
    assert driver.idle == [0, 1, 2]
    assert pinning.nbytes == (75 << 20) + 100
    assert pinning.gb_per_s > 0
    assert all(slab.pinning is pinning for slab in driver.slabs)
    assert os.sched_getaffinity(0) == before
    driver.slabs.pop().unpin()
    del driver.slabs[:]
    assert driver.registered == {}


def test_where_threads_may_not_be_bound_slabs_are_pinned_all_the_same(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that is not there, or a system that forbids it."""
    monkeypatch.setattr(slabs, "read_topology", lambda _: Topology((LogicalCpu(100_000, 0, 0),)))
    driver.slabs = [HostSlab(3 << 20)]
    assert pin_slabs(driver.slabs, GPU, 1) is not None
    assert driver.shares == [1]
    driver.slabs.pop().unpin()


@pytest.mark.parametrize(("workers", "cpus"), [(1, {100_004, 100_005, 100_006}), (2, {100_000, *range(100_003, 100_007)})])
def test_pages_are_made_on_the_socket_where_workers_run(
    workers: int, cpus: set[int], driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are on the GPU's socket if it has enough cores for workers, else on all sockets."""
    numbers = {100_000: 0, 100_003: 0, 100_004: 1, 100_005: 1, 100_006: 1}
    topology = Topology(tuple(LogicalCpu(number, number, node) for number, node in numbers.items()), gpu_node=1)
    monkeypatch.setattr(slabs, "read_topology", lambda _: topology)
    kept_to: set[int] = set()
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, chosen: kept_to.update(chosen))
    driver.slabs = [HostSlab(64 << 20) for _ in range(20)]
    pin_slabs(driver.slabs, GPU, workers)
    assert kept_to
    assert kept_to <= cpus
    while driver.slabs:
        driver.slabs.pop().unpin()


def test_a_model_on_the_cpu_pins_and_touches_nothing() -> None:
    """Its slabs stay lazily zero."""
    slab = HostSlab(4 << 20)
    assert pin_slabs([slab], torch.device("cpu"), 1) is None
    assert slab.pinning is None
    assert resident_share(slab) == 0


def test_a_refused_registration_says_what_to_do(driver: Driver) -> None:
    """The driver's error number, the size, the limit to raise."""
    driver.result = 2
    with pytest.raises(EngineError, match=r"1\.00 GiB .*CUDA error 2.*ulimit -l"):
        HostSlab(1 << 30).pin(GPU)


def test_a_forked_child_does_not_have_pinned_memory(driver: Driver) -> None:
    """It is not copied for the child either. A slab that is no longer pinned comes along."""
    slab = HostSlab(4096)
    assert _child_reads(slab)
    slab.pin(GPU)
    assert not _child_reads(slab)
    slab.unpin()
    assert _child_reads(slab)


def _child_reads(slab: HostSlab) -> bool:
    pages, page = ctypes.CDLL(None).mincore, ctypes.c_ubyte()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if pages(ctypes.c_void_p(slab._bytes.data_ptr()), ctypes.c_size_t(4096), ctypes.byref(page)) == 0 else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@given(numels=st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_what_is_taken_does_not_overlap(numels: list[int]) -> None:
    """Parts follow each other on cache lines and fill a slab of the sum of their sizes."""
    slab = HostSlab(sum(slab_bytes(numel, torch.bfloat16) for numel in numels))
    parts = [slab.take(numel, torch.bfloat16) for numel in numels]
    for value, part in enumerate(parts):
        part.fill_(value)
    assert all(bool((part == value).all()) and part.data_ptr() % 64 == 0 for value, part in enumerate(parts))


def test_the_rate_counts_both_parts() -> None:
    """30 GB in 1 s of making pages and 2 s of registering: 10 GB/s."""
    assert Pinning(30 * 10**9, 1e6, 2e6).gb_per_s == pytest.approx(10)
    assert Pinning(0, 0.0, 0.0).gb_per_s == 0
