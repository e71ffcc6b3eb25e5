"""The clock of the start-up shows its long phases, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hytrain_fx.ir.startup import Phase
from hytrain_fx.session import shown_clock
from hytrain_fx.session.shown_clock import ShownClock

FORWARD, BACKWARD = "hytrain_fx: torch.compile, forward", "hytrain_fx: torch.compile, backward"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is shown, in order, and what ends."""
    told: list[str] = []

    @contextmanager
    def stage(what: str, *, quiet: bool) -> Iterator[None]:
        assert quiet, "the program is not ours"
        told.append(what)
        try:
            yield
        finally:
            told.append("end")

    monkeypatch.setattr(shown_clock, "stage", stage)
    return told


def test_the_outermost_phase_is_shown(shown: list[str]) -> None:
    """A phase within it is not, and one that is short never is."""
    clock = ShownClock()
    with clock.phase(Phase.PLAN):
        assert shown == []
    clock.open(Phase.COMPILE_FORWARD)
    with clock.phase(Phase.COMPILE_FORWARD), clock.phase(Phase.PASSES):
        assert shown == [FORWARD]
    clock.close(Phase.COMPILE_FORWARD)
    assert shown == [FORWARD, "end"]
    with clock.phase(Phase.COMPILE_BACKWARD), clock.phase(Phase.COMPILE_BACKWARD):
        assert shown == [FORWARD, "end", BACKWARD]
    assert shown == [FORWARD, "end", BACKWARD, "end"]


def test_an_error_ends_what_is_shown(shown: list[str]) -> None:
    """The next phase is shown again."""
    clock = ShownClock()
    with pytest.raises(ValueError, match="failed"), clock.phase(Phase.COMPILE_FORWARD):
        raise ValueError("failed")
    with clock.phase(Phase.MOVE):
        pass
    assert shown == [FORWARD, "end", "hytrain_fx: moving optimizer states", "end"]


def test_a_model_that_is_compiled_again_is_shown_too(shown: list[str]) -> None:
    """When the start-up is over nothing is counted any more, and a graph may still take long."""
    clock = ShownClock()
    clock.built()
    clock.forward_begins(full_speed=True)
    assert clock.step_ends()
    with clock.phase(Phase.COMPILE_FORWARD):
        assert shown == [FORWARD]
    assert shown == [FORWARD, "end"]
    assert clock.report().compile_forward_us == 0
