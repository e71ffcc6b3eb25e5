"""What each rank does in test_loading_ranks.py: models from loaders, and the same ones whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import HytrainError
from hytrain_fx.runtime import memory
from hytrain_fx.torch_private.tensors import without_torch_function
from hytrain_fx.weights.fetched_units import NAN_VARIABLE

from .loops import weights
from .rank_loops import Found, compiled, net
from .shard_loops import Run

HOW: Sequence[tuple[str, dict[str, Any]]] = (
    ("whole", {"k": 0}), ("resident", {"k": 0}), ("sharded", {"k": 0}), ("sharded_host", {"k": 0}), ("sharded_host", {"k": 3}),
    ("sharded", {"stream": 0.5, "k": 0}))


def there_bytes(model: nn.Module) -> int:
    """Bytes of all memory that parameters have, shared memory once."""
    with without_torch_function():
        storages = [p.untyped_storage() for p in model.parameters() if not p.is_meta]
        return sum({of.data_ptr(): of.nbytes() for of in storages if of.nbytes()}.values())


def loader_of(model: nn.Module, values: dict[str, torch.Tensor], most: list[int]) -> Callable[[str], torch.Tensor]:
    """Gives these values, and notes the most bytes that parameters of the model had by then."""
    def load(name: str) -> torch.Tensor:
        most[0] = max(most[0], there_bytes(model))
        return values[name]

    return load


def loaded(rank: int, size: int) -> Sequence[Found]:
    """The first run is a model made whole, with the values of rank 0; others load these."""
    os.environ[NAN_VARIABLE] = "1"
    values, found = weights(net(0)), []
    for how, options in HOW:
        most = [0]
        if how == "whole":
            model: Any = net(rank)
        else:
            with hytrain_fx.on_meta():
                model = net(rank)
            options = {**options, "weights": how, "device": "cpu", "loader": loader_of(model, values, most)}
        run = Run(model, compiled(model, **options), rank, lambda of: 0.0)
        there = there_bytes(model)
        for step in range(3):
            run.backward(step)
            run.end_step()
        states = {f"{number}.{key}": value.clone() for number, state in run.optimizer.state_dict()["state"].items()
                  for key, value in state.items() if isinstance(value, torch.Tensor)}
        found.append({"seen": run.seen, "weights": weights(model) | states, "most": most[0], "there": there})
        hytrain_fx.close(model)
    return found


def initialised(rank: int, size: int) -> Sequence[Found]:
    """The same with the model's own initialisation, which every rank runs with one seed."""
    found = []
    for how in ("whole", "sharded"):
        options: dict[str, Any] = {"k": 0}
        if how == "whole":
            model: Any = net(0)
        else:
            with hytrain_fx.from_init() as loader:
                model = net(0)
            options |= {"weights": how, "device": "cpu", "loader": loader}
        run = Run(model, compiled(model, **options), rank, lambda of: 0.0)
        run.backward(0)
        run.end_step()
        found.append({"seen": run.seen, "weights": weights(model)})
        hytrain_fx.close(model)
    return found


def no_room(rank: int, size: int) -> str:
    """close() of weights that do not fit; then with room."""
    with hytrain_fx.on_meta():
        model: Any = net(rank)
    compiled(model, weights="sharded", device="cpu", loader=weights(net(0)).__getitem__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "room_bytes", lambda device, own_bytes: 0)
        try:
            hytrain_fx.close(model)
            said = "closed"
        except HytrainError as error:
            said = str(error)
    assert not session_of(model).closed
    hytrain_fx.close(model)
    return said


def others(rank: int, size: int) -> None:
    """Each rank has values of its own."""
    values = weights(net(rank))
    with hytrain_fx.on_meta():
        model = net(rank)
    compiled(model, weights="sharded", device="cpu", loader=values.__getitem__)


def all_of_it(rank: int, size: int) -> tuple[Sequence[Found], Sequence[Found], str]:
    """One process of each rank for all, except what ends it."""
    return loaded(rank, size), initialised(rank, size), no_room(rank, size)
