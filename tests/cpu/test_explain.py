"""What `explain` tells: the plan in force, its figures, and what is not offloaded."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.equation import uniform_k
from hytrain_fx.cost_model.planner import plan, predict, prefix_plan
from hytrain_fx.cost_model.rules import compare
from hytrain_fx.cost_model.simulate import simulate, steady_step
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.explain.plan.explained import Measured
from hytrain_fx.explain.plan.report import Explanation
from hytrain_fx.explain.plan.text import place_of, plan_text, unit_groups
from hytrain_fx.explain.plan.verdict import verdict_of
from hytrain_fx.explain.plan.what_helps import KSensitivity, binding_constraint, k_sensitivity, what_helps
from hytrain_fx.ir.figures import time_text
from hytrain_fx.ir.plan import Placement, Plan, PlanRow
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.startup import Startup
from hytrain_fx.ir.task_graph import Resource
from hytrain_fx.planning.controller import Standing
from hytrain_fx.runtime.engine import EarlyCounts, FinishTimes, GuessCounts
from hytrain_fx.runtime.states.memory_estimate import MemoryInUse

from ..null.profiles import prefix, profile_of, profiles, uniform, unit
from .explained import compiled
from .models import Batches, Mlp, mlp

WARMUP = 2
STARTUP = Startup(1e3, 1e3, 1e3, 1e3, 1e3, 3e6, 6e6, 1e3, 1e6, 1e3, 1e3, 1e3, 7, 0, True)


def explained(profile: Profile, chosen: Plan) -> Explanation:
    return Explanation(chosen, (chosen,), profile, None, MemoryInUse(0, 0, 0), "native", 2, 9, "the CPU")


def test_before_a_step_it_shows_the_plan_in_force_and_no_figures() -> None:
    """Nothing is profiled, predicted or measured yet, and both text and JSON say so."""
    with compiled(k=2) as (model, _):
        found = hytrain_fx.explain(model)
        assert "No times have been profiled" in found.details()
        assert found.plan.k == 2
        raw = json.loads(found.to_json())
    assert raw["profiled"] is raw["step"]["predicted"] is raw["step"]["measured"] is raw["binds"] is None
    assert [unit["placement"] for unit in raw["units"]] == ["device"] * 2 + ["CPU"] * 2
    assert {unit["reason"] for unit in raw["units"]} == {"k=2 was given"}


def _used_in_other_order(k: int | Literal["auto"]) -> tuple[Any, Any]:
    """A compiled model that uses its units in another order than its tree's, and its optimizer."""
    net = nn.ModuleDict({name: nn.Linear(8, 8 if name == "first" else 4) for name in ("last", "first")})
    net.forward = lambda x: net["last"](net["first"](x).relu())
    return hytrain_fx.compile(net, torch.optim.AdamW(net.parameters()), warmup_steps=WARMUP, k=k)


def test_a_first_move_that_fails_is_undone_where_the_order_was_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan in force was made in the module tree's order, and is true afterwards."""
    model, optimizer = _used_in_other_order(k=1)
    session = session_of(model)
    move, moved_to = session.resources.move, []

    def fails_at_first(wanted: Any) -> None:
        move(wanted)
        moved_to.append(wanted)
        if len(moved_to) == 1:
            raise torch.OutOfMemoryError("of this test")

    monkeypatch.setattr(session.resources, "move", fails_at_first)
    placed = [session.states.placed]
    for _ in range(2):  # after the first step the first unit is known, and goes to the device before the second forward
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        placed.append(session.states.placed)
    found = hytrain_fx.explain(model)
    hytrain_fx.close(model)
    assert any("of this test" in text for text in found.troubles)
    assert moved_to[0] != placed[0]
    assert placed == [placed[0]] * 3 == [moved_to[-1]] * 3
    assert [row.unit_name for row in found.plan.rows if row.placement is Placement.GPU] == ["last"]


def test_a_plan_made_before_any_forward_is_told_in_the_forwards_order() -> None:
    """Also by its history and in `metrics`. All parts of the page can be told."""
    model, optimizer = _used_in_other_order(k="auto")
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    found = hytrain_fx.explain(model)
    assert hytrain_fx.metrics(model)["k_units"] == found.plan.k
    hytrain_fx.close(model)
    assert found.history == (found.plan,)
    assert found.profile is None
    assert [unit.name for unit in found.units] == ["first", "last"]
    assert [(row.unit, row.unit_name, row.numel) for row in found.plan.rows] == [(0, "first", 72), (1, "last", 36)]
    assert "could not be told" not in found.details()
    assert [unit["name"] for unit in json.loads(found.to_json())["units"]] == ["first", "last"]


def test_after_the_warm_up_predicted_stands_beside_measured() -> None:
    """After the warm-up, `explain` agrees with the session.

    That holds for the solved plan, the rules on its profile, medians by unit, memory and node
    counts.
    """
    with compiled(warmup_steps=WARMUP) as (model, step):
        for _ in range(WARMUP + 5):
            step()
        found, session = hytrain_fx.explain(model), session_of(model)
        assert found.plan is session.planning.plan
        assert found.profile is session.planning.profile
        assert found.profile is not None
        assert found.schedule == simulate(found.profile, found.plan, session.planning.discipline)
        assert found.alpha == found.profile.alpha
        inputs, discipline = found.plan.inputs, session.planning.discipline
        assert found.rules == compare(found.profile, int(inputs["budget_bytes"]), state_bytes_per_param=inputs["state_bytes_per_param"],
                                      discipline=discipline)
        assert found.measured is not None
        assert found.measured.step_count == found.measured.steps - 1 == 2
        assert min(found.measured.forward_us) > 0
        assert min(found.measured.backward_us) > 0
        assert found.guesses == session.engine.guess_counts()
        assert "native engine (built here), CPU workers" in str(found)
        assert found.to_dict()["engine"] == {"name": "native", "library": "built here", "workers": session.engine.workers}
        assert found.measured.finish is not None
        assert found.node_runs["wait"] == len(session.table) * (WARMUP + 5)
        on_host = [row for row, place in session.states.placement.items() if place is Placement.CPU]
        assert found.memory.host_bytes == session.states.host_bytes(on_host)
        assert [place.source for place in found.history] == ["first steps", found.plan.source]
        _check_text(found)


@pytest.mark.parametrize(("options", "last"), [({}, "settled"), ({"replan_every": 0}, "fixed"), ({"k": 2}, "fixed")], ids=str)
def test_the_state_of_planning_is_told_with_the_reason(options: dict[str, Any], last: str) -> None:
    """One line of the text and one JSON entry say what planning does, since when and why.

    They are there from the first step on.
    """
    with compiled(warmup_steps=WARMUP, **options) as (model, step):
        told: list[Standing] = []
        for _ in range(WARMUP + 4):
            found = hytrain_fx.explain(model)
            assert found.planning is not None
            standing = f"planning: {found.planning.state} since step {found.planning.since}"
            assert f"\n{standing}: {found.planning.why}\n" in found.details()
            assert standing in " ".join(str(found).split())
            assert json.loads(found.to_json())["planning"] == asdict(found.planning)
            told.append(found.planning)
            step()
    solved, needed = f"solved after {2 + WARMUP} steps", "times are needed for the first plan"
    assert list(dict.fromkeys(told)) == [
        Standing("warming up", "the first steps compile and warm up", 0, 1),
        Standing("measuring steps", needed, 2, 1),
        Standing("solving a plan before the next forward", needed, 2 + WARMUP, 1),
        Standing(last, solved if last == "settled" else f"{solved}; no other plan is to follow", 2 + WARMUP, 1),
    ]


def _check_text(found: Explanation) -> None:
    text, raw = found.details(), json.loads(found.to_json())
    assert found.schedule is not None
    groups = unit_groups(found.plan)
    for line in (*found.plan.notes, found.binds, time_text(found.schedule.makespan_us), *(group.name for group in groups)):
        assert str(line) in text
    reasons = {reason for group in groups for _, reason in group.reasons()}
    assert reasons <= {line.partition("  ")[2].strip() for line in text.splitlines()}
    assert all(f"\n{name} " in text for name in (*found.rules, "in force"))
    assert all(help.change in text for help in found.helps)
    assert {help["change"] for help in raw["helps"]["predicted"]} == {help.change for help in found.helps}
    assert raw["idle_share"]["predicted"]["CPU workers"] == found.schedule.idle_share(Resource.CPU)
    assert raw["step"]["predicted"]["step_us"] == found.plan.predicted["step_us"]
    assert raw["rules"]["seed"]["k"] == found.rules["seed"].k
    assert Plan.from_json(json.dumps(raw["plan"])) == found.plan


def test_a_parameter_with_a_gradient_hook_is_named() -> None:
    """A parameter with a gradient hook is named, with the reason.

    Its gradient stays in the graph's outputs.
    """

    def hooked() -> tuple[nn.Module, Batches]:
        model, batches = mlp()
        assert isinstance(model, Mlp)
        model.first.bias.register_hook(lambda grad: grad)
        return model, batches

    with compiled(hooked, k=0) as (model, step):
        step()
        found = hytrain_fx.explain(model)
    assert found.not_offloaded["first.bias"] == "it has a gradient hook"
    assert "note: updated without overlap: first.bias: it has a gradient hook" in str(found)


def test_a_model_that_is_not_compiled_is_refused() -> None:
    """All three functions name the model's class."""
    for ask in (hytrain_fx.explain, hytrain_fx.inspect, lambda model: hytrain_fx.record(model).__enter__()):
        with pytest.raises(UnsupportedError, match="Linear is not compiled"):
            ask(torch.nn.Linear(2, 2))


@given(profile=profiles())
@settings(deadline=None, max_examples=25)
def test_any_plan_prints_with_all_its_figures(profile: Profile) -> None:
    """Text and JSON print for every k of every profile; the text has the profile's sums."""
    for k in range(len(profile.units) + 1):
        draft = prefix(profile, k)
        found = explained(profile, replace(draft, predicted=predict(profile, draft)))
        assert all(f"{group.number}  {group.name} " in found.details() for group in unit_groups(found.plan))
        assert time_text(profile.backward_us) in found.details()
        assert json.loads(found.to_json())["step"]["predicted"]["step_us"] == pytest.approx(found.plan.predicted["step_us"])


def test_what_binds_is_named() -> None:
    """What binds is named: the longest work by far, or computing where updates hide.

    It may be the CPU, the link or the device.
    """
    cases = (
        (uniform(4, cpu=0.1, d2h=0.1, h2d=0.1), 0, "forward and backward"),
        (uniform(4, cpu=900.0), 0, "CPU updates of unit"),
        (uniform(4, cpu=1.0, h2d=900.0), 0, "weight copies to the device of unit"),
        (uniform(4, cpu=1.0, d2h=900.0), 0, "gradient copies to the host of unit"),
        (uniform(4, gpu=900.0), 4, "updates on the device"),
    )
    for profile, k, expected in cases:
        chosen = prefix(profile, k)
        assert str(binding_constraint(profile, chosen, steady_step(profile, chosen, Discipline()), Discipline())).startswith(expected)


def test_shares_of_one_unit_are_told_with_their_sizes() -> None:
    """A unit split between both places is told as such."""
    rows = (PlanRow(0, "a", 0, 25, Placement.GPU, "first"), PlanRow(0, "a", 25, 100, Placement.CPU, "second"))
    split = Plan(rows, 0, "loaded")
    assert place_of(split, 0) == "25% device + 75% CPU"
    assert "second" in plan_text(split)


def test_reasons_of_many_units_are_those_around_k() -> None:
    """Of 60 units, only the first, the last and those around k have their reasons printed.

    The rest are counted, so that the text stays a page.
    """
    profile = uniform(60, cpu=40.0)
    many = prefix_plan(profile.units, 30, source="test", reason=lambda unit: f"reason of {unit}")
    text = explained(profile, many).details()
    assert all(f"reason of {unit}" in text for unit in (0, 29, 30, 59))
    assert "reason of 10" not in text
    assert "(56 more are in plan.rows)" in text
    assert " 0..29  layer.0..29 " in text
    assert "30..59  layer.30..59 " in text


def test_measured_sums_stand_below_the_profiled_ones() -> None:
    """The line `all, measured` has the sums of the medians.

    Units that the CPU did not update are left out.
    """
    profile = uniform(2)
    measured = Measured(3, (1.0, 2.0), (10.0, 20.0), (0.0, 5.0), (None, 7.0), 40.0, 2)
    found = replace(explained(profile, plan(profile)), measured=measured)
    (line,) = [line for line in found.details().splitlines() if "all, measured" in line]
    assert re.findall(r"(\d+) us", line) == ["3", "30", "7", "5"]
    assert re.search(r"step +\S+ us +40 us .*median of 2 steps", found.details())
    assert measured.idle == {"device, waiting for updates": 5.0 / 40.0, "CPU workers": 1 - 7.0 / 40.0}


def test_other_micro_batches_and_stages_have_lines_of_their_own() -> None:
    """The forward is that of one micro-batch, predicted and measured; a bubble is no lost time."""
    profile = replace(uniform(2, forward=1000.0, backward=2000.0), between_us=9000.0, bubble_us=500.0)
    times = (1000.0, 1000.0)
    measured = Measured(3, times, (2000.0, 2000.0), (0.0, 0.0), (None, 7.0), 15_700.0, 2, between_us=9100.0, apart_us=600.0)
    found = replace(explained(profile, plan(profile)), measured=measured)
    text = found.details()
    assert re.search(r"forward +2 ms +2 ms", text)
    assert re.search(r"other micro-batches +9 ms +9.1 ms", text)
    assert re.search(r"other stages +500 us +600 us", text)
    assert verdict_of(found).compute_us == 2000.0 + 4000.0 + 9100.0
    loop_us = verdict_of(found).loop_us
    assert loop_us is not None
    assert loop_us <= 15_700.0 - 15_100.0 - 500.0
    plain = replace(explained(uniform(2), plan(uniform(2))), measured=replace(measured, between_us=0.0))
    assert not [line for line in plain.details().splitlines() if line.startswith("other ")]


@pytest.mark.parametrize("queue", [None, "4x"])
def test_a_late_step_names_the_queue_of_launches(queue: str | None) -> None:
    """Where `step()` comes late, explain says how to have a longer queue of launches.

    It does so only where the queue has its usual length.
    """
    profile = replace(uniform(4, forward=100.0, backward=200.0), commit_us=50.0)
    found = replace(explained(profile, plan(profile)), launch_queue=queue)
    (line,) = [line for line in found.details().splitlines() if line.startswith("step() returns 50 us after")]
    assert ("import hytrain_fx before CUDA is first used" in line) is (queue is None)
    assert json.loads(found.to_json())["launch_queue"] == queue


def test_a_deep_model_is_a_page() -> None:
    """34 units of three kinds fit 74 lines, whatever there is to say.

    The plan has a cap on the device's memory, and streaming.
    """
    profile = profile_of([unit(i, params=10**6, cpu=3e3, gpu=1e2, d2h=1e2, h2d=1e2, forward=3e2, backward=6e2, stream=5e2,
                               numels=(500_000, 300_000, 200_000)) for i in range(34)])
    chosen = plan(replace(profile, commit_us=50.0), budget_bytes=10**8, stream="auto")
    assert 0 < chosen.k < 34
    assert chosen.numel(Placement.STREAM)
    times = tuple(100.0 for _ in range(34))
    measured = Measured(9, times, times, times, times, 1e5, 8, FinishTimes(200.0, 100.0, at_once=9_000))
    found = replace(explained(profile, chosen), measured=measured, guesses=GuessCounts(12, 1, 40_000, 3_000), startup=STARTUP,
                    early=EarlyCounts(9, 2, 70_000, 5_000), early_tried="both ways were tried", node_runs={"wait": 3},
                    spent_us={"passes": 7.0})
    assert len(found.details().splitlines()) <= 74
    assert "missed in 1, 3 k of 40 k parameters updated again" in found.details()
    assert "missed in 2, 5 k of 70 k parameters put back or updated again" in found.details()
    assert "by the CPU 200 us, streamed 100 us; those of the last 9 k parameters were put on the lane at once" in found.details()
    assert "torch.compile, backward 6 s; torch.compile, forward 3 s" in found.details()
    assert json.loads(found.to_json())["guesses"]["redone"] == 3_000
    told = json.loads(found.to_json())["early"]
    assert (told["commits"], told["tried"]) == (9, "both ways were tried")
    assert "both ways were tried" in found.details()


def test_what_streamed_states_stood_is_told() -> None:
    """Time that streamed states waited is printed after the time at which they ended.

    Where they did not wait, nothing is printed.
    """
    profile = uniform(4)
    times = (100.0,) * 4
    finish = FinishTimes(200.0, 180.0, streamed_held_us=80.0, at_once=9_000)
    found = replace(explained(profile, plan(profile)), measured=Measured(9, times, times, times, times, 1e5, 8, finish))
    assert ("by the CPU 200 us, streamed 180 us (80 us of it after new weights that the CPU had not updated); "
            "those of the last 9 k parameters were put on the lane at once") in found.details()


@given(profile=profiles(), k=st.integers(0, 8))
@settings(deadline=None, max_examples=25)
def test_groups_hold_every_unit_once(profile: Profile, k: int) -> None:
    """Groups are in order and hold every unit once, with all parameters.

    Neighbours in one group have one size and one place.
    """
    chosen = prefix(profile, min(k, len(profile.units)))
    groups = unit_groups(chosen)
    assert [unit for group in groups for unit in group.units] == list(range(len(profile.units)))
    assert sum(row.numel for group in groups for row in group.rows) == profile.params
    assert all(profile.units[unit].params == group.params for group in groups for unit in group.units)
    assert all(len({row.placement for row in group.rows}) == 1 for group in groups)


def test_what_helps_is_the_plan_solved_again() -> None:
    """Gains are those of plans solved again for the changed profile or memory.

    The largest is first. More tokens in a step are compared for the same tokens.
    """
    profile = uniform(6, cpu=100.0)
    chosen = plan(profile, budget_bytes=32_000, state_bytes_per_param=16.0)
    assert chosen.k == 2 < plan(profile).k
    found = {help.change: help for help in what_helps(profile, chosen, Discipline())}
    gains = [help.gain_us for help in found.values()]
    assert gains == sorted(gains, reverse=True)
    step_us, free = chosen.predicted["step_us"], plan(profile)
    assert found["1 GB more device memory for states"].k == free.k
    assert found["1 GB more device memory for states"].gain_us == pytest.approx(step_us - free.predicted["step_us"])
    longer = profile_of([replace(u, forward_us=1.1 * u.forward_us, backward_us=1.1 * u.backward_us) for u in profile.units])
    changed = plan(longer, budget_bytes=32_000, state_bytes_per_param=16.0)
    tokens = found["10% more tokens in a step (for the same tokens)"]
    assert tokens.gain_us == pytest.approx(step_us - changed.predicted["step_us"] / 1.1)
    assert tokens.gain_share == pytest.approx(tokens.gain_us / step_us)


def test_a_given_plan_is_not_solved_again() -> None:
    """For a given k, and a plan without inputs, only the schedule is predicted again.

    More memory does nothing for them.
    """
    profile = uniform(6, cpu=100.0)
    for told in (plan(profile, k=1, budget_bytes=10**6), replace(prefix(profile, 1), source="loaded")):
        found = what_helps(profile, told, Discipline())
        assert {help.k for help in found} == {1}
        assert not any("memory for states" in help.change for help in found)
        faster = profile_of([replace(u, cpu_update_us=u.cpu_update_us / 1.1) for u in profile.units])
        gain_us = simulate(profile, told).makespan_us - simulate(faster, told).makespan_us
        assert next(help.gain_us for help in found if "CPU" in help.change) == pytest.approx(gain_us)


def test_a_plan_without_predictions_is_explained() -> None:
    """A plan without inputs and predictions is explained.

    A running balance makes such a plan when it moves the streamed share.
    """
    profile = uniform(3, cpu=100.0)
    bare = replace(plan(profile), predicted={}, inputs={})
    text = explained(profile, bare).details()
    assert time_text(simulate(profile, bare).makespan_us) in text
    assert "what would help most" in text


def test_sensitivities_of_k_are_slopes_of_the_equation() -> None:
    """1% more of a term moves k as the closed form says.

    It is 0 where the backward hides all updates, None where nothing updates.
    """
    profile = uniform(10, cpu=100.0, gpu=10.0, backward=20.0)
    found = k_sensitivity(profile)
    assert found is not None
    more = uniform_k(10, 200.0, 1010.0, 0.1) - uniform_k(10, 200.0, 1000.0, 0.1)
    assert found.t_cpu == pytest.approx(more, rel=0.02)
    assert found.t_bwd == pytest.approx(uniform_k(10, 202.0, 1000.0, 0.1) - uniform_k(10, 200.0, 1000.0, 0.1), rel=0.02)
    assert found.alpha == pytest.approx(uniform_k(10, 200.0, 1000.0, 0.101) - uniform_k(10, 200.0, 1000.0, 0.1), rel=0.02)
    assert k_sensitivity(uniform(10, cpu=1.0)) == KSensitivity(0.0, 0.0, 0.0)
    assert k_sensitivity(uniform(10, cpu=0.0)) is None
