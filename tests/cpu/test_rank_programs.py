"""Drawn training loops of several ranks have the bits of gradients averaged by hand."""

from __future__ import annotations

import pytest

from .program_models import Pair, Setup
from .programs import Differs, Program, search, text
from .rank_programs import RankWorkshop, drawn_rank_setup

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and ours, on odd orders of calls

SETUP = Setup(width=20, ranks=2)


@pytest.mark.sample(0)
@pytest.mark.parametrize("number", [6])
def test_drawn_programs_of_two_ranks_have_the_bits_of_averaging_by_hand(number: int) -> None:
    """Every loss, norm, weight, gradient and state, with other plans and delays on each rank."""
    found = search(number, 15, drawn_rank_setup(number), RankWorkshop, shrink_s=0.0)
    assert not found.failures, f"{found.failures[0].error}\n{found.failures[0].program}"
    assert found.programs == 15


def _nothing_gathered(pair: Pair) -> None:
    """The other ranks' new weights never come."""
    gathered = pair.ours.session.nodes.gathered
    assert gathered is not None
    gathered.of = lambda parameters: None  # type: ignore[method-assign]


@pytest.mark.sample(0)
def test_a_planted_defect_is_found_on_ranks() -> None:
    """The generator's own comparison can fail."""
    workshop = RankWorkshop(_nothing_gathered)
    with pytest.raises(Differs, match="rank 0"):
        workshop.check(Program(SETUP, calls=(("train", 0), ("train", 1))))


@pytest.mark.sample(0)
@pytest.mark.parametrize("call", [("one rank ends", 5), ("one rank stops", 2)], ids=str)
def test_a_rank_that_leaves_is_told_to_the_others(call: tuple[str, int]) -> None:
    """They end with RankError, whether its process ends in step() or stops after a forward."""
    workshop = RankWorkshop()
    workshop.check(Program(SETUP, calls=(("train", 0), call, ("train", 1))))
    assert workshop.counts[call[0]] == 1


def test_a_program_of_ranks_prints_as_python_that_makes_it() -> None:
    """A failure can be pasted into a test."""
    program = Program(SETUP, calls=(("slow rank", 3),))
    assert eval(text(program), {"Program": Program, "Setup": Setup}) == program
