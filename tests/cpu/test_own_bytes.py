"""Plans count what each unit takes: states of its groups, copies under autocast, slots.

Limits here are exact: one byte less, and a unit or the model does not fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import ConfigError
from hytrain_fx.ir.plan import Placement
from hytrain_fx.session.session import Session

WIDTH, LAYERS = 64, 4
PARAMS = WIDTH * WIDTH  # of a unit


class Net(nn.Module):
    """Equal units, each one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


@contextlib.contextmanager
def training(
    *, dtype: torch.dtype = torch.float32, groups: tuple[dict[str, Any], ...] = ({},), autocast: bool = False, steps: int = 0,
    **options: Any
) -> Iterator[Session]:
    """A session after so many steps; the layers take the groups in turn."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Net().to(dtype)
    layers = list(model.layers)
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(
        [{"params": [layer.weight for layer in layers[number :: len(groups)]], **group} for number, group in enumerate(groups)]), **options)
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(torch.ones(8, WIDTH, dtype=dtype))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield session_of(model)
    hytrain_fx.close(model)


def most_units(session: Session) -> int:
    """How many units a plan that is solved now has on the device, if it has as many as fit."""
    planning = session.planning
    assert planning.profile is not None
    return planning.solver.at(LAYERS, planning.profile, 1.0, planning.discipline).k


@pytest.mark.parametrize(("less", "fit"), [(0, LAYERS), (1, LAYERS - 1)])
def test_bytes_for_states_under_autocast_hold_all_of_them(less: int, fit: int) -> None:
    """16 bytes a parameter with a copy: the master beside it, two moments and the gradient."""
    with training(autocast=True, steps=6, warmup_steps=1, stream=0.5, gpu_states=16 * PARAMS * LAYERS - less) as session:
        assert len(session.states.copies) == LAYERS
        assert most_units(session) == fit


def test_the_first_plan_counts_as_later_ones_do() -> None:
    """Three units fit without copies and two with them.

    As the host holds the other two where they are streamed, no more are on the device in the first
    steps either: with their copies there would be more than `gpu_states` there.
    """
    options: dict[str, Any] = {"stream": 1.0, "gpu_states": 3 * 12 * PARAMS, "host_memory": 2 * 12 * PARAMS + 1000, "warmup_steps": 10}
    with training(autocast=True, steps=1, **options) as session:
        assert session.planning.plan.k == 2
        states = session.states
        resident = [row for row, place in states.placement.items() if place is Placement.GPU]
        assert states.device_bytes(resident) + 4 * PARAMS * len(resident) <= 3 * 12 * PARAMS


def test_without_copies_nothing_is_refused_for_their_sake() -> None:
    """Where two units on the device do not do, three are, as an fp32 model without autocast may."""
    with training(steps=1, gpu_states=3 * 12 * PARAMS, host_memory=16 * PARAMS + 100, warmup_steps=10) as session:
        assert session.planning.plan.k == 3


AMSGRAD, NARROW = {"amsgrad": True}, {"moments": "bf16"}


@pytest.mark.parametrize(("groups", "first"), [((AMSGRAD, {}), 16), (({}, AMSGRAD), 12), ((NARROW, {}), 8), (({}, NARROW), 12)])
def test_groups_with_other_states_count_as_they_are(groups: tuple[dict[str, Any], ...], first: int) -> None:
    """bf16 weights: master, states and a gradient of 2 bytes. The first unit fits exactly.

    So it is for the first plan, whose host holds exactly the others with their slots, and for plans
    that are solved. With one byte less for the device no plan fits.
    """
    of_second = {id(AMSGRAD): 16, id(NARROW): 8}.get(id(groups[1]), 12)
    on_device, on_host = (first + 2) * PARAMS, (first + 2 * of_second + 3 * 2) * PARAMS
    options: dict[str, Any] = {"dtype": torch.bfloat16, "groups": groups, "host_memory": on_host}
    with training(gpu_states=on_device, steps=6, warmup_steps=1, **options) as session:
        assert next(plan for plan in session.planning.history if plan.source == "first steps").k == 1
        assert most_units(session) == 1
        assert sum(slab.nbytes for slab in session.states.slabs) <= on_host
    message = f"leaves the states of 4 of 4 units to the host, {on_host + (first + 2) * PARAMS} bytes"
    with pytest.raises(ConfigError, match=message), training(gpu_states=on_device - 1, **options):
        pass


def test_streamed_fp16_weights_need_no_memory_for_new_ones() -> None:
    """12 bytes a parameter on the host, where all is streamed: the device writes new weights."""
    with training(dtype=torch.float16, stream=1.0, gpu_states=0, host_memory=12 * PARAMS * LAYERS, steps=6, warmup_steps=1) as session:
        assert all(place is Placement.STREAM for place in session.states.placement.values())
        assert session.planning.solver.solved(session.planning.profile, 1.0, session.planning.discipline).k == 0  # type: ignore[arg-type]


def test_a_share_that_whole_parameters_miss_is_one_error() -> None:
    """Of four units two are streamed where 60% are asked for. The error says what that needs.

    `host_memory` with so many bytes then works.
    """
    options: dict[str, Any] = {"dtype": torch.bfloat16, "stream": 0.6, "gpu_states": 0}
    with training(**options) as session:
        needed = sum(slab.nbytes for slab in session.states.slabs)
    share = int((12 + 0.4 * 2) * PARAMS * LAYERS)
    assert share < needed  # two of four units are streamed, or 50%
    message = rf"host_memory={share} .*stream=0\.6 leaves the states of 4 of 4 units to the host, {needed} bytes"
    with pytest.raises(ConfigError, match=message), training(host_memory=share, **options):
        pass
    with training(host_memory=needed, **options):
        pass
