"""Operators of eager code are looked at before they run, for tensors that are watched."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hytrain_fx.runtime.native.op_reads import OperatorReads, storage_of


class Doubled(torch.autograd.Function):
    """Is given a weight that none of its operators reads: a kernel of its own may."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


def _under(mode: Callable[[], Any], run: Callable[[], object]) -> object:
    with mode():
        return run()


X = torch.ones(4, 8)
READS: dict[str, Callable[[nn.Linear], object]] = {
    "module": lambda m: m(X),
    "no_grad": lambda m: _under(torch.no_grad, lambda: m(X)),
    "inference_mode": lambda m: _under(torch.inference_mode, lambda: m(X)),
    "autocast": lambda m: _under(lambda: torch.autocast("cpu"), lambda: m(X)),
    "view": lambda m: X @ m.weight.t(),
    "alias": lambda m: m.weight.detach().sum(),
    "data": lambda m: m.weight.data.sum(),
    "list": lambda m: torch.cat([X, m.weight]),
    "foreach": lambda m: torch._foreach_norm([m.weight]),
    "index": lambda m: X[m.weight.long()[0]],
    "function": lambda m: Doubled.apply(X, m.weight),  # type: ignore[no-untyped-call]
    "item": lambda m: m.weight[0, 0].item(),
    "numpy": lambda m: m.weight.detach().numpy(),
    "tolist": lambda m: m.weight.tolist(),
    "print": lambda m: str(m.weight),
    "copy": lambda m: copy.deepcopy(m.weight),
    "write": lambda m: m.weight.data.zero_(),
    "out": lambda m: torch.add(X[0], X[0], out=m.weight.data[0]),
    "vmap": lambda m: torch.vmap(m)(X),
    "functional_call": lambda m: torch.func.functional_call(m, {"bias": torch.ones(8)}, (X,)),
    "gradient": lambda m: torch.func.grad(lambda w: torch.func.functional_call(m, {"weight": w}, (X,)).sum())(m.weight.detach()),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_told_once_before_it_runs(name: str) -> None:
    """An operator that reads the weight or a view finds the value that `on_read` has put there."""
    module = nn.Linear(8, 8)
    expected = copy.deepcopy(module)
    nn.init.constant_(expected.weight, 3.0)
    told: list[int] = []

    def put(storage: int, written: bool) -> None:
        if not (written and told):  # one that makes a view, and then one that writes it
            told.append(storage)
        with torch.no_grad():
            module.weight.fill_(3.0)

    watch = OperatorReads(put)
    watch.add([storage_of(module.weight)])
    nn.init.constant_(module.weight, 1.0)
    watch.begin()
    try:
        found = READS[name](module)
    finally:
        assert watch.end()
    assert told == [storage_of(module.weight)]
    right = READS[name](expected)
    if isinstance(right, (list, tuple)) and isinstance(right[0], Tensor):
        found, right = found[0], right[0]  # type: ignore[index]
    if isinstance(right, Tensor) and isinstance(found, Tensor):
        with torch.inference_mode():
            assert torch.equal(found, right)
    watch.raise_failed()


WRITES: dict[str, tuple[Callable[[nn.Linear], object], bool]] = {
    "in place": (lambda m: m.weight.data.clamp_(0, 1), True),
    "view": (lambda m: m.weight.data[0].zero_(), True),
    "out": (lambda m: torch.add(X[0], X[0], out=m.weight.data[0]), True),
    "foreach": (lambda m: torch._foreach_mul_([m.weight.data], 2.0), True),
    "target": (lambda m: m.weight.data.copy_(torch.ones(8, 8)), True),
    "source": (lambda m: torch.ones(8, 8).copy_(m.weight.data), False),
    "module": (lambda m: m(X), False),
    "view alone": (lambda m: m.weight.view(-1), False),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_told_as_one(name: str) -> None:
    """Once, also after a read, and not of an operator that only reads."""
    module, (run, writes) = nn.Linear(8, 8), WRITES[name]
    told: list[bool] = []
    watch = OperatorReads(lambda storage, written: told.append(written))
    watch.add([storage_of(module.weight)])
    watch.begin()
    with torch.no_grad():
        module.weight.sum()
        run(module)
        run(module)
    watch.end()
    assert told == [False] + [True] * writes


def test_nothing_is_told_of_others() -> None:
    """Other tensors, other threads, a pause, and the time after `end` are no reads."""
    module = nn.Linear(8, 8)
    told: list[int] = []
    watch = OperatorReads(lambda storage, written: told.append(storage))
    watch.add([storage_of(module.weight)])
    watch.begin()
    X.sum()
    with watch.paused():
        module(X)
    thread = threading.Thread(target=module, args=(X,))
    thread.start()
    thread.join()
    assert watch.end()
    assert not watch.end()
    with watch.paused():
        module(X)
    module(X)
    assert told == []


def test_two_watches_are_both_told() -> None:
    """A model called inside another's forward has its own watch. `on_read` runs unwatched."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    told: list[str] = []

    def outer_told(storage: int, written: bool) -> None:
        told.append("outer")
        second(X)

    outer, inner = OperatorReads(outer_told), OperatorReads(lambda storage, written: told.append("inner"))
    outer.add([storage_of(first.weight)])
    inner.add([storage_of(second.weight)])
    outer.begin()
    inner.begin()
    first(X)
    assert told == ["outer"]
    second(X)
    assert told == ["outer", "inner"]
    assert inner.end()
    assert outer.end()


def test_what_was_told_is_watched_again() -> None:
    """Not what was never added, nor what was cleared."""
    module, other = nn.Linear(8, 8), nn.Linear(8, 8)
    told: list[int] = []
    watch = OperatorReads(lambda storage, written: told.append(storage))
    watch.add([storage_of(module.weight)])
    for _ in range(2):
        watch.again()
        watch.begin()
        module(other(X))
        module(X)
        watch.end()
    assert told == [storage_of(module.weight)] * 2
    watch.clear()
    watch.again()
    watch.begin()
    module(X)
    watch.end()
    assert len(told) == 2


def test_a_read_may_end_the_watch_of_others() -> None:
    """After `clear` in `on_read` nothing more is told, until it was added again."""
    module = nn.Linear(8, 8)
    both = [storage_of(module.weight), storage_of(module.bias)]
    told: list[int] = []

    def once(storage: int, written: bool) -> None:
        told.append(storage)
        watch.clear()

    watch = OperatorReads(once)
    for _ in range(2):
        watch.add(both)
        watch.begin()
        module(X)
        watch.end()
    assert told == [both[0]] * 2


def test_what_is_raised_is_kept() -> None:
    """torch drops what a callback raises; the first one is raised where it is asked for."""
    module = nn.Linear(8, 8)

    def fail(storage: int, written: bool) -> None:
        raise ArithmeticError(storage)

    watch = OperatorReads(fail)
    watch.add([storage_of(module.weight), storage_of(module.bias)])
    watch.begin()
    module(X)
    watch.end()
    with pytest.raises(ArithmeticError, match=str(storage_of(module.weight))):
        watch.raise_failed()
    watch.raise_failed()
