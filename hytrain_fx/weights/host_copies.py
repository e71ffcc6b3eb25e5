"""A model whose weights rest elsewhere as `state_dict()` and `load_state_dict()` reach it.

    saved     `state_dict()` asks: a copy on the host, of a streamed weight made from its home, of
              one in shards gathered from all ranks, one after the other. Vectors are copied too, so
              that all are of one time
    loaded    `load_state_dict()` gives a value: it goes home, of one in shards this rank's part
    follow    what was written into such a copy becomes the weight, as in plain torch, until the
              next step() or training forward

So neither brings a weight to the device, and a model that never fits can be saved and loaded. From
the next step() or training forward on a copy is the loop's alone. One that the loop has dropped
unwritten is dropped here too (given_copies.py). None is an inference tensor: it could not be
followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.runtime.states.pieces import flat_memory
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.torch_private.tensors import increment_versions, without_torch_function
from hytrain_fx.weights.given_copies import GivenCopies
from hytrain_fx.weights.outside_writes import OutsideWrites


class HostCopies:
    """Those of one session. Implements `guard.Elsewhere`.

    settle      the new weights of these rows are there, also those of other ranks' updates
    gathered    the weight of a row of which each rank has a shard alone; None for others
    """

    def __init__(
        self, table: ParameterTable, engine: Engine, states: StateStore, writes: OutsideWrites,
        settle: Callable[[Sequence[int]], None], gathered: Callable[[int], torch.Tensor | None],
    ) -> None:  # fmt: skip
        self._settle = settle
        self._gathered = gathered
        self._table = table
        self._engine = engine
        self._states = states
        self._writes = writes
        self._of = states.streamed
        self._given: dict[int, GivenCopies] = {}  # by row: what was handed out, all of one memory

    @property
    def are_wanted(self) -> bool:
        """Whether any weight rests elsewhere."""
        return bool(self._of)

    @whole()
    def saved(self, parameter: nn.Parameter) -> torch.Tensor:
        """The weight of the last update, or as the loop has written it, on the host.

        The same memory for each of its names, until it is another weight.
        """
        row = self._table.row_of[id(parameter)]
        with torch.inference_mode(False), torch.no_grad(), without_torch_function():
            self._follow(row)
            of = self._of.get(row)
            self._settle([row])
            copy = _on_host(parameter)
            if (gathered := self._gathered(row)) is not None:
                flat_memory(copy).copy_(gathered)
            elif of is not None and not of.has_memory:
                flat_memory(copy).copy_(self._states.home(row))
            else:
                self._states.show_if_behind(row)
                copy.copy_(parameter)
            given = self._given.get(row)
            if given is None or (known := given.copy) is None or not torch.equal(_bytes(copy), _bytes(known)):
                given, known = GivenCopies(), copy
                self._given[row] = given
            return given.give(known)

    @whole()
    def loaded(self, parameter: nn.Parameter, values: torch.Tensor) -> bool:
        """These values, of its shape, are the weight from now on, where it rests on the host.

        False, and nothing done, where it does not.
        """
        row = self._table.row_of[id(parameter)]
        self._given.pop(row, None)
        if row not in self._of:
            return False
        with torch.inference_mode(False), torch.no_grad(), without_torch_function():
            self._write(row, _on_host(parameter).copy_(values))
        return True

    def follow(self) -> None:
        """Take what was written into copies for the weights."""
        for row in tuple(self._given):
            self._follow(row)

    def forget(self) -> None:
        """What is written into copies from now on is no weight's."""
        self._given.clear()

    def _follow(self, row: int) -> None:
        given = self._given.get(row)
        if given is None:
            return
        if (written := given.written()) is not None:
            with torch.inference_mode(False), torch.no_grad(), without_torch_function():
                self._write(row, written)
        del written
        if not given.are_held():
            self._given.pop(row, None)

    def _write(self, row: int, values: torch.Tensor) -> None:
        self._engine.drain(self._states.pieces.rows([row]))  # no update may write the weight any more
        if row not in self._of:  # writes on the device are seen
            self._table.parameters[row].copy_(values)
            return
        self._states.replace_weight(row, flat_memory(values))
        increment_versions([self._table.parameters[row]])  # a graph that has saved it must not read on
        self._writes.note([row])


def _bytes(copy: torch.Tensor) -> torch.Tensor:
    return flat_memory(copy).view(torch.uint8)


def _on_host(parameter: nn.Parameter) -> torch.Tensor:
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
