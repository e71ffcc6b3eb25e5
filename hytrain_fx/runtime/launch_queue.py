"""A queue of launches to the GPU that a whole backward fits in.

The launching thread should come to `step()` while the device begins the backward. But 1020 launches
fill the driver's queue, about ten layers of a backward, and the thread then goes at the device's
pace. With CUDA_SCALE_LAUNCH_QUEUES=4x 4092 fit
(https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables). The driver
reads it once, when it is first called: hence at import, and in time only where hytrain_fx is
imported before CUDA is asked for anything (`torch.cuda.is_available()` is enough).
"""

from __future__ import annotations

import ctypes
import os

VARIABLE = "CUDA_SCALE_LAUNCH_QUEUES"
LONGEST = "4x"
_USUAL_PLACES = 1020
_SCALES = ("0.25", "0.5", "2", "4")  # what the driver takes
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def ask_for_long_queue() -> None:
    """Set the variable for this process and its children.

    Not where it is set (also to nothing), where it would come too late, or without a driver.
    """
    if VARIABLE not in os.environ and _cuda_has_begun() is False:
        os.environ[VARIABLE] = LONGEST


def length_asked_for() -> str | None:
    """What the variable says; None where the queue has its usual length."""
    return os.environ.get(VARIABLE) or None


def places() -> int:
    """How much a stream's queue takes: launches, copies, events, waits and written words, one each.

    Measured with driver 580 on an H100 (docs/runs.md, run BP).
    """
    scale = (length_asked_for() or "1x").removesuffix("x")
    return int(_USUAL_PLACES * (float(scale) if scale in _SCALES else 1.0))


def _cuda_has_begun() -> bool | None:
    """Whether this process has called the driver's cuInit; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)
