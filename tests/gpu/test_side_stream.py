"""Memory that a stream beside the computing one reads."""

from __future__ import annotations

import pytest
import torch

from hytrain_fx.runtime.side_stream import SideStream, read_here

NUMBERS, BUSY_CYCLES = 1 << 20, 200_000_000


@pytest.mark.parametrize("noted", [True, False])
def test_what_is_read_beside_may_be_dropped_at_once(noted: bool) -> None:
    """Its memory is not given away before it is read.

    Without `read_here` it is, which shows that this test can fail.
    """
    side = SideStream(torch.device("cuda", 0))
    dropped = torch.ones(NUMBERS, device="cuda")
    with side.beside():
        torch.cuda._sleep(BUSY_CYCLES)
        copy = dropped.clone()
        if noted:
            read_here(dropped)
    del dropped
    overwritten = torch.zeros(NUMBERS, device="cuda")
    side.join()
    assert bool((copy == 1).all()) is noted
    assert not overwritten.any()
