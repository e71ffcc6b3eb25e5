"""The optimizer states of every parameter: what they hold, read and written whole.

`placed.py` says where they rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from hytrain_fx.errors import EngineError, StatesError
from hytrain_fx.ir.limits import CHUNK_PARAMS
from hytrain_fx.runtime.engine import RowStates
from hytrain_fx.runtime.states.pieces import flat_alias, flat_memory
from hytrain_fx.runtime.states.placed import PlacedStates
from hytrain_fx.runtime.states.split_master import all_rounded, copy_states, halved, is_rounding, load_masters, split_into, whole_states
from hytrain_fx.runtime.states.streamed_homes import StreamedWeight, home_of
from hytrain_fx.torch_private.tensors import without_torch_function


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gap or overlap, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz > 1):
        if stride != expected:
            return False
        expected *= size
    return True


class StateStore(PlacedStates):
    """Reads and writes values, and follows weights that the loop reads and writes.

    streamed   by parameter whose weight rests on the host, or sharded
    on_home    called with a streamed parameter before its home on the host is written here
    """

    _half_loaded: BaseException | None = None  # what ended the last loading of states
    _weights_follow = True

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.streamed: dict[int, StreamedWeight] = {}
        self.on_home: Callable[[int], None] = lambda parameter: None

    def is_whole(self, parameter: int) -> bool:
        """Whether it may not be cut: as there, or its weight rests on the host."""
        return (parameter in self.streamed and self.streamed[parameter].shard is None) or super().is_whole(parameter)

    # ---- all states together ----

    @contextmanager
    def loading(self, *, all_states: bool) -> Iterator[None]:
        """Around whatever overwrites states.

        After an error inside, they are a mixture until all of them have been loaded.
        """
        before = None if all_states else self._half_loaded
        try:
            yield
        except BaseException as error:
            self._half_loaded = error
            raise
        self._half_loaded = before

    def require_whole(self) -> None:
        """Raises StatesError where a checkpoint was loaded in part, with old states mixed in."""
        if self._half_loaded is not None:
            raise StatesError(
                f"loading optimizer states ended in an error ({type(self._half_loaded).__name__}: {self._half_loaded}), so they are a "
                "mixture of old and new ones; call optimizer.load_state_dict() again, and load the model's weights again before it"
            ) from self._half_loaded

    # ---- those of one parameter ----

    def whole(self, parameter: int) -> RowStates:
        """The states with the master as one fp32 tensor: for reading, copies in part.

        The weight must still be what the last update left.

        Raises EngineError as `in_memory` does.
        """
        found = list(map(self._whole_row, self.pieces.of(parameter)))
        return found[0] if len(found) == 1 else _joined(found)

    def write(self, parameter: int, values: RowStates) -> None:
        """Write states, master in one piece, into those of an idle parameter.

        A 16-bit weight becomes the master's rounding, until `leave_weights`.
        """
        self._home_changes(parameter)
        for row in self.pieces.of(parameter):
            piece, states, weight = self.pieces.piece(row), self.in_memory(row), self._weight(row)
            copy_states(values.part(piece.begin, piece.end), states, weight.device)
            if weight.dtype != torch.float32 and self._weights_follow:
                weight.copy_(states.master)
        if parameter in self.streamed and self._weights_follow:
            self.show_weight(parameter)

    def leave_weights(self) -> None:
        """The weights are a plain model's from now on, and states that are written leave them."""
        self._weights_follow = False

    def clear(self, parameter: int) -> None:
        """As before its first step: states are zero, the weight is every master."""
        for row in self.pieces.of(parameter):
            for flat in self.in_memory(row).states:
                flat.zero_()
        self.take_weight(parameter)

    def _whole_row(self, row: int) -> RowStates:
        states = self.in_memory(row)
        self._bring_weight_home(row)
        return whole_states(states, self._weight(row).device)

    # ---- weights that rest on the host ----

    def stream(self, parameter: int) -> None:
        """From now on the weight of an idle whole parameter that the CPU updates rests on the host.

        The parameter keeps its memory until somebody else takes it.
        """
        weight = self._weights[parameter]
        self.streamed[parameter] = StreamedWeight(weight)
        self._weights[parameter] = home_of(weight, self._states[parameter])
        self.pieces.set_weight(parameter, self._weights[parameter])

    def shard(self, parameter: int) -> None:
        """From now on the weight of an idle parameter rests as this rank's shard, on the device.

        The parameter keeps its memory until somebody else takes it.
        """
        weight = self._weights[parameter]
        home = self.pieces.memory(parameter, weight).clone()
        self.streamed[parameter] = StreamedWeight(weight, sharded=True, shard=home)
        self._weights[parameter] = home
        self.pieces.set_weight(parameter, home)

    def shard_first(self, parameter: int, values: torch.Tensor) -> None:
        """The same before there are states, with the weight's first values.

        values   flat, whole, of its dtype, on the CPU

        The parameter's memory has no weight, and is to be taken.
        """
        weight = self._weights[parameter]
        home = self.pieces.memory(parameter, values).to(weight.device, copy=True)
        self.streamed[parameter] = StreamedWeight(weight, sharded=True, shard=home)
        self._weights[parameter] = home
        self.pieces.set_weight(parameter, home)

    def rest_on_host(self, parameter: int) -> None:
        """The shard of an idle parameter that the CPU updates whole rests as half of its master."""
        self.streamed[parameter].shard = None
        self._weights[parameter] = home = self.in_memory(parameter).master
        self.pieces.set_weight(parameter, home)

    def rest_on_device(self, parameter: int) -> None:
        """A shard that rests on the host, of an idle parameter, rests on the device."""
        of = self.streamed[parameter]
        of.shard = self._weights[parameter] = home = self.home(parameter).to(of.weight.device, copy=True)
        self.pieces.set_weight(parameter, home)

    def keep_on_device(self, parameter: int) -> None:
        """Updates of an idle streamed or sharded parameter go to its own memory again.

        It shows the weight.

        Raises EngineError where it does not.
        """
        of = self.streamed[parameter]
        if not of.shows:
            raise EngineError(f"internal: parameter {parameter} stays on the device without its weight")
        del self.streamed[parameter]
        self._weights[parameter] = of.weight
        self.pieces.set_weight(parameter, of.weight.detach())

    def home(self, parameter: int) -> torch.Tensor:
        """The weight of a streamed parameter, or its shard, flat, in the order of its memory."""
        shard = self.streamed[parameter].shard
        return self.in_memory(parameter).master if shard is None else shard

    def weight(self, parameter: int) -> torch.Tensor:
        """What is updated here of the weight, where it rests, flat, in the order of its memory."""
        return self.pieces.memory(parameter, self._weights[parameter])

    def show_weight(self, parameter: int) -> None:
        """Write the weight of a streamed parameter, at rest, into its own memory if it has any.

        A sharded one's is gathered when it is read next.
        """
        of = self.streamed[parameter]
        if of.sharded:
            of.current = False
        elif of.has_memory:
            with without_torch_function():
                flat_alias(of.weight.detach()).copy_(self.home(parameter))
            of.current = True

    def show_if_behind(self, parameter: int) -> None:
        """The same of any parameter, where its own memory does not show the last update yet."""
        if parameter in self.streamed and not self.streamed[parameter].shows:
            self.show_weight(parameter)

    def replace_weight(self, parameter: int, values: torch.Tensor) -> None:
        """Make these the weight of an idle parameter whose weight rests elsewhere.

        values   flat, whole, on the CPU, of its dtype

        An element that still is its master's rounding keeps the master's bits.
        """
        self._home_changes(parameter)
        self._follow_home(parameter, self.pieces.memory(parameter, values))
        self.show_weight(parameter)

    def _home_changes(self, parameter: int) -> None:
        if parameter in self.streamed:
            self.on_home(parameter)

    # ---- weights that the loop reads and writes ----

    def use_copy(self, row: int) -> torch.Tensor:
        """From now on the device has an idle whole fp32 weight in 16 bits.

        Returns the bf16 copy that graphs are to read.
        """
        weight, states = self._weights[row], self._states[row]
        copy = self.copies.add(row, weight)
        if not self.placement[row].rests_on_device:
            self._states[row] = halved(states, weight.device)
        self._weights[row] = copy
        self._engine.use_copy(row, copy)
        self._tell_engine([row])
        return copy

    def fill_weight(self, row: int) -> None:
        """Fill the fp32 memory of a row with a copy, at rest, from its master."""
        if not self.copies[row].current and not self.placement[row].rests_on_device:
            self.copies.fill(row, self.in_memory(row))

    def _follow_copied(self, row: int) -> None:
        """What was written to the fp32 memory becomes master and copy.

        Nothing can have been written while that memory does not show the weight.
        """
        of = self.copies[row]
        if not of.current:
            return
        states = self.in_memory(row)
        if not self.placement[row].rests_on_device:
            split_into(states, replace(states, master=flat_memory(of.weight), low=None), of.copy.device)
        weight = of.weight.detach()
        # On the CPU a weight that was only read counts as written. Then its copy keeps its version:
        # a later backward may have saved it.
        if of.copy.device.type == "cpu" and _same_numbers(of.copy, weight.to(of.copy.dtype)):
            return
        of.copy.copy_(weight)

    def keep_weight(self, parameter: int, on: bool) -> None:
        """Whether to know the weight that the last update left, wherever it is updated.

        It must still be there when this begins.
        """
        rows = self.pieces.of(parameter)
        if on and parameter not in self._kept:
            for row in rows:
                self._bring_weight_home(row)
            self._kept.add(parameter)
        elif not on:
            self._kept.discard(parameter)
        if self._engine.can_stream:
            for row in rows:
                self._engine.send_weight(row, on)

    def follow_weight(self, parameter: int) -> None:
        """Make the weight, as written from outside, the master.

        Where the last weight is known, an element that still is its master's rounding keeps the
        master's bits.
        """
        if parameter in self.copies:
            return self._follow_copied(parameter)
        if parameter in self.streamed:
            if self.streamed[parameter].shows:  # else nothing can have been written
                self._home_changes(parameter)
                self._follow_streamed(parameter)
            return
        for row in self.pieces.of(parameter):
            self._follow_row(row, self._weight(row))

    def _follow_streamed(self, parameter: int) -> None:
        self._follow_home(parameter, self.pieces.memory(parameter, self.streamed[parameter].weight))

    def _follow_home(self, parameter: int, written: torch.Tensor) -> None:
        shard = self.streamed[parameter].shard
        if shard is None:
            return self._follow_row(parameter, written)
        shard.copy_(written)
        for row in self.pieces.of(parameter):
            self._follow_row(row, self._weight(row))
        return None

    def _follow_row(self, row: int, weight: torch.Tensor) -> None:
        states = self.in_memory(row)
        if weight.dtype == torch.float32 or self._leaves_weight(row):
            self._load_master(row, weight)
            return
        for begin in range(0, weight.numel(), CHUNK_PARAMS):
            part = slice(begin, begin + CHUNK_PARAMS)
            master = states.master[part]
            written = weight[part].to(master.device)
            kept = is_rounding(master, written)
            master.copy_(torch.where(kept, master, written.to(master.dtype)))
            if states.low is not None:
                marked = states.marked()[part]
                states.low[part].mul_(kept)
                marked.copy_(torch.where(kept, marked, marked.abs()))

    def is_rounded(self, parameter: int) -> bool:
        """Whether each element of a 16-bit weight is its master's rounding, as updates leave it."""
        of = self.streamed.get(parameter)
        if of is not None:
            return not of.shows or all_rounded(self.home(parameter), self.pieces.memory(parameter, of.weight))
        rows = (row for row in self.pieces.of(parameter) if not self._leaves_weight(row))
        return all(all_rounded(self.in_memory(row).master, self._weight(row)) for row in rows)

    def whole_as_written(self, parameter: int) -> RowStates:
        """As `whole`, with the weight for the master where it is not the master's rounding.

        The states stay as they are. Not of weights in shards.
        """
        of, whole = self.streamed.get(parameter), self.whole(parameter)
        if whole.master.dtype == self._weights[parameter].dtype or (of is not None and not of.shows):
            return whole
        weight = self.pieces.memory(parameter, self._weights[parameter] if of is None else of.weight).to(whole.master.device)
        return replace(whole, master=torch.where(is_rounding(whole.master, weight), whole.master, weight.to(whole.master.dtype)))

    def knows_last_weight(self, parameter: int) -> bool:
        """Whether it is known what the last update left, also once the weight is written."""
        return not any(map(self._leaves_weight, self.pieces.of(parameter)))

    def take_weight(self, parameter: int) -> None:
        """Make the weight the master in every element."""
        if parameter in self.copies:
            return self._follow_copied(parameter)
        if parameter in self.streamed and self.streamed[parameter].shows:
            self._home_changes(parameter)
            with without_torch_function():
                of = self.streamed[parameter]
                written = self.pieces.memory(parameter, of.weight)
                if of.shard is None:
                    return self._load_master(parameter, written)
                of.shard.copy_(written)
        for row in self.pieces.of(parameter):
            self._load_master(row, self._weight(row))
        return None

    def follow_memory(self, parameter: int) -> None:
        """An idle parameter has other memory: an fp32 master on the device is that memory."""
        weight = self.copies[parameter].weight if parameter in self.copies else self._weights[parameter]
        if weight.dtype != torch.float32:
            return
        for row in self.pieces.of(parameter):
            if self.placement[row].rests_on_device:
                piece = self.pieces.piece(row)
                master = self.pieces.memory(parameter, weight)[piece.begin : piece.end]
                self._states[row] = replace(self._states[row], master=master)
                self._tell_engine([row])

    def _load_master(self, row: int, weight: torch.Tensor) -> None:
        states = self.in_memory(row)
        load_masters([(states.master, weight)])
        if states.low is not None:
            states.low.zero_()
            states.marked().abs_()


def _same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether 16-bit tensors have the same bits. NaN is NaN: torch writes it with other bits."""
    same = one.view(torch.int16) == other.view(torch.int16)
    return bool((same | (one.isnan() & other.isnan())).all())


def _joined(states: Sequence[RowStates]) -> RowStates:
    """The whole states of pieces as one parameter's, on the CPU."""
    flats = zip(*((of.master, *of.states) for of in states), strict=True)
    master, *others = (torch.cat([flat.cpu() for flat in of]) for of in flats)
    return RowStates(states[0].table, master, tuple(others))
