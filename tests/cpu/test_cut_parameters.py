"""Parameters that are cut train with the plain loop's bits.

Pieces of one tensor are updated by the CPU, on the device and streamed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, cycle, pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import EngineError
from hytrain_fx.ir.plan import CUT_ALIGN_PARAMS, Piece, PlacedPiece, Placement, Plan, PlanRow, leading_device_units, pieces_of_unit
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.runtime.states import unit_slabs
from hytrain_fx.runtime.states.slabs import pin_slabs
from hytrain_fx.session.session import Session

from .loops import Twins, compare, gpt_in, plain_loop
from .models import Batches, gpt

PLACES = list(Placement)
CUTS = st.lists(st.integers(1, 40), min_size=1, max_size=4)


def cut_plan(session: Session, steps: Sequence[int], places: Sequence[Placement]) -> Plan:
    """A plan whose shares end after multiples of 64 elements, anywhere in a unit.

    The multiples repeat.
    """
    rows: list[PlanRow] = []
    units, place, step = session.planning.units(), cycle(places), cycle(steps)
    for unit in units:
        ends = [0]
        while ends[-1] < unit.params:
            ends.append(min(ends[-1] + next(step) * CUT_ALIGN_PARAMS, unit.params))
        rows += [PlanRow(unit.index, unit.name, begin, end, next(place), "test") for begin, end in pairwise(ends)]
    plan = Plan(tuple(rows), 0, "test")
    return Plan(plan.rows, leading_device_units(plan, units), "test")


def is_cut(session: Session) -> bool:
    """Whether a parameter is cut into pieces of different placements."""
    pieces, placement = session.states.pieces, session.states.placement
    return any(len({placement[row] for row in rows}) > 1 for rows in pieces.cut.values())


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = Twins(gpt_in(request.param), workers=2)
    yield made
    made.close()


@pytest.mark.sample(2)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    plans=st.lists(st.tuples(CUTS, st.lists(st.sampled_from(PLACES), min_size=2, max_size=5)), min_size=1, max_size=4),
    delays=st.dictionaries(st.sampled_from(list(Stage)), st.integers(0, 2000), max_size=2),
)
def test_no_sequence_of_cuts_changes_a_bit(
    twins: Twins, plans: list[tuple[list[int], list[Placement]]], delays: dict[Stage, int]
) -> None:
    """Losses and weights are the reference's, though each step has another cut.

    States move and stages are slow meanwhile.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for steps, places in plans:
            if model is twins.ours:
                twins.session.place(cut_plan(twins.session, steps, places))
            losses += plain_loop(2)(model, optimizer, batches)
        return losses

    twins.agree(loop, delays)


def clipped(model: Any, optimizer: Any, batches: Batches) -> list[float]:
    """Gradients are scaled after the backward: pieces that went to the host go again."""
    losses = []
    for step in range(4):
        loss = model(*batches[step % len(batches)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def accumulated(model: Any, optimizer: Any, batches: Batches) -> list[float]:
    """Two backwards a step."""
    losses = []
    for _ in range(3):
        for batch in batches[:2]:
            loss = model(*batch)
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def read_and_stepped_again(model: Any, optimizer: Any, batches: Batches) -> list[float]:
    """Read gradients after step(), which then takes them again; zero_grad keeps them as zeros."""
    found = []
    for _ in range(2):
        model(*batches[0]).backward()
        optimizer.step()
        found += [float(p.grad.float().norm()) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return found


def written(model: Any, optimizer: Any, batches: Batches) -> list[float]:
    """Weights are read and written by hand between steps."""
    losses = []
    for step in range(3):
        losses += plain_loop(1)(model, optimizer, batches)
        with torch.no_grad():
            for p in model.parameters():
                p.view(-1)[step::7].mul_(1.5)
        losses.append(sum(float(p.detach().float().sum()) for p in model.parameters()))
    return losses


def unscaled(model: Any, optimizer: Any, batches: Batches) -> list[float]:
    """Write to gradients without a version count, as unscaling and `.grad.data` do."""
    losses = []
    for step in range(3):
        loss = model(*batches[step % len(batches)])
        loss.backward()
        for p in model.parameters():
            p.grad.data.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def given_by_hand(model: Any, optimizer: Any, batches: Batches) -> list[float]:
    """Gradients come from user code."""
    losses = []
    for _ in range(2):
        loss = model(*batches[0])
        parameters = list(model.parameters())
        for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = grad * 2
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


LOOPS = [clipped, accumulated, read_and_stepped_again, written, unscaled, given_by_hand]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops_keep_their_bits(twins: Twins, loop: Any) -> None:
    """Bits stay the same whatever a loop does with weights and gradients of cut parameters."""

    def placed(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        if model is twins.ours:
            twins.session.place(cut_plan(twins.session, [3, 5], PLACES))
            assert is_cut(twins.session)
        return list(loop(model, optimizer, batches)) + list(plain_loop(1)(model, optimizer, batches))

    twins.agree(placed)


def test_states_of_cut_parameters_are_saved_and_loaded_as_whole_ones(twins: Twins) -> None:
    """A checkpoint has the same bits wherever pieces rest, and loads under another cut."""
    session, saved = twins.session, []
    for plan in (cut_plan(session, [1000], [Placement.CPU]), cut_plan(session, [3, 5], PLACES), cut_plan(session, [2], PLACES[::-1])):
        twins.restart()
        session.place(plan)
        plain_loop(2)(twins.ours, twins.optimizer, twins.batches)
        state = twins.optimizer.state_dict()["state"]
        saved.append({(key, name): torch.as_tensor(value).clone() for key, of in state.items() for name, value in of.items()})
    for other in saved[1:]:
        assert other.keys() == saved[0].keys()
        assert all(torch.equal(value, saved[0][key]) for key, value in other.items())
    checkpoint = twins.optimizer.state_dict()
    weights = {name: value.clone() for name, value in twins.ours.state_dict().items()}
    losses = plain_loop(2)(twins.ours, twins.optimizer, twins.batches)
    session.place(cut_plan(session, [4, 1, 9], PLACES))
    twins.ours.load_state_dict(weights)
    twins.optimizer.load_state_dict(checkpoint)
    assert plain_loop(2)(twins.ours, twins.optimizer, twins.batches) == losses


def test_a_cut_that_comes_back_finds_its_rows(twins: Twins) -> None:
    """Going to and fro between two cuts adds no rows to the engine.

    Whole parameters have the rows they began with.
    """
    session = twins.session
    twins.restart()
    plans = [cut_plan(session, [3], PLACES), cut_plan(session, [5], PLACES), cut_plan(session, [1000], [Placement.CPU])]
    for plan in plans:
        session.place(plan)
    rows = session.engine.rows
    for plan in plans * 2:
        session.place(plan)
    assert session.engine.rows == rows
    assert session.states.pieces.cut == {}
    assert sorted(session.states.placement) == list(range(len(session.table)))


def test_a_gradient_is_told_before_the_update_in_its_place(twins: Twins) -> None:
    """A cut parameter's `.grad` is a tensor on the device.

    Pieces for the CPU have slots, others have none.
    """
    session = twins.session
    twins.restart()
    session.place(cut_plan(session, [3, 5], PLACES))
    twins.ours(*twins.batches[0]).backward()
    for row, pieces in session.states.pieces.cut.items():
        assert type(session.table.parameters[row].grad) is torch.Tensor
        for piece in pieces:
            assert (session.states[piece].slot is not None) == session.states.placement[piece].updates_on_cpu
    twins.optimizer.zero_grad()


@pytest.mark.parametrize("refused", [0, 1, 2, 5])
def test_a_cut_that_is_refused_memory_leaves_states_whole(twins: Twins, monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    """Where pinning fails in a move, parameters are wholly the old ones or wholly the new ones.

    Training has the same bits.
    """
    calls = count()

    def pin(*args: Any) -> None:
        if next(calls) == refused:
            raise EngineError("pinning was refused by this test")
        pin_slabs(*args)

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = list(plain_loop(2)(model, optimizer, batches))
        if model is twins.ours:
            # Not before the loop: the session's own plan may come in those two steps, and the move
            # from there pins less.
            twins.session.place(cut_plan(twins.session, [7], [Placement.CPU, Placement.GPU]))
            with monkeypatch.context() as patch:
                patch.setattr(unit_slabs, "pin_slabs", pin)
                with pytest.raises(EngineError, match="refused by this test"):
                    twins.session.place(cut_plan(twins.session, [3, 5], PLACES))
        return losses + list(plain_loop(2)(model, optimizer, batches))

    twins.agree(loop)


def test_memory_in_use_is_what_was_estimated(twins: Twins) -> None:
    """Memory in use is what was estimated for a cut plan, by tier and to the byte."""
    session = twins.session
    twins.restart()
    session.place(cut_plan(session, [3, 5], PLACES))
    memory = hytrain_fx.explain(twins.ours).memory
    assert memory.estimate is not None
    assert memory.host_bytes == memory.estimate.host_bytes
    assert memory.device_states_bytes == memory.estimate.device_states_bytes


def test_parameters_of_other_optimizers_are_whole() -> None:
    """If a plan cuts another optimizer's parameter, it goes whole where its first element goes."""
    torch._dynamo.reset()
    model, batches = gpt()
    model, optimizer = hytrain_fx.compile(model, torch.optim.Adagrad(model.parameters(), lr=1e-2))
    session = session_of(model)
    plain_loop(1)(model, optimizer, batches)
    session.place(cut_plan(session, [3, 5], [Placement.CPU, Placement.GPU]))
    assert not session.states.pieces.cut
    assert set(session.states.placement.values()) == {Placement.CPU, Placement.GPU}
    plain_loop(1)(model, optimizer, batches)
    hytrain_fx.close(model)


@pytest.mark.parametrize("engine", ["torch", "native"])
def test_every_engine_takes_pieces(engine: str) -> None:
    """Every engine takes pieces, with the reference's bits."""
    places = [Placement.CPU, Placement.GPU]

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = list(plain_loop(1)(model, optimizer, batches))
        if hasattr(optimizer, "session"):
            session_of(model).place(cut_plan(session_of(model), [3, 5], places))
            assert is_cut(session_of(model))
        return losses + list(plain_loop(2)(model, optimizer, batches))

    compare(gpt, loop, engine=engine, workers=1)


@given(
    numels=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 1999), max_size=5),
    places=st.permutations(PLACES),
    data=st.data(),
)
def test_pieces_tile_every_parameter(numels: list[int], cuts: list[int], places: list[Placement], data: st.DataObject) -> None:
    """Pieces are in order, begin at multiples of 64, and have neighbours in other places.

    A whole parameter is one piece, placed where its first element goes.
    """
    total = sum(numels)
    ends = sorted({0, total, *(cut for cut in cuts if cut < total)})
    rows = tuple(PlanRow(0, "u", begin, end, places[i % 3], "") for i, (begin, end) in enumerate(pairwise(ends)))
    whole = {i for i in range(len(numels)) if data.draw(st.booleans())}
    placed = pieces_of_unit(Plan(rows, 0, "test"), 0, list(enumerate(numels)), whole.__contains__)
    at = 0
    for number, numel in enumerate(numels):
        mine = [of for of in placed if of.piece.parameter == number]
        assert [of.piece.begin for of in mine[1:]] == [of.piece.end for of in mine[:-1]]
        assert (mine[0].piece.begin, mine[-1].piece.end) == (0, numel)
        assert all(of.piece.begin % CUT_ALIGN_PARAMS == 0 for of in mine)
        assert all(a.placement is not b.placement for a, b in pairwise(mine))
        if number in whole:
            first = next(row for row in rows if row.begin <= at < row.end)
            assert mine == [PlacedPiece(Piece(number, 0, numel), first.placement)]
        at += numel
