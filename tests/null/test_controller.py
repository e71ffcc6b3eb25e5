"""One machine decides when steps are measured, a plan is solved and states move.

It never goes round in circles.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.replan import LATEST
from hytrain_fx.planning.controller import TRANSITIONS, Action, Controller, Decision, Event, State
from hytrain_fx.planning.watches import Patience, StepReport

from .controlled import COLD_STEPS, USUAL, Program, stays

OTHERWISE = Discipline(early_updates=True)
ALL_US, HOST_US = 200.0, 150.0  # predicted for all states on the device, and for the plan in force
FIRST = COLD_STEPS + 5  # steps until a plan is solved
LONG = 1000


def moves_at_first(asked: Event) -> Event:
    """The first plan is put in force, and stays."""
    return Event.MOVED if asked is Event.READY else Event.STAYED


def settled(**how: object) -> Program:
    """A program whose plan has been looked at and stays."""
    program = Program(**how)  # type: ignore[arg-type]
    program.steps(FIRST)
    assert program.controller.state is State.SETTLED
    return program


# ---- The table ----


def test_every_event_in_every_state_is_defined() -> None:
    """The table is total, and every state is reached from the first one.

    Nothing leaves a plan that is to stay.
    """
    assert set(TRANSITIONS) == {(state, event) for state in State for event in Event}
    reached = {State.WARMING}
    for _ in State:
        reached |= {after for (before, _), (after, _) in TRANSITIONS.items() if before in reached}
    assert reached == set(State)
    assert {TRANSITIONS[State.FIXED, event] for event in Event} == {(State.FIXED, Action.NOTHING)}
    assert {action for _, action in TRANSITIONS.values()} == set(Action)


@given(events=st.lists(st.sampled_from(Event), max_size=40), every=st.sampled_from([0, 20]))
def test_any_events_in_any_order_leave_a_state_and_a_reason(events: list[Event], every: int) -> None:
    """No sequence raises, and the description of a state is never empty."""
    controller = Controller(every, 3)
    for done, event in enumerate(events, 1):
        controller.saw(StepReport(done, (1000.0,) * min(done, 9), can_measure=done % 3 > 0, complete=done % 5 == 0))
        decision = controller.hear(event)
        assert decision.why
        assert controller.standing.why
        assert str(controller.state) in str(controller.standing)


# ---- When steps are measured ----


def decisions(steps_us: list[float], every: int, window: int, moves: set[int]) -> list[int]:
    """Counts of finished steps at which decisions fall when the program runs like this.

    Decisions numbered in `moves` move states.
    """
    program = Program(every, window)
    program.solves = lambda asked: Event.MOVED if len(program.solved) - 1 in moves else Event.STAYED
    for us in steps_us:
        program.step(us)
    return program.solved


@given(every=st.integers(1, 30), window=st.integers(1, 8), steps=st.integers(60, 120), moves=st.integers(0, 3))
def test_steady_steps_are_measured_once_for_each_plan(every: int, window: int, steps: int, moves: int) -> None:
    """The first decision comes after the cold steps and one window.

    After each move there is one more; then nothing is measured.
    """
    found = decisions([1000.0] * steps, every, window, set(range(moves)))
    wanted = [COLD_STEPS + window + i * max(every // 2, window + 1, 1) for i in range(moves + 1)]
    assert found == [done for done in wanted if done <= steps]


@given(change=st.integers(8, 60), factor=st.sampled_from([0.94, 1.06]))
def test_a_small_change_waits_for_the_regular_look(change: int, factor: float) -> None:
    """6% is no drift, but the regular look sees it once its median is new.

    That look comes at most every 20 steps, less the window. A window later the change is judged.
    """
    found = decisions([1000.0] * change + [factor * 1000.0] * 60, 20, 5, set())
    assert any(change < done <= change + 15 + 3 + 5 for done in found)
    assert len(found) <= 3  # a window that was half old is judged once more


@given(change=st.integers(8, 100), factor=st.sampled_from([0.3, 0.7, 1.3, 3.0]), moves=st.sets(st.integers(0, 12)))
def test_a_change_is_followed_within_20_steps(change: int, factor: float, moves: set[int]) -> None:
    """A large change is followed within 20 steps, also where plans moved just before.

    Most of the window of some decision then comes after the change.
    """
    found = decisions([1000.0] * change + [factor * 1000.0] * 40, 20, 5, moves)
    assert any(change + 3 <= done <= change + 20 for done in found)


@given(changes=st.lists(st.sampled_from([500.0, 800.0, 1250.0, 2000.0, 3200.0]), min_size=1, max_size=5, unique=True))
def test_new_lengths_are_followed_at_once_however_patient_the_controller_is(changes: list[float]) -> None:
    """A program with lengths never seen before is measured at once.

    That is as soon as two of the last three steps are new.
    """
    program = settled()
    program.controller.patience = Patience(64)
    for us in changes:
        begun = program.done
        program.steps(30, us)
        assert program.solved[-1] in (begun + LATEST - 1 + program.window, begun + LATEST - 1 + 2 * program.window)
        assert program.controller.patience == Patience()


@pytest.mark.parametrize("measurable", [True, False])
def test_measuring_waits_for_steps_that_run_captured_graphs(measurable: bool) -> None:
    """Steps outside captured graphs are not measured, for the first plan or another."""
    program = Program()
    for _ in range(30):
        program.step(captured=measurable)
    assert program.solved == ([FIRST] if measurable else [])
    assert (program.controller.state is State.WARMING) is not measurable


def test_what_is_lost_is_measured_again() -> None:
    """Steps that somebody else has recorded are measured again at once."""
    program = Program()
    program.steps(4)
    assert program.controller.state is State.MEASURING
    assert program.controller.hear(Event.LOST).action is Action.FORGET
    program._measured = None
    program.steps(6)
    assert program.solved == [5 + program.window]


def test_times_that_cannot_be_made_a_profile_are_measured_less_and_less() -> None:
    """The first attempt is repeated at once, then after longer and longer pauses."""
    program = Program(solves=lambda asked: Event.UNMEASURED)
    program.steps(400)
    gaps = [after - before for before, after in pairwise(program.solved)]
    assert gaps[0] == program.window + 1
    assert gaps == sorted(gaps)
    assert len(program.solved) < 10


# ---- A plan that is to stay ----


REPORTS = st.tuples(st.sampled_from([300.0, 900.0, 1000.0, 1100.0, 4000.0]), st.sampled_from([USUAL, OTHERWISE]), st.booleans(),
                    st.sampled_from([None, 100.0, 5000.0]), st.booleans())
ENDED = st.sampled_from([Event.MOVED, Event.STAYED, Event.FAILED, Event.UNMEASURED])
FOUND = st.sampled_from([Event.TOGETHER, Event.APART, Event.CONTRADICTED])


def run(program: Program, reports: list[tuple[float, Discipline, bool, float | None, bool]], steps: int) -> list[Decision]:
    made = []
    for step in range(steps):
        us, works, streams, all_us, captured = reports[step % len(reports)]
        made.append(program.step(us, works=works, streams=streams, all_us=all_us, predicted_us=HOST_US, captured=captured))
    return made


@given(reports=st.lists(REPORTS, min_size=1, max_size=30))
@settings(deadline=None, max_examples=40)
def test_with_replan_every_0_nothing_moves_after_the_first_plan(
    reports: list[tuple[float, Discipline, bool, float | None, bool]]
) -> None:
    """Whatever steps show, nothing is measured, solved, balanced or tried any more."""
    program = Program(every=0, solves=lambda asked: Event.MOVED, balances=lambda: Event.APART)
    program.steps(FIRST)
    assert program.moved == [FIRST]
    assert {decision.action for decision in run(program, reports, 300)} == {Action.NOTHING}
    assert program.controller.state is State.FIXED
    assert "no other plan is to follow" in program.controller.standing.why


# ---- Bounds ----


@given(reports=st.lists(REPORTS, min_size=1, max_size=40), ends=st.lists(ENDED, min_size=1, max_size=9),
       shares=st.lists(FOUND, min_size=1, max_size=9), every=st.integers(1, 30), window=st.integers(1, 8))
@settings(deadline=None, max_examples=40)
def test_moves_are_few_whatever_steps_show(
    reports: list[tuple[float, Discipline, bool, float | None, bool]], ends: list[Event], shares: list[Event], every: int, window: int
) -> None:
    """Solved plans are `window` + 1 steps apart, balanced ones 4.

    States are tried on the device once in 500 steps.
    """
    program = Program(every, window)
    program.solves = lambda asked: ends[len(program.solved) % len(ends)]
    program.balances = lambda: shares[len(program.looked) % len(shares)]
    made = run(program, reports, 600)
    assert all(after - before > window for before, after in pairwise(program.solved))
    assert all(after - before >= 4 for before, after in pairwise(program.looked))
    assert all(after > before for before, after in pairwise(program.moved)), "one move a step"
    tried = [decision.action for decision in made if decision.action in (Action.TRY, Action.BACK)]
    assert tried.count(Action.BACK) <= tried.count(Action.TRY) <= 2
    assert len(program.moved) <= 600 // (window + 1) + 600 // 4 + 4


@given(reports=st.lists(st.tuples(st.just(1000.0), st.sampled_from([USUAL, OTHERWISE]), st.booleans(), st.sampled_from([None, 100.0]),
                                  st.just(True)), min_size=1, max_size=80))
@settings(deadline=None, max_examples=40)
def test_what_never_pays_is_asked_for_less_and_less(
    reports: list[tuple[float, Discipline, bool, float | None, bool]]
) -> None:
    """Where every reason to act on equal steps is refused, ever fewer steps are measured."""
    program = Program(solves=stays, balances=lambda: Event.CONTRADICTED)
    run(program, reports, 3 * LONG)
    assert len(program.solved) <= 22
    assert sum(done > LONG for done in program.solved) <= 2 * LONG // 128


@example(half=31, other=300.0, with_lengths=True, works=False, moves=True, window=5)
@given(half=st.integers(3, 60), other=st.sampled_from([300.0, 960.0, 1050.0, 1200.0, 4000.0]), with_lengths=st.booleans(),
       works=st.booleans(), moves=st.booleans(), window=st.integers(1, 8))
@settings(deadline=None, max_examples=40)
def test_a_loop_that_goes_to_and_fro_is_not_measured_for_ever(
    half: int, other: float, with_lengths: bool, works: bool, moves: bool, window: int
) -> None:
    """A program that goes to and fro is followed a few times, and then no longer.

    It changes between two lengths, two ways of working, or both. The last time was after 1133 steps
    of all that were tried.
    """
    program = Program(window=window)
    program.solves = lambda asked: Event.MOVED if moves and asked is not Event.LOOK else Event.STAYED
    for step in range(3 * LONG):
        away = step // half % 2 == 1
        program.step(other if away and with_lengths else 1000.0, works=OTHERWISE if away and works else USUAL, streams=True)
    assert not [done for done in program.solved if done > 1.2 * LONG]
    assert len(program.solved) <= 20


# ---- When updates end apart ----


@pytest.mark.parametrize("every", [1000, 20])
def test_a_refusal_counts_once_times_were_measured_again(every: int) -> None:
    """Ends of updates that contradict the profile have steps measured.

    What those steps refuse is asked for half as often.
    """
    program = settled(every=every, balances=lambda: Event.CONTRADICTED)
    program.steps(60, streams=True)
    looks, measured, window = program.looked, program.solved[1:], program.window
    assert looks[0] == FIRST + 4
    assert looks[0] < measured[0] < looks[1] < looks[2] < measured[1] < looks[3]
    assert measured[0] - looks[0] == measured[1] - looks[2] == window + 1
    assert [looks[2] - looks[1], looks[4] - looks[3]] == [8, 16]
    assert set(program.asked[1:]) == {Event.CONTRADICTED}


def test_the_share_is_balanced_until_updates_end_together() -> None:
    """Each move is made four steps after the one before, and the state says what goes on."""
    found = [Event.APART, Event.APART, Event.TOGETHER]
    program = settled(every=1000)
    program.balances = lambda: found[min(len(program.looked), 3) - 1]
    states = []
    for _ in range(3):
        program.steps(4, streams=True)
        states.append(program.controller.state)
    assert states == [State.BALANCING, State.BALANCING, State.SETTLED]
    assert program.moved == [FIRST + 4, FIRST + 8]
    assert program.controller.standing.why == Event.TOGETHER
    assert program.controller.patience == Patience()


# ---- When updates begin otherwise ----


def test_the_share_is_solved_again_where_updates_come_to_begin_otherwise() -> None:
    """It is solved again after 8 such steps in a row, not for a change that comes and goes.

    A second time it takes 16 steps.
    """
    program = settled(every=1000)
    for step in range(1, 80):
        program.step(works=OTHERWISE if 6 <= step < 12 or 20 <= step < 50 else USUAL, streams=True)
    window = program.window
    assert [done - FIRST for done in program.solved[1:]] == [19 + 8 + 1 + window, 49 + 16 + 1 + window]
    assert set(program.asked[1:]) == {Event.DISCIPLINE}


def test_how_many_units_come_ahead_is_no_other_way_of_working() -> None:
    """It is solved with each plan, so it changes with the plan in force."""
    program = settled(every=1000)
    for step in range(200):
        program.step(works=Discipline(units_ahead=step // 50), streams=True)
    assert program.solved == [FIRST]


# ---- When steps take longer than all states on the device would ----


def until(program: Program, step_us: Callable[[], float], all_us: float | None, steps: int = 40) -> Decision:
    """The first decision about the promise."""
    told = (Event.DOUBTED, Event.DOUBT_CONFIRMED, Event.PAID, Event.VAIN)
    decision = Decision(Event.STEPPED, Action.NOTHING, "")
    for _ in range(steps):
        decision = program.step(step_us(), all_us=all_us, predicted_us=HOST_US)
        if decision.event in told:
            return decision
    return decision


def promised(step_us: float) -> Program:
    program = Program(every=1000)
    program.steps(FIRST, step_us)
    return program


def test_a_plan_that_keeps_its_promise_is_left_alone() -> None:
    """Steps no longer than predicted for all states on the device raise no doubt.

    Nor do steps where those states do not fit there.
    """
    for step_us, all_us in ((205.0, ALL_US), (900.0, None)):
        program = promised(step_us)
        assert until(program, lambda us=step_us: us, all_us, 200).event is Event.STEPPED  # type: ignore[misc]
        assert program.controller.state is State.SETTLED
        assert program.solved == [FIRST]


def test_all_states_on_the_device_stay_where_their_steps_are_shorter() -> None:
    """All states on the device are measured again, tried and kept.

    From then on predictions of states on the host are scaled by what they were off.
    """
    program = promised(400.0)
    doubted = until(program, lambda: 400.0, ALL_US)
    assert doubted.event is Event.DOUBTED
    assert "measured again" in doubted.why
    assert until(program, lambda: 400.0, ALL_US).action is Action.TRY
    assert program.solved == [FIRST, FIRST + 11 + 1 + program.window]
    assert program.controller.state is State.TRYING
    kept = until(program, lambda: 210.0, None)
    assert kept.event is Event.PAID
    assert kept.action is Action.NOTHING
    assert "210 us a step instead of 400 us" in kept.why
    assert program.controller.hope == 400.0 / 150.0


def test_a_trial_ends_where_memory_runs_out() -> None:
    """The states that leave the device are not brought back by how long its steps were."""
    program = promised(400.0)
    until(program, lambda: 400.0, ALL_US)
    until(program, lambda: 400.0, ALL_US)
    decision = program.controller.hear(Event.SHORT)
    assert decision.action is Action.NOTHING
    assert program.controller.state is State.SETTLED
    seen = {program.step(500.0).event for _ in range(20)}
    assert not {Event.PAID, Event.VAIN} & seen


@pytest.mark.parametrize(("us", "hope"), [(300.0, 1.0), (400.0, 400.0 / HOST_US)])
def test_what_a_trial_has_shown_holds_for_steps_of_known_lengths(us: float, hope: float) -> None:
    """A new length may be the end of what disturbed the steps that were tried."""
    program = promised(400.0)
    until(program, lambda: 400.0, ALL_US)
    until(program, lambda: 400.0, ALL_US)
    assert until(program, lambda: 210.0, None).event is Event.PAID
    program.steps(20, 210.0)
    program.controller.hear(Event.LOOK)
    program.controller.hear(Event.MEASURED)
    program.controller.hear(Event.STAYED)
    assert program.controller.hope == 400.0 / HOST_US
    program.steps(20, us)
    assert program.asked[-1] is Event.LENGTHS
    assert program.controller.hope == hope


def test_all_states_on_the_device_go_back_where_their_steps_are_no_shorter() -> None:
    """The plan before comes back, and is not doubted again for a while."""
    program = promised(400.0)
    assert until(program, lambda: 400.0, ALL_US).event is Event.DOUBTED
    assert until(program, lambda: 400.0, ALL_US).action is Action.TRY
    back = until(program, lambda: 395.0, None)
    assert back.action is Action.BACK
    assert "went back" in back.why
    assert until(program, lambda: 400.0, ALL_US, 400).event is Event.STEPPED
    assert program.controller.hope == 1.0
    assert until(program, lambda: 400.0, ALL_US, 200).event is Event.DOUBTED


def test_a_second_plan_that_keeps_its_promise_ends_the_doubt() -> None:
    """Where times measured again gave a plan with shorter steps, nothing is tried."""
    program = promised(400.0)
    program.solves = lambda asked: Event.MOVED if asked is Event.DOUBTED else Event.STAYED
    assert until(program, lambda: 400.0, ALL_US).event is Event.DOUBTED
    assert until(program, lambda: 160.0, ALL_US, 100).event not in (Event.DOUBTED, Event.DOUBT_CONFIRMED)
    assert program.controller.state is State.SETTLED
    assert len(program.moved) == 1
    assert until(program, lambda: 400.0, ALL_US).event is Event.DOUBTED, "a new doubt is measured before all states are tried"


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=50), st.floats(1.0, 1e6))
@settings(deadline=None, max_examples=40)
def test_few_trials_whatever_the_steps_take(lengths: list[float], all_us: float) -> None:
    """In 400 steps states move to the device and back at most once each."""
    program = Program()
    tried: list[Action] = []
    for step in range(400):
        on_device = bool(tried) and tried[-1] is Action.TRY
        decision = program.step(lengths[step % len(lengths)], all_us=None if on_device else all_us, predicted_us=HOST_US)
        if decision.action in (Action.TRY, Action.BACK):
            tried.append(decision.action)
    assert tried in ([], [Action.TRY], [Action.TRY, Action.BACK])
