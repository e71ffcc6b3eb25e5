"""Weights that somebody else has written, or given other memory.

They are noticed by version and address, and taken for the new masters.

    version    an in-place write to the parameter or to any `detach()` of it (`.data` of a managed
               parameter is one): the counter is shared
    address    `p.data = other`, `model.to(...)`, `vector_to_parameters`
    operator   one that writes a weight in a forward, also through `.data`, which counts no version
               there (`wrote`)
    touched    on the CPU, weights that eager code has reached: numpy and DLPack aliases have no
               counter, and comparing is cheap there

Which elements were written shows by comparing with the weight that the last update left. That of a
streamed row stays on the device, so it is brought home before eager code gets at it, and in the
steps after, while what was got then may still be written to (`watch`).

Not noticed: a write on a GPU through a raw pointer, a DLPack alias, or a `.data` taken before
`compile`, which has a counter of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.torch_private.tensors import property_reader, without_torch_function
from hytrain_fx.weights.held import HeldWeights

WATCHED_STEPS: Final = 16  # after eager code has last reached a weight
_dtype_of: Final = property_reader("dtype")
_version_of: Final = property_reader("_version")


@dataclass(frozen=True, slots=True)
class _Form:
    """What may not change after compile.

    Strides of dimensions of one element are left out, they mean nothing.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        strides = tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
        return cls(tensor.shape, tensor.dtype, tensor.device, strides)

    def __str__(self) -> str:
        return f"shape {tuple(self.shape)}, {self.dtype} on {self.device}, strides {self.strides}"


class OutsideWrites:
    """Remembers versions and memory of all parameters as this library left them.

    on_moved   called where parameters have other memory than before
    """

    def __init__(self, table: ParameterTable, engine: Engine, states: StateStore, held: HeldWeights) -> None:
        self._table = table
        self._engine = engine
        self._states = states
        self._held = held
        self.on_moved: Callable[[], None] = lambda: None
        with without_torch_function():
            self._forms = [_Form.of(p) for p in table.parameters]
            self._memory = self._memory_now()
            self._written: set[int] = set()  # rows that were, and rows in other memory, whose masters may be of what the old one held
            self._versions = list(map(_version_of, table.parameters))
        self._watched: dict[int, int] = {}  # steps since eager code has reached them, by row

    def watch(self, rows: Collection[int]) -> None:
        """Eager code is about to reach these weights; none of them is in flight.

        One that was written since by an alias older than the watch becomes its master as a whole.
        """
        with torch.no_grad(), without_torch_function():
            for row in rows:
                if row in self._states.copies:  # their fp32 memory is followed as a whole
                    continue
                if row not in self._watched:
                    of = self._states.streamed.get(row)
                    if (of is None or of.has_memory) and not self.is_ours(row):
                        self._engine.drain(self._states.pieces.of(row))
                        self._states.follow_weight(row)
                    self._states.keep_weight(row, True)
                self._watched[row] = 0

    def wrote(self, rows: Collection[int]) -> None:
        """An operator is about to write these weights, whether a version counts it or not."""
        self._written.update(rows)

    def end_step(self) -> None:
        """Stop watching what eager code has not reached for some steps."""
        for row in [row for row, steps in self._watched.items() if steps == WATCHED_STEPS]:
            del self._watched[row]
            self._states.keep_weight(row, False)
        for row in self._watched:
            self._watched[row] += 1

    def is_ours(self, row: int) -> bool:
        """Whether its memory and version are what this library left."""
        parameter = self._table.parameters[row]
        return parameter._version == self._versions[row] and parameter.data_ptr() == self._memory[0][row]

    def follow_memory(self) -> set[int]:
        """Use the memory that parameters have now; the rows whose memory is another one.

        About 0.2 us a parameter.

        What is in it becomes the masters at `follow` only: 16-bit weights that come back until then
        go on from the masters they had.

        Raises UnsupportedError, and changes nothing, where dtype, shape, device or order of memory
        are others.
        """
        with torch.no_grad(), without_torch_function():
            now = self._memory_now()
            if now == self._memory:
                return set()
            moved = [row for row, (a, b) in enumerate(zip(zip(*now, strict=True), zip(*self._memory, strict=True), strict=True)) if a != b]
            for row in moved:
                self._require_form(row)
            self._engine.drain(self._states.pieces.rows(moved))
            with self._held.ours():
                for row in moved:
                    if row not in self._states.copies and row not in self._states.streamed:
                        self._states.pieces.set_weight(row, self._table.parameters[row].detach())
                    self._states.follow_memory(row)
            self._memory = now
            self._written.update(moved)
            self.on_moved()
            return set(moved)

    def follow(self, touched: Collection[int]) -> set[int]:
        """Take written weights for the masters; the rows that were, or may have been, written.

        Raises UnsupportedError.
        """
        with torch.no_grad(), without_torch_function():
            self.follow_memory()
            written = self._perhaps_written(touched)
            self._written = set()
            self._follow(written)
            return written

    def follow_safely(self, touched: Collection[int], but: Collection[int]) -> set[int]:
        """The same before `step()`, but for 16-bit weights: those may come back until then.

        The weight that the last update left stays known for them, wherever states move meanwhile.
        Those of `but` are followed all the same. Gives the rows that were, or may have been,
        written.
        """
        with torch.no_grad(), without_torch_function():
            self.follow_memory()
            written = self._perhaps_written(touched)
            later = set(filter(self._may_come_back, written.difference(but)))
            self._follow(written - later)
            self._written = later
            for row in later - self._watched.keys():
                self._states.keep_weight(row, True)
                self._watched[row] = 0
            return written

    def not_followed(self, touched: Collection[int]) -> set[int]:
        """16-bit rows whose weight is not the one that the last update left."""
        with torch.no_grad(), without_torch_function():
            return {row for row in self._perhaps_written(touched) if self._may_come_back(row) and not self._states.is_rounded(row)}

    def may_be_written(self, row: int, touched: Collection[int]) -> bool:
        """Whether it is among the rows that `follow` would look at."""
        seen = touched if self._table.device.type == "cpu" else ()
        return not self.is_ours(row) or row in self._written or row in seen

    def _perhaps_written(self, touched: Collection[int]) -> set[int]:
        written = set(self._written)
        now = list(map(_version_of, self._table.parameters))
        if now != self._versions:
            written.update(row for row, (a, b) in enumerate(zip(now, self._versions, strict=True)) if a != b)
        if self._table.device.type == "cpu":
            written.update(touched)
        return written

    def _may_come_back(self, row: int) -> bool:
        """Whether its master has bits that a written weight would take from it."""
        return _dtype_of(self._table.parameters[row]) != torch.float32 and self._states.knows_last_weight(row)

    def _follow(self, written: Collection[int]) -> None:
        if written:
            self._engine.drain(self._states.pieces.rows(sorted(written)))
        for row in written:
            self._states.follow_weight(row)
        self.note(written)

    def follow_copies(self, touched: Collection[int]) -> None:
        """Take what was written to fp32 memory of rows with copies for masters and copies.

        Graphs do not read that memory.
        """
        copies = self._states.copies
        seen = touched if self._table.device.type == "cpu" else ()
        written = [row for row in copies if copies[row].current and (not self.is_ours(row) or row in self._written or row in seen)]
        if written:
            self._engine.drain(written)
            for row in written:
                self._states.follow_weight(row)
            self._written.difference_update(written)
            self.note(written)

    def note_all(self, rows: Collection[int]) -> None:
        """Versions and memory that these rows have now are ours."""
        self.note(rows)
        for row in rows:
            self._memory[0][row] = self._table.parameters[row].data_ptr()

    def note(self, rows: Collection[int]) -> None:
        """The versions that these rows have now are ours."""
        if len(rows) == len(self._versions):
            self._versions = list(map(_version_of, self._table.parameters))
            return
        for row in rows:
            self._versions[row] = self._table.parameters[row]._version

    def _memory_now(self) -> tuple[list[int], list[int], list[torch.dtype]]:
        parameters = self._table.parameters  # three maps: no bytecode is run for a parameter
        addresses = list(map(torch.Tensor.data_ptr, parameters))
        for row, of in self._states.streamed.items():
            if not of.has_memory:  # a slot is under it, or nothing
                addresses[row] = self._memory[0][row]
        return addresses, list(map(torch.Tensor.numel, parameters)), list(map(_dtype_of, parameters))

    def _require_form(self, row: int) -> None:
        found, expected = _Form.of(self._table.parameters[row]), self._forms[row]
        if found != expected:
            raise UnsupportedError(
                f"{self._table.names[row]} was changed after hytrain_fx.compile(): it has {found}; it was compiled with {expected}. "
                "Call hytrain_fx.close(model), make a new optimizer, and call hytrain_fx.compile() again"
            )
