"""What a run holds, in GB (1e9 bytes): device memory, resident memory, pinned memory."""

from __future__ import annotations

import resource
from typing import Any

import psutil
import torch


def memory(device: torch.device, pinned_elsewhere_bytes: int = 0) -> dict[str, float | None]:
    """Memory of device and host, in use and at its peak.

    The device's peak is since its statistics were reset, the host's since the process began.
    `gpu_used_gb` is what the driver counts, the CUDA context included. `pinned_elsewhere_bytes` is
    pinned without torch's allocator.
    """
    host = {"host_rss_gb": _gb(psutil.Process().memory_info().rss),
            "host_peak_rss_gb": _gb(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}
    if device.type != "cuda":
        return {"gpu_peak_allocated_gb": None, "gpu_peak_reserved_gb": None, "gpu_used_gb": None, **host, "pinned_gb": None}
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return {
        "gpu_peak_allocated_gb": _gb(torch.cuda.max_memory_allocated(device)),
        "gpu_peak_reserved_gb": _gb(torch.cuda.max_memory_reserved(device)),
        "gpu_used_gb": _gb(total_bytes - free_bytes),
        **host,
        "pinned_gb": _gb(_pinned_by_torch_bytes() + pinned_elsewhere_bytes),
    }


def _pinned_by_torch_bytes() -> int:
    stats: dict[str, Any] = torch.cuda.host_memory_stats()
    return int(stats.get("allocated_bytes.current", 0))


def _gb(nbytes: float) -> float:
    return round(nbytes / 1e9, 3)
