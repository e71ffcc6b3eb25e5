"""Fetches of streamed weights as planning, timelines and explanations see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.fetch_depth import FetchDepth, fetch_depth
from hytrain_fx.cost_model.fetches import fetched_bytes, fetches, weight_slots_bytes
from hytrain_fx.explain.timeline.timeline import read_trace
from hytrain_fx.ir.limits import UNITS_AHEAD
from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.task_graph import FETCHES, TaskKind
from hytrain_fx.planning.weight_window import with_collectives, with_fetches
from hytrain_fx.runtime.lane_times import Timed

from .loops import Twins, plain_loop
from .models import Batches, gpt
from .test_placements import plan_of
from .test_streamed_weights import LAYERS, OPTIONS, WIDTH, streamed_gpts


@pytest.fixture(scope="module")
def twins() -> Iterator[Twins]:
    """One pair for all loops."""
    made = streamed_gpts()
    yield made
    made.close()


@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
def test_the_runtime_fetches_what_the_simulator_plays(twins: Twins, ahead: int) -> None:
    """In a steady step: the same units in the same order, and slots of the same size.

    So what the forward has read last stays through the turn. The tied embedding, which is read at
    both ends, has a size of its own and is left out.
    """
    _, optimizer = twins.restart()
    session = twins.session
    session.place(plan_of(session, [Placement.CPU]))
    units = session.nodes.fetched
    units.look_ahead(ahead)
    try:
        plain_loop(3)(twins.ours, optimizer, twins.batches)
        units.times.record(True)
        plain_loop(1)(twins.ours, optimizer, twins.batches)
        timed = units.times.take()
    finally:
        units.times.record(False)
        units.look_ahead(UNITS_AHEAD)
    number = {unit.index: unit.name for unit in session.planning.units()}
    names = {session.units[n].name: n for n in range(len(session.units))}
    layers = [unit for unit in session.planning.units() if unit.name.startswith("h.")]
    nbytes = {unit.index: 2 * unit.fetched_params for unit in layers}
    assert len(set(nbytes.values())) == 1
    expected = fetches(nbytes, ahead)
    found = [(of.kind, session.nodes.unit_of[of.row]) for of in timed]
    for kind in FETCHES:
        of_kind = [names[number[of.task.unit]] for of in expected if of.task.kind is kind]
        assert [unit for other, unit in found if other is kind and session.units[unit].name.startswith("h.")] == of_kind


def test_how_far_ahead_changes_in_mid_run_and_no_bit(twins: Twins) -> None:
    """More units ahead, none, all, between steps; with fewer, slots are made anew."""
    units = twins.session.nodes.fetched
    depths = iter([3, 0, 6, 1, 2])

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        seen = []
        for step in range(5):
            if model is twins.ours:
                ahead = next(depths)
                twins.session.eager.streamed.follow(FetchDepth(ahead, 0.0, 0.0, 0, None, False))
                assert (units.ahead, units._pool.of_a_size) == (ahead, ahead + 1)
            loss = model(*batches[step % len(batches)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(loss.detach()))
        return seen

    twins.agree(loop)
    layer = next(unit for unit in twins.session.planning.units() if unit.name.startswith("h."))
    assert units.ahead == 2
    assert Counter(slot.nbytes for slot in units._pool.slots)[2 * layer.fetched_params] <= 3


def test_a_timeline_has_one_lane_of_fetches(twins: Twins, tmp_path: Path) -> None:
    """Measured and predicted, in text, trace and picture; nothing is kept outside a recording."""
    _, optimizer = twins.restart()
    session = twins.session
    session.place(plan_of(session, [Placement.CPU]))
    plain_loop(2)(twins.ours, optimizer, twins.batches)
    assert session.nodes.fetched.times.take() == []
    with hytrain_fx.record(twins.ours) as recording:
        plain_loop(3)(twins.ours, optimizer, twins.batches)
    lanes = recording.timeline.lanes
    spans = lanes["fetches"]
    assert {span.kind for span in spans} == set(FETCHES)
    forwards = Counter(span.unit for span in spans if span.kind is TaskKind.FETCH_FORWARD)
    assert set(forwards.values()) == {3}
    assert len(forwards) == LAYERS + 1  # the embedding
    assert all(span.nbytes > 0 and span.end_us > span.begin_us for span in spans)
    order = list(lanes)
    assert order.index("device") < order.index("fetches") < order.index("CPU 0")
    text = str(recording)
    assert "F weights fetched for the forward" in text
    assert "B weights fetched for the backward" in text
    assert list(read_trace(recording.save(tmp_path / "steps.json"))[0].lanes) == order
    assert recording.save(tmp_path / "steps.png").stat().st_size > 0


def test_fetches_are_measured_predicted_and_explained(twins: Twins) -> None:
    """A profile has a time for each unit; the step's terms name them, and the wait for them."""
    twins.restart()
    torch._dynamo.reset()
    model, batches = gpt(layers=3, width=WIDTH)
    model = model.to(torch.bfloat16)
    ours: Any = model
    ours, optimizer = hytrain_fx.compile(ours, torch.optim.AdamW(ours.parameters(), lr=1e-3), k=0, warmup_steps=2, **OPTIONS)
    try:
        plain_loop(8)(ours, optimizer, batches)
        e = hytrain_fx.explain(ours)
        assert e.profile is not None
        assert e.measured is not None
        assert e.schedule is not None
        assert e.profile.fetches
        assert all(u.fetch_us > 0 for u in e.profile.units if u.fetched_params)
        assert len({u.fetch_us / u.fetch_bytes for u in e.profile.units if u.fetched_params}) > 1  # measured, not the link's rate
        assert all(0.9 < u.fetched_params / u.params <= 1 for u in e.profile.units if u.name.startswith("h."))
        assert e.plan.predicted["fetch_us"] > 0
        assert e.plan.predicted["weight_slots_bytes"] == weight_slots_bytes(fetched_bytes(e.profile, e.plan), UNITS_AHEAD)
        assert {i.task.kind for i in e.schedule.intervals} >= {TaskKind.FETCH_FORWARD}
        assert 0 < e.measured.fetch_stall_us <= sum(e.measured.stall_us)
        details = e.details()
        assert "weights fetched" in details
        assert "waiting for fetches" in details
        assert "units are brought ahead of need" in details
        assert e.task_graph.total("bytes", *FETCHES) > 0
        inspection = hytrain_fx.inspect(ours)
        assert "fetch forward" in inspection.to_svg()
    finally:
        hytrain_fx.close(ours)


def test_weights_come_back_with_their_states_and_are_counted(twins: Twins) -> None:
    """What planning takes for room counts them: two bytes a parameter of what is on the device."""
    twins.restart()
    session = twins.session
    window = session.planning.units.window
    assert window is not None
    assert window.back_bytes() == 0
    session.place(plan_of(session, [Placement.GPU]))
    matrices = sum(2 * p.numel() for p in session.table.parameters if p.dim() > 1)
    assert window.back_bytes() == matrices
    assert sum(unit.fetched_params for unit in session.planning.units()) == matrices // 2
    session.place(plan_of(session, [Placement.CPU]))
    assert window.back_bytes() == 0


def test_a_profile_takes_the_median_rate_of_a_units_copies(twins: Twins) -> None:
    """Units without copies take that of the others; without any copy the link is asked."""
    profile = replace(_profile(twins), commit_us=0.0)
    timed = [Timed(TaskKind.FETCH_FORWARD, row, 100, 0.0, us) for row, us in ((0, 10.0), (0, 30.0), (0, 20.0), (1, 40.0))]
    unit_of = {0: 0, 1: 1, 2: 2}
    found = with_fetches(profile, timed, unit_of, lambda: pytest.fail("the link was asked"))
    rates = [u.fetch_us / u.fetch_bytes for u in found.units[:3]]
    assert rates == pytest.approx([0.2, 0.4, 0.25])
    assert with_fetches(profile, [], unit_of, lambda: 3.0).units[0].fetch_us == 3.0 * profile.units[0].fetch_bytes


def test_a_profile_takes_the_best_rate_of_a_units_collectives(twins: Twins) -> None:
    """The others waited for slower ranks. Units without any take the best of all.

    Weights in shards are gathered otherwise.
    """
    plain = replace(_profile(twins), commit_us=0.0)
    profile = replace(plain, units=(replace(plain.units[0], gathered_params=8), *plain.units[1:]))
    kinds = (TaskKind.REDUCE_SCATTER, TaskKind.ALL_GATHER)
    timed = [Timed(kind, row, 100, 0.0, us * part) for part, kind in enumerate(kinds, 1) for row, us in ((0, 10.0), (0, 30.0), (1, 40.0))]
    nbytes = [100 * (number + 1) for number in range(len(profile.units))]
    found = with_collectives(profile, timed, {0: 0, 1: 1}, nbytes)
    assert [u.reduce_scatter_us for u in found.units[:3]] == pytest.approx([10.0, 80.0, 30.0])
    assert [u.all_gather_us for u in found.units[:3]] == pytest.approx([0.0, 160.0, 60.0])
    assert found.has_collectives
    assert with_collectives(profile, [], {}, nbytes) == profile


def _profile(twins: Twins) -> Any:
    from hytrain_fx.cost_model.step_graph import unmeasured

    twins.restart()
    return unmeasured(twins.session.planning.units())


def test_the_solved_depth_is_told(twins: Twins) -> None:
    """`explain` says how many units are brought ahead, in how much memory, and why."""
    twins.restart()
    profile = _profile(twins)
    profile = replace(profile, units=tuple(replace(u, forward_us=10.0, backward_us=20.0, fetch_us=6.0) for u in profile.units))
    depth = fetch_depth(profile, twins.session.planning.plan, Discipline())
    assert depth is not None
    streamed = twins.session.eager.streamed
    streamed.follow(depth)
    try:
        assert str(depth) in str(hytrain_fx.explain(twins.ours).streamed)
        assert hytrain_fx.explain(twins.ours).discipline.units_ahead == depth.ahead == 1
    finally:
        streamed.units.look_ahead(UNITS_AHEAD)
        streamed.depth = None
