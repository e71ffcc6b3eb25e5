"""Whole training steps under plans that place each parameter on its own.

It is on the CPU, on the device or streamed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hytrain_fx.ir.plan import Placement, Plan, PlanRow, leading_device_units
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.session.session import Session

from .loops import Twins, gpt_in, plain_loop
from .models import Batches

PLACES = list(Placement)


def plan_of(session: Session, places: Sequence[Placement]) -> Plan:
    """A plan that places the parameters of the units, in order, as `places` repeated says."""
    rows, number = [], 0
    # What another rank updates counts as one element, as in planning.
    numels = {name: max(home.numel(), 1) for name, home in zip(session.table.names, session.table.homes, strict=True)}
    units = session.planning.units()
    for unit in units:
        at = 0
        for numel in map(numels.__getitem__, unit.param_names):
            rows.append(PlanRow(unit.index, unit.name, at, at + numel, places[number % len(places)], "test"))
            at, number = at + numel, number + 1
    plan = Plan(tuple(rows), 0, "test")
    return Plan(plan.rows, leading_device_units(plan, units), "test")


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = Twins(gpt_in(request.param), workers=2)
    yield made
    made.close()


@pytest.mark.sample(1)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    plans=st.lists(st.lists(st.sampled_from(PLACES), min_size=1, max_size=5), min_size=1, max_size=4),
    delays=st.dictionaries(st.sampled_from(list(Stage)), st.integers(0, 2000), max_size=2),
)
def test_no_sequence_of_placements_changes_a_bit(twins: Twins, plans: list[list[Placement]], delays: dict[Stage, int]) -> None:
    """Each step under another plan, with slow stages: losses and weights are the reference's.

    States move among three places.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for places in plans:
            if model is twins.ours:
                twins.session.place(plan_of(twins.session, places))
            losses += plain_loop(2)(model, optimizer, batches)
        return losses

    twins.agree(loop, delays)


def test_optimizer_state_of_streamed_rows_is_at_rest_when_read(twins: Twins) -> None:
    """state_dict() right after step() has this step's moments, however slowly they come home."""
    places = []
    for place in (Placement.CPU, Placement.STREAM):
        twins.restart()
        twins.session.place(plan_of(twins.session, [place]))
        twins.session.engine.set_delay(Stage.STREAM_OUT, 20_000)
        plain_loop(2)(twins.ours, twins.optimizer, twins.batches)
        places.append({key: {name: torch.as_tensor(value).clone() for name, value in state.items()}
                       for key, state in twins.optimizer.state_dict()["state"].items()})
        twins.session.engine.set_delay(Stage.STREAM_OUT, 0)
    assert places[0].keys() == places[1].keys()
    for key, state in places[0].items():
        for name, value in state.items():
            assert torch.equal(value, places[1][key][name]), (key, name)


def test_states_may_move_between_a_forward_and_its_backward(twins: Twins) -> None:
    """Moving writes no weight: a backward whose forward ran before the move has the same bits.

    They are the plain loop's.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = plain_loop(2)(model, optimizer, batches)
        for place in (Placement.GPU, Placement.CPU, Placement.STREAM, Placement.GPU):
            early = model(*batches[0])
            if model is twins.ours:
                twins.session.place(plan_of(twins.session, [place]))
            early.backward()
            losses += plain_loop(1)(model, optimizer, batches)
        return losses

    twins.agree(loop)


def test_streamed_rows_need_no_slot(twins: Twins) -> None:
    """12 bytes a parameter on the host, and moving back brings the slot again."""
    session = twins.session
    twins.restart()
    session.place(plan_of(session, [Placement.STREAM]))
    assert all(session.states[row].slot is None for row in range(len(session.table)))
    session.place(plan_of(session, [Placement.CPU, Placement.STREAM]))
    slots = [session.states[row].slot is not None for row in range(len(session.table))]
    assert any(slots)
    assert slots == [place is Placement.CPU for place in session.states.placement.values()]
