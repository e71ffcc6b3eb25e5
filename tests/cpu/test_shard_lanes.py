"""Gathers of sharded weights as recordings, planning and explanations see them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.explain.timeline.recording import Recording
from hytrain_fx.explain.timeline.span import COLLECTIVES, FETCHED
from hytrain_fx.explain.timeline.timeline import read_trace
from hytrain_fx.ir.task_graph import GATHERS, TaskKind
from hytrain_fx.session.session import Session
from hytrain_fx.weights.fetched_units import NAN_VARIABLE

from .rank_loops import compiled, net, started, tokens_of
from .test_rank_timeline import shards_bytes

STEPS = 2


@dataclass(frozen=True)
class Seen:
    """What one rank has seen of steps in a recording.

    reads   of the forward graph, then of the backward's: in order each unit and the bytes of its
            sharded weights
    kept    records that were kept after the block
    """

    recording: Recording
    reads: Sequence[Sequence[tuple[int, int]]]
    kept: int


def reads_of(session: Session, graph: int, size: int) -> list[tuple[int, int]]:
    """Each unit that a graph reads, in the order of its text, with the bytes of a gather."""
    table, found = session.table, dict[int, int]()
    for rows, _ in session.graphs._fetches[graph]:
        for row in (row for row in rows if row in session.states.streamed):
            unit = session.nodes.unit_of[row]
            found[unit] = found.get(unit, 0) + shards_bytes((tuple(table.parameters[row].shape),), size)
    return list(found.items())


def steps(model: Any, optimizer: Any, rank: int, numbers: Sequence[int]) -> None:
    for number in numbers:
        model(tokens_of(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()


def seen(rank: int, size: int) -> Seen:
    """A model with sharded weights whose states are on the host: some steps, some in a block."""
    os.environ[NAN_VARIABLE] = "1"
    model: Any = net(rank)
    optimizer = compiled(model, k=0, warmup_steps=3, weights="sharded")
    session = session_of(model)
    steps(model, optimizer, rank, range(6))
    with hytrain_fx.record(model) as recording:
        steps(model, optimizer, rank, range(6, 6 + STEPS))
    steps(model, optimizer, rank, [9])
    assert session.ranks is not None
    found = Seen(recording, [reads_of(session, graph.index, size) for graph in session.capture.graphs], len(session.ranks.times.take()))
    hytrain_fx.close(model)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """What two ranks have seen, for all tests."""
    found = started(seen, 2, tmp_path_factory.mktemp("ranks"))
    assert all(isinstance(of, Seen) for of in found), found
    return found


def test_each_gather_has_a_record(ranks: Sequence[Seen], tmp_path: Path) -> None:
    """In the order of the graphs, forward and backward, with its bytes, on the lane of fetches.

    None overlaps another, nor a collective; gradients stay on the lane of collectives.
    """
    for found in ranks:
        timeline = found.recording.timeline
        bars, others = timeline.lanes[FETCHED], timeline.lanes[COLLECTIVES]
        forward, backward = found.reads
        assert len(forward) == 5
        kinds = zip(reversed(GATHERS), (forward, backward), strict=True)
        of_step = [(kind, unit, nbytes) for kind, reads in kinds for unit, nbytes in reads]
        assert [(bar.kind, bar.unit, bar.nbytes) for bar in bars] == STEPS * of_step
        assert {bar.kind for bar in others} == {TaskKind.REDUCE_SCATTER}
        both = sorted((*bars, *others), key=lambda bar: bar.begin_us)
        assert all(bar.begin_us < bar.end_us <= after.begin_us for bar, after in itertools.pairwise(both))
        assert found.kept == 0
        text = str(found.recording)
        assert "A weights gathered for the forward" in text
        assert "C weights gathered for the backward" in text
        saved = found.recording.save(tmp_path / "steps.json")
        assert list(read_trace(saved)[0].lanes) == list(timeline.lanes)
