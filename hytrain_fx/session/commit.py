"""From parameter groups and `.grad` to what the engine commits.

One item for each row that has a gradient, one for each piece where it is cut.

    .grad is None                        the row sits this step out, as in torch
    a stand-in, unedited or scaled       its gradient is in the slot; logged factors go along
    a real tensor                        the update on the device reads it; for a row on the host it
                                         is offloaded now
    a real tensor of a cut parameter     pieces on the device read their part of it, the others'
                                         parts go to their slots now
    one that a `step()` has taken        a real tensor again: torch's optimizers step on it again
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.gradients.sources import is_in_slot
from hytrain_fx.gradients.standin import GradStandIn
from hytrain_fx.gradients.taking import SessionGradients
from hytrain_fx.runtime.engine import CommitItem
from hytrain_fx.runtime.scalars import UpdateScalars
from hytrain_fx.runtime.states.pieces import flat_memory
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.runtime.updates import ScalarsOf
from hytrain_fx.session.group_members import GroupMembers
from hytrain_fx.torch_private.tensors import get_grad


class CommitBuilder:
    """Builds the items of one `step()` and counts each row's steps.

    members      which group has which row
    scalars_of   what a step of the optimizer takes

    left_out     steps that were left out so far, as far as is known
    """

    def __init__(
        self, table: ParameterTable, states: StateStore, gradients: SessionGradients, members: GroupMembers, scalars_of: ScalarsOf
    ) -> None:
        self.left_out = 0
        self._steps = [0] * len(table)
        self._in_doubt: Collection[int] = ()  # parameters of the last commit, where it may be left out
        self._cut_grads: dict[int, torch.Tensor] = {}  # by parameter that is cut: what the items that were built last read
        self._was_left_out: Callable[[], bool] = bool
        self._table = table
        self._states = states
        self._gradients = gradients
        self._members = members
        self._scalars_of = scalars_of

    @property
    def steps(self) -> list[int]:
        """By row: steps that count. Blocks until we know whether the last one was skipped.

        Raises EngineError.
        """
        self.settle_steps()
        return self._steps

    def settle_steps(self) -> None:
        """Block until we know whether the last step was left out: no commit may come before.

        Raises EngineError.
        """
        if self._in_doubt:
            if self._was_left_out():
                self.left_out += 1
                for row in self._in_doubt:
                    self._steps[row] -= 1
            self._in_doubt = ()

    def doubt(self, items: Iterable[CommitItem], was_left_out: Callable[[], bool]) -> None:
        """The commit of these items may be left out; the function tells when it is known."""
        self._in_doubt = self.parameters_of(items)
        self._was_left_out = was_left_out

    def build(self, groups: Sequence[Mapping[str, Any]], touched: set[int]) -> list[CommitItem]:
        """Items for every row with a gradient.

        Offloads real gradients of rows on the host on the way.

        Nothing is counted (`committed` does that once the engine has them), and nothing changed
        where it raises. Raises GradientConsumedError for a gradient that was dropped and put back
        by hand, UnsupportedError for a parameter that was added after `compile` or is listed twice,
        a group that asks for states that are not there, and a sparse gradient.
        """
        self._members.check(groups)
        items: list[CommitItem] = []
        row_of, cut, leaving, steps = self._table.row_of, self._states.pieces.cut, self._states.leaving(), self.steps
        slots, leave = self._gradients.slots, self._gradients.standins.leave
        self._cut_grads, all_rest = {}, True
        for group in groups:
            by_step: dict[int, UpdateScalars] = {}  # rows of a group usually agree
            for parameter in group["params"]:
                grad = get_grad(parameter)
                if grad is None:
                    continue
                row = row_of.get(id(parameter))
                if row is None:
                    if parameter.numel() == 0:
                        continue
                    raise _unmanaged(parameter)
                step = steps[row] + 1
                scalars = by_step.get(step)
                if scalars is None:
                    scalars = by_step[step] = self._scalars(group, step)
                on_host = row in leaving
                if on_host and type(grad) is GradStandIn and is_in_slot(grad, slots, row):
                    items.append(CommitItem(row, scalars, None, row in touched, grad.grad_state.factors))
                    leave(row, grad)
                elif not on_host and row not in cut and (real := self._gradients.untouched(row, grad)) is not None:
                    items.append(CommitItem(row, scalars, real, row in touched))
                else:
                    if all_rest:  # until now: these may be sent to slots that others' are in
                        self._gradients.bring_moved()
                        all_rest = False
                    items += self._items_of_pieces(row, grad, scalars) if row in cut else [self._item(row, grad, scalars)]
        return items

    def with_steps(self, groups: Iterable[Mapping[str, Any]], items: Sequence[CommitItem]) -> Sequence[CommitItem]:
        """These items with all that a commit needs. Called only for a step that is committed."""
        return items

    def committed(self, items: Iterable[CommitItem]) -> None:
        """The engine has taken these items.

        Count their steps and hold the gradients that updates on the device read.
        """
        for row in self.parameters_of(items):
            self._steps[row] += 1
        for item in items:
            if item.grad is not None and item.row < len(self._table):
                self._gradients.held.hold(item.row, item.grad)
        for row, grad in self._cut_grads.items():
            self._gradients.held.hold(row, grad)

    def parameters_of(self, items: Iterable[CommitItem]) -> Collection[int]:
        """The parameters that these items update, each once."""
        if not self._states.pieces.cut:
            return [item.row for item in items]
        return dict.fromkeys(self._states.pieces.parameter(item.row) for item in items)

    def groups_by_row(self, groups: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
        """The group of each row."""
        row_of = self._table.row_of
        return {row_of[id(parameter)]: group for group in groups for parameter in group["params"] if id(parameter) in row_of}

    def foreseen(
        self, rows: Iterable[int], group_of: Mapping[int, Mapping[str, Any]], known: dict[tuple[int, int], UpdateScalars]
    ) -> list[tuple[UpdateScalars, tuple[int, ...]]]:
        """The scalars of items as `build` would make them now, and which of these rows have them.

        Their gradients are in their slots. Nothing is counted.

        Without rows that have no group, or one that asks for other states or whose hyper-parameters
        cannot be read without a wait or an error: that is left to `build`. `known`: what was made
        before, by group and count of steps.
        """
        steps = self.steps
        alike: dict[tuple[int, int], list[int]] = {}
        for row in rows:
            group = group_of.get(row)
            if group is not None:
                alike.setdefault((id(group), steps[row] + 1), []).append(row)
        found = []
        for key, of in alike.items():
            group = group_of[of[0]]
            if key not in known and not _readable(group):
                continue
            try:
                if key not in known:
                    known[key] = self._scalars(group, key[1])
                if fitting := self._members.fitting(of, group):
                    found.append((known[key], fitting))
            except (ArithmeticError, LookupError, TypeError, UnsupportedError):
                continue
        return found

    def _scalars(self, group: Mapping[str, Any], step: int) -> UpdateScalars:
        return self._scalars_of(group, step, self._table.device.type == "cuda")

    def _item(self, row: int, grad: torch.Tensor, numbers: UpdateScalars) -> CommitItem:
        # Edited, another's, or its states have moved since the backward, or a step() has taken it.
        grad = self._gradients.real(row, grad)
        self._gradients.held.end_update(row)
        if self._states.gradient_leaves(row):
            self._gradients.offload_real(row, grad)
            return CommitItem(row, numbers, None, True)
        # Only a gradient that nobody else has written, as `build` takes it, needs no more than its
        # own event.
        return CommitItem(row, numbers, self._gradients.on_device(row, grad), at_end=True)

    def _items_of_pieces(self, row: int, grad: torch.Tensor, numbers: UpdateScalars) -> list[CommitItem]:
        """Of a parameter that is cut, whose gradient is on the device. Its pieces leave now and not
        as the gradient is made: not every write to a gradient counts up its version (GradScaler's
        unscaling of bf16, `.grad.data`), so that nobody could tell a stale piece.
        """
        found = self._gradients.untouched(row, grad)
        grad = self._gradients.real(row, grad) if found is None else found
        self._gradients.held.end_update(row)
        grad = self._gradients.on_device(row, grad)
        self._gradients.offload_pieces(row, grad)
        self._cut_grads[row] = grad
        flat, on_host = flat_memory(grad), self._states.host_pieces(row)
        pieces = ((of, self._states.pieces.piece(of)) for of in self._states.pieces.of(row))
        return [CommitItem(of, numbers, None if of in on_host else flat[piece.begin : piece.end], at_end=True) for of, piece in pieces]


def _readable(group: Mapping[str, Any]) -> bool:
    """Whether no hyper-parameter is a tensor on a device.

    Reading that waits, and the backward may not.
    """
    return not any(isinstance(value, torch.Tensor) and value.is_cuda for option in group.values() if option is not group["params"]
                   for value in (option if isinstance(option, tuple | list) else (option,)))


def _unmanaged(parameter: torch.Tensor) -> UnsupportedError:
    return UnsupportedError(
        f"a parameter of shape {tuple(parameter.shape)} has a gradient but was not managed when the model was compiled "
        "(it was frozen, or was added to the optimizer later). Freeze after hytrain_fx.compile() what is trained later, or call "
        "hytrain_fx.compile again after such a change"
    )
