"""What goes from rank to rank, as a lane of recorded timelines."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.explain.timeline.recording import Recording
from hytrain_fx.explain.timeline.span import COLLECTIVES, Span
from hytrain_fx.explain.timeline.timeline import Timeline, read_trace
from hytrain_fx.ir.shard import shard_of
from hytrain_fx.ir.task_graph import TaskKind

from .rank_loops import compiled, net, started, tokens_of
from .test_timeline import check_trace, rounded

STEPS = 2
BEFORE = 10  # what is predicted for the given k is measured first: in 6 steps on a CPU, in more where times come from a GPU
_BYTES, _ALIGNED = 2, 32  # of one bf16 element; elements between the begins of two vectors in a bucket
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Recorded:
    """What one rank has recorded.

    recording  None on rank 2: one that records does not need the others to
    nodes      of the backward, in order: the unit, and the shapes of its gradients
    gathered   the units with a matrix that steps update, in order, and the shapes of the matrices
    after      collectives kept after the block
    measured   times of each unit's reduce-scatter and all-gather, in the profile of steps before it
    """

    recording: Recording | None
    nodes: Sequence[tuple[int, Shapes]]
    gathered: Sequence[tuple[int, Shapes]]
    after: int
    measured: Sequence[tuple[float, float]]


def recorded(rank: int, size: int) -> Recorded:
    """Steps of a model whose states are on the host but for one unit's, some of them in a block."""
    model: Any = net(rank)
    optimizer = compiled(model, k=1, warmup_steps=3)
    session = session_of(model)

    def steps(numbers: Sequence[int]) -> None:
        for number in numbers:
            model(tokens_of(rank, number)).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(range(BEFORE))
    with hytrain_fx.record(model) if rank < 2 else nullcontext() as recording:
        steps(range(BEFORE, BEFORE + STEPS))
    steps([BEFORE + STEPS])
    (calls,) = session.nodes.graph_calls.values()
    shapes = [tuple(parameter.shape) for parameter in session.table.parameters]
    trained = {row for call in calls for row in call}
    matrices = [(unit.number, tuple(shapes[row] for row in unit.rows if row in trained and row in session.table.shards))
                for unit in session.units]
    assert session.ranks is not None
    assert session.planning.profile is not None, f"{session.planning.controller.standing}; {session.planning.aside.troubles}"
    measured = [(unit.reduce_scatter_us, unit.all_gather_us) for unit in session.planning.profile.units]
    found = Recorded(recording, [(session.nodes.unit_of[call[0]], tuple(shapes[row] for row in call)) for call in calls],
                     [(unit, of) for unit, of in matrices if of], len(session.ranks.times.take()), measured)
    hytrain_fx.close(model)
    return found


def require_whole_lane(timeline: Timeline, found: Recorded, size: int) -> None:
    """A bar for each node of the backwards and each gathered unit, in order, with its bytes."""
    bars = bars_of(timeline)
    of_step = [(TaskKind.ALL_GATHER, unit, shards_bytes(shapes, size)) for unit, shapes in found.gathered]
    of_step += [(TaskKind.REDUCE_SCATTER, unit, shards_bytes(shapes, size) + vectors_bytes(shapes, size))
                for unit, shapes in found.nodes]
    assert [(bar.kind, bar.unit, bar.nbytes) for bar in bars] == STEPS * of_step


def require_order(timeline: Timeline, slack_us: float = 0.0) -> None:
    """Bars do not overlap, gathers end before their unit's forward, and all lie inside the steps.

    slack_us   what the clock does not tell apart
    """
    bars = bars_of(timeline)
    assert all(bar.end_us > bar.begin_us for bar in bars)
    assert all(bar.end_us <= after.begin_us + slack_us for bar, after in itertools.pairwise(bars))
    device = timeline.lanes["device"]
    gathers = [bar for bar in bars if bar.kind is TaskKind.ALL_GATHER]
    gathered = {bar.unit for bar in gathers}
    waits = [span for span in device if span.kind is TaskKind.WAIT and span.unit in gathered]  # a forward begins where its wait ends
    for bar, wait in zip(gathers, waits, strict=True):
        assert bar.unit == wait.unit
        assert bar.end_us <= wait.end_us + slack_us
    assert device[0].begin_us - slack_us <= bars[0].begin_us
    assert bars[-1].end_us <= max(span.end_us for span in device) + slack_us


def bars_of(timeline: Timeline) -> tuple[Span, ...]:
    """Of the collectives."""
    return timeline.lanes[COLLECTIVES]


def shards_bytes(shapes: Shapes, size: int) -> int:
    """Of a bucket of every rank's shards."""
    shards = [shard_of(shape, 0, size) for shape in shapes]
    return sum(_BYTES * size * shard.each for shard in shards if shard)


def vectors_bytes(shapes: Shapes, size: int) -> int:
    """Of a bucket of whole tensors."""
    whole = [math.prod(shape) for shape in shapes if shard_of(shape, 0, size) is None]
    return sum(_BYTES * _ALIGNED * math.ceil(numel / _ALIGNED) for numel in whole)


@pytest.mark.sample(0)
@pytest.mark.parametrize("size", [2, 3])
def test_recorded_steps_show_what_goes_from_rank_to_rank(tmp_path: Path, size: int) -> None:
    """Each unit's gather and each node's gradients, in order, with their bytes; none after it.

    The trace has them with name, unit and bytes, and is read back as it was.
    """
    for rank, found in enumerate(started(recorded, size, tmp_path)):
        assert isinstance(found, Recorded), found
        assert found.after == 0
        assert set(found.measured) == {(0.0, 0.0)}  # on a CPU they are part of forward and backward
        assert (found.recording is None) == (rank == 2)
        if found.recording is None:
            continue
        timeline = found.recording.timeline
        require_whole_lane(timeline, found, size)
        require_order(timeline)
        text = str(found.recording)
        assert f"\n{COLLECTIVES} " in text
        assert "r gradients reduce-scattered  a weights all-gathered" in text
        saved = found.recording.save(tmp_path / "steps.json")
        check_trace(saved.read_text(), len(timeline.lanes))
        assert bars_of(read_trace(saved)[0]) == bars_of(rounded(timeline))
        kinds = {TaskKind.REDUCE_SCATTER, TaskKind.ALL_GATHER}
        events = [event for event in json.loads(saved.read_text())["traceEvents"] if event.get("cat") in kinds]
        assert [(event["name"], event["args"]["unit"], event["args"]["bytes"]) for event in events] == [
            (bar.label, timeline.unit_names[bar.unit], bar.nbytes) for bar in bars_of(timeline)]
