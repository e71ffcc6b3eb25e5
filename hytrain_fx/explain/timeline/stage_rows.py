"""The stages of a pipeline on one timeline, two rows each: what its device computes, its updates.

    stage 0      |f0|f1|b0---|f2|b1---|f3|b2---|b3---|     |f0|f1|
    updates 0                                  |u3|u2---|
    stage 1         |f0|b0---|f1|b1---|f2|b2---|f3|b3---|     |f0|
    updates 1                                        |u3|u2|

A forward and a backward carry the number of their micro-batch, an update that of its unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from hytrain_fx.explain.timeline.lanes import Lanes
from hytrain_fx.explain.timeline.span import STAGE, UPDATES, Span
from hytrain_fx.ir.task_graph import TaskKind

_COMPUTING = (TaskKind.FORWARD, TaskKind.BACKWARD)
_UPDATING = (TaskKind.CPU_UPDATE, TaskKind.GPU_UPDATE)


def stage_row(number: int, spans: Iterable[Span], micro_batches: int) -> list[Span]:
    """What stage `number` computed and updated, of the spans of its own timeline."""
    spans = sorted(spans, key=lambda span: span.begin_us)
    computed = numbered([span for span in spans if span.kind in _COMPUTING], micro_batches)
    updated = [replace(span, lane=f"{UPDATES} {number}") for span in spans if span.kind in _UPDATING]
    return [replace(span, lane=f"{STAGE} {number}") for span in computed] + updated


def numbered(spans: Sequence[Span], micro_batches: int) -> Iterator[Span]:
    """One span for the units of each forward and backward, with its micro-batch for a unit.

    Units of a forward come in ascending order, those of a backward in descending order.
    """
    count = Counter[object]()
    run: list[Span] = []
    for span in [*spans, None]:
        if run and (span is None or span.kind is not run[-1].kind or _is_next(run[-1], span)):
            kind = run[0].kind
            yield replace(run[0], unit=count[kind] % micro_batches, end_us=run[-1].end_us)
            count[kind] += 1
            run = []
        if span is not None:
            run.append(span)


def _is_next(before: Span, span: Span) -> bool:
    return span.unit < before.unit if span.kind is TaskKind.FORWARD else span.unit > before.unit


def together(rows: Iterable[Iterable[Span]], source: Literal["measured", "predicted"]) -> Lanes:
    """The rows of all stages, from the first begin on."""
    spans = sorted((span for row in rows for span in row), key=lambda span: span.begin_us)
    first_us = spans[0].begin_us if spans else 0.0
    names = range(max((span.unit for span in spans), default=-1) + 1)
    return Lanes(tuple(span.moved(-first_us) for span in spans), tuple(map(str, names)), source, begins_us=first_us)
