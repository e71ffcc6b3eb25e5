"""Rows of one launch of csrc/adamw.cu, as its kernels take them."""

from __future__ import annotations

import ctypes

import torch

from hytrain_fx.runtime.arithmetic import AdamScalars, AdamScalarsStruct

from .adamw_operands import Operands

MARK = 7


class Row(ctypes.Structure):
    """hytrain_fx::Row of adamw.cu."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("grad", "master", "m", "v", "vmax", "out")), ("n", ctypes.c_longlong),
                ("scalars", AdamScalarsStruct), ("nonfinite", ctypes.c_void_p), ("mark", ctypes.c_int), ("skip", ctypes.c_void_p))


def row_of(o: Operands, scalars: AdamScalars, low: torch.Tensor | None, nonfinite: torch.Tensor, skip: torch.Tensor | None = None) -> Row:
    """A row that updates `o`.

    low        the other half of the master, for kernels of masters in halves
    nonfinite  int32, takes MARK where the gradient is not finite
    skip       fp32; where it is not zero the row stays as it is
    """
    master = o.master if low is None else low
    at = [None if t is None else t.data_ptr() for t in (o.grad, master, o.m, o.v, o.vmax, o.out)]
    return Row(*at, o.m.numel(), scalars.c_struct, nonfinite.data_ptr(), MARK, None if skip is None else skip.data_ptr())
