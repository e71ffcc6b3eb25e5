"""Loops that call another method than `model(...)`: it is captured, or a warning says how."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hytrain_fx
from hytrain_fx import errors
from hytrain_fx.api import session_of
from hytrain_fx.runtime.engine import Stage

from . import test_eager_reads as eager_reads
from .loops import HYPER, HandAdam, assert_same, weights

BATCHES = [{"x": torch.randn(5, 6, generator=torch.Generator().manual_seed(i)), "y": torch.tensor([0, 1, 2, 0, 1])} for i in range(3)]


class Stepped(nn.Module):
    """A model whose loss is made by methods, through its forward or past it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(self(batch["x"]), batch["y"])

    def compute_loss(self, batch: dict[str, torch.Tensor], *, scale: float = 1.0) -> torch.Tensor:
        return scale * F.cross_entropy(self.head(self.body(batch["x"])), batch["y"])

    def by_forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(self.forward(batch["x"]), batch["y"])


def stepped() -> Stepped:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Stepped()


def train(model: nn.Module, optimizer: Any, loss_of: Callable[[dict[str, torch.Tensor]], torch.Tensor], steps: int = 9) -> list[float]:
    """An ordinary loop that looks at the model's own call between steps."""
    seen = []
    for step in range(steps):
        loss = loss_of(BATCHES[step % 3])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen += [float(loss), float(model(BATCHES[0]["x"]).square().sum())]
        model.train()
    return seen


def compiled_by_torch(method: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The plain loop, its method and its forward compiled by torch."""
    model = stepped()
    loss_of = torch.compile(getattr(model, method))
    model.compile()
    return train(model, HandAdam(model.parameters(), **HYPER), loss_of), weights(model)


@pytest.mark.parametrize("method", ["training_step", "compute_loss", "by_forward"])
def test_the_method_that_is_handed_over_is_captured(method: str) -> None:
    """All gradients come out of graphs, with the bits of the plain loop, and so does model(x)."""
    expected, trained = compiled_by_torch(method)
    model = stepped()
    optimizer: Any
    call, optimizer = hytrain_fx.compile(getattr(model, method), torch.optim.AdamW(model.parameters(), **HYPER))
    assert call is getattr(model, method)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hytrain_fx.HytrainWarning)
        assert train(model, optimizer, lambda batch: getattr(model, method)(batch)) == expected
    session = session_of(model)
    assert session.planning.captured_steps == 9
    assert session.nodes.runs["grad_offload"] == 9 * len(session.table)
    assert not session.marks.broken
    assert hytrain_fx.explain(model).outside == ()
    assert_same(weights(model), trained)
    hytrain_fx.close(model)
    assert method not in vars(model)
    getattr(model, method)(BATCHES[0]).backward()


def test_the_model_s_own_call_trains_beside_the_method() -> None:
    """Steps through either have the bits of the plain loop that takes turns."""
    results = []
    for ours in (False, True):
        model = stepped()
        optimizer: Any = HandAdam(model.parameters(), **HYPER)
        loss_of: Any = torch.compile(model.compute_loss)
        if ours:
            loss_of, optimizer = hytrain_fx.compile(model.compute_loss, torch.optim.AdamW(model.parameters(), **HYPER))
        else:
            model.compile()
        for step in range(8):
            batch = BATCHES[step % 3]
            loss = loss_of(batch, scale=0.5) if step % 2 else F.cross_entropy(model(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model))
        if ours:
            assert session_of(model).planning.captured_steps == 8
            hytrain_fx.close(model)
    assert_same(results[1], results[0])


def _loss(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(self.forward(x), y)


@pytest.mark.filterwarnings("ignore::hytrain_fx.HytrainWarning")
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("kind", [eager_reads.Disabled, eager_reads.Foreign, eager_reads.Chunks, eager_reads.Uncaptured])
def test_eager_code_of_a_method_waits_for_what_it_reads(kind: type[eager_reads.Deep], captured: bool) -> None:
    """A method that is no one graph, and one that is not captured, have the plain loop's bits."""
    results = []
    for ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = type("Own", (kind,), {"loss": _loss})()
        optimizer: Any = HandAdam(model.parameters(), **HYPER)
        loss_of = torch.compile(model.loss) if captured else model.loss
        if ours:
            adam = torch.optim.AdamW(model.parameters(), **HYPER)
            call, optimizer = hytrain_fx.compile(model.loss if captured else model, adam, k=0, workers=1)
            loss_of = call if captured else model.loss
            for stage in (Stage.CPU_UPDATE, Stage.H2D, Stage.D2H):
                session_of(model).engine.set_delay(stage, 400.0)
        losses = []
        for x, y in eager_reads.batches_of() * 3:
            losses.append(loss_of(x, y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(({"losses": torch.stack(losses).detach()}, weights(model)))
        if ours:
            session = session_of(model)
            assert session.planning.captured_steps == (9 if captured and kind is not eager_reads.Uncaptured else 0)
            assert bool(session.eager.reads.read) == captured
            hytrain_fx.close(model)
    for found, expected in zip(results[1], results[0], strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_copy_has_plain_methods(copied: Callable[[nn.Module], Any]) -> None:
    """It can be compiled itself."""
    model = stepped()
    hytrain_fx.compile(model.training_step, torch.optim.AdamW(model.parameters()))
    other = copied(model)
    assert other.training_step.__self__ is other
    assert other.training_step.__func__ is Stepped.training_step
    hytrain_fx.close(model)
    hytrain_fx.compile(other.training_step, torch.optim.AdamW(other.parameters()))
    other.training_step(BATCHES[0]).backward()
    assert session_of(other).nodes.runs["grad_offload"] == 4
    hytrain_fx.close(other)


def test_forward_stands_for_the_model() -> None:
    """`compile(model.forward, ...)` and `compile(model.__call__, ...)` compile the model's call."""
    for name in ("forward", "__call__"):
        model = stepped()
        hytrain_fx.compile(getattr(model, name), torch.optim.AdamW(model.parameters()))
        model(BATCHES[0]["x"]).sum().backward()
        assert session_of(model).nodes.runs["grad_offload"] == 4
        hytrain_fx.close(model)


def test_a_method_of_one_object_is_captured_and_put_back() -> None:
    """One that was put into the object by hand."""
    model: Any = stepped()
    own = model.extra_loss = Stepped.compute_loss.__get__(model)
    hytrain_fx.compile(model.extra_loss, torch.optim.AdamW(model.parameters()))
    model.extra_loss(BATCHES[0]).backward()
    assert session_of(model).nodes.runs["grad_offload"] == 4
    hytrain_fx.close(model)
    assert model.extra_loss == own


@pytest.mark.parametrize("given", [lambda model: (lambda batch: model(batch["x"])), lambda model: "text".upper, lambda model: Stepped])
def test_what_is_no_method_of_a_module_is_refused(given: Callable[[nn.Module], Any]) -> None:
    """With what was found and what is expected."""
    model = stepped()
    with pytest.raises(errors.UnsupportedError, match=r"found .*(lambda|upper|Stepped).*; expected a torch.nn.Module, or a method"):
        hytrain_fx.compile(given(model), torch.optim.AdamW(model.parameters()))


def outside(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model.head(model.body(batch["x"])), batch["y"])


class Whole(Stepped):
    """Its method does the whole step."""

    optimizer: Any = None

    def whole_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.compute_loss(batch).backward()
        type(self).optimizer.step()


def test_a_step_inside_the_method_is_refused() -> None:
    """What the method is to return is said."""
    torch._dynamo.reset()
    model = Whole()
    _, Whole.optimizer = hytrain_fx.compile(model.whole_step, torch.optim.AdamW(model.parameters()))
    with pytest.raises(errors.UnsupportedError, match="return the loss, and call backward"):
        model.whole_step(BATCHES[0])
    hytrain_fx.close(model)


LINES: dict[str, tuple[Callable[[Any, Any], torch.Tensor], str]] = {
    "method": (lambda model, batch: model.compute_loss(batch), r"hytrain_fx\.compile\(model\.compute_loss, optimizer\)"),
    "method that calls forward": (lambda model, batch: model.by_forward(batch), r"hytrain_fx\.compile\(model\.by_forward, optimizer\)"),
    "forward": (lambda model, batch: model.forward(batch["x"]).sum(), r"model\(\.\.\.\) instead of model\.forward\(\.\.\.\)"),
    "layers": (outside, r"make a method .*hytrain_fx\.compile\(model\.method, optimizer\)"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_loop_whose_gradients_nobody_captures_is_told_the_line_to_write(name: str) -> None:
    """Once, at the loop's line, in a category of its own."""
    loss_of, line = LINES[name]
    model = stepped()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in BATCHES:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    told = [warning for warning in caught if issubclass(warning.category, hytrain_fx.HytrainWarning)]
    assert len(told) == 1
    assert told[0].filename == __file__
    assert re.search(line, str(told[0].message))
    hytrain_fx.close(model)


def test_other_loops_are_not_warned() -> None:
    """Silent are gradients by hand, a penalty beside a captured loss, and then one by itself."""
    model = stepped()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", hytrain_fx.HytrainWarning)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        (model(BATCHES[0]["x"]).sum() + model.head.weight.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.head.weight.square().sum().backward()
        optimizer.step()
    hytrain_fx.close(model)
