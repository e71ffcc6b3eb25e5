"""How much memory optimizer states may take, on the device and on the host."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import psutil
import torch

from hytrain_fx.runtime.topology import local_ranks

# Left free on each tier: for the allocator's fragments, for other processes, for what a later step
# may need.
_DEVICE_MARGIN_BYTES = 1 << 30
_HOST_SHARE = 0.9
CGROUPS = Path("/sys/fs/cgroup")
# Limit, usage and statistics of this process's control group as a container sees it: version 2,
# version 1.
_GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def device_budget_bytes(option: float | int | Literal["auto"], device: torch.device, all_states_bytes: float, resident_bytes: int) -> float:
    """Bytes for states on the device under the option `gpu_states`.

    "auto": what rests there already and what this process can still take of the device now, less a
    margin. Call after steps have run, so that the allocator holds what activations need.
    """
    if isinstance(option, float):
        return option * all_states_bytes
    if option != "auto":
        return option
    if device.type == "cuda":
        return max(0.0, resident_bytes + 0.95 * free_bytes(device) - _DEVICE_MARGIN_BYTES)
    return resident_bytes + _HOST_SHARE * available_host_bytes()


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that this process can still take.

    What the driver has free, or less where the process is held to a share of the GPU. torch's
    allocator knows that share, the driver does not.
    """
    return max(0, _own_most_bytes(device) - torch.cuda.memory_reserved(device))


def room_bytes(device: torch.device, own_bytes: int) -> float:
    """What a model may take of a device in all; no bound for a CPU, whose memory is the host's.

    own_bytes   what it has there already
    """
    if device.type != "cuda":
        return math.inf
    return max(0, _own_most_bytes(device) - torch.cuda.memory_allocated(device)) + own_bytes


def _own_most_bytes(device: torch.device) -> int:
    """What torch's allocator has and can still get, in use or idle."""
    free, total = torch.cuda.mem_get_info(device)
    return min(free + torch.cuda.memory_reserved(device), _allowed_bytes(device, total))


def total_bytes(device: torch.device) -> float:
    """All the memory of a GPU that this process may have.

    No bound for a CPU, whose memory is the host's.
    """
    return _allowed_bytes(device, torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else math.inf


def _allowed_bytes(device: torch.device, total: int) -> int:
    """What `torch.cuda.set_per_process_memory_fraction` leaves of all of a GPU's memory."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(total * torch.cuda.get_per_process_memory_fraction(index))


def host_budget_bytes(limit_bytes: int | None) -> int:
    """Bytes for states on the host: the option `host_memory`, else most of what is available.

    Ranks that share the host have equal parts of that.
    """
    return limit_bytes if limit_bytes is not None else int(_HOST_SHARE * available_host_bytes() / local_ranks())


def available_host_bytes(root: Path = CGROUPS) -> int:
    """Bytes that this process can still take on the host.

    What the system has available, or less where its control group has a limit.
    """
    available = int(psutil.virtual_memory().available)
    left = (_left_in_group(root, *names) for names in _GROUP_FILES)
    return min([available, *(nbytes for nbytes in left if nbytes is not None)])


def _left_in_group(root: Path, limit: str, usage: str, statistics: str) -> int | None:
    """Bytes left in the control group; None without a limit.

    Cached file pages that are not in use are given back when memory is short.
    """
    try:
        left = int((root / limit).read_text()) - int((root / usage).read_text())
        of = dict(line.split() for line in (root / statistics).read_text().splitlines())
        return max(0, left + int(of.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
