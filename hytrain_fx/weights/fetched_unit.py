"""What is known of one unit of streamed weights, and of one run of a graph that reads some."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from hytrain_fx.weights.device_slots import Slot
from hytrain_fx.weights.gather_order import GatherOrder


@dataclass(slots=True, eq=False)
class FetchedUnit:
    """The streamed weights of one unit.

    rows      in order, with the byte in a slot where each begins
    uses      by row: graphs that are about to read it, or do
    slot      under the parameters; what it holds may be out of date
    updated   whether the lane has waited for the last updates
    copied    when the last copies of them have come
    covered   whether an update that comes now comes after that
    """

    number: int
    rows: dict[int, int] = field(default_factory=dict)
    nbytes: int = 0
    uses: Counter[int] = field(default_factory=Counter)
    slot: Slot | None = None
    updated: bool = False
    copied: torch.cuda.Event | None = None
    covered: bool = True


@dataclass(slots=True, eq=False)
class GraphRun:
    """One run of a graph: what it has fetched, and what of that it has not let go of.

    order      of what it gathers from all ranks; None on one process
    backward   whether it is one of a backward
    evaluates  whether it is a forward that no backward comes after
    """

    order: GatherOrder | None = None
    backward: bool = False
    evaluates: bool = False
    fetched: set[int] = field(default_factory=set)
    reads: Counter[int] = field(default_factory=Counter)
