"""Drawn training loops on a GPU have the plain loop's bits."""

from __future__ import annotations

import pytest

from ..cpu.programs import drawn_setup, search
from .feed_forward import deterministic

__all__ = ["deterministic"]  # the fixture, for this file too

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and ours, on odd orders of calls


@pytest.mark.parametrize("number", range(1, 9))
def test_drawn_programs_have_the_plain_loops_bits(number: int) -> None:
    """Every loss, weight, gradient and state is the plain loop's, with delays.

    The host is ahead of the device in some calls, and no thread is left after close.
    """
    found = search(number, 12, drawn_setup(number, "cuda"))
    assert not found.failures, f"{found.failures[0].error}\n{found.failures[0].program}"
    assert found.programs == 12
