"""What `explain` tells: the plan in force, its figures, and what is not offloaded."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.cost_model.figures import time_text
from hytrain_fx.cost_model.planner import compare, plan, predict, prefix_plan
from hytrain_fx.cost_model.simulate import simulate
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.explain.plan_text import place_of, plan_text
from hytrain_fx.explain.report import Explanation, Measured, binding_constraint
from hytrain_fx.ir.plan import Placement, Plan, PlanRow
from hytrain_fx.ir.profile import Profile
from hytrain_fx.runtime.memory_estimate import MemoryInUse

from ..null.profiles import prefix, profiles, uniform
from .explained import compiled
from .models import Batches, Mlp, mlp

WARMUP = 2


def explained(profile: Profile, chosen: Plan) -> Explanation:
    return Explanation(chosen, (chosen,), profile, None, MemoryInUse(0, 0, 0), "native", 2, 9, "the CPU")


def test_before_a_step_it_shows_the_plan_in_force_and_no_figures() -> None:
    """Nothing is profiled, predicted or measured yet, and both text and JSON say so."""
    with compiled(k=2) as (model, _):
        found = hytrain_fx.explain(model)
        assert "No times have been profiled" in str(found)
        assert found.plan.k == 2
        raw = json.loads(found.to_json())
    assert raw["profiled"] is raw["step"]["predicted"] is raw["step"]["measured"] is raw["binds"] is None
    assert [unit["placement"] for unit in raw["units"]] == ["device"] * 2 + ["CPU"] * 2
    assert {unit["reason"] for unit in raw["units"]} == {"k=2 was given"}


def test_after_the_warm_up_predicted_stands_beside_measured() -> None:
    """The solved plan, the rules on its profile, medians by unit, memory and node counts agree with the session's own."""
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
        assert found.node_runs["wait"] == len(session.table) * (WARMUP + 5)
        on_host = [row for row, place in enumerate(session.states.placement) if place is Placement.CPU]
        assert found.memory.host_bytes == session.states.host_bytes(on_host)
        assert [place.source for place in found.history] == ["first steps", found.plan.source]
        _check_text(found)


def _check_text(found: Explanation) -> None:
    text, raw = str(found), json.loads(found.to_json())
    assert found.schedule is not None
    for line in (*found.plan.notes, found.binds, time_text(found.schedule.makespan_us), *(row.unit_name for row in found.plan.rows)):
        assert str(line) in text
    assert {row.reason for row in found.plan.rows} <= {line.partition(": ")[2] for line in text.splitlines() if line.startswith("  ")}
    assert all(f"\n{name} " in text for name in found.rules)
    assert raw["step"]["predicted"]["step_us"] == found.plan.predicted["step_us"]
    assert raw["rules"]["seed"]["k"] == found.rules["seed"].k
    assert Plan.from_json(json.dumps(raw["plan"])) == found.plan


def test_a_parameter_with_a_gradient_hook_is_named() -> None:
    """Its gradient stays in the graph's outputs; the explanation says whose and why."""

    def hooked() -> tuple[nn.Module, Batches]:
        model, batches = mlp()
        assert isinstance(model, Mlp)
        model.first.bias.register_hook(lambda grad: grad)
        return model, batches

    with compiled(hooked, k=0) as (model, step):
        step()
        found = hytrain_fx.explain(model)
    assert found.not_offloaded["first.bias"] == "it has a gradient hook"
    assert "it has a gradient hook" in str(found)


def test_a_model_that_is_not_compiled_is_refused() -> None:
    """All three functions name the model's class."""
    for ask in (hytrain_fx.explain, hytrain_fx.inspect, lambda model: hytrain_fx.record(model).__enter__()):
        with pytest.raises(UnsupportedError, match="Linear is not compiled"):
            ask(torch.nn.Linear(2, 2))


@given(profile=profiles())
@settings(deadline=None, max_examples=25)
def test_any_plan_prints_with_all_its_figures(profile: Profile) -> None:
    """Text and JSON hold for every k of every profile; sums in the text are those of the profile."""
    for k in range(len(profile.units) + 1):
        draft = prefix(profile, k)
        found = explained(profile, replace(draft, predicted=predict(profile, draft)))
        assert all(unit.name in str(found) for unit in profile.units)
        assert time_text(profile.backward_us) in str(found)
        assert json.loads(found.to_json())["step"]["predicted"]["step_us"] == pytest.approx(found.plan.predicted["step_us"])


def test_what_binds_is_named() -> None:
    """Computing where updates hide; the CPU, the link or the device where its work is the longest by far."""
    cases = (
        (uniform(4, cpu=0.1, d2h=0.1, h2d=0.1), 0, "forward and backward"),
        (uniform(4, cpu=900.0), 0, "CPU updates of unit"),
        (uniform(4, cpu=1.0, h2d=900.0), 0, "weight copies to the device of unit"),
        (uniform(4, cpu=1.0, d2h=900.0), 0, "gradient copies to the host of unit"),
        (uniform(4, gpu=900.0), 4, "updates on the device"),
    )
    for profile, k, expected in cases:
        chosen = prefix(profile, k)
        assert binding_constraint(profile, chosen, simulate(profile, chosen)).startswith(expected)


def test_shares_of_one_unit_are_told_with_their_sizes() -> None:
    """A unit split between both places is told as such."""
    rows = (PlanRow(0, "a", 0, 25, Placement.GPU, "first"), PlanRow(0, "a", 25, 100, Placement.CPU, "second"))
    split = Plan(rows, 0, "loaded")
    assert place_of(split, 0) == "25% device + 75% CPU"
    assert "second" in plan_text(split)


def test_reasons_of_many_units_are_those_around_k() -> None:
    """A page stays a page: of 60 units the first, the last and those around k are reasoned, and the rest is counted."""
    profile = uniform(60, cpu=40.0)
    many = prefix_plan(profile.units, 30, source="test", reason=lambda unit: f"reason of {unit}")
    text = str(explained(profile, many))
    assert all(f"reason of {unit}" in text for unit in (0, 29, 30, 59))
    assert "reason of 10" not in text
    assert "(52 more are in plan.rows)" in text


def test_measured_sums_stand_below_the_profiled_ones() -> None:
    """The line `all, measured` has the medians' sums; units that the CPU did not update are left out."""
    profile = uniform(2)
    measured = Measured(3, (1.0, 2.0), (10.0, 20.0), (0.0, 5.0), (None, 7.0), 40.0, 2)
    found = replace(explained(profile, plan(profile)), measured=measured)
    (line,) = [line for line in str(found).splitlines() if "all, measured" in line]
    assert re.findall(r"(\d+) us", line) == ["3", "30", "7", "5"]
    assert "40 us  median of the last 2 steps" in str(found)
