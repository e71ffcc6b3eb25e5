"""In a forward that is not one graph, eager code waits for a weight at the operator that reads it.

    begin      before the forward's first eager code: nothing has been read
    (eager)    an operator is about to read a weight: its unit's new weights are waited for, as the
               graphs' nodes do it, and `on_read` is told
    in_graph   a compiled graph runs: its own nodes wait
    end        the forward is over

So code after a graph break, a module that Dynamo leaves alone, and a forward without any graph
wait for nothing that they do not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from hytrain_fx.capture.units import Unit
from hytrain_fx.errors import EngineError
from hytrain_fx.runtime.native.op_reads import OperatorReads, storage_of
from hytrain_fx.session.callbacks import weakly
from hytrain_fx.torch_private.tensors import without_torch_function


class EagerReads:
    """Watches the forwards of one session, one at a time.

    on_read    called with the rows of a unit before the operator that reads one of their weights
               runs; the flag says that it runs on another stream than the one the forward began on
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], units: Sequence[Unit], on_read: Callable[[Sequence[int], bool], None]
    ) -> None:
        self._parameters = parameters
        self._units = units
        self._on_read = on_read
        self._watch: OperatorReads | None = None
        self._cannot = False
        self._storages: list[list[int]] = []  # by unit
        self._units_of: dict[int, list[int]] = {}  # by storage
        self._waited: set[int] = set()  # units whose weights are not watched
        self._stream: object = None
        self.is_on = False
        self.read: set[int] = set()  # numbers of units that eager code of forwards has read

    def begin(self) -> bool:
        """Eager code of the forward comes.

        False where its reads cannot be seen (no compiler): then all weights must be new.
        """
        if self.is_on:
            return True
        watch = self._made()
        if watch is None:
            return False
        if not self._storages:
            self._find_storages()
        for unit in self._waited:
            watch.add(self._storages[unit])
        self._waited.clear()
        self._stream = self._current_stream()
        watch.begin()
        self.is_on = True
        return True

    def end(self) -> None:
        """The forward is over. Raises what `on_read` has raised."""
        if self.is_on and self._watch is not None:
            self.is_on = False
            self._watch.end()
            self._watch.raise_failed()

    def in_graph(self) -> AbstractContextManager[None]:
        """Around one run of a compiled graph."""
        return self._watch.paused() if self.is_on and self._watch is not None else nullcontext()

    def memory_moved(self) -> None:
        """Some parameters have other memory now."""
        self._storages = []

    def _made(self) -> OperatorReads | None:
        if self._watch is None and not self._cannot:
            try:
                self._watch = OperatorReads(weakly(self._told))
            except EngineError:
                self._cannot = True
        return self._watch

    def _find_storages(self) -> None:
        assert self._watch is not None
        self._watch.drop(list(self._units_of))
        with without_torch_function():
            self._storages = [[storage_of(self._parameters[row]) for row in unit.rows] for unit in self._units]
        self._units_of = {}
        for unit, storages in enumerate(self._storages):
            for storage in storages:
                self._units_of.setdefault(storage, []).append(unit)
        self._waited = set(range(len(self._units)))

    def _told(self, storage: int) -> None:
        assert self._watch is not None
        elsewhere = self._current_stream() != self._stream
        new = [unit for unit in self._units_of[storage] if unit not in self._waited]
        self._waited.update(new)
        self.read.update(new)
        for unit in new:
            self._watch.drop([other for other in self._storages[unit] if self._waited.issuperset(self._units_of[other])])
            self._on_read(self._units[unit].rows, elsewhere)

    def _current_stream(self) -> object:
        device = self._parameters[0].device
        return torch.cuda.current_stream(device) if device.type == "cuda" else None
