"""The streamed share that running steps ask for."""

from __future__ import annotations

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from hytrain_fx.cost_model.balance import Ends, balanced_share, ends_reason, streamed_share, weights_ratio, with_share
from hytrain_fx.cost_model.planner import prefix_plan
from hytrain_fx.ir.plan import Placement, Plan, validate
from hytrain_fx.ir.task_graph import Unit

SIZES = st.lists(st.lists(st.integers(1, 1000), min_size=1, max_size=6), min_size=1, max_size=8)
SHARE = st.floats(0.01, 0.99)


def units_of(sizes: list[list[int]]) -> list[Unit]:
    return [Unit(i, f"layers.{i}", sum(of), tuple(f"p{i}.{j}" for j in range(len(of))), 2 * sum(of), param_numels=tuple(of))
            for i, of in enumerate(sizes)]


def made(units: list[Unit], k: int, share: float) -> Plan:
    return prefix_plan(units, k, source="windowed", reason=lambda unit: "before", share=share, streamed_reason=lambda unit: "before")


@given(cpu_rate=st.floats(0.1, 10), stream_rate=st.floats(0.1, 10), slows=st.floats(0, 0.5), share=st.floats(0.05, 0.95),
       waits=st.floats(0, 2), tied=st.booleans(), ratio=st.sampled_from([0.0, 2 / 10, 4 / 12]))
def test_rounds_lead_to_updates_that_end_together(
    cpu_rate: float, stream_rate: float, slows: float, share: float, waits: float, tied: bool, ratio: float
) -> None:
    """A few rounds bring both ends within 3% of the step, with rates that are not known.

    The rates fall as both run at once. This also holds where updates wait for something after the
    commit, where streamed ones come after the CPU's and so never end before them, and where the
    lane that brings their states carries new weights too.
    """

    begun_us = waits * 1e6 / (cpu_rate + stream_rate)

    def ends(share: float) -> Ends:
        beside = 1 + slows * min(share, 1 - share)
        lane = share + (1 - share) * ratio
        cpu_us, streamed_us = begun_us + 1e6 * (1 - share) * beside / cpu_rate, begun_us + 1e6 * lane * beside / stream_rate
        held_us = max(cpu_us - streamed_us, 0.0) if tied else 0.0
        return Ends(cpu_us, streamed_us + held_us, held_us, begun_us)

    best = (stream_rate - ratio * cpu_rate) / (stream_rate + (1 - ratio) * cpu_rate)
    assume(0.02 < best < 0.98)
    for _ in range(12):
        seen = ends(share)
        found = balanced_share(share, [seen] * 4, max(seen.cpu_us, seen.streamed_us), ratio)
        if found is None:
            break
        assert (found > share) == (best > share), "it goes the right way"
        assert abs(found - best) < abs(share - best), "and comes nearer"
        share = min(max(found, 0.01), 0.99)
    seen = ends(share)
    assert abs(seen.late_us) <= 0.03 * max(seen.cpu_us, seen.streamed_us)


@given(share=SHARE, odd=st.floats(0, 1e9))
def test_one_odd_step_moves_nothing(share: float, odd: float) -> None:
    """Medians are taken: a single step that was held up by something else does not count."""
    assert balanced_share(share, [Ends(1e5, 1e5), Ends(odd, 1e5), Ends(1e5, 1e5)], 1e5, 0.2) is None


@given(share=SHARE, scatter=st.floats(0.2, 1.0))
def test_ends_that_scatter_more_than_they_differ_move_nothing(share: float, scatter: float) -> None:
    """A difference of 10% of a step counts where steps are alike.

    It does not count where steps differ by twice as much among themselves.
    """
    def ends(scatter: float) -> list[Ends]:
        return [Ends(1.1e5 + scatter * 1e5 * off, 1e5) for off in (-1, -0.5, 0, 0, 0.5, 1)]

    assert balanced_share(share, ends(0.0), 1e5, 0.2) is not None
    assert balanced_share(share, ends(scatter), 1e5, 0.2) is None


def test_new_weights_take_a_fifth_of_the_lane_that_streamed_states_take() -> None:
    """bf16: 2 bytes beside 10, as half of the master stays on the device; fp32: 4 beside 12."""
    for grad_bytes, ratio in ((2, 0.2), (4, 1 / 3)):
        units = [Unit(i, f"layers.{i}", n, ("w",), grad_bytes * n, param_numels=(n,)) for i, n in enumerate((10, 30))]
        assert math.isclose(weights_ratio(units), ratio)


@given(sizes=SIZES, k=st.integers(0, 3), before=SHARE, share=st.floats(0, 1))
def test_the_new_plan_streams_the_share(sizes: list[list[int]], k: int, before: float, share: float) -> None:
    """The new plan tiles the units and leaves what is on the device there.

    Of every prefix it streams the share, to within one parameter.
    """
    units = units_of(sizes)
    k = min(k, len(units) - 1)
    old = made(units, k, before)
    new = with_share(old, units, share, "after")
    validate(new, units)
    assert [r for r in new.rows if r.placement is Placement.GPU] == [r for r in old.rows if r.placement is Placement.GPU]
    hosted = streamed = 0
    for unit in units[k:]:
        hosted += unit.params
        streamed += sum(row.numel for row in new.shares(unit.index) if row.placement is Placement.STREAM)
        assert abs(streamed - share * hosted) <= max(max(of) for of in sizes)


@given(sizes=SIZES, share=SHARE)
def test_what_is_balanced_stays(sizes: list[list[int]], share: float) -> None:
    """Asked for the share that it has of each prefix, a plan keeps its rows; moved ones say why."""
    units = units_of(sizes)
    old = made(units, 0, share)
    settled = with_share(old, units, share, "after")
    again = with_share(settled, units, share, "again")
    assert again.rows == settled.rows
    moved = [row for row in settled.rows if row.reason == "after"]
    assert bool(moved) == (settled.rows != old.rows)


def test_a_plan_without_states_on_the_host_streams_nothing() -> None:
    """The share of nothing is 0."""
    assert streamed_share(made(units_of([[5], [6]]), 2, 0.5)) == 0.0


def test_the_reason_names_both_ends() -> None:
    """What moved a row can be read from it."""
    assert ends_reason([Ends(2e5, 1e5)], 12) == "after 12 steps CPU updates ended 200 ms after the commit, streamed ones 100 ms"
    assert ends_reason([Ends(2e5, 2e5, held_us=5e4)], 12).endswith("streamed ones 200 ms, 50 ms of them after the CPU's")
