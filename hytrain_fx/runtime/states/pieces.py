"""Which rows of the engine each parameter has.

One where the parameter is whole, one for each piece where it is cut.

    parameter 3, whole                  row 3
    parameter 3, cut into two pieces    row 3 rests; rows 41 and 42, made when the cut was first
                                        seen

A row keeps its range for good, so a cut that comes back finds its rows again. Numbers of parameters
become rows here; where nothing is cut the two are the same. Of a parameter that several ranks
update in shards, "whole" is this rank's shard, and ranges count from its beginning.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hytrain_fx.ir.plan import Piece
from hytrain_fx.ir.shard import Shard
from hytrain_fx.runtime.engine import Engine, RowSpec


def flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of its memory, as a flat view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of its memory, with a version counter of its own.

    Writes of new weights must not count as edits of the parameter: autograd and the session both
    look at its version.
    """
    data = tensor.data
    return data.as_strided((data.numel(),), (1,), data.storage_offset())


class PieceRows:
    """The rows of one engine, whose first ones are the parameters as a whole.

    cut       by number of a parameter that is cut: its rows, in the order of their ranges
    piece_of  by row that was made for a piece: which one
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], names: Sequence[str], unit_of: Sequence[int], engine: Engine, shards: Mapping[int, Shard]
    ) -> None:
        self.cut: dict[int, tuple[int, ...]] = {}
        self.piece_of: dict[int, Piece] = {}
        self._rows: dict[Piece, int] = {}
        self._names = tuple(names)
        self._unit_of = list(unit_of)
        self._engine = engine
        self._shards = shards
        self._numels = [shards[row].end - shards[row].begin if row in shards else p.numel() for row, p in enumerate(parameters)]
        self._expanded: dict[Sequence[int], tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._numels)

    def of(self, parameter: int) -> tuple[int, ...]:
        """The rows of one parameter."""
        return self.cut.get(parameter, (parameter,))

    def rows(self, parameters: Sequence[int]) -> Sequence[int]:
        """The rows of these parameters, in their order."""
        if not self.cut:
            return parameters
        key = tuple(parameters)
        found = self._expanded.get(key)
        if found is None:
            found = self._expanded[key] = tuple(row for parameter in key for row in self.of(parameter))
        return found

    def memory(self, parameter: int, weight: torch.Tensor) -> torch.Tensor:
        """What is updated here of a weight: its elements, flat, or those of the shard.

        weight   whole, or the shard itself
        """
        shard = self._shards.get(parameter)
        if shard is None or weight.numel() == shard.end - shard.begin:
            return flat_memory(weight)
        return flat_memory(weight)[shard.begin : shard.end]

    def piece(self, row: int) -> Piece:
        """What the row updates."""
        return self.piece_of[row] if row in self.piece_of else Piece(row, 0, self._numels[row])

    def parameter(self, row: int) -> int:
        """The parameter whose row it is."""
        return self.piece_of[row].parameter if row in self.piece_of else row

    def unit(self, row: int) -> int:
        """The unit of the row's parameter."""
        return self._unit_of[self.parameter(row)]

    def set_unit(self, parameter: int, unit: int) -> None:
        """Units are numbered differently: tell all rows of the parameter, also those at rest."""
        self._unit_of[parameter] = unit
        for row in (parameter, *(row for row, piece in self.piece_of.items() if piece.parameter == parameter)):
            self._engine.set_unit(row, unit)

    def set_cut(self, pieces: Sequence[Piece], weight: torch.Tensor) -> tuple[int, ...]:
        """Cut one parameter into these pieces, or make it whole with a single one; its rows.

        All of its rows must be idle.

        `weight` is what the engine writes new weights to.
        """
        parameter = pieces[0].parameter
        self._expanded.clear()
        if len(pieces) == 1:
            self.cut.pop(parameter, None)
        else:
            self.cut[parameter] = tuple(self._row_of(piece, self.memory(parameter, weight)) for piece in pieces)
        return self.of(parameter)

    def restore(self, cut: dict[int, tuple[int, ...]]) -> None:
        """Cut the parameters as they were at an earlier time."""
        self.cut = cut
        self._expanded.clear()

    def set_weight(self, parameter: int, weight: torch.Tensor) -> None:
        """The parameter has other memory: tell all its rows, also those at rest."""
        memory = self.memory(parameter, weight)
        self._engine.set_weight(parameter, memory)
        for row, piece in self.piece_of.items():
            if piece.parameter == parameter:
                self._engine.set_weight(row, memory[piece.begin : piece.end])

    def _row_of(self, piece: Piece, weight: torch.Tensor) -> int:
        row = self._rows.get(piece)
        if row is None:
            name = f"{self._names[piece.parameter]}[{piece.begin}:{piece.end}]"
            spec = RowSpec(piece.numel, self._unit_of[piece.parameter], weight[piece.begin : piece.end], name)
            row = self._rows[piece] = self._engine.add_row(spec)
            self.piece_of[row] = piece
        return row
