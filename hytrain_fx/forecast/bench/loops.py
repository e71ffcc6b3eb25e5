"""Ways of training that are compared, each ready to step.

    floor        compiled forward and backward, no optimizer
    on_device    compiled, AdamW with every state on the device
    ours         hytrain_fx around a plain loop

`backward` is what they share: the forward and backward of one step, which leave gradients in
`.grad`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

import hytrain_fx  # before CUDA is used, so that every way has the longer queue of launches that it asks for

B = TypeVar("B")  # what one step trains on
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Trainer(Generic[B]):
    """One way of training, ready to step.

    step          one training step on a batch; returns the loss, and does not wait for the device
    finish        returns when everything of the steps so far is done, on every device
    about         what the way has to tell about itself once its steps are timed, as JSON
    plans         how many plans it has made: steps are timed when it makes no more of them
    tries         whether it still times ways of updating, to choose one
    held_up_s     how long making plans, and what belongs to it, has held the loop up so far
    launching_s   how long the host was in the newest forward and backward, in seconds; None where
                  it is not known
    """

    step: Callable[[B], torch.Tensor]
    finish: Callable[[], None]
    about: Callable[[], Mapping[str, Any]] = dict
    plans: Callable[[], int] = int
    tries: Callable[[], bool] = bool
    held_up_s: Callable[[], float] = float
    launching_s: Callable[[], float | None] = lambda: None


class _Launches(Generic[B]):
    """Calls a forward and backward, and notes how long the host was in it."""

    def __init__(self, backward: Callable[[B], torch.Tensor]) -> None:
        self._backward = backward
        self._last_s: float | None = None

    def __call__(self, batch: B) -> torch.Tensor:
        begin_s = time.perf_counter()
        loss = self._backward(batch)
        self._last_s = time.perf_counter() - begin_s
        return loss

    def last_s(self) -> float | None:
        return self._last_s


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def floor(model: nn.Module, backward: Callable[[B], torch.Tensor]) -> Trainer[B]:
    """Compiled forward and backward, no optimizer: what no way of updating can be faster than."""
    model.compile()
    launches = _Launches(backward)

    def step(batch: B) -> torch.Tensor:
        loss = launches(batch)
        model.zero_grad(set_to_none=True)
        return loss

    return Trainer(step, synchronize, launching_s=launches.last_s)


def on_device(model: nn.Module, backward: Callable[[B], torch.Tensor], **kernel: Any) -> Trainer[B]:
    """Compiled, with AdamW on the device; `kernel` is fused=True or foreach=True.

    It works on fp32 parameters, and on fp32 masters of 16-bit ones.
    """
    model.compile()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = {parameter: parameter.detach().float() for parameter in parameters if parameter.dtype != torch.float32}
    launches = _Launches(backward)
    optimizer = torch.optim.AdamW([masters.get(parameter, parameter) for parameter in parameters], **kernel, **ADAMW)

    def step(batch: B) -> torch.Tensor:
        loss = launches(batch)
        for parameter, master in masters.items():
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(list(masters), list(masters.values()))
        optimizer.zero_grad(set_to_none=True)
        return loss

    return Trainer(step, synchronize, launching_s=launches.last_s)


def ours(model: nn.Module, backward: Callable[[B], torch.Tensor], options: Mapping[str, Any], *, barrier: bool = False) -> Trainer[B]:
    """hytrain_fx with these options of `compile` around a plain loop.

    With `barrier` no update runs beside the backward or the forward.
    """
    from hytrain_fx.forecast.bench.our_plan import about

    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW), **options)
    launches = _Launches(backward)

    def step(batch: B) -> torch.Tensor:
        loss = launches(batch)
        if barrier:
            synchronize()
        optimizer.step()
        optimizer.zero_grad()
        if barrier:
            finish()
        return loss

    def finish() -> None:
        session.eager.settle(range(len(session.table)))  # not hytrain_fx.settle: weights that rest on the host stay there
        synchronize()

    session = optimizer.session
    planning = session.planning
    return Trainer(step, finish, lambda: about(model), lambda: len(planning.history), lambda: session.foresight.tries,
                   lambda: planning.aside.delay.took_s, launches.last_s)
