"""The task graph drawn by layer.

A row for each layer in forward order, a column for each stage of a step under the plan in force.

    backward       | D2H       | CPU update | H2D        | wait       | forward
    reduce-scatter | stream in | GPU update | stream out | all-gather |
    fetch          |           |            |            | fetch      |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hytrain_fx.explain.graphs.node_figures import TASKS, UnitTimes
from hytrain_fx.explain.template import render
from hytrain_fx.ir.figures import bytes_text, count_text, time_text
from hytrain_fx.ir.task_graph import GATHERS, TaskGraph, TaskId, TaskKind

# Column and line inside a layer's row.
_PLACES = {
    TaskKind.BACKWARD: (0, 0), TaskKind.D2H: (1, 0), TaskKind.CPU_UPDATE: (2, 0), TaskKind.H2D: (3, 0), TaskKind.WAIT: (4, 0),
    TaskKind.STREAM_IN: (1, 1), TaskKind.GPU_UPDATE: (2, 1), TaskKind.STREAM_OUT: (3, 1), TaskKind.FORWARD: (5, 0),
    TaskKind.REDUCE_SCATTER: (0, 1), TaskKind.ALL_GATHER: (4, 1), TaskKind.RECEIVE: (5, 1),
    TaskKind.FETCH_BACKWARD: (0, 1), TaskKind.FETCH_FORWARD: (4, 1),  # of one process, which has no collectives
    TaskKind.GATHER_BACKWARD: (0, 2), TaskKind.GATHER_FORWARD: (4, 2),
}
_OPS = {kind: op for op, kind in TASKS.items()} | {TaskKind.WAIT: "wait"}
_NAMES_WIDTH, _COLUMN, _LINE, _ROW, _TOP, _BOX, _ABOVE = 190, 128, 24, 60, 30, (96, 18), 3  # pixels


@dataclass(frozen=True, slots=True)
class _Box:
    """A task: its upper left corner in pixels, words for the box and for the pointer."""

    x: int
    y: int
    label: str
    about: str
    kind: str


def task_graph_svg(graph: TaskGraph, times: Mapping[str, UnitTimes]) -> str:
    """The picture as SVG text."""
    row = _ROW + _LINE * any(task.kind in GATHERS for task in graph.dag)  # they have a line of their own
    boxes = {task: _box(graph, task, times, row) for task in graph.dag}
    layers = [{"name": unit.name, "y": _TOP + unit.index * row, "about": f"{count_text(unit.params)} parameters"} for unit in graph.units]
    width, height = _NAMES_WIDTH + _COLUMN * (1 + max(column for column, _ in _PLACES.values())), _TOP + row * len(layers)
    return render("task_graph.svg", width=width, height=height, layers=layers, boxes=boxes.values(), edges=list(_edges(graph, boxes)),
                  box_width=_BOX[0], box_height=_BOX[1], row_height=row)


def _box(graph: TaskGraph, task: TaskId, times: Mapping[str, UnitTimes], row: int) -> _Box:
    column, line = _PLACES[task.kind]
    unit, sizes = graph.units[task.unit], graph.dag.nodes[task]
    predicted = times[unit.name].predicted.get(_OPS.get(task.kind, "")) if unit.name in times else None
    share = sizes["params"] / unit.params
    parts = [f"{task.kind} of {unit.name} on {sizes['resource']}"]
    parts += [f"{share:.0%} of its parameters"] if share < 1 else []
    parts += [bytes_text(sizes["bytes"])] if sizes["bytes"] else []
    parts += [f"{count_text(sizes['flops'])} FLOP"] if sizes["flops"] else []
    parts += [f"profiled {time_text(sizes['us'])}"] if sizes["us"] else []
    parts += [f"predicted {time_text(predicted)}"] if predicted is not None else []
    return _Box(_NAMES_WIDTH + column * _COLUMN, _TOP + task.unit * row + line * _LINE, task.kind.replace("_", " "), ", ".join(parts),
                str(task.kind))


def _edges(graph: TaskGraph, boxes: Mapping[TaskId, _Box]) -> Iterator[Mapping[str, int]]:
    """From the right to the left side of two boxes, above those between.

    Within a column from box to box.
    """
    width, height = _BOX
    for before, after in graph.dag.edges:
        a, b = boxes[before], boxes[after]
        if a.x == b.x:
            ends = (a.x + width // 2, a.y + (height if b.y > a.y else 0), b.x + width // 2, b.y + (0 if b.y > a.y else height))
        elif a.y == b.y and b.x > a.x + _COLUMN:
            ends = (a.x + width, a.y - _ABOVE, b.x, b.y - _ABOVE)
        else:
            ends = (a.x + width, a.y + height // 2, b.x, b.y + height // 2)
        yield dict(zip(("x1", "y1", "x2", "y2"), ends, strict=True))
