"""Plans that are in force before anything is measured: what the device may hold bounds them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.config import Config
from hytrain_fx.cost_model.planner import SHARES_THAT_MAY_FIT
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.task_graph import Unit
from hytrain_fx.planning.first_plan import most_on_device, plan_until_measured

STATE_BYTES, SLOT_BYTES = 12, 2
PARAMS = 400
EVERY_SHARE = (0.0, *SHARES_THAT_MAY_FIT)


def units_of(count: int) -> list[Unit]:
    """Units of four equal parameters each."""
    return [Unit(i, f"unit {i}", PARAMS, (), SLOT_BYTES * PARAMS, param_numels=(PARAMS // 4,) * 4) for i in range(count)]


def host_bytes(unit: Unit, place: Placement) -> int:
    """States, and a slot where the CPU updates them."""
    return STATE_BYTES * unit.params + (unit.grad_bytes if place is Placement.CPU else 0)


def plan_of(units: list[Unit], *, most_k: int, shares: tuple[float, ...], limit_bytes: int) -> Plan:
    """The plan until times are measured."""
    def held(plan: Plan) -> int:
        return STATE_BYTES * (plan.numel(Placement.CPU) + plan.numel(Placement.STREAM)) + SLOT_BYTES * plan.numel(Placement.CPU)

    by_cpu = [host_bytes(unit, Placement.CPU) for unit in units]
    return plan_until_measured(units, by_cpu, held, most_k=most_k, shares=shares, limit_bytes=limit_bytes)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(0, 12), st.floats(0, 1.1))
def test_the_device_holds_no_more_than_it_may(count: int, most_k: int, room: float) -> None:
    """And no more than the host's memory asks for, which is kept where the two together can.

    What is streamed has no slot on the host.
    """
    units, most_k = units_of(count), min(most_k, count)
    limit = int(room * sum(host_bytes(unit, Placement.CPU) for unit in units))
    plan = plan_of(units, most_k=most_k, shares=EVERY_SHARE, limit_bytes=limit)
    assert plan.k <= most_k
    assert plan.k == 0 or sum(host_bytes(unit, Placement.CPU) for unit in units[plan.k - 1 :]) > limit
    if sum(host_bytes(unit, Placement.STREAM) for unit in units[most_k:]) <= limit:
        by_cpu, streamed = plan.numel(Placement.CPU), plan.numel(Placement.STREAM)
        assert STATE_BYTES * (by_cpu + streamed) + SLOT_BYTES * by_cpu <= limit


def test_no_more_is_streamed_than_the_host_asks_for() -> None:
    """Of ten units whose slots have room on the host but for a fifth, a quarter is streamed.

    The rows say why.
    """
    units = units_of(10)
    limit = (STATE_BYTES * 10 + SLOT_BYTES * 8) * PARAMS
    plan = plan_of(units, most_k=0, shares=EVERY_SHARE, limit_bytes=limit)
    assert plan.numel(Placement.STREAM) == 10 * PARAMS // 4
    assert {row.reason for row in plan.rows if row.placement is Placement.STREAM} == {
        "streamed: the host has no room for the slots of all that is on it"}


def test_a_share_that_was_given_is_the_only_one() -> None:
    """Also where the host would need more of them without slots."""
    plan = plan_of(units_of(8), most_k=0, shares=(0.5,), limit_bytes=STATE_BYTES * 8 * PARAMS)
    assert plan.numel(Placement.STREAM) == 4 * PARAMS


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=40), st.integers(0, 10**6))
def test_all_of_the_states_are_all_units(sizes: list[int], fraction: int) -> None:
    """Whatever units with other states take, and however their multiples round."""
    units_bytes = [(12 + 4 * fraction / sum(sizes)) * params for params in sizes]
    assert most_on_device(Config(gpu_states=1.0), units_bytes, device_bytes=0.0) == len(sizes)


def test_how_many_units_the_device_may_hold() -> None:
    """A share of all states, bytes, or all that the device has."""
    each = (STATE_BYTES + SLOT_BYTES) * PARAMS
    found = [most_on_device(Config(gpu_states=option), [each] * 10, device_bytes=7.5 * each)
             for option in (0.0, 0.35, 1.0, 4 * each, 4 * each - 1, "auto")]
    assert found == [0, 3, 10, 4, 3, 7]


@given(st.lists(st.tuples(st.integers(1, 10**6), st.sampled_from([8, 12, 16])), min_size=1, max_size=12), st.floats(0, 1))
def test_units_with_other_states_count_as_they_are(units: list[tuple[int, int]], room: float) -> None:
    """The units that fit are those whose own bytes do, not those of a mean."""
    units_bytes = [params * each for params, each in units]
    most_bytes = int(room * sum(units_bytes))
    k = most_on_device(Config(gpu_states=most_bytes), units_bytes, device_bytes=0.0)
    assert sum(units_bytes[:k]) <= most_bytes
    assert k == len(units) or sum(units_bytes[: k + 1]) > most_bytes
