"""A short soak: see soak.py; ./scripts/soak runs the long one."""

from __future__ import annotations

import pytest
import torch

from .soak import Soak, Usage

pytestmark = pytest.mark.fused_kernels


def test_random_steps_in_lockstep_with_the_plain_loop() -> None:
    """After some steps of a random loop with delays in every stage all bits are the plain loop's, and no thread is left over."""
    soak = Soak(torch.float32, seed=3)
    soak.run(10)
    threads = Usage.now().threads
    soak.run(50)
    assert Usage.now().threads <= threads
    soak.close()
