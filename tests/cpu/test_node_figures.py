"""Shares, bytes and times of an inserted node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.cost_model.planner import plan
from hytrain_fx.explain.graphs.lines import InsertedLine
from hytrain_fx.explain.graphs.node_figures import TASKS, InspectedNode, InspectedRow, UnitTimes, describe, unit_times
from hytrain_fx.explain.plan.explained import Measured
from hytrain_fx.explain.plan.report import Explanation
from hytrain_fx.ir.pass_record import NodeNote
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.task_graph import RESOURCE_OF
from hytrain_fx.runtime.states.memory_estimate import MemoryInUse

from ..null.profiles import prefix, profiles, uniform

ROWS = (
    InspectedRow("h.0.up", "h.0", 600, {Placement.CPU: 300}),
    InspectedRow("h.0.down", "h.0", 200, {Placement.STREAM: 100}),
    InspectedRow("head", "head", 800, {Placement.GPU: 400}),
)
TIMES = {
    "h.0": UnitTimes({"grad_offload": 6.0, "gpu_step": 3.0, "wait": 2.0}, {"wait": 2.5}, {"grad_offload": 7.0}),
    "head": UnitTimes({"grad_offload": 0.0, "gpu_step": 5.0, "wait": 1.0}, {"wait": 0.5}, {"grad_offload": 0.0}),
}


def explained(profile: Profile, chosen: Plan, measured: Measured | None = None) -> Explanation:
    return Explanation(chosen, (chosen,), profile, measured, MemoryInUse(0, 0, 0), "native", 2, 9, "the CPU")


def described(op: str, rows: tuple[int, ...], times: Mapping[str, UnitTimes] = TIMES, made_by: str = "insert") -> InspectedNode:
    """An inserted node of these rows, with the figures it gets."""
    line = InsertedLine(0, op, op, rows, "line")
    return describe("01.backward", line, NodeNote(unit=1, made_by=made_by), ("h.0", "head"), ROWS, times)


def rows_of(chosen: Plan) -> tuple[InspectedRow, ...]:
    """One row for each share of a plan."""
    return tuple(InspectedRow(f"{share.unit_name}.{share.begin}", share.unit_name, 2 * share.numel, {share.placement: share.numel})
                 for share in chosen.rows)


@pytest.mark.parametrize(("op", "expected"), [
    ("grad_offload", 600), ("cpu_step", 28 * 300), ("gpu_step", 28 * 500), ("reload", 600), ("wait", 1600), ("release", 1600),
])
def test_bytes_are_those_of_the_rows_it_acts_for(op: str, expected: int) -> None:
    """Each kind of node counts its own rows.

    Copies and CPU updates count rows placed on the CPU, device updates resident and streamed rows,
    waits all rows.
    """
    node = described(op, (0, 1, 2), {})
    assert node.nbytes == expected
    assert node.shares == {"cpu": 300 / 800, "stream": 100 / 800, "gpu": 400 / 800}
    assert (node.predicted_us, node.measured_us, node.profiled_us) == (None, None, None)
    assert node.note == f"h.0, head: h.0.up, h.0.down and 1 more; 38% cpu + 12% stream + 50% gpu; {node.size}; made by insert"


def test_times_are_summed_over_layers_and_split_among_nodes_of_one() -> None:
    """A node of two layers has both times; a node of part of a layer's rows has their part."""
    both = described("wait", (0, 1, 2))
    assert (both.predicted_us, both.measured_us, both.profiled_us) == (3.0, 3.0, None)
    assert both.times == "predicted 3 us, measured 3 us"
    assert described("wait", (0,)).predicted_us == pytest.approx(2.0 * 300 / 400)
    offload = described("grad_offload", (0,))
    assert offload.times == "predicted 6 us, profiled 7 us"
    assert offload.place == "on cpu"


def test_an_operator_that_the_plan_passes_over_has_nothing_to_do() -> None:
    """A CPU update of a layer on the device moves no byte and takes no time."""
    idle = described("grad_offload", (2,))
    assert (idle.nbytes, idle.predicted_us, idle.size) == (0, 0.0, "nothing to do")


def test_a_node_without_rows_belongs_to_its_unit() -> None:
    """A node of a user's operator has its noted layer and the pass that made it, and no bytes."""
    node = described("demo.mark", (), made_by="colour")
    assert (node.layers, node.nbytes, node.place, node.note) == (("head",), 0, "", "head; made by colour")


@given(profile=profiles(), data=st.data())
@settings(deadline=None, max_examples=25)
def test_predicted_times_sum_to_what_the_schedule_has(profile: Profile, data: st.DataObject) -> None:
    """Over all units, each operator's predicted time is its tasks' time in the schedule.

    Profiled times are those of its share.
    """
    chosen = prefix(profile, data.draw(st.integers(0, len(profile.units))))
    explanation = explained(profile, chosen)
    schedule = explanation.schedule
    assert schedule is not None
    times = unit_times(explanation, rows_of(chosen))
    for op, kind in TASKS.items():
        expected = sum(i.duration_us for i in schedule.on(RESOURCE_OF[kind]) if i.task.kind is kind)
        assert sum(of.predicted[op] for of in times.values()) == pytest.approx(expected)
    assert sum(of.predicted["wait"] for of in times.values()) == pytest.approx(schedule.stall_us)
    for unit in profile.units:
        on_device = {share.placement for share in chosen.shares(unit.index)} == {Placement.GPU}
        assert times[unit.name].profiled["grad_offload"] == (0.0 if on_device else pytest.approx(unit.d2h_us))


def test_measured_times_are_of_waits_and_cpu_updates() -> None:
    """A unit that the CPU did not update has no measured update.

    Without a profile nothing is predicted.
    """
    profile = uniform(2)
    chosen = plan(profile)
    measured = Measured(3, (1.0, 2.0), (10.0, 20.0), (0.0, 5.0), (None, 7.0), 40.0, 2)
    times = unit_times(explained(profile, chosen, measured), rows_of(chosen))
    assert [times[unit.name].measured for unit in profile.units] == [{"wait": 0.0}, {"wait": 5.0, "cpu_step": 7.0}]
    unknown = unit_times(replace(explained(profile, chosen), profile=None), rows_of(chosen))
    assert all(of == UnitTimes() for of in unknown.values())
