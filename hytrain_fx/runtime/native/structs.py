"""What crosses the C interface of csrc/native_structs.h.

Its structs, field by field, and the numbering of a commit's factors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p

import torch

from hytrain_fx.errors import EngineError
from hytrain_fx.ir.limits import FP32_BYTES, MAX_FACTORS, MAX_STATES, UPDATE_KERNELS
from hytrain_fx.runtime.engine import CommitItem, RowStates
from hytrain_fx.runtime.scalars import ScalarsStruct, UpdateScalars

FACTOR_CAPACITY = 4096  # distinct factors in one commit


class CRowSpec(Structure):
    """One row of the engine's table."""

    _fields_ = [("numel", c_int64), ("unit", c_int32), ("dtype", c_int32), ("weight", c_void_p)]


class CStates(Structure):
    """Addresses of a row's states, and what rounding of those in 16 bits takes."""

    _fields_ = [("at", c_void_p * MAX_STATES), ("width", c_int32), ("first", c_uint32), ("key", c_uint32)]


class CHostStates(Structure):
    """Addresses of states on the host."""

    _fields_ = [
        ("master", c_void_p),
        ("low", c_void_p),
        ("states", CStates),
        ("slot", c_void_p),
        ("out", c_void_p),
        ("pinned", c_int32),
    ]


class CDeviceStates(Structure):
    """Addresses of states on the device."""

    _fields_ = [("master", c_void_p), ("states", CStates)]


class CStagingMemory(Structure):
    """Slots that streamed states visit."""

    _fields_ = [("base", c_void_p), ("slot_params", c_int64), ("arrays", c_int32), ("slots", c_int32)]


class CShadowMemory(Structure):
    """New places for states that are updated on a guess."""

    _fields_ = [("base", c_void_p), ("bytes", c_int64), ("arrays", c_int32)]


class CGuessCounts(Structure):
    """`engine.GuessCounts`."""

    _fields_ = [(name, c_int64) for name in ("commits", "missed", "params", "redone", "shadow_bytes", "sent")]


class CEarlyCounts(Structure):
    """`engine.EarlyCounts`."""

    _fields_ = [(name, c_int64) for name in (
        "commits", "missed", "params", "redone", "host_params", "landed_params", "waiting_params", "guessed_params")]


class CCommitItem(Structure):
    """One row's part of a step()."""

    _fields_ = [
        ("row", c_int32),
        ("at_end", c_int32),
        ("grad", c_void_p),
        ("n_factors", c_int32),
        ("factors", c_int32 * MAX_FACTORS),
        ("scalars", ScalarsStruct),
    ]


class CFinishTimes(Structure):
    """`engine.FinishTimes`."""

    _fields_ = [
        *((name, c_double) for name in ("cpu_us", "streamed_us", "cpu_paused_us", "cpu_begun_us", "streamed_held_us", "launching_us")),
        *((name, c_int64) for name in ("ahead", "at_once", "promised")),
    ]


class CTaskRecord(Structure):
    """`engine.TaskRecord`."""

    _fields_ = [
        ("kind", c_int32),
        ("row", c_int32),
        ("chunk", c_int32),
        ("worker", c_int32),
        ("workers", c_int32),
        ("begin_us", c_double),
        ("end_us", c_double),
    ]


class COptions(Structure):
    """What an engine is made with."""

    _fields_ = [
        ("workers", c_int32),
        ("device_ordinal", c_int32),
        ("timeout_s", c_double),
        ("ring", c_void_p),
        ("ring_bytes", c_uint64),
        ("factor_slots", c_void_p),
        ("factor_capacity", c_int32),
        ("update_functions", c_void_p * UPDATE_KERNELS),
        ("gather_function", c_void_p),
        ("worker_cores", POINTER(c_int32)),
        ("slots_unpinned", c_int32),
        ("queue_places", c_int32),
    ]


class FactorTable:
    """Numbers the distinct factors of one commit.

    Numbers go straight to their slot; the lane to the host copies tensors there.
    """

    def __init__(self, slots: ctypes._Pointer[c_float]) -> None:
        self._slots = slots
        self._index: dict[object, int] = {}
        self.sources: list[int | None] = []
        self.keep: list[object] = []

    def index(self, factor: float | torch.Tensor) -> int:
        key: object = id(factor) if isinstance(factor, torch.Tensor) else float(factor)
        if key not in self._index:
            number = len(self.sources)
            if number == FACTOR_CAPACITY:
                raise EngineError(f"more than {FACTOR_CAPACITY} different gradient factors in one step()")
            self._index[key] = number
            if isinstance(factor, torch.Tensor):
                self.sources.append(factor.data_ptr())
                self.keep.append(factor)
            else:
                self.sources.append(None)
                self._slots[number] = float(factor)
        return self._index[key]


def host_states(states: RowStates) -> CHostStates:
    master, low, slot, out = states.master.data_ptr(), pointer(states.low), pointer(states.slot), pointer(states.out)
    return CHostStates(master, low, c_states(states), slot, out, states.pinned)


def device_states(states: RowStates) -> CDeviceStates:
    return CDeviceStates(states.master.data_ptr(), c_states(states))


def c_states(states: RowStates) -> CStates:
    """Where the states are, without the master."""
    addresses = (c_void_p * MAX_STATES)(*(state.data_ptr() for state in states.states))
    width = states.states[0].itemsize if states.states else FP32_BYTES
    return CStates(addresses, width, states.place.first & 0xFFFFFFFF, states.place.key)


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def pointers(tensors: Sequence[torch.Tensor]) -> ctypes.Array[c_void_p]:
    """The addresses of their first elements."""
    return (c_void_p * len(tensors))(*map(torch.Tensor.data_ptr, tensors))


class ScalarStructs:
    """The C structures of scalars, each made once: many rows share theirs."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[UpdateScalars, Structure]] = {}

    def of(self, scalars: UpdateScalars) -> Structure:
        """That of these scalars, which are kept with it."""
        made = self._made.get(id(scalars))
        if made is None:
            made = self._made[id(scalars)] = (scalars, scalars.c_struct)
        return made[1]


def packed_commit(items: Sequence[CommitItem], factors: FactorTable) -> ctypes.Array[CCommitItem]:
    """The items as C has them; `factors` numbers their factors."""
    packed, structs = (CCommitItem * len(items))(), ScalarStructs()
    for at, item in zip(packed, items, strict=True):
        at.row, at.at_end, at.scalars = item.row, item.at_end, structs.of(item.scalars)
        if item.grad is not None:
            at.grad = item.grad.data_ptr()
        if item.factors:
            at.n_factors = len(item.factors)
            at.factors = (c_int32 * MAX_FACTORS)(*(factors.index(f) for f in item.factors))
    return packed
