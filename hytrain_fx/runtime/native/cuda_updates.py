"""The update kernels of `csrc/update_rows.cu`.

Compiled once by NVRTC, loaded by the driver, launched by handles that need no Python.
"""

from __future__ import annotations

from hytrain_fx.runtime.native import cuda_module

SOURCE = "update_rows.cu"
_ALIKE = ("f32", "bf16", "f16")
# In the numbering of update_kernel (csrc/device.h).
NAMES = (*(f"adamw_rows_{form}" for form in (*_ALIKE, "split", "f32_bf16", "split_f32")), *(f"lion_rows_{form}" for form in _ALIKE))


def functions(ordinal: int) -> list[int]:
    """CUfunction handles on device `ordinal` that update several rows.

    Gradients in fp32, bf16, fp16, the new weight in the same dtype; bf16 with masters in two halves
    (split_master.py); bf16 weights with fp32 gradients, masters whole and in halves.

    Raises EngineError when cuda.bindings is missing, or compiling or loading fails.
    """
    return [cuda_module.function(ordinal, SOURCE, name) for name in NAMES]
