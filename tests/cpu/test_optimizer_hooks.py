"""Hooks that are registered on the optimizer before `compile`, and on the old object after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

import hytrain_fx
from hytrain_fx.errors import UnsupportedError

from .loops import HYPER, plain_loop
from .saved import start

Compiled = Callable[[], Any]
ALL = ["before", "after", "save", "saved", "load", "loaded"]


@pytest.fixture
def old() -> Iterator[tuple[Any, Compiled]]:
    """A plain optimizer, and what compiles it with its model, again if asked, and makes a step."""
    torch._dynamo.reset()
    model, batches = start()
    optimizer = torch.optim.AdamW(model.parameters(), **HYPER)

    def compiled() -> Any:
        if optimizer.state:
            hytrain_fx.close(model)
        found = hytrain_fx.compile(model, optimizer, k=0)[1]
        plain_loop(1)(model, found, batches)
        return found

    yield optimizer, compiled
    hytrain_fx.close(model)


def hooked(optimizer: Any, calls: list[str]) -> list[RemovableHandle]:
    """One hook of each kind, which notes its name and what optimizer it is given."""

    def noting(name: str) -> Callable[..., None]:
        return lambda optimizer, *_: calls.append(f"{name} {type(optimizer).__name__}")

    return [
        optimizer.register_step_pre_hook(noting("before")),
        optimizer.register_step_post_hook(noting("after")),
        optimizer.register_state_dict_pre_hook(noting("save")),
        optimizer.register_state_dict_post_hook(noting("saved")),
        optimizer.register_load_state_dict_pre_hook(noting("load")),
        optimizer.register_load_state_dict_post_hook(noting("loaded")),
    ]


def use(optimizer: Any) -> None:
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("first", [True, False], ids=["before compile", "after it"])
def test_hooks_of_the_old_object_run_and_are_removed(old: tuple[Any, Compiled], first: bool) -> None:
    """Each runs once, with the optimizer that compile() gave, until its handle is removed."""
    plain, compiled = old
    calls: list[str] = []
    handles = hooked(plain, calls) if first else []
    optimizer = compiled()
    handles = handles or hooked(plain, calls)
    for one in (optimizer, plain):
        calls.clear()
        use(one)
        assert calls == [f"{name} OffloadedOptimizer" for name in ALL]
    calls.clear()
    for handle in handles:
        handle.remove()
    use(optimizer)
    assert not calls


def test_hooks_run_after_a_second_compile(old: tuple[Any, Compiled]) -> None:
    """They are those of the newest optimizer, once."""
    plain, compiled = old
    calls: list[str] = []
    hooked(plain, calls)
    compiled()
    optimizer = compiled()
    calls.clear()
    use(optimizer)
    assert calls == [f"{name} OffloadedOptimizer" for name in ALL]


def test_a_step_taken_before_compile_runs_no_hook(old: tuple[Any, Compiled]) -> None:
    """It is refused at once, as it would keep no moments."""
    plain, compiled = old
    calls: list[str] = []
    taken = plain.step
    hooked(plain, calls)
    compiled()
    calls.clear()
    with pytest.raises(UnsupportedError, match="as it was before hytrain_fx"):
        taken()
    assert not calls


def test_hooks_of_every_optimizer_run_once(old: tuple[Any, Compiled]) -> None:
    """Also where the old object is stepped."""
    plain, compiled = old
    optimizer = compiled()
    calls: list[str] = []
    handles = [register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
               register_optimizer_step_post_hook(lambda *_: calls.append("after"))]
    try:
        for one in (optimizer, plain):
            calls.clear()
            one.step()
            assert calls == ["before", "after"]
    finally:
        for handle in handles:
            handle.remove()
