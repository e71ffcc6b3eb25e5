"""A model as stages of a pipeline, before it runs: the order of 1F1B, bubbles, what updates add."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.errors import ConfigError
from hytrain_fx.explain.timeline.lanes import Lanes
from hytrain_fx.explain.timeline.text import timelines_text
from hytrain_fx.forecast.device import analytic_profile
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.forecast.page import section
from hytrain_fx.forecast.shapes import read_shape
from hytrain_fx.forecast.stages import cut, one_f_one_b, pipeline_forecast
from hytrain_fx.ir.task_graph import TaskKind
from tests.null.profiles import uniform

US = st.integers(1, 50).map(float)


@given(stages=st.integers(1, 6), more=st.integers(0, 10), forward=US, backward=US)
def test_equal_stages_have_the_closed_form(stages: int, more: int, forward: float, backward: float) -> None:
    """A step takes (m + p - 1)(f + b), and stage s stands still for s (f + b) between two."""
    micro_batches = stages + more
    step_us, bubbles_us = one_f_one_b([forward] * stages, [backward] * stages, micro_batches)
    assert step_us == pytest.approx((micro_batches + stages - 1) * (forward + backward))
    assert bubbles_us == pytest.approx([stage * (forward + backward) for stage in range(stages)])


@given(times=st.lists(st.tuples(US, US), min_size=1, max_size=5), more=st.integers(0, 6))
def test_no_stage_does_more_than_a_step(times: list[tuple[float, float]], more: int) -> None:
    """Its own work and its bubble fit, and the step is at least one micro-batch through all."""
    forward, backward = [f for f, _ in times], [b for _, b in times]
    micro_batches = len(times) + more
    step_us, bubbles_us = one_f_one_b(forward, backward, micro_batches)
    for (f, b), bubble_us in zip(times, bubbles_us, strict=True):
        assert bubble_us >= 0
        assert micro_batches * (f + b) + bubble_us <= step_us * (1 + 1e-9)
    assert step_us <= micro_batches * (sum(forward) + sum(backward)) * (1 + 1e-9)


@given(costs=st.lists(US, min_size=1, max_size=9), data=st.data())
def test_cuts_leave_the_least_largest_part(costs: list[float], data: st.DataObject) -> None:
    """No other cut into as many parts, none of them empty, has a smaller largest part."""
    parts = data.draw(st.integers(1, len(costs)))
    cuts = cut(costs, parts)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(costs), parts + 1)
    largest = max(sum(costs[a:b]) for a, b in pairwise(cuts))
    others = data.draw(st.sets(st.integers(1, max(len(costs) - 1, 1)), min_size=parts - 1, max_size=parts - 1)) if parts > 1 else set()
    tried = [0, *sorted(others), len(costs)]
    assert all(a < b for a, b in pairwise(cuts))
    assert largest <= max(sum(costs[a:b]) for a, b in pairwise(tried))


@given(cpu=st.floats(1, 400), gpu=st.floats(0, 10), more=st.integers(0, 12))
@settings(deadline=None)
def test_bubbles_hide_updates(cpu: float, gpu: float, more: int) -> None:
    """Updates add no more beside the step than after it, and no more to later stages."""
    found = pipeline_forecast(uniform(8, cpu=cpu, gpu=gpu, d2h=1.0, h2d=1.0), 4, 4 + more)
    after, beside, device, solved = found.steps_us
    assert found.compute_us <= beside <= after * (1 + 1e-9)
    assert solved <= min(beside, device) * 1.02 + 8.0
    for before, later in pairwise(found.stages):
        assert later.bubble_us > before.bubble_us
        assert later.added_us[2] <= before.added_us[2] + 1e-6
        assert later.k <= before.k
    assert [stage.units for stage in found.stages] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    rows = found.table().rows
    assert len(rows) == 5
    assert rows[-1][1] == "the step"
    _require_timeline(found.timeline, 4, 4 + more)


def _require_timeline(lanes: Lanes, stages: int, micro_batches: int) -> None:
    """The last step of each stage is whole, nothing overlaps, no stage runs ahead of another."""
    rows = [lanes.lanes[f"stage {number}"] for number in range(stages)]
    for row in rows:
        assert all(a.end_us <= b.begin_us + 1e-6 for a, b in pairwise(row))
    for kind, order in ((TaskKind.FORWARD, rows), (TaskKind.BACKWARD, rows[::-1])):
        last_step = [[span for span in row if span.kind is kind][-micro_batches:] for row in order]
        assert all([span.unit for span in spans] == list(range(micro_batches)) for spans in last_step)
        for before, after in pairwise(last_step):
            assert all(a.end_us <= b.begin_us + 1e-6 for a, b in zip(before, after, strict=True))
    assert {span.lane for span in lanes.spans if span.kind not in (TaskKind.FORWARD, TaskKind.BACKWARD)} <= {
        f"updates {number}" for number in range(stages)}
    assert "stage 3" in timelines_text([lanes], 100)


@pytest.mark.parametrize(("stages", "micro_batches", "message"), [
    (0, 4, "found 0 stages, expected 1 to 3"), (4, 4, "found 4 stages, expected 1 to 3"), (2, 1, "found 1 micro-batches, expected 2"),
])
def test_what_is_no_pipeline_is_refused(stages: int, micro_batches: int, message: str) -> None:
    """More stages than layers, fewer micro-batches than stages."""
    with pytest.raises(ConfigError, match=message):
        pipeline_forecast(uniform(3), stages, micro_batches)


def test_no_stage_is_slower_than_without_us() -> None:
    """With k solved no stage adds more to the step than with updates after it, or all on its GPU.

    docs/pipelines.md has the table, of four stages and 16 micro-batches.
    """
    page = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()
    for stages, micro_batches in ((2, 4), (4, 16), (8, 16)):
        profile = analytic_profile(read_shape("llama-7b"), find_device("h200"), 2048, sequence=2048)
        found = pipeline_forecast(profile, stages, micro_batches)
        for stage in found.stages:
            after_us, beside_us, device_us, solved_us = stage.added_us
            assert solved_us <= min(after_us, beside_us, device_us)
            assert after_us > 100e3 / stages, "updates after the step that nobody waits for"
        if stages == 4:
            rows = section(found.table()).splitlines()
            assert [row for row in rows if row.startswith("|") and row not in page] == []
