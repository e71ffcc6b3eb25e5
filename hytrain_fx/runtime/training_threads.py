"""Which CPUs torch's threads train a share of the batch on, beside updates and the GPU.

    one socket    where they are: the cores are shared, and a step's parts come one after the other
    more          update workers on the GPU's socket, training threads on the others

torch's threads are those of OpenMP, made for the calling thread at its first parallel kernel. They
keep the CPUs that they began on, so each of them is asked to move itself.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection
from contextlib import suppress

import torch

from hytrain_fx.runtime.affinity import openmp_runtimes
from hytrain_fx.runtime.topology import Topology, cores_of_rank, cpus_for

_IN_PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def workers_beside_training(topology: Topology) -> int | None:
    """Cores of the GPU's socket, for updates alone; None where there is one socket, or no GPU."""
    cores = cores_of_rank(topology)
    near = [cpu for cpu in cores if cpu.node == topology.gpu_node]
    return len(near) if 0 < len(near) < len(cores) else None


def training_cpus(topology: Topology, workers: int) -> frozenset[int] | None:
    """Logical CPUs of the other sockets than the one that so many update workers keep to.

    None where they keep to none, or there is no other.
    """
    others = frozenset(cpu.number for cpu in topology.cpus if cpu.node != topology.gpu_node)
    return others if others and cpus_for(topology, workers).isdisjoint(others) else None


def move_team(cpus: Collection[int]) -> None:
    """Have the calling thread, and the threads that it trains with, run on these CPUs.

    Where a container forbids it, or torch runs without OpenMP, they stay where they are.
    """

    def move() -> None:
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)

    in_team(move)


def in_team(call: Callable[[], None]) -> None:
    """`call` in each thread of the calling thread's OpenMP team, itself among them."""
    called = _IN_PARALLEL(lambda _: call())
    for path in sorted(openmp_runtimes()):
        with suppress(OSError, AttributeError):  # not a runtime after all
            ctypes.CDLL(path).GOMP_parallel(called, None, ctypes.c_uint(torch.get_num_threads()), ctypes.c_uint(0))
            return
    call()
