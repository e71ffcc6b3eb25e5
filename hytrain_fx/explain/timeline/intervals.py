"""Stretches of time as (begin, end) pairs in microseconds of one clock: what they cover, and what two sets of them share."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import islice

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments that lie in any of the intervals, as sorted intervals that do not touch."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Sum of their lengths in microseconds: a moment that lies in several of them counts once for each."""
    return sum(end - begin for begin, end in intervals)


def shared_time(spans: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Microseconds of `spans` that lie in the union of `others`; a moment of several spans counts once for each."""
    covered = union(others)
    ends = [end for _, end in covered]
    inside = 0.0
    for begin, end in spans:
        for left, right in islice(covered, bisect_left(ends, begin), None):
            if left >= end:
                break
            inside += min(right, end) - max(left, begin)
    return inside


def share_inside(spans: Iterable[Interval], others: Iterable[Interval]) -> float | None:
    """Share 0..1 of the length of `spans` that lies in the union of `others`; None where `spans` have no length."""
    spans = list(spans)
    total = length(spans)
    return shared_time(spans, others) / total if total > 0 else None
