"""A second thread beside training on a GPU: evaluations, checkpoints, metrics, forks.

The training keeps the bits of the plain loop.
"""

from __future__ import annotations

import pytest

from ..cpu.test_second_thread import LOOKS, assert_evaluations_whole, assert_exact_beside
from .feed_forward import deterministic

__all__ = ["deterministic"]  # the fixture, for this file too


@pytest.mark.parametrize("engine", ["native", "torch"])
@pytest.mark.parametrize("look", LOOKS)
def test_training_beside_another_thread_has_the_bits_of_the_plain_loop(look: str, engine: str) -> None:
    """Whatever the thread asks for, as often as it likes, without an error in either of them."""
    assert_exact_beside(LOOKS[look], engine, "cuda")


@pytest.mark.parametrize("engine", ["native", "torch"])
def test_an_evaluation_in_another_thread_sees_the_weights_of_one_step(engine: str) -> None:
    """Whole: each of its outputs is one that the plain loop has between two steps."""
    assert_evaluations_whole(engine, "cuda")
