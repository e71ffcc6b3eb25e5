"""Loops over batches in two parts: by `share`, and by hand with a plain copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.session.call_gate import find_session

from .loops import Loop, Make
from .models import Batches, gpt

Part = tuple[Any, Any, float]
"""A model, what it is called with, and its weight in the mean."""
Parts = Callable[[Any, Any], Iterator[Part]]
AfterBackward = Callable[[Any, Any], list[float]]


def gpt_of_eight(dtype: torch.dtype) -> Make:
    """A small GPT in this dtype, with batches of eight sequences."""

    def make() -> tuple[nn.Module, Batches]:
        model, _ = gpt()
        torch.manual_seed(2)
        return model.to(dtype), [(torch.randint(0, 19, (8, 6)),) for _ in range(3)]

    return make


class ByHand:
    """The same split in plain PyTorch: the CPU's part goes through a copy compiled by torch.

    Its gradients are added to those of the model, which was compiled by torch too.
    """

    def __init__(self, by_cpu: int) -> None:
        self._by_cpu = by_cpu
        self._copies: dict[int, nn.Module] = {}

    def parts(self, batch: Any, model: nn.Module) -> Iterator[Part]:
        """As `share`, of a plain model."""
        (tokens,) = batch
        cut = len(tokens) - self._by_cpu
        yield model, (tokens[:cut].to(next(model.parameters()).device),), cut / len(tokens)
        ours = self._copy_of(model)
        yield ours, (tokens[cut:],), self._by_cpu / len(tokens)
        for parameter, other in zip(model.parameters(), ours.parameters(), strict=True):
            if other.grad is not None:
                grad = other.grad.to(parameter.device)
                parameter.grad = grad.clone() if parameter.grad is None else parameter.grad.add_(grad)
                other.grad = None

    def _copy_of(self, model: nn.Module) -> nn.Module:
        if id(model) not in self._copies:
            made = self._copies[id(model)] = copy.deepcopy(model).cpu()
            made.compile()
        made = self._copies[id(model)]
        made.load_state_dict(model.state_dict())
        made.train(model.training)
        return made


def shared(batch: Any, model: nn.Module) -> Iterator[Part]:
    """`share`, as `ByHand.parts` gives it."""
    for part in hytrain_fx.share(batch, model):
        yield part.model, part.batch, part.weight


def noted_fetches(monkeypatch: pytest.MonkeyPatch, engine: Any) -> list[int]:
    """Rows whose gradients are brought back to the device from now on."""
    fetched: list[int] = []
    fetch = engine.fetch

    def noted(rows: Any, out: torch.Tensor) -> Any:
        fetched.extend(rows)
        return fetch(rows, out)

    monkeypatch.setattr(engine, "fetch", noted)
    return fetched


def nothing(model: Any, optimizer: Any) -> list[float]:
    """Nothing happens between the last backward and `step()`."""
    return []


def in_parts(by_hand: ByHand, steps: int, *, batches_a_step: int = 1, after: AfterBackward = nothing) -> Loop:
    """`steps` steps, each of so many batches in parts. `after` comes before `step()`."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        parts: Parts = by_hand.parts if find_session(model) is None else shared
        found, number = [], 0
        for _ in range(steps):
            for _ in range(batches_a_step):
                for part_model, part, weight in parts(batches[number % len(batches)], model):
                    loss = part_model(*part)
                    (weight * loss).backward()
                    found.append(float(loss.detach()))
                number += 1
            found += after(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return found

    return loop
