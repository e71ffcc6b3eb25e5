"""Which fp32 weights of a session the device has in 16 bits, and when their own memory is there.

    a training graph is captured under autocast    rows that it reads in bf16 alone (`casts`) get a
                                                   copy, which the graph reads instead
    the loop touches a parameter                   its fp32 memory is filled from the master
    a graph that reads the parameter itself        the same, before it runs (an evaluation without
                                                   autocast)
    the next training forward                      what was written there is followed, and the
                                                   memory given back if nobody else holds it

Rows that any training graph reads in fp32 get no copy. Once part of the model has run as eager
code, no further row gets one, and the memory of those that have one stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from hytrain_fx.capture.casts import CastRows, InputCopies, cast_rows
from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.errors import EngineError
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.states.copied_weights import owns_memory
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.torch_private.autograd import accumulator
from hytrain_fx.torch_private.tensors import get_grad, increment_versions, without_torch_function
from hytrain_fx.torch_private.trace import is_held_alone, look_at, may_autocast
from hytrain_fx.weights.held import HeldWeights
from hytrain_fx.weights.outside_writes import OutsideWrites


class AutocastCopies:
    """The copies of one session.

    wanted      whether any may be made
    on_change   called when rows have got copies
    """

    def __init__(
        self,
        table: ParameterTable,
        engine: Engine,
        states: StateStore,
        writes: OutsideWrites,
        held: HeldWeights,
        *,
        wanted: bool,
        on_change: Callable[[], None],
    ) -> None:
        self._table = table
        self._engine = engine
        self._states = states
        self._writes = writes
        self._held = held
        self._copies = states.copies
        self._wanted = wanted and engine.takes_copies
        self._on_change = on_change
        self._read_in_fp32: set[int] = set()  # by a training graph
        self._stays = False  # fp32 memory, because eager code reads it

    # ---- while graphs are captured ----

    def copies_for(self, gm: fx.GraphModule, example_inputs: Sequence[Any], row_of_input: Mapping[int, int]) -> InputCopies:
        """What a graph is to read instead of parameters.

        `row_of_input` by position among its inputs.

        What it gives holds nothing of this alive, as torch keeps it for as long as the compiled
        code lives.
        """
        rows, of_row = frozenset(row_of_input.values()), dict[int, torch.Tensor]()
        if self._looks(gm, rows):
            of_row = self._of(look_at(gm, example_inputs, partial(cast_rows, row_of_input=row_of_input)), rows)
        copies = {i: of_row[row] for i, row in row_of_input.items() if row in of_row}
        direct = tuple(row for i, row in row_of_input.items() if i not in copies)
        return InputCopies(copies, partial(_now, weakref.ref(self), tuple(row_of_input[i] for i in copies), direct))

    def _looks(self, gm: fx.GraphModule, rows: Iterable[int]) -> bool:
        """Whether a graph with these rows among its inputs has to be looked at.

        For new copies, or for those there are.
        """
        rows = set(rows)
        if any(row in self._copies for row in rows):
            return True
        found = self._wanted and not self._stays and any(map(self._may_begin, rows)) and may_autocast(gm, self._table.device)
        if not found and torch.is_grad_enabled():
            self._read_in_fp32 |= rows
        return found

    def _of(self, found: CastRows, rows: Collection[int]) -> dict[int, torch.Tensor]:
        """The copies that this graph, of these rows, is to read instead of parameters.

        They are made where there are none yet.
        """
        new = [row for row in sorted(found.in_bf16 & found.trained) if row not in self._copies and self._may_begin(row)]
        self._read_in_fp32 |= found.trained - found.in_bf16 | (found.trained & self._states.pieces.cut.keys())
        if new and self._wanted and not self._stays:
            self._begin(new)
        return {row: self._copies[row].copy for row in found.in_bf16 if row in self._copies and row in rows}

    def _may_begin(self, row: int) -> bool:
        may = row not in self._read_in_fp32 and row not in self._copies and row not in self._states.pieces.cut
        return may and owns_memory(self._table.parameters[row])

    def _begin(self, rows: list[int]) -> None:
        with torch.no_grad(), without_torch_function():
            self._engine.drain(rows)
            self._writes.follow(())
            idle = [row for row in rows if get_grad(self._table.parameters[row]) is None]  # a gradient in a slot stays where it is
            self._engine.discard(idle)
            with self._held.ours():
                for row in idle:
                    self._states.use_copy(row)
            self._on_change()
            self._give_back(idle)

    # ---- while the loop runs ----

    def enter_forward(self, touched: Collection[int]) -> None:
        """Follow what was written to fp32 memory.

        Before a training forward give back what nobody holds, renew what somebody does.
        """
        if not self._copies:
            return
        learns = torch.is_grad_enabled()  # the weights of an evaluation stay as they are until it is over
        with torch.no_grad(), without_torch_function():
            self._writes.follow_copies(touched)
            if learns:
                self._give_back(self._copies)

    def before_graph(self, read: Sequence[int], direct: Collection[int]) -> list[torch.Tensor]:
        """A graph is about to run that reads copies of these rows.

        Of `direct` rows it reads the parameters themselves.
        """
        if self._copies:
            self.fill(direct)
        return [self._copies[row].copy for row in read]

    def may_give_back(self, row: int) -> bool:
        """Whether the fp32 memory of this row may go before the next training forward."""
        return row in self._copies and not self._stays

    def before_eager_code(self) -> None:
        """Eager code is about to read parameters."""
        self._stays = True
        self.fill(self._copies)

    def fill(self, rows: Iterable[int]) -> None:
        """Have the fp32 memory of these rows show the weight as of the last update."""
        behind = [row for row in rows if row in self._copies and not self._copies[row].current]
        if not behind:
            return
        with torch.no_grad(), without_torch_function():
            self._engine.drain(behind)
            for row in behind:
                self._states.fill_weight(row)
            self._writes.note_all(behind)

    def committed(self, rows: Iterable[int]) -> None:
        """The updates of these rows have begun.

        Copies are written, and fp32 memory of rows on the host is out of date.
        """
        mine = [row for row in rows if row in self._copies]
        if mine:
            self._copies.updated(row for row in mine if not self._states.placement[row].rests_on_device)
            increment_versions([self._copies[row].copy for row in mine])

    def moved(self) -> None:
        """States have moved, and fp32 memory with them."""
        with without_torch_function():
            self._writes.note_all(list(self._copies))

    def restore(self) -> None:
        """Give every parameter its memory and weight, for good.

        Also where the engine has failed.
        """
        self._stays = True
        if not all(self._copies[row].current for row in self._copies):
            with suppress(EngineError):
                self._engine.drain(list(self._copies))
            with torch.no_grad(), without_torch_function():
                for row in self._copies:
                    self._states.fill_weight(row)

    def in_words(self) -> str | None:
        """How many weights have copies, and how much of them; None where there are none."""
        if not self._copies:
            return None
        params, everything = sum(c.numel() for c in self._copies.tensors.values()), sum(p.numel() for p in self._table.parameters)
        return (f"autocast: {len(self._copies)} of {len(self._table)} weights, all fp32, rest on the device as bf16 copies "
                f"({params / everything:.1%} of the parameters)")

    def _give_back(self, rows: Iterable[int]) -> None:
        there = [row for row in rows if not self._states.placement[row].rests_on_device and self._copies[row].has_memory]
        parameters = self._table.parameters
        mine = [row for row in there if not self._stays and owns_memory(parameters[row])]
        alone = [row for row in mine if _is_held_alone(parameters[row])]
        if alone and self._table.device.type == "cuda":
            torch.cuda.synchronize(self._table.device)  # a copy that the loop makes on a stream of its own may still read it
        for row in alone:
            self._copies[row].give_memory_back()
        self._writes.note_all(alone)
        self.fill(set(there) - set(alone))


def _now(found: weakref.ref[AutocastCopies], read: Sequence[int], direct: Collection[int]) -> Sequence[torch.Tensor]:
    copies = found()
    if copies is None:
        raise EngineError("a graph of a model that was closed or dropped was called; compile the model again")
    return copies.before_graph(read, direct)


def _is_held_alone(parameter: nn.Parameter) -> bool:
    return is_held_alone(parameter, accumulator(parameter) if parameter.requires_grad else None)
