"""The streamed share follows what running steps show, and no bit of the training does."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hytrain_fx.cost_model.balance import lane_load, streamed_share, weights_ratio, with_share
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.planner import prefix_plan
from hytrain_fx.ir.limits import CHUNK_PARAMS
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.task_graph import Unit
from hytrain_fx.planning.balancing import Balancing
from hytrain_fx.planning.controller import Controller, Event, State
from hytrain_fx.planning.planning import Planning
from hytrain_fx.runtime.engine import FinishTimes, Stage

from .engine_loop import EngineLoop
from .loops import Twins, plain_loop
from .models import Batches, gpt
from .native_programs import built
from .test_streaming import running


def test_the_engine_tells_when_updates_of_each_kind_ended() -> None:
    """The engine says when each kind of update ended, in the step before the last committed one.

    Slow CPU updates end later. A kind that did not run has 0.
    """
    with running() as engine:
        loop = EngineLoop(engine, (5000, 6000), torch.float32, streamed=frozenset([1]))
        loop.step()
        loop.check()
        assert engine.finish_times() == FinishTimes(), "nothing had ended when the first step was committed"
        engine.set_delay(Stage.CPU_UPDATE, 30_000)
        seen = []
        for _ in range(3):
            loop.step()
            loop.check()
            seen.append(engine.finish_times())
        assert seen[0].cpu_us == seen[0].streamed_us == 0, "the second step's commit tells of none"
        assert seen[1].cpu_us > 0
        assert seen[1].streamed_us > 0
        assert seen[2].cpu_us > 15_000
    with running() as engine:
        loop = EngineLoop(engine, (5000,), torch.float32)
        for _ in range(3):
            loop.step()
            loop.check()
        assert engine.finish_times().cpu_us > 0
        assert engine.finish_times().streamed_us == 0


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/native/step_clock.cpp, compiled."""
    return built("step_clock", tmp_path_factory.mktemp("clock"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        # All has ended before the next commit.
        ("commit:100:1:0 cpu:140 streamed:160:0 held:5 commit:200:1:0 commit:300:1:0", ["0 0 0", "0 0 0", "40 60 5"]),
        # The states came after it.
        ("commit:100:1:0 cpu:140 held:7 commit:200:1:1 streamed:230:1 cpu:260 commit:300:1:1", ["0 0 0", "0 0 0", "40 130 7"]),
        # Now before, now after: each step tells.
        ("commit:0:1:0 cpu:50 streamed:60:0 commit:100:1:1 streamed:110:1 cpu:150 streamed:161:0 commit:200:1:0 cpu:250 commit:300:1:1 "
         "streamed:310:1 cpu:350 streamed:362:0 commit:400:1:0 commit:500:1:0",
         ["0 0 0", "0 0 0", "50 110 0", "50 61 0", "50 110 0", "50 62 0"]),
        # They have not come even with the commit after.
        ("commit:100:1:0 cpu:140 commit:200:1:1 cpu:250 commit:300:1:1 streamed:310:2 commit:400:1:1", ["0 0 0"] * 4),
        # An update has not begun.
        ("commit:100:1:0 cpu:140 streamed:160:0 commit:200:0:0 commit:300:1:0", ["0 0 0"] * 3),
    ],
)
def test_states_that_come_after_the_next_commit_are_told_too(clock: Path, words: str, told: list[str]) -> None:
    """A loop that runs ahead is told when streamed states came, and not when step() was called.

    Else they would seem to end earlier, or no step would tell, and the share would stay as it is.
    """
    found = subprocess.run([clock, *words.split()], capture_output=True, text=True, timeout=60, check=True).stdout
    assert found.splitlines() == told


def test_pauses_between_updates_are_told() -> None:
    """Time that workers wait for late gradients counts as a pause.

    Without late gradients they have worked since their first update.
    """
    with running() as engine:
        loop = EngineLoop(engine, (5000, 6000), torch.float32)
        engine.set_delay(Stage.LANDING, 60_000)
        for _ in range(3):
            loop.step()
            loop.check()
        late = engine.finish_times()
        assert 0 < late.cpu_paused_us <= late.cpu_us
        engine.set_delay(Stage.LANDING, 0)
        engine.set_delay(Stage.CPU_UPDATE, 60_000)
        for _ in range(3):
            loop.step()
            loop.check()
        busy = engine.finish_times()
        assert busy.cpu_paused_us / busy.cpu_us < late.cpu_paused_us / late.cpu_us


@pytest.mark.sample(0)
def test_states_that_stand_behind_the_cpus_updates_are_told() -> None:
    """Streamed states that wait for the CPU's updates between them say how long they were held.

    All are put on the lane together, in the order that the step before lets expect. Before the
    first one slow updates are not foreseen: states stand behind them. In the next they stand behind
    few of them, where an update takes a little longer than foreseen.
    """
    hosted, streamed = 40, 6
    with running() as engine:
        sizes, rows = (17,) * hosted + (CHUNK_PARAMS // 2,) * streamed, frozenset(range(hosted, hosted + streamed))
        loop = EngineLoop(engine, sizes, torch.float32, streamed=rows)
        loop.launching_s = 0.008  # of a unit
        engine.set_delay(Stage.STREAM_IN, 3_000)  # so that not all of them are on their way before somebody waits
        engine.set_delay(Stage.CPU_UPDATE, 60_000)
        loop.step()
        loop.step()
        seen = []
        for _ in range(2):
            loop.step()
            seen.append(engine.finish_times())  # of the step before the last committed one
            assert seen[-1].at_once > CHUNK_PARAMS
        assert seen[0].streamed_held_us > seen[0].streamed_us / 4
        assert seen[1].streamed_held_us < seen[0].streamed_held_us / 4
        loop.check()


def test_a_cpu_that_waited_for_gradients_gives_nothing_away() -> None:
    """A CPU that waited for gradients gives nothing away; it can take more.

    Where it ends last, its end only shows when gradients came. A share moved by that would be moved
    again and again.
    """
    units = tuple(Unit(i, f"layers.{i}", 1000, (f"{i}.0", f"{i}.1"), 2000, param_numels=(500, 500)) for i in range(4))
    plan = prefix_plan(units, 0, source="windowed", reason=lambda unit: "test", share=0.5, streamed_reason=lambda unit: "test")
    for ends, moves in (((1e6, 0.3e6, 0.5e6), False), ((1e6, 0.3e6, 0.05e6), True), ((0.3e6, 1e6, 0.15e6), True)):
        balancing = Balancing()
        balancing.restart(plan)
        for _ in range(6):
            balancing.saw(FinishTimes(*ends))
        assert (balancing.better(plan, units, 1e6, 10) is not None) == moves


def test_whether_the_launching_thread_runs_ahead_is_learned() -> None:
    """The launching thread is believed to run ahead until steps show otherwise.

    They do when no gradient left before its row's update had ended. Another k starts the belief
    again.
    """
    units = tuple(Unit(i, f"layers.{i}", 1000, (f"{i}.0", f"{i}.1"), 2000, param_numels=(500, 500)) for i in range(4))
    balancing = Balancing()
    for k in (0, 1):
        plan = prefix_plan(units, k, source="windowed", reason=lambda unit: "test", share=0.5, streamed_reason=lambda unit: "test")
        balancing.restart(plan)
        assert balancing.runs_ahead
        for ahead in (0, 3, 0):
            for _ in range(20):
                balancing.saw(FinishTimes(1e6, 1e6, launching_us=2e5, ahead=ahead))
                assert balancing.fresh < 4 or balancing.better(plan, units, 1e6, 10) is None
            assert balancing.runs_ahead == (ahead > 0)


def level_units() -> tuple[Unit, ...]:
    return tuple(Unit(i, f"layers.{i}", 1000, tuple(f"{i}.{j}" for j in range(100)), 2000, param_numels=(10,) * 100) for i in range(4))


def streamed_in_part(k: int = 0, share: float = 0.5) -> Plan:
    return prefix_plan(level_units(), k, source="windowed", reason=lambda unit: "test", share=share, streamed_reason=lambda unit: "test")


def test_a_share_that_noise_moves_back_stays() -> None:
    """A second move the other way needs ends twice as far apart, a third four times.

    A plan with another k starts again from nothing.
    """

    def after(plan: Plan, cpu_us: float, streamed_us: float) -> Plan | None:
        for _ in range(6):
            balancing.saw(FinishTimes(cpu_us, streamed_us))
        better = balancing.better(plan, level_units(), 1e6, 10)
        if better is not None:
            balancing.restart(better)
        return better

    balancing, plan = Balancing(), streamed_in_part()
    balancing.restart(plan)
    more = after(plan, 1e6, 0.95e6)
    assert more is not None
    assert streamed_share(more) > 0.5
    assert after(more, 0.95e6, 1e6) is None, "5% the other way, twice the tolerance is 6%"
    assert after(more, 0.9e6, 1e6) is None, "10%, and 12%"
    less = after(more, 0.6e6, 1e6)
    assert less is not None
    assert streamed_share(less) < streamed_share(more)
    balancing.restart(streamed_in_part(1))
    assert after(streamed_in_part(1), 1e6, 0.95e6) is not None


def looked_at(balancing: Balancing, plan: Plan, cpu_us: float, *streamed_us: float) -> Plan | None:
    """What is found after steps under the plan whose states came then."""
    balancing.restart(plan)
    for _ in range(3):
        balancing.saw(FinishTimes(cpu_us, cpu_us))
    for came_us in streamed_us if len(streamed_us) > 1 else 6 * streamed_us:
        balancing.saw(FinishTimes(cpu_us, came_us))
    return balancing.better(plan, level_units(), 1e6, 10)


@pytest.mark.parametrize("waits", [False, True])
def test_a_lane_that_ends_last_is_believed_unless_it_waits_for_gradients(waits: bool) -> None:
    """A lane that ends last is believed to be too slow, until less on it has not helped twice.

    Then gradients decide when it ends, as far as is known, until another k comes.
    """
    balancing, plan, ratio = Balancing(), streamed_in_part(), weights_ratio(level_units())
    for move in range(3):
        share = streamed_share(plan)
        lane_us = 0.9e6 if waits else 0.9e6 * lane_load(share, ratio) / lane_load(0.5, ratio)
        less = looked_at(balancing, plan, 0.7 * (1 - share) * 1e6, lane_us)
        assert less is not None
        assert balancing.lane_is_late == (move < 2 or not waits)
        assert streamed_share(less) < share
        plan = less
    looked_at(balancing, streamed_in_part(0, 0.6), 0.7e6, 0.95e6)
    assert balancing.lane_is_late != waits
    looked_at(balancing, streamed_in_part(1), 0.7e6, 0.9e6)
    assert balancing.lane_is_late
    looked_at(balancing, streamed_in_part(1), 0.9e6, 0.7e6)
    assert not balancing.lane_is_late


def test_only_the_first_look_after_a_move_says_whether_it_has_helped() -> None:
    """The lane is late again under the same plan: something else has changed."""
    balancing, plan = Balancing(), streamed_in_part()
    for _ in range(3):
        less = looked_at(balancing, plan, 0.7e6, 0.9e6)
        assert less is not None
        assert looked_at(balancing, less, 0.8e6, 0.8e6) is None
        assert looked_at(balancing, less, 0.7e6, 0.9e6) is not None
        assert balancing.lane_is_late
        plan = streamed_in_part(0, streamed_share(plan) + 0.1)


def test_a_lane_as_late_as_noise_explains_has_been_helped() -> None:
    """Steps that scatter more than a move should bring do not tell that it brought nothing."""
    balancing, plan = Balancing(), streamed_in_part()
    for _ in range(4):
        less = looked_at(balancing, plan, 0.6e6, 0.7e6, 1.1e6, 0.8e6, 1.0e6, 0.9e6, 0.9e6, 0.75e6, 1.05e6)
        assert less is not None
        assert balancing.lane_is_late
        plan = less


def test_a_lane_that_is_late_keeps_something_to_stream() -> None:
    """With nothing streamed, its steps would not tell whether less has helped."""
    plan = streamed_in_part(0, 0.1)
    less = looked_at(Balancing(), plan, 0.1e6, 0.9e6)
    assert less is not None
    assert streamed_share(less) == pytest.approx(streamed_share(plan) / 2, abs=0.01)


def test_a_move_that_was_not_made_says_nothing_of_the_lane() -> None:
    """An error may come up while states move, and the plan before stays."""
    balancing, plan = Balancing(), streamed_in_part()
    for _ in range(4):
        assert looked_at(balancing, plan, 0.7e6, 0.9e6) is not None
        assert balancing.lane_is_late


def test_another_choice_of_parameters_with_the_same_sum_is_no_move() -> None:
    """Where whole parameters cannot give the wanted share, the plan stays.

    Each move would hold a step up.
    """
    sizes = ((300,), (100, 200), (100, 200), (300,))
    units = tuple(Unit(i, f"layers.{i}", sum(numels), tuple(f"{i}.{j}" for j in range(len(numels))), 2 * sum(numels), param_numels=numels)
                  for i, numels in enumerate(sizes))
    none = prefix_plan(units, 0, source="windowed", reason=lambda unit: "test", share=0.0, streamed_reason=lambda unit: "test")
    plan = with_share(none, units, 0.54, "test")
    other = with_share(plan, units, streamed_share(plan) + 0.06, "test")
    assert other.rows != plan.rows
    assert streamed_share(other) == streamed_share(plan)
    for streamed_us, moves in ((0.7e6, False), (0.2e6, True)):  # 6% wanted, and 18%
        balancing = Balancing()
        balancing.restart(plan)
        for _ in range(6):
            balancing.saw(FinishTimes(1e6, streamed_us))
        assert (balancing.better(plan, units, 1e6, 10) is not None) == moves


USUAL = Discipline()
WINDOW = 5


@pytest.fixture(scope="module")
def made() -> Iterator[Twins]:
    def make() -> tuple[torch.nn.Module, Batches]:
        model, batches = gpt()
        return model.to(torch.bfloat16), batches

    made = Twins(make, workers=2, replan_every=1000, warmup_steps=WINDOW)
    made.restart()
    plain_loop(10)(made.ours, made.optimizer, made.batches)  # the first plan is solved
    yield made
    made.close()


@pytest.fixture
def twins(made: Twins, monkeypatch: pytest.MonkeyPatch) -> Twins:
    """A plan is in force, the controller is new, and the program's steps do not change."""
    planning = made.session.planning
    monkeypatch.setattr(Planning, "discipline", property(lambda self: USUAL))
    for name in ("drifted", "shifted"):  # steps of a busy machine differ
        monkeypatch.setattr(f"hytrain_fx.planning.watches.{name}", lambda before, latest: False)
    monkeypatch.setattr(planning, "controller", Controller(1000, WINDOW))
    monkeypatch.setattr(planning, "_due", None)
    monkeypatch.setattr(planning, "profile", None)  # a CPU's profile has no times for streaming: nothing is predicted with it
    planning.controller.state, planning.controller.solved_for = State.SETTLED, USUAL
    return made


def half_streamed(twins: Twins, share: float = 0.5) -> Plan:
    why: dict[str, Any] = dict.fromkeys(("reason", "streamed_reason"), lambda unit: "test")
    return prefix_plan(twins.session.planning.units(), 0, source="windowed", share=share, **why)


def put_in_force(twins: Twins, plan: Plan) -> None:
    with twins.session.planning.putting_in_force(plan):
        twins.session.place(plan)


@pytest.mark.sample(0)
@pytest.mark.parametrize(("ends", "grows"), [
    (FinishTimes(9e6, 3e6), True), (FinishTimes(9e6, 9e6, streamed_held_us=6e6), True),
    (FinishTimes(3e6, 9e6), False), (FinishTimes(9e6, 0), None),
])
def test_shares_move_towards_the_kind_that_ends_early(
    twins: Twins, ends: FinishTimes, grows: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While steps show that one kind ends late, parameters move to the other, a few at a time.

    The training is the reference's.
    """
    planning = twins.session.planning
    monkeypatch.setattr(twins.session.engine, "finish_times", lambda: ends)
    seen: list[float] = []

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses: list[float] = []
        if model is twins.ours:
            put_in_force(twins, half_streamed(twins))
        for _ in range(13):
            losses += plain_loop(1)(model, optimizer, batches)
            if model is twins.ours:
                seen.append(streamed_share(planning.plan))
        return losses

    twins.agree(loop)
    assert planning.controller.state is (State.SETTLED if grows is None else State.BALANCING)
    if grows is None:
        assert set(seen) == {seen[0]}
        return
    assert seen[-1] > 0.5 if grows else seen[-1] < 0.5
    assert seen == sorted(seen, reverse=not grows)
    assert any(note.startswith("the streamed share was balanced") for note in planning.plan.notes)
    assert planning.controller.standing.why in planning.plan.notes
    assert planning.units.pieces_of(planning.plan) == twins.session.states.placed
    assert Placement.GPU not in twins.session.states.placement.values()


@pytest.mark.parametrize("gain_us", [-1e3, 1.0, 1e9])
def test_a_share_moves_where_the_profile_of_such_steps_says_that_it_pays(
    twins: Twins, gain_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that is predicted not to pay is not made; times are measured first.

    It does not pay if it lengthens steps, or gains less in 200 of them than it costs.
    """
    planning = twins.session.planning

    def predict(profile: object, plan: Plan, discipline: Discipline) -> dict[str, float]:
        return {"step_us": 2e9 if streamed_share(plan) == pytest.approx(0.5, abs=0.01) else 2e9 - gain_us}

    monkeypatch.setattr(twins.session.engine, "finish_times", lambda: FinishTimes(9e6, 3e6))
    monkeypatch.setattr(planning.solver, "predict", predict)
    twins.restart()
    put_in_force(twins, half_streamed(twins))
    for name, value in {"profile": object(), "_saw_streaming": True}.items():
        monkeypatch.setattr(planning, name, value)
    monkeypatch.setattr(planning._moves, "switch_us", 1e3)
    plain_loop(7)(twins.ours, twins.optimizer, twins.batches)
    assert planning.controller.state is (State.BALANCING if gain_us == 1e9 else State.ASKED)
    assert planning.is_due == (gain_us == 1e9)
    assert ("not moved" in planning.controller.standing.why) == (gain_us < 1e9)
    if gain_us == 1e9:
        plain_loop(1)(twins.ours, twins.optimizer, twins.batches)
    assert (streamed_share(planning.plan) > 0.55) == (gain_us == 1e9)


def test_a_share_moves_where_the_lane_ends_last_whatever_the_profile_says(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less is streamed then, though the profile sees no gain in it."""
    planning = twins.session.planning
    monkeypatch.setattr(twins.session.engine, "finish_times", lambda: FinishTimes(3e6, 9e6))
    monkeypatch.setattr(planning.solver, "predict", lambda profile, plan, discipline: {"step_us": 2e9})
    twins.restart()
    put_in_force(twins, half_streamed(twins))
    for name, value in {"profile": object(), "_saw_streaming": True}.items():
        monkeypatch.setattr(planning, name, value)
    plain_loop(8)(twins.ours, twins.optimizer, twins.batches)
    assert planning.controller.state is State.BALANCING
    assert streamed_share(planning.plan) < 0.45


@pytest.mark.parametrize(("ends", "memory", "nbytes", "moves"), [
    (FinishTimes(9e6, 3e6), "device", 0, False), (FinishTimes(9e6, 3e6), "device", 1 << 40, True),
    (FinishTimes(9e6, 3e6), "host", 0, True), (FinishTimes(3e6, 9e6), "host", 0, False),
    (FinishTimes(3e6, 9e6), "host", 1 << 40, True), (FinishTimes(3e6, 9e6), "device", 0, True),
])
def test_a_share_moves_where_memory_has_room_for_what_it_adds(
    twins: Twins, ends: FinishTimes, memory: str, nbytes: int, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More streaming adds gradients on the device, less of it adds slots on the host.

    A share that takes less of the memory that is full moves all the same.
    """
    planning = twins.session.planning
    monkeypatch.setattr(twins.session.engine, "finish_times", lambda: ends)
    monkeypatch.setattr("hytrain_fx.planning.solving.device_budget_bytes", lambda *of: nbytes if memory == "device" else 1 << 40)
    monkeypatch.setattr("hytrain_fx.planning.solving.host_budget_bytes", lambda limit: nbytes if memory == "host" else 1 << 40)
    twins.restart()
    put_in_force(twins, half_streamed(twins))
    plain_loop(8)(twins.ours, twins.optimizer, twins.batches)
    assert (streamed_share(planning.plan) != pytest.approx(0.5, abs=0.03)) == moves
    assert ("memory has no room" in planning.controller.standing.why) != moves


def measuring(twins: Twins, profile: object, measured: Callable[[], None]) -> Callable[[object], object]:
    """Take what was read, and give `profile` instead."""

    def take(device_update_us_per_param: object) -> object:
        assert len(twins.session.planning._reader.take().ends_us) == WINDOW + 1
        measured()
        return profile

    return take


def test_a_refusal_counts_once_times_were_measured_again(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of updates that contradict the profile cause the next steps to be measured.

    What the measured times refuse is asked for half as often.
    """
    planning = twins.session.planning
    asked: list[int] = []
    measured: list[int] = []

    def predict(profile: object, plan: Plan, discipline: Discipline) -> dict[str, float]:
        asked.append(twins.session.steps_done)
        return {"step_us": 1e6}

    def solve(profile: object) -> None:
        planning.controller.hear(Event.STAYED)

    monkeypatch.setattr(twins.session.engine, "finish_times", lambda: FinishTimes(9e6, 3e6))
    monkeypatch.setattr(planning.solver, "predict", predict)
    twins.restart()
    put_in_force(twins, half_streamed(twins))
    for name, value in {"_measured": measuring(twins, object(), lambda: measured.append(twins.session.steps_done)), "_solve": solve,
                        "profile": object(), "_saw_streaming": True}.items():
        monkeypatch.setattr(planning, name, value)
    monkeypatch.setattr(planning._moves, "switch_us", 1e3)
    plain_loop(48)(twins.ours, twins.optimizer, twins.batches)
    looks = sorted(set(asked))
    assert len(measured) == 2
    assert looks[0] < measured[0] < looks[1] < looks[2] < measured[1] < looks[3]
    assert measured[0] - looks[0] == measured[1] - looks[2] == WINDOW + 1
    assert looks[2] - looks[1] == 8


def test_the_share_is_solved_again_where_updates_come_to_begin_otherwise(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the runtime works differently for 8 steps in a row, times and plan are made again.

    The next steps are measured and the plan is solved with its share, though balanced ends ask for
    nothing. A change that comes and goes has no effect, and a second change takes 16 steps. No bit
    changes.
    """
    planning = twins.session.planning
    early, late = Discipline(early_updates=True), Discipline(commit_at="backward_end")
    works = [early]  # the last is in force
    shares = {early: 0.25, late: 0.75}
    solved: list[tuple[int, Discipline]] = []
    step = 0

    def solve(profile: object, *, discipline: Discipline, **within: object) -> Plan:
        solved.append((step, discipline))
        return replace(half_streamed(twins, shares[discipline]), predicted={"step_us": 1.0})

    monkeypatch.setattr(twins.session.engine, "finish_times", lambda: FinishTimes(1e6, 1e6))
    monkeypatch.setattr(Planning, "discipline", property(lambda self: works[-1]))
    monkeypatch.setattr("hytrain_fx.planning.solving.solve", solve)
    monkeypatch.setattr("hytrain_fx.planning.solving.streamed_k", lambda profile, **within: 0)
    monkeypatch.setattr("hytrain_fx.planning.planning.inputs_of", lambda profile, guard: {})
    monkeypatch.setattr(planning.solver, "predict", lambda profile, plan, discipline: {"step_us": 1e12})
    profile = SimpleNamespace(params=1, device="cpu")
    monkeypatch.setattr(planning._moves, "cost_us", lambda profile, wanted: 0.0)
    for name, value in {"_measured": measuring(twins, profile, lambda: None), "profile": profile}.items():
        monkeypatch.setattr(planning, name, value)
    planning.controller.solved_for = early
    seen: list[float] = []

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        nonlocal step
        losses: list[float] = []
        if model is twins.ours:
            put_in_force(twins, half_streamed(twins, shares[early]))
        for step in range(80):
            if model is twins.ours:
                works.append(late if 6 <= step < 12 or 20 <= step < 50 else early)
            losses += plain_loop(1)(model, optimizer, batches)
            if model is twins.ours:
                seen.append(streamed_share(planning.plan))
        return losses

    twins.agree(loop)
    assert solved == [(20 + 8 + 1 + WINDOW, late), (50 + 16 + 1 + WINDOW, early)]
    for (at, works_so), until in zip(solved, (solved[1][0], 80), strict=True):
        assert seen[at:until] == pytest.approx([shares[works_so]] * (until - at), abs=0.02)
