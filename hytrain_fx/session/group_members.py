"""Which group has which row, looked at before a step changes anything: loops may move parameters.

    each row is in one group            torch would step it twice, the engine has one update of it
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hytrain_fx.capture.parameters import ParameterTable, listed_twice


class GroupMembers:
    """The members of the groups of one optimizer."""

    def __init__(self, table: ParameterTable) -> None:
        self._table = table
        self._seen: list[list[torch.Tensor]] = []  # the members that were found right, by group

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise UnsupportedError where the groups cannot be stepped as they are now."""
        members = [group["params"] for group in groups]
        if len(members) == len(self._seen) and all(map(_are_same, members, self._seen)):
            return
        rows = [row for of in members for p in of if (row := self._table.row_of.get(id(p))) is not None]
        if len(set(rows)) != len(rows):
            raise listed_twice(next(self._table.names[row] for row in rows if rows.count(row) > 1))
        self._seen = [list(of) for of in members]


def _are_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(operator.is_, found, expected))
