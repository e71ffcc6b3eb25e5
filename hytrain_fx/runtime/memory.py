"""How much memory optimizer states may take, on the device and on the host."""

from __future__ import annotations

from typing import Literal

import psutil
import torch

# Left free on a tier: for the allocator's fragments, for other processes, for what a later step may need.
_DEVICE_MARGIN_BYTES = 1 << 30
_HOST_SHARE = 0.9


def device_budget_bytes(option: float | int | Literal["auto"], device: torch.device, all_states_bytes: float, resident_bytes: int) -> float:
    """Bytes for states on the device under the option `gpu_states`.

    "auto": what rests there already and what the device has free now, less a margin. Call after steps have run, so that the
    allocator holds what activations need.
    """
    if isinstance(option, float):
        return option * all_states_bytes
    if option != "auto":
        return option
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(0.0, resident_bytes + 0.95 * free - _DEVICE_MARGIN_BYTES)
    return resident_bytes + _HOST_SHARE * float(psutil.virtual_memory().available)


def host_budget_bytes(limit_bytes: int | None) -> int:
    """Bytes for states on the host: the option `host_memory`, else most of what is available."""
    return limit_bytes if limit_bytes is not None else int(_HOST_SHARE * psutil.virtual_memory().available)
