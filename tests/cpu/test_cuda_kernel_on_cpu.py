"""csrc/update_rows.cu, compiled as C++ and run thread by thread, has the CPU kernel's bits.

That needs no GPU.

tests/gpu has the same on a GPU, with its own roundings and launches.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.ir.limits import CUDA_BLOCK_THREADS
from hytrain_fx.runtime.arithmetic import AdamScalars
from hytrain_fx.runtime.native import build
from hytrain_fx.runtime.scalars import UpdateFlag
from hytrain_fx.runtime.states.split_master import split

from .adamw_operands import GROUP, KINDS, Operands, different_bits, kernel_, operands
from .adamw_rows import Row, row_of
from .test_split_master import split_kernel_

SOURCE = Path(__file__).parents[1] / "native" / "update_rows_on_cpu.cpp"
F32, BF16 = torch.float32, torch.bfloat16
# As cuda_module.update_functions() lists them: dtypes of gradient and weight, masters in halves.
KERNELS = {0: (F32, F32, False), 1: (BF16, BF16, False), 3: (BF16, BF16, True), 4: (F32, BF16, False), 5: (F32, BF16, True)}

Run = Callable[..., None]


@pytest.fixture(scope="module")
def run_rows(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("cuda") / "adamw_cu.so"
    flags = (flag for flag in build.FLAGS if flag != "-O3")
    subprocess.run([build.find_compiler(), *flags, "-O1", f"-I{build.CSRC}", str(SOURCE), "-o", str(path), *build.LINK], check=True)
    library = ctypes.CDLL(str(path))

    def run(kernel: int, rows: list[Row], blocks: int = 2) -> None:
        library.run_rows(kernel, (Row * len(rows))(*rows), len(rows), blocks, CUDA_BLOCK_THREADS)

    return run


def prepared(n: int, seed: int, kind: str, kernel: int, amsgrad: bool, start: int, tied: bool = False) -> Operands:
    """Operands whose `out` is the rounded master.

    They begin at element `start` of their memory (0: aligned to 16 bytes).

    tied   each master lies half-way between two bf16 numbers
    """
    grad, out, _ = KERNELS[kernel]
    o = operands(n + start, seed, kind, grad, out)
    if tied:
        o.master.copy_(((o.master.view(torch.int32) & ~0xFFFF) | 0x8000).view(torch.float32))
    assert o.out is not None
    o.out.copy_(o.master)
    return replace(o, v=o.v.abs(), vmax=o.vmax if amsgrad else None).cut(start, n + start)


@settings(deadline=None, max_examples=60)
@given(
    kernel=st.sampled_from(sorted(KERNELS)),
    sizes=st.lists(st.tuples(st.integers(1, 700), st.sampled_from([0, 0, 1, 8])), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 30),
    kind=st.sampled_from(KINDS),
    amsgrad=st.booleans(),
    maximize=st.booleans(),
    torch_cuda=st.booleans(),
    factors=st.lists(st.sampled_from([0.3, 1.0, 7.7]), max_size=2).map(tuple),
    wide=st.booleans(),
    stands_still=st.booleans(),
    skipped=st.integers(-1, 3),
)
def test_rows_have_the_bits_of_the_cpu_kernel(
    run_rows: Run, kernel: int, sizes: list[tuple[int, int]], seed: int, kind: str, amsgrad: bool, maximize: bool, torch_cuda: bool,
    factors: tuple[float, ...], wide: bool, stands_still: bool, skipped: int,
) -> None:
    """Weight, master and moments of several rows in one launch have the CPU kernel's bits.

    Rows have tails, begin off 16 bytes, have wide or rounded factors, or are left out.

    Where the learning rate is 0, masters that are ties stay, and rounding them hides a bit.
    Values of any bits have NaN and infinities among them.
    """
    group = GROUP | {"amsgrad": amsgrad, "maximize": maximize} | ({"lr": 0.0} if stands_still else {})
    scalars = AdamScalars.of(group, 3, decoupled=True, torch_cuda=torch_cuda, factors=factors)
    scalars = replace(scalars, flags=scalars.flags | (UpdateFlag.WIDE_FACTORS if wide else 0))
    in_halves = KERNELS[kernel][2]
    rows, checks = [], []
    for i, (n, start) in enumerate(sizes):
        o = prepared(n, seed + i, kind, kernel, amsgrad, start, stands_still)
        skip = torch.full((1,), float(i == skipped))
        high, low, marked = split(o.master, o.v)
        if in_halves:
            o = replace(o, v=marked, out=high)
        expected, expected_low = o.clone(), low.clone()
        rows.append(row_of(o, scalars, low if in_halves else None, skip))
        if i != skipped and in_halves:
            assert expected.out is not None
            split_kernel_(expected, expected.out, expected_low, scalars)
        elif i != skipped:
            kernel_(expected, scalars)
        checks.append((o, expected, low, expected_low, skip))
    run_rows(kernel, rows)
    for o, expected, low, expected_low, _ in checks:
        for name in ("master", "m", "v", "vmax", "out"):
            found, wanted = getattr(o, name), getattr(expected, name)
            assert found is None or different_bits(found, wanted) == 0, name
        assert torch.equal(low, expected_low)
