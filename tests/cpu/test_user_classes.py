"""The optimizer that `compile` returns has what the user's class has.

Its attributes, its methods, and its own form of those that every optimizer has.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import hytrain_fx
from hytrain_fx.errors import HytrainWarning, UnsupportedError

from .loops import plain_loop
from .models import Batches
from .optimizers import TRACED, WithRate, make
from .saved import start, through_a_file
from .test_user_optimizers import Clipped, assert_as_plain


class ScheduleFree(torch.optim.Optimizer):
    """Averages weights as it goes, so that a loop tells it when it trains and when it does not."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            if group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=1 - 1 / group["beta"])
                group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=1 - group["beta"])
                group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() first")
            weight, beta, lr = 1 / (group["k"] + 1), group["beta"], group["lr"]
            for p in group["params"]:
                if p.grad is not None:
                    if "z" not in self.state[p]:
                        self.state[p]["z"] = p.clone()
                    z = self.state[p]["z"]
                    p.lerp_(end=z, weight=weight)
                    p.add_(p.grad, alpha=lr * (beta * (1 - weight) - 1))
                    z.sub_(p.grad, alpha=lr)
            group["k"] += 1


def test_attributes_are_those_of_the_users_optimizer() -> None:
    """A step reads what is set on the returned optimizer in mid-run, and it can be read there.

    So it can if the class has it, or nobody had it before.
    """

    def tighter(model: Any, optimizer: Any, step: int) -> None:
        assert optimizer.clip == 1.0 / 10**step
        optimizer.clip /= 10

    assert_as_plain(lambda model: Clipped(model.parameters()), plain_loop(4, tighter))


class Late(WithRate):
    """Has a factor in its class, and reads another one that nobody may have set."""

    factor = 1.0

    @property
    def doubled(self) -> float:
        return self.factor * 2

    @doubled.setter
    def doubled(self, value: float) -> None:
        self.factor = value / 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * self.factor * getattr(self, "other", 1.0))


def test_attributes_that_are_not_there_at_first_count_too() -> None:
    """Set on the returned optimizer, they hide the class's; deleted, the class's are back."""

    def other(model: Any, optimizer: Any, step: int) -> None:
        if step == 0:
            optimizer.factor = 0.5
        elif step == 1:
            optimizer.other = 0.5
        elif step == 2:
            del optimizer.factor
        elif step == 3:
            optimizer.doubled = 6.0
        assert optimizer.doubled == (1.0, 1.0, 2.0, 6.0, 6.0)[step]

    assert_as_plain(lambda model: Late(model.parameters()), plain_loop(5, other))


def test_methods_of_the_class_are_there() -> None:
    """A schedule-free optimizer's `train()` and `eval()` write the weights as in plain torch."""

    def evaluated(model: Any, optimizer: Any, step: int) -> float:
        optimizer.eval()
        with torch.no_grad():
            losses.append(float(model(torch.ones(5, 6))))
        optimizer.train()
        return 0.0

    losses: list[float] = []
    assert_as_plain(lambda model: ScheduleFree(model.parameters()), plain_loop(4, evaluated))
    assert losses[:4] == losses[4:]


class Overriding(torch.optim.SGD):
    """Has its own form of what every optimizer has, around torch's."""

    def __init__(self, params: Iterable[Any]) -> None:
        self.calls: list[str] = []
        super().__init__(params, 0.1, momentum=0.9, foreach=False)

    def zero_grad(self, set_to_none: bool = True, *, every: int = 2) -> None:
        """Gradients gather over two calls."""
        self.calls.append("zero_grad")
        if self.calls.count("zero_grad") % every == 0:
            super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state_dict")
        return {**super().state_dict(), "calls": list(self.calls)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.calls = state_dict.pop("calls")
        super().load_state_dict(state_dict)
        self.calls.append("load_state_dict")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            group["lr"] /= 2


@pytest.mark.parametrize("way", ["returned", "old"])
def test_overridden_methods_are_called(way: str) -> None:
    """`super()` in them is what the returned optimizer does; also when the old object is used."""
    old: list[Any] = []

    def make_one(model: Any) -> torch.optim.Optimizer:
        optimizer = Overriding(model.parameters())
        old.append(optimizer)
        return optimizer

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[Any]:
        one = optimizer if way == "returned" else old[-1]
        found: list[Any] = plain_loop(5)(model, one, batches)
        (saved,) = through_a_file(one.state_dict())
        found += plain_loop(3)(model, one, batches)
        one.load_state_dict(saved)
        found += plain_loop(3)(model, one, batches)
        return [*found, list(one.calls), one.param_groups[0]["lr"], sorted(one.state_dict())]

    assert_as_plain(make_one, loop)


def test_wrappers_of_frameworks_reach_the_class() -> None:
    """Accelerate's finds `train()`; Lightning's, a class derived from ours, `zero_grad()`."""
    accelerated = pytest.importorskip("accelerate.optimizer").AcceleratedOptimizer
    lightning = pytest.importorskip("lightning.pytorch.core.optimizer").LightningOptimizer
    pytest.importorskip("accelerate").Accelerator(cpu=True)
    schedule_free = compiled(lambda model: ScheduleFree(model.parameters()))
    wrapper = accelerated(schedule_free)
    wrapper.eval()
    assert not schedule_free.param_groups[0]["train_mode"]
    overriding = compiled(lambda model: Overriding(model.parameters()))
    wrapper = lightning(overriding)
    wrapper.zero_grad()
    wrapper.state_dict()
    assert overriding.calls == wrapper.calls == ["zero_grad", "state_dict"]


def test_states_come_along_from_a_class_with_a_state_dict_of_its_own() -> None:
    """One that has run before `compile`, and one that is compiled again."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[Any]:
        found: list[Any] = plain_loop(3)(model, optimizer, batches)
        if type(optimizer) is not Odd:
            original = optimizer.__dict__["_original"]
            hytrain_fx.close(model)
            _, optimizer = hytrain_fx.compile(model, original, k=1)
        return found + plain_loop(3)(model, optimizer, batches)

    def run_before(model: Any) -> torch.optim.Optimizer:
        optimizer = Odd(model.parameters(), 0.1, momentum=0.9, foreach=False)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    assert_as_plain(run_before, loop)


class Odd(torch.optim.SGD):
    """Saves in a form of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"saved": super().state_dict()}


class Hooked(WithRate):
    """Replaces what only torch's loading calls."""

    def _process_value_according_to_param_policy(self, *values: Any, **named: Any) -> Any:  # type: ignore[override]
        return values[1]

    def step(self, closure: Any = None) -> Any: ...


def compiled(optimizer_of: Any) -> Any:
    torch._dynamo.reset()
    model, _ = start()
    optimizer = hytrain_fx.compile(model, optimizer_of(model), k=0)[1]
    hytrain_fx.close(model)
    return optimizer


def test_what_is_not_called_is_said_at_compile() -> None:
    """The warning names the class and the method."""
    with pytest.warns(HytrainWarning, match=r"Hooked\._process_value_according_to_param_policy is not used by the optimizer that compile"):
        compiled(lambda model: Hooked(model.parameters()))


@pytest.mark.parametrize("name", [*(name for name in TRACED if name != "Muon"), "Overriding"])
def test_others_are_compiled_in_silence(name: str) -> None:
    """Torch's classes, and those whose methods are called. Nothing of torch's is passed on."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", HytrainWarning)
        optimizer = compiled(lambda model: Overriding(model.parameters()) if name == "Overriding" else make(name, model.parameters()))
    for missing in ("train", "share_memory", "__deepcopy__", "_init_group", "grad_scale"):
        assert not hasattr(optimizer, missing)
    with pytest.raises(AttributeError, match="'OffloadedOptimizer' object has no attribute 'tag'"):
        _ = optimizer.tag


def test_a_copy_is_still_refused() -> None:
    """Also of an optimizer whose class has methods of its own."""
    optimizer = compiled(lambda model: Overriding(model.parameters()))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="was copied or pickled"):
            copied(optimizer)
    empty = object.__new__(type(optimizer))  # as unpickling begins
    assert not hasattr(empty, "clip")


class Registered(torch.optim.SGD):
    """Its subclasses must give a key, and are noted."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, key: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        Registered.known.append(key)


class Keyed(Registered, key="mine"):
    """Overrides what makes a class of ours necessary."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, 0.1)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


def test_a_class_that_notes_its_subclasses_is_told_of_none() -> None:
    """The class that compile() makes of it is nobody's to register."""
    assert_as_plain(lambda model: Keyed(model.parameters()), plain_loop(2))
    assert Registered.known == ["mine"]


class WithArray(WithRate):
    """Its step reads a NumPy array that it holds."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.table = np.ones(2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * float(self.table[0]))


def test_an_array_that_the_optimizer_holds_stays_the_loops() -> None:
    """What the loop writes to it counts in the next step; and a NaN on a parameter is no change."""
    tables = []

    def make_one(model: Any) -> torch.optim.Optimizer:
        next(model.parameters()).last = torch.tensor(float("nan"))
        optimizer = WithArray(model.parameters())
        tables.append(optimizer.table)
        return optimizer

    def written(model: Any, optimizer: Any, step: int) -> None:
        tables[-1][0] = 0.5 * step
        assert optimizer.table is tables[-1]

    assert_as_plain(make_one, plain_loop(4, written))
