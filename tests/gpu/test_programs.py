"""Drawn training loops on a GPU have the plain loop's bits."""

from __future__ import annotations

import pytest

from ..cpu.program_models import Setup
from ..cpu.programs import Program, check, drawn_setup, search
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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("width", [64, 256])
def test_recomputed_layers_with_a_bias_keep_inductors_choice_of_kernels(tied: bool, width: int) -> None:
    """A release is no reader of a recomputed `addmm` that Inductor takes apart (fp32)."""
    setup = Setup(("recomputed",), tied, "float32", "AdamW", "k=0", width, device="cuda")
    check(Program(setup, calls=(("train", 0), ("train", 1))))
