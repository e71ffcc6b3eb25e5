"""When all states on the host are tried as streamed ones, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hytrain_fx.cost_model.balance import streamed_share
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.planner import predict, prefix_plan
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.task_graph import Unit
from hytrain_fx.planning.controller import Action, Event, State
from hytrain_fx.planning.stream_trial import StreamTrial
from hytrain_fx.planning.watches import REST_STEPS

from .controlled import Program
from .profiles import uniform

UNITS = 8
FAST = uniform(UNITS, forward=100.0, backward=200.0, cpu=400.0, stream=200.0)  # nothing slows these copies
SLOW = uniform(UNITS, forward=100.0, backward=200.0, cpu=400.0, stream=800.0)


TASKS = [Unit(u.index, u.name, u.params, (f"p{u.index}",), u.grad_bytes, param_numels=(u.params,)) for u in FAST.units]


USUAL = Discipline()


def figures(profile: Profile, plan: Plan, discipline: Discipline) -> dict[str, float]:
    return predict(profile, plan, discipline=discipline)


def roomy(plan: Plan) -> bool:
    return True


def level(share: float = 0.5, k: int = 0) -> Plan:
    return prefix_plan(FAST.units, k, source="windowed", reason=lambda unit: "test", share=share, streamed_reason=lambda unit: "test")


def tried(trial: StreamTrial, plan: Plan, step_us: float, room: bool = True) -> Plan | None:
    trial.look(plan, TASKS, [step_us] * 8, USUAL, figures, lambda plan: room)
    found = trial.untried
    if found is not None:
        trial.begun()
    return found


def keeps(trial: StreamTrial) -> bool:
    return trial.kept


def trial_of(profile: Profile) -> StreamTrial:
    trial = StreamTrial()
    trial.measured(profile, streaming=False)
    trial.measured(SLOW, streaming=True)  # beside updates by the CPU copies are slow: that says nothing about a step without them
    return trial


def test_streaming_all_is_tried_where_undisturbed_copies_promise_a_shorter_step() -> None:
    """By the copies of steps without streaming, once for each k."""
    alone_us = predict(FAST, level(1.0))["step_us"]
    trial = trial_of(FAST)
    assert tried(trial, level(), 1.04 * alone_us) is None, "too little to gain"
    found = tried(trial, level(), 1.3 * alone_us)
    assert found is not None
    assert streamed_share(found) == 1.0
    assert found.predicted["step_us"] == alone_us
    assert "so that is tried" in found.notes[-1]
    assert tried(trial, level(), 1.3 * alone_us) is None
    assert tried(trial, level(k=1), 1.3 * alone_us) is not None


def test_what_memory_does_not_hold_is_not_tried() -> None:
    """Gradients of what is streamed stay on the device. Where there is room again, it is tried."""
    alone_us = predict(FAST, level(1.0))["step_us"]
    trial = trial_of(FAST)
    assert tried(trial, level(), 1.3 * alone_us, room=False) is None
    assert tried(trial, level(), 1.3 * alone_us) is not None


def test_many_looks_predict_once() -> None:
    """A look is taken every few steps, and a prediction takes much longer than the rest of it.

    It is made again where the runtime works differently, other states rest on the device, or copies
    were measured again. The plan that is tried keeps the notes of the plan in force.
    """
    predicted: list[str] = []

    def count(profile: Profile, plan: Plan, discipline: Discipline) -> dict[str, float]:
        predicted.append(f"{plan.k} {discipline.commit_at}")
        return figures(profile, plan, discipline)

    trial, other = trial_of(FAST), Discipline(commit_at="backward_end")
    short_us = predict(FAST, level(1.0))["step_us"]
    for plan, how in ((level(), USUAL), (level(0.4), USUAL), (level(), other), (level(), other), (level(k=1), other), (level(), USUAL)):
        trial.look(plan, TASKS, [short_us] * 8, how, count, roomy)
    trial.measured(FAST, streaming=False)
    trial.look(level(), TASKS, [short_us] * 8, USUAL, count, roomy)
    before, after = f"0 {USUAL.commit_at}", "0 backward_end"
    assert before != after
    assert predicted == [before, after, "1 backward_end", before, before]
    trial.look(replace(level(), notes=("later",)), TASKS, [2 * short_us] * 8, USUAL, count, roomy)
    assert trial.untried is not None
    assert trial.untried.notes[0] == "later"
    assert len(predicted) == 5


def test_slow_links_are_not_tried() -> None:
    """Nor is anything before steps without streaming were measured, or where nothing is left."""
    step_us = 1.3 * predict(FAST, level(1.0))["step_us"]
    assert tried(trial_of(SLOW), level(), step_us) is None
    assert tried(StreamTrial(), level(), step_us) is None
    for share in (0.0, 1.0):
        assert tried(trial_of(FAST), level(share), step_us) is None
    trial = trial_of(FAST)
    trial.look(level(), TASKS, [step_us] * 3, USUAL, figures, roomy)
    assert trial.untried is None


def test_what_paid_stays_until_another_k_comes() -> None:
    """A trial of something else keeps nothing."""
    trial = trial_of(FAST)
    trial.ended(paid=True)
    assert not keeps(trial)
    trial.look(level(), TASKS, [1e9] * 8, USUAL, figures, roomy)
    trial.ended(paid=True)
    assert not keeps(trial), "it was only proposed"
    trial.restart(level(0.4))
    assert trial.untried is None
    assert tried(trial, level(), 1e9) is not None
    trial.ended(paid=True)
    trial.restart(level(1.0))
    assert keeps(trial)
    trial.restart(level(k=2))
    assert not keeps(trial)


def test_the_controller_keeps_what_pays_and_brings_back_what_does_not() -> None:
    """Steps under the plan that is tried are compared with those before."""
    for step_us, event, action in ((800.0, Event.PAID, Action.NOTHING), (990.0, Event.VAIN, Action.BACK)):
        program = Program(every=1000)
        program.steps(40)
        asked = program.controller.hear(Event.UNTRIED, "it may be faster")
        assert asked.action is Action.PLACE
        program.controller.hear(Event.PLACED)
        assert str(program.controller.state) == State.TRYING
        seen = [program.step(step_us) for _ in range(12)]
        ended = next(decision for decision in seen if decision.event is not Event.STEPPED)
        assert (ended.event, ended.action) == (event, action)
        assert "streamed updates of all states on the host were tried" in ended.why
        assert str(program.controller.state) == State.SETTLED
        assert program.controller.hope == 1.0


@pytest.mark.parametrize(("step_us", "event"), [(800.0, Event.PAID), (990.0, Event.VAIN)])
def test_a_trial_within_the_rest_after_another_ends(step_us: float, event: Event) -> None:
    """Its steps count: it ends after 3 that settle and 8 that are compared."""
    program = after_a_vain_trial()
    program.controller.hear(Event.UNTRIED, "it may be faster")
    program.controller.hear(Event.PLACED)
    seen = [program.step(step_us).event for _ in range(11)]
    assert seen == [Event.STEPPED] * 10 + [event]


def test_no_trial_begins_within_the_rest_after_another() -> None:
    """Nor is one offered to other ranks. The rest lasts 500 steps."""
    program = after_a_vain_trial()
    begun, may = program.done, [program.controller.may_try]
    while program.done < begun + REST_STEPS:
        program.step()
        may.append(program.controller.may_try)
    assert may == [False] * REST_STEPS + [True]


def after_a_vain_trial() -> Program:
    """A program whose trial has just ended."""
    program = Program(every=10_000)
    program.steps(40)
    program.controller.hear(Event.UNTRIED, "it may be faster")
    program.controller.hear(Event.PLACED)
    program.steps(11)
    assert program.controller.state is State.SETTLED
    return program
