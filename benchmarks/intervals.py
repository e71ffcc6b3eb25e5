"""Sets of moments as sorted, disjoint (begin, end) pairs, in microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments that lie in any of the intervals."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Microseconds of a union."""
    return sum(end - begin for begin, end in intervals)


def share_inside(inner: Sequence[Interval], outer: Sequence[Interval]) -> float:
    """Share of `inner`'s time that lies inside `outer`, both unions; 0 where `inner` is empty."""
    covered, at = 0.0, 0
    for begin, end in inner:
        while at < len(outer) and outer[at][1] <= begin:
            at += 1
        probe = at
        while probe < len(outer) and outer[probe][0] < end:
            covered += min(end, outer[probe][1]) - max(begin, outer[probe][0])
            probe += 1
    total = length(inner)
    return covered / total if total else 0.0
