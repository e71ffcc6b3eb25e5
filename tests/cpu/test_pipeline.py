"""The pipeline: contracts, order, records, dumps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from torch import fx

from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.errors import GraphInvariantError
from hytrain_fx.passes.base import Fact, Notes, Pass, PassContext, PassContract
from hytrain_fx.passes.ops import GRAD_OFFLOAD
from hytrain_fx.passes.pipeline import DEFAULT_BACKWARD_PASSES, DEFAULT_FORWARD_PASSES, GraphDump, check_contracts, default_passes, rewrite
from tests.cpu.pass_contexts import SESSION, context


@dataclass(frozen=True)
class LoseAnOffload:
    """A wrong pass: deletes an offload."""

    name: ClassVar[str] = "lose_an_offload"
    contract: ClassVar[PassContract] = PassContract(requires=frozenset({Fact.GRADS_OFFLOADED}))

    def __call__(self, module: fx.GraphModule, context: PassContext) -> Notes:
        module.graph.erase_node(module.graph.find_nodes(op="call_function", target=GRAD_OFFLOAD)[0])
        return ()


def test_the_default_order_satisfies_the_contracts() -> None:
    """Both lists of passes provide what each pass needs."""
    check_contracts(DEFAULT_BACKWARD_PASSES)
    check_contracts(DEFAULT_FORWARD_PASSES)
    assert default_passes(GraphKind.INFERENCE) == default_passes(GraphKind.FORWARD) == DEFAULT_FORWARD_PASSES


@pytest.mark.parametrize("index", range(1, len(DEFAULT_BACKWARD_PASSES)))
def test_a_pass_that_is_lost_or_run_twice_is_noticed(index: int) -> None:
    """A pass before what it needs, or run twice, is refused before anything runs, naming the pass and what ran so far."""
    lost = DEFAULT_BACKWARD_PASSES[1:]
    with pytest.raises(GraphInvariantError, match="pass insert_grad_offload needs that nodes are annotated; before it come: no passes"):
        check_contracts(lost)
    twice: tuple[Pass, ...] = (*DEFAULT_BACKWARD_PASSES[: index + 1], DEFAULT_BACKWARD_PASSES[index])
    with pytest.raises(GraphInvariantError, match=f"pass {DEFAULT_BACKWARD_PASSES[index].name} must not run when"):
        check_contracts(twice)


def test_contracts_are_checked_before_anything_runs() -> None:
    """A wrong order leaves the graph as it was."""
    ctx = context(GraphKind.BACKWARD)
    before = str(ctx.graph.module.graph)
    with pytest.raises(GraphInvariantError, match="drop_grad_outputs"):
        rewrite(ctx.graph, session=SESSION, units=ctx.units, passes=(DEFAULT_BACKWARD_PASSES[0], DEFAULT_BACKWARD_PASSES[-1]))
    assert str(ctx.graph.module.graph) == before


def test_a_wrong_pass_is_caught_right_behind_it() -> None:
    """Rules are asked after each pass; the complaint names graph, pass and rule."""
    ctx = context(GraphKind.BACKWARD)
    passes = (*DEFAULT_BACKWARD_PASSES[:2], LoseAnOffload())
    with pytest.raises(GraphInvariantError, match=r"graph 01.backward after lose_an_offload: rule 'each gradient is offloaded once'"):
        rewrite(ctx.graph, session=SESSION, units=ctx.units, passes=passes)


def test_each_pass_leaves_a_record() -> None:
    """Names, notes, nodes added, rules asked and texts: each pass starts from the text the one before it ended with."""
    ctx = context(GraphKind.BACKWARD)
    record = rewrite(ctx.graph, session=SESSION, units=ctx.units)
    assert [one.name for one in record.passes] == [one.name for one in DEFAULT_BACKWARD_PASSES]
    assert {one.name: dict(one.added) for one in record.passes if one.added} == {
        "insert_grad_offload": {"grad_offload": 4},
        "insert_steps": {"cpu_step": 4, "gpu_step": 4},
        "insert_reload": {"reload": 4},
        "insert_release": {"release": 4},
        "insert_backward_end": {"backward_end": 1},
    }
    assert all(one.notes and one.duration_us > 0 for one in record.passes)
    assert all(after.before == before.after for before, after in zip(record.passes, record.passes[1:], strict=False))
    assert [name for name, _ in record.texts] == ["captured", *(one.name for one in record.passes)]
    assert "torch.ops.hytrain_fx.backward_end" in record.texts[-1][1]
    assert "torch.ops.hytrain_fx" not in record.texts[0][1]  # the name alone may be a folder's, in the path of a source file
    assert len(record.passes[-1].rules) > len(record.passes[0].rules)


def test_texts_are_dumped_in_the_order_of_the_story(tmp_path: Path) -> None:
    """A sorted listing of the dump folder goes through graphs and passes in order, before and after each."""
    for kind in (GraphKind.FORWARD, GraphKind.BACKWARD):
        ctx = context(kind, "mlp")
        rewrite(ctx.graph, session=SESSION, units=ctx.units, dump=GraphDump(tmp_path / "dump"))
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert names[:4] == [
        "00.forward.00.annotate_units.after.txt",
        "00.forward.00.annotate_units.before.txt",
        "00.forward.01.insert_waits.after.txt",
        "00.forward.01.insert_waits.before.txt",
    ]
    assert names[-1] == "01.backward.06.drop_grad_outputs.before.txt"
    assert "hytrain_fx.wait" in (tmp_path / "dump" / names[2]).read_text()


def test_every_pass_shows_a_graph_before_and_after() -> None:
    """Each pass's module says what it does to a graph, with Before and After."""
    import sys

    for one in (*DEFAULT_BACKWARD_PASSES, *DEFAULT_FORWARD_PASSES):
        text = sys.modules[type(one).__module__].__doc__ or ""
        assert "Before:" in text, one.name
        assert "After:" in text, one.name
