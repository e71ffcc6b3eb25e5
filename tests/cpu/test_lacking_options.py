"""Options that a checkpoint's groups lack become what torch's `load_state_dict` makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hytrain_fx

from .loops import assert_same, plain_loop, weights
from .models import Batches, mlp
from .test_adamw_bits import correctly_rounded_sqrt, needs_torch_fma

Make = Callable[[Any], torch.optim.Optimizer]
LACKING = ("maximize", "decoupled_weight_decay", "amsgrad", "foreach", "capturable", "differentiable", "fused")


def started(make: Make, ours: bool, **options: Any) -> tuple[Any, Any, Batches]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any
    model, batches = mlp()
    optimizer: Any = make(model.parameters())
    if ours:
        _, optimizer = hytrain_fx.compile(model, optimizer, **{"k": 0, **options})
    else:
        model.compile()
    return model, optimizer, batches


def old_checkpoint(make: Make) -> dict[str, Any]:
    """Of a torch that did not have these options yet."""
    model, optimizer, batches = started(make, False)
    plain_loop(2)(model, optimizer, batches)
    saved: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        for key in LACKING:
            group.pop(key, None)
    return saved


KINDS: dict[str, tuple[Make, Make]] = {  # of the checkpoint, and of the run that loads it
    "maximize": (lambda of: torch.optim.Adam(of, foreach=False), lambda of: torch.optim.Adam(of, maximize=True, foreach=False)),
    "decoupled weight decay": (
        lambda of: torch.optim.Adam(of, weight_decay=0.3, foreach=False),
        lambda of: torch.optim.Adam(of, weight_decay=0.3, decoupled_weight_decay=True, foreach=False)),
    "AdamW": (lambda of: torch.optim.AdamW(of, foreach=False), lambda of: torch.optim.AdamW(of, maximize=True, foreach=False)),
    "Adam's by AdamW": (lambda of: torch.optim.Adam(of, foreach=False), lambda of: torch.optim.AdamW(of, maximize=True, foreach=False)),
    "SGD": (
        lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9, foreach=False),
        lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9, maximize=True, foreach=False)),
}


@needs_torch_fma
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_checkpoint_lacks_is_what_torch_takes_for_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's class sets its old behaviour (`__setstate__`), not what this run was made with.

    Then both train alike, in the same direction.
    """
    correctly_rounded_sqrt(monkeypatch)
    old, new = KINDS[kind]
    saved = old_checkpoint(old)
    found, groups = [], []
    for ours in (True, False):
        model, optimizer, batches = started(new, ours)
        plain_loop(1)(model, optimizer, batches)
        optimizer.load_state_dict(saved)
        groups.append([{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups])
        plain_loop(3)(model, optimizer, batches)
        found.append(weights(model))
        if ours:
            hytrain_fx.close(model)
    assert groups[0] == groups[1]
    assert_same(*found)


def test_a_sharded_checkpoint_is_completed_in_the_same_way() -> None:
    """`load_sharded_state_dict` takes the same for an option that is not in it."""
    model, optimizer, batches = started(lambda of: torch.optim.Adam(of, maximize=True), True)
    plain_loop(1)(model, optimizer, batches)
    saved = optimizer.sharded_state_dict()
    for group in saved["param_groups"]:
        del group["maximize"]
    optimizer.load_sharded_state_dict(saved)
    assert optimizer.param_groups[0]["maximize"] is False
    hytrain_fx.close(model)


def test_the_options_of_this_library_stay() -> None:
    """Where moments rest, and their seed, are not torch's to set."""
    saved = old_checkpoint(lambda of: torch.optim.AdamW(of, foreach=False))
    for entry in saved["state"].values():
        entry["exp_avg"], entry["exp_avg_sq"] = entry["exp_avg"].bfloat16(), entry["exp_avg_sq"].bfloat16()
    model, optimizer, batches = started(lambda of: torch.optim.AdamW(of, maximize=True), True, moments="bf16")
    optimizer.param_groups[0]["moments_seed"] = 7
    optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    assert (group["moments"], group["moments_seed"], group["maximize"]) == ("bf16", 7, False)
    plain_loop(1)(model, optimizer, batches)
    hytrain_fx.close(model)


class Stubborn(torch.optim.SGD):
    """Its `__setstate__` refuses."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise LookupError("not mine")


def test_a_class_that_refuses_a_checkpoint_changes_nothing() -> None:
    """The error is its own, as in torch."""
    model, optimizer, batches = started(lambda of: Stubborn(of, lr=0.1, momentum=0.9), True)
    plain_loop(1)(model, optimizer, batches)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 9.0
    before = weights(model)
    with pytest.raises(LookupError, match="not mine"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert_same(weights(model), before)
    plain_loop(1)(model, optimizer, batches)
    hytrain_fx.close(model)
