"""Checkpoints of an earlier version load, and train on with the bits that they had there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hytrain_fx.api import session_of
from hytrain_fx.runtime.own_states import leaves

from .old_checkpoints import DATA, KINDS, STEPS, compiled, train


def assert_equal(found: Any, expected: Any) -> None:
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        same = torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, torch.Tensor) else one == other
        assert same, f"{one} is not {other}"


@pytest.mark.parametrize("k", [0, 2, 4])
@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_an_earlier_version_loads_and_trains_on(name: str, k: int) -> None:
    """Every weight and state is the file's after loading, and after three more steps.

    Masters go through both.
    """
    saved = torch.load(DATA / f"{name}.pt", weights_only=True)
    with compiled(KINDS[name], k=k) as (model, optimizer):
        assert (len(session_of(model).states.copies) > 0) == KINDS[name].autocast
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert_equal(optimizer.state_dict()["state"], saved["optimizer"]["state"])
        train(model, optimizer, STEPS)
        assert_equal(dict(model.state_dict()), dict(saved["then_model"]))
        assert_equal(optimizer.state_dict()["state"], saved["then_optimizer"]["state"])
