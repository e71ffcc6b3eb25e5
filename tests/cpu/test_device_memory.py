"""What a GPU still holds for this process, where torch holds the process to a share of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hytrain_fx.runtime.memory import device_budget_bytes, free_bytes, total_bytes

GPU = torch.device("cuda", 0)
GB = 10**9
TOTAL = 80 * GB

Machine = Callable[[float, int, int], None]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A GPU of 80 GB: the share that the process may have, what it holds, what the driver has."""

    def made(share: float, reserved: int, free: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, TOTAL))
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    return made


@pytest.mark.parametrize(("share", "reserved", "free", "expected"), [
    (1.0, 10 * GB, 69 * GB, 69 * GB),  # no share: what the driver has free
    (0.25, 8 * GB, 71 * GB, 12 * GB),  # the share, less what the process holds
    (0.25, 8 * GB, 3 * GB, 3 * GB),  # another process has the rest
    (0.25, 22 * GB, 57 * GB, 0),  # the share was set after more was taken
])
def test_a_process_takes_no_more_than_its_share(gpu: Machine, share: float, reserved: int, free: int, expected: int) -> None:
    """Free is what the driver has free, or less where the process is held to a share."""
    gpu(share, reserved, free)
    assert free_bytes(GPU) == expected
    assert free_bytes(torch.device("cuda")) == expected
    assert total_bytes(GPU) == share * TOTAL


def test_states_get_what_the_share_leaves(gpu: Machine) -> None:
    """With a share of 20 GB, states get less of the device than they would of all 80."""
    gpu(0.25, 8 * GB, 71 * GB)
    held = device_budget_bytes("auto", GPU, 1e12, 2 * GB)
    assert held == pytest.approx(2 * GB + 0.95 * 12 * GB - 2**30)
    gpu(1.0, 8 * GB, 71 * GB)
    assert device_budget_bytes("auto", GPU, 1e12, 2 * GB) - held == pytest.approx(0.95 * 59 * GB)
