"""Parameters that are in two places of the groups, or that a loop moves from group to group.

Each trains as in torch, or is one clear error that changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.errors import UnsupportedError

from .loops import HYPER, HandAdam, assert_same, plain_loop, weights
from .models import Batches, mlp

Groups = list[dict[str, Any]]


def start(make: Callable[[Groups], torch.optim.Optimizer], second: dict[str, Any], **options: Any) -> tuple[Any, Any, Batches]:
    """A model, with its last layer in a second group of these options; compiled by us if `options`
    are given, else by torch.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any
    model, batches = mlp()
    last = list(model.last.parameters())
    first = [p for p in model.parameters() if all(p is not one for one in last)]
    optimizer: Any = make([{"params": first}, {"params": last, **second}])
    if options:
        _, optimizer = hytrain_fx.compile(model, optimizer, **options)
    else:
        model.compile()
    return model, optimizer, batches


def adamw(groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, **HYPER)


def by_hand(groups: Groups) -> torch.optim.Optimizer:
    return HandAdam(groups, **HYPER)


def steps(model: Any, optimizer: Any, batches: Batches) -> None:
    plain_loop(2)(model, optimizer, batches)


# ---- in two places


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda of: torch.optim.AdamW(of, **HYPER),
    "SGD": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_is_listed_twice_is_refused(kind: str) -> None:
    """torch warns, and steps such a parameter twice; `compile` names it and says what to do."""
    found = []
    for twice in (False, True):
        torch.manual_seed(0)
        model: Any
        model, batches = mlp()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            optimizer = KINDS[kind]([*model.parameters(), *(model.last.parameters() if twice else ())])
        plain_loop(1)(model, optimizer, batches)
        found.append(weights(model))
    assert not torch.equal(found[1]["last.weight"], found[0]["last.weight"])
    with pytest.raises(UnsupportedError, match=r"last\.weight is twice in the optimizer's parameter groups.* list it once"):
        hytrain_fx.compile(model, optimizer, k=0)


@pytest.mark.parametrize("k", [0, 2])
def test_a_parameter_that_a_loop_lists_twice_is_an_error_at_step(k: int) -> None:
    """The step changes nothing; once the parameter is in one group alone, training goes on."""
    model, optimizer, batches = start(adamw, {"lr": 1e-3}, k=k)
    plain, reference, _ = start(by_hand, {"lr": 1e-3})
    steps(model, optimizer, batches)
    steps(plain, reference, batches)
    for each in (optimizer, reference):
        each.param_groups[1]["params"].append(each.param_groups[0]["params"][0])
    before = weights(model)
    model(*batches[0]).backward()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"first\.weight is twice in the optimizer's parameter groups"):
            optimizer.step()
    assert_same(weights(model), before)
    plain(*batches[0]).backward()
    for each in (optimizer, reference):
        del each.param_groups[0]["params"][0]
        each.step()
        each.zero_grad()
    steps(model, optimizer, batches)
    steps(plain, reference, batches)
    assert_same(weights(model), weights(plain))
    hytrain_fx.close(model)
