"""Optimizers of torch with options worth trying, and classes as users write them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

Kind = Callable[..., torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """Written on `.data`, as many are; its steps can be traced."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p.data)
                first, second = group["betas"]
                direction = state["average"] * first + p.grad.data * (1 - first)
                p.data.add_(torch.sign(direction), alpha=-group["lr"])
                state["average"].mul_(second).add_(p.grad.data, alpha=1 - second)
        return loss


class DerivedAdamW(torch.optim.AdamW):
    """Not AdamW as the engines know it: a derived class may step differently."""


class WithRate(torch.optim.Optimizer):
    """Its one option is lr."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})


class OwnNorm(WithRate):
    """An optimizer that cannot be traced.

    It divides by the parameter's norm as a Python number, and gives the parameter new memory.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                norm = max(float(p.norm()), 0.1)
                self.state[p]["norms"] = [*self.state[p].get("norms", []), norm]
                p.data = p.data - group["lr"] / norm * p.grad


class GroupCounter(torch.optim.Optimizer):
    """Counts steps in its groups and on itself, and keeps the last gradient itself."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "count": 0})
        self.warm_up = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.warm_up *= 0.5
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    last = self.state[p].get("last", p.grad)
                    p.sub_((p.grad + last) * (group["lr"] * (1 - self.warm_up) / (1 + group["count"])))
                    self.state[p]["last"] = p.grad
            group["count"] += 1


class GlobalNorm(WithRate):
    """Needs all gradients at once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with_grad = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in with_grad]).norm()
        for p in with_grad:
            p.sub_(p.grad / norm)


class Block(torch.Tensor):
    """A tensor of another class, as packed states are."""


class Packing(WithRate):
    """Keeps states of large parameters in tensors of another class."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if "sum" not in self.state[p]:
                        zeros = torch.zeros_like(p)
                        self.state[p]["sum"] = zeros.as_subclass(Block) if p.numel() >= 4096 else zeros
                    self.state[p]["sum"] += p.grad
                    p.sub_(group["lr"] * torch.Tensor(self.state[p]["sum"]))


class Noisy(WithRate):
    """Draws random numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


class NormCounter(OwnNorm):
    """Counts on itself, and cannot be traced."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        super().step()


class Sharp(torch.optim.Optimizer):
    """Calls the model again within its step."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        return closure()


class Around(torch.optim.Optimizer):
    """Holds its parameters in a list of its own."""

    def __init__(self, params: Iterable[Any]) -> None:
        self.held = list(params)
        super().__init__(self.held, {})

    def step(self, closure: Any = None) -> Any: ...


TRACED: dict[str, tuple[Kind, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD dampening maximize": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.5, "dampening": 0.3, "maximize": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5, "weight_decay": 0.1}),
    "NAdam": (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1, "weight_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {"weight_decay": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"rho": 0.8, "weight_decay": 0.1}),
    "Rprop": (torch.optim.Rprop, {}),
    "DerivedAdamW": (DerivedAdamW, {"weight_decay": 0.1, "amsgrad": True}),
    "Lion": (Lion, {}),
    "GroupCounter": (GroupCounter, {}),
}
if hasattr(torch.optim, "Muon"):
    TRACED["Muon"] = (torch.optim.Muon, {"lr": 0.1, "weight_decay": 0.1})
OP_BY_OP: dict[str, tuple[Kind, dict[str, Any]]] = {
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1, "weight_decay": 0.1}),
    "OwnNorm": (OwnNorm, {}),
}
EVERY = TRACED | OP_BY_OP


def make(name: str, params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """The optimizer of this name, in torch's for-loop form where it has several."""
    kind, defaults = EVERY[name]
    form = {"foreach": False} if "foreach" in inspect.signature(kind).parameters else {}
    return kind(params, **form, **{**defaults, **options})
