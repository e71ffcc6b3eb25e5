"""Memory that runs out, engine calls and devices that fail, each at every place: a step happens whole or not at all, and no state is torn.

The places are found by running the loop (`faults`, `fault_loop`); docs/faults.md has the table.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import EngineError, HytrainError
from hytrain_fx.ir.plan import Placement

from .fault_loop import FaultLoop, Outcome
from .faults import KINDS, Faults, Place
from .loops import HYPER, plain_loop, weights
from .models import mlp
from .test_placements import plan_of

LOOPS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16": (torch.bfloat16, {}),
    "fp32 with early updates": (torch.float32, {"speculate": True}),
    "bf16 on the torch engine": (torch.bfloat16, {"engine": "torch"}),
}
PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


@pytest.fixture(scope="module", params=LOOPS)
def loop(request: pytest.FixtureRequest) -> Iterator[FaultLoop]:
    dtype, options = LOOPS[request.param]
    made = FaultLoop(dtype, **options)
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["device memory", "host memory", "engine call"])
def test_a_fault_leaves_the_step_whole_or_undone(kind: str, loop: FaultLoop) -> None:
    """At every place: the error names its cause, weights, states and counts are those before the step or after it, and training goes on."""
    if kind == "engine call" and loop.twins.session.engine.name != "native":
        pytest.skip("the places are the native engine's calls")
    places = loop.places(kind)
    assert places, "no place was found: the loop or what is watched has changed"
    outcomes = [loop.outcome(kind, place) for place in places]
    wrong = [f"{outcome.place}: {outcome.error}, {outcome.left}" for outcome in outcomes if not _is_right(outcome)]
    assert not wrong, "\n".join(wrong)
    documented = PAGE.read_text()
    for call in {outcome.place.call for outcome in outcomes}:
        assert f"| {kind} | `{call}` |" in documented, f"docs/faults.md has no row for {kind} in {call}"


def _is_right(outcome: Outcome) -> bool:
    in_step = outcome.place.call in ("zero_grad()", "forward", "backward()", "clip_grad_norm_()", "step()")
    expected = ("before", "after") if outcome.place.call == "step()" else ("before",) if in_step else ("after",)
    if outcome.place.call == "optimizer.load_state_dict()":
        expected = ("after", "load again")
    if outcome.place.call.startswith("move") and not outcome.error:
        return outcome.left == "after"  # what the loop may still read of old gradients is kept where there is memory for it
    return outcome.error.endswith("Error") and outcome.left in expected


@pytest.mark.parametrize("operations", [0, 11, 23, 37, 51, 67])
def test_a_device_that_fails_ends_the_engine_and_nothing_else(operations: int) -> None:
    """From some operation on the device refuses all: every later call says so, none gives half a step, none hangs, threads end."""
    torch._dynamo.reset()
    before = _threads()
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
    assert _threads() == before


@pytest.mark.parametrize("engine", ["native", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compile_that_meets_a_fault_leaves_a_plain_model(kind: str, engine: str) -> None:
    """At every place in compile(): the error names its cause, model and optimizer are plain, no thread is left, a second try trains."""

    def compile_once(faults: Faults | None = None) -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model, batches = mlp()
        optimizer: Any = torch.optim.AdamW(model.parameters(), **HYPER)
        if faults is not None:
            faults.call = "compile()"
        _, ours = hytrain_fx.compile(model, optimizer, k=1, engine=engine, workers=2)
        return model, ours, batches

    before = _threads()
    hytrain_fx.close(compile_once()[0])
    faults = Faults(kind)
    with faults.counted() as found:
        made = compile_once(faults)[0]
        faults.call = "close()"
        hytrain_fx.close(made)
    for place in dict.fromkeys(_first_two(found)):
        if place.call != "compile()":
            continue
        torch.manual_seed(0)
        model, batches = mlp()
        optimizer: Any = torch.optim.AdamW(model.parameters(), **HYPER)
        faults = Faults(kind)
        faults.call = "compile()"
        with faults.at(place), pytest.raises(Exception, match="injected") as raised:
            hytrain_fx.compile(model, optimizer, k=1, engine=engine, workers=2)
        assert isinstance(raised.value, HytrainError | torch.OutOfMemoryError), f"{place}: {raised.value!r}"
        assert all(type(p) is nn.Parameter for p in model.parameters()), place
        assert _threads() == before, place
        plain_loop(1)(model, optimizer, batches)
    model, optimizer, batches = compile_once()
    plain_loop(1)(model, optimizer, batches)
    hytrain_fx.close(model)


def _first_two(found: list[Place]) -> list[Place]:
    return [place for place in found if place.nth < 2]


def _threads() -> list[str]:
    """The engine's threads, native and Python's."""
    native = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    python = [thread.name for thread in threading.enumerate()]
    return sorted(name for name in (*native, *python) if name.startswith("hytrain"))
