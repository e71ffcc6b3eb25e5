"""What forwards do for threads that read weights beside the loop."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.session.turns import Turns


def _read_elsewhere(turns: Turns) -> None:
    thread = threading.Thread(target=turns.read)
    thread.start()
    thread.join()


def _settled_steps(turns: Turns) -> int:
    """How many steps of the loop begin with all weights new, from now on."""
    steps = 0
    while turns.must_settle:
        turns.stepped()
        steps += 1
    return steps


def test_a_thread_that_comes_back_is_waited_for_longer() -> None:
    """16 steps after its first read, eight times as many each time that it reads after them."""
    turns = Turns()
    turns.stepped()
    found = []
    for _ in range(5):
        assert not turns.must_settle
        _read_elsewhere(turns)
        found.append(_settled_steps(turns))
    assert found == [16, 128, 1024, 8192, 10_000]


@given(st.lists(st.integers(1, 15), min_size=1, max_size=20))
def test_reads_within_the_steps_do_not_lengthen_them(pauses: list[int]) -> None:
    """A thread that reads all the time is seen to have stopped 16 steps after its last read."""
    turns = Turns()
    turns.stepped()
    for pause in pauses:
        _read_elsewhere(turns)
        for _ in range(pause):
            turns.stepped()
    _read_elsewhere(turns)
    assert _settled_steps(turns) == 16
