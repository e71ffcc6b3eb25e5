"""As `state_dict`, for any optimizer.

The entry of one parameter has the optimizer's own names, and `master` for 16-bit parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from hytrain_fx.ir.states import MASTER_ALONE
from hytrain_fx.runtime.any_optimizer.rule import UpdateRule
from hytrain_fx.runtime.engine import RowStates
from hytrain_fx.runtime.own_states import Entry, OwnStates, leaves, map_leaves
from hytrain_fx.runtime.states.store import StateStore


class OwnEntries:
    """Reads and writes what the optimizer keeps here, by row; rows must be at rest."""

    def __init__(self, rule: UpdateRule, states: StateStore, parameters: tuple[torch.Tensor, ...], names: tuple[str, ...]) -> None:
        self._rule = rule
        self._states = states
        self._parameters = parameters
        self._names = names

    def has(self, row: int) -> bool:
        """Whether anything is kept for this row."""
        own = self._states[row].own
        return own is not None and own.entry is not None

    def read(self, row: int) -> Entry:
        """A copy on the CPU."""
        own = self._states[row].own
        assert own is not None
        entry: Entry = map_leaves(own.entry, lambda leaf: leaf.to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else copy.copy(leaf))
        parameter = self._parameters[row]
        if parameter.dtype != torch.float32:
            entry["master"] = self._shaped(row, self._states[row].master).to("cpu", copy=True)
        return entry

    def load(self, row: int, saved: Mapping[str, Any] | None) -> None:
        """Keep this from now on; None: nothing, and the weight becomes the master."""
        own, parameter = self._states[row].own, self._parameters[row]
        assert own is not None
        if saved is None:
            own.entry = None
            self._states.take_weight(row)
            return
        wide = parameter.dtype == torch.float32
        if wide or "master" not in saved:
            self._states.take_weight(row)
            master = self._states[row].master
        else:
            master = torch.empty(parameter.numel(), dtype=torch.float32, device=saved["master"].device)
            self._shaped(row, master).copy_(saved["master"])
        entry = {name: self._loaded(row, name, value) for name, value in saved.items() if wide or name != "master"}
        self._states.write(row, RowStates(MASTER_ALONE, master, own=OwnStates(entry)))

    def check(self, row: int, saved: Mapping[str, Any], group: Mapping[str, Any]) -> None:
        """Raises ValueError where an entry does not fit what the optimizer keeps.

        It lacks something that is kept under these options, or has it in another shape.
        """
        expected, name = self._rule.expected_entry(row, group), self._names[row]
        if saved and (missing := sorted(expected.keys() - saved.keys())):
            raise ValueError(f"the checkpoint has no {missing[0]} for {name}, only {sorted(saved)}; "
                             f"is it of {self._rule.name} with these options?")
        shapes = {key: value.shape for key, value in expected.items() if isinstance(value, torch.Tensor)}
        for key, shape in {**shapes, "master": self._parameters[row].shape}.items():
            found = saved.get(key)
            if isinstance(found, torch.Tensor) and found.shape != shape:
                raise ValueError(f"{key} of {name} has shape {tuple(found.shape)} in the checkpoint, expected {tuple(shape)}")

    def _loaded(self, row: int, name: str, value: Any) -> Any:
        """A copy, tensors where the row rests.

        Floating-point tensors have the dtype that the optimizer makes them in, as far as that is
        known; what was kept in the dtype of a 16-bit weight is in fp32. `step` is as saved, as in
        torch.
        """
        dtype, device = self._parameters[row].dtype, self._states[row].master.device
        rests = self._rule.first_entry(row).get(name)
        scalars_rest = isinstance(rests, torch.Tensor) and rests.device.type == "meta"
        made = {leaf.dtype for leaf in leaves(rests) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()}

        def loaded(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return copy.deepcopy(leaf)
            to = device if leaf.dim() or scalars_rest else torch.device("cpu")
            kept = torch.float32 if leaf.dtype == dtype else leaf.dtype
            if name != "step" and leaf.is_floating_point() and len(made) == 1:
                (kept,) = made
            return leaf.detach().to(to, kept, copy=True)

        return map_leaves(value, loaded)

    def _shaped(self, row: int, flat: torch.Tensor) -> torch.Tensor:
        parameter = self._parameters[row]
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
