"""Which group has which row, looked at before a step changes anything: loops may move parameters.

    each row is in one group            torch would step it twice, the engine has one update of it
    which asks for no state that the    states are made at compile(), where the plan says; one that
    row does not have                   the group does not ask for rests as it is, as in torch
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hytrain_fx.capture.parameters import ParameterTable, listed_twice
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.ir.states import MOMENTS, StateTable

Group = Mapping[str, Any]


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
        self._seen: list[tuple[list[torch.Tensor], StateTable | None]] = []  # by group, as found right last
        self._right: list[tuple[StateTable | None, frozenset[int]]] = []  # the same, by rows

    def check(self, groups: Sequence[Group]) -> None:
        """Raise UnsupportedError where the groups cannot be stepped as they are now."""
        now = [(group["params"], self._asked(group) if self._asked and group["params"] else None) for group in groups]
        if len(now) == len(self._seen) and all(map(_is_as_seen, now, self._seen)):
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
        self._seen = [(list(of), asked) for of, asked in now]
        self._right = [(asked, frozenset(of)) for of, (_, asked) in zip(rows, now, strict=True)]

    def fitting(self, rows: Sequence[int], group: Group) -> tuple[int, ...]:
        """Those of these rows that have the states that the group asks for now.

        Raises UnsupportedError.
        """
        asked = None if self._asked is None else self._asked(group)
        if asked is None or any(asked == before and known.issuperset(rows) for before, known in self._right):
            return tuple(rows)
        return tuple(row for row in rows if asked.is_part_of(self._kept(row)))

    def _other_states(self, row: int, asked: StateTable) -> UnsupportedError:
        return UnsupportedError(
            f"{self._table.names[row]} is in a parameter group with {_in_words(asked)} now, and has the states of "
            f"{_in_words(self._kept(row))}: which states are kept is fixed by compile(), also where none has been used. Set the group's "
            "options back or move the parameter back, or close(model) and compile it again"
        )


def _is_as_seen(now: tuple[Sequence[torch.Tensor], StateTable | None], seen: tuple[list[torch.Tensor], StateTable | None]) -> bool:
    (found, asked), (expected, before) = now, seen
    return len(found) == len(expected) and all(map(operator.is_, found, expected)) and asked == before


def _in_words(table: StateTable) -> str:
    """The options of a group that keeps these states."""
    moments = "bf16" if any(state.dtype == "bfloat16" for state in table.states) else "fp32"
    options = dict.fromkeys(state.option for state in table.states if state.option is not None)
    return " and ".join([f"{MOMENTS}={moments!r}", *(f"{option}=True" for option in options)])
