"""Loops that cannot be measured, or not in every step, train on with the plain loop's bits.

`explain` says why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import EngineError, HostMemoryError, PlanError
from hytrain_fx.ir.plan import Placement
from hytrain_fx.planning.first_plan import FIRST_STEPS
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.session import eager_reads
from hytrain_fx.session.call_gate import find_session

from .loops import HYPER, HandAdam, assert_same, compare, weights
from .models import Batches

STEPS = 16  # a plan is due after seven that are captured


class Deep(nn.Module):
    """Some layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM: Dynamo breaks the graph there."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x[:, None].expand(-1, 6, -1))[0].mean(1))  # type: ignore[no-any-return]


class Disabled(Deep):
    """Never captured."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Choosing(Deep):
    """Python decides by a value, in a loop: Dynamo gives the frame up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if x.sum().item() > -1e9:
                x = torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


Backward = Callable[[Any, torch.Tensor, torch.Tensor, int], None]


def _whole(model: Any, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    F.cross_entropy(model(x), y).backward()


def _another_part_first(model: Any, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    F.cross_entropy(model.head(x) if step < 6 else model(x), y).backward()


def _many_micro_batches(model: Any, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    for _ in range(40):
        (F.cross_entropy(model(x), y) / 40).backward()


def _long_evaluation(model: Any, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    _whole(model, x, y, step)
    with torch.no_grad():
        for _ in range(40):
            model(x)


def _by_hand(model: Any, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 0.01 * (number + step + 1))


def _per_sample(model: Any, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    held = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, torch.Tensor], one: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(_Uncompiled(model), params, (one[None],)), label[None])

    found = vmap(grad(loss), in_dims=(None, 0, 0))({f"inner.{name}": p for name, p in held.items()}, x, y)
    for name, p in model.named_parameters():
        p.grad = found[f"inner.{name}"].clamp(-1, 1).mean(0)


class _Uncompiled(nn.Module):
    """Calls a model's own forward, not its compiled call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.forward(x)  # type: ignore[no-any-return]


@contextmanager
def _force_eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _dynamo_off() -> Iterator[None]:
    with torch._dynamo.config.patch(disable=True):
        yield


CASES: dict[str, tuple[type[nn.Module], Backward, Callable[[], Any] | None]] = {
    "an LSTM": (Recurrent, _whole, None),
    "a disabled forward": (Disabled, _whole, None),
    "control flow by values": (Choosing, _whole, None),
    "force_eager": (Deep, _whole, _force_eager),
    "Dynamo turned off": (Deep, _whole, _dynamo_off),
    "another part of the model first": (Deep, _another_part_first, None),
    "many micro-batches": (Deep, _many_micro_batches, None),
    "a long evaluation in each step": (Deep, _long_evaluation, None),
    "gradients written by hand": (Deep, _by_hand, None),
    "gradients per sample": (Deep, _per_sample, None),
}
MEASURED = {"another part of the model first", "many micro-batches", "a long evaluation in each step"}


def train(model: Any, optimizer: Any, backward: Backward, steps: int = STEPS, evaluates: bool = True) -> list[float]:
    torch.manual_seed(1)
    x, y = torch.randn(6, 8), torch.randint(5, (6,))
    losses = []
    for step in range(steps):
        backward(model, x, y, step)
        optimizer.step()
        optimizer.zero_grad()
        if evaluates:
            with torch.no_grad():
                losses.append(float(F.cross_entropy(model(x), y)))
    return losses


@pytest.mark.parametrize("name", CASES)
def test_a_loop_that_cannot_be_measured_trains_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and weights are the plain loop's, and what can be measured later is measured.

    `explain`, `inspect` and `record` work in every state.
    """
    monkeypatch.setattr("hytrain_fx.planning.marks.MOST_MARKS", 300)  # so that 40 micro-batches are too many
    kind, backward, around = CASES[name]
    results = []
    for ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = kind()
        optimizer: Any = HandAdam(model.parameters(), **HYPER)
        if ours:
            _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER))
            str(hytrain_fx.explain(model))
        else:
            model.compile()
        if around is None:
            losses = train(model, optimizer, backward)
        else:
            with around():
                losses = train(model, optimizer, backward)
        results.append((losses, weights(model)))
        if ours:
            planning, text = session_of(model).planning, hytrain_fx.explain(model).details()
            assert planning.aside.troubles == ()
            assert (planning.plan.source != FIRST_STEPS) == (name in MEASURED)
            assert ("ran outside captured graphs" in text) == (planning.captured_steps < STEPS)
            assert ("and no times could be measured" in text) == (planning.profile is None)
            hytrain_fx.inspect(model)
            if name not in MEASURED and around is None:
                with hytrain_fx.record(model) as recording:
                    train(model, optimizer, backward, 2)
                str(recording)
            hytrain_fx.close(model)
    assert results[1][0] == results[0][0]
    assert_same(results[1][1], results[0][1])


@pytest.mark.sample(5)
@pytest.mark.parametrize("where", ["build_profile", "solve", "place", "finish_times", "take_records"])
@pytest.mark.parametrize("error", [PlanError, HostMemoryError, torch.OutOfMemoryError, ZeroDivisionError])
def test_errors_in_measuring_and_planning_do_not_reach_the_loop(
    where: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan in force stays, and the bits are the plain loop's.

    The error is logged once, and `explain` shows it.
    """
    if error is not PlanError and where in ("build_profile", "take_records"):
        pytest.skip("one kind of error is enough there")
    results = []
    for ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = Deep()
        optimizer: Any = HandAdam(model.parameters(), **HYPER)
        if ours:
            _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), replan_every=20)
            session = session_of(model)

            def fail(*args: Any, **kwargs: Any) -> Any:
                raise error("of this test")

            owner: Any = {"place": session, "finish_times": session.engine, "take_records": session.engine}.get(where)
            if owner is None:
                room = {"build_profile": "planning", "solve": "solving"}[where]
                monkeypatch.setattr(f"hytrain_fx.planning.{room}.{where}", fail)
            else:
                monkeypatch.setattr(owner, where, fail)
        else:
            model.compile()
        losses = train(model, optimizer, _whole)
        source = session_of(model).planning.plan.source if ours else ""
        monkeypatch.undo()
        losses += train(model, optimizer, _whole, 2)
        results.append((losses, weights(model)))
        if ours:
            assert source == FIRST_STEPS
            assert [text for text in session.planning.aside.troubles if error.__name__ in text and "of this test" in text]
            assert sum("of this test" in record.getMessage() for record in caplog.records) == len(session.planning.aside.troubles)
            assert "failed and was left out" in hytrain_fx.explain(model).details()
            hytrain_fx.close(model)
    assert results[1][0] == results[0][0]
    assert_same(results[1][1], results[0][1])


def test_a_part_of_the_page_that_cannot_be_told_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """`print(explain(model))` never ends a run."""
    torch._dynamo.reset()
    model: Any = Deep()
    hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()))

    def fail(*args: Any) -> Any:
        raise ArithmeticError("of this test")

    monkeypatch.setattr(sys.modules["hytrain_fx.explain.plan.details"], "units_table", fail)
    monkeypatch.setattr(sys.modules["hytrain_fx.explain.plan.screen"], "verdict_of", fail)
    found = hytrain_fx.explain(model)
    for text, rest in ((str(found), "on the CPU; "), (found.details(), "plans so far: ")):
        assert "could not be told: ArithmeticError: of this test" in text
        assert rest in text
    hytrain_fx.close(model)


class Broken(Deep):
    """A graph break after the first layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[0](x))
        torch._dynamo.graph_break()
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


def test_the_wait_at_a_graph_break_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where reads cannot be seen, the wait for all weights counts as stall, and `explain` says so.

    The plan is solved for a forward that waits for all weights.
    """

    def fail(*_: object) -> Any:
        raise EngineError("of this test")

    monkeypatch.setattr(eager_reads, "OperatorReads", fail)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Broken()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), k=0)
    session = session_of(model)
    train(model, optimizer, _whole, 3, evaluates=False)
    session.engine.set_delay(Stage.H2D, 20_000)  # each of ten weights: beside it the forward of such a model takes nothing
    train(model, optimizer, _whole, 10, evaluates=False)  # an evaluation would wait instead
    found = hytrain_fx.explain(model)
    assert found.profile is not None
    assert found.measured is not None
    assert found.measured.held_us > sum(found.measured.forward_us)
    assert sum(found.measured.stall_us) >= found.measured.held_us
    assert found.discipline.barrier == "before_forward"
    assert "first graph break" in found.details()
    session.engine.set_delay(Stage.H2D, 0)
    hytrain_fx.close(model)


def test_the_first_steps_keep_to_gpu_states() -> None:
    """What the host has no slots for is streamed, where the device may not hold it.

    The bits are the plain loop's. With slots for all, two of five units would be on the device.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        if (session := find_session(model)) is not None:
            plan = session.planning.plan
            assert (plan.k, plan.source) == (1, FIRST_STEPS)
            assert plan.numel(Placement.GPU) < plan.numel(Placement.STREAM)
        return train(model, optimizer, _whole)

    compare(lambda: (Deep(), []), loop, gpu_states=0.3, stream=0.5, host_memory=4600, replan_every=0)
