"""What planning does with what the controller decides."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hytrain_fx.planning.controller import State
from hytrain_fx.planning.planning import Planning

from .test_replan import Run, running


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Run, list[bool]]]:
    """A program whose steps are being measured, and what the engine was told of recording since."""
    with running() as run:
        run.train(3)
        assert run.session.planning.controller.state is State.MEASURING
        told: list[bool] = []
        record = run.session.engine.record

        def tell(on: bool) -> None:
            told.append(on)
            record(on)

        monkeypatch.setattr(run.session.engine, "record", tell)
        yield run, told


def test_records_end_where_a_share_ends_measuring(measuring: tuple[Run, list[bool]]) -> None:
    """Steps with a share are not measured, so the engine keeps no records, and none are left."""
    run, told = measuring
    run.session.planning.held = 100
    run.train(2)
    assert told == [False]
    assert run.session.planning.controller.state is State.ASKED
    run.session.drain()
    assert run.session.engine.take_records() == []


def test_no_trial_of_streaming_is_looked_for_while_trials_rest() -> None:
    """A prediction would be made for nothing."""
    asked: list[str] = []

    def planning(may_try: bool) -> Any:
        return SimpleNamespace(
            _table=SimpleNamespace(device=SimpleNamespace(type="cuda")), last=SimpleNamespace(tries=False, steps_us=()),
            plan=None, units=tuple, discipline=None, solver=SimpleNamespace(predict=None),
            controller=SimpleNamespace(may_try=may_try), _agreed_trials=None,
            _stream_trial=SimpleNamespace(look=lambda *of: asked.append("look")), _begin_streaming=lambda: asked.append("begin"))

    Planning._try_streaming(planning(False))
    assert asked == []
    Planning._try_streaming(planning(True))
    assert asked == ["look", "begin"]


def test_records_end_where_an_error_ends_measuring(measuring: tuple[Run, list[bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept again once steps are measured again."""
    run, told = measuring

    def fail(agreed: object) -> None:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(run.session.planning, "_report", fail)
        run.train(1)
    assert told == [False]
    run.train(1)
    assert told == [False, True]


def test_a_recording_has_the_records_of_its_steps(measuring: tuple[Run, list[bool]]) -> None:
    """Measuring ends as it begins, and nothing turns its own records off."""
    run, told = measuring
    run.session.record(True)
    run.train(2)
    assert told == [False, True]
    run.session.drain()
    assert run.session.engine.take_records()
    run.session.record(False)
    assert told == [False, True, False]
    assert run.session.planning.controller.state is State.ASKED
