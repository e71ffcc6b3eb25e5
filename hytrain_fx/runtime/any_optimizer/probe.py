"""Times the user's optimizer on the device, on a row like one of the model's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hytrain_fx.runtime.any_optimizer.rule import UpdateRule
from hytrain_fx.runtime.arithmetic import AT_REST
from hytrain_fx.runtime.engine import CommitItem, Engine, RowStates
from hytrain_fx.runtime.probe import MAX_PARAMS, UpdateProbe
from hytrain_fx.runtime.states.leaves import map_leaves
from hytrain_fx.runtime.states.own_states import OwnStates, is_tensor


class RuleProbe(UpdateProbe):
    """As `UpdateProbe`; the row has the form of the largest of the model's rows that is no larger than that one's, else of the smallest."""

    def __init__(self, engine: Engine, parameters: Sequence[torch.Tensor], rule: UpdateRule) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        fitting = [row for row, size in enumerate(sizes) if size <= MAX_PARAMS]
        self._model_row = max(fitting, key=sizes.__getitem__) if fitting else min(range(len(sizes)), key=sizes.__getitem__)
        self._rule = rule
        super().__init__(engine, [parameters[self._model_row]], max(MAX_PARAMS, sizes[self._model_row]))

    def _states(self, master: torch.Tensor) -> RowStates:
        def made(leaf: object) -> object:
            return torch.zeros_like(leaf, device=master.device) if isinstance(leaf, torch.Tensor) and is_tensor(leaf) else leaf

        none = torch.empty(0, dtype=torch.float32, device=master.device)
        return RowStates(master, none, none, None, None, own=OwnStates(map_leaves(self._rule.first_entry(self._model_row), made) or None))

    def _item(self, row: int, states: RowStates, grad: torch.Tensor) -> CommitItem:
        return CommitItem(row, AT_REST, grad, at_end=True, step=self._rule.step_of(self._model_row, states))
