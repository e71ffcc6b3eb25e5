"""Limits that more than one room keeps, each stated once.

The C++ and CUDA builds get those in `IN_CPP`.

    python hytrain_fx/ir/limits.py  ->  -DHYTRAIN_FX_CHUNK_PARAMS=4194304 ...

`runtime/native/build.py` passes `definitions()` to the compiler and to NVRTC, scripts/race_check
the line that this file prints: it imports nothing of ours, so a plain Python runs it.
csrc/shared_limits.h gives the values their C++ names.
"""

from __future__ import annotations

from typing import Final

# ---- How updates are cut ----

# Parameters in one copy or one CPU task: the grain at which urgent work passes other work.
CHUNK_PARAMS: Final = 4 << 20
# Parameters one worker takes at a time. A chunk occupies all workers, and a piece takes long
# compared with fetching it from the queue.
GRANULE_PARAMS: Final = 256 << 10
# A smaller row is not worth other memory for its states, which an update on a guess needs.
LEAST_GUESSED_PARAMS: Final = 64 << 10
# A gradient may carry this many logged multiplications; more are made on the real tensor.
MAX_FACTORS: Final = 4
# States of one parameter in the kernels, besides its master.
MAX_STATES: Final = 3
# Share of a unit's largest parameter. Smaller ones (norms, biases) are not worth a staging slot and
# stay where they are.
SMALL_PARAMETER_SHARE: Final = 1 / 1024

# ---- Device memory that things pass through ----

# Chunks of streamed states on the device at once: one being filled, one updated, one emptied, and
# as many again against hiccups.
STAGING_SLOTS: Final = 6
# Gradients on their way out (the ring) and streamed states (the staging slots) together. This
# leaves room for fragments below the 1 GB that training may add to a GPU's peak.
TRANSIT_BYTES: Final = 640_000_000

# Units whose weights are brought from the host ahead of need, until times are measured.
UNITS_AHEAD: Final = 2

# ---- Bytes of a parameter ----

HALF_BYTES: Final = 2  # bf16, fp16
FP32_BYTES: Final = 4
# A cache line of the host, as wide as the widest vector register. Host memory is aligned to it.
CACHE_LINE_BYTES: Final = 64
# Arrays a multiple of 4 KiB apart would meet in the same sets of a cache, so each array of a shadow
# slot begins this much later.
SHADOW_APART_BYTES: Final = 17 * CACHE_LINE_BYTES

# ---- Launches on a CUDA device ----

CUDA_BLOCK_THREADS: Final = 256
# Enough for a thread to take 8 at once: 16 bytes of a 16-bit array.
CUDA_BLOCK_ELEMENTS: Final = 8 * CUDA_BLOCK_THREADS
# The update kernels that the engine launches, numbered by `update_kernel` (csrc/device.h).
UPDATE_KERNELS: Final = 18
# Rows of one update launch and copies of one gather: what fits in 4 KiB of kernel parameters.
ROWS_PER_LAUNCH: Final = 30
PARTS_PER_GATHER: Final = 32

# ---- Times and gains ----

# Clocks can hold the end of a wait of this length, 31 years. The end of a longer one would
# overflow, into the past.
LONGEST_WAIT_S: Final = 1e9
# Share of the step. A smaller gain is lost to copies that come in another order than planned, and
# cannot be told from a flat optimum.
LEAST_GAIN_SHARE: Final = 0.01
# Bytes of one copy whose rate is measured: a chunk of an fp32 array, as the engine copies.
TIMED_COPY_BYTES: Final = FP32_BYTES * CHUNK_PARAMS

IN_CPP: Final = (
    "CHUNK_PARAMS",
    "GRANULE_PARAMS",
    "LEAST_GUESSED_PARAMS",
    "MAX_FACTORS",
    "MAX_STATES",
    "CACHE_LINE_BYTES",
    "SHADOW_APART_BYTES",
    "CUDA_BLOCK_THREADS",
    "CUDA_BLOCK_ELEMENTS",
    "UPDATE_KERNELS",
    "ROWS_PER_LAUNCH",
    "PARTS_PER_GATHER",
    "LONGEST_WAIT_S",
)


def definitions() -> tuple[str, ...]:
    """The shared limits as options of a C++ compiler."""
    return tuple(f"-DHYTRAIN_FX_{name}={globals()[name]}" for name in IN_CPP)


if __name__ == "__main__":
    print(*definitions())
