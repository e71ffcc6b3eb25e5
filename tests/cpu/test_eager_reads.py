"""Eager code of a forward waits for what it reads alone, and has the plain loop's bits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.capture.units import group_units
from hytrain_fx.errors import EngineError
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.runtime.native.op_reads import storage_of
from hytrain_fx.session import eager_reads
from hytrain_fx.session.eager_access import EagerAccess
from hytrain_fx.weights.outside_writes import OutsideWrites

from .loops import HYPER, HandAdam, assert_same, weights

WIDTH, STEPS = 8, 12
DELAY_US = 400.0


class Deep(nn.Module):
    """Four layers and a head; what stands between them is a subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def first(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        return x

    def last(self, x: Tensor) -> Tensor:
        for layer in self.layers[2:]:
            x = torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))

    def between(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


class Disabled(Deep):
    """A part that Dynamo leaves alone reads the weight of one layer that graphs read too."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def between(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.layers[3].weight)


class ViewHandedOn(Deep):
    """A graph hands on a view of a weight, which eager code reads."""

    def between(self, x: Tensor) -> Tensor:
        view = self.layers[3].weight.t()
        torch._dynamo.graph_break()
        return x @ view  # type: ignore[no-any-return]


class Penalty(Deep):
    """Eager code reads all weights as a list of norms."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def between(self, x: Tensor) -> Tensor:
        return x + 1e-3 * torch.stack(torch._foreach_norm([layer.weight for layer in self.layers])).sum()


class _Kernel(torch.autograd.Function):
    """Reads its weight through NumPy, as a foreign kernel would through a pointer."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(x, weight)
        return x @ torch.from_numpy(weight.detach().cpu().numpy().copy()).to(x.device)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = context.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Foreign(Deep):
    """Eager code hands a weight to an autograd.Function."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def between(self, x: Tensor) -> Tensor:
        return _Kernel.apply(x, self.layers[3].weight)  # type: ignore[no-any-return, no-untyped-call]


class Chunks(Deep):
    """Eager code reads a weight twice, for gradients that autograd adds up with a graph's."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def between(self, x: Tensor) -> Tensor:
        return torch.cat([torch.sin(part) @ self.layers[3].weight for part in x.split(2)])


class Writes(Deep):
    """Eager code in the forward changes a weight in place (a constraint on its norm)."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layers[3].weight.mul_(0.99)
        return x


class WritesUnseen(Deep):
    """The same through `.data`, which counts no version in the forward."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def between(self, x: Tensor) -> Tensor:
        self.layers[3].weight.data.clamp_(-0.1, 0.1)
        torch._foreach_mul_([self.layers[2].weight.data], 0.99)
        return x


class Loss(Deep):
    """The break comes last: at a loss that Dynamo does not capture."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.last(self.first(x)))  # type: ignore[no-any-return]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def scaled(self, x: Tensor) -> Tensor:
        return x * 1.5


class Uncaptured(Deep):
    """No graph at all."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


class Recurrent(Deep):
    """An LSTM between the layers: Dynamo breaks the graph there."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def between(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None].expand(-1, 3, -1))[0].mean(1)  # type: ignore[no-any-return]


MODELS: tuple[type[Deep], ...] = (Deep, Disabled, ViewHandedOn, Penalty, Foreign, Chunks, Writes, WritesUnseen, Loss, Uncaptured, Recurrent)


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""

    def fail(*_: object) -> Any:
        raise EngineError("of this test")

    monkeypatch.setattr(eager_reads, "OperatorReads", fail)


def batches_of(device: str | torch.device = "cpu") -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(6, WIDTH).to(device), torch.randint(0, 5, (6,)).to(device)) for _ in range(3)]


def _train(model: Any, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[Tensor]:
    losses, batches = [], batches_of(next(model.parameters()).device)
    for step in range(steps):
        for x, y in batches[: 1 + step % 2]:  # one micro-batch, then two
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.detach())
        if step % 3 == 2:
            with torch.no_grad():
                losses.append(model(batches[2][0]))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _compiled(kind: type[Deep], device: str = "cpu", **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = kind().to(device)
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), **{"k": 0, "workers": 1} | options)
    return model, optimizer


@functools.cache
def trained_plain(kind: type[Deep], device: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and weights of a plain compiled model, trained once for all ways to train ours."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain: Any = kind().to(device)
    plain.compile()
    return _train(plain, HandAdam(plain.parameters(), **HYPER)), weights(plain)


def require_same_as_plain(kind: type[Deep], device: str = "cpu", **options: Any) -> None:
    """Train a plain compiled model and ours, with delays; losses and weights have the same bits."""
    hashable: Any = kind  # mypy takes classes for what they make
    expected, expected_weights = trained_plain(hashable, device)
    model, optimizer = _compiled(kind, device, **options)
    for stage in (Stage.CPU_UPDATE, Stage.H2D, Stage.D2H):
        session_of(model).engine.set_delay(stage, DELAY_US)
    found = _train(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert_same(weights(model), expected_weights)
    hytrain_fx.close(model)


@pytest.mark.sample(10)
@pytest.mark.parametrize("options", [{}, {"stream": 1.0}, {"engine": "torch"}, {"k": 2}], ids=["host", "streamed", "torch engine", "k"])
@pytest.mark.parametrize("kind", MODELS)
def test_slow_updates_change_no_bit(kind: type[Deep], options: dict[str, Any]) -> None:
    """Whatever eager code reads, writes or hands to kernels, it finds this step's weights."""
    require_same_as_plain(kind, **options)


def test_writes_are_seen_where_touched_weights_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: what eager code of the forward writes through `.data` becomes the master."""
    follow = OutsideWrites.follow
    monkeypatch.setattr(OutsideWrites, "follow", lambda self, touched: follow(self, ()))
    require_same_as_plain(WritesUnseen)


@pytest.mark.parametrize("kind", [Deep, Disabled, Uncaptured])
@pytest.mark.usefixtures("unseen")
def test_where_reads_cannot_be_seen_all_weights_are_waited_for(kind: type[Deep]) -> None:
    """Without a compiler the bits are the same."""
    require_same_as_plain(kind)


def _waits(model: Any, optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers that one forward waits for, in order; "eager" is where the part between begins."""
    session = session_of(model)
    order: list[str] = []
    wait = session.engine.wait
    layer_of = {row: name.rsplit(".", 1)[0] for row, name in enumerate(session.table.names)}

    def noted(rows: Any) -> None:
        order.extend(dict.fromkeys(layer_of[session.states.pieces.parameter(row)] for row in rows))
        wait(rows)

    _train(model, optimizer, 3)
    with monkeypatch.context() as patch:
        patch.setattr(session.engine, "wait", noted)
        patch.setattr(_Eager, "told", lambda: order.append("eager"))
        model(batches_of()[0][0])
    return order


class _Eager:
    """What the part between tells of itself."""

    told: Callable[[], None] = staticmethod(lambda: None)


class Between(Deep):
    """Eager code between that reads no weight."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def between(self, x: Tensor) -> Tensor:
        _Eager.told()
        return x * 2


class BetweenReads(Deep):
    """Eager code between that reads the head."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def between(self, x: Tensor) -> Tensor:
        _Eager.told()
        return x + self.head.weight.sum()


def test_eager_code_waits_for_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is waited for where it is read: in its graph, or in eager code."""
    before, after = ["layers.0", "layers.1"], ["layers.2", "layers.3"]
    model, optimizer = _compiled(Between)
    assert _waits(model, optimizer, monkeypatch) == [*before, "eager", *after, "head"]
    page = hytrain_fx.explain(model).details()
    assert "are read by code outside" not in page
    line = inspect.getsourcelines(Deep.forward)[1] + 1
    assert f"{__file__}:{line} in forward" in page.replace("\n", " ").replace("  ", " ")
    hytrain_fx.close(model)
    model, optimizer = _compiled(BetweenReads)
    assert _waits(model, optimizer, monkeypatch) == [*before, "eager", "head", *after, "head"]
    assert "head" in hytrain_fx.explain(model).details().split("are read by code outside")[1]
    hytrain_fx.close(model)


class Stem(Deep):
    """Eager code reads first what the module lists last, as a Whisper's convolutions are read."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, x: Tensor) -> Tensor:
        return self.stem(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.begin(x))


class StemUncaptured(Stem):
    """The same without any graph."""

    forward = torch.compiler.disable(Stem.forward)


@pytest.mark.parametrize(("kind", "expected"), [
    (Stem, ["stem", "layers.0", "layers.1", "layers.2", "layers.3", "head"]),
    (StemUncaptured, ["stem", "layers.0", "layers.1", "layers.2", "layers.3", "head"]),
    (BetweenReads, ["layers.0", "layers.1", "head", "layers.2", "layers.3"]),
])
def test_what_eager_code_reads_first_is_due_first(kind: type[Deep], expected: list[str]) -> None:
    """Units count in the order of their first use, also where eager code is what uses them."""
    model, optimizer = _compiled(kind)
    _train(model, optimizer, 1)
    session = session_of(model)
    assert [session.units[number].name for number in session.capture.unit_order] == expected
    assert [unit.name for unit in session.planning.units()] == expected
    due = {session.units[number].name: {session.nodes.unit_of[row] for row in session.units[number].rows}
           for number in session.capture.unit_order}
    assert due == {name: {index} for index, name in enumerate(expected)}
    hytrain_fx.close(model)
    require_same_as_plain(kind)


def test_a_kept_plan_fits_a_model_that_has_not_run_yet() -> None:
    """A plan counts units in the forward's order, which a new model learns in its first step."""
    model, optimizer = _compiled(Stem, k=2)
    _train(model, optimizer, 3)
    kept = hytrain_fx.explain(model).plan
    assert [row.unit_name for row in kept.rows[:3]] == ["stem", "layers.0", "layers.1"]
    hytrain_fx.close(model)
    model, optimizer = _compiled(Stem, k="auto", plan=Plan.from_json(kept.to_json()))
    session = session_of(model)
    for steps in (0, STEPS):
        _train(model, optimizer, steps)
        names = {session.table.names[of.piece.parameter] for of in session.states.placed if of.placement is Placement.GPU}
        assert names == {"stem.weight", "stem.bias", "layers.0.weight", "layers.0.bias"}
    assert session.planning.profile is not None
    assert [(row.unit, row.unit_name, row.placement) for row in session.planning.plan.rows] == [
        (row.unit, row.unit_name, row.placement) for row in kept.rows]
    assert session.planning.plan.k == 2
    hytrain_fx.close(model)


class Late(Deep):
    """Eager code that reads two more layers later on, the last one first."""

    def __init__(self) -> None:
        super().__init__()
        self.more: Any = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.is_late = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def between(self, x: Tensor) -> Tensor:
        return self.more[0](self.more[1](x)) if self.is_late else x * 2


def test_units_keep_their_numbers_once_times_are_measured() -> None:
    """The plan in force counts in them: what a later forward reads first changes no number."""
    model, optimizer = _compiled(Late)
    session = session_of(model)
    _train(model, optimizer)
    assert session.planning.profile is not None
    before = session.capture.unit_order
    model.is_late = True
    _train(model, optimizer)
    assert session.capture.unit_order == before
    assert [unit.name for unit in session.planning.units()][-2:] == ["more.0", "more.1"]
    assert {"more.0", "more.1"} <= {session.units[number].name for number in session.eager.reads.read}
    hytrain_fx.close(model)


def test_a_failed_wait_in_eager_code_ends_the_forward() -> None:
    """torch drops what is raised before an operator: the forward's end raises it."""
    model, optimizer = _compiled(Uncaptured)
    _train(model, optimizer, 2)
    session = session_of(model)

    def fail(rows: Any) -> None:
        raise EngineError("the engine has failed, of this test")

    wait, session.engine.wait = session.engine.wait, fail  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="of this test"):
        model(batches_of()[0][0])
    session.engine.wait = wait  # type: ignore[method-assign]
    model(batches_of()[0][0])
    hytrain_fx.close(model)


@pytest.mark.parametrize("kind", [Disabled, Recurrent, Uncaptured])
def test_what_waits_in_eager_code_is_not_compiled(kind: type[Deep], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo, which runs such a forward in parts, leaves our code in its operators alone."""
    compiling: list[bool] = []
    frames = torch._dynamo.utils.counters["frames"]
    read = EagerAccess._read_in_forward

    def seen(access: EagerAccess, rows: Any) -> None:
        before = frames["total"]
        read(access, rows)
        compiling.append(torch.compiler.is_compiling() or frames["total"] != before)

    monkeypatch.setattr(EagerAccess, "_read_in_forward", seen)
    model, optimizer = _compiled(kind)
    _train(model, optimizer, 4)
    hytrain_fx.close(model)
    assert compiling
    assert not any(compiling)


class _Inner(Deep):
    """A model that is called inside another's forward."""


class Outer(Deep):
    """Its eager part calls a compiled model, which is no part of it."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def between(self, x: Tensor) -> Tensor:
        return x + self.__dict__["other"](x).sum()  # type: ignore[no-any-return]


def test_a_model_inside_another_watches_its_own() -> None:
    """Both are compiled here; the inner one's end does not end the outer one's watch."""
    results = []
    for ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        outer, inner = Outer(), _Inner()
        outer.__dict__["other"] = inner
        optimizers: list[torch.optim.Optimizer] = []
        for model in (outer, inner):
            if ours:
                optimizers.append(hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), k=0, workers=1)[1])
                session_of(model).engine.set_delay(Stage.H2D, 300.0)
            else:
                model.compile()
                optimizers.append(HandAdam(model.parameters(), **HYPER))
        for _ in range(8):
            for x, y in batches_of():
                F.cross_entropy(outer(x), y).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        results.append(weights(outer) | {f"inner.{name}": value for name, value in weights(inner).items()})
        if ours:
            hytrain_fx.close(outer)
            hytrain_fx.close(inner)
    assert_same(results[1], results[0])


def test_an_interrupted_look_for_storages_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights are watched in the next forward, not those that were found before a Ctrl+C."""
    model, read = Deep(), list[int]()
    parameters = list(model.parameters())
    reads = eager_reads.EagerReads(parameters, group_units(model, [name for name, _ in model.named_parameters()]),
                                   lambda rows: None, lambda rows: None, read.extend, lambda rows: None)
    asked = list[int]()

    def interrupted(tensor: Tensor) -> int:
        asked.append(1)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return storage_of(tensor)

    monkeypatch.setattr(eager_reads, "storage_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reads.begin()
    reads.begin()
    model.first(torch.ones(2, WIDTH))
    model.last(torch.ones(2, WIDTH))
    reads.end()
    assert set(read) == set(range(len(parameters)))
