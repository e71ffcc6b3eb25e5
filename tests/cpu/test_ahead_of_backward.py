"""The launching thread passes the gates of a forward before the backward has begun on the device.

What goes to the device stands on the lane by then. The compute stream is a queue of a native
program: in Python it is the caller.
"""

from __future__ import annotations

import subprocess

import pytest

from .native_programs import built

UNITS = 8


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What came to the device in a step, in its order, as tests/native/ahead.cpp says."""
    done = subprocess.run([built("ahead", tmp_path_factory.mktemp("ahead"))], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    passed, _, came = done.stdout.partition(":")
    assert passed == "in time", "the launching thread waited for a backward that waited for it"
    return came.split()


def test_everything_comes_once(order: list[str]) -> None:
    """Two weights of each unit that the CPU updates, and one that is streamed."""
    units = range(UNITS)
    assert sorted(order) == sorted([*(f"w{u}" for u in units), *(f"w{u}'" for u in units), *(f"s{u}" for u in units)])


def test_states_come_in_the_order_of_the_backward(order: list[str]) -> None:
    """It makes the last unit's gradients first, and states are brought for them first."""
    assert [what for what in order if what[0] == "s"] == [f"s{u}" for u in reversed(range(UNITS))]
    assert order[0] == f"s{UNITS - 1}"


def test_weights_do_not_wait_for_all_states(order: list[str]) -> None:
    """The first updates by the CPU end while states are brought, and weights that came first go."""
    assert order.index(f"w{UNITS - 1}") < order.index("s0")


def test_what_is_read_until_the_end_holds_up_nothing(order: list[str]) -> None:
    """The lane carries one thing after the other: weights that are read late come after states."""
    assert min(order.index(f"w{u}'") for u in range(UNITS)) > order.index("s0")
