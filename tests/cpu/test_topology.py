"""Which CPUs the workers get, on made-up hosts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.runtime.topology import (
    LAUNCHING_CORES,
    LogicalCpu,
    Topology,
    cores_of_rank,
    cpu_list,
    cpus_for,
    launching_cores,
    pick_workers,
    read_topology,
    usable_cores,
)


def host(cores: int, nodes: int = 1, threads: int = 1) -> tuple[LogicalCpu, ...]:
    """Numbered as Linux does on a PC server: first threads of all cores, then the second ones."""
    return tuple(
        LogicalCpu(thread * cores + core, core, core * nodes // cores) for thread in range(threads) for core in range(cores)
    )


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    cpus = host(draw(st.integers(1, 40)), draw(st.integers(1, 4)), draw(st.integers(1, 2)))
    allowed = draw(st.lists(st.sampled_from(cpus), min_size=1, unique=True))
    ranks = draw(st.integers(1, 8))
    return Topology(
        tuple(allowed),
        gpu_node=draw(st.none() | st.integers(0, 3)),
        calling_cpu=draw(st.none() | st.sampled_from([cpu.number for cpu in cpus])),
        rank=draw(st.integers(0, ranks - 1)),
        ranks=ranks,
    )


@given(topology=topologies(), count=st.integers(1, 40))
def test_workers_have_cores_of_their_own(topology: Topology, count: int) -> None:
    """Each worker has an allowed CPU of a physical core of its own; else nothing is pinned.

    The launching cores stay free.
    """
    picked = pick_workers(topology, count)
    block = cores_of_rank(topology)
    if picked is None:
        assert count > len(block) - LAUNCHING_CORES
        return
    core_of = {cpu.number: cpu.core for cpu in topology.cpus}
    assert len(picked) == count == len({core_of[number] for number in picked})
    assert set(picked) <= {cpu.number for cpu in block}
    assert count <= len(block) - LAUNCHING_CORES
    if topology.calling_cpu in core_of and core_of[topology.calling_cpu] in {cpu.core for cpu in block}:
        assert core_of[topology.calling_cpu] not in {core_of[number] for number in picked}


@pytest.mark.parametrize(("cores", "left"), [(1, 2), (2, 2), (8, 2), (12, 3), (16, 4), (64, 4)])
def test_threads_that_launch_have_cores_of_their_own(cores: int, left: int) -> None:
    """Where there are many cores the autograd thread and both copy threads have one each."""
    assert launching_cores(cores) == left


def test_a_rank_that_is_bound_to_cpus_has_them_alone() -> None:
    """They are not cut into blocks once more."""
    topology = Topology(host(8, nodes=1), rank=1, ranks=2)
    assert len(cores_of_rank(topology)) == 4
    assert len(cores_of_rank(replace(topology, is_bound=True))) == 8


def test_binding_is_seen_from_what_the_parent_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with fewer CPUs than its launcher was bound; one with the same shares them."""
    own = os.sched_getaffinity(0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for more, is_bound in ((set(), False), ({1000}, True)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, more=more: own | more if pid else own)
        found = read_topology()
        assert found is not None
        assert found.is_bound is is_bound



@given(topology=topologies())
def test_ranks_of_one_host_share_all_its_cores_and_none_twice(topology: Topology) -> None:
    """The blocks of all ranks are disjoint and cover the cores, wherever each rank's GPU is."""
    nodes = tuple((5 * rank) % 3 for rank in range(topology.ranks))
    blocks = [cores_of_rank(replace(topology, rank=rank, gpu_node=nodes[rank], gpu_nodes=nodes)) for rank in range(topology.ranks)]
    cores = [cpu.core for block in blocks for cpu in block]
    assert sorted(cores) == sorted({cpu.core for cpu in topology.cpus})


def test_of_two_threads_of_a_core_one_is_used() -> None:
    """8 cores with 2 threads each: 6 workers on 6 cores, none on the second threads."""
    assert pick_workers(Topology(host(8, threads=2), calling_cpu=0), 6) == (2, 3, 4, 5, 6, 7)


def test_the_thread_of_a_core_that_is_allowed_is_taken() -> None:
    """Where a set of CPUs allows only the second thread of a core, that one is used."""
    cpus = tuple(cpu for cpu in host(6, threads=2) if cpu.number not in {3, 5})
    assert pick_workers(Topology(cpus, calling_cpu=0), 4) == (2, 4, 9, 11)


def test_the_node_of_the_gpu_comes_first() -> None:
    """Of two nodes, workers fill the GPU's, then go on to the other."""
    topology = Topology(host(16, nodes=2), gpu_node=1, calling_cpu=0)
    assert pick_workers(topology, 8) == tuple(range(8, 16))
    assert pick_workers(topology, 10) == (*range(8, 16), 2, 3)


def test_the_launching_cores_are_those_of_the_calling_thread_s_node() -> None:
    """Its own core and one more of its node stay free, also when it is the GPU's."""
    assert pick_workers(Topology(host(8, nodes=2), gpu_node=1, calling_cpu=6), 6) == (5, 7, 0, 1, 2, 3)


def test_where_the_calling_thread_is_elsewhere_the_gpu_s_node_gives_the_free_cores() -> None:
    """A rank whose block does not have the caller's core still leaves two cores free."""
    topology = Topology(host(16, nodes=2), gpu_node=1, calling_cpu=0, rank=1, ranks=2)
    assert pick_workers(topology, 6) == tuple(range(10, 16))


def test_few_cores_are_not_pinned() -> None:
    """With 2 cores, or more workers than cores are left, the system places the threads."""
    assert pick_workers(Topology(host(2)), 1) is None
    assert pick_workers(Topology(host(3), calling_cpu=0), 1) == (2,)
    assert pick_workers(Topology(host(8)), 7) is None


def test_a_limit_on_cpu_time_means_no_pinning() -> None:
    """With 4 cores' time on a host of 64 no core is ours alone, and 4 threads are enough."""
    topology = Topology(host(64), calling_cpu=0, quota_cores=4.0)
    assert pick_workers(topology, 2) is None
    assert usable_cores(topology) == 4
    assert usable_cores(replace(topology, quota_cores=None, ranks=4)) == 16


@pytest.mark.parametrize(("text", "numbers"), [("0-3,8,10-11\n", (0, 1, 2, 3, 8, 10, 11)), ("5", (5,)), ("", ())])
def test_kernel_cpu_lists_are_read(text: str, numbers: tuple[int, ...]) -> None:
    """Ranges and single numbers."""
    assert cpu_list(text) == numbers


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[int]], None]:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return lambda cpus: monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus)


def write_sys(root: Path, cpus: tuple[LogicalCpu, ...]) -> None:
    for cpu in cpus:
        siblings = ",".join(str(other.number) for other in cpus if other.core == cpu.core)
        folder = root / f"devices/system/cpu/cpu{cpu.number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    for node in {cpu.node for cpu in cpus}:
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(str(cpu.number) for cpu in cpus if cpu.node == node) + "\n")


def test_sysfs_is_read_within_the_affinity(tmp_path: Path, allow: Callable[[set[int]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The cpuset of a container or a launcher shows as the affinity.

    Ranks come from the environment, a limit from the group.
    """
    cpus = host(8, nodes=2, threads=2)
    write_sys(tmp_path, cpus)
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    (tmp_path / "fs/cgroup/cpu.max").write_text("350000 100000\n")
    allow({1, 2, 9, 12})
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = read_topology(root=tmp_path)
    assert found is not None
    assert found.cpus == tuple(cpu for cpu in cpus if cpu.number in {1, 2, 9, 12})
    assert (found.rank, found.ranks, found.quota_cores, found.gpu_node) == (1, 2, 3.5, None)


@pytest.mark.parametrize(("written", "node"), [("1\n", 1), ("-1\n", None), (None, None)])
def test_the_node_of_the_gpu_is_that_of_its_pci_device(
    written: str | None, node: int | None, tmp_path: Path, allow: Callable[[set[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """sysfs has the node under the address that torch tells.

    -1 and a missing entry mean that it is not known.
    """
    write_sys(tmp_path, host(8, nodes=2))
    if written is not None:
        folder = tmp_path / "bus/pci/devices/0000:9b:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(written)
    allow(set(range(8)))
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    found = read_topology(torch.device("cuda", 0), tmp_path)
    assert found is not None
    assert found.gpu_node == node


def test_without_numa_all_cpus_are_of_one_node(tmp_path: Path, allow: Callable[[set[int]], None]) -> None:
    """A kernel without node folders."""
    write_sys(tmp_path, host(4))
    (tmp_path / "devices/system/node/node0/cpulist").unlink()
    allow({0, 1, 2, 3})
    found = read_topology(root=tmp_path)
    assert found is not None
    assert {cpu.node for cpu in found.cpus} == {0}


def test_a_host_that_tells_nothing_is_not_pinned(tmp_path: Path, allow: Callable[[set[int]], None]) -> None:
    """No sysfs: no topology."""
    allow({0, 1, 2, 3})
    assert read_topology(root=tmp_path) is None


def test_this_host_is_readable_or_says_nothing() -> None:
    """On the machine of the test: workers are within the affinity, or nothing is pinned."""
    found = read_topology()
    if found is None:
        return
    for count in (1, 2, 1000):
        picked = pick_workers(found, count)
        assert picked is None or set(picked) <= os.sched_getaffinity(0)
        assert cpus_for(found, count) <= os.sched_getaffinity(0)
    assert pick_workers(found, 1000000) is None


def test_workers_that_fit_on_the_gpu_s_socket_stay_there() -> None:
    """They use both threads of its cores, and leave two cores to threads that launch."""
    topology = Topology(host(16, nodes=2, threads=2), gpu_node=1, calling_cpu=0)
    near = {*range(8, 16), *range(24, 32)}
    assert cpus_for(topology, 1) == cpus_for(topology, 6) == near
    assert cpus_for(topology, 7) == cpus_for(topology, usable_cores(topology) - LAUNCHING_CORES) == set(range(32))


def test_a_rank_s_workers_stay_on_the_socket_of_its_gpu() -> None:
    """Two ranks of a socket share its CPUs.

    A rank whose cores are on another socket than its GPU goes where it can.
    """
    topology = Topology(host(16, nodes=2), gpu_node=1, ranks=4, rank=3)
    assert cpus_for(topology, 2) == set(range(8, 16))
    assert cpus_for(replace(topology, rank=0), 2) == set(range(16))


def test_blocks_of_cores_go_by_the_sockets_of_the_gpus(
    tmp_path: Path, allow: Callable[[set[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs that the host numbers from the second socket on: each rank has cores of its GPU's.

    Not where ranks do not see each other's GPUs.
    """
    write_sys(tmp_path, host(16, nodes=2))
    nodes = (1, 1, 0, 0)
    for number, node in enumerate(nodes):
        folder = tmp_path / f"bus/pci/devices/0000:{number:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(str(node))
    allow(set(range(16)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(pci_domain_id=0, pci_bus_id=device.index, pci_device_id=0))
    blocks = []
    for rank, node in enumerate(nodes):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        found = read_topology(torch.device("cuda", rank), tmp_path)
        assert found is not None
        assert {cpu.node for cpu in cores_of_rank(found)} == {node}
        assert cpus_for(found, 2) == set(range(8 * node, 8 * node + 8))
        blocks += [cpu.number for cpu in cores_of_rank(found)]
    assert sorted(blocks) == list(range(16))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    alone = read_topology(torch.device("cuda", 3), tmp_path)
    assert alone is not None
    assert (alone.gpu_nodes, alone.block, alone.gpu_node) == ((), 3, 0)


@given(topology=topologies(), count=st.integers(1, 40))
def test_workers_that_are_not_pinned_have_cpus_enough(topology: Topology, count: int) -> None:
    """Workers may run anywhere if the GPU's socket is unknown or too small.

    That is wherever the process may run.
    """
    everywhere = {cpu.number for cpu in topology.cpus}
    found = cpus_for(topology, count)
    assert found <= everywhere
    if found != everywhere:
        assert len({cpu.core for cpu in topology.cpus if cpu.number in found}) >= count + LAUNCHING_CORES
        assert {cpu.node for cpu in topology.cpus if cpu.number in found} == {topology.gpu_node}
