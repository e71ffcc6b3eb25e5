"""Bytes of host memory that updates move.

    bytes a parameter of AdamW  16-bit parameters                          fp32 parameters
    gradient to the host        2  written by the copy                     4
    update by the CPU           2  gradient read, 24 states read and       4 + 24; the new weight is
                                   written, the new weight among them      the master itself
    new weight to the device    2  read by the copy                        4
    sum                         30                                         36
    streamed                    10 states read, 10 written: 20             24

A weight that rests on the host does not go to the device once, after its update, but before each
forward and each backward: 2 bytes more, 32 in all. Its home is the half of the master that the
update has written already.

A 16-bit weight is half of its fp32 master (runtime/states/split_master.py) where its states allow
it (ir/states.py), else 2 bytes more move; fp16 parameters, whose masters are whole, count as bf16
ones.
"""

from __future__ import annotations

from hytrain_fx.ir.profile import Profile, UnitProfile
from hytrain_fx.ir.task_graph import FETCHES, TaskKind


def traffic_bytes(unit: UnitProfile, kind: TaskKind) -> float:
    """What one task of the whole unit reads and writes in host memory."""
    if kind is TaskKind.D2H:
        return unit.grad_bytes
    if kind is TaskKind.H2D:
        return unit.reloaded_share * unit.grad_bytes
    if kind in FETCHES:
        return unit.fetch_bytes
    if kind in (TaskKind.STREAM_IN, TaskKind.STREAM_OUT):
        return unit.stream_bytes
    if kind is TaskKind.CPU_UPDATE:
        return unit.traffic.updated_bytes(unit.params, unit.grad_bytes)
    return 0.0


def cpu_bytes(unit: UnitProfile) -> float:
    """All that an update of the unit by the CPU moves, with its copies."""
    return sum(traffic_bytes(unit, kind) for kind in (TaskKind.D2H, TaskKind.CPU_UPDATE, TaskKind.H2D, *FETCHES))


def streamed_bytes(unit: UnitProfile) -> float:
    """All that a streamed update of the unit moves."""
    return traffic_bytes(unit, TaskKind.STREAM_IN) + traffic_bytes(unit, TaskKind.STREAM_OUT)


def bytes_per_us(profile: Profile) -> float | None:
    """Bandwidth of the host's memory for one rank; None where the profile does not know it.

    The ranks of a host move as many bytes each, so each has an equal part.
    """
    return None if profile.host_memory_gb_per_s is None else 1e3 * profile.host_memory_gb_per_s / profile.node_ranks
