"""Where stand-in gradients have their values.

In the slot of a row on the host, or in the tensor that an update on the device reads.

Stand-ins themselves are used again: making one takes 5 us, giving one that nobody else holds again
a fifth of that.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Final, cast

import torch

from hytrain_fx.errors import GradientConsumedError
from hytrain_fx.gradients.shards import GradientShards
from hytrain_fx.gradients.slots import GradientSlots, Norm
from hytrain_fx.gradients.standin import GradStandIn
from hytrain_fx.gradients.state import GradSource, GradState
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.torch_private.tensors import use_count

_Norms = dict[Norm, torch.Tensor] | None


class _Source:
    """A source of a gradient that is whole here, or of which each rank has a shard."""

    __slots__ = ()
    _row: int  # of the parameter
    shards: GradientShards | None  # where the rest of a shard is

    def is_of(self, slots: GradientSlots, row: int) -> bool:
        """Whether it is this row's, in the session of these slots."""
        return self._row == row

    def home(self) -> torch.Tensor:
        """What is updated here, as a new tensor on the device. Raises GradientConsumedError."""
        raise NotImplementedError

    def fetch(self) -> torch.Tensor:
        """The whole gradient, as a new tensor on the device.

        Raises GradientConsumedError, and RankError.
        """
        mine = self.home()
        return mine if self.shards is None else self.shards.whole(self._row, mine)


class RowGradient(_Source):
    """Source of one stand-in: what the `generation`-th offload left in the slot of `row`."""

    __slots__ = ("_generation", "_norms", "_row", "_slots", "shards")

    def __init__(self, slots: GradientSlots, row: int, norms: _Norms) -> None:
        self._slots = slots
        self._row = row
        self.shards = slots.shards_of(row)
        self._generation = slots.generation[row]
        self._norms = norms

    def renew(self, norms: _Norms) -> None:
        """Become the source of what the newest offload has left there. Nobody else may hold it."""
        self._generation = self._slots.generation[self._row]
        self._norms = norms

    def is_of(self, slots: GradientSlots, row: int) -> bool:
        """Whether it is, or was, in this row's slot."""
        return self._row == row and self._slots is slots

    def is_live(self) -> bool:
        """Whether the slot still holds this gradient, `step()` has taken it or not."""
        return self._slots.generation[self._row] == self._generation and self._row not in self._slots.gone

    def awaits_step(self, slots: GradientSlots, row: int) -> bool:
        """Whether it is in this row's slot and the next `step()` finds it there."""
        return (self._slots is slots and self._row == row
                and slots.generation[row] == self._generation and row not in slots.taken and row not in slots.gone)

    def is_taken(self) -> bool:
        """Whether `step()` has taken it.

        The next `step()` does not find what is in the slot.
        """
        return self._row in self._slots.taken

    def home(self) -> torch.Tensor:
        """What the slot has, as a new tensor on the device. Raises GradientConsumedError."""
        if not self.is_live():
            raise GradientConsumedError(
                f"the gradient of {self._slots.name(self._row)} is gone: zero_grad() has dropped it, or a later backward() has taken its "
                "host memory or was interrupted while it added to it, or the model was closed; call zero_grad() before the next "
                "backward(), and keep p.grad.clone() of a gradient that is read later"
            )
        return self._slots.fetch(self._row)

    def norm(self, ord: float, foreach: bool, scale: float = 1.0) -> torch.Tensor | None:
        """The norm taken when the gradient was made (0-dim, on the device), handed out once.

        None if it was not asked for before.
        """
        if not self._norms or not self.is_live() or (self._slots.steps_may_write and self.is_taken()):
            return None
        return self._norms.pop((float(ord), foreach, scale), None)

    def note_norm_wanted(self, ord: float, foreach: bool, scale: float = 1.0) -> None:
        """Take this norm of every gradient from the next backward on.

        In place of one of another scale: a loop that divides by another number in each step would
        have them all taken.
        """
        wanted = self._slots.norms_wanted
        if scale != 1.0:
            wanted -= {norm for norm in wanted if norm[:2] == (float(ord), foreach) and norm[2] != 1.0}
        wanted.add((float(ord), foreach, scale))

    def kept(self) -> KeptGradient:
        """What the slot has, on the host, as the slot is about to move.

        Raises GradientConsumedError.
        """
        return KeptGradient(self._row, self.home(), self.shards)


def clean_in_slot(grad: torch.Tensor | None, slots: GradientSlots, row: int) -> RowGradient | None:
    """The source of a stand-in whose values are, unedited, those in this row's slot.

    None for anything else.
    """
    return _source_in_slot(grad.grad_state, slots, row) if type(grad) is GradStandIn and not grad.grad_state.factors else None


def is_in_slot(standin: GradStandIn, slots: GradientSlots, row: int) -> bool:
    """Whether the values are in this row's slot and no `step()` has taken them.

    Then an update on the host finds them there. A `.grad` that user code has taken from another
    parameter is in that one's slot.
    """
    return _source_in_slot(standin.grad_state, slots, row) is not None


def _source_in_slot(state: GradState, slots: GradientSlots, row: int) -> RowGradient | None:
    """The source, if the values are in the row's slot, with the state's factors still to come."""
    source = state.source
    if state.real is not None or type(source) is not RowGradient:
        return None
    return source if source.awaits_step(slots, row) else None


def in_slot_at_all(standin: GradStandIn) -> RowGradient | None:
    """The source, if the values are in any row's slot, whoever has taken them."""
    source = standin.grad_state.source
    return source if standin.materialized is None and type(source) is RowGradient and source.is_live() else None


def is_moved(standin: GradStandIn, slots: GradientSlots, row: int) -> bool:
    """Whether this row has it from another parameter, whose slot or shard still has the values."""
    source = standin.grad_state.source
    return standin.materialized is None and isinstance(source, _Source) and not source.is_of(slots, row) and source.is_live()


def is_gone(standin: GradStandIn) -> bool:
    """Whether the gradient was dropped, or another has taken its memory."""
    return standin.materialized is None and not standin.grad_state.source.is_live()


def is_clean(standin: GradStandIn) -> bool:
    """Whether the stand-in's values are its source's, unedited."""
    return standin.materialized is None and not standin.factors and not standin.zeroed


class HeldGradient(_Source):
    """Source of a stand-in whose values a tensor on the device holds.

    That replaces a device row's `.grad` at `step()`: the update may be reading the tensor. A
    gradient that comes in shards is one from the start, as `.grad` has the parameter's shape.
    """

    __slots__ = ("_engine", "_grad", "_row", "_rows", "shards")

    def __init__(self, row: int, grad: torch.Tensor, shards: GradientShards | None = None) -> None:
        self._engine: Engine | None = None
        self._rows: Sequence[int] = ()
        self._row, self._grad, self.shards = row, grad, shards

    def begin(self, engine: Engine, rows: Sequence[int]) -> HeldGradient:
        """An update of these rows reads it, of the engine: its pieces."""
        self._engine, self._rows = engine, rows
        return self

    @property
    def unread(self) -> torch.Tensor | None:
        """The tensor, until an update reads it."""
        return self._grad if self._engine is None else None

    def end(self) -> None:
        """The update has run, and the compute stream knows."""
        self._engine = None

    def is_live(self) -> bool:
        """Always: the update only reads it."""
        return True

    def home(self) -> torch.Tensor:
        """A copy, made after the update.

        What is written where the copy was may not overtake it.
        """
        if self._engine is not None:
            self._engine.wait(self._rows)
        return self._grad.clone(memory_format=torch.preserve_format)

    def norm(self, ord: float, foreach: bool, scale: float = 1.0) -> torch.Tensor | None:
        """None: not taken."""
        return None

    def note_norm_wanted(self, ord: float, foreach: bool, scale: float = 1.0) -> None:
        """Norms of real gradients are taken when asked for."""


class KeptGradient(_Source):
    """Source of a gradient that `step()` has taken and whose slot has moved.

    It was kept on the host.
    """

    __slots__ = ("_device", "_kept", "_row", "shards")

    def __init__(self, row: int, gradient: torch.Tensor, shards: GradientShards | None = None) -> None:
        self._device = gradient.device
        self._kept = gradient.cpu()
        self._row, self.shards = row, shards

    def is_live(self) -> bool:
        """Always."""
        return True

    def home(self) -> torch.Tensor:
        """A copy on the device."""
        return self._kept.to(self._device, copy=True)

    def norm(self, ord: float, foreach: bool, scale: float = 1.0) -> torch.Tensor | None:
        """None: not taken."""
        return None

    def note_norm_wanted(self, ord: float, foreach: bool, scale: float = 1.0) -> None:
        """Norms are taken when asked for."""


def shard_on_device(grad: torch.Tensor | None) -> torch.Tensor | None:
    """The shard of a stand-in whose values are, unedited, in a tensor that the next `step()` takes.

    None for anything else.
    """
    if type(grad) is not GradStandIn or grad.grad_state.real is not None or grad.grad_state.factors:
        return None
    source = grad.grad_state.source
    return source.unread if type(source) is HeldGradient and source.shards is not None else None


class StandIns:
    """Makes stand-ins by row, out of those that were left with it.

    Nobody else may hold these.
    """

    def __init__(self) -> None:
        self._left: dict[int, GradStandIn] = {}
        self._lent: dict[int, GradStandIn] = {}

    def make(self, row: int, parameter: torch.Tensor, source: GradSource) -> GradStandIn:
        """A stand-in of `source` as `parameter.grad`."""
        left = self._left
        if row in left:
            free = _is_free(left, row)
            standin = left.pop(row)
            if free:
                standin.grad_state = GradState(parameter, source)
                return standin
        return GradStandIn(parameter, source)

    def in_slots(
        self, rows: Sequence[int], parameters: Sequence[torch.Tensor], slots: GradientSlots, norms: Sequence[_Norms]
    ) -> list[GradStandIn]:
        """Stand-ins of the gradients that have just gone to the slots of these rows.

        Where nobody else holds the last ones, they are given again with their states.
        """
        standins = self._given_again(rows, norms)
        if standins is None:
            each = zip(rows, parameters, norms, strict=True)
            standins = [self.make(row, parameter, RowGradient(slots, row, own)) for row, parameter, own in each]
        return standins

    def _given_again(self, rows: Sequence[int], norms: Sequence[_Norms]) -> list[GradStandIn] | None:
        """None where a row has left none, or somebody else has one or what belongs to it."""
        left = self._left
        if not all(map(left.__contains__, rows)):
            return None
        standins = [left[row] for row in rows]
        if not all("grad_state" in vars(standin) for standin in standins):  # a loan has ended
            return None
        states = [standin.grad_state for standin in standins]
        sources = [state.source for state in states]
        if not _all_free(standins, states, sources):
            return None
        for row, state, source, own in zip(rows, states, cast(list[RowGradient], sources), norms, strict=True):
            state.factors, state.real, state.added = (), None, False
            source.renew(own)
            del left[row]
        return standins

    def leave(self, row: int, standin: GradStandIn) -> None:
        """`step()` has used its gradient: once the user lets go of it, it may be another's."""
        self._left[row] = standin

    def lend(self, row: int, standin: GradStandIn) -> None:
        """Its source holds a gradient on the device, until `end_loan`."""
        self._lent[row] = standin

    def end_loan(self, row: int) -> None:
        """Nothing here may hold that gradient from now on.

        A stand-in that somebody has stays with them.
        """
        lent = self._lent
        if row in lent:
            free = _is_free(lent, row)
            standin = lent.pop(row)
            source = standin.grad_state.source
            if type(source) is HeldGradient:
                source.end()
            if free:
                del standin.grad_state
                self._left[row] = standin


def _is_free(held: dict[int, GradStandIn], row: int) -> bool:
    """Whether `held` alone refers to it, in Python and in C++.

    And whether nobody has put a mark of their own on it.
    """
    if sys.getrefcount(held[row]) != HELD_ONCE:
        return False
    standin = held[row]
    return use_count(standin) == 1 and len(standin.__dict__) <= 1 and not weakref.getweakrefcount(standin)


def _all_free(standins: Sequence[GradStandIn], states: Sequence[GradState], sources: Sequence[GradSource]) -> bool:
    """`_is_free` of many, with the states and sources in slots that belong to them.

    Each list holds what its elements' owners hold too.
    """
    return (
        set(map(type, sources)) == {RowGradient}
        and all(set(map(sys.getrefcount, each)) == {_HELD_TWICE} for each in (standins, states, sources))
        and set(map(use_count, standins)) == {1}
        and set(map(len, map(vars, standins))) == {1}
        and not any(map(weakref.getweakrefcount, standins))
        and not any(map(weakref.getweakrefcount, states))
    )


_ONE: Final = {0: object()}
# interpreters differ in what they count beside the holders
HELD_ONCE: Final = sys.getrefcount(_ONE[0])
_HELD_TWICE: Final = next(map(sys.getrefcount, list(_ONE.values())))  # here and in a list that is looked through
