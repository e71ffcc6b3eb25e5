"""A short soak: see soak.py; ./scripts/soak runs the long one."""

from __future__ import annotations

import pytest

from .soak import KINDS, Soak, Usage


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["float32", "autocast"])
def test_random_steps_in_lockstep_with_the_plain_loop(kind: str) -> None:
    """After some steps of a random loop, with delays in every stage, all bits are the plain loop's.

    No thread is left over.
    """
    soak = Soak(KINDS[kind], seed=3, autocast=kind == "autocast")
    soak.run(10)
    threads = Usage.now().threads
    soak.run(50)
    assert Usage.now().threads <= threads
    soak.close()
