"""What marks say of one step, by unit; and what may hold a step up besides its gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HELD: Final = {"graph break": "all weights, before code that is not one graph", "read": "a weight that the loop reads or writes",
               "fetch": "weights that come from the host"}
"""What the library makes the loop wait for, and where.

The unit of HELD_BEGIN is the position in this table.
"""
FETCH: Final = list(HELD).index("fetch")


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Microseconds of one step by unit.

    held_us         of the stalls, where the library held the loop up outside gates
    between_us      what lies between the first forward and the last backward: other micro-batches
    apart_us        what lies between a step's last backward and the next step's first forward
    fetch_stall_us  of the stalls, where weights came from the host
    """

    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    stall_us: tuple[float, ...]
    held_us: float = 0.0
    between_us: float = 0.0
    apart_us: float = 0.0
    fetch_stall_us: float = 0.0
