"""What each of two processes does in test_rank_eager.py: gradients that no captured graph makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import hytrain_fx

from .loops import HYPER, HandAdam, weights
from .rank_loops import Found, average_used, begin_alike, compiled, net, tokens_of

SIDE = ((0,), (0, 1), (1,), (), (0, 1))  # by step: which ranks use the layer `side`
Drop = Callable[[Any, Any], None]


def _by_hand(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


DROPS: Mapping[str, Drop] = {
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
    "p.grad = None": _by_hand,
    "zero_grad(set_to_none=False)": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
}


def broken(rank: int) -> Any:
    """A model whose layers `side` and `head`, the last, are eager code."""
    model: Any = net(rank)
    for layer in (model.side, model.head):
        layer.forward = torch.compiler.disable(layer.forward)
    return model


def every_drop(rank: int, size: int) -> Mapping[str, Sequence[Found]]:
    """For each way to drop gradients: the loop by hand, and ours.

    States are on the host where they are dropped after a step, else some are on the device.
    """
    return {f"{name}, {when}": [_hand_run(rank, size, drop, when), _our_run(rank, drop, when, k)]
            for name, drop in DROPS.items() for when, k in (("after the step", 0), ("before the backward", 3))}


def _hand_run(rank: int, size: int, drop: Drop, when: str) -> Found:
    model = broken(rank)
    begin_alike(model)
    model.compile()
    return _steps(model, HandAdam(model.parameters(), **HYPER), rank, drop, when, lambda: average_used(model, size))


def _our_run(rank: int, drop: Drop, when: str, k: int) -> Found:
    model = broken(rank)
    found = _steps(model, compiled(model, k=k), rank, drop, when, lambda: None)
    hytrain_fx.close(model)
    return found


def _steps(model: Any, optimizer: Any, rank: int, drop: Drop, when: str, after_backward: Callable[[], None]) -> Found:
    losses = []
    for step, takers in enumerate(SIDE):
        loss = model(tokens_of(rank, step), side=rank in takers)
        if when == "before the backward":
            drop(model, optimizer)
        loss.backward()
        after_backward()
        losses.append(loss.item())
        optimizer.step()
        losses.append(sum(float(p.grad.double().abs().sum()) for p in model.side.parameters() if p.grad is not None))
        if when == "after the step":
            drop(model, optimizer)
    return {"losses": losses, "weights": weights(model)}


def assigned(whose: str, rank: int, size: int) -> list[str]:
    """Each rank assigns gradients, its own or those that "all" have, in the first or second step.

    What `step()` says.
    """
    said = []
    for steps in range(2):
        model: Any = net(0)
        optimizer = compiled(model, k=3)
        for step in range(steps):
            model(tokens_of(rank, step)).backward()
            optimizer.step()
            model.zero_grad()
        loss = model(tokens_of(0 if whose == "all" else rank, 7))
        parameters = [p for name, p in model.named_parameters() if not name.startswith("side")]
        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = grad
        said.append(_said(optimizer.step))
    return said


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except hytrain_fx.errors.UnsupportedError as error:
        return str(error)
    return "no error"


def stepped_again(rank: int, size: int) -> str:
    """Without another backward, after gradients were read, and after they were zeroed."""
    model = broken(rank)
    optimizer = compiled(model, k=3)
    model(tokens_of(rank, 0), side=True).backward()
    optimizer.step()
    return _said(partial(_step_again, model, optimizer))


def _step_again(model: Any, optimizer: Any) -> None:
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad.abs().sum()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def first_checkpoint(rank: int, size: int) -> Mapping[str, Found]:
    """By how weights rest: torch's get_state_dict and set_state_dict before the first step."""
    found = {}
    for how in ("resident", "sharded"):
        model: Any = net(rank)
        optimizer = compiled(model, weights=how)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        saved, states = get_state_dict(model, optimizer)
        rates = [group["lr"] for group in optimizer.param_groups]
        set_state_dict(model, optimizer, model_state_dict=saved, optim_state_dict=states)
        unchanged = all(map(torch.equal, before.values(), model.state_dict().values()))
        moments = [entry["exp_avg"].abs().sum().item() for entry in optimizer.state_dict()["state"].values()]
        empty = all(p.grad is None for p in model.parameters())
        model(tokens_of(rank, 0)).backward()
        optimizer.step()
        found[how] = {"rates": rates, "moments": moments, "empty": empty, "unchanged": unchanged, "after": weights(model)}
        hytrain_fx.close(model)
    return found


def dropped_by_hooks(rank: int, size: int) -> Mapping[str, Sequence[Found]]:
    """Hooks drop the gradients of an eager layer as they come, on one rank or on all.

    One is set before `compile`, one after the first step. The loop by hand, and ours.
    """
    return {f"hooks of {droppers}": [_hooked_run(rank, size, rank in droppers, by_hand=by_hand) for by_hand in (True, False)]
            for droppers in ((1,), (0, 1))}


def _hooked_run(rank: int, size: int, drops: bool, *, by_hand: bool) -> Found:
    model = broken(rank)
    unset = [model.side.weight, model.side.bias] if drops else []

    def drop(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        if unset:
            unset.pop().register_post_accumulate_grad_hook(_drop)

    if by_hand:
        begin_alike(model)
        model.compile()
    if unset:
        unset.pop(0).register_post_accumulate_grad_hook(_drop)
    optimizer = HandAdam(model.parameters(), **HYPER) if by_hand else compiled(model, k=0)
    found = _steps(model, optimizer, rank, drop, "after the step", partial(average_used, model, size) if by_hand else lambda: None)
    if not by_hand:
        hytrain_fx.close(model)
    return found


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def other_nodes(rank: int, size: int) -> list[str]:
    """The last rank has frozen a vector: its nodes are not those of the other. What steps say."""
    model: Any = net(rank)
    optimizer = compiled(model)
    model.layers[1].bias.requires_grad_(rank != size - 1)
    said = []
    for step in range(3):
        model(tokens_of(rank, step)).backward()
        said.append(_said(optimizer.step))
        model.zero_grad()
    return said
