"""Rows of one launch of csrc/update_rows.cu, as its kernels take them."""

from __future__ import annotations

import ctypes

import torch

from hytrain_fx.ir.limits import MAX_STATES
from hytrain_fx.runtime.scalars import ScalarsStruct, UpdateScalars

from .adamw_operands import Operands


class Row(ctypes.Structure):
    """hytrain_fx::Row of update_rows.cu."""

    _fields_ = (("grad", ctypes.c_void_p), ("master", ctypes.c_void_p), ("states", ctypes.c_void_p * MAX_STATES), ("out", ctypes.c_void_p),
                ("n", ctypes.c_longlong), ("scalars", ScalarsStruct), ("first", ctypes.c_uint32), ("skip", ctypes.c_void_p))


def row_of(o: Operands, scalars: UpdateScalars, low: torch.Tensor | None, skip: torch.Tensor | None = None) -> Row:
    """A row that updates `o`.

    low    the other half of the master, for kernels of masters in halves
    skip   fp32; where it is not zero the row does not change
    """
    master = o.master if low is None else low
    states = (ctypes.c_void_p * MAX_STATES)(*(state.data_ptr() for state in o.states))
    out = None if o.out is None else o.out.data_ptr()
    left_out = None if skip is None else skip.data_ptr()
    numbers = scalars.c_struct
    numbers.rounding_key ^= o.place.key
    return Row(o.grad.data_ptr(), master.data_ptr(), states, out, o.m.numel(), numbers, o.place.first, left_out)
