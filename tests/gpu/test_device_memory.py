"""A process that torch holds to a share of the GPU knows what is left of that share."""

from __future__ import annotations

import pytest
import torch

from hytrain_fx.runtime.memory import free_bytes, total_bytes

GIB = 1 << 30


def test_what_is_free_can_be_taken_and_not_more() -> None:
    """A tensor of nearly all that is free can be made, and then none of a quarter of a GiB."""
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved(device) + 2 * GIB
    try:
        torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info(device)[1], device)
        assert total_bytes(device) == pytest.approx(allowed, abs=2)
        free = free_bytes(device)
        assert 1 * GIB < free <= 2 * GIB
        taken = torch.empty(free - (64 << 20), dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(256 << 20, dtype=torch.uint8, device=device)
        assert taken.numel() > GIB - (64 << 20)
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
