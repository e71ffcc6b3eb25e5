"""Gathers of sharded weights as recordings, planning and explanations see them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.cost_model.fetch_depth import FetchDepth
from hytrain_fx.cost_model.gathers import collective_order, gathers
from hytrain_fx.explain.timeline.recording import Recording
from hytrain_fx.explain.timeline.span import COLLECTIVES, FETCHED
from hytrain_fx.explain.timeline.timeline import read_trace
from hytrain_fx.ir.limits import UNITS_AHEAD
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.task_graph import FETCHES, GATHERS, TaskId, TaskKind
from hytrain_fx.session.session import Session
from hytrain_fx.weights.fetched_units import NAN_VARIABLE

from .loops import assert_same, weights
from .rank_loops import compiled, net, started, tokens_of
from .test_rank_timeline import shards_bytes

STEPS = 2
WISHES = ((0, 4, 3), (1, 3, 3))
"""Units ahead that each of two ranks wishes for, step by step."""


@dataclass(frozen=True)
class Seen:
    """What one rank has seen of steps in a recording, and of those after it.

    reads     of the forward graph, then of the backward's: in order each unit and the bytes of its
              sharded weights
    kept      records that were kept after the block
    profile   of steps before it
    details   what `explain` says
    ahead     units brought ahead, and bytes of slots, after steps with each of the wishes
    weights   at the end
    """

    recording: Recording
    reads: Sequence[Sequence[tuple[int, int]]]
    kept: int
    profile: Profile
    predicted: dict[str, float]
    details: str
    svg: str
    ahead: Sequence[tuple[int, int]]
    weights: Any


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


def seen(of: str, rank: int, size: int) -> Seen:
    """A model with sharded weights whose states are on the host: some steps, some in a block."""
    model: Any = net(rank)
    optimizer = compiled(model, k=0, warmup_steps=3, weights=of)
    session = session_of(model)
    steps(model, optimizer, rank, range(6))
    with hytrain_fx.record(model) as recording:
        steps(model, optimizer, rank, range(6, 6 + STEPS))
    steps(model, optimizer, rank, [9])
    assert session.ranks is not None
    kept, explained = len(session.ranks.times.take()), hytrain_fx.explain(model)
    assert explained.profile is not None
    ahead = []
    for number, wish in enumerate(WISHES[rank]):
        session.eager.streamed.follow(FetchDepth(wish, 0.0, 0.0, 0, None, False, True))
        steps(model, optimizer, rank, [10 + number])
        ahead.append((session.nodes.fetched.ahead, session.nodes.fetched.slot_bytes))
    found = Seen(recording, [reads_of(session, graph.index, size) for graph in session.capture.graphs], kept, explained.profile,
                 explained.plan.predicted, explained.details(), hytrain_fx.inspect(model).to_svg(), ahead, weights(model))
    hytrain_fx.close(model)
    return found


def all_seen(rank: int, size: int) -> dict[str, Any]:
    """With shards on the device and on the host; the weights of the same steps with whole ones."""
    os.environ[NAN_VARIABLE] = "1"
    found = {of: seen(of, rank, size) for of in ("sharded", "sharded_host")}
    model: Any = net(rank)
    steps(model, compiled(model, k=0), rank, [*range(6 + STEPS), 9, *range(10, 10 + len(WISHES[rank]))])
    return {**found, "resident": weights(model)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks have seen, for all tests."""
    found = started(all_seen, 2, tmp_path_factory.mktemp("ranks"))
    assert all(isinstance(of, dict) for of in found), found
    return found


def test_each_gather_has_a_record(ranks: Sequence[dict[str, Any]], tmp_path: Path) -> None:
    """In the order of the graphs, forward and backward, with its bytes, on the lane of fetches.

    None overlaps another, nor a collective; gradients stay on the lane of collectives.
    """
    for found in (of["sharded"] for of in ranks):
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


def test_a_recorded_step_has_the_order_that_is_predicted(ranks: Sequence[dict[str, Any]]) -> None:
    """Of gathers and gradients, from the begin of a backward to the end of the next forward.

    No backward reads the embedding, and no graph the last unit. The head's gradient is made before
    its weight is read, which the model does not know: it is left out.
    """
    for found in (of["sharded"] for of in ranks):
        lanes = found.recording.timeline.lanes
        bars = sorted((*lanes[FETCHED], *lanes[COLLECTIVES]), key=lambda bar: bar.begin_us)
        *units, head, unused = found.profile.units
        assert (head.name, unused.name) == ("head", "side")
        early = TaskId(TaskKind.REDUCE_SCATTER, head.index)
        recorded = [task for bar in bars if (task := TaskId(TaskKind(bar.kind), bar.unit)) != early][len(found.reads[0]) :]
        profile = replace(found.profile, node_ranks=2, units=(*units, head, replace(unused, gathered_params=0)))
        order = collective_order(profile, gathers(profile, UNITS_AHEAD), UNITS_AHEAD)
        predicted = [task for task in order if task in recorded]
        assert len(predicted) == (len(recorded) + len(found.reads[0])) / STEPS
        assert recorded[: len(predicted)] == predicted


def test_copies_of_shards_from_the_host_have_a_record(ranks: Sequence[dict[str, Any]]) -> None:
    """One before each gather, of this rank's part of its bytes, on the same lane."""
    for found in (of["sharded_host"] for of in ranks):
        bars = found.recording.timeline.lanes[FETCHED]
        fetch_of = dict(zip(GATHERS, FETCHES, strict=True))
        assert len(bars) == 2 * STEPS * sum(map(len, found.reads))
        for copy, gather in zip(bars[::2], bars[1::2], strict=True):
            assert (copy.kind, copy.unit, 2 * copy.nbytes) == (fetch_of[gather.kind], gather.unit, gather.nbytes)
            assert copy.end_us <= gather.begin_us
        assert "F weights fetched for the forward" in str(found.recording)


@pytest.mark.parametrize("of", ["sharded", "sharded_host"])
def test_gathers_are_measured_predicted_and_explained(ranks: Sequence[dict[str, Any]], of: str) -> None:
    """A profile has a time for each unit, of this rank's shards a fetch where they are on the host.

    The step's terms name them, and the picture of the step's graph.
    """
    for found in (rank[of] for rank in ranks):
        profile: Profile = found.profile
        *gathered, unused = [u for u in profile.units if u.gathered_params]
        assert unused.name == "side"
        assert [u.gathered_bytes for u in gathered] == [nbytes for _, nbytes in found.reads[0]]
        assert all(u.gather_us > 0 for u in gathered)
        on_host = [u.gathered_params // 2 if of == "sharded_host" else 0 for u in gathered]
        assert [u.fetched_params for u in gathered] == on_host
        assert all((u.fetch_us > 0) == (u.fetched_params > 0) for u in gathered)
        assert found.predicted["gather_us"] > 0
        assert (found.predicted["fetch_us"] > 0) == (of == "sharded_host")
        assert found.predicted["weight_slots_bytes"] == slots_bytes(profile)
        assert "weights gathered" in found.details
        assert "gather forward" in found.svg
        assert ("fetch forward" in found.svg) == (of == "sharded_host")


def slots_bytes(profile: Profile) -> int:
    """Of the slots with as many units ahead as there are at first."""
    sizes = [u.gathered_bytes for u in profile.units if u.gathered_params]
    return sum(size * min(sizes.count(size), UNITS_AHEAD + 1) for size in set(sizes))


@pytest.mark.parametrize("of", ["sharded", "sharded_host"])
def test_ranks_bring_as_many_units_ahead_as_the_fewest_that_one_wishes(ranks: Sequence[dict[str, Any]], of: str) -> None:
    """Whatever each has solved. No bit depends on it; fewer take fewer slots."""
    first, second = (rank[of].ahead for rank in ranks)
    assert first == second
    assert [ahead for ahead, _ in first] == [0, 3, 3]
    assert first[0][1] < first[1][1]
    for rank in ranks:
        assert_same(rank[of].weights, rank["resident"])
