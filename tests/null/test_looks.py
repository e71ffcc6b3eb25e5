"""The time that planning takes of the loop is told, and bounded."""

from __future__ import annotations

from contextlib import suppress

from hytrain_fx.ir.figures import time_text
from hytrain_fx.planning.aside import Aside, Delay
from hytrain_fx.planning.controller import Event

from .controlled import Program


def test_the_time_that_planning_takes_is_told() -> None:
    """Where it is more than a second and a hundredth of the time since the start."""
    now_s = 100.0
    aside = Aside(lambda: now_s)
    for took_s in (0.02, 3.0):
        assert aside.in_words() is None
        with aside("waiting"):
            now_s += took_s
    told = aside.in_words()
    assert told is not None
    assert f"{time_text(3.02e6)}, 100.0% of the time" in told
    now_s += 200
    assert aside.in_words() is None


def test_looks_take_a_second_and_then_a_hundredth_of_the_time() -> None:
    """However long one takes, and also where it ends with an error."""
    now_s = 100.0
    looks = Delay(lambda: now_s)

    def look(took_s: float) -> None:
        nonlocal now_s
        assert looks.is_little
        with looks():
            now_s += took_s

    for _ in range(5):
        look(0.25)
    assert not looks.is_little, "1.25 s of 1.25"
    now_s += 23.8
    look(0.25)
    assert not looks.is_little
    now_s += 25
    with suppress(ZeroDivisionError), looks():
        now_s += 3.0
        raise ZeroDivisionError
    now_s += 290
    assert not looks.is_little
    now_s += 10
    assert looks.is_little


def test_no_reason_has_a_plan_looked_at_while_there_is_no_time() -> None:
    """Steps of another length, and ends that lie apart, are seen when there is time again."""
    program = Program(every=1000)
    program.steps(40)
    program.may_look = False
    assert {program.step(5000.0).event for _ in range(60)} == {Event.STEPPED}
    program.may_look = True
    assert Event.LENGTHS in {program.step(5000.0).event for _ in range(60)}


def test_what_one_step_was_held_up_is_told_once() -> None:
    """A lap is what was added since the one before."""
    now_s = 100.0
    delay = Delay(lambda: now_s)
    for took_s in (0.5, 0.0, 0.25):
        with delay():
            now_s += took_s
        now_s += 1.0
        assert delay.lap_s() == took_s
