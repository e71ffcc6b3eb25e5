"""One piece of work on one lane of a timeline, and the letters and words of its kinds."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

from hytrain_fx.ir.task_graph import TaskKind


class LaunchKind(enum.StrEnum):
    """What the thread that launches the device's work was doing."""

    FORWARD = "launch_forward"
    BACKWARD = "launch_backward"
    GATE = "gate"  # blocked until a new weight is on its way
    STEP = "step"  # inside optimizer.step()


Kind = TaskKind | LaunchKind

# Letter in front of the unit's number.
LETTERS: dict[Kind, str] = {
    TaskKind.FORWARD: "f", TaskKind.BACKWARD: "b", TaskKind.WAIT: ".", TaskKind.D2H: "g", TaskKind.CPU_UPDATE: "u",
    TaskKind.GPU_UPDATE: "U", TaskKind.H2D: "w", TaskKind.STREAM_IN: "i", TaskKind.STREAM_OUT: "o",
    TaskKind.RECEIVE: "v", TaskKind.REDUCE_SCATTER: "r", TaskKind.ALL_GATHER: "a",
    TaskKind.FETCH_FORWARD: "F", TaskKind.FETCH_BACKWARD: "B", TaskKind.GATHER_FORWARD: "A", TaskKind.GATHER_BACKWARD: "C",
    LaunchKind.FORWARD: "f", LaunchKind.BACKWARD: "b", LaunchKind.GATE: ".", LaunchKind.STEP: "s",
}
WORDS: dict[Kind, str] = {
    TaskKind.FORWARD: "forward", TaskKind.BACKWARD: "backward", TaskKind.WAIT: "wait", TaskKind.D2H: "gradient to the host",
    TaskKind.CPU_UPDATE: "update by the CPU", TaskKind.GPU_UPDATE: "update on the device", TaskKind.H2D: "weight to the device",
    TaskKind.STREAM_IN: "states to the device", TaskKind.STREAM_OUT: "states to the host",
    TaskKind.RECEIVE: "waiting for another stage",
    TaskKind.REDUCE_SCATTER: "gradients reduce-scattered", TaskKind.ALL_GATHER: "weights all-gathered",
    TaskKind.FETCH_FORWARD: "weights fetched for the forward", TaskKind.FETCH_BACKWARD: "weights fetched for the backward",
    TaskKind.GATHER_FORWARD: "weights gathered for the forward", TaskKind.GATHER_BACKWARD: "weights gathered for the backward",
    LaunchKind.FORWARD: "forward", LaunchKind.BACKWARD: "backward", LaunchKind.GATE: "wait", LaunchKind.STEP: "optimizer.step()",
}
LAUNCHING = "launching"
COLLECTIVES = "collectives"
FETCHED = "fetches"
STAGE = "stage"
UPDATES = "updates"
_ORDER = (LAUNCHING, "device", COLLECTIVES, FETCHED, "D2H", "CPU", "H2D")  # "device updates" comes after "device"


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on one lane, of unit number `unit` (-1: of no unit).

    Times are in microseconds of one clock.

    nbytes   of a collective: the memory that goes from rank to rank, all ranks' parts together; of
             a fetch, or a gather of shards: the weights
    """

    lane: str
    kind: Kind
    unit: int
    begin_us: float
    end_us: float
    nbytes: int = 0

    @property
    def label(self) -> str:
        """`b3`: backward of unit 3."""
        return f"{LETTERS[self.kind]}{self.unit}" if self.unit >= 0 else LETTERS[self.kind]

    def moved(self, by_us: float) -> Span:
        """The same work, that much later."""
        return replace(self, begin_us=self.begin_us + by_us, end_us=self.end_us + by_us)


def lane_order(lane: str) -> tuple[int, int]:
    """The launching thread, the device, collectives, fetches, gradients out, CPU, weights in."""
    name, _, number = lane.partition(" ")
    if name in (STAGE, UPDATES):  # of a pipeline: its own updates below each stage
        return (len(_ORDER), 2 * int(number) + (name == UPDATES))
    return (_ORDER.index(name), int(number) if number.isdigit() else len(number))


def merged(spans: Iterable[Span], gap_us: float) -> list[Span]:
    """The spans of one lane.

    Neighbours of one kind and unit that are at most `gap_us` apart are one.
    """
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if last and (last.kind, last.unit) == (span.kind, span.unit) and span.begin_us <= last.end_us + gap_us:
            found[-1] = replace(last, end_us=max(last.end_us, span.end_us), nbytes=last.nbytes + span.nbytes)
        else:
            found.append(span)
    return found


def tracks(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans of one lane, in order of begin, on as few tracks as possible.

    No two overlap on a track.
    """
    found: list[list[Span]] = []
    for span in spans:
        free = next((track for track in found if track[-1].end_us <= span.begin_us), None)
        if free is None:
            found.append([span])
        else:
            free.append(span)
    return found


# ---- Stretches of time as (begin, end) pairs in microseconds of one clock ----
#
# What they cover, and what two sets of them share.


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
    """Sum of their lengths in microseconds.

    A moment in several of them counts once for each.
    """
    return sum(end - begin for begin, end in intervals)


def shared_time(spans: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Microseconds of `spans` that lie in the union of `others`.

    A moment in several spans counts once for each.
    """
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
    """Share 0..1 of the length of `spans` that lies in the union of `others`.

    None where `spans` have no length.
    """
    spans = list(spans)
    total = length(spans)
    return shared_time(spans, others) / total if total > 0 else None
