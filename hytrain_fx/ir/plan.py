"""Which share of which unit is updated where, and why: the decision as data.

A plan has one row per contiguous flat range of a unit (a layer), keyed by `(rank, unit, begin, end)`.
Ranges of one unit tile it without gap or overlap. A plan is a value: JSON in, JSON out, equal when equal.
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, field


class Placement(enum.StrEnum):
    """Where a share is updated, and so where its fp32 states rest."""

    GPU = "gpu"  # states rest on the device, updated there
    CPU = "cpu"  # states rest in host memory, updated by CPU workers
    STREAM = "stream"  # states rest in host memory, brought to the device, updated there, written back


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One share: parameters `begin..end` (flat, in elements) of unit number `unit`."""

    unit: int
    unit_name: str
    begin: int
    end: int
    placement: Placement
    reason: str
    rank: int = 0

    @property
    def numel(self) -> int:
        """Number of parameters in this share."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Plan:
    """Placement of every unit, the numbers it was decided from, and what is predicted for it.

    `k` is the number of leading units wholly updated on the device. `inputs` and `predicted` map a name
    with its unit in the name (`t_bwd_us`, `gpu_states_bytes`) to a figure; `source` says who decided
    ("seed", "cotrain", "windowed", "fixed k", "loaded", "first steps").
    """

    rows: tuple[PlanRow, ...]
    k: int
    source: str
    inputs: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """This plan as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read `to_json`'s text back. Raises PlanError where it is not such a text."""
        from hytrain_fx.errors import PlanError

        try:
            raw = json.loads(text)
            rows = tuple(PlanRow(**{**row, "placement": Placement(row["placement"])}) for row in raw.pop("rows"))
            return cls(rows=rows, notes=tuple(raw.pop("notes", ())), **raw)
        except (TypeError, ValueError, KeyError) as error:
            raise PlanError(f"this is not a saved plan: {error}; expected the text that Plan.to_json() writes") from error
