"""The CUDA kernels and the CPU kernel give the same bits.

So do the op-by-op form on CUDA and torch.optim's foreach form on CUDA.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hytrain_fx.errors import EngineError
from hytrain_fx.ir.limits import CUDA_BLOCK_ELEMENTS, CUDA_BLOCK_THREADS, ROWS_PER_LAUNCH
from hytrain_fx.runtime.arithmetic import AdamScalars, fma, square_root
from hytrain_fx.runtime.native import build, cuda_module
from hytrain_fx.runtime.scalars import UpdateScalars

from ..cpu.adamw_operands import GROUP, KINDS, Operands, assert_same_bits, different_bits, kernel_, op_by_op_, operands
from ..cpu.adamw_rows import Row, row_of

DEVICE = torch.device("cuda", 0)
LENGTHS = (1, 7, 8, 9, 2047, 2048, 2049, 100_003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = {  # by the dtypes of gradient and weight
    (torch.float32, torch.float32): "f32",
    (torch.bfloat16, torch.bfloat16): "bf16",
    (torch.float16, torch.float16): "f16",
    (torch.float32, torch.bfloat16): "f32_bf16",
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"weight_decay": 0.0},
    {"amsgrad": True},
    {"maximize": True},
    {"betas": (0.3, 0.95)},
    {"betas": (0.5, 0.99)},
    {"betas": (0.0, 0.999)},
    {"eps": 0.0},
    {"eps": 1e-3, "lr": 0.7},
    {"lr": 0.0},
)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_form = pytest.mark.parametrize("torch_cuda", [False, True], ids=["cpu_form", "cuda_form"])
each_optimizer = pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
each_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def moved(o: Operands, device: torch.device | str) -> Operands:
    return o.changed(lambda tensor: tensor.to(device), o.place)


def cuda_kernel_(o: Operands, scalars: UpdateScalars, update: str = "adamw") -> None:
    """One row in one launch on torch's current stream, as csrc/cuda_device.cpp launches it."""
    driver = cuda_module.binding("driver")
    form = FORMS[o.grad.dtype, o.grad.dtype if o.out is None else o.out.dtype]
    states = "" if o.m.dtype == torch.float32 else "_moments16"
    kernel = cuda_module.function(DEVICE.index, cuda_module.UPDATE_SOURCE, f"{update}_rows_{form}{states}")
    rows = (Row * ROWS_PER_LAUNCH)(row_of(o, scalars, None))
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(rows))
    stream = torch.cuda.current_stream(DEVICE).cuda_stream
    with cuda_module.primary_context(driver, DEVICE.index):
        grid = -(-o.grad.numel() // CUDA_BLOCK_ELEMENTS)
        launched = driver.cuLaunchKernel(kernel, grid, 1, 1, CUDA_BLOCK_THREADS, 1, 1, 0, stream, ctypes.addressof(parameters), 0)
    cuda_module.checked(driver, launched, "launch the AdamW kernel")


def assert_cuda_is_cpu(o: Operands, scalars: AdamScalars) -> None:
    on_gpu = moved(o, DEVICE)
    kernel_(o, scalars)
    cuda_kernel_(on_gpu, scalars)
    assert_same_bits(o, moved(on_gpu, "cpu"))


@each_kind
@each_form
@each_optimizer
@each_option
def test_cuda_kernel_is_cpu_kernel(options: dict[str, Any], decoupled: bool, torch_cuda: bool, kind: str) -> None:
    """Every option and form gives the same bits on GPU and CPU, vector tails included."""
    scalars = AdamScalars.of(GROUP | options, 3, decoupled=decoupled, torch_cuda=torch_cuda)
    for n in LENGTHS:
        assert_cuda_is_cpu(operands(n, n, kind, out_dtype=torch.bfloat16), scalars)


@each_kind
@pytest.mark.parametrize(("grad_dtype", "out_dtype"), [*FORMS, (torch.float32, None)], ids=str)
def test_dtypes(grad_dtype: torch.dtype, out_dtype: torch.dtype | None, kind: str) -> None:
    """Every pair of gradient and weight dtype that has a kernel gives the CPU's bits.

    The gradient has factors.
    """
    scalars = AdamScalars.of(GROUP | {"amsgrad": True}, 5, decoupled=True, torch_cuda=True, factors=(1 / 3, 1.7))
    for n in LENGTHS:
        assert_cuda_is_cpu(operands(n, n, kind, grad_dtype, out_dtype), scalars)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_gradient(dtype: torch.dtype) -> None:
    """All 65536 gradients of a 16-bit format are read as the CPU reads them."""
    o = operands(65536, 2, "normal", dtype, dtype)
    o.grad = torch.arange(65536).to(torch.int16).view(dtype)
    assert_cuda_is_cpu(o, AdamScalars.of(GROUP, 2, decoupled=True, torch_cuda=True))


@pytest.mark.parametrize(("grad_dtype", "dtype"), [pair for pair in FORMS if pair[1] != torch.float32], ids=str)
def test_weight_rounds_as_torch(grad_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """The 16-bit weight is torch's `.to(dtype)` of the master.

    That includes ties to even, denormals, overflow and NaN.
    """
    shifted = torch.arange(65536, dtype=torch.int64) << 16
    near_ties = torch.cat([shifted + low for low in (0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001)])
    master = torch.where(near_ties >= 1 << 31, near_ties - (1 << 32), near_ties).to(torch.int32).view(torch.float32).to(DEVICE)
    zero = torch.zeros_like(master)
    out = torch.empty_like(master, dtype=dtype)
    unchanged = AdamScalars.of(GROUP | {"lr": 0.0, "weight_decay": 0.0}, 1, decoupled=True, torch_cuda=False)
    cuda_kernel_(Operands(zero.to(grad_dtype), master.clone(), zero.clone(), torch.ones_like(zero), None, out), unchanged)
    assert different_bits(out, master.to(dtype)) == 0


@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unaligned_arrays(dtype: torch.dtype, offset: int) -> None:
    """Arrays that do not start on 16 bytes give the bits of arrays that do."""
    scalars = AdamScalars.of(GROUP, 5, decoupled=True, torch_cuda=True)
    whole = operands(5003, 3, "wide", dtype, dtype)
    on_gpu = moved(whole, DEVICE)
    kernel_(whole.cut(offset, 5003), scalars)
    cuda_kernel_(on_gpu.cut(offset, 5003), scalars)
    assert_same_bits(whole, moved(on_gpu, "cpu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_may_overwrite_gradient(dtype: torch.dtype) -> None:
    """The gradient's memory may take the weight."""
    scalars = AdamScalars.of(GROUP, 5, decoupled=True, torch_cuda=True)
    apart = moved(operands(10_003, 4, "normal", dtype, dtype), DEVICE)
    slot = apart.clone()
    slot.out = slot.grad
    cuda_kernel_(apart, scalars)
    cuda_kernel_(slot, scalars)
    assert apart.out is not None
    assert different_bits(apart.out, slot.grad) == 0
    assert different_bits(apart.master, slot.master) == 0


@each_kind
@each_form
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_op_by_op_on_cuda_is_cpu_kernel(dtype: torch.dtype, torch_cuda: bool, kind: str) -> None:
    """The op-by-op form gives its bits on CUDA tensors too."""
    for options in OPTIONS:
        scalars = AdamScalars.of(GROUP | options, 3, decoupled=False, torch_cuda=torch_cuda, factors=(0.3,))
        on_cpu = operands(5003, 6, kind, dtype, dtype)
        on_gpu = moved(on_cpu, DEVICE)
        kernel_(on_cpu, scalars)
        op_by_op_(on_gpu, scalars)
        assert_same_bits(on_cpu, moved(on_gpu, "cpu"))


@each_kind
def test_op_by_op_parts_on_cuda(kind: str) -> None:
    """The op-by-op fused multiply-add and square root give on CUDA what they give on the CPU."""
    o = operands(100_000, 7, kind)
    on_gpu = moved(o, DEVICE)
    assert different_bits(fma(on_gpu.grad, on_gpu.master, on_gpu.m).cpu(), fma(o.grad, o.master, o.m)) == 0
    assert different_bits(square_root(on_gpu.v).cpu(), square_root(o.v)) == 0
    assert different_bits(on_gpu.v.sqrt().cpu(), square_root(o.v)) == 0


def foreach_step(o: Operands, group: dict[str, Any], step: int, *, decoupled: bool) -> None:
    """One step of torch.optim, foreach=True, from and into `o`."""
    parameter = torch.nn.Parameter(o.master)
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)([parameter], foreach=True, **group)
    state: dict[str, Any] = {"step": torch.tensor(float(step - 1)), "exp_avg": o.m, "exp_avg_sq": o.v, "max_exp_avg_sq": o.vmax}
    optimizer.state[parameter].update(state)
    parameter.grad = o.grad
    optimizer.step()


@each_kind
@each_optimizer
@each_option
def test_cuda_form_is_torch_foreach(options: dict[str, Any], decoupled: bool, kind: str) -> None:
    """torch.optim(foreach=True) on CUDA gives the bits of the CUDA form.

    Nothing is replaced in torch.
    """
    group = GROUP | options
    for n, step in ((1, 1), (7, 2), (2049, 1000), (100_003, 7)):
        theirs = moved(operands(n, n, kind), DEVICE)
        ours = theirs.clone()
        cuda_kernel_(ours, AdamScalars.of(group, step, decoupled=decoupled, torch_cuda=True))
        foreach_step(theirs, group, step, decoupled=decoupled)
        assert_same_bits(replace(ours, vmax=ours.vmax if group["amsgrad"] else None), theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_factors_are_mul_on_cuda(dtype: torch.dtype) -> None:
    """A factor gives what `grad.mul_` with a number gives.

    A 0-dim tensor on the device is first rounded to the gradient's dtype.
    """
    inside = moved(operands(5003, 8, "normal", dtype), DEVICE)
    outside = inside.clone()
    outside.grad.mul_(1 / 3).mul_(1.7)
    cuda_kernel_(inside, AdamScalars.of(GROUP, 4, decoupled=True, torch_cuda=True, factors=(1 / 3, 1.7)))
    cuda_kernel_(outside, AdamScalars.of(GROUP, 4, decoupled=True, torch_cuda=True))
    assert_same_bits(replace(inside, grad=outside.grad), outside)


def test_long_run_from_cpu_to_gpu_and_back() -> None:
    """Moving the states between the devices during training changes no bit."""
    stays, moves = operands(4099, 9, "normal"), operands(4099, 9, "normal")
    for step in range(1, 21):
        scalars = AdamScalars.of(GROUP, step, decoupled=True, torch_cuda=True)
        gradient = torch.randn(4099, generator=torch.Generator().manual_seed(step))
        stays.grad, moves.grad = gradient.clone(), gradient.clone()
        kernel_(stays, scalars)
        if step % 3:
            kernel_(moves, scalars)
        else:
            on_gpu = moved(moves, DEVICE)
            cuda_kernel_(on_gpu, scalars)
            moves = moved(on_gpu, "cpu")
    assert_same_bits(stays, moves)


def test_launch_follows_the_current_stream() -> None:
    """The launch comes after what torch's current stream was given before."""
    side = torch.cuda.Stream(DEVICE)
    scalars = AdamScalars.of(GROUP, 2, decoupled=True, torch_cuda=True)
    late, early = (moved(operands(1 << 20, 10, "normal"), DEVICE) for _ in range(2))
    target = late.grad.clone()
    late.grad.fill_(float("nan"))
    torch.cuda.synchronize(DEVICE)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.grad.copy_(target)
        cuda_kernel_(late, scalars)
    side.synchronize()
    cuda_kernel_(early, scalars)
    assert_same_bits(late, early)


def test_handles_are_stable() -> None:
    """Asking again gives the same handles, one for each form of the kernel.

    Each is a pointer that C++ can launch.
    """
    handles = cuda_module.update_functions(0)
    assert handles == cuda_module.update_functions(0)
    assert len(set(handles)) == len(handles)
    assert all(handles)


def test_cubin_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC compiles an architecture once; the second time the bytes come from the file."""
    monkeypatch.setenv("HYTRAIN_FX_CACHE", str(tmp_path))
    first = cuda_module.cubin("update_rows.cu", "sm_90")
    (stored,) = tmp_path.iterdir()
    assert stored.read_bytes() == first
    build.publish(b"stored", stored)
    assert cuda_module.cubin("update_rows.cu", "sm_90") == b"stored"


def test_unknown_architecture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture that NVRTC does not know is an EngineError with its log."""
    monkeypatch.setenv("HYTRAIN_FX_CACHE", str(tmp_path))
    with pytest.raises(EngineError, match=r"(?s)NVRTC failed.*sm_12.*architecture"):
        cuda_module.cubin("update_rows.cu", "sm_12")
