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


# ---- in a group of other states


def moved(groups: Groups, options: dict[str, Any]) -> None:
    """The first parameter of the first group goes to the second."""
    groups[1]["params"] = groups[1]["params"] + groups[0]["params"][:1]
    groups[0]["params"] = groups[0]["params"][1:]


def exchanged(groups: Groups, options: dict[str, Any]) -> None:
    """The first group is another dict, of these options."""
    groups[0] = {**groups[0], **options}


def appended(groups: Groups, options: dict[str, Any]) -> None:
    """The first parameter goes to a new group, of these options."""
    groups.append({**groups[0], "params": groups[0]["params"][:1], **options})
    groups[0]["params"] = groups[0]["params"][1:]


WAYS = {way.__name__: way for way in (moved, exchanged, appended)}
WIDE: dict[str, Any] = {"amsgrad": True}
NARROW: dict[str, Any] = {"moments": "bf16"}


@pytest.mark.sample(8)
@pytest.mark.parametrize("stepped", [True, False], ids=["stepped", "new"])
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("options", [WIDE, NARROW], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_group_that_asks_for_states_that_a_parameter_has_not_is_an_error(
    way: str, options: dict[str, Any], k: int, stepped: bool
) -> None:
    """The step names the parameter and changes nothing; put back, training goes on as in torch.

    torch itself has KeyError for amsgrad, once the parameter has states.
    """
    model, optimizer, batches = start(adamw, options, k=k)
    plain, reference, _ = start(by_hand, options)
    if stepped:
        steps(model, optimizer, batches)
        steps(plain, reference, batches)
    groups = optimizer.param_groups
    whole = [dict(group) for group in groups]
    WAYS[way](groups, options)
    before, states = weights(model), optimizer.state_dict()["state"]
    model(*batches[0]).backward()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"first\.weight is in a parameter group with .* which states are kept is fixed by comp"):
            optimizer.step()
    assert_same(weights(model), before)
    groups[:] = whole
    assert len(optimizer.state_dict()["state"]) == len(states)
    optimizer.zero_grad()
    steps(model, optimizer, batches)
    steps(plain, reference, batches)
    assert_same(weights(model), weights(plain))
    hytrain_fx.close(model)


def test_torch_has_no_maximum_for_a_parameter_that_had_none() -> None:
    """Moved to a group with amsgrad it is a KeyError, and without states it begins there."""
    for stepped in (True, False):
        model, _, batches = start(adamw, WIDE)
        optimizer: Any = torch.optim.AdamW([{"params": model.first.parameters()}, {"params": model.last.parameters(), **WIDE}], **HYPER)
        if stepped:
            steps(model, optimizer, batches)
        moved(optimizer.param_groups, WIDE)
        if stepped:
            with pytest.raises(KeyError, match="max_exp_avg_sq"):
                steps(model, optimizer, batches)
        else:
            steps(model, optimizer, batches)


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("way", ["moved", "switched off"])
def test_a_group_that_asks_for_fewer_states_leaves_the_others_as_they_are(way: str, k: int) -> None:
    """As in torch: a maximum that no step reads stays, and is there when it is asked for again."""
    found = []
    for ours in (True, False):
        model, optimizer, batches = start(adamw, WIDE, k=k) if ours else start(by_hand, WIDE)
        groups = optimizer.param_groups
        groups.reverse()  # the first has amsgrad
        steps(model, optimizer, batches)
        kept = dict(groups[0])
        if way == "moved":
            moved(groups, {})
        else:
            groups[0]["amsgrad"] = False
        steps(model, optimizer, batches)
        if way != "moved":
            groups[0].update(kept)
            steps(model, optimizer, batches)
        found.append(weights(model))
        if ours:
            assert all("max_exp_avg_sq" in optimizer.state[p] for p in model.last.parameters())
            hytrain_fx.close(model)
    assert_same(*found)


@pytest.mark.parametrize("k", [0, 2])
def test_a_parameter_that_moves_to_a_group_of_the_same_states_trains_with_its_options(k: int) -> None:
    """Its states go along, as in torch."""
    for way in WAYS:
        found = []
        for ours in (True, False):
            model, optimizer, batches = start(adamw, {"lr": 1e-3}, k=k) if ours else start(by_hand, {"lr": 1e-3})
            steps(model, optimizer, batches)
            WAYS[way](optimizer.param_groups, {"lr": 3e-2})
            steps(model, optimizer, batches)
            found.append(weights(model))
            if ours:
                hytrain_fx.close(model)
        assert_same(*found)


def test_updates_ahead_of_step_take_no_group_of_other_states() -> None:
    """A guess during the backward leaves such a parameter out, and `step()` has the error."""
    model, optimizer, batches = start(adamw, WIDE, k=0, speculate=True)
    steps(model, optimizer, batches)
    groups = optimizer.param_groups
    whole = [dict(group) for group in groups]
    groups[0]["amsgrad"] = True
    before = weights(model)
    model(*batches[0]).backward()
    with pytest.raises(UnsupportedError, match="which states are kept is fixed"):
        optimizer.step()
    assert_same(weights(model), before)
    groups[:] = whole
    optimizer.step()
    hytrain_fx.close(model)
