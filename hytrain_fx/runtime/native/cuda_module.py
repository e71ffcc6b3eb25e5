"""CUDA source to a function that C++ can launch.

It is compiled once by NVRTC, kept as a cubin, and loaded by the driver.

NVRTC and the driver come from `cuda.bindings`, which torch's CUDA wheels bring; no CUDA toolkit is
needed. Cubins are kept in `build.cache_dir()` under a hash of source, options, architecture and
NVRTC.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hytrain_fx.errors import EngineError
from hytrain_fx.ir import limits
from hytrain_fx.runtime.native import build

# Each is the default or implied by the intrinsics. They are repeated because one bit depends on
# each.
OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", *limits.definitions())
_HEADERS = ("update_scalars.h", "shared_limits.h", "random_bits.h")  # all that the sources include
UPDATE_SOURCE = "update_rows.cu"
_ALIKE = ("f32", "bf16", "f16")
# As update_kernel of csrc/device.h numbers them.
_ADAMW = (*_ALIKE, "split", "f32_bf16", "split_f32")
_WITH_FP32_STATES = (*(f"adamw_rows_{form}" for form in _ADAMW), *(f"lion_rows_{form}" for form in _ALIKE))
_UPDATES = (*_WITH_FP32_STATES, *(f"{name}_moments16" for name in _WITH_FP32_STATES))


@functools.cache
def function(ordinal: int, source_name: str, name: str) -> int:
    """CUfunction handle of kernel `name` of csrc/`source_name`.

    It is valid in the primary context of device `ordinal` until the process ends.

    Raises EngineError when cuda.bindings is missing, or compiling or loading fails.
    """
    driver = binding("driver")
    with primary_context(driver, ordinal):
        return int(checked(driver, driver.cuModuleGetFunction(_module(ordinal, source_name), name.encode()), f"find {name}"))


def update_functions(ordinal: int) -> list[int]:
    """CUfunction handles on device `ordinal` that update several rows.

    Gradients in fp32, bf16, fp16, the new weight in the same dtype; bf16 with masters in two halves
    (split_master.py); bf16 weights with fp32 gradients, masters whole and in halves. Then the same
    for states in bf16 (rounding.py).

    Raises EngineError when cuda.bindings is missing, or compiling or loading fails.
    """
    return [function(ordinal, UPDATE_SOURCE, name) for name in _UPDATES]


def cubin(source_name: str, architecture: str) -> bytes:
    """Machine code of csrc/`source_name` for `architecture`, such as "sm_90".

    From the cache, else compiled by NVRTC, which needs no GPU.

    Raises EngineError.
    """
    nvrtc = binding("nvrtc")
    source = (build.CSRC / source_name).read_bytes()
    headers = [(build.CSRC / name).read_bytes() for name in _HEADERS]
    options = (*OPTIONS, f"--gpu-architecture={architecture}")
    version = checked(nvrtc, nvrtc.nvrtcVersion(), "ask NVRTC's version")
    key = hashlib.sha256(b"\0".join([source, *headers, *(o.encode() for o in options), repr(version).encode()])).hexdigest()[:16]
    path: Path = build.cache_dir() / f"{Path(source_name).stem}-{architecture}-{key}.cubin"
    if path.exists():
        return path.read_bytes()
    code = _compile(nvrtc, source_name, source, headers, options)
    build.publish(code, path)
    return code


def _compile(nvrtc: ModuleType, source_name: str, source: bytes, headers: list[bytes], options: tuple[str, ...]) -> bytes:
    names = [name.encode() for name in _HEADERS]
    created = nvrtc.nvrtcCreateProgram(source, source_name.encode(), len(names), headers, names)
    program = checked(nvrtc, created, "create a program")
    status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status[0]) != 0:
        log = b" " * checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program), "read its log")
        nvrtc.nvrtcGetProgramLog(program, log)
        raise EngineError(f"NVRTC failed on {source_name} with {' '.join(options)}; is torch too old for this GPU?\n{log.decode()[:4000]}")
    code: bytes = b" " * checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program), "get the cubin")
    checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, code), "get the cubin")
    checked(nvrtc, nvrtc.nvrtcDestroyProgram(program), "destroy the program")
    return code


@functools.cache
def _module(ordinal: int, source_name: str) -> Any:
    driver = binding("driver")
    major, minor = torch.cuda.get_device_capability(ordinal)
    return checked(driver, driver.cuModuleLoadData(cubin(source_name, f"sm_{major}{minor}")), f"load the cubin of {source_name}")


@contextlib.contextmanager
def primary_context(driver: ModuleType, ordinal: int) -> Iterator[None]:
    """Within the block, torch's context of the device is current on this thread.

    The thread's own device is left alone. The context is retained until the process ends, as torch
    does.
    """
    checked(driver, driver.cuInit(0), "initialise the driver")
    checked(driver, driver.cuCtxPushCurrent(_primary_context(ordinal)), "set the context")
    try:
        yield
    finally:
        checked(driver, driver.cuCtxPopCurrent(), "set the context back")


@functools.cache
def _primary_context(ordinal: int) -> Any:
    driver = binding("driver")
    device = checked(driver, driver.cuDeviceGet(ordinal), "find the device")
    return checked(driver, driver.cuDevicePrimaryCtxRetain(device), "retain the primary context")


@functools.cache
def binding(name: str) -> ModuleType:
    try:
        binding = importlib.import_module(f"cuda.bindings.{name}")
        # this loads the library
        binding.nvrtcVersion() if name == "nvrtc" else binding.cuDriverGetVersion()
    except (ImportError, RuntimeError) as error:
        raise EngineError(
            f"the CUDA kernel needs cuda.bindings.{name} and its library ({error}); torch's CUDA wheels bring both: pip install "
            f"cuda-bindings for CUDA {torch.version.cuda}, or pass engine='torch' (slower)."
        ) from error
    return binding


def checked(binding: ModuleType, result: tuple[Any, ...], what: str) -> Any:
    """The value of a binding's (status, value) pair.

    Raises EngineError with the status' name where it is not 0.
    """
    status, *values = result
    if int(status) != 0:
        raise EngineError(f"{binding.__name__} failed to {what}: {status!r}")
    return values[0] if len(values) == 1 else tuple(values)
