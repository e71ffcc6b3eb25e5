"""Operands of one AdamW update, updated by the C++ kernel or op by op, and compared bit by bit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hytrain_fx.ir.states import ADAMW
from hytrain_fx.runtime.arithmetic import AdamScalars
from hytrain_fx.runtime.engine import RowStates
from hytrain_fx.runtime.native import build
from hytrain_fx.runtime.native.libraries import BASELINES
from hytrain_fx.runtime.native.structs import CStates, c_states
from hytrain_fx.runtime.rounding import NO_PLACE, RoundingPlace
from hytrain_fx.runtime.scalars import UpdateScalars

GROUP: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "maximize": False}
# Of finite operands, and all; see operands().
FINITE_KINDS = ("normal", "wide", "denormal", "edges")
KINDS = (*FINITE_KINDS, "bits")
# Where the kernel's ways for small values begin and end (adamw_tiny.h).
EDGES = (-145, -127, -126, -110, -100, -80, -75, -64, -63, -50, -10, 0)
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# The wheel's, as far as this CPU can run them, and one without vectors.
VARIANTS = {baseline.name: (f"-march={baseline.name}",) for baseline in BASELINES if baseline.needs <= build.instruction_sets()} | {
    "scalar": ("-march=x86-64", "-fno-tree-vectorize"),
}


@dataclass
class Operands:
    grad: torch.Tensor
    master: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    vmax: torch.Tensor | None
    out: torch.Tensor | None = None
    place: RoundingPlace = NO_PLACE

    @property
    def states(self) -> tuple[torch.Tensor, ...]:
        return (self.m, self.v) if self.vmax is None else (self.m, self.v, self.vmax)

    @property
    def row_states(self) -> RowStates:
        """As engines have them; `out` apart."""
        return RowStates(ADAMW, self.master, self.states, place=self.place)

    @property
    def c_states(self) -> CStates:
        return c_states(self.row_states)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in vars(self).items() if isinstance(tensor, torch.Tensor)}

    def clone(self) -> Operands:
        return self.changed(torch.Tensor.clone, self.place)

    def cut(self, start: int, end: int) -> Operands:
        return self.changed(lambda tensor: tensor[start:end], self.place.after(start))

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor], place: RoundingPlace) -> Operands:
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, place=place, **changed)

    def narrow(self) -> Operands:
        """The same with moments in bf16."""
        return replace(self, m=self.m.bfloat16(), v=self.v.bfloat16())


def kernel_(operands: Operands, scalars: UpdateScalars, library: ctypes.CDLL | None = None) -> None:
    o, lib = operands, library or build.load(("kernels_c.cpp",))
    grad, master, out = (ctypes.c_void_p(None if t is None else t.data_ptr()) for t in (o.grad, o.master, o.out))
    code, out_code = DTYPE_CODES[o.grad.dtype], 0 if o.out is None else DTYPE_CODES[o.out.dtype]
    n, states = ctypes.c_int64(o.master.numel()), ctypes.byref(o.c_states)
    assert lib.hytrain_fx_update_chunk(grad, code, master, states, out, out_code, n, ctypes.byref(scalars.c_struct)) == 0


def op_by_op_(operands: Operands, scalars: AdamScalars) -> None:
    operands.row_states.update_(scalars, operands.grad, operands.out)


def assert_same_bits(a: Operands, b: Operands) -> None:
    for name, left in a.tensors().items():
        assert different_bits(left, getattr(b, name)) == 0, name


def different_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements that differ in a bit, NaN counted as equal to NaN."""
    integer = torch.int32 if a.dtype == torch.float32 else torch.int16
    return int(((a.view(integer) != b.view(integer)) & ~(a.isnan() & b.isnan())).sum())


def operands(n: int, seed: int, kind: str, grad_dtype: torch.dtype = torch.float32, out_dtype: torch.dtype | None = None) -> Operands:
    """States of one kind.

    "normal": as training has them; "wide": over 80 binary orders; "denormal"; "edges": about powers
    of two at which the kernel computes in another way, a few units of 2^-149, and zeros; "bits":
    any bits.
    """
    random = torch.Generator().manual_seed(seed)

    def values() -> torch.Tensor:
        x = torch.randn(n, generator=random)
        if kind == "wide":
            return x * torch.exp2(torch.randint(-40, 40, (n,), generator=random).float())
        if kind == "denormal":
            return torch.randint(0, 1 << 24, (n,), generator=random, dtype=torch.int32).view(torch.float32) * x.sign()
        if kind == "edges":
            powers = torch.tensor(EDGES)[torch.randint(0, len(EDGES), (n,), generator=random)]
            scales = torch.exp2(powers + torch.randint(-2, 3, (n,), generator=random))
            units = torch.randint(-9, 10, (n,), generator=random) * 2.0**-149
            return torch.where(torch.rand(n, generator=random) < 0.7, x * scales, units)
        if kind == "bits":
            return torch.randint(-(1 << 31), 1 << 31, (n,), generator=random).to(torch.int32).view(torch.float32)
        return x

    v = values().abs()
    out = None if out_dtype is None else torch.zeros(n, dtype=out_dtype)
    return Operands(values().to(grad_dtype), values(), values(), v, torch.maximum(v, values().abs()), out)
