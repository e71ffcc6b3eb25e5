"""Host memory that cannot be pinned is used unpinned, with the same bits.

A CPU pins nothing, so tests say that it has to, and that the driver refuses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import EngineError
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.runtime.states import slabs
from hytrain_fx.runtime.states.slabs import HostSlab

from .engine_loop import EngineLoop
from .loops import assert_same, plain_loop, weights
from .models import gpt
from .test_placements import plan_of
from .test_streaming import running

OPTIONS: dict[str, Any] = {"workers": 1, "timeout_s": 60.0, "warmup_steps": 2}
REFUSED = "pinning 0.01 GiB of host memory failed (CUDA error 2)"


def refuse(patch: pytest.MonkeyPatch, refuses: Callable[[int], bool]) -> None:
    """The driver refuses those of the slabs that it is asked to pin, by number."""
    number = count()

    def pin(slab: HostSlab, device: torch.device) -> None:
        if refuses(next(number)):
            raise EngineError(REFUSED)

    patch.setattr(slabs, "needs_pinning", lambda device: True)
    patch.setattr(HostSlab, "pin", pin)


def run(dtype: torch.dtype, moves: bool = False, **options: Any) -> tuple[Any, dict[str, torch.Tensor], Any, Any]:
    """Losses, weights and states of a small GPT, and what explain says."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    made, batches = gpt(layers=3, width=16)
    model: Any = made.to(dtype)
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=0.01), **OPTIONS, **options)
    session = session_of(model)
    session.engine.set_delay(Stage.CPU_UPDATE, 300)  # where a copy may be asked for before its data is there
    losses = plain_loop(3)(model, optimizer, batches)
    if moves:
        for places in ([Placement.GPU, Placement.CPU], [Placement.CPU]):
            session.place(plan_of(session, places))
            losses += plain_loop(2)(model, optimizer, batches)
    found = weights(model)
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    explained = hytrain_fx.explain(model)
    assert not session.planning.solver.may_stream or options.get("stream") != "auto"
    hytrain_fx.close(model)
    return losses, found, explained.memory, " ".join(explained.details().split())


def everything(number: int) -> bool:
    """Refused."""
    return True


def every_other(number: int) -> bool:
    """Refused."""
    return number % 2 == 1


@pytest.mark.parametrize(("dtype", "options", "refuses"), [
    (torch.float32, {}, every_other), (torch.bfloat16, {"weights": "streamed"}, everything),
    (torch.float16, {"engine": "torch"}, every_other),
], ids=["fp32", "streamed", "torch"])
def test_training_has_the_same_bits(dtype: torch.dtype, options: dict[str, Any], refuses: Callable[[int], bool]) -> None:
    """Said once as a warning, and by explain, which counts what is pinned. States may move."""
    losses, expected, _, text = run(dtype, moves=True, **options)
    assert "could not be" not in text
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, refuses)
        with pytest.warns(hytrain_fx.HytrainWarning, match="It is used unpinned") as warned:
            found_losses, found, memory, text = run(dtype, moves=True, **options)
    assert found_losses == losses
    assert_same(found, expected)
    assert sum("used unpinned" in str(of.message) for of in warned) == 1
    assert "could not be: copies hold up the thread that asks for them, no states are streamed" in text
    assert memory.unpinned_bytes > 0
    assert memory.unpinned_bytes + memory.pinned_bytes >= memory.host_bytes  # a slab stays as long as one of its rows is in it
    assert (memory.pinned_bytes == 0) == refuses(0)


def clipped_and_scaled(refuses: Callable[[int], bool] | None) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    """Losses and norms, weights, and warnings. The second of five steps is left out for an inf."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    made, batches = gpt(layers=2, width=16)
    model: Any = made
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if refuses is not None:
            refuse(patch, refuses)
        model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=0.01), **OPTIONS, k=1)
        session_of(model).engine.set_delay(Stage.CPU_UPDATE, 300)
        scaler, seen = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2), []
        for step in range(5):
            loss = model(*batches[step % len(batches)])
            scaler.scale(loss * (torch.inf if step == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            seen += [loss.item(), float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)), scaler.get_scale()]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    found = weights(model)
    hytrain_fx.close(model)
    return [of if of < torch.inf else -1.0 for of in seen], found, [str(of.message) for of in warned]


def test_factors_of_clipping_and_scaling_come_to_unpinned_memory() -> None:
    """It is the first that an engine asks for. Bits are the same, and a warning says what waits."""
    seen, expected, _ = clipped_and_scaled(None)
    assert seen.count(-1.0) == 1
    for refuses in (everything, lambda number: number == 0):
        found_seen, found, warned = clipped_and_scaled(refuses)
        assert found_seen == seen
        assert_same(found, expected)
        assert sum("memory for the factors of clipping and loss scaling is left unpinned" in of for of in warned) == 1
        assert sum("used unpinned" in of for of in warned) == (refuses is everything)


def test_what_is_not_pinned_is_not_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solved plans stream nothing. A share that is asked for is refused, and the driver quoted."""
    refuse(monkeypatch, lambda number: True)
    with pytest.warns(hytrain_fx.HytrainWarning), pytest.raises(EngineError, match="cannot be streamed: pinning"):
        run(torch.bfloat16, stream=0.5, k=0)


def test_no_copy_is_asked_for_before_its_data_is_there() -> None:
    """From memory that is not pinned the driver reads at once, so no copy is put after a flag.

    With pinned memory the rest of the same step is put on the lane at once.
    """
    for pinned in (True, False):
        with running() as engine:
            loop = EngineLoop(engine, (17,) * 40, torch.float32, pinned=pinned)
            loop.launching_s = 0.002
            loop.step()
            engine.set_delay(Stage.CPU_UPDATE, 10_000)
            for _ in range(3):
                loop.step()
                loop.check()
            assert (engine.finish_times().at_once > 0) == pinned
