"""What planning does with what the controller decides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.cost_model.fetch_depth import FetchDepth
from hytrain_fx.cost_model.planner import prefix_plan
from hytrain_fx.planning.controller import Event, State
from hytrain_fx.planning.planning import Planning, _Due
from hytrain_fx.planning.solving import MoveCosts

from .test_replan import WINDOW, Run, running


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
    """Steps with a share are not measured, so the engine keeps no records of them.

    Only copies that were under way as measuring ended may leave theirs.
    """
    run, told = measuring
    run.session.planning.held = 100
    run.train(2)
    assert told == [False]
    assert run.session.planning.controller.state is State.ASKED
    run.session.drain()
    run.session.engine.take_records()
    run.train(2)
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


# ---- How many units are brought ahead ----


class Window:
    """What planning asks of a window of weights."""

    ahead, slot_bytes = 2, 0

    def follow(self, depth: FetchDepth) -> None:
        self.ahead = depth.ahead

    def streamed_params(self, rows: Iterable[int]) -> int:
        return 0

    gathered_params = streamed_params


PRESENT, SOLVED = 1, 4  # units ahead that are best for k=0, in force, and for k=1


@pytest.fixture(params=[{"gpu_states": 0}, {"k": 0}], ids=["solved", "given"])
def windowed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Planning, Window]]:
    """Planning with k=0 in force, that makes a plan with k=1. A unit more ahead saves 0.1 s."""
    with running(**request.param) as run:
        run.train(2 + WINDOW + 1)
        planning, window = run.session.planning, Window()
        assert planning.profile is not None
        assert planning.plan.k == 0
        made = prefix_plan(planning.units(), 1, source="windowed", reason=lambda unit: "test")
        depths = {k: FetchDepth(ahead, 0.0, 0.0, 0, None, False) for k, ahead in ((0, PRESENT), (1, SOLVED))}
        monkeypatch.setattr("hytrain_fx.planning.solving.solve", lambda profile, **how: made)
        monkeypatch.setattr("hytrain_fx.planning.solving.fetch_depth", lambda profile, plan, *how: depths[plan.k])
        monkeypatch.setattr(planning.units, "window", window)
        monkeypatch.setattr(planning, "_measured", lambda update_us: planning.profile)
        for name, value in {"_device": SimpleNamespace(type="cuda"), "_slots_bytes": lambda plan: 0, "_within": lambda *how: {},
                            "predict": lambda profile, plan, works: {"step_us": 1e6 - 1e5 * works.units_ahead}}.items():
            monkeypatch.setattr(planning.solver, name, value)
        yield planning, window
        monkeypatch.undo()


def test_units_come_ahead_as_solved_once_the_plan_is_in_force(
    windowed: tuple[Planning, Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that, their slots would lie in memory that the plan in force has states in."""
    planning, window = windowed
    monkeypatch.setattr(planning._moves, "cost_us", lambda profile, wanted: 0.0)
    planning._due = _Due(Event.MOVED)
    found = planning.next_plan(lambda: 0.0)
    assert found is not None
    assert found.predicted["step_us"] == 1e6 - 1e5 * SOLVED
    assert window.ahead == Window.ahead
    with planning.putting_in_force(found):
        assert window.ahead == Window.ahead
    assert window.ahead == SOLVED


@pytest.mark.parametrize("windowed", [{"gpu_states": 0}], indirect=True)
def test_a_plan_that_stays_has_its_own_units_ahead(windowed: tuple[Planning, Window], monkeypatch: pytest.MonkeyPatch) -> None:
    """And no plan that was refused leaves its own: nothing works otherwise than was solved for."""
    planning, window = windowed
    monkeypatch.setattr(planning._moves, "cost_us", lambda profile, wanted: 1e12)
    planning._due = _Due(Event.MOVED)
    assert planning.next_plan(lambda: 0.0) is None
    assert window.ahead == PRESENT
    assert planning.plan.predicted["step_us"] == 1e6 - 1e5 * PRESENT
    assert planning.plan.k == 0


# ---- What a move costs ----


GRAD_BYTES = 2_000_000_000
LARGE_BYTES = 6 * GRAD_BYTES
US_PER_BYTE = 4e-5  # 25 GB/s


class Moves:
    """Costs of moves of so many bytes, in a model whose gradients go both ways at 25 GB/s."""

    def __init__(self) -> None:
        self.costs = MoveCosts(SimpleNamespace(moved_bytes=lambda before, after: after), SimpleNamespace(placed=0))  # type: ignore[arg-type]
        link_us = GRAD_BYTES * US_PER_BYTE
        self._profile: Any = SimpleNamespace(d2h_us=link_us, h2d_us=link_us, units=[SimpleNamespace(grad_bytes=GRAD_BYTES)])

    def took(self, nbytes: int, us: float) -> None:
        self.costs._states.placed = nbytes  # type: ignore[assignment, misc]
        self.costs.took((), us)

    def cost_us(self, nbytes: int) -> float:
        return self.costs.cost_us(self._profile, nbytes)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 50_000), min_size=1, max_size=3), st.floats(0, 300e3))
def test_small_moves_say_little_of_large_ones(small: list[int], us: float) -> None:
    """A move of a norm waits for every update like any other, and copies nearly nothing.

    A large move is expected to take what its bytes do, and three times what those took in all.
    """
    moves = Moves()
    for nbytes in small:
        moves.took(nbytes, us)
    assert LARGE_BYTES * US_PER_BYTE <= 1.001 * moves.cost_us(LARGE_BYTES) <= 1.01 * (LARGE_BYTES * US_PER_BYTE + 3 * us * len(small))


@given(st.floats(0.1, 10.0))
def test_large_moves_tell_their_rate(slower: float) -> None:
    """Beside a step's gradients, which count as a move, the first of them counts three times."""
    moves, real_us = Moves(), slower * LARGE_BYTES * US_PER_BYTE
    moves.took(LARGE_BYTES, real_us)
    assert min(slower, 1.0) - 0.01 <= moves.cost_us(LARGE_BYTES) / (LARGE_BYTES * US_PER_BYTE) <= max(slower, 1.0) + 0.01
    assert 0.75 * real_us <= moves.cost_us(LARGE_BYTES) <= 3.3 * real_us
    for _ in range(20):
        moves.took(LARGE_BYTES, real_us)
    assert moves.cost_us(LARGE_BYTES) == pytest.approx(real_us, rel=0.15)


def test_what_copies_nothing_is_paid_by_every_move() -> None:
    """And is no part of the rate."""
    moves = Moves()
    moves.took(0, 200e3)
    moves.took(LARGE_BYTES, 200e3 + LARGE_BYTES * US_PER_BYTE)
    assert moves.cost_us(LARGE_BYTES) == pytest.approx(200e3 + LARGE_BYTES * US_PER_BYTE)
