"""`host_memory` holds after every move too, whatever moved before and whatever is in use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.cost_model.budget import Budget
from hytrain_fx.errors import HostMemoryError
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.states import slabs, state_bytes
from hytrain_fx.session.session import Session
from hytrain_fx.torch_private.tensors import without_torch_function

from .loops import Twins, gpt_in, plain_loop
from .test_placements import PLACES, plan_of


class Backwards(nn.Module):
    """Its first layer in order of registration is the last of the forward, and the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for o, i in pairwise((56, 64, 48, 16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x.square().mean()


def in_use(session: Session) -> int:
    """Bytes of host memory that states have."""
    return sum(slab.nbytes for slab in session.states.slabs)


def trained(model: Any, optimizer: Any, steps: int = 3) -> list[torch.Tensor]:
    """The weights after some steps."""
    for step in range(steps):
        model(torch.randn(8, 16, generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_a_given_k_in_the_forwards_order_keeps_the_limit() -> None:
    """With k=1 the host has room for all but the unit registered first, which is the largest.

    The forward's first unit is the smallest. The others are too much together, though none is
    alone: states stay. The weights are those of a run without a limit.
    """
    found = []
    for limit in (None, 14 * (64 * 49 + 48 * 17) + 2000):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = Backwards().bfloat16()
        model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=0.05), k=1, host_memory=limit)
        session = session_of(model)
        torch.set_default_dtype(torch.bfloat16)
        try:
            found.append(trained(model, optimizer))
        finally:
            torch.set_default_dtype(torch.float32)
        assert limit is None or in_use(session) <= limit
        assert (session.states.placement[0] is Placement.GPU) == (limit is not None)
        hytrain_fx.close(model)
    assert all(map(torch.equal, *found))


@pytest.fixture
def twins() -> Iterator[Twins]:
    made = Twins(gpt_in(torch.bfloat16), workers=2)
    yield made
    made.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(plans=st.lists(st.lists(st.sampled_from(PLACES), min_size=1, max_size=5), min_size=1, max_size=4), room=st.floats(0.3, 1.1))
def test_no_move_takes_more_than_the_limit(twins: Twins, plans: list[list[Placement]], room: float) -> None:
    """What is in use is never above the limit, where it was not before."""
    session = twins.session
    session.place(plan_of(session, [Placement.GPU]))
    every = range(len(session.table))
    limit = int(room * session.states.host_bytes(every))
    for places in plans:
        wanted = session.planning.units.pieces_of(plan_of(session, places))
        before = in_use(session)
        with contextlib.suppress(HostMemoryError):
            session.states.move(wanted, limit)
            assert session.states.placed == wanted
        assert in_use(session) <= max(limit, before)


def test_units_get_slots_one_after_the_other_where_the_limit_is_near(twins: Twins) -> None:
    """All leave streaming under a limit that has room for them and for one unit's slots more."""
    session = twins.session
    session.place(plan_of(session, [Placement.CPU, Placement.STREAM]))
    before = in_use(session)
    wanted = session.planning.units.pieces_of(plan_of(session, [Placement.CPU]))
    needed = session.states.host_bytes(range(len(session.table)))
    slots = [sum(session.states.form_of(of.piece).slot_bytes for of in wanted if of.piece.parameter in unit.rows)
             for unit in session.planning.units._registered]
    limit = needed + max(slots)
    assert before < needed < limit
    session.states.move(wanted, limit)
    assert session.states.placed == wanted
    assert in_use(session) == needed


def test_slots_beside_states_count(twins: Twins) -> None:
    """States that are streamed leave no room for slots under a limit that they fill."""
    session = twins.session
    session.place(plan_of(session, [Placement.STREAM]))
    limit = in_use(session)
    with pytest.raises(HostMemoryError, match=rf"need {session.states.host_bytes(range(len(session.table)))} bytes, and host_memory "
                                              rf"allows {limit} bytes"):
        session.states.move(session.planning.units.pieces_of(plan_of(session, [Placement.CPU])), limit)
    assert in_use(session) == limit
    assert all(place is Placement.STREAM for place in session.states.placement.values())
    twins.agree(lambda model, optimizer, batches: plain_loop(2)(model, optimizer, batches))


def test_without_a_limit_a_move_that_the_host_cannot_hold_moves_nothing(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units could go there one after the other until the host is full, and had to go back."""
    session = twins.session
    session.place(plan_of(session, [Placement.GPU]))
    needed = session.states.host_bytes(range(len(session.table)))
    for module in (slabs, state_bytes):
        monkeypatch.setattr(module, "available_host_bytes", lambda: int(0.6 * needed) - in_use(session))
    monkeypatch.setattr(session.states, "_move_together", lambda *_: pytest.fail("rows have moved"))
    with pytest.raises(HostMemoryError, match=f"need {needed} bytes, and {int(0.6 * needed)} bytes are available on this host"):
        session.states.move(session.planning.units.pieces_of(plan_of(session, [Placement.CPU])), None)
    assert all(place is Placement.GPU for place in session.states.placement.values())


def test_a_cut_is_planned_only_where_its_move_fits(twins: Twins) -> None:
    """What plans count for a cut of a parameter on the host is what its move takes, but padding."""
    session = twins.session
    whole = plan_of(session, [Placement.CPU])
    session.place(whole)
    units = session.planning.units()
    first, *others = (row for row in whole.rows if row.unit == 0)
    part = replace(first, end=64, placement=Placement.GPU)
    cut = replace(whole, rows=(part, replace(first, begin=64), *others, *(row for row in whole.rows if row.unit)))
    of_units, limits = session.planning.solver._of_units(units), range(in_use(session), 2 * in_use(session), 8)
    least = next(limit for limit in limits if Budget(host_bytes=limit, of_units=of_units).holds_copies(units, whole, cut))
    wanted = session.planning.units.pieces_of(cut)
    assert len(wanted) == len(session.table) + 1
    with without_torch_function():  # as when a plan comes into force
        with pytest.raises(HostMemoryError, match="are in use"):
            session.states.move(wanted, least - 1000)
        session.states.move(wanted, least + 1000)
    assert session.states.placed == wanted
