"""The edge of what trains: the largest number that does, where no larger one does.

Each trial takes minutes. So the search begins at an estimate, goes away from it in steps that
double until the edge is between two trials, and then halves the gap: at most 2 + 2 log2(d + 1)
trials for an edge that is d away from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Edge:
    """What trials have shown.

    trains   the largest number that trained, None where none did
    fails    the least number that did not, None where all did
    trials   how many were made
    found    the gap between the two is as narrow as asked for
    """

    trains: int | None
    fails: int | None
    trials: int
    found: bool


def search(start: int, trains: Callable[[int], bool], tries: int, within: float = 0.0) -> Edge:
    """Look for the edge among 1, 2, ... with at most so many trials.

    trains   whether a number trains. Where one does, all smaller ones are taken to
    within   a gap is narrow at this share of the number that trained, and at 1
    """
    low: int | None = None
    high: int | None = None
    at, step, trials = max(start, 1), 1, 0
    while trials < tries and not _narrow(low, high, within):
        trials += 1
        if trains(at):
            low = at
        else:
            high = at
        if low is not None and high is not None:
            at = (low + high) // 2
        elif low is not None:
            at, step = low + step, 2 * step
        elif high is not None:
            at, step = max(high - step, 1), 2 * step
    return Edge(low, high, trials, _narrow(low, high, within))


def _narrow(low: int | None, high: int | None, within: float) -> bool:
    """Whether nothing is left to try between what trains and what does not."""
    return high is not None and high - (low or 0) <= max(1, int(within * (low or 0)))
