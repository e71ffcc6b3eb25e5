"""The floor, everything on the GPU, and hytrain_fx."""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn

import hytrain_fx  # before CUDA is used, so that every mode has the longer queue of launches that it asks for
from benchmarks.case import Case
from benchmarks.llama import ADAMW
from benchmarks.trainer import Trainer, backward_of, synchronize


def floor(case: Case, model: nn.Module, device: torch.device) -> Trainer:
    """Compiled forward and backward, no optimizer: what no way of updating can be faster than."""
    model.compile()
    backward = backward_of(case, model, device)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = backward(tokens)
        model.zero_grad(set_to_none=True)
        return loss

    return Trainer(step, synchronize)


def all_gpu(case: Case, model: nn.Module, device: torch.device) -> Trainer:
    """Compiled, everything on the device, with fused AdamW.

    It works on the fp32 parameters, or on fp32 masters of the 16-bit ones.
    """
    return _on_device(case, model, device, {"fused": True})


def reference(case: Case, model: nn.Module, device: torch.device) -> Trainer:
    """As `all_gpu`, with AdamW(foreach=True), whose bits are those of hytrain_fx."""
    return _on_device(case, model, device, {"foreach": True})


def _on_device(case: Case, model: nn.Module, device: torch.device, kernel: dict[str, Any]) -> Trainer:
    model.compile()
    backward = backward_of(case, model, device)
    parameters: list[torch.Tensor] = list(model.parameters())
    if case.autocast:
        optimizer = torch.optim.AdamW(parameters, **kernel, **ADAMW)

        def on_parameters(tokens: torch.Tensor) -> torch.Tensor:
            loss = backward(tokens)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        return Trainer(on_parameters, synchronize)
    masters = [parameter.detach().float() for parameter in parameters]
    of_masters = torch.optim.AdamW(masters, **kernel, **ADAMW)

    def on_masters(tokens: torch.Tensor) -> torch.Tensor:
        loss = backward(tokens)
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        of_masters.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        of_masters.zero_grad(set_to_none=True)
        return loss

    return Trainer(on_masters, synchronize)


def ours(case: Case, model: nn.Module, device: torch.device, *, barrier: bool = False) -> Trainer:
    """hytrain_fx with the case's options around a plain loop.

    With `barrier` no update runs beside the backward or the forward.
    """
    from benchmarks.our_plan import about

    options = dict(option_of(text) for text in case.options)
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **ADAMW), **options)
    backward = backward_of(case, model, device)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = backward(tokens)
        if barrier:
            synchronize()
        optimizer.step()
        optimizer.zero_grad()
        if barrier:
            finish()
        return loss

    def finish() -> None:
        optimizer.session.settle()
        synchronize()

    return Trainer(step, finish, lambda: about(model), lambda: len(optimizer.session.planning.history))


def option_of(text: str) -> tuple[str, Any]:
    """`NAME=VALUE` as a name and a Python literal, or a string where it is none."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
