"""Checkpoints that `torch.distributed.checkpoint` writes from `sharded_state_dict`, on one rank.

Two ranks and four are in test_shards.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import hytrain_fx
from hytrain_fx.api import session_of

from .loops import assert_same, plain_loop, weights
from .saved import ours, start


def saved_to(folder: Path, model: Any, optimizer: Any) -> None:
    save({"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}, checkpoint_id=folder)


def loaded_from(folder: Path, model: Any, optimizer: Any, planner: DefaultLoadPlanner | None = None) -> None:
    found = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}
    load(found, checkpoint_id=folder, planner=planner)
    model.load_state_dict(found["model"])
    optimizer.load_sharded_state_dict(found["optimizer"])


@pytest.mark.parametrize("k", [0, 2])
def test_weights_with_bf16_copies_keep_their_fp32_bits(k: int, tmp_path: Path) -> None:
    """Under autocast, loading after more steps gives the bits of never having made them."""
    model, batches = start()
    optimizer = ours(model, k=k)
    with torch.autocast("cpu", torch.bfloat16):
        plain_loop(2)(model, optimizer, batches)
        assert session_of(model).states.copies
        expected = weights(model)
        saved_to(tmp_path, model, optimizer)
        followed = plain_loop(2)(model, optimizer, batches)
        trained = weights(model)
        loaded_from(tmp_path, model, optimizer)
        assert_same(weights(model), expected)
        assert plain_loop(2)(model, optimizer, batches) == followed
        assert_same(weights(model), trained)
    hytrain_fx.close(model)


class WithExtra(nn.Module):
    """Its last layer is used in some forwards only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor, use_extra: bool) -> torch.Tensor:
        found: torch.Tensor = self.first(x) + self.extra(x) if use_extra else self.first(x)
        return found.square().mean()


def with_extra(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = WithExtra().to(torch.bfloat16)
    return model, ours(model)


def step(model: Any, optimizer: Any, *, use_extra: bool) -> None:
    torch.manual_seed(7)
    model(torch.randn(5, 6, dtype=torch.bfloat16), use_extra).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("extra_in_file", [True, False], ids=["file has all", "file of an earlier version"])
def test_a_weight_that_was_never_stepped_is_loaded(extra_in_file: bool, tmp_path: Path) -> None:
    """It comes from the file, and is its own master, also where the file has no entry of it."""
    model, optimizer = with_extra(0)
    step(model, optimizer, use_extra=False)
    saved = optimizer.sharded_state_dict()
    if not extra_in_file:
        saved["state"] = {name: entry for name, entry in saved["state"].items() if "extra" not in name}
    save({"model": model.state_dict(), "optimizer": saved}, checkpoint_id=tmp_path)
    expected = weights(model)
    step(model, optimizer, use_extra=True)
    trained = weights(model)
    hytrain_fx.close(model)
    model, optimizer = with_extra(1)
    loaded_from(tmp_path, model, optimizer, None if extra_in_file else DefaultLoadPlanner(allow_partial_load=True))
    assert_same(weights(model), expected)
    step(model, optimizer, use_extra=True)
    assert_same(weights(model), trained)
    hytrain_fx.close(model)


def test_states_are_loaded_where_only_the_file_has_any(tmp_path: Path) -> None:
    """A step of this run that left a parameter out does not drop its states in the checkpoint."""
    model, optimizer = with_extra(0)
    step(model, optimizer, use_extra=True)
    saved_to(tmp_path, model, optimizer)
    step(model, optimizer, use_extra=True)
    trained = weights(model)
    hytrain_fx.close(model)
    model, optimizer = with_extra(1)
    step(model, optimizer, use_extra=False)
    loaded_from(tmp_path, model, optimizer)
    step(model, optimizer, use_extra=True)
    assert_same(weights(model), trained)
    hytrain_fx.close(model)


def test_a_parameter_of_no_step_has_no_entry_after_loading(tmp_path: Path) -> None:
    """As in torch, whose `optimizer.state` has entries of stepped parameters alone."""
    model, optimizer = with_extra(0)
    step(model, optimizer, use_extra=False)
    saved_to(tmp_path, model, optimizer)
    step(model, optimizer, use_extra=True)
    loaded_from(tmp_path, model, optimizer)
    assert {id(p) for p in optimizer.state} == {id(p) for p in model.first.parameters()}
    hytrain_fx.close(model)
