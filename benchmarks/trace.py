"""Reading a Chrome trace that torch.profiler wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hytrain_fx.explain.timeline.span import Interval

Event = dict[str, Any]


def document(path: Path) -> dict[str, Any]:
    """The whole trace."""
    with path.open() as file:
        read: dict[str, Any] = json.load(file)
    return read


def events(path: Path) -> list[Event]:
    """The trace's events."""
    found: list[Event] = document(path)["traceEvents"]
    return found


def spans(found: Iterable[Event], category: str, name_has: str = "") -> list[Interval]:
    """Begin and end of the events of one category, in microseconds."""
    return [(e["ts"], e["ts"] + e["dur"]) for e in found if e.get("cat") == category and name_has in e["name"]]


def busiest_stream(kernels: Iterable[Event]) -> object:
    """The stream that ran kernels for the longest time, None without kernels."""
    spent: dict[object, float] = {}
    for event in kernels:
        spent[event["tid"]] = spent.get(event["tid"], 0.0) + event["dur"]
    return max(spent, key=lambda tid: spent[tid]) if spent else None
