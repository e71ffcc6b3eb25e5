"""Checkpoints that `torch.distributed.checkpoint` writes from `sharded_state_dict`, on one rank.

Two ranks and four are in test_shards.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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
