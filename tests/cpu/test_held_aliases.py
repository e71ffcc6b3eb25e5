"""Whoever holds a weight's memory finds the new values when `step()` returns.

That is as in plain PyTorch, however slow updates are.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import HytrainWarning
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import Stage

from .loops import HYPER, HandAdam, Twins, assert_same, plain_loop, weights
from .models import Batches, Mlp, mlp
from .test_placements import plan_of

Held = Callable[[], list[torch.Tensor]]


def _kept_state_dict(model: Any) -> Held:
    kept = model.state_dict()
    return lambda: list(kept.values())


def _data(model: Any) -> Held:
    kept = [p.data for p in model.parameters()]
    return lambda: kept


def _detached(model: Any) -> Held:
    kept = [p.detach() for p in model.parameters()]
    return lambda: kept


def _views(model: Any) -> Held:
    kept = [model.first.weight.detach()[1:], model.last.weight.detach().view(-1)]
    return lambda: kept


def _numpy(model: Any) -> Held:
    kept = [p.detach().numpy() for p in model.parameters()]
    return lambda: [torch.from_numpy(array) for array in kept]


def _dlpack(model: Any) -> Held:
    kept = [torch.utils.dlpack.from_dlpack(p.detach()) for p in model.parameters()]
    return lambda: kept


def _target_network(model: Any) -> Held:
    target = copy.deepcopy(model)
    for mine, p in zip(target.parameters(), model.parameters(), strict=True):
        mine.data = p.data
    return lambda: [p.detach() for p in target.parameters()]


def _functional(model: Any) -> Held:
    other, held = Mlp(), {name: p.detach() for name, p in model.named_parameters()}
    x = torch.linspace(-1, 1, 12).reshape(2, 6)
    return lambda: [functional_call(other, held, (x,)).detach()]


KINDS: dict[str, Callable[[Any], Held]] = {
    "a kept state_dict": _kept_state_dict, "data": _data, "detach": _detached, "views": _views, "NumPy": _numpy, "DLPack": _dlpack,
    "a target network": _target_network, "functional_call": _functional,
}
PLANS = {"host": [Placement.CPU], "streamed": [Placement.STREAM], "device": [Placement.GPU], "all three": list(Placement)}


@pytest.fixture(scope="module", params=["native", "torch"])
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = Twins(mlp, k=0, workers=2, timeout_s=30.0, warmup_steps=10**6, engine=request.param)
    made.agree(plain_loop(2))
    yield made
    made.close()


def slow(twins: Twins, us: float) -> None:
    for stage in (Stage.CPU_UPDATE, Stage.GPU_UPDATE, Stage.H2D):
        twins.session.engine.set_delay(stage, us)


@pytest.mark.filterwarnings("ignore:the memory of")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_alias_shows_the_new_weights_after_step(kind: str, plan: str, twins: Twins) -> None:
    """An alias taken once and read after every step has the plain loop's values.

    Training has the plain loop's bits.
    """
    if plan in ("streamed", "all three") and not twins.session.engine.can_stream:
        pytest.skip("the torch engine does not stream")

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[Any]:
        if model is twins.ours:
            twins.session.place(plan_of(twins.session, PLANS[plan]))
            slow(twins, 3000)
        found: list[Any] = []
        held = KINDS[kind](model)
        for step in range(4):
            loss = model(*batches[step % len(batches)])
            loss.backward()
            optimizer.step()
            found += [float(loss.detach()), [tensor.double().sum().item() for tensor in held()]]
            optimizer.zero_grad()
        if model is twins.ours:
            assert twins.session.held.rows
            slow(twins, 0)
        return found

    twins.agree(loop)


@pytest.mark.filterwarnings("ignore:the memory of")
def test_a_write_through_an_alias_counts(twins: Twins) -> None:
    """What is written to a held array between steps is in the next step's weights."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        held = model.first.weight.detach().numpy()
        for step in range(4):
            losses += plain_loop(1)(model, optimizer, batches)
            held *= 0.5 + 0.1 * step
        return losses

    twins.agree(loop)


def test_a_write_through_an_alias_waits_for_a_weight_on_its_way_home() -> None:
    """A bf16 row's weight that is copied to the host for comparing is the updated weight.

    The row is streamed.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        held = [p.detach() for p in model.parameters()]
        if model is streamed.ours:
            streamed.session.engine.set_delay(Stage.STREAM_OUT, 5000)
        losses = []
        for step in range(5):
            losses += plain_loop(1)(model, optimizer, batches[step:] + batches[:step])
            for tensor in held:
                tensor.view(-1)[::2] *= 0.9
        return losses

    streamed = Twins(_bf16_mlp, k=0, workers=2, stream=1.0, timeout_s=30.0, warmup_steps=10**6)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the memory of")
        streamed.agree(loop)
    streamed.close()


def test_nothing_is_waited_for_where_nobody_holds_a_weight(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """step() waits only where somebody holds a weight, and warns once with its name.

    A plain loop has no holder, and neither has a loop that has dropped its alias.
    """
    twins.restart()
    waits: list[tuple[int, ...]] = []
    session = twins.session
    session.held._warned = False
    settle = session.eager._settle_held

    def note(rows: Any) -> None:
        waits.append(tuple(rows))
        settle(rows)

    monkeypatch.setattr(session.eager, "_settle_held", note)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain_loop(3)(twins.ours, twins.optimizer, twins.batches)
        assert session.held.rows == ()
    held = twins.ours.first.weight.detach()
    with pytest.warns(HytrainWarning, match=r"memory of 'first\.weight' is held outside the model") as caught:
        plain_loop(3)(twins.ours, twins.optimizer, twins.batches)
    assert len([w for w in caught if "held outside" in str(w.message)]) == 1
    row = session.table.names.index("first.weight")
    assert waits == [()] * 3 + [(row,)] * 3
    assert "its memory is held outside the model" in hytrain_fx.explain(twins.ours).details()
    del held
    plain_loop(2)(twins.ours, twins.optimizer, twins.batches)
    assert session.held.rows == ()
    assert waits == [()] * 3 + [(row,)] * 3 + [()] * 2


def _bf16_mlp() -> tuple[nn.Module, Batches]:
    model, batches = mlp()
    return model.bfloat16(), [tuple(part.bfloat16() if part.is_floating_point() else part for part in batch) for batch in batches]


class Caching(nn.Module):
    """Keeps an alias of its weight that is made in the forward, in code that is not captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.cached: torch.Tensor | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _keep(self) -> None:
        self.cached = self.last.weight.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        self._keep()
        return self.last(x).square().mean()  # type: ignore[no-any-return]


class Flat(nn.Module):
    """Two weights in one storage, which a buffer holds too where `held`."""

    def __init__(self, held: bool) -> None:
        super().__init__()
        flat = torch.linspace(-1, 1, 6 * 8 + 8)
        self.first = nn.Parameter(flat[:48].view(8, 6))
        self.last = nn.Parameter(flat[48:].view(1, 8))
        if held:
            self.register_buffer("flat", flat)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(F.linear(x, self.first)), self.last).square().mean()


def _before_compile(model: Any) -> Held:
    kept = [p.detach() for p in model.parameters()]
    return lambda: kept


SPECIAL: dict[str, tuple[Callable[[], Any], Callable[[Any], Held], bool]] = {
    "taken before compile": (Mlp, _before_compile, True),
    "made in a forward": (Caching, lambda model: lambda: [model.cached.clone()], True),
    "one storage for two weights": (lambda: Flat(False), lambda model: list, False),
    "one storage for two weights and a buffer": (lambda: Flat(True), lambda model: lambda: [model.flat], True),
}


@pytest.mark.filterwarnings("ignore:the memory of")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPECIAL)
def test_unusual_holders_are_seen(name: str, dtype: torch.dtype) -> None:
    """Aliases from before `compile` or made in a forward, and a buffer over all weights, are seen.

    Weights that share a storage hold nothing.
    """
    make, hold, is_held = SPECIAL[name]
    results = []
    for ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = make().to(dtype) if name.startswith(("taken", "made")) else make()
        held = hold(model)
        optimizer: Any = HandAdam(model.parameters(), **HYPER)
        if ours:
            _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), k=0)
        else:
            model.compile()
        found: list[Any] = []
        x = torch.linspace(-1, 1, 12, dtype=next(model.parameters()).dtype).reshape(2, 6)
        for step in range(5):
            if ours and step == 2:
                for stage in (Stage.CPU_UPDATE, Stage.H2D):
                    session_of(model).engine.set_delay(stage, 3000)
            loss = model(x)
            loss.backward()
            optimizer.step()
            found += [float(loss.detach()), [tensor.double().sum().item() for tensor in held()]]
            optimizer.zero_grad()
        results.append((found, weights(model)))
        if ours:
            assert bool(session_of(model).held.rows) == is_held
            hytrain_fx.close(model)
    assert results[1][0] == results[0][0]
    assert_same(results[1][1], results[0][1])


def test_settle_brings_every_weight_for_readers_that_cannot_be_seen() -> None:
    """A raw pointer, taken once, shows the new weight after `hytrain_fx.settle(model)`."""
    import ctypes

    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any
    model, batches = mlp()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), k=0)
    pointer, count = model.first.weight.data_ptr(), model.first.weight.numel()
    session_of(model).engine.set_delay(Stage.CPU_UPDATE, 5000)
    for _ in range(3):
        plain_loop(1)(model, optimizer, batches)
        hytrain_fx.settle(model)
        raw = torch.tensor(list((ctypes.c_float * count).from_address(pointer)))
        assert torch.equal(raw, model.first.weight.detach().flatten())
    hytrain_fx.close(model)
