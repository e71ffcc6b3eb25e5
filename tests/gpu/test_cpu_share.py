"""The CPU trains a share of each batch beside a GPU: every bit is that of the same split by hand.

By hand the GPU's part goes through the model compiled by torch, the CPU's through a plain copy, and
the copy's gradients are added on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import Stage

from ..cpu.loops import Twins, assert_same, weights
from ..cpu.models import Batches
from ..cpu.share_loops import AfterBackward, ByHand, gpt_of_eight, in_parts, noted_fetches, nothing
from ..cpu.test_cpu_share import BY_CPU, clipped, read
from ..cpu.test_cut_parameters import cut_plan
from ..cpu.test_placements import PLACES, plan_of
from .feed_forward import deterministic

__all__ = ["deterministic"]  # the fixture, for this file too


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def twins(request: pytest.FixtureRequest, deterministic: None) -> Iterator[Twins]:
    def make() -> tuple[nn.Module, Batches]:
        model, batches = gpt_of_eight(request.param)()
        return model.cuda(), batches

    made = Twins(make, cpu_share=0.25, timeout_s=60.0)
    yield made
    made.close()


def test_a_share_has_the_bits_of_the_split_by_hand(twins: Twins) -> None:
    """States in each place and mixed, cut parameters, clipping, gradients that are read, delays.

    First the split by hand repeats its own bits.
    """
    by_hand, session = ByHand(BY_CPU), twins.session
    once = [(in_parts(by_hand, 3)(twins.plain, twins.restart()[0], twins.batches), weights(twins.plain)) for _ in range(2)]
    assert once[0][0] == once[1][0]
    assert_same(once[0][1], once[1][1])
    afters: list[AfterBackward] = [nothing, clipped, read]
    for places in [*([place] for place in PLACES), PLACES]:
        for after in afters:
            session.place(plan_of(session, places))
            twins.agree(in_parts(by_hand, 3, batches_a_step=2, after=after))
    session.place(cut_plan(session, [1, 2], PLACES))
    twins.agree(in_parts(by_hand, 3))
    session.place(plan_of(session, [Placement.CPU]))
    for stage in (Stage.D2H, Stage.CPU_UPDATE, Stage.H2D):
        twins.agree(in_parts(by_hand, 3), delays={stage: 1000})


def test_gradients_are_joined_on_the_host(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that the CPU updates no gradient comes back to the GPU."""
    fetched = noted_fetches(monkeypatch, twins.session.engine)
    twins.session.place(plan_of(twins.session, [Placement.CPU]))
    twins.agree(in_parts(ByHand(BY_CPU), 3), delays={Stage.D2H: 1000})
    assert fetched == []
