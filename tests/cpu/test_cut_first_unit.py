"""A tied embedding that the solver cuts between CPU and streaming keeps the plain loop's bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hytrain_fx
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.planner import plan
from hytrain_fx.explain.plan.step_memory import step_memory
from hytrain_fx.ir.limits import CHUNK_PARAMS
from hytrain_fx.ir.plan import Piece, PlacedPiece, Placement, Plan
from hytrain_fx.ir.profile import Profile, UnitProfile
from hytrain_fx.ir.task_graph import Unit
from hytrain_fx.planning.model_units import StateSizes

from .loops import Twins, plain_loop
from .models import Batches
from .test_cut_parameters import accumulated, clipped, read_and_stepped_again, unscaled, written

WIDTH, VOCABULARY = 32, 2_000
GRAIN = 4_096  # of cuts and slots here, instead of chunks of 4 M parameters


class Tied(nn.Module):
    """Most of it is one embedding, which the head reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.h:
            x = x + torch.tanh(block(x))
        return F.cross_entropy(F.linear(x[:, :-1], self.wte.weight).flatten(0, 1).float(), tokens[:, 1:].flatten())


def tied() -> tuple[nn.Module, Batches]:
    return Tied().to(torch.bfloat16), [(torch.randint(VOCABULARY, (2, 9)),) for _ in range(3)]


@pytest.fixture(scope="module")
def twins() -> Iterator[Twins]:
    made = Twins(tied, workers=2)
    plain_loop(1)(made.ours, made.optimizer, made.batches)  # the forward's order is known then
    yield made
    made.close()


def profile_of(units: tuple[Unit, ...]) -> Profile:
    """These units on a machine whose CPU updates 4 G parameters a second, by a link of 44 GB/s."""
    def of(u: UnitProfile | Unit) -> UnitProfile:
        us = u.params / 44e3
        return UnitProfile(u.index, u.name, u.params, u.grad_bytes, 2.0, 4.0, u.params / 4e3, u.params / 50e3, 2 * us, 2 * us, 10 * us,
                           10 * us, u.param_numels, u.traffic, grain_params=GRAIN)

    return Profile(tuple(map(of, units)), device="", host="")


def solved(twins: Twins) -> Plan:
    """The plan for this model with every state on the host."""
    return plan(profile_of(twins.session.planning.units()), stream="auto", budget_bytes=0, budget_counts_streamed=False,
                discipline=Discipline(chunk_params=GRAIN, staging_params=GRAIN))


def put_in_force(twins: Twins, new: Plan) -> None:
    with twins.session.planning.putting_in_force(new):
        twins.session.place(new)


def test_the_embedding_is_cut_at_a_chunk(twins: Twins) -> None:
    """Its first chunks are streamed, the CPU updates the rest; `explain` and `inspect` say so.

    A model that runs is cut at the engine's chunks.
    """
    session = twins.session
    assert all(of.grain_params == CHUNK_PARAMS for of in session.planning.units())
    put_in_force(twins, solved(twins))
    row = session.table.names.index("wte.weight")
    streamed, by_cpu = (of for of in session.states.placed if of.piece.parameter == row)
    at = streamed.piece.end
    assert streamed == PlacedPiece(Piece(row, 0, at), Placement.STREAM)
    assert by_cpu == PlacedPiece(Piece(row, at, VOCABULARY * WIDTH), Placement.CPU)
    assert 0 < at == at // GRAIN * GRAIN
    shown = str(hytrain_fx.explain(twins.ours))
    assert f"{1 - at / by_cpu.piece.end:.0%} CPU + {at / by_cpu.piece.end:.0%} streamed" in shown
    assert "cut: the device updates" in shown
    assert f"{at / by_cpu.piece.end:.0%} stream + {1 - at / by_cpu.piece.end:.0%} cpu" in hytrain_fx.inspect(twins.ours).to_text()


def test_what_a_cut_moves_and_keeps_is_counted(twins: Twins) -> None:
    """A cut copies the states of its parameter once; another place for one of its pieces nothing.

    The whole gradient stays on the device until the step, in the bars of `explain` too.
    """
    session, sizes = twins.session, StateSizes(twins.session.table, twins.session.states)
    row = session.table.names.index("wte.weight")
    cut = session.planning.units.pieces_of(solved(twins))
    whole = tuple(PlacedPiece(Piece(number, 0, of.numel()), Placement.CPU) for number, of in enumerate(session.table.homes))
    by_cpu = tuple(replace(of, placement=Placement.CPU) for of in cut)
    assert sizes.moved_bytes(whole, cut) == sizes.moved_bytes(cut, whole) == session.states.form_of(whole[row].piece).slab_bytes
    assert sizes.moved_bytes(cut, by_cpu) == sizes.moved_bytes(whole, whole) == 0
    put_in_force(twins, solved(twins))
    plain_loop(1)(twins.ours, twins.optimizer, twins.batches)
    assert step_memory(hytrain_fx.explain(twins.ours))[-1].gradients_bytes == session.table.homes[row].nbytes


@pytest.mark.parametrize("loop", [plain_loop(4), clipped, accumulated, read_and_stepped_again, written, unscaled],
                         ids=lambda loop: loop.__qualname__.split(".")[0])
def test_training_with_it_has_the_plain_loops_bits(twins: Twins, loop: Any) -> None:
    """Losses and weights are the reference's, whatever the loop does with gradients and weights.

    The embedding is whole in the first step, cut in the next ones, and whole again.
    """
    def moved(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        ours, losses = model is twins.ours, list(plain_loop(1)(model, optimizer, batches))
        if ours:
            put_in_force(twins, solved(twins))
            assert twins.session.states.pieces.cut
        losses += loop(model, optimizer, batches)
        if ours:
            put_in_force(twins, plan(profile_of(twins.session.planning.units()), k=0))
            assert not twins.session.states.pieces.cut
        return losses + list(plain_loop(1)(model, optimizer, batches))

    twins.agree(moved)
