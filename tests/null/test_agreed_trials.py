"""Several ranks try plans together: all that begin, begin and end at one step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.cost_model.planner import prefix_plan
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.planning.agreed_trials import AGREE_STEPS, Agreed, Told, to_tell
from hytrain_fx.planning.controller import Action, Decision, Event, State

from .controlled import Program
from .profiles import uniform

HOST_US, ALL_US, LONG_US = 150.0, 200.0, 400.0
TOLD = st.sets(st.sampled_from(list(Told))).map(lambda flags: reduce(or_, flags, Told.NOTHING))


@given(st.lists(TOLD, min_size=1, max_size=4), st.randoms())
def test_all_ranks_come_to_the_same(told: list[Told], order: object) -> None:
    """Whoever tells it. A trial begins where each rank wants it or has it, and none runs."""
    found = Agreed.by(told)
    assert found == Agreed.by(list(reversed(told)))
    trying = [of for of in told if of & Told.TRIES]
    if found.begins:
        assert not trying
        has = Told.HAS_STREAMED if found.begins is Told.WANTS_STREAMED else Told.HAS_ON_DEVICE
        assert any(of & found.begins for of in told)
        assert all(of & (found.begins | has) for of in told)
    if found.paid is not None:
        assert trying
        assert all(of & (Told.PAID | Told.VAIN) for of in trying)
        assert found.paid == all(of & Told.PAID for of in trying)


def together(ranks: Sequence[Program], steps_us: Sequence[float], all_us: Sequence[float | None], steps: int) -> list[list[Decision]]:
    """What each rank's controller decides, when they tell each other at every eighth step."""
    made: list[list[Decision]] = [[] for _ in ranks]
    for _ in range(steps):
        told = [rank.controller.told for rank in ranks]
        agreed = Agreed.by(told) if (ranks[0].done + 1) % AGREE_STEPS == 0 else Agreed()
        for of, rank, us, all_on_device_us in zip(made, ranks, steps_us, all_us, strict=True):
            rests = rank.controller.state is State.TRYING
            of.append(rank.step(us, all_us=None if rests else all_on_device_us, predicted_us=HOST_US, agreed=agreed))
    return made


def until_tried(all_us: Sequence[float | None]) -> tuple[list[Program], bool]:
    """Two ranks whose steps took long, and whether both begin a trial at one step within 200.

    One measures fewer steps than the other, so it doubts earlier.
    """
    ranks = [Program(every=1000), Program(every=1000)]
    for rank in ranks:
        rank.steps(8, LONG_US)
    ranks[0].window = 3
    for _ in range(200):
        made = together(ranks, (LONG_US, LONG_US), all_us, 1)
        tries = [of[0].action is Action.TRY for of in made]
        if any(tries):
            return ranks, all(tries)
    return ranks, False


def test_what_both_doubt_is_tried_at_one_step() -> None:
    """Although one of them has doubted for longer."""
    ranks, begins = until_tried((ALL_US, ALL_US))
    assert begins
    assert ranks[0].done % AGREE_STEPS == 0


def test_what_one_doubts_is_not_tried() -> None:
    """The other keeps its promise, so steps would be no shorter."""
    ranks, begins = until_tried((ALL_US, 1000.0))
    assert not begins
    assert [rank.controller.state for rank in ranks] == [State.SETTLED] * 2


@pytest.mark.parametrize(("tried_us", "paid"), [((210.0, 210.0), True), ((LONG_US, LONG_US), False), ((210.0, LONG_US), False)])
def test_a_trial_ends_at_one_step_for_all(tried_us: Sequence[float], paid: bool) -> None:
    """They stay where steps are shorter on both, and go back together where one sees that not."""
    ranks, _ = until_tried((ALL_US, ALL_US))
    made = together(ranks, tried_us, (None, None), 3 * AGREE_STEPS)
    ends = [[(step, of) for step, of in enumerate(rank) if of.event in (Event.PAID, Event.VAIN)] for rank in made]
    (first, ended), (second, other) = ends[0][0], ends[1][0]
    assert [len(of) for of in ends] == [1, 1]
    assert first == second
    assert ended.event is other.event is (Event.PAID if paid else Event.VAIN)
    assert ended.action is other.action is (Action.NOTHING if paid else Action.BACK)
    assert all(("went back" in of.why) is not paid for of in (ended, other))


def all_in(placement: Placement) -> Plan:
    """Two units, whose states are all there."""
    k, share = 2 * (placement is Placement.GPU), float(placement is Placement.STREAM)
    return prefix_plan(uniform(2).units, k, source="test", reason=str, share=share, streamed_reason=str)


@pytest.mark.parametrize("placement", list(Placement))
def test_a_rank_tells_what_it_need_not_try(placement: Placement) -> None:
    """Of a plan that stays: everything. One that is away wants nothing."""
    plan = all_in(placement)
    has = {Placement.GPU: Told.HAS_ON_DEVICE | Told.HAS_STREAMED, Placement.STREAM: Told.HAS_STREAMED}.get(placement, Told.NOTHING)
    assert to_tell(Told.NOTHING, plan, untried=False, away=False) == has
    assert to_tell(Told.NOTHING, None, untried=False, away=False) == Told.HAS_ON_DEVICE | Told.HAS_STREAMED
    assert to_tell(Told.WANTS_ON_DEVICE, plan, untried=False, away=False) == has | Told.WANTS_ON_DEVICE
    assert to_tell(Told.WANTS_ON_DEVICE, plan, untried=True, away=True) == has
    assert to_tell(Told.TRIES | Told.VAIN, plan, untried=False, away=False) == has | Told.TRIES | Told.VAIN


@pytest.mark.parametrize("found", [Told.PAID, Told.VAIN])
def test_a_trial_ends_where_each_rank_that_tries_can_act(found: Told) -> None:
    """One that records its steps stays as it is meanwhile, and would be left with the trial."""
    plan = all_in(Placement.CPU)
    others = Told.TRIES | Told.PAID
    assert Agreed.by([to_tell(Told.TRIES | found, plan, untried=False, away=True), others]) == Agreed()
    assert Agreed.by([to_tell(Told.TRIES | found, plan, untried=False, away=False), others]) == Agreed(paid=found is Told.PAID)
