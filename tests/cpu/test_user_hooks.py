"""Gradient hooks of the user, and GradScaler with autocast, around a compiled model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.session.eager_access import EagerAccess
from hytrain_fx.torch_private import compiling

from .loops import Loop, compare, plain_loop
from .models import Batches, mlp


def scaled(dtype: torch.dtype, *, unscale: bool, scale: float = 2.0**10) -> Loop:
    """The loop of torch's automatic mixed precision examples.

    The loss of step 2 overflows, so its step is skipped.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        found = []
        for step in range(6):
            with torch.autocast("cpu", dtype=dtype):
                low = model(*batches[step % 3])
            assert low.dtype is dtype, f"the compiled code is that of {low.dtype}"
            loss = low.float()
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            if unscale:
                scaler.unscale_(optimizer)
                found.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05).nan_to_num(-1.0)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found += [float(loss.detach()), scaler.get_scale()]
        return found

    return loop


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("unscale", [False, True], ids=["step alone", "unscale and clip"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_grad_scaler_and_autocast(dtype: torch.dtype, unscale: bool, k: int) -> None:
    """Scales, skipped steps, losses and weights are the plain loop's, in autocast's dtype.

    AOTAutogradCache is off: in torch 2.11 its key says only that autocast is on (2.13 adds the
    dtype), so that the plain loop in float16 would be served the code compiled for bfloat16 by a
    test before it. The library's own graphs never come from that cache.
    """
    with compiling.autograd_cache_off():
        found = compare(mlp, scaled(dtype, unscale=unscale), k=k)
    scales = found[2::3] if unscale else found[1::2]
    assert scales[2] < scales[1], "the overflow was not seen"


@pytest.mark.parametrize("k", [0, 2])
def test_a_gradient_hook_registered_before_compile(k: int) -> None:
    """It sees the real gradient, and what it returns is used."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        seen: list[float] = []

        def halve(grad: torch.Tensor) -> torch.Tensor:
            seen.append(float(grad.abs().sum()))
            return grad * 0.5

        handles = [model.first.weight.register_hook(halve), model.last.weight.register_hook(halve)]
        losses = plain_loop(4)(model, optimizer, batches)
        for handle in handles:
            handle.remove()
        assert len(seen) == 8
        return losses + seen + plain_loop(2)(model, optimizer, batches)

    compare(mlp, loop, k=k)


@pytest.mark.parametrize("k", [0, 2])
def test_a_gradient_hook_registered_in_mid_run(k: int) -> None:
    """A hook that comes when the graphs are already compiled is not silently ignored."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = plain_loop(2)(model, optimizer, batches)
        seen: list[float] = []
        handle = model.first.weight.register_hook(lambda grad: seen.append(float(grad.sum())))
        losses += plain_loop(3)(model, optimizer, batches)
        handle.remove()
        return losses + seen

    compare(mlp, loop, k=k)


class Split(nn.Module):
    """Two layers and a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return self.last(hidden.tanh()).sum()  # type: ignore[no-any-return]


def test_a_gradient_hook_in_mid_run_on_a_split_forward() -> None:
    """The parts of a forward with a graph break are compiled one by one; each is captured again."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = plain_loop(2)(model, optimizer, batches)
        seen: list[float] = []
        handles = [p.register_hook(lambda grad: seen.append(float(grad.sum()))) for p in (model.first.bias, model.last.weight)]
        losses += plain_loop(2)(model, optimizer, batches)
        for handle in handles:
            handle.remove()
        assert len(seen) == 4
        return losses + seen + plain_loop(1)(model, optimizer, batches)

    compare(lambda: (Split(), [(torch.randn(3, 4),) for _ in range(2)]), loop, k=0)


def test_a_gradient_hook_registered_behind_the_forward() -> None:
    """The compiled backward of that forward cannot give the hook its gradient.

    That is an error that says so, not a None.
    """
    torch._dynamo.reset()
    model: Any
    model, batches = mlp()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0)
    plain_loop(2)(model, optimizer, batches)
    loss = model(*batches[0])
    model.first.weight.register_hook(lambda grad: None)
    with pytest.raises(UnsupportedError, match=r"'first\.weight' between the forward and its backward"):
        loss.backward()
    hytrain_fx.close(model)


@pytest.mark.parametrize("k", [0, 2])
def test_a_post_accumulate_hook(k: int) -> None:
    """It finds the real gradient in `.grad` and may change it."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        seen: list[float] = []

        def clip(p: torch.Tensor) -> None:
            assert p.grad is not None
            seen.append(float(p.grad.abs().max()))
            p.grad.clamp_(-1e-3, 1e-3)

        handle = model.first.weight.register_post_accumulate_grad_hook(clip)
        losses = plain_loop(3)(model, optimizer, batches)
        handle.remove()
        return losses + seen

    compare(mlp, loop, k=k)


@pytest.mark.parametrize("k", [0, 2])
def test_a_post_accumulate_hook_registered_in_mid_run(k: int) -> None:
    """A hook that is silently ignored would be the worst kind of loss."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = plain_loop(2)(model, optimizer, batches)
        seen: list[float] = []
        handle = model.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum())))
        losses += plain_loop(3)(model, optimizer, batches)
        handle.remove()
        return losses + seen

    compare(mlp, loop, k=k)


@pytest.mark.parametrize("k", [0, 2])
def test_a_post_accumulate_hook_in_mid_run_on_a_sum_of_calls(k: int) -> None:
    """It finds the sum of all micro-batches, also where a backward adds up two calls first."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = plain_loop(2)(model, optimizer, batches)
        seen: list[float] = []
        handle = model.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum())))
        for _ in range(2):
            model(*batches[0]).backward()
            (model(*batches[1]) + model(*batches[2])).backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.remove()
        assert len(seen) == 4
        return losses + seen

    compare(mlp, loop, k=k)


def test_forward_and_backward_hooks_of_modules() -> None:
    """Module hooks registered before compile see what they see in plain torch.compile.

    That is activations and their gradients.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        return plain_loop(3)(model, optimizer, batches)

    def make() -> tuple[nn.Module, Batches]:
        model: Any
        model, batches = mlp()
        model.body.register_forward_hook(lambda module, args, output: output * 1.5)
        return model, batches

    compare(make, loop)


def halved(value: Any) -> Any:
    return value * 0.5


ON_THE_MODEL: dict[str, Callable[[Any], RemovableHandle]] = {
    "forward": lambda model: model.register_forward_hook(lambda module, args, output: halved(output)),
    "forward, with kwargs": lambda model: model.register_forward_hook(
        lambda module, args, kwargs, output: halved(output), with_kwargs=True),
    "forward pre": lambda model: model.register_forward_pre_hook(lambda module, args: (args[0].flip(-1),)),
    "backward": lambda model: model.register_full_backward_hook(lambda module, grads, of_output: None),
    "backward pre": lambda model: model.register_full_backward_pre_hook(lambda module, grads: (halved(grads[0]),)),
    "of all modules": lambda model: register_module_forward_hook(
        lambda module, args, output: halved(output) if module is model else output),
}


@pytest.mark.parametrize("on", ON_THE_MODEL)
def test_hooks_come_to_the_model_itself_and_leave_it(on: str) -> None:
    """In the middle of training, as in the plain loop."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for _ in range(2):
            losses += plain_loop(2)(model, optimizer, batches)
            with ON_THE_MODEL[on](model):
                losses += plain_loop(3)(model, optimizer, batches)
        return losses + plain_loop(2)(model, optimizer, batches)

    compare(mlp, loop)


def test_a_hook_is_compiled_once_however_often_it_comes() -> None:
    """Registering the same function or method again compiles nothing new."""
    torch._dynamo.reset()
    model: Any
    model, batches = mlp()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0)
    graphs = []

    class Halves:
        def output(self, module: nn.Module, args: Any, output: Any) -> Any:
            return halved(output)

    of = Halves()
    for _ in range(4):
        plain_loop(2)(model, optimizer, batches)
        with model.register_forward_hook(of.output):
            plain_loop(2)(model, optimizer, batches)
        graphs.append(len(session_of(model).capture.graphs))
    hytrain_fx.close(model)
    assert len(set(graphs)) == 1


def test_what_is_done_before_eager_code_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo, which runs a forward with a graph break in parts, leaves our code between them alone.

    Streams have no handles in compiled code.
    """

    compiling: list[bool] = []
    before = EagerAccess.before_eager_code

    def seen(access: EagerAccess) -> None:
        compiling.append(torch.compiler.is_compiling())
        before(access)

    monkeypatch.setattr(EagerAccess, "before_eager_code", seen)
    torch._dynamo.reset()
    model: Any = Split()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0)
    plain_loop(4)(model, optimizer, [(torch.randn(3, 4),)])
    hytrain_fx.close(model)
    assert compiling
    assert not any(compiling)
