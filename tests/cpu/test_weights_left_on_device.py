"""Streamed bf16 rows leave their new weight on the device.

What eager code writes there still reaches the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.torch_private.tensors import without_torch_function
from hytrain_fx.weights.outside_writes import WATCHED_STEPS

from .loops import Twins, plain_loop
from .models import Batches, mlp
from .test_placements import plan_of


@pytest.fixture(scope="module")
def twins() -> Iterator[Twins]:
    def make() -> tuple[nn.Module, Batches]:
        model, batches = mlp()
        dtyped = [tuple(x.to(torch.bfloat16) if x.is_floating_point() else x for x in batch) for batch in batches]
        return model.to(torch.bfloat16), dtyped

    made = Twins(make, workers=2, replan_every=0)
    made.restart()
    step(made, 10)  # the plan is solved, and stays where a test puts the rows
    yield made
    made.close()


def step(twins: Twins, steps: int = 1) -> None:
    plain_loop(steps)(twins.ours, twins.optimizer, twins.batches)


@torch.no_grad()
def write_a_part(twins: Twins) -> None:
    twins.ours.first.weight[:2].mul_(0.5)


def write_through_an_alias(twins: Twins) -> None:
    alias = twins.ours.last.weight.detach()
    step(twins)
    twins.session.drain()
    alias[0, :3] *= 0.5


def load_weights(twins: Twins) -> None:
    twins.ours.load_state_dict({name: value.clone() for name, value in twins.ours.state_dict().items()})


def read_masters(twins: Twins) -> None:
    twins.optimizer.state_dict()


def many_steps(twins: Twins) -> None:
    step(twins, WATCHED_STEPS + 2)


ACTS: tuple[Callable[[Twins], None], ...] = (step, write_a_part, write_through_an_alias, load_weights, read_masters, many_steps)


def outcome(twins: Twins, place: Placement, acts: Sequence[Callable[[Twins], None]]) -> tuple[list[torch.Tensor], list[Any]]:
    """Weights and every state after these acts, with all rows in one place."""
    twins.restart()
    twins.session.place(plan_of(twins.session, [place]))
    for act in acts:
        act(twins)
    weights = [value.clone() for value in twins.ours.state_dict().values()]
    states = twins.optimizer.state_dict()["state"]
    return weights, [torch.as_tensor(value) for number in sorted(states) for _, value in sorted(states[number].items())]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(acts=st.lists(st.sampled_from(ACTS), min_size=1, max_size=5), slow=st.sampled_from([None, Stage.STREAM_OUT, Stage.GPU_UPDATE]))
def test_streamed_rows_follow_writes_as_rows_on_the_cpu_do(twins: Twins, acts: list[Callable[[Twins], None]], slow: Stage | None) -> None:
    """Weights, masters and moments are the same after any such loop, with a stage slow."""
    expected = outcome(twins, Placement.CPU, acts)
    if slow is not None:
        twins.session.engine.set_delay(slow, 1000)
    found = outcome(twins, Placement.STREAM, acts)
    if slow is not None:
        twins.session.engine.set_delay(slow, 0)
    for a, b in zip((*expected[0], *expected[1]), (*found[0], *found[1]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:the memory of")
def test_a_write_through_an_old_alias_changes_the_master_where_it_was(twins: Twins) -> None:
    """An alias is watched as long as somebody holds it.

    The other elements keep the bits that their weights do not have.
    """
    twins.restart()
    twins.session.place(plan_of(twins.session, [Placement.STREAM]))
    weight = twins.ours.last.weight
    alias = weight.detach()
    many_steps(twins)
    twins.session.drain()
    before = twins.optimizer.state[weight]["master"].clone()
    assert not torch.equal(before, weight.detach().float())
    alias[0, 0] = before[0, 0] = 0.25
    assert torch.equal(twins.optimizer.state[weight]["master"], before)
    step(twins)


def test_the_weight_goes_home_only_while_it_is_watched(twins: Twins) -> None:
    """Without eager code the host's half of the master is left alone.

    After a touch it follows the weight, for some steps.
    """
    twins.restart()
    twins.session.place(plan_of(twins.session, [Placement.STREAM]))
    weight, session = twins.ours.first.weight, twins.session
    row = session.table.names.index("first.weight")

    def at_home() -> bool:
        session.drain()
        with without_torch_function():
            return torch.equal(session.states[row].master, weight.detach().flatten())

    many_steps(twins)
    step(twins)
    assert not at_home()
    weight.detach()
    assert at_home()
    step(twins)
    assert at_home()
    many_steps(twins)
    assert not at_home()
