"""What the probe of the update on the device leaves in the engine: a row without memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hytrain_fx.api import session_of
from hytrain_fx.runtime.engine import RowSpec, RowStates

from .explained import compiled
from .models import mlp


@pytest.mark.parametrize(("optimizer", "engine"), [(torch.optim.AdamW, "native"), (torch.optim.AdamW, "torch"), (torch.optim.SGD, "auto")])
def test_a_probe_leaves_one_row_without_memory(optimizer: Any, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the update is timed, its weight and states are released.

    The next probe takes the same row.
    """
    monkeypatch.setattr(torch.optim, "AdamW", optimizer)  # which `compiled` makes
    with compiled(mlp, k=0, engine=engine, replan_every=0) as (model, step):
        session = session_of(model)
        rows: list[int] = []
        seen: list[StorageWeakRef] = []
        add_row, place_on_device = session.engine.add_row, session.engine.place_on_device

        def note(*tensors: torch.Tensor) -> None:
            seen.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if tensor.numel())

        def added(spec: RowSpec) -> int:
            note(spec.weight)
            rows.append(add_row(spec))
            return rows[-1]

        def placed(row: int, states: RowStates) -> None:
            note(states.master, *states.states)
            place_on_device(row, states)

        monkeypatch.setattr(session.engine, "add_row", added)
        monkeypatch.setattr(session.engine, "place_on_device", placed)
        for _ in range(3):
            step()
            assert session.probe_device_update_us_per_param() > 0
        gc.collect()
        assert rows == [len(session.table)]
        assert seen
        assert not [storage for storage in seen if not storage.expired()]
        step()
