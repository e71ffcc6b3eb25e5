"""The task graph drawn by layer: a row for each layer in forward order, a column for each stage of its step.

    forward | backward | D2H       | CPU update | H2D        | wait
                       | stream in | GPU update | stream out |

Tasks that the plan in force does not use are pale: the graph has all three ways to update each layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hytrain_fx.explain.graphs.node_figures import TASKS, InspectedRow, UnitTimes
from hytrain_fx.ir.figures import bytes_text, count_text, time_text
from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.task_graph import TaskGraph, TaskId, TaskKind

# Column and line inside a layer's row.
_PLACES = {
    TaskKind.FORWARD: (0, 0), TaskKind.BACKWARD: (1, 0), TaskKind.D2H: (2, 0), TaskKind.CPU_UPDATE: (3, 0), TaskKind.H2D: (4, 0),
    TaskKind.STREAM_IN: (2, 1), TaskKind.GPU_UPDATE: (3, 1), TaskKind.STREAM_OUT: (4, 1), TaskKind.WAIT: (5, 0),
}
_USED_BY = {
    TaskKind.D2H: {Placement.CPU}, TaskKind.CPU_UPDATE: {Placement.CPU}, TaskKind.H2D: {Placement.CPU},
    TaskKind.GPU_UPDATE: {Placement.GPU, Placement.STREAM}, TaskKind.STREAM_IN: {Placement.STREAM}, TaskKind.STREAM_OUT: {Placement.STREAM},
}
_OPS = {kind: op for op, kind in TASKS.items()} | {TaskKind.WAIT: "wait"}
_NAMES_WIDTH, _COLUMN, _LINE, _ROW, _TOP, _BOX = 190, 128, 24, 60, 30, (96, 18)  # pixels


@dataclass(frozen=True, slots=True)
class _Box:
    """A task: its upper left corner in pixels, words for the box and for the pointer, whether the plan uses it."""

    x: int
    y: int
    label: str
    about: str
    kind: str
    used: bool


def task_graph_svg(graph: TaskGraph, rows: Sequence[InspectedRow], times: Mapping[str, UnitTimes]) -> str:
    """The picture as SVG text; `rows` say which of the ways the plan uses."""
    boxes = {task: _box(graph, task, rows, times) for task in graph.dag}
    layers = [{"name": unit.name, "y": _TOP + unit.index * _ROW, "about": f"{count_text(unit.params)} parameters"} for unit in graph.units]
    width, height = _NAMES_WIDTH + _COLUMN * (1 + max(column for column, _ in _PLACES.values())), _TOP + _ROW * len(layers)
    return render("task_graph.svg", width=width, height=height, layers=layers, boxes=boxes.values(), edges=list(_edges(graph, boxes)),
                  box_width=_BOX[0], box_height=_BOX[1], row_height=_ROW)


def uses(task: TaskId, graph: TaskGraph, rows: Sequence[InspectedRow]) -> bool:
    """Whether the plan in force has any share of the task's layer go this way."""
    name = graph.units[task.unit].name
    wanted = _USED_BY.get(task.kind)
    return wanted is None or any(row.params_in(wanted) for row in rows if row.unit == name)


def _box(graph: TaskGraph, task: TaskId, rows: Sequence[InspectedRow], times: Mapping[str, UnitTimes]) -> _Box:
    column, line = _PLACES[task.kind]
    name, sizes = graph.units[task.unit].name, graph.dag.nodes[task]
    predicted = times[name].predicted.get(_OPS.get(task.kind, "")) if name in times else None
    used = uses(task, graph, rows)
    parts = [f"{task.kind} of {name} on {sizes['resource']}"]
    parts += [bytes_text(sizes["bytes"])] if sizes["bytes"] else []
    parts += [f"{count_text(sizes['flops'])} FLOP"] if sizes["flops"] else []
    parts += [f"predicted {time_text(predicted)}"] if predicted is not None and used else []
    parts += [] if used else ["not used by the plan in force"]
    return _Box(_NAMES_WIDTH + column * _COLUMN, _TOP + task.unit * _ROW + line * _LINE, task.kind.replace("_", " "), ", ".join(parts),
                str(task.kind), used)


def _edges(graph: TaskGraph, boxes: Mapping[TaskId, _Box]) -> Iterator[Mapping[str, int]]:
    """From the right side of a box to the left side of another; between layers from box to box of one column."""
    width, height = _BOX
    for before, after in graph.dag.edges:
        a, b = boxes[before], boxes[after]
        if a.x == b.x:
            ends = (a.x + width // 2, a.y + (height if b.y > a.y else 0), b.x + width // 2, b.y + (0 if b.y > a.y else height))
        else:
            ends = (a.x + width, a.y + height // 2, b.x, b.y + height // 2)
        yield dict(zip(("x1", "y1", "x2", "y2"), ends, strict=True)) | {"used": a.used and b.used}


# ---- Fills the templates of `explain/templates` (jinja2): values are escaped, and a name that a template misses is an error ----


FOLDER = Path(__file__).parents[1] / "templates"


def render(name: str, **values: Any) -> str:
    """The text of the template `name` with these values."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # not above: what prints text does without

    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                              lstrip_blocks=True, keep_trailing_newline=True)
    return environment.get_template(name).render(**values)
