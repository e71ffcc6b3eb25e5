"""What `inspect` shows of the rewritten graphs, and what a dump folder holds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import hytrain_fx
from hytrain_fx.__main__ import main
from hytrain_fx.api import session_of
from hytrain_fx.errors import ConfigError
from hytrain_fx.explain.graphs.dump_folder import read_dump
from hytrain_fx.explain.graphs.inspection import Inspection
from hytrain_fx.explain.graphs.lines import annotated_text, inserted_lines
from hytrain_fx.ir.task_graph import TaskId, TaskKind

from .explained import compiled

K = 1


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Inspection, Path]]:
    """A model trained for two steps with the first unit on the device, and its dump folder."""
    folder = tmp_path_factory.mktemp("dump")
    with compiled(k=K, dump=folder) as (model, step):
        assert "no graph has been captured" in str(hytrain_fx.inspect(model))
        step()
        step()
        found = hytrain_fx.inspect(model)
        assert len(found) == len(session_of(model).capture.graphs)
        yield found, folder


def test_counts_are_those_of_the_passes(dumped: tuple[Inspection, Path]) -> None:
    """Counting lines of text gives what the passes recorded as added."""
    found, _ = dumped
    for graph in found:
        added: Counter[str] = Counter()
        for record in graph.passes:
            added.update(record.added)
        assert graph.counts() == added
    assert found.counts() == sum((graph.counts() for graph in found), Counter[str]())
    assert found.counts()["grad_offload"] == 4


def test_annotations_name_unit_parameters_bytes_and_placement(dumped: tuple[Inspection, Path]) -> None:
    """The annotated code is the graph's code, with a comment only after each inserted node."""
    found, _ = dumped
    text = found.annotated("00.forward")
    plain = [line.partition("  # ")[0] if "torch.ops.hytrain_fx." in line else line for line in text.splitlines()]
    assert plain == found[0].after.splitlines()
    assert text == found.annotated(found[0])
    notes = [line.partition("  # ")[2] for line in text.splitlines() if "torch.ops.hytrain_fx." in line]
    assert notes == ["first: weight, bias; on gpu; 224 B of weights; made by insert_waits",
                     "body.0: weight, bias; on cpu; 288 B of weights; made by insert_waits",
                     "body.2: weight, bias; on cpu; 288 B of weights; made by insert_waits",
                     "last: weight; on cpu; 32 B of weights; made by insert_waits"]
    offloads = [node for node in found.nodes("01.backward") if node.op == "grad_offload"]
    assert {node.layers: node.size for node in offloads}[("first",)] == "nothing to do"
    assert {node.layers: node.size for node in offloads}[("body.0",)] == "288 B to the host"


def test_the_diff_holds_every_inserted_node_once(dumped: tuple[Inspection, Path]) -> None:
    """Its `+` lines are the inserted nodes, the others are lines of the code around them."""
    found, _ = dumped
    lines = found.diff().splitlines()
    assert sum(line.startswith("+ ") for line in lines) == sum(found.counts().values())
    code = {line.partition(";  ")[0].strip() for graph in found for line in graph.after.splitlines()}
    assert all(line[2:] in code for line in lines if line.startswith("  ") and line != "  ...")
    assert sum(line.startswith("+ ") for line in found.diff(context=0).splitlines()) == sum(found.counts().values())


def test_nodes_are_found_by_parameter_and_by_layer(dumped: tuple[Inspection, Path]) -> None:
    """A parameter's nodes are among its layer's, and a container's among all of its layers'."""
    found, _ = dumped
    of_weight, of_layer, of_body = (found.find(name) for name in ("body.0.weight", "body.0", "body"))
    assert {node.op for node in of_weight} >= {"wait", "grad_offload", "cpu_step", "gpu_step", "reload"}
    assert set(of_weight) <= set(of_layer) < set(of_body)
    assert all("body.0.weight" in node.parameters for node in of_weight)
    with pytest.raises(ConfigError, match=r"no managed parameter or layer 'bodi'; the layers are first"):
        found.find("bodi")


def test_graphs_by_number_name_and_pass(dumped: tuple[Inspection, Path]) -> None:
    """Number and name give the same graph, and a text after any pass is there.

    What is not there is named.
    """
    found, _ = dumped
    graph = found["01.backward"]
    assert graph is found[1]
    assert graph.text("drop_grad_outputs") == graph.after != graph.before
    assert not list(inserted_lines(graph.before))
    assert str(found).count("insert_") == sum(record.name.startswith("insert_") for g in found for record in g.passes)
    with pytest.raises(ConfigError, match=r"captured are 00.forward, 01.backward"):
        found[7]
    with pytest.raises(ConfigError, match="no pass 'fuse'"):
        graph.text("fuse")


def test_the_task_graph_has_every_unit(dumped: tuple[Inspection, Path]) -> None:
    """The DAG's units are the layers in forward order.

    Each has the tasks of an update where its states are.
    """
    found, _ = dumped
    assert [unit.name for unit in found.task_graph.units] == ["first", "body.0", "body.2", "last"]
    places = {unit.name: {place for row in found.rows if row.unit == unit.name for place in row.placed} for unit in found.task_graph.units}
    dag = found.task_graph.dag
    for unit, name in enumerate(places):
        assert (TaskId(TaskKind.CPU_UPDATE, unit) in dag) == ("cpu" in places[name])
        assert (TaskId(TaskKind.GPU_UPDATE, unit) in dag) == ("gpu" in places[name])
        assert all(TaskId(kind, unit) in dag for kind in (TaskKind.BACKWARD, TaskKind.WAIT, TaskKind.FORWARD))


def test_a_dump_folder_lists_the_same_passes(dumped: tuple[Inspection, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Its passes and counts are those of the records; the command line prints them."""
    found, folder = dumped
    passes = read_dump(folder)
    expected = [(graph.name, record.name, dict(record.added)) for graph in found for record in graph.passes]
    assert [(dumped_pass.graph, dumped_pass.name, dumped_pass.added) for dumped_pass in passes] == expected
    assert main(["inspect", str(folder)]) == 0
    assert "insert_grad_offload: 4 grad_offload" in capsys.readouterr().out
    assert main(["inspect", str(folder), "--diff"]) == 0
    assert capsys.readouterr().out.count("\n+ ") == sum(found.counts().values())
    assert main(["inspect", str(folder), "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == [name for _, name, _ in expected]


def test_a_line_without_our_nodes_is_left_alone() -> None:
    """Names that only look like ours are no nodes of ours."""
    text = "x = torch.ops.aten.mm.default(a, b)\n# torch.ops.hytrain_fx is mentioned\ny = hytrain_fx(a, [1])"
    assert not list(inserted_lines(text))
    assert annotated_text(text, {}) == text
