"""Drawn training loops have the plain loop's bits, and the generator finds planted defects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from . import program_models
from .program_calls import KINDS
from .program_models import Pair, Setup
from .programs import Program, Workshop, check, drawn_setup, search, text

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and ours, on odd orders of calls

SEEDS = range(1, 9)  # 25 programs each
ORDINARY = ("train", "backward", "step", "zero_grad", "evaluate", "clip_grad_norm_", "read weight", "save", "state_dicts", "place")
PLANTED_IN = Setup(("linear", "linear"), options="k=0", width=128)  # updates take a while


@pytest.mark.sample(0)
@pytest.mark.parametrize("number", SEEDS)
def test_drawn_programs_have_the_plain_loops_bits(number: int) -> None:
    """Every loss, weight, gradient and state is the plain loop's, with delays.

    No thread is left after close.
    """
    found = search(number)
    assert not found.failures, f"{found.failures[0].error}\n{found.failures[0].program}"
    assert found.programs == 25


def test_the_seeds_draw_every_kind_of_unit_dtype_and_option() -> None:
    """The programs that CI runs are not from one corner of what can be drawn."""
    setups = [drawn_setup(number) for number in SEEDS]
    assert {unit for setup in setups for unit in setup.units} == set(program_models.UNITS)
    assert {setup.dtype for setup in setups} == set(program_models.DTYPES)
    assert len({setup.options for setup in setups}) >= 5
    assert {setup.tied for setup in setups} == {True, False}


def _no_wait(pair: Pair) -> None:
    """The forward does not wait for new weights."""
    pair.ours.session.engine.wait = lambda rows: None  # type: ignore[method-assign]


def _no_settle(pair: Pair) -> None:
    """Eager code reads a weight while it is on its way."""
    pair.ours.session.engine.settle = lambda rows: None  # type: ignore[method-assign]


def _no_drain(pair: Pair) -> None:
    """Checkpoints are read while states are updated."""
    pair.ours.session.engine.drain = lambda rows: None  # type: ignore[method-assign]


def _no_discard(pair: Pair) -> None:
    """zero_grad leaves gradients in their slots."""
    pair.ours.session.engine.discard = lambda rows: None  # type: ignore[method-assign]


def _late_rates(pair: Pair) -> None:
    """A step counts twice for the bias correction."""
    builder: Any = pair.ours.session.builder
    committed = builder.committed

    def twice(items: Any) -> None:
        committed(items)
        committed(items)

    builder.committed = twice


@pytest.mark.sample(1)
@pytest.mark.parametrize("plant", [_no_wait, _no_settle, _no_drain, _no_discard, _late_rates])
def test_a_planted_defect_is_found(plant: Callable[[Pair], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found within 150 programs of the calls that most loops are made of."""
    for name, kind in KINDS.items():
        if name not in ORDINARY:
            monkeypatch.setitem(KINDS, name, replace(kind, weight=0))
    assert search(1, 150, PLANTED_IN, partial(Workshop, plant), shrink_s=0.0).failures


@pytest.mark.sample(0)
def test_without_a_planted_defect_nothing_is_found() -> None:
    """The first 40 programs of the test above."""
    assert not search(1, 40, PLANTED_IN).failures


def test_a_program_prints_as_python_that_makes_it() -> None:
    """A failure can be pasted into a test."""
    program = Program(Setup(("break", "conv"), True), True, (("H2D", 200),), tuple((name, 3) for name in KINDS))
    assert eval(text(program), {"Program": Program, "Setup": Setup}) == program


def test_a_program_can_be_checked_alone() -> None:
    """What a regression test calls."""
    check(Program(Setup(), calls=(("train", 0), ("train", 1))))
