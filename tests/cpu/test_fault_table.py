"""Memory, engine calls and devices fail at every place: a step is whole or not done at all.

No state is torn.

The places are found by running the loop (`faults`, `fault_loop`); docs/faults.md has the table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import EngineError
from hytrain_fx.ir.plan import Placement

from .fault_loop import FaultLoop, assert_compile_undone, assert_whole_or_undone
from .faults import KINDS
from .loops import HYPER, plain_loop, weights
from .models import mlp
from .test_placements import plan_of
from .threads import engine_threads, threads_left

LOOPS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16": (torch.bfloat16, {}),
    "fp32 with early updates": (torch.float32, {"speculate": True}),
    "bf16 on the torch engine": (torch.bfloat16, {"engine": "torch"}),
}


@pytest.fixture(scope="module", params=LOOPS)
def loop(request: pytest.FixtureRequest) -> Iterator[FaultLoop]:
    dtype, options = LOOPS[request.param]
    made = FaultLoop(dtype, **options)
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["device memory", "host memory", "engine call"])
def test_a_fault_leaves_the_step_whole_or_undone(kind: str, loop: FaultLoop) -> None:
    """At every place, weights, states and counts are those before the step or after it.

    The error names its cause, and training goes on.
    """
    if kind == "engine call" and loop.twins.session.engine.name != "native":
        pytest.skip("the places are the native engine's calls")
    assert_whole_or_undone(kind, loop)


@pytest.mark.sample(3)
@pytest.mark.parametrize("operations", [0, 11, 23, 37, 51, 67])
def test_a_device_that_fails_ends_the_engine_and_nothing_else(operations: int) -> None:
    """When the device refuses everything from some operation on, every later call says so.

    No call gives half a step or hangs, and the threads end.
    """
    torch._dynamo.reset()
    before = engine_threads()
    model: Any
    model, batches = mlp()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), k=0, engine="native", timeout_s=20.0)
    plain_loop(2)(model, optimizer, batches)
    session = session_of(model)
    session.place(plan_of(session, list(Placement)))
    engine: Any = session.engine
    engine.fail_device_after(operations)
    with pytest.raises(EngineError, match="injected device error"):
        plain_loop(3)(model, optimizer, batches)
    for call in (optimizer.state_dict, lambda: weights(model), lambda: model(*batches[0])):
        with pytest.raises(EngineError, match="injected device error"):
            call()
    with contextlib.suppress(EngineError):
        hytrain_fx.close(model)
    assert threads_left(before) == []


@pytest.mark.parametrize("engine", ["native", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compile_that_meets_a_fault_leaves_a_plain_model(kind: str, engine: str) -> None:
    """A fault at any place in compile() leaves model and optimizer plain, and no thread.

    The error names its cause, and a second try trains.
    """
    assert_compile_undone(kind, engine)
