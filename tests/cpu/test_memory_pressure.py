"""The device's memory runs out in a step: states give way, and come back. No bit changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import HostMemoryError
from hytrain_fx.ir.profile import Profile
from hytrain_fx.planning.controller import Event, State
from hytrain_fx.session import giving_way, memory_pressure

WIDTH, WARMUP = 64, 2
WARMED, SHORT_STEP, STEPS = 6, 8, 11  # after warming up; when memory runs out; in all
SHORT: dict[str, int] = {"forward": 0, "backward": 0}
"""How many times more each is to run out of memory."""


def _may_run_out(where: str) -> None:
    if SHORT[where]:
        SHORT[where] -= 1
        raise torch.OutOfMemoryError(f"out of memory in a {where}")


@torch.library.custom_op("hytrain_fx_tests::takes_memory", mutates_args=())
def takes_memory(x: torch.Tensor) -> torch.Tensor:
    """As a kernel whose result the allocator may have no memory for."""
    _may_run_out("forward")
    return x.clone()


@torch.library.custom_op("hytrain_fx_tests::takes_memory_backward", mutates_args=())
def takes_memory_backward(grad: torch.Tensor) -> torch.Tensor:
    """Of the backward."""
    _may_run_out("backward")
    return grad.clone()


takes_memory.register_fake(torch.empty_like)
takes_memory_backward.register_fake(torch.empty_like)
takes_memory.register_autograd(lambda _, grad: takes_memory_backward(grad))


class Net(nn.Module):
    """Layers with dropout, an op that may run out of memory, and perhaps a graph break."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.2)
        if self.breaks:
            torch._dynamo.graph_break()
        x = takes_memory(x)
        for layer in self.layers[3:]:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.fixture(autouse=True)
def enough(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing runs out unless a test says so. States of a small model go in parts too."""
    torch._dynamo.reset()
    monkeypatch.setattr(giving_way, "LEAST_BYTES", 0)
    yield
    SHORT.update(forward=0, backward=0)


def started(breaks: bool = False, **options: Any) -> tuple[Any, Any]:
    """A model whose states are all on the device after the first steps, and its optimizer."""
    torch.manual_seed(0)
    model: Any = Net(breaks)
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=0.05), warmup_steps=WARMUP, **options)
    train(model, optimizer, range(WARMED))
    planning = session_of(model).planning
    if planning.profile is not None and planning.solver.may_give_way:
        planning.profile = _device_repays(planning.profile)
        planning.want(planning.solver.all_on_device(planning.profile, 1.0, planning.discipline), "all on the device")
    return model, optimizer


def _device_repays(profile: Profile) -> Profile:
    """Of a machine whose CPU takes long: measured times may say that no state is worth its room."""
    return replace(profile, units=tuple(replace(unit, cpu_update_us=1e6, gpu_update_us=1.0) for unit in profile.units))


def train(model: Any, optimizer: Any, steps: range, before: Callable[[int], None] = lambda step: None) -> list[float]:
    """The plain loop, which repeats a step that has run out of memory.

    before   is told of each step
    """
    losses = []
    for step in steps:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        before(step)
        for _ in range(2):
            torch.manual_seed(step)  # dropout
            try:
                loss = model(x)
                loss.backward()
                break
            except torch.OutOfMemoryError:
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def at(step: int, where: str) -> Callable[[int], None]:
    """Memory runs out there in this step."""
    def before(now: int) -> None:
        SHORT[where] = int(now == step)
    return before


def on_device(model: Any) -> int:
    """Bytes of states that rest on the device."""
    found: int = hytrain_fx.explain(model).memory.device_states_bytes
    return found


def weights(model: Any) -> list[torch.Tensor]:
    """Copies."""
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "graph break"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_ran_out_is_as_any_other(where: str, breaks: bool) -> None:
    """Losses and weights are those of a run with enough memory; half of the states leave.

    A forward in one graph is called again by us. What the loop has to repeat, it repeats.
    """
    model, optimizer = started(breaks)
    losses, expected = train(model, optimizer, range(WARMED, STEPS)), weights(model)
    torch._dynamo.reset()
    model, optimizer = started(breaks)
    before = 0

    def told(step: int) -> None:
        nonlocal before
        if step == SHORT_STEP:
            before = on_device(model)
        at(SHORT_STEP, where)(step)

    assert train(model, optimizer, range(WARMED, STEPS), told) == losses
    assert all(map(torch.equal, weights(model), expected))
    assert session_of(model).pressure.times == 1
    assert before == 8 * sum(p.numel() for p in model.parameters())  # two moments; the weights are the masters
    assert on_device(model) <= before // 2
    assert any(f"memory ran out in a {where} after {SHORT_STEP} steps" in note for note in hytrain_fx.explain(model).plan.notes)


def test_an_error_in_the_loops_own_code_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes by no code of ours: the allocator's count tells. Half of the states leave, once.

    After the forward, as in a loss; then after the backward, as in clipping. The count is not read
    in steps that were completed.
    """
    errors, reads = 0, 0

    def counted(device: torch.device) -> int:
        nonlocal reads
        reads += 1
        return errors

    monkeypatch.setattr(memory_pressure, "_errors_of_allocator", counted)
    model, optimizer = started()
    train(model, optimizer, range(WARMED, SHORT_STEP))
    before, reads = on_device(model), 0
    train(model, optimizer, range(SHORT_STEP, SHORT_STEP + 2))
    assert reads == 0
    for times, backward in enumerate((False, True), 1):
        steps = session_of(model).steps_done
        loss = model(torch.randn(8, WIDTH))
        if backward:
            loss.backward()
        errors += 1
        optimizer.zero_grad()
        train(model, optimizer, range(1))
        assert session_of(model).pressure.times == times
        assert on_device(model) <= before // 2**times
        assert any(f"memory ran out in code outside the model after {steps} steps" in note
                   for note in hytrain_fx.explain(model).plan.notes)


def test_a_forward_in_one_graph_is_called_again() -> None:
    """The loop sees no error, and the same random numbers."""
    model, optimizer = started()
    train(model, optimizer, range(WARMED, SHORT_STEP))
    x, numbers = torch.randn(8, WIDTH), torch.get_rng_state()
    expected = model(x)
    after = torch.get_rng_state()
    torch.set_rng_state(numbers)
    SHORT["forward"] = 1
    assert torch.equal(model(x), expected)
    assert torch.equal(torch.get_rng_state(), after)
    assert SHORT["forward"] == 0


def test_a_forward_with_code_between_graphs_is_not() -> None:
    """That code may have done anything. The error says what comes next."""
    model, optimizer = started(breaks=True)
    train(model, optimizer, range(WARMED, SHORT_STEP))
    SHORT["forward"] = 1
    with pytest.raises(torch.OutOfMemoryError) as raised:
        model(torch.randn(8, WIDTH))
    (note,) = raised.value.__notes__
    assert "of optimizer states on the device. Before the next forward half of these states go to the host" in note
    optimizer.zero_grad()
    model(torch.randn(8, WIDTH)).backward()
    assert session_of(model).pressure.times == 1


def test_with_gradients_in_place_nothing_moves() -> None:
    """A gradient would lose its slot. The second micro-batch's error reaches the loop."""
    model, optimizer = started()
    train(model, optimizer, range(WARMED, SHORT_STEP))
    before = on_device(model)
    model(torch.randn(8, WIDTH)).backward()
    SHORT["forward"] = 1
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.randn(8, WIDTH))
    assert on_device(model) == before
    optimizer.zero_grad()
    model(torch.randn(8, WIDTH))
    assert on_device(model) <= before // 2


def test_again_and_again_until_nothing_is_left() -> None:
    """States halve until they are gone; then the error comes as it is."""
    model, optimizer = started()
    train(model, optimizer, range(WARMED, SHORT_STEP))
    plans = len(session_of(model).planning.history)
    SHORT["forward"] = 100
    with pytest.raises(torch.OutOfMemoryError) as raised:
        model(torch.randn(8, WIDTH))
    assert "hytrain_fx has nothing of its own on the device. Smaller micro-batches" in raised.value.__notes__[0]
    assert on_device(model) == 0
    halves = len(session_of(model).planning.history) - plans
    assert halves >= 2
    assert SHORT["forward"] == 100 - halves - 1


def test_a_host_without_room_for_half_leaves_no_limit() -> None:
    """Nothing moves, and later plans are solved as before."""
    states_bytes = 16 * sum(p.numel() for p in Net().parameters())  # with slots
    model, optimizer = started(host_memory=int(0.45 * states_bytes))
    train(model, optimizer, range(WARMED, SHORT_STEP))
    before, solver = on_device(model), session_of(model).planning.solver
    SHORT["forward"] = 1
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.randn(8, WIDTH))
    assert solver.most_bytes is None
    train(model, optimizer, range(SHORT_STEP, SHORT_STEP + 2))
    assert on_device(model) == before


def test_what_no_longer_fits_is_not_tried() -> None:
    """All states on the device were wished for, and memory ran out before that came into force."""
    model, optimizer = started()
    planning = session_of(model).planning
    train(model, optimizer, range(WARMED, SHORT_STEP + 2), at(SHORT_STEP, "forward"))
    before = on_device(model)
    assert planning.profile is not None
    found = planning.solver.all_on_device(planning.profile, 1.0, planning.discipline)
    assert found is None
    planning.want(found, "all on the device")
    train(model, optimizer, range(SHORT_STEP + 2, SHORT_STEP + 4))
    assert on_device(model) == before


def test_states_that_the_options_place_stay() -> None:
    """The error names the option."""
    model, optimizer = started(gpu_states=0.5)
    planning = session_of(model).planning
    assert planning.profile is not None
    planning.want(planning.solver.at(1, planning.profile, 1.0, planning.discipline), "one unit on the device")  # times may say none
    train(model, optimizer, range(WARMED, SHORT_STEP))
    before = on_device(model)
    assert before > 0
    SHORT["forward"] = 1
    with pytest.raises(torch.OutOfMemoryError) as raised:
        model(torch.randn(8, WIDTH))
    assert "a smaller gpu_states, which the options fix here" in raised.value.__notes__[0]
    model(torch.randn(8, WIDTH))
    assert on_device(model) == before


def test_states_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some steps without an error memory counts as free, and another plan is solved."""
    monkeypatch.setattr(memory_pressure, "PATIENCE_STEPS", 3)
    model, optimizer = started()
    planning = session_of(model).planning

    def limit_bytes() -> int | None:
        return planning.solver.most_bytes

    train(model, optimizer, range(WARMED, SHORT_STEP + 2), at(SHORT_STEP, "forward"))
    assert limit_bytes() is not None
    plans = len(planning.history)
    train(model, optimizer, range(SHORT_STEP + 2, SHORT_STEP + 12))
    assert limit_bytes() is None
    assert len(planning.history) > plans or "looked at again" in planning.plan.notes[-1]


def test_a_plan_that_is_to_stay_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With replan_every=0 none is solved: the plan from before the error is in force again.

    It comes back after the patience, and only where memory has room for it. Losses are those of a
    run with enough memory.
    """
    monkeypatch.setattr(memory_pressure, "PATIENCE_STEPS", 3)
    model, optimizer = started(replan_every=0)
    losses = train(model, optimizer, range(WARMED, SHORT_STEP + 14))
    torch._dynamo.reset()
    model, optimizer = started(replan_every=0)
    planning = session_of(model).planning
    found = train(model, optimizer, range(WARMED, SHORT_STEP))
    before, plans = on_device(model), len(planning.history)
    has_room, room = planning.solver.has_room, [False]
    monkeypatch.setattr(planning.solver, "has_room", lambda *of: room[0] and has_room(*of))
    found += train(model, optimizer, range(SHORT_STEP, SHORT_STEP + 6), at(SHORT_STEP, "forward"))
    assert planning.controller.state is State.FIXED
    assert on_device(model) <= before // 2
    room[0] = True
    found += train(model, optimizer, range(SHORT_STEP + 6, SHORT_STEP + 14))
    assert on_device(model) == before
    assert len(planning.history) == plans + 2
    assert any("the plan from before comes back" in note for note in planning.plan.notes)
    assert planning.solver.most_bytes is None
    assert session_of(model).pressure._patience_steps == 2 * 3  # doubled once, for the one return
    assert found == losses


def test_a_trial_does_not_keep_states_away_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another plan is tried nothing comes back; when the trial has ended it does."""
    monkeypatch.setattr(memory_pressure, "PATIENCE_STEPS", 3)
    model, optimizer = started()
    planning = session_of(model).planning
    train(model, optimizer, range(WARMED, SHORT_STEP + 1), at(SHORT_STEP, "forward"))
    planning.controller.state = State.TRYING
    with monkeypatch.context() as patched:
        patched.setattr(planning.controller, "_tried", lambda report: (Event.STEPPED, ""))
        train(model, optimizer, range(SHORT_STEP + 1, SHORT_STEP + 8))
    assert planning.solver.most_bytes is not None
    planning.controller.state = State.SETTLED
    train(model, optimizer, range(SHORT_STEP + 8, SHORT_STEP + 10))
    assert planning.solver.most_bytes is None


def test_states_that_could_not_leave_may_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With replan_every=0: the move that gives way fails. A later error makes another."""
    monkeypatch.setattr(memory_pressure, "PATIENCE_STEPS", 3)
    model, optimizer = started(replan_every=0)
    session = session_of(model)
    train(model, optimizer, range(WARMED, SHORT_STEP))
    before = on_device(model)
    with monkeypatch.context() as patched:
        patched.setattr(session.states, "move", lambda *_: (_ for _ in ()).throw(HostMemoryError("full")))
        train(model, optimizer, range(SHORT_STEP, SHORT_STEP + 2), at(SHORT_STEP, "forward"))
    train(model, optimizer, range(SHORT_STEP + 2, SHORT_STEP + 6))
    assert on_device(model) == before
    train(model, optimizer, range(SHORT_STEP + 6, SHORT_STEP + 8), at(SHORT_STEP + 6, "forward"))
    assert on_device(model) <= before // 2


def test_a_plan_that_is_not_in_force_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With replan_every=0: a recording holds up the plan that gives way, beyond the patience.

    States come back when they have been away, and not before.
    """
    monkeypatch.setattr(memory_pressure, "PATIENCE_STEPS", 3)
    model, optimizer = started(replan_every=0)
    planning = session_of(model).planning
    train(model, optimizer, range(WARMED, SHORT_STEP))
    before = on_device(model)
    planning.recording = True
    train(model, optimizer, range(SHORT_STEP, SHORT_STEP + 6), at(SHORT_STEP, "forward"))
    planning.recording = False
    assert on_device(model) == before
    train(model, optimizer, range(SHORT_STEP + 6, SHORT_STEP + 7))
    assert on_device(model) <= before // 2
    train(model, optimizer, range(SHORT_STEP + 7, SHORT_STEP + 16))
    assert on_device(model) == before
