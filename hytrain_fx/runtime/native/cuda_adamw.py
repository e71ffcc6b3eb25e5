"""The AdamW kernel of `csrc/adamw.cu`: compiled once by NVRTC, loaded by the driver, launched by a handle that needs no Python.

    functions(ordinal)  ->  CUfunction handles for the engine's cuLaunchKernel
    adamw_(...)         ->  the same launch from Python

The kernel's parameters are listed at the top of adamw.cu.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from hytrain_fx.runtime.arithmetic import MAX_FACTORS, AdamScalars
from hytrain_fx.runtime.native import cuda_module

SOURCE = "adamw.cu"
DTYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
THREADS = 256
ELEMENTS_PER_BLOCK = 2048


class FactorPointers(ctypes.Structure):
    """Kernel parameter 8: device addresses of the factors that are on the device, 0 for the others."""

    _fields_ = (("at", ctypes.c_void_p * MAX_FACTORS),)


def functions(ordinal: int) -> list[int]:
    """CUfunction handles on device `ordinal` that update several rows: gradients in fp32, bf16, fp16, the new weight in the same dtype;
    bf16 with masters in two halves (split_master.py); bf16 weights with fp32 gradients, masters whole and in halves.
    """
    names = (*DTYPE_NAMES.values(), "split", "f32_bf16", "split_f32")
    return [cuda_module.function(ordinal, SOURCE, f"adamw_rows_{name}") for name in names]


def function(ordinal: int, grad: torch.dtype, out: torch.dtype) -> int:
    """CUfunction handle, valid in the primary context of device `ordinal` until the process ends.

    Raises EngineError when cuda.bindings is missing, or compiling or loading fails.
    """
    return cuda_module.function(ordinal, SOURCE, f"adamw_{DTYPE_NAMES[grad]}_{DTYPE_NAMES[out]}")


def adamw_(
    grad: torch.Tensor,  # [n] fp32, bf16 or fp16, all on one CUDA device, contiguous
    master: torch.Tensor,  # [n] fp32, in place, as are m, v and vmax
    m: torch.Tensor,
    v: torch.Tensor,
    vmax: torch.Tensor | None,
    scalars: AdamScalars,
    out: torch.Tensor | None = None,  # [n] the new weight; may be grad
    device_factors: Sequence[torch.Tensor | None] = (),  # 0-dim fp32 each, in place of scalars.factors[i]
) -> None:
    """One step on torch's current stream. Raises EngineError when the launch is refused."""
    n = grad.numel()
    if n == 0:
        return
    driver = cuda_module.binding("driver")
    pointers = FactorPointers((ctypes.c_void_p * MAX_FACTORS)(*(None if f is None else f.data_ptr() for f in device_factors)))
    tensors = (grad, master, m, v, vmax, out)
    values: list[Any] = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors]
    values += [ctypes.c_longlong(n), scalars.c_struct, pointers]
    parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    handle = function(grad.device.index, grad.dtype, grad.dtype if out is None else out.dtype)
    with torch.cuda.device(grad.device), cuda_module.primary_context(driver, grad.device.index):
        stream = torch.cuda.current_stream().cuda_stream
        grid = -(-n // ELEMENTS_PER_BLOCK)
        launched = driver.cuLaunchKernel(handle, grid, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(parameters), 0)
    cuda_module.checked(driver, launched, "launch the AdamW kernel")
