"""Parameter groups and states that a loop has changed in odd ways.

Each works as in torch, or is one clear error that changes nothing.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import hytrain_fx
from hytrain_fx import errors

from .loops import Twins, assert_same, plain_loop, weights
from .models import Batches, mlp
from .test_errors import adamw


@pytest.fixture(scope="module")
def twins() -> Iterator[Twins]:
    """States on both sides."""
    made = Twins(mlp, k=2, workers=2, timeout_s=20.0)
    yield made
    made.close()


def missing(key: str) -> Callable[[dict[str, Any]], None]:
    def change(group: dict[str, Any]) -> None:
        del group[key]

    return change


def given(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(group: dict[str, Any]) -> None:
        group[key] = value

    return change


GROUPS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    **{f"no {key}": (missing(key), f"a parameter group has no '{key}'") for key in ("lr", "betas", "eps", "weight_decay")},
    "betas of nothing": (given("betas", None), "betas of a parameter group is None: expected a pair"),
    "one beta": (given("betas", 0.9), "betas of a parameter group is 0.9"),
    "betas of one": (given("betas", (0.9,)), "betas of a parameter group is"),
    "betas that are text": (given("betas", ("a", "b")), "betas of a parameter group is 'a': expected a number"),
    "beta1 of 1": (given("betas", (1.0, 0.9)), "beta1 is 1.0"),
    "beta2 above 1": (given("betas", (0.9, 2.0)), r"no step can be computed from .*betas=\(0.9, 2.0\)"),
    "lr that is text": (given("lr", "0.1"), "lr of a parameter group is '0.1'"),
    "lr of nothing": (given("lr", None), "lr of a parameter group is None"),
    "lr that no float holds": (given("lr", 10**400), "no step can be computed from lr=1000"),
    "lr by element": (given("lr", torch.tensor([0.1, 0.2])), "lr of a parameter group is tensor.*of one element"),
    "complex lr": (given("lr", torch.tensor(1j)), "lr of a parameter group is tensor"),
    "eps of nothing": (given("eps", None), "eps of a parameter group is None"),
    "weight decay that is text": (given("weight_decay", "none"), "weight_decay of a parameter group is 'none'"),
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_that_no_step_can_take_is_an_error_at_step(name: str, twins: Twins) -> None:
    """`step()` names the option and changes nothing; once it is put right, training goes on."""
    change, message = GROUPS[name]
    _, optimizer = twins.restart()
    model, group = twins.ours, optimizer.param_groups[0]
    model(*twins.batches[0]).backward()
    whole, before = dict(group), weights(model)
    change(group)
    with pytest.raises(errors.UnsupportedError, match=message):
        optimizer.step()
    assert_same(weights(model), before)
    assert len(optimizer.state) == 0
    group.update(whole)
    optimizer.step()
    assert len(optimizer.state) == 7


@pytest.mark.parametrize("name", [name for name in GROUPS if name not in ("no lr", "no betas", "no eps", "no weight_decay")])
def test_a_group_that_no_step_can_take_is_an_error_at_compile(name: str) -> None:
    """A wrong group is known before anything is trained.

    An option that the group lacks comes from the optimizer's defaults, as in torch.
    """
    change, message = GROUPS[name]
    model, _ = mlp()
    optimizer = adamw(model)
    change(optimizer.param_groups[0])
    with pytest.raises(errors.UnsupportedError, match=message):
        hytrain_fx.compile(model, optimizer)
    optimizer.param_groups[0].update(optimizer.defaults)
    hytrain_fx.compile(model, optimizer)
    hytrain_fx.close(model)


@pytest.mark.parametrize("change", [missing("lr"), given("lr", "0.1"), given("momentum", None)], ids=["no lr", "text", "nothing"])
def test_a_group_of_another_optimizer_that_no_step_can_take_is_an_error_at_step(change: Callable[[dict[str, Any]], None]) -> None:
    """The error comes before the step reaches a worker, where it would end the engine.

    With the option put right the training goes on.
    """
    torch._dynamo.reset()
    model, batches = mlp()
    optimizer: Any
    _, optimizer = hytrain_fx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), k=2)
    plain_loop(1)(model, optimizer, batches)
    whole, before = dict(optimizer.param_groups[0]), weights(model)
    change(optimizer.param_groups[0])
    model(*batches[0]).backward()
    with pytest.raises(errors.UnsupportedError, match=r"of a parameter group is|a parameter group has no 'lr'"):
        optimizer.step()
    assert_same(weights(model), before)
    optimizer.param_groups[0].update(whole)
    optimizer.step()
    assert not torch.equal(weights(model)["first.weight"], before["first.weight"])
    hytrain_fx.close(model)


def test_a_numpy_scalar_as_learning_rate_decays_as_in_torch() -> None:
    """numpy's schedules give numpy's floats.

    With a gradient of zeros a step is the decay alone, in the scalar's own precision.
    """
    torch._dynamo.reset()
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model, _ = mlp()
        optimizer: Any = adamw(model, weight_decay=0.3)
        if ours:
            _, optimizer = hytrain_fx.compile(model, optimizer, k=0)
        for lr in (np.float32(0.1), np.float64(0.1), np.int64(1)):
            optimizer.param_groups[0]["lr"] = lr
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
        found.append(weights(model))
        if ours:
            hytrain_fx.close(model)
    assert_same(found[1], found[0])


# ---- states


REPLACED: dict[str, Callable[[Any, Any], None]] = {
    "state of ours": lambda ours, old: setattr(ours, "state", {}),
    "state of the old object": lambda ours, old: setattr(old, "state", {}),
    "groups of ours": lambda ours, old: setattr(ours, "param_groups", [dict(group) for group in ours.param_groups]),
    "groups of the old object": lambda ours, old: setattr(old, "param_groups", [dict(group) for group in old.param_groups]),
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_would_have_no_effect_is_an_error(name: str) -> None:
    """A replaced `state` or `param_groups` is named each time, in three calls.

    These are step(), state_dict() and load_state_dict().
    """
    model, _ = mlp()
    old = adamw(model)
    _, optimizer = hytrain_fx.compile(model, old)
    saved = optimizer.state_dict()
    REPLACED[name](optimizer, old)
    for call in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict(saved)) * 2:
        with pytest.raises(errors.UnsupportedError, match=r"optimizer\.(state|param_groups) was replaced"):
            call()
    hytrain_fx.close(model)


def test_a_step_while_another_thread_takes_the_state_dict_is_no_error(twins: Twins) -> None:
    """Only `state_dict()` itself sees states as torch has them.

    Hooks get an optimizer of the same groups.
    """
    optimizer = trained(twins)
    raised: list[BaseException] = []
    shown: list[Any] = []

    def step() -> None:
        try:
            optimizer.step()
        except BaseException as error:
            raised.append(error)

    def meanwhile(of: Any) -> None:
        shown.append(of)
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()

    handle = optimizer.register_state_dict_pre_hook(meanwhile)
    saved = optimizer.state_dict()
    handle.remove()
    assert raised == []
    assert shown[0].param_groups is optimizer.param_groups
    assert len(saved["state"]) == 7


def to_device(optimizer: Any) -> None:
    """What loops do after loading a checkpoint."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.to("cpu", copy=True)


def halved(optimizer: Any) -> None:
    """One moment of every parameter, entry by entry."""
    for parameter in optimizer.param_groups[0]["params"]:
        state = optimizer.state[parameter]
        name = "exp_avg" if "exp_avg" in state else "m"
        state[name] = state[name] * 0.5


def begun_again(optimizer: Any) -> None:
    """Some entries emptied, some deleted, some popped."""
    first, second, third, *_ = optimizer.param_groups[0]["params"]
    optimizer.state[first].clear()
    del optimizer.state[second]
    optimizer.state.pop(third)


def all_begun_again(optimizer: Any) -> None:
    """As before the first step."""
    optimizer.state.clear()


@pytest.mark.parametrize("change", [to_device, halved, begun_again, all_begun_again], ids=lambda change: change.__name__)
def test_states_may_be_written_key_by_key(change: Callable[[Any], None], twins: Twins) -> None:
    """`optimizer.state[p][key] = value` is written to the states, wherever they rest."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = plain_loop(3)(model, optimizer, batches)
        change(optimizer)
        return losses + plain_loop(3)(model, optimizer, batches)

    twins.agree(loop)


def trained(twins: Twins) -> Any:
    _, optimizer = twins.restart()
    plain_loop(1)(twins.ours, optimizer, twins.batches)
    return optimizer


WRONG_ENTRIES: dict[str, tuple[Callable[[Any], None], str]] = {
    "another shape": (lambda entry: entry.__setitem__("exp_avg", torch.zeros(3)), "exp_avg of first.weight has shape"),
    "no tensor": (lambda entry: entry.__setitem__("exp_avg_sq", None), "exp_avg_sq of first.weight is None"),
    "no count": (lambda entry: entry.__setitem__("step", "seven"), "step of first.weight is 'seven'"),
    "no finite count": (lambda entry: entry.__setitem__("step", float("nan")), "step of first.weight is nan"),
    "one key less": (lambda entry: entry.__delitem__("exp_avg"), "no exp_avg for first.weight"),
    "one key taken": (lambda entry: entry.pop("step"), "no step for first.weight"),
    "no dict": (lambda entry: entry._write([3]), r"entry of first.weight is \[3\]"),
    "several at once": (lambda entry: entry.update(step=3, exp_avg=torch.zeros(3)), "exp_avg of first.weight has shape"),
}


@pytest.mark.parametrize("name", WRONG_ENTRIES)
def test_an_entry_that_does_not_fit_is_an_error_and_changes_nothing(name: str, twins: Twins) -> None:
    """The same check as a checkpoint's; the entry keeps what it had."""
    write, message = WRONG_ENTRIES[name]
    optimizer = trained(twins)
    entry = optimizer.state[twins.ours.first.weight]
    before = copy.deepcopy(optimizer.state_dict()), dict(entry)
    with pytest.raises(ValueError, match=message):
        write(entry)
    assert {key: id(value) for key, value in entry.items()} == {key: id(value) for key, value in before[1].items()}
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[row][key], value) for row, kept in before[0]["state"].items() for key, value in kept.items())


def test_an_entry_for_what_is_no_parameter_is_a_key_error(twins: Twins) -> None:
    """Nothing would read it."""
    states = trained(twins).state
    with pytest.raises(KeyError, match="a Tensor that is no parameter"):
        states[torch.zeros(2)] = {"step": 1}


@pytest.mark.parametrize("saved", [{}, {"state": {}}, {"param_groups": []}, {"state": [], "param_groups": []}], ids=str)
def test_what_is_no_state_dict_is_a_value_error(saved: dict[str, Any], twins: Twins) -> None:
    """The message says what was found."""
    with pytest.raises(ValueError, match=r"state_dict|parameter groups"):
        trained(twins).load_state_dict(saved)


def test_a_copy_of_an_entry_is_a_plain_dict(twins: Twins) -> None:
    """Nothing of ours goes into a copy or a file."""
    entry = trained(twins).state[twins.ours.first.weight]
    assert isinstance(entry, dict)
    assert type(copy.deepcopy(entry)) is dict
    assert type(copy.copy(entry)) is dict
    assert type(entry | {}) is dict
