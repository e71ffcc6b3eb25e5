"""Timelines as lanes of characters: each cell shows the task that took most of it.

A task that is wide enough carries its label (`|b3----`), a narrower one fills its cells with its
letter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hytrain_fx.explain.timeline.lanes import Lanes
from hytrain_fx.explain.timeline.launching import launches_text
from hytrain_fx.explain.timeline.span import LETTERS, WORDS, Span, merged
from hytrain_fx.ir.figures import time_text


def timelines_text(timelines: Sequence[Lanes], width: int) -> str:
    """Lanes of each timeline on one scale.

    Below them the hidden share of the CPU updates, what the launching thread did, and the legend.
    """
    spans = [span for timeline in timelines for span in timeline.spans]
    if not spans:
        return f"{timelines[0].source}: nothing was recorded"
    length_us = max(timeline.length_us for timeline in timelines)
    margin = max(len(span.lane) for span in spans) + 2
    cells = max(width - margin, 10)
    lines: list[str] = []
    for timeline in timelines:
        lines += [f"{timeline.source}, {time_text(timeline.length_us)}"] if len(timelines) > 1 else []
        lines += [lane.ljust(margin) + _lane(merged(own, length_us / cells), length_us, cells) for lane, own in timeline.lanes.items()]
    lines.append(" " * margin + "0" + time_text(length_us).rjust(cells - 1))
    for timeline in timelines:
        lines += _remarks(timeline)
    return "\n".join([*lines, _legend(spans)])


def _remarks(timeline: Lanes) -> Iterator[str]:
    share = timeline.overlap_share
    if share is not None:
        yield f"{share:.0%} of the CPU updates' time ran beside a forward or backward ({timeline.source})"
    yield from launches_text(timeline.launches, timeline.unit_names)


def _legend(spans: Sequence[Span]) -> str:
    """Letters that occur, in the order of their definition."""
    used = {span.kind for span in spans}
    return "  ".join(dict.fromkeys(f"{LETTERS[kind]} {WORDS[kind]}" for kind in LETTERS if kind in used))


def _lane(spans: Sequence[Span], length_us: float, cells: int) -> str:
    owner: list[Span | None] = [None] * cells
    most = [0.0] * cells
    cell_us = length_us / cells if length_us else 1.0
    for span in spans:
        for cell in range(min(int(span.begin_us / cell_us), cells - 1), min(int(span.end_us / cell_us), cells - 1) + 1):
            part_us = min(span.end_us, (cell + 1) * cell_us) - max(span.begin_us, cell * cell_us)
            if part_us > most[cell]:
                owner[cell], most[cell] = span, part_us
    return "".join(_runs(owner)).rstrip()


def _runs(owner: list[Span | None]) -> list[str]:
    """One text for each run of cells with the same owner."""
    texts: list[str] = []
    at = 0
    while at < len(owner):
        span, begin = owner[at], at
        while at < len(owner) and owner[at] is span:
            at += 1
        texts.append(_fill(span, at - begin))
    return texts


def _fill(span: Span | None, cells: int) -> str:
    if span is None:
        return " " * cells
    letter = span.label[0]
    if cells <= len(span.label):
        return letter * cells
    return f"|{span.label}".ljust(cells, "." if letter == "." else "-")
