"""Where a row was measured.

Rows are compared only when machine, boot and software are the same.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine() -> dict[str, Any]:
    """GPU, cores, host memory, versions, boot, and the length that CUDA's launch queues were given.

    None: they have CUDA's usual length.
    """
    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpu_memory_gb": round(torch.cuda.get_device_properties(0).total_memory / 1e9, 1) if cuda else None,
        "cores": len(os.sched_getaffinity(0)),
        "host_memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "boot": BOOT_ID.read_text()[:8] if BOOT_ID.exists() else platform.node(),
        "launch_queues": os.environ.get("CUDA_SCALE_LAUNCH_QUEUES"),
    }


def machine_text(found: dict[str, Any]) -> str:
    """One line."""
    device = f"{found['gpu']} ({found['gpu_memory_gb']} GB)" if found["gpu"] else "no GPU"
    queues = f", CUDA_SCALE_LAUNCH_QUEUES={found['launch_queues']}" if found.get("launch_queues") else ""
    return (f"{device}, {found['cores']} cores, {found['host_memory_gb']} GB host memory, "
            f"torch {found['torch']}, Python {found['python']}, boot {found['boot']}{queues}")
