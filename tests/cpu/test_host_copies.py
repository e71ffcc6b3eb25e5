"""`state_dict()` of weights that rest on the host: in inference mode, and what is left of it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import hytrain_fx

from .loops import HYPER, assert_same

OPTIONS: dict[str, Any] = {"weights": "streamed", "workers": 1, "timeout_s": 60.0}


class Tied(nn.Module):
    """Three layers of one width, the first and the last of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(32, 32) for _ in range(3))
        self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return y.float().pow(2).mean()


def batch() -> torch.Tensor:
    return torch.arange(128.0).view(4, 32).sin().to(torch.bfloat16)


def train(model: Any, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        model(batch()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def trained() -> Iterator[tuple[Any, Any]]:
    """Ours after two steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = Tied().to(torch.bfloat16)
    model, optimizer = hytrain_fx.compile(made, torch.optim.AdamW(made.parameters(), **HYPER), **OPTIONS)
    train(model, optimizer, 2)
    yield model, optimizer
    hytrain_fx.close(model)


def memory_of(saved: dict[str, torch.Tensor]) -> dict[str, StorageWeakRef]:
    """What tells whether the memory of each is there still. It keeps none."""
    return {name: StorageWeakRef(value.untyped_storage()) for name, value in saved.items()}


def left(memory: dict[str, StorageWeakRef]) -> set[str]:
    """The names whose memory is still there."""
    return {name for name, of in memory.items() if not of.expired()}


def test_weights_are_saved_in_inference_mode(trained: tuple[Any, Any]) -> None:
    """`state_dict()` has the same values there, and what is written into them is followed."""
    model, optimizer = trained
    with torch.inference_mode():
        saved = model.state_dict()
    expected = copy.deepcopy(saved)
    assert_same({name: value.detach().clone() for name, value in model.named_parameters(remove_duplicate=False)}, expected)
    with torch.inference_mode():
        saved["second.weight"].mul_(2)
        assert torch.equal(model.state_dict()["second.weight"], expected["second.weight"] * 2)
    assert not saved["second.weight"].is_inference()
    saved["second.weight"].mul_(2)
    assert torch.equal(model.second.weight.detach(), expected["second.weight"] * 4)
    train(model, optimizer)


def test_weights_are_loaded_in_inference_mode(trained: tuple[Any, Any]) -> None:
    """`load_state_dict()` there, also of values made there: the same steps follow."""
    model, optimizer = trained
    begin = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 2)
    expected = copy.deepcopy(model.state_dict())
    with torch.inference_mode():
        model.load_state_dict({name: value + 0 for name, value in begin[0].items()})
        assert_same(model.state_dict(), begin[0])
    optimizer.load_state_dict(begin[1])
    train(model, optimizer, 2)
    assert_same(model.state_dict(), expected)


def test_a_state_dict_that_was_dropped_leaves_no_memory(trained: tuple[Any, Any]) -> None:
    """The copies of all weights go with it, though no step comes after it; one in a cycle too."""
    model, _ = trained
    saved = model.state_dict()
    memory = memory_of(saved)
    assert left(memory) == set(saved)
    again = model.state_dict()
    assert {name: value.data_ptr() for name, value in again.items()} == {name: value.data_ptr() for name, value in saved.items()}
    del saved
    assert left(memory) == set(again)
    del again
    assert not left(memory)
    cycle: dict[str, Any] = model.state_dict()
    tied = {"first.weight", "third.weight"}  # two tensors of one memory, which are collected together
    memory = {name: of for name, of in memory_of(cycle).items() if name not in tied}
    cycle["self"] = cycle
    del cycle
    gc.collect()
    assert not left(memory)


def test_what_was_written_into_a_dropped_state_dict_is_followed(trained: tuple[Any, Any]) -> None:
    """Into a value, a view or a NumPy array of one that outlives it; nothing is left after that."""
    model, _ = trained
    before = copy.deepcopy(model.state_dict())
    model.state_dict()["first.weight"].mul_(2)
    assert torch.equal(model.third.weight.detach(), before["first.weight"] * 2)
    view = model.state_dict()["second.weight"][0]
    view.mul_(2)
    memory = memory_of({"view": view})
    del view
    assert torch.equal(model.second.weight.detach()[0], before["second.weight"][0] * 2)
    assert torch.equal(model.second.weight.detach()[1], before["second.weight"][1])
    assert not left(memory)


def test_a_view_that_outlives_its_state_dict_keeps_one_weight(trained: tuple[Any, Any]) -> None:
    """The other copies go; that one goes when weights are next looked at."""
    model, _ = trained
    saved = model.state_dict()
    memory, alias = memory_of(saved), saved["second.weight"].detach().view(-1)
    del saved
    assert left(memory) == {"second.weight"}
    alias.mul_(2)
    assert torch.equal(model.state_dict()["second.weight"].view(-1), alias)
    del alias
    with torch.no_grad():
        model(batch())
    assert not left(memory)


def test_close_leaves_no_copy_behind() -> None:
    """Though values were written, and the optimizer's states outlive the model."""
    torch._dynamo.reset()
    made = Tied().to(torch.bfloat16)
    model, optimizer = hytrain_fx.compile(made, torch.optim.AdamW(made.parameters(), **HYPER), **OPTIONS)
    train(model, optimizer)
    states = optimizer.state
    saved = model.state_dict()
    memory = memory_of(saved)
    saved["second.weight"].mul_(2)
    expected = saved["second.weight"].clone()
    hytrain_fx.close(model)
    del saved
    assert not left(memory)
    assert len(states) == 5
    assert torch.equal(model.second.weight.detach(), expected)
