"""After `close()`, or when model and optimizer are dropped, nothing of them is left.

That means no slab, engine, thread, mark or graph.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import HostMemoryError

from .loops import HYPER, assert_same, plain_loop, weights
from .models import Batches, cnn, gpt, mlp
from .threads import engine_threads, threads_left

References = dict[str, weakref.ref[Any]]


class Broken(nn.Module):
    """A graph break between two linear layers: Dynamo keeps code of the class's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.last(x).square().mean()  # type: ignore[no-any-return]


def broken() -> tuple[nn.Module, Batches]:
    return Broken(), [(torch.randn(5, 6),) for _ in range(3)]


class Autocast(nn.Module):
    """Trains under autocast: its weights rest as bf16 copies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.last(torch.tanh(self.first(x))).float().square().mean()  # type: ignore[no-any-return]


def autocast() -> tuple[nn.Module, Batches]:
    return Autocast(), [(torch.randn(5, 64),) for _ in range(3)]


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **HYPER)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


CASES: dict[str, tuple[Callable[[], tuple[Any, Batches]], Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    "host": (mlp, adamw, {"k": 0}),
    "tied weights, some on the device": (gpt, adamw, {"k": 1}),
    "convolutions": (cnn, adamw, {"k": 0}),
    "streamed": (mlp, adamw, {"k": 0, "stream": 1.0}),
    "a graph break": (broken, adamw, {"k": 0}),
    "autocast": (autocast, adamw, {"k": 0}),
    "the torch engine": (mlp, adamw, {"k": 0, "engine": "torch"}),
    "another optimizer": (mlp, sgd, {}),
}


def references(model: Any, optimizer: Any) -> References:
    session = session_of(model)
    found = {"model": model, "optimizer": optimizer, "session": session, "engine": session.engine, "states": session.states,
             "nodes": session.nodes, "capture": session.capture, "marks": session.marks, "planning": session.planning,
             "weight": next(iter(model.parameters()))}
    found |= {f"slab {number}": slab for number, slab in enumerate(session.states.slabs)}
    return {name: weakref.ref(value) for name, value in found.items()}


def alive(found: References) -> list[str]:
    for _ in range(2):  # the model's end frees the engine: a cycle with it is found the second time
        gc.collect()
    return [name for name, reference in found.items() if reference() is not None]


def trained(name: str, closed: bool) -> References:
    make, kind, options = CASES[name]
    torch.manual_seed(0)
    model: Any
    model, batches = make()
    _, optimizer = hytrain_fx.compile(model, kind(model), workers=1, **options)
    plain_loop(3)(model, optimizer, batches)
    with torch.no_grad():
        model(*batches[0])
    found = references(model, optimizer)
    if closed:
        hytrain_fx.close(model)
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
@pytest.mark.parametrize("name", CASES)
def test_nothing_of_a_model_is_left(name: str, closed: bool) -> None:
    """Everything that a session has is dead, and its threads have ended.

    Weak references show it. Dynamo is not reset.
    """
    torch._dynamo.reset()
    gc.collect()
    before = engine_threads()
    found = trained(name, closed)
    assert alive(found) == []
    assert threads_left(before) == []


def test_what_is_left_after_close_is_what_the_user_holds() -> None:
    """After close() a kept optimizer's states can be read, and the model trains plainly.

    Marks, graphs and the engine's own memory are gone.
    """
    torch._dynamo.reset()
    model: Any
    model, batches = mlp()
    _, optimizer = hytrain_fx.compile(model, adamw(model), k=0)
    plain_loop(3)(model, optimizer, batches)
    expected, session = optimizer.state_dict()["state"], session_of(model)
    hytrain_fx.close(model)
    assert session.capture.graphs == []
    assert session.marks.steps == 0
    assert session.engine._ring.numel() == 0  # type: ignore[attr-defined]
    found = optimizer.state_dict()["state"]
    for number, entry in expected.items():
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(found[number][name]))
    before = weights(model)
    plain_loop(2)(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    assert any(not torch.equal(value, before[name]) for name, value in weights(model).items())


def test_states_written_after_close_leave_the_weights() -> None:
    """Lightning moves the states of a fit's optimizer whenever it evaluates: the weights stay."""
    torch._dynamo.reset()
    model: Any
    model, batches = mlp()
    model.to(torch.bfloat16)
    _, optimizer = hytrain_fx.compile(model, adamw(model), k=0)
    plain_loop(2)(model, optimizer, [tuple(part.to(torch.bfloat16) for part in batch) for batch in batches])
    hytrain_fx.close(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    for entry in optimizer.state.values():
        entry["exp_avg"] = torch.ones_like(entry["exp_avg"])
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(bool((entry["exp_avg"] == 1).all()) for entry in optimizer.state.values())
    assert all(bool((parameter == 3).all()) for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_written_after_close_are_trained_further(dtype: torch.dtype) -> None:
    """The same optimizer is compiled again: weights written since stay, the others keep masters."""
    first = nn.Linear(8, 8)
    model: Any = nn.Sequential(first, nn.Linear(8, 8)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _, ours = hytrain_fx.compile(model, optimizer, k=0)
    model(torch.ones(4, 8, dtype=dtype)).sum().backward()
    ours.step()
    hytrain_fx.close(model)
    masters = {parameter: ours.state[parameter].get("master", parameter).detach().clone() for parameter in model.parameters()}
    written = first.weight
    with torch.no_grad():
        written[:4] = 4.0
    expected = weights(model)
    masters[written][:4] = 4.0
    _, ours = hytrain_fx.compile(model, optimizer, k=0)
    assert_same(weights(model), expected)
    for parameter, master in masters.items():
        assert torch.equal(ours.state[parameter].get("master", parameter), master)
    assert int(ours.state[written]["step"]) == 1
    hytrain_fx.close(model)


def test_a_model_compiled_again_and_again_leaves_one_session() -> None:
    """compile, close and compile of one model: each session but the last is gone."""
    torch._dynamo.reset()
    model: Any
    model, batches = mlp()
    earlier: list[References] = []
    for _ in range(3):
        _, optimizer = hytrain_fx.compile(model, adamw(model), k=0)
        plain_loop(2)(model, optimizer, batches)
        found = references(model, optimizer)
        earlier.append({name: found[name] for name in ("session", "engine", "states", "capture")})
        hytrain_fx.close(model)
        del optimizer
    assert [alive(found) for found in earlier] == [[], [], []]


def test_a_compile_that_is_refused_leaves_nothing() -> None:
    """After a refused compile() the model is plain, and is freed when it is dropped."""
    model: Any
    model, _ = mlp()
    with pytest.raises(HostMemoryError):
        hytrain_fx.compile(model, adamw(model), k=0, host_memory=1)
    found = {"model": weakref.ref(model)}
    del model
    assert alive(found) == []


@pytest.mark.sample(0)
def test_memory_of_twenty_models_does_not_add_up() -> None:
    """Resident memory after twenty models is what it was after five, to less than two models.

    Each model has 48 MB of states.
    """
    torch._dynamo.reset()
    resident = []
    for _ in range(20):
        net: Any = nn.Sequential(nn.Linear(2048, 2048, bias=False))
        model, optimizer = hytrain_fx.compile(net, adamw(net), k=0, workers=1)
        for _ in range(2):
            model(torch.randn(2, 2048)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        hytrain_fx.close(model)
        del net, model, optimizer
        gc.collect()
        resident.append(psutil.Process().memory_info().rss)
    assert resident[-1] - resident[4] < 2 * 48e6
