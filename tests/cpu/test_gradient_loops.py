"""Loops that read, clip, edit, keep or add up gradients have the plain model's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.gradients.standin import GradStandIn
from hytrain_fx.runtime.engine import CommitItem, Stage

from .loops import Loop, Twins, plain_loop
from .models import Batches, mlp

Edit = Callable[[Any], Any]


@pytest.fixture(scope="module", params=[0, 2], ids=["states on the host", "states on both"])
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = Twins(mlp, k=request.param, workers=2, timeout_s=20.0)
    made.agree(plain_loop(2))
    for stage in (Stage.D2H, Stage.GPU_UPDATE):
        made.session.engine.set_delay(stage, 500)
    yield made
    made.close()


def grads(model: Any) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def editing(edit: Edit, steps: int = 4) -> Loop:
    """A step whose gradients pass through `edit` between backward() and step().

    What `edit` returns is compared too.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[Any]:
        found: list[Any] = []
        for step in range(steps):
            loss = model(*batches[step % len(batches)])
            loss.backward()
            found += [float(loss.detach()), edit(model)]
            optimizer.step()
            optimizer.zero_grad()
        return found

    return loop


def add_noise(model: Any) -> None:
    for number, p in enumerate(model.parameters()):
        p.grad += torch.full_like(p, 0.01 * number)


def replace(model: Any) -> None:
    for p in list(model.parameters())[::2]:
        p.grad = p.grad.sign() * 0.5


def drop_some(model: Any) -> None:
    for p in list(model.parameters())[::2]:
        p.grad = None


def scale_in_place(model: Any) -> None:
    for p in model.parameters():
        p.grad.mul_(0.37).mul_(3)


def scale_often(model: Any) -> None:
    for p in model.parameters():
        for factor in (0.3, 1.7, 0.9, 1.1, 0.7, 1.3):
            p.grad.mul_(factor)


def scale_under_no_grad(model: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_(grads(model), 0.25)
        torch._foreach_div_(grads(model), 3.0)


def centralise(model: Any) -> None:
    for p in model.parameters():
        if p.dim() > 1:
            p.grad.sub_(p.grad.mean(dim=1, keepdim=True))


def clip_twice(model: Any) -> list[float]:
    return [float(clip_grad_norm_(model.parameters(), size)) for size in (0.05, 0.01)]


EDITS: dict[str, Edit] = {
    "clip_grad_norm_": lambda model: float(clip_grad_norm_(model.parameters(), 0.01)),
    "clip_grad_norm_ foreach": lambda model: float(clip_grad_norm_(model.parameters(), 0.01, foreach=True)),
    "clip_grad_norm_ for loop": lambda model: float(clip_grad_norm_(model.parameters(), 0.01, foreach=False)),
    "clip_grad_norm_ inf": lambda model: float(clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))),
    "clip_grad_norm_ 1-norm of some": lambda model: float(clip_grad_norm_(model.body.parameters(), 0.01, norm_type=1.0)),
    "clip_grad_norm_ that does not clip": lambda model: float(clip_grad_norm_(model.parameters(), 1e9)),
    "clip_grad_norm_ twice": clip_twice,
    "clip_grad_value_": lambda model: clip_grad_value_(model.parameters(), 1e-3),
    "clip_grad_value_ for loop": lambda model: clip_grad_value_(model.parameters(), 1e-3, foreach=False),
    "get_total_norm": lambda model: float(get_total_norm(grads(model))),
    "values read": lambda model: [float(g.abs().sum()) for g in grads(model)],
    "values read through a copy": lambda model: [g.detach().clone().sum().item() for g in grads(model)],
    "finite check": lambda model: all(bool(torch.isfinite(g).all()) for g in grads(model)),
    "mul_": scale_in_place,
    "six factors": scale_often,
    "foreach": scale_under_no_grad,
    "+=": add_noise,
    "other tensor": replace,
    "some dropped": drop_some,
    "centralised": centralise,
    "zeroed in place": lambda model: [g.zero_() for g in grads(model)[:2]] and None,
}


@pytest.mark.parametrize("edit", EDITS)
def test_gradients_may_be_read_clipped_and_edited(twins: Twins, edit: str) -> None:
    """Every way to read or change `.grad` before step() gives a plain loop's values and bits."""
    twins.agree(editing(EDITS[edit]))


def test_clipping_really_clips(twins: Twins) -> None:
    """clip_grad_norm_ finds every gradient, and the step is the scaled gradients' step.

    An eps as in SGD makes the scale show.
    """
    clipped = twins.agree(editing(lambda model: float(clip_grad_norm_(model.parameters(), 1e-3))), eps=1.0)
    free = twins.agree(editing(lambda model: float(clip_grad_norm_(model.parameters(), 1e9))), eps=1.0)
    assert clipped[1] == free[1] > 1e-2
    assert clipped[2] != free[2]


def test_gradients_on_the_host_take_no_memory_on_the_device(twins: Twins) -> None:
    """After a backward a host row's `.grad` is a stand-in, a device row's is a plain tensor.

    After zero_grad() both are None.
    """
    _, optimizer = twins.restart()
    twins.ours(*twins.batches[0]).backward()
    kinds = {type(g) for g in grads(twins.ours)}
    k = twins.session.planning.plan.k
    assert kinds == ({GradStandIn} if k == 0 else {GradStandIn, torch.Tensor})
    optimizer.zero_grad()
    assert not grads(twins.ours)


def set_to_none(model: Any) -> None:
    for p in model.parameters():
        p.grad = None


ZERO: dict[str, Callable[[Any, Any], Any]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, kept": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, kept": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer: set_to_none(model),
    "by hand, kept": lambda model, optimizer: [p.grad.zero_() for p in model.parameters()],
}


@pytest.mark.parametrize("place", ["after the step", "before the backward"])
@pytest.mark.parametrize("zero", ZERO)
def test_every_way_to_zero_gradients(twins: Twins, zero: str, place: str) -> None:
    """Gradients zeroed after the step or before the next one give the same training.

    They are set to None or filled with zeros.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(4):
            if place == "before the backward" and step:
                ZERO[zero](model, optimizer)
            loss = model(*batches[step % 3])
            if place == "before the backward" and step and "kept" not in zero:
                assert not grads(model)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if place == "after the step":
                ZERO[zero](model, optimizer)
        return losses

    twins.agree(loop)


def test_gradients_that_nobody_wants_may_pile_up(twins: Twins) -> None:
    """Gradients of a second backward between step() and zero_grad() may add up.

    A GAN's generator leaves such gradients in its discriminator.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            loss = model(*batches[step % 3])
            loss.backward()
            optimizer.step()
            model(*batches[0]).backward()
            losses.append(float(loss.detach()))
        return losses

    twins.agree(loop)


@pytest.mark.parametrize("edit", [True, False], ids=["edited", "as it came"])
def test_a_gradient_buffer_may_be_written_right_after_step(twins: Twins, edit: bool) -> None:
    """Values written to `.grad` after step() do not reach the running update.

    They are written in place, or through the user's own tensor.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(3):
            loss = model(*batches[step])
            loss.backward()
            mine = torch.full_like(model.last.weight, 0.25)
            model.last.weight.grad = mine
            if edit:
                model.first.weight.grad.mul_(0.5)
            optimizer.step()
            mine.fill_(7.0)
            for gradient in grads(model) if step else grads(model)[-1:]:
                gradient.zero_()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    twins.agree(loop)


@pytest.mark.parametrize("touch", [False, True])
def test_gradients_that_were_taken_before_step_may_be_zeroed_after_it(twins: Twins, touch: bool) -> None:
    """A list of all `.grad`, made before step() and zeroed after it, changes no running update.

    It is so for weights that the loop has touched too.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(4):
            loss = model(*batches[step % 3])
            loss.backward()
            if touch:
                with torch.no_grad():
                    losses += [float(p.sum()) for p in model.parameters()]
            taken = grads(model)
            optimizer.step()
            torch._foreach_zero_(taken)
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    twins.agree(loop)


def test_an_update_on_the_device_waits_for_whoever_has_read_its_gradient() -> None:
    """What is written through `.grad.data` counts no version: the update goes by step(), not by the
    backward, in that step only.
    """
    torch._dynamo.reset()
    made, batches = mlp()
    model: Any
    model, optimizer = hytrain_fx.compile(made, torch.optim.AdamW(made.parameters()), k=4)
    engine = session_of(model).engine
    at_end: list[list[bool]] = []
    take = engine.commit

    def commit(items: Sequence[CommitItem]) -> None:
        at_end.append([item.at_end for item in items])
        take(items)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "commit", commit)
        for read in (False, True, False):
            model(*batches[0]).backward()
            if read:
                model.last.weight.grad.data.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    parameters = len(list(model.parameters()))
    assert at_end == [[False] * parameters, [False] * (parameters - 1) + [True], [False] * parameters]


KEEPS: dict[str, Callable[[Any], object]] = {
    "nothing": lambda grad: None,
    "tensor": lambda grad: grad,
    "view": lambda grad: grad.view(-1),
    "numpy": lambda grad: grad.numpy(),
}


@pytest.mark.parametrize("keep", KEEPS)
def test_step_waits_for_a_gradient_that_somebody_keeps_alone(keep: str) -> None:
    """Clipping reads all gradients and keeps none: then step() waits for no update."""
    torch._dynamo.reset()
    made, batches = mlp()
    model: Any
    model, optimizer = hytrain_fx.compile(made, torch.optim.AdamW(made.parameters()), k=4)
    engine = session_of(model).engine
    waited: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "wait", waited.extend)
        model(*batches[0]).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        waited.clear()
        kept = KEEPS[keep](model.last.weight.grad)
        optimizer.step()
    last = session_of(model).table.row_of[id(model.last.weight)]
    assert waited == ([] if kept is None else [last])
    hytrain_fx.close(model)


class OneLayer(nn.Module):
    """Its backward reads what came in and what came out, and no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()  # type: ignore[no-any-return]


def one_layer() -> tuple[nn.Module, Batches]:
    return OneLayer(), [(torch.randn(4, 6),) for _ in range(3)]


@pytest.mark.parametrize("options", [{"k": 0}, {"gpu_states": 1.0}, {"k": 0, "stream": 1.0}, {"k": 0, "engine": "torch"}], ids=str)
def test_a_backward_may_come_after_a_step_that_its_forward_came_before(options: dict[str, Any]) -> None:
    """torch refuses a late backward only where it reads a weight that the step has written.

    No forward has waited for the update, which is running.
    """
    made = Twins(one_layer, workers=2, timeout_s=20.0, **options)
    for stage in (Stage.CPU_UPDATE, Stage.GPU_UPDATE, Stage.H2D):
        made.session.engine.set_delay(stage, 2000)

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(6):
            late, loss = model(*batches[0]), model(*batches[1])
            loss.backward()
            optimizer.step()
            if step % 2:
                optimizer.zero_grad()
            late.backward()
            optimizer.step()
            losses += [float(p.grad.double().sum()) for p in model.parameters()]
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    made.agree(loop)
    made.close()
