"""Which group has which row, looked at before a step changes anything: loops may move parameters.

    each row is in one group            torch would step it twice, the engine has one update of it
    which asks for no state that the    states are made at compile(), where the plan says; one that
    row does not have                   the group does not ask for rests as it is, as in torch
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hytrain_fx.capture.parameters import ParameterTable, listed_twice
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.ir.states import MOMENTS, StateTable

Group = Mapping[str, Any]


class _Right(NamedTuple):
    """A group that can be stepped: its parameters, the states that it asks for, and its rows."""

    parameters: list[torch.Tensor]
    asked: StateTable | None
    rows: frozenset[int]

    def is_now(self, parameters: Sequence[torch.Tensor], asked: StateTable | None) -> bool:
        """Whether a group with these is the same."""
        return len(parameters) == len(self.parameters) and all(map(operator.is_, parameters, self.parameters)) and asked == self.asked


class GroupMembers:
    """The members of the groups of one optimizer.

    kept     the states that a row has
    asked    those that a group asks for; raises UnsupportedError for options that none can take.
             None: the optimizer makes its states itself
    """

    def __init__(self, table: ParameterTable, kept: Callable[[int], StateTable], asked: Callable[[Group], StateTable] | None) -> None:
        self._table = table
        self._kept = kept
        self._asked = asked
        self._right: list[_Right] = []  # the groups, as they were found last

    def check(self, groups: Sequence[Group]) -> None:
        """Raise UnsupportedError where the groups cannot be stepped as they are now."""
        now = [(group["params"], self._asked(group) if self._asked and group["params"] else None) for group in groups]
        if len(now) == len(self._right) and all(before.is_now(*of) for before, of in zip(self._right, now, strict=True)):
            return
        row_of = self._table.row_of
        rows = [[row_of[id(p)] for p in of if id(p) in row_of] for of, _ in now]
        every = [row for of in rows for row in of]
        if len(set(every)) != len(every):
            raise listed_twice(next(self._table.names[row] for row in every if every.count(row) > 1))
        for of, (_, asked) in zip(rows, now, strict=True):
            for row in of:
                if asked is not None and not asked.is_part_of(self._kept(row)):
                    raise self._other_states(row, asked)
        self._right = [_Right(list(parameters), asked, frozenset(of)) for (parameters, asked), of in zip(now, rows, strict=True)]

    def fitting(self, rows: Sequence[int], group: Group) -> tuple[int, ...]:
        """Those of these rows that have the states that the group asks for now.

        Raises UnsupportedError.
        """
        asked = None if self._asked is None else self._asked(group)
        if asked is None or any(asked == known.asked and known.rows.issuperset(rows) for known in self._right):
            return tuple(rows)
        return tuple(row for row in rows if asked.is_part_of(self._kept(row)))

    def _other_states(self, row: int, asked: StateTable) -> UnsupportedError:
        return UnsupportedError(
            f"{self._table.names[row]} is in a parameter group with {_in_words(asked)} now, and has the states of "
            f"{_in_words(self._kept(row))}: which states are kept is fixed by compile(), also where none has been used. Set the group's "
            "options back or move the parameter back, or close(model) and compile it again"
        )


def _in_words(table: StateTable) -> str:
    """The options of a group that keeps these states."""
    moments = "bf16" if any(state.dtype == "bfloat16" for state in table.states) else "fp32"
    options = dict.fromkeys(state.option for state in table.states if state.option is not None)
    return " and ".join([f"{MOMENTS}={moments!r}", *(f"{option}=True" for option in options)])
