"""Checkpoints of stages for test_pipelines.py: saved by stage, loaded by one process, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import hytrain_fx

from .loops import HYPER, weights
from .pipeline_loops import Found, Part, Pipeline, batch, loss_of


def saved_by_stage(folder: str, rank: int, size: int) -> Found:
    """Two steps with a tied weight, then a checkpoint of all stages."""
    run = Pipeline("1F1B", True, torch.bfloat16, tied=True)
    for step in range(2):
        run.backward(step)
        run.end_step()
    return _saved(run.parts[0], run.optimizers[0], folder)


def whole_model(folder: str, into: str) -> tuple[Found, Found]:
    """One process loads that, trains a step on the whole model, and saves its own."""
    torch._dynamo.reset()
    model: Any = Part().to(torch.bfloat16)
    model.head.weight = model.words.weight
    optimizer: Any = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), workers=1)[1]
    loaded = _resumed(model, optimizer, folder)
    tokens, target = batch(2)
    loss_of(model(tokens), target).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loaded, _saved(model, optimizer, into)


def resumed_by_stage(folder: str, rank: int, size: int) -> Found:
    """What each stage finds in a checkpoint of the whole model."""
    run = Pipeline("1F1B", True, torch.bfloat16, tied=True)
    return _resumed(run.parts[0], run.optimizers[0], folder)


def _saved(model: nn.Module, optimizer: Any, folder: str) -> Found:
    found = {"optimizer": optimizer.sharded_state_dict(), "model": weights(model)}
    save(found, checkpoint_id=folder)
    return {"states": found["optimizer"]["state"], "weights": found["model"]}


def _resumed(model: nn.Module, optimizer: Any, folder: str) -> Found:
    found = {"optimizer": optimizer.sharded_state_dict(), "model": weights(model)}
    load(found, checkpoint_id=folder)
    model.load_state_dict(found["model"])
    optimizer.load_sharded_state_dict(found["optimizer"])
    return {"states": optimizer.sharded_state_dict()["state"], "weights": weights(model)}
