"""The AdamW kernel of `csrc/adamw.cu`: compiled once by NVRTC, loaded by the driver, launched by a handle that needs no Python.

    functions(ordinal)  ->  (fp32, bf16, fp16) CUfunction handles for the engine's cuLaunchKernel
    adamw_(...)         ->  the same launch from Python

The kernel's parameters are listed at the top of adamw.cu. NVRTC and the driver come from `cuda.bindings`, which torch's CUDA wheels
bring; no CUDA toolkit is needed. The cubin is kept in `build.cache_dir()` under a hash of source, options, architecture and NVRTC.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hytrain_fx.errors import EngineError
from hytrain_fx.runtime import build
from hytrain_fx.runtime.arithmetic import MAX_FACTORS, AdamScalars

DTYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
THREADS = 256
ELEMENTS_PER_BLOCK = 2048
# Each is the default or implied by the intrinsics; said again because one bit depends on each.
OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")


class FactorPointers(ctypes.Structure):
    """Kernel parameter 8: device addresses of the factors that are on the device, 0 for the others."""

    _fields_ = (("at", ctypes.c_void_p * MAX_FACTORS),)


def functions(ordinal: int) -> tuple[int, int, int]:
    """CUfunction handles on device `ordinal` for gradients in fp32, bf16 and fp16 with the new weight in the same dtype."""
    return (
        function(ordinal, torch.float32, torch.float32),
        function(ordinal, torch.bfloat16, torch.bfloat16),
        function(ordinal, torch.float16, torch.float16),
    )


@functools.cache
def function(ordinal: int, grad: torch.dtype, out: torch.dtype) -> int:
    """CUfunction handle, valid in the primary context of device `ordinal` until the process ends.

    Raises EngineError when cuda.bindings is missing, or compiling or loading fails.
    """
    driver = _binding("driver")
    _use_primary_context(driver, ordinal)
    name = f"adamw_{DTYPE_NAMES[grad]}_{DTYPE_NAMES[out]}"
    return int(_checked(driver, driver.cuModuleGetFunction(_module(ordinal), name.encode()), f"find {name}"))


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
    driver = _binding("driver")
    pointers = FactorPointers((ctypes.c_void_p * MAX_FACTORS)(*(None if f is None else f.data_ptr() for f in device_factors)))
    tensors = (grad, master, m, v, vmax, out)
    values: list[Any] = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors]
    values += [ctypes.c_longlong(n), scalars.c_struct, pointers]
    parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    with torch.cuda.device(grad.device):
        handle = function(torch.cuda.current_device(), grad.dtype, grad.dtype if out is None else out.dtype)
        _use_primary_context(driver, torch.cuda.current_device())
        stream = torch.cuda.current_stream().cuda_stream
        grid = -(-n // ELEMENTS_PER_BLOCK)
        launched = driver.cuLaunchKernel(handle, grid, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(parameters), 0)
    _checked(driver, launched, "launch the AdamW kernel")


def cubin(architecture: str) -> bytes:
    """Machine code for `architecture`, as "sm_90"; from the cache, else compiled by NVRTC, which needs no GPU. Raises EngineError."""
    nvrtc = _binding("nvrtc")
    source = (build.CSRC / "adamw.cu").read_bytes()
    header = (build.CSRC / "adam_scalars.h").read_bytes()
    options = (*OPTIONS, f"--gpu-architecture={architecture}")
    version = _checked(nvrtc, nvrtc.nvrtcVersion(), "ask NVRTC's version")
    key = hashlib.sha256(b"\0".join([source, header, *(o.encode() for o in options), repr(version).encode()])).hexdigest()[:16]
    path: Path = build.cache_dir() / f"adamw-{architecture}-{key}.cubin"
    if path.exists():
        return path.read_bytes()
    code = _compile(nvrtc, source, header, options)
    build.publish(code, path)
    return code


def _compile(nvrtc: ModuleType, source: bytes, header: bytes, options: tuple[str, ...]) -> bytes:
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(source, b"adamw.cu", 1, [header], [b"adam_scalars.h"]), "create a program")
    status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status[0]) != 0:
        log = b" " * _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program), "read its log")
        nvrtc.nvrtcGetProgramLog(program, log)
        raise EngineError(f"NVRTC failed on adamw.cu with {' '.join(options)}; is torch too old for this GPU?\n{log.decode()[:4000]}")
    code: bytes = b" " * _checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program), "get the cubin")
    _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, code), "get the cubin")
    _checked(nvrtc, nvrtc.nvrtcDestroyProgram(program), "destroy the program")
    return code


@functools.cache
def _module(ordinal: int) -> Any:
    driver = _binding("driver")
    major, minor = torch.cuda.get_device_capability(ordinal)
    return _checked(driver, driver.cuModuleLoadData(cubin(f"sm_{major}{minor}")), "load the AdamW cubin")


def _use_primary_context(driver: ModuleType, ordinal: int) -> None:
    """Makes torch's context of the device current on this thread; retained until the process ends, as torch does."""
    _checked(driver, driver.cuInit(0), "initialise the driver")
    _checked(driver, driver.cuCtxSetCurrent(_primary_context(ordinal)), "set the context")


@functools.cache
def _primary_context(ordinal: int) -> Any:
    driver = _binding("driver")
    device = _checked(driver, driver.cuDeviceGet(ordinal), "find the device")
    return _checked(driver, driver.cuDevicePrimaryCtxRetain(device), "retain the primary context")


@functools.cache
def _binding(name: str) -> ModuleType:
    try:
        binding = importlib.import_module(f"cuda.bindings.{name}")
        binding.nvrtcVersion() if name == "nvrtc" else binding.cuDriverGetVersion()  # loads the library behind it
    except (ImportError, RuntimeError) as error:
        raise EngineError(
            f"the CUDA kernel needs cuda.bindings.{name} and its library ({error}); torch's CUDA wheels bring both: pip install "
            f"cuda-bindings for CUDA {torch.version.cuda}, or pass engine='torch' (slower)."
        ) from error
    return binding


def _checked(binding: ModuleType, result: tuple[Any, ...], what: str) -> Any:
    """The value of a binding's (status, value) pair. Raises EngineError with the status' name where it is not 0."""
    status, *values = result
    if int(status) != 0:
        raise EngineError(f"{binding.__name__} failed to {what}: {status!r}")
    return values[0] if len(values) == 1 else tuple(values)
