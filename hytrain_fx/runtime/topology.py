"""Which logical CPUs the update workers run on.

One of each physical core, near the GPU, disjoint between the ranks of a host.

    read_topology(...)  ->  Topology  ->  cores_of_rank
        ->  pick_workers  ->  (2, 3, 4, ...)    one for each worker, where they are pinned
        ->  cpus_for      ->  {2, 3, 4, ...}    for all of them, where they are not

The cores of a host are cut into one block per local rank, in the order of NUMA nodes. The blocks go
to the ranks in the order of their GPUs' nodes, so a rank has cores near its GPU however the host
numbers its GPUs. Where each rank was bound to CPUs of its own (by numactl, or the program itself),
those are its block.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hytrain_fx.runtime.affinity import allowed_cpus

# Physical cores that are never given to workers: of the launching thread, and of the copy threads.
LAUNCHING_CORES = 2
# As many where there are cores enough: the calling thread, the autograd thread, which launches the
# backward, and the engine's two copy threads. With 14 workers on 16 cores (an H100, a GPT-2 XL) the
# autograd thread was taken off its core 350 to 610 times a step, and copy threads waited up to 11
# ms for one; with 12 at most 73 times and 1 ms. 12 workers update 3 to 7% less than 14: the host's
# memory binds.
_CORES_OF_THREADS = 4
_SHARE_OF_THREADS = 4  # one core in so many
SYS = Path("/sys")


@dataclass(frozen=True, slots=True)
class LogicalCpu:
    """One logical CPU.

    Its number, the lowest number among the threads of its physical core, its NUMA node.
    """

    number: int
    core: int
    node: int


@dataclass(frozen=True, slots=True)
class Topology:
    """What one rank may use, and from where.

    cpus         the logical CPUs that this process may run on, by number
    gpu_node     NUMA node of its GPU, None where it is not known or there is no GPU
    calling_cpu  logical CPU that the calling thread ran on when this was read, None where it is not
                 known
    rank, ranks  this process among those of its host
    gpu_nodes    NUMA nodes of the GPUs of all ranks, by rank; () where they are not known
    quota_cores  CPU time that the control group may use, in cores; None without such a limit
    is_bound     whether these CPUs are this rank's alone
    """

    cpus: tuple[LogicalCpu, ...]
    gpu_node: int | None = None
    calling_cpu: int | None = None
    rank: int = 0
    ranks: int = 1
    quota_cores: float | None = None
    is_bound: bool = False
    gpu_nodes: tuple[int | None, ...] = ()

    @property
    def block(self) -> int:
        """Which of the host's blocks of cores this rank has."""
        if len(self.gpu_nodes) != self.ranks or None in self.gpu_nodes:
            return self.rank
        return sorted(range(self.ranks), key=lambda rank: (self.gpu_nodes[rank], rank)).index(self.rank)


def pick_workers(topology: Topology, count: int) -> tuple[int, ...] | None:
    """`count` logical CPUs, each of another physical core of this rank.

    The GPU's node comes first; numbers ascend within a node.

    The launching cores are left out: the calling thread's, and others of its node. None where
    nothing should be pinned: too few cores for `count` workers and the launching ones (two
    threads pinned to one core would wait for each other), or a limit on CPU time below the number
    of cores (other groups run on the same cores: the system must be free to choose).
    """
    cores = cores_of_rank(topology)
    if topology.quota_cores is not None and topology.quota_cores < len({cpu.core for cpu in topology.cpus}):
        return None
    left_free = {cpu.core for cpu in sorted(cores, key=lambda cpu: _distance_to_caller(topology, cpu))[:LAUNCHING_CORES]}
    workers = [cpu.number for cpu in cores if cpu.core not in left_free]
    return tuple(workers[:count]) if 0 < count <= len(workers) else None


def cores_of_rank(topology: Topology) -> tuple[LogicalCpu, ...]:
    """One logical CPU of each physical core of this rank, those of the GPU's node first."""
    first: dict[int, LogicalCpu] = {}
    for cpu in sorted(topology.cpus, key=lambda cpu: cpu.number):
        first.setdefault(cpu.core, cpu)
    cores = sorted(first.values(), key=lambda cpu: (cpu.node, cpu.number))
    if not topology.is_bound:
        begin, end = (len(cores) * block // topology.ranks for block in (topology.block, topology.block + 1))
        cores = cores[begin:end]
    return tuple(sorted(cores, key=lambda cpu: (cpu.node != topology.gpu_node, cpu.node, cpu.number)))


def cpus_for(topology: Topology, workers: int) -> frozenset[int]:
    """Logical CPUs for `workers` update workers that are not pinned, and for making host memory.

    Host memory is on the node of the CPU that makes it.

    Those of the GPU's node where this rank has cores for all workers there, beside the launching
    ones: then no update reads memory across sockets, and no copy to the GPU does. Else all: more
    workers than one socket has cores take the memory of all sockets in equal shares.
    """
    near = [cpu for cpu in cores_of_rank(topology) if cpu.node == topology.gpu_node]
    alone = workers + LAUNCHING_CORES <= len(near)
    return frozenset(cpu.number for cpu in topology.cpus if not alone or cpu.node == topology.gpu_node)


def launching_cores(cores: int) -> int:
    """How many of a rank's `cores` are left to threads that launch and copy: 2, from 16 on 4."""
    return min(max(LAUNCHING_CORES, cores // _SHARE_OF_THREADS), _CORES_OF_THREADS)


def usable_cores(topology: Topology) -> int:
    """Physical cores that this rank can keep busy.

    The cores of its block, within its share of a limit on CPU time.
    """
    cores = len(cores_of_rank(topology))
    return cores if topology.quota_cores is None else min(cores, int(topology.quota_cores / topology.ranks))


def read_topology(device: torch.device | None = None, root: Path = SYS) -> Topology | None:
    """This process's topology, or None where it cannot be read.

    It comes from sysfs under `root` and the variables LOCAL_RANK and LOCAL_WORLD_SIZE.
    """
    try:
        nodes = _node_of_cpu(root)
        cpus = tuple(_logical_cpu(root, number, nodes.get(number, 0)) for number in sorted(allowed_cpus()))
    except (OSError, ValueError):
        return None
    ranks = local_ranks()
    rank = min(max(0, _variable("LOCAL_RANK", 0)), ranks - 1)
    gpu = None if device is None or device.type != "cuda" else _gpu_node(root, device)
    is_bound = ranks > 1 and _has_fewer_than_parent()
    return Topology(cpus, gpu, _calling_cpu(), rank, ranks, _quota_cores(root), is_bound, _gpu_nodes(root, device, rank, ranks))


def local_ranks() -> int:
    """Processes that share this host, as torchrun says (LOCAL_WORLD_SIZE); 1 without it."""
    return max(1, _variable("LOCAL_WORLD_SIZE", 1))


def cpu_list(text: str) -> tuple[int, ...]:
    """The numbers of a kernel CPU list such as "0-3,8,10-11".

    Raises ValueError for any other text.
    """
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        numbers += range(int(low), int(high or low) + 1)
    return tuple(numbers)


def _has_fewer_than_parent() -> bool:
    """Whether this process may run on some of the CPUs of the one that started it, but not all."""
    try:
        return allowed_cpus() < os.sched_getaffinity(os.getppid())
    except OSError:  # it is gone
        return False


def _distance_to_caller(topology: Topology, cpu: LogicalCpu) -> tuple[bool, bool]:
    caller = next((one for one in topology.cpus if one.number == topology.calling_cpu), None)
    return (caller is None or cpu.core != caller.core, caller is None or cpu.node != caller.node)


def _logical_cpu(root: Path, number: int, node: int) -> LogicalCpu:
    siblings = root / f"devices/system/cpu/cpu{number}/topology/thread_siblings_list"
    return LogicalCpu(number, min(cpu_list(siblings.read_text())), node)


def _node_of_cpu(root: Path) -> dict[int, int]:
    """The NUMA node of each CPU; empty where the kernel was built without NUMA."""
    lists = root.glob("devices/system/node/node[0-9]*/cpulist")
    return {cpu: int(path.parent.name.removeprefix("node")) for path in lists for cpu in cpu_list(path.read_text())}


def _gpu_node(root: Path, device: torch.device) -> int | None:
    """The GPU's NUMA node.

    None where torch does not tell the address, sysfs does not have it, or says -1: the firmware
    gives no node.
    """
    found: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        node = int((root / f"bus/pci/devices/{address}/numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None


def _gpu_nodes(root: Path, device: torch.device | None, rank: int, ranks: int) -> tuple[int | None, ...]:
    """The NUMA nodes of all ranks' GPUs, where a rank's GPU has the rank's number, as is usual.

    Ranks that each see one GPU only, or number them otherwise, do not know of each other's.
    """
    if device is None or device.type != "cuda" or ranks == 1:
        return ()
    own = torch.cuda.current_device() if device.index is None else device.index
    if own != rank or torch.cuda.device_count() < ranks:
        return ()
    return tuple(_gpu_node(root, torch.device("cuda", number)) for number in range(ranks))


def _calling_cpu() -> int | None:
    try:
        number = int(ctypes.CDLL(None).sched_getcpu())
    except (OSError, AttributeError):
        return None
    return number if number >= 0 else None


def _quota_cores(root: Path) -> float | None:
    """The limit of this process's own control group as a container sees it (version 2)."""
    try:
        quota, period = (root / "fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _variable(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        return default
