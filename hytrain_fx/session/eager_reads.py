"""In a forward that is not one graph, eager code waits for a weight at the operator that reads it.

    begin      before the forward's first eager code: nothing has been read
    (eager)    an operator is about to read a weight: its unit's new weights are waited for, as the
               graphs' nodes do it, and `on_read` is told; `on_write` where it is written
    in_graph   a compiled graph runs: its own nodes wait
    end        the forward is over

So code after a graph break, a module that Dynamo leaves alone, and a forward without any graph
wait for nothing that they do not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from hytrain_fx.capture.units import Unit, unit_of_rows
from hytrain_fx.errors import EngineError
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.runtime.native.op_reads import OperatorReads, storage_of
from hytrain_fx.session.callbacks import weakly
from hytrain_fx.torch_private.tensors import without_torch_function


class EagerReads:
    """Watches the forwards of one session, one at a time.

    on_wait    called with the rows of a unit before the first operator that reads one of their
               weights runs
    settle     called before it where that runs on another stream than the one the forward began on,
               and for each further stream: what follows makes only the forward's wait
    on_read    called after it with the rows that the operator reads, once in a forward for each
    on_write   called with those that it writes

    on_first   called with the number of a unit that no forward's eager code has read before
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        units: Sequence[Unit],
        on_wait: Callable[[Sequence[int]], None],
        settle: Callable[[Sequence[int]], None],
        on_read: Callable[[Sequence[int]], None],
        on_write: Callable[[Sequence[int]], None],
    ) -> None:
        self._parameters = parameters
        self._units = units
        self._unit_of = unit_of_rows(units)
        self._on_wait, self._settle, self._on_read, self._on_write = on_wait, settle, on_read, on_write
        self._watch: OperatorReads | None = None
        self._cannot = False
        self._rows_of: dict[int, list[int]] = {}  # by storage
        self._waited: dict[int, set[object]] = {}  # by unit, in this forward: the streams that may read it
        self._stream: object = None
        self.is_on = False
        self.on_first: Callable[[int], None] = lambda _: None
        self.read: set[int] = set()  # numbers of units that eager code of forwards has read

    @whole()
    def begin(self) -> bool:
        """Eager code of the forward comes.

        False where its reads cannot be seen (no compiler): then all weights must be new.
        """
        if self.is_on:
            return True
        watch = self._made()
        if watch is None:
            return False
        if self._rows_of:
            watch.again()
        else:
            self._find_storages(watch)
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
        self._rows_of = {}

    def _made(self) -> OperatorReads | None:
        if self._watch is None and not self._cannot:
            try:
                self._watch = OperatorReads(weakly(self._told))
            except EngineError:
                self._cannot = True
        return self._watch

    def _find_storages(self, watch: OperatorReads) -> None:
        found: dict[int, list[int]] = {}
        with without_torch_function():
            for row, parameter in enumerate(self._parameters):
                found.setdefault(storage_of(parameter), []).append(row)
        watch.clear()
        watch.add(list(found))
        self._rows_of = found  # last: after an interrupt before, all are looked for again

    def _told(self, storage: int, written: bool) -> None:
        rows, stream = self._rows_of[storage], self._current_stream()
        for unit in dict.fromkeys(self._unit_of[row] for row in rows):
            waited = self._waited.setdefault(unit, set())
            if stream not in waited:
                self._wait(unit, is_first=not waited, elsewhere=stream != self._stream)
                waited.add(stream)
        self._on_read(rows)
        if written:
            self._on_write(rows)

    def _wait(self, unit: int, *, is_first: bool, elsewhere: bool) -> None:
        rows = self._units[unit].rows
        if is_first and unit not in self.read:
            self.on_first(unit)
            self.read.add(unit)
        if elsewhere:
            self._settle(rows)
        if is_first:
            self._on_wait(rows)

    def _current_stream(self) -> object:
        device = self._parameters[0].device
        return torch.cuda.current_stream(device) if device.type == "cuda" else None
