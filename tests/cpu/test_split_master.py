"""Fp32 masters in two halves, one of them the bf16 weight: nothing is lost.

The update gives the bits of whole masters.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.ir.states import ADAMW_DEFAULT
from hytrain_fx.runtime.arithmetic import AdamScalars
from hytrain_fx.runtime.engine import RowStates
from hytrain_fx.runtime.native import build
from hytrain_fx.runtime.scalars import UpdateFlag
from hytrain_fx.runtime.states.split_master import copy_states, join, split, whole_states

from .adamw_operands import DTYPE_CODES, FINITE_KINDS, GROUP, VARIANTS, Operands, different_bits, kernel_, operands

CPU = torch.device("cpu")
HIGH = st.integers(0, 0xFFFF)
# Ties and their neighbours, where rounding hides a bit, beside any other low half.
LOW = st.sampled_from([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]) | st.integers(0, 0xFFFF)


def floats_of(bits: list[int]) -> torch.Tensor:
    return torch.tensor([b - (1 << 32) if b >= 1 << 31 else b for b in bits], dtype=torch.int32).view(torch.float32)


def split_kernel_(o: Operands, high: torch.Tensor, low: torch.Tensor, scalars: AdamScalars, flags: tuple[str, ...] = build.FLAGS) -> None:
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (high, low)]
    library = build.load(("kernels_c.cpp",), flags=flags)
    n = ctypes.c_int64(high.numel())
    grad, states = ctypes.c_void_p(o.grad.data_ptr()), ctypes.byref(o.c_states)
    library.hytrain_fx_update_split_chunk(grad, DTYPE_CODES[o.grad.dtype], *pointers, states, n, ctypes.byref(scalars.c_struct))


@settings(deadline=None, max_examples=300)
@given(halves=st.lists(st.tuples(HIGH, LOW), min_size=1, max_size=40), second=st.floats(0, 2.0**99, width=32))
def test_join_undoes_split(halves: list[tuple[int, int]], second: float) -> None:
    """Any master comes back bit for bit, NaN as NaN; exp_avg_sq keeps its magnitude.

    The high half is what torch rounds the master to.
    """
    master = floats_of([high << 16 | low for high, low in halves])
    moments = torch.full_like(master, second)
    high, low, marked = split(master, moments)
    assert different_bits(join(high, low, marked), master) == 0
    assert different_bits(high, master.to(torch.bfloat16)) == 0
    assert different_bits(marked.abs(), moments) == 0


def test_every_weight_with_a_tie_comes_back() -> None:
    """All 65536 upper halves with the low half 0x8000 come back.

    The sign of exp_avg_sq tells ties that went up from those that did not.
    """
    master = floats_of([high << 16 | 0x8000 for high in range(1 << 16)])
    high, low, marked = split(master, torch.zeros_like(master))
    assert different_bits(join(high, low, marked), master) == 0
    assert different_bits(join(high, low, marked.abs()), master) > 30_000, "without the mark odd ties are lost"


@settings(deadline=None, max_examples=100)
@given(
    n=st.integers(0, 300),
    seed=st.integers(0, 1 << 40),
    kind=st.sampled_from(FINITE_KINDS),
    amsgrad=st.booleans(),
    maximize=st.booleans(),
    torch_cuda=st.booleans(),
    factors=st.lists(st.sampled_from([0.3, 1.0, 7.7]), max_size=2).map(tuple),
    low=LOW,
    grad_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    wide=st.booleans(),
)
def test_the_update_is_that_of_whole_masters(
    n: int, seed: int, kind: str, amsgrad: bool, maximize: bool, torch_cuda: bool, factors: tuple[float, ...], low: int,
    grad_dtype: torch.dtype, wide: bool,
) -> None:
    """An update in halves leaves the weight, master and moments of an update of the whole.

    Ties before and after it are included.
    """
    rates = {"weight_decay": 0.0 if seed % 2 else 0.1, "lr": 0.0 if seed % 3 == 0 else 1e-3}
    group = GROUP | rates | {"amsgrad": amsgrad, "maximize": maximize}
    scalars = AdamScalars.of(group, 3, decoupled=True, torch_cuda=torch_cuda, factors=factors)
    scalars = replace(scalars, flags=scalars.flags | (UpdateFlag.WIDE_FACTORS if wide else 0))
    whole = operands(n, seed, kind, grad_dtype, torch.bfloat16)
    whole = replace(whole, v=whole.v.abs(), vmax=(torch.zeros(n) if whole.vmax is None else whole.vmax.abs()) if amsgrad else None)
    bits = whole.master.view(torch.int32)
    whole.master.copy_(((bits & ~0xFFFF) | low).view(torch.float32))
    parts = whole.clone()
    high, tail, marked = split(parts.master, parts.v)
    parts = replace(parts, v=marked)
    kernel_(whole, scalars)
    split_kernel_(parts, high, tail, scalars)
    assert whole.out is not None
    assert different_bits(high, whole.out) == 0
    assert different_bits(join(high, tail, parts.v), whole.master) == 0
    assert different_bits(parts.m, whole.m) == 0
    assert different_bits(parts.v.abs(), whole.v) == 0
    if parts.vmax is not None and whole.vmax is not None:
        assert different_bits(parts.vmax, whole.vmax) == 0


def test_vector_widths_do_not_change_a_bit() -> None:
    """The wheel's builds and a scalar one give the bits of this machine's own."""
    scalars = AdamScalars.of(GROUP, 7, decoupled=True, torch_cuda=True)
    results = []
    for flags in (build.FLAGS, *((*build.FLAGS, *variant) for variant in VARIANTS.values())):
        o = operands(5003, 5, "wide", torch.bfloat16, torch.bfloat16)
        high, low, marked = split(o.master, o.v.abs())
        o = replace(o, v=marked, vmax=None)
        split_kernel_(o, high, low, scalars, flags)
        results.append((high, low.view(torch.bfloat16), o.m, o.v))
    for other in results[1:]:
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(results[0], other, strict=True))


def test_states_move_between_the_forms() -> None:
    """Whole to halves and back: every state has its bits."""
    o = operands(3000, 6, "wide", torch.bfloat16)
    start = RowStates(ADAMW_DEFAULT, o.master, (o.m, o.v.abs()))
    numel = o.master.numel()
    halves = RowStates(ADAMW_DEFAULT, torch.empty(numel, dtype=torch.bfloat16), (torch.empty(numel), torch.empty(numel)),
                       low=torch.empty(numel, dtype=torch.int16))
    copy_states(start, halves, CPU)
    back = RowStates(ADAMW_DEFAULT, torch.empty(numel), (torch.empty(numel), torch.empty(numel)))
    copy_states(halves, back, CPU)
    for states in (back, whole_states(halves, CPU)):
        pairs = zip((states.master, *states.states), (start.master, *start.states), strict=True)
        assert all(different_bits(a, b) == 0 for a, b in pairs)
