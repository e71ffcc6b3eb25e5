"""What `inspect` writes as JSON, SVG and text, and how files are named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import hytrain_fx
from hytrain_fx.errors import ConfigError
from hytrain_fx.explain.graphs.inspection import Inspection

from .explained import compiled


@pytest.fixture(scope="module")
def found() -> Iterator[Inspection]:
    """A small model trained under a plan with its first unit on the device."""
    with compiled(k=1, warmup_steps=8) as (model, step):  # in fewer, a delayed worker may leave no update to be timed
        for _ in range(13):
            step()
        yield hytrain_fx.inspect(model)


@pytest.fixture(scope="module")
def raw(found: Inspection) -> Any:
    return json.loads(found.to_json())


def test_every_stage_of_every_graph_is_there(found: Inspection, raw: Any) -> None:
    """Each pass names the text before it and the text after it; equal texts are there once."""
    for graph, values in zip(found, raw["graphs"], strict=True):
        assert values["name"] == graph.name
        for record, told in zip(graph.passes, values["passes"], strict=True):
            assert (record.before, record.after) == (values["texts"][told["before"]], values["texts"][told["after"]])
            assert (record.name, dict(record.added), list(record.notes)) == (told["name"], told["added"], told["notes"])
        assert len(set(values["texts"])) == len(values["texts"])


def test_counts_and_nodes_are_those_of_the_inspection(found: Inspection, raw: Any) -> None:
    """Inserted nodes come with their figures; their number is what the counts say."""
    assert raw["counts"] == dict(found.counts())
    for graph, values in zip(found, raw["graphs"], strict=True):
        assert values["nodes"] == json.loads(json.dumps([asdict(node) for node in found.nodes(graph)]))
        assert len(values["nodes"]) == sum(values["counts"].values())
        assert values["node_count"] == len(graph.nodes) > len(values["nodes"])
    updates = {(node["op"], *node["layers"]): node for values in raw["graphs"] for node in values["nodes"]}
    assert updates["cpu_step", "first"]["nbytes"] == 0 < updates["gpu_step", "first"]["nbytes"]
    assert updates["cpu_step", "last"]["predicted_us"] > 0
    assert updates["cpu_step", "last"]["measured_us"] > 0
    assert [row["placement"] for row in raw["parameters"]] == [row.placement for row in found.rows]


def test_the_task_graph_is_that_of_the_session(found: Inspection, raw: Any) -> None:
    """The tasks of the plan in force, with their sizes, times and edges.

    The unit on the device has an update there; the others go the CPU's way.
    """
    dag = found.task_graph.dag
    assert {(task["task"], task["bytes"]) for task in raw["task_graph"]["tasks"]} == {(str(t), of["bytes"]) for t, of in dag.nodes.items()}
    assert {tuple(edge) for edge in raw["task_graph"]["edges"]} == {(str(a), str(b)) for a, b in dag.edges}
    tasks = {task["task"]: task for task in raw["task_graph"]["tasks"]}
    assert {"gpu_update(0)", "d2h(1)"} <= set(tasks)
    assert not {"d2h(0)", "gpu_update(1)"} & set(tasks)
    assert tasks["cpu_update(1)"]["us"] == pytest.approx(sum(cut["pieces"] * cut["us"] for cut in tasks["cpu_update(1)"]["cuts"]))
    assert tasks["cpu_update(1)"]["us"] > 0
    assert tasks["backward(1)"]["flops"] > 0


def test_the_picture_has_a_box_for_each_task_and_a_line_for_each_edge(found: Inspection) -> None:
    """It is well-formed; boxes lie inside it and apart."""
    root = ElementTree.fromstring(found.to_svg())
    groups = [g for g in root.iter() if (g.get("class") or "").startswith("task ")]
    lines = [line for line in root.iter() if line.tag.endswith("}line")]
    dag = found.task_graph.dag
    assert len(groups) == dag.number_of_nodes() == 4 * 3 + 1 + 3 * 3  # backward, wait, forward; updates on the device and by the CPU
    assert len(lines) == dag.number_of_edges()
    corners = set()
    for group in groups:
        box = next(one for one in group if one.get("class") == "box")
        x, y, width, height = (int(box.get(name) or -1) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + width <= int(root.get("width") or 0)
        assert 0 <= y <= y + height <= int(root.get("height") or 0)
        corners.add((x, y))
    assert len(corners) == len(groups)


def test_files_are_written_by_suffix(found: Inspection, tmp_path: Path) -> None:
    """The file has the method's text; another suffix is refused."""
    makers = {"a.json": found.to_json, "a.html": found.to_html, "a.svg": found.to_svg, "a.txt": found.to_text}
    for name, make in makers.items():
        assert found.save(tmp_path / name) == tmp_path / name
        assert (tmp_path / name).read_text(encoding="utf-8") == make()
    assert all(found.annotated(graph) in found.to_text() for graph in found)
    with pytest.raises(ConfigError, match=r"suffix '.pdf' of .*, expected one of .html, .json, .svg, .txt"):
        found.save(tmp_path / "a.pdf")


def test_nothing_captured_is_still_a_page(found: Inspection) -> None:
    """Before the first step there are layers and a task graph, and no graph."""
    empty = replace(found, graphs=())
    assert json.loads(empty.to_json())["graphs"] == []
    assert "<h2>Graphs</h2>" in empty.to_html()
    assert "no graph has been captured" in empty.to_text()
