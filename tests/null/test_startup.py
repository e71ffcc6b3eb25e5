"""The start-up clock: phases tile the time, and it stops at the first full-speed step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.ir.startup import Phase, StartupClock


class Time:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def spend(self, seconds: float) -> None:
        self.now_s += seconds


def test_each_phase_has_its_own_time() -> None:
    """In a session of two warm-up steps every second is in one phase.

    A second of an inner phase does not count for the outer one.
    """
    time = Time()
    clock = StartupClock(time)
    time.spend(1)
    with clock.phase(Phase.ENGINE):
        time.spend(2)
    with clock.phase(Phase.MASTERS):
        time.spend(7)
    clock.reassign(Phase.MASTERS, Phase.HOST_MEMORY, 4e6)
    clock.pinned_bytes = 40 * 10**9
    clock.built()
    time.spend(5)
    clock.forward_begins(full_speed=False)
    clock.open(Phase.COMPILE_FORWARD)
    time.spend(10)
    with clock.phase(Phase.PASSES):
        time.spend(1)
    clock.close(Phase.COMPILE_FORWARD)
    clock.close(Phase.COMPILE_FORWARD)
    with clock.phase(Phase.COMPILE_BACKWARD):
        time.spend(20)
    time.spend(1)
    assert not clock.step_ends()
    clock.forward_begins(full_speed=False)
    time.spend(2)
    assert not clock.step_ends()
    assert not clock.report().complete
    with clock.phase(Phase.PLAN):
        time.spend(1)
        with clock.phase(Phase.MOVE):
            time.spend(3)
    clock.forward_begins(full_speed=True)
    time.spend(0.5)
    assert clock.step_ends()
    found = clock.report()
    assert (found.setup_us, found.engine_us, found.masters_us, found.host_memory_us) == (1e6, 2e6, 3e6, 4e6)
    assert (found.loop_us, found.compile_forward_us, found.passes_us, found.compile_backward_us) == (5e6, 10e6, 1e6, 20e6)
    assert (found.warm_up_us, found.plan_us, found.move_us, found.first_step_us) == (3e6, 1e6, 3e6, 0.5e6)
    assert (found.warm_up_steps, found.complete) == (2, True)
    assert found.total_us == pytest.approx(53.5e6)
    assert found.own_us == pytest.approx(18e6)
    assert found.pinned_gb_per_s == pytest.approx(10)


def test_nothing_is_counted_after_the_first_full_speed_step() -> None:
    """Later steps, phases and recompiles change nothing."""
    time = Time()
    clock = StartupClock(time)
    clock.built()
    clock.forward_begins(full_speed=True)
    time.spend(1)
    assert clock.step_ends()
    before = clock.report()
    clock.forward_begins(full_speed=True)
    with clock.phase(Phase.COMPILE_FORWARD):
        time.spend(100)
    assert not clock.step_ends()
    assert clock.report() == before


Action = tuple[str, float, Phase]
NAMES = ("phase", "open", "close", "built", "forward", "step")


@given(actions=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 9).map(float), st.sampled_from(Phase))))
def test_phases_add_up_to_the_time_that_passed(actions: list[Action]) -> None:
    """Whatever happens in whatever order."""
    time = Time()
    clock = StartupClock(time)
    doings: dict[str, Callable[[Phase], object]] = {
        "open": clock.open,
        "close": clock.close,
        "built": lambda _: clock.built(),
        "forward": lambda _: clock.forward_begins(full_speed=False),
        "step": lambda _: clock.step_ends(),
    }
    for name, seconds, phase in actions:
        if name == "phase":
            with clock.phase(phase):
                time.spend(seconds)
        else:
            time.spend(seconds)
            doings[name](phase)
    assert clock.report().total_us == pytest.approx((time.now_s - 100.0) * 1e6)


def test_an_error_within_a_phase_ends_it() -> None:
    """A failed compile leaves the clock in the phase it was in before."""
    time = Time()
    clock = StartupClock(time)
    clock.built()
    with pytest.raises(ValueError, match="failed"), clock.phase(Phase.COMPILE_FORWARD):
        raise ValueError("failed")
    time.spend(1)
    assert clock.report().loop_us == 1e6


def test_no_more_is_reassigned_than_was_spent() -> None:
    """A phase never becomes negative."""
    time = Time()
    clock = StartupClock(time)
    with clock.phase(Phase.MASTERS):
        time.spend(1)
    clock.reassign(Phase.MASTERS, Phase.HOST_MEMORY, 5e6)
    found = clock.report()
    assert (found.masters_us, found.host_memory_us) == (0, 1e6)
