"""Weights that rest on the host and come when graphs read them.

Every bit is the loop's with resident weights.
"""

from __future__ import annotations

import copy
import gc
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import DroppedNodeError, EngineError, HytrainError
from hytrain_fx.ir.limits import UNITS_AHEAD
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.session.session import Session
from hytrain_fx.torch_private.tensors import without_torch_function
from hytrain_fx.weights.device_slots import slot_bytes
from hytrain_fx.weights.fetched_units import NAN_VARIABLE

from .loops import HYPER, Loop, Twins, assert_same, compare, gpt_in, plain_loop, weights
from .models import Batches, broken_gpt, checkpointed_gpt, gpt
from .test_placements import plan_of

# Who reads a weight when, Inductor decides. Compiling takes a minute: .ci/run names this file.
pytestmark = [pytest.mark.fused_kernels, pytest.mark.sample(0)]

TOKENS, LAYERS, WIDTH = 19, 6, 32
OPTIONS: dict[str, Any] = {"weights": "streamed", "workers": 1, "timeout_s": 60.0}


@pytest.fixture(autouse=True, scope="module")
def nan_slots() -> Iterator[None]:
    """A slot is NaN once its weights have been read: who reads late trains on NaN."""
    os.environ[NAN_VARIABLE] = "1"
    yield
    del os.environ[NAN_VARIABLE]


def streamed_gpts() -> Twins:
    """A pair of GPTs of six layers, tied head and embedding; ours with its weights on the host."""

    def make() -> tuple[nn.Module, Batches]:
        model, batches = gpt(layers=LAYERS, width=WIDTH)
        return model.to(torch.bfloat16), batches

    return Twins(make, k=0, **OPTIONS)


@pytest.fixture(scope="module")
def twins() -> Iterator[Twins]:
    """One pair for all loops."""
    made = streamed_gpts()
    yield made
    made.close()


def memory_of(session: Session) -> dict[str, bool]:
    """By name of a streamed weight: whether its parameter has memory of its own. Nobody is told."""
    return {session.table.names[row]: of.has_memory for row, of in session.states.streamed.items()}


def steps(between: Callable[[Any, Any, int], Any], count: int = 4) -> Loop:
    """Ordinary steps, with something done between backward() and step()."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        seen = []
        for step in range(count):
            loss = model(*batches[step % len(batches)])
            loss.backward()
            found = between(model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
            seen += [float(loss.detach()), *([] if found is None else [float(found)])]
        return seen

    return loop


def tokens(seed: int) -> torch.Tensor:
    return (torch.arange(12).view(2, 6) * (seed + 3)) % TOKENS


def _accumulated(model: Any) -> None:
    for seed in range(2):
        model(tokens(seed)).backward()


def _two_forwards(model: Any) -> None:
    first, second = model(tokens(1)), model(tokens(2))
    second.backward()
    first.backward()


def _evaluated(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        seen = sum(model(tokens(seed)) for seed in range(3))
    model.train()
    return torch.as_tensor(seen)


def _averaged(model: Any, step: int) -> torch.Tensor:
    """An evaluation with other weights, and the training's again."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    seen = _evaluated(model)
    model.load_state_dict(before)
    return seen


def _written(model: Any, step: int) -> None:
    with torch.no_grad():
        if step == 0:
            model.h[0].qkv.weight.mul_(1.5)
        elif step == 1:
            model.h[1].up.weight.data = model.h[1].up.weight.data * 0.5
        elif step == 2:
            model.h[2].down.weight.data[0] = 0.25
        else:
            model.load_state_dict({name: value * 1.25 for name, value in model.state_dict().items()})


def _grads(model: Any) -> torch.Tensor:
    given = torch.autograd.grad(model(tokens(5)), [model.h[0].up.weight, model.wte.weight])
    return torch.as_tensor(sum(one.float().abs().sum() for one in given))


BETWEEN: dict[str, Callable[[Any, Any, int], Any]] = {
    "plain": lambda model, optimizer, step: None,
    "clipped": lambda model, optimizer, step: clip_grad_norm_(model.parameters(), 0.05),
    "accumulated": lambda model, optimizer, step: _accumulated(model),
    "two forwards": lambda model, optimizer, step: _two_forwards(model),
    "evaluated": lambda model, optimizer, step: _evaluated(model),
    "averaged": lambda model, optimizer, step: _averaged(model, step),
    "weights read": lambda model, optimizer, step: model.h[3].out.weight.float().abs().sum(),
    "gradients read": lambda model, optimizer, step: model.h[1].qkv.weight.grad.float().norm(),
    "weights written": lambda model, optimizer, step: _written(model, step),
    "torch.autograd.grad": lambda model, optimizer, step: _grads(model),
    "a penalty of the weights": lambda model, optimizer, step: (model.h[0].out.weight.square().sum() * 1e-2).backward(),
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_loops_have_the_bits_of_resident_weights(twins: Twins, between: Callable[[Any, Any, int], Any]) -> None:
    """Losses, what is read in between, and weights are the plain loop's."""
    twins.agree(steps(between))


def test_between_steps_no_parameter_has_its_matrix(twins: Twins) -> None:
    """All of a forward, a backward and a step runs without memory of the parameters' own.

    Slots are fewer than layers: nothing is resident in secret.
    """
    _, optimizer = twins.restart()
    session = twins.session
    session.place(plan_of(session, [Placement.CPU]))
    plain_loop(3)(twins.ours, optimizer, twins.batches)
    matrices = {name for name, p in twins.plain.named_parameters() if p.dim() > 1}
    assert memory_of(session) == dict.fromkeys(matrices, False)
    fetched = session.eager.streamed.units.bytes_fetched
    plain_loop(1)(twins.ours, optimizer, twins.batches)
    assert session.eager.streamed.units.bytes_fetched > fetched
    streamed = sum(2 * p.numel() for p in twins.plain.parameters() if p.dim() > 1)
    layer = sum(2 * p.numel() for p in twins.plain.h[0].parameters() if p.dim() > 1)
    memory = hytrain_fx.explain(twins.ours).memory
    assert memory.weights_bytes == sum(2 * p.numel() for p in twins.plain.parameters()) - streamed
    assert memory.estimate is not None
    assert (memory.estimate.weights_bytes, memory.estimate.weight_slots_bytes) == (memory.weights_bytes, memory.weight_slots_bytes)
    assert f"{len(matrices)} of" in str(hytrain_fx.explain(twins.ours).details())
    assert session.eager.streamed.units.slot_bytes == (UNITS_AHEAD + 1) * layer + slot_bytes(2 * TOKENS * WIDTH)
    assert session.eager.streamed.units.slot_bytes < streamed * 0.7


@pytest.mark.parametrize("ahead", [0, 1, 3, 100])
def test_how_far_ahead_weights_come_changes_no_bit(twins: Twins, ahead: int) -> None:
    """From none to all of them; with updates and copies that are late."""
    streamed = twins.session.eager.streamed.units
    before = streamed.ahead
    streamed.look_ahead(ahead)
    try:
        delays = {Stage.CPU_UPDATE: 300, Stage.LANDING: 200, Stage.ISSUE: 200}
        twins.agree(steps(BETWEEN["clipped"]), delays=delays)
    finally:
        streamed.look_ahead(before)


def test_gradients_that_are_zeroed_in_place(twins: Twins) -> None:
    """zero_grad(set_to_none=False) keeps gradients of zeros."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        seen = []
        for batch in batches:
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            seen.append(float(loss.detach()))
        return seen

    twins.agree(loop)


def test_loss_scales_that_overflow(twins: Twins) -> None:
    """A step that GradScaler leaves out leaves the weights on the host too."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        seen = []
        for step in range(6):
            loss = model(*batches[step % len(batches)])
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [float(loss.detach()), scaler.get_scale()]
        return seen

    twins.agree(loop)


def test_views_of_a_weight_stay_true(twins: Twins) -> None:
    """A view that the loop keeps has memory, and shows the last update after step()."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        view, seen = model.h[0].up.weight.detach().t(), []
        for batch in batches:
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [float(view.float().sum()), float(loss.detach())]
        return seen

    with pytest.warns(hytrain_fx.HytrainWarning, match="held outside"):
        twins.agree(loop)


def test_checkpoints_go_on_with_the_same_bits(twins: Twins) -> None:
    """Model and optimizer saved after two steps, loaded after two more: the same two again."""
    _, optimizer = twins.restart()
    plain_loop(2)(twins.ours, optimizer, twins.batches)
    saved = copy.deepcopy((twins.ours.state_dict(), optimizer.state_dict()))
    expected = plain_loop(2)(twins.ours, optimizer, twins.batches), weights(twins.ours)
    for first, second in ((0, 1), (1, 0)):  # in either order
        for which in (first, second, 1):
            (twins.ours, optimizer)[which].load_state_dict(copy.deepcopy(saved[which]))
        assert plain_loop(2)(twins.ours, optimizer, twins.batches) == expected[0]
        assert_same(weights(twins.ours), expected[1])


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(plans=st.lists(st.lists(st.sampled_from(list(Placement)), min_size=1, max_size=6), min_size=1, max_size=4), clips=st.booleans())
def test_no_sequence_of_placements_changes_a_bit(twins: Twins, plans: list[list[Placement]], clips: bool) -> None:
    """A weight whose states leave the CPU is on the device again, and streamed when they return."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for places in plans:
            if model is twins.ours:
                session = twins.session
                session.place(plan_of(session, places))
                matrices = {row for row, p in enumerate(session.table.parameters) if p.dim() > 1}
                whole = matrices - session.states.pieces.cut.keys()
                on_cpu = {row for row in whole if session.states.placement[row] is Placement.CPU}
                assert session.states.streamed.keys() == on_cpu
            losses += steps(BETWEEN["clipped" if clips else "plain"], count=2)(model, optimizer, batches)
        return losses

    twins.agree(loop)
    twins.session.place(plan_of(twins.session, [Placement.CPU]))


@pytest.mark.parametrize("place", [Placement.STREAM, Placement.GPU], ids=str)
def test_masters_keep_their_bits_where_a_weight_was_only_read(twins: Twins, place: Placement) -> None:
    """What the loop has read of a streamed weight is known when its states leave the CPU."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = plain_loop(2)(model, optimizer, batches)
        held = [model.h[number].up.weight.detach() for number in range(2)]
        if model is twins.ours:
            twins.session.place(plan_of(twins.session, [place]))
        losses += plain_loop(2)(model, optimizer, batches)
        del held
        return losses + plain_loop(4)(model, optimizer, batches)

    twins.agree(loop)
    twins.session.place(plan_of(twins.session, [Placement.CPU]))


def bf16(make: Callable[[], tuple[nn.Module, Batches]]) -> Callable[[], tuple[nn.Module, Batches]]:
    def made() -> tuple[nn.Module, Batches]:
        model, batches = make()
        return model.to(torch.bfloat16), batches

    return made


def test_layers_that_are_computed_again_in_the_backward() -> None:
    """Under checkpointing a backward graph reads each weight of a layer twice."""
    compare(bf16(checkpointed_gpt), plain_loop(4), **OPTIONS)


def test_graphs_that_end_in_the_middle_of_a_forward() -> None:
    """The tied weight is read by two graphs, and each backward makes a part of its gradient."""
    compare(bf16(broken_gpt), plain_loop(4), **OPTIONS)


class Eager(nn.Module):
    """One of its layers runs as eager code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        x = self.alone(x)
        return torch.tanh(self.third(x)).float().square().mean()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def alone(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(x))


def eager() -> tuple[nn.Module, Batches]:
    return Eager().to(torch.bfloat16), [(torch.randn(4, 8, dtype=torch.bfloat16),) for _ in range(3)]


def test_eager_code_in_a_forward_reads_its_weight() -> None:
    """What it reads stays on the device, as its backward has no node; what graphs read does not."""
    compare(eager, plain_loop(4), **OPTIONS)
    torch._dynamo.reset()
    model, batches = eager()
    options = {**OPTIONS, "gpu_states": 0.0, "stream": 0.0}
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), warmup_steps=2, **options)
    plain_loop(8)(model, optimizer, batches)  # a plan was solved: nothing may go to the device
    assert memory_of(session_of(model)) == {"first.weight": False, "second.weight": True, "third.weight": False}
    assert "second.weight" in str(hytrain_fx.explain(model).details())
    hytrain_fx.close(model)


class Giver(nn.Module):
    """It returns a view of a weight besides its loss, and writes to another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            self.third.weight.mul_(0.75)
        x = torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x))))))
        return x.float().square().mean(), self.second.weight.t()


def giver() -> tuple[nn.Module, Batches]:
    return Giver().to(torch.bfloat16), [(torch.randn(4, 8, dtype=torch.bfloat16),) for _ in range(3)]


def test_a_weight_that_a_graph_gives_away_or_writes_keeps_its_memory() -> None:
    """Who gets a view from the model may read it at any time; what a graph writes lands."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        seen = []
        for batch in batches:
            loss, view = model(*batch)
            (loss + view[0].float().sum() * 1e-2).backward()
            seen.append(float(view.detach().float().sum()))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(loss.detach()))
        return seen

    compare(giver, loop, **OPTIONS)


@pytest.mark.parametrize("end", ["close", "drop"])
def test_parameters_have_their_memory_when_training_is_over(end: str) -> None:
    """After close(), in a copy, or without its model, a parameter has the last update's weight."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    made, batches = gpt_in(torch.bfloat16)()
    model: Any = made
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), **OPTIONS)
    plain_loop(3)(model, optimizer, batches)
    kept: Any = model.h[0].up.weight
    copied = copy.deepcopy(model)
    plain_loop(1)(copied, torch.optim.AdamW(copied.parameters()), batches)
    expected = copy.deepcopy(model).h[0].up.weight
    plain_loop(2)(model, optimizer, batches)
    assert not memory_of(session_of(model))["h.0.up.weight"]
    if end == "drop":
        del model, optimizer
        gc.collect()
    else:
        hytrain_fx.close(model)
        assert isinstance(float(model(*batches[0])), float)
    with without_torch_function():
        assert kept.untyped_storage().nbytes() == 2 * kept.numel()
    assert not torch.equal(kept.detach(), expected)
    assert not kept.isnan().any()


@pytest.fixture
def started() -> Iterator[tuple[Any, Any, Batches]]:
    """A small GPT of its own, compiled and trained for two steps, to be broken."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    made, batches = gpt_in(torch.bfloat16)()
    model: Any = made
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), **OPTIONS)
    plain_loop(2)(model, optimizer, batches)
    yield model, optimizer, batches
    hytrain_fx.close(model)


def test_a_fetch_that_does_not_run_is_noticed(started: tuple[Any, Any, Batches], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the compiler has dropped a node, or one has lost a row: an error, no old weights."""
    model, optimizer, batches = started
    nodes = session_of(model).nodes
    fetch = nodes.fetch
    monkeypatch.setattr(nodes, "fetch", lambda rows: fetch(rows[1:]))
    with pytest.raises(DroppedNodeError, match="of its weights were never fetched"):
        plain_loop(1)(model, optimizer, batches)


def test_a_slot_that_is_given_too_early_shows_as_nan(started: tuple[Any, Any, Batches], monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that lets go of weights before their readers have run is not hidden by old numbers."""
    model, optimizer, batches = started
    units = session_of(model).nodes.fetched
    fetch = units.fetch

    def too_short(rows: Any) -> None:
        fetch(rows)
        units.let_go(rows)

    monkeypatch.setattr(units, "fetch", too_short)
    assert math.isnan(plain_loop(1)(model, optimizer, batches)[0])


def test_an_update_that_may_meet_a_copy_is_refused(started: tuple[Any, Any, Batches], monkeypatch: pytest.MonkeyPatch) -> None:
    """That updates come after copies of weights is checked at each step, not taken on trust."""
    model, optimizer, batches = started
    units = session_of(model).nodes.fetched
    monkeypatch.setattr(units, "cover", lambda rows: None)
    plain_loop(1)(model, optimizer, batches)  # step() waits for the copies then
    monkeypatch.setattr(units, "before_step", lambda: None)
    with pytest.raises(EngineError, match="is updated while its weight is on its way to the device"):
        plain_loop(1)(model, optimizer, batches)


def test_units_come_ahead_of_need(started: tuple[Any, Any, Batches], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on most units are there when their node runs: it copies nothing."""
    model, optimizer, batches = started
    units = session_of(model).nodes.fetched
    bring, exposed = units._bring, []

    def watched(unit: Any, run: Any) -> None:
        before = units.bytes_fetched
        bring(unit, run)
        exposed.append(units.bytes_fetched > before)

    monkeypatch.setattr(units, "_bring", watched)
    session_of(model).settle()
    plain_loop(1)(model, optimizer, batches)
    with torch.no_grad():
        model(*batches[0])
    assert exposed.count(True) < len(exposed) / 2


def small(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


REFUSED: dict[str, tuple[str, Callable[[], tuple[nn.Module, torch.optim.Optimizer]], dict[str, Any]]] = {
    "fp32 weights": ("no weight of this model can be", lambda: _with(torch.optim.AdamW, small(torch.float32)), {}),
    "fp16 weights": ("no weight of this model can be", lambda: _with(torch.optim.AdamW, small(torch.float16)), {}),
    "vectors alone": ("no weight of this model can be", lambda: _with(torch.optim.AdamW, nn.LayerNorm(8).to(torch.bfloat16)), {}),
    "another optimizer": ("with SGD", lambda: _with(torch.optim.SGD, small()), {}),
    "another engine": ("option engine", lambda: _with(torch.optim.AdamW, small()), {"engine": "torch"}),
    "updates before step()": ("option speculate", lambda: _with(torch.optim.AdamW, small()), {"speculate": True}),
    "a C++ wrapper": ("no C\\+\\+ wrapper", lambda: _with(torch.optim.AdamW, small()), {"options": {"cpp_wrapper": True}}),
    "another word": ("option weights='shard'", lambda: _with(torch.optim.AdamW, small()), {"weights": "shard"}),
    "shards of one process": ('weights="sharded" on one process', lambda: _with(torch.optim.AdamW, small()), {"weights": "sharded"}),
}


def _with(kind: Any, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, kind(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_streamed_is_refused(case: tuple[str, Callable[[], Any], dict[str, Any]]) -> None:
    """With what was found and what to use; the model and its optimizer stay plain."""
    said, make, options = case
    model, optimizer = make()
    with pytest.raises(HytrainError, match=said):
        hytrain_fx.compile(model, optimizer, **{"weights": "streamed", **options})
    assert type(next(model.parameters())) is nn.Parameter
    if isinstance(model, nn.Sequential):
        model(torch.ones(2, 8, dtype=next(model.parameters()).dtype)).square().sum().backward()
        optimizer.step()
