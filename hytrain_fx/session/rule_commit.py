"""As `commit`, for any optimizer: every item brings the step of its row, with the options that the groups have now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.gradients.taking import SessionGradients
from hytrain_fx.runtime.any_optimizer.rule import UpdateRule
from hytrain_fx.runtime.arithmetic import AT_REST, AdamScalars
from hytrain_fx.runtime.engine import CommitItem
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.session.commit import CommitBuilder


class RuleCommitBuilder(CommitBuilder):
    """Builds the items of one `step()` of another optimizer than Adam and AdamW."""

    def __init__(self, table: ParameterTable, states: StateStore, gradients: SessionGradients, rule: UpdateRule) -> None:
        super().__init__(table, states, gradients, decoupled=False)
        self._rule = rule

    def build(self, groups: Iterable[Mapping[str, Any]], touched: set[int]) -> list[CommitItem]:
        """As `CommitBuilder.build`, with the steps."""
        groups = list(groups)
        items = super().build(groups, touched)
        steps = self._rule.steps(groups, {item.row: self._states[item.row] for item in items})
        return [replace(item, step=steps[item.row]) for item in items]

    def _scalars(self, group: Mapping[str, Any], step: int) -> AdamScalars:
        return AT_REST
