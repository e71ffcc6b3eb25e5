"""The pipeline: contracts, order, records, dumps."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.errors import ConfigError, GraphInvariantError
from hytrain_fx.passes.base import Fact, GraphPass, PassContext, as_pass, graph_pass
from hytrain_fx.passes.graph_dump import GraphDump
from hytrain_fx.passes.ops import ALL_OPS, CPU_STEP, GRAD_OFFLOAD
from hytrain_fx.passes.pipeline import DEFAULT_PASSES, check_order, chosen_passes, of_kind, rewrite
from hytrain_fx.passes.verify import facts_asked_of
from tests.cpu.pass_contexts import SESSION, context

BACKWARD = of_kind(DEFAULT_PASSES, GraphKind.BACKWARD)


@graph_pass(needs=Fact.GRADS_OFFLOADED, kinds="backward")
def lose_an_offload(module: fx.GraphModule, context: PassContext) -> None:
    """A wrong pass: deletes an offload."""
    module.graph.erase_node(module.graph.find_nodes(op="call_function", target=GRAD_OFFLOAD)[0])


@pytest.mark.parametrize("kind", GraphKind)
def test_the_default_passes_give_all_that_the_rules_ask_of(kind: GraphKind) -> None:
    """Each pass finds what it needs, and no rule is left unchecked at the end."""
    assert check_order(DEFAULT_PASSES, kind) >= facts_asked_of(kind)
    assert [one.name for one in of_kind(DEFAULT_PASSES, kind)][:1] == ["annotate_units"]


@pytest.mark.parametrize("index", range(1, len(BACKWARD)))
def test_a_pass_that_is_lost_or_run_twice_is_noticed(index: int) -> None:
    """A pass before what it needs, or run twice, is refused before anything runs.

    The error names the pass and what comes before it.
    """
    with pytest.raises(ConfigError, match="pass insert_grad_offload needs that nodes are annotated; before it come: no passes"):
        check_order(BACKWARD[1:], GraphKind.BACKWARD)
    twice: tuple[GraphPass, ...] = (*BACKWARD[: index + 1], BACKWARD[index])
    with pytest.raises(ConfigError, match=f"for backward graphs pass {BACKWARD[index].name} must not run when"):
        check_order(twice, GraphKind.BACKWARD)


@pytest.mark.parametrize("index", range(len(DEFAULT_PASSES)))
def test_no_default_pass_can_be_left_out(index: int) -> None:
    """A list without any one of them is refused, also where no other pass needs it.

    Training would go wrong in silence.
    """
    with pytest.raises(ConfigError, match=r"needs that|no pass gives"):
        chosen_passes([*DEFAULT_PASSES[:index], *DEFAULT_PASSES[index + 1 :]])
    with pytest.raises(ConfigError, match=r"for forward graphs no pass gives 'every reader .*Add insert_waits"):
        chosen_passes(DEFAULT_PASSES[:-1])


def test_contracts_are_checked_before_anything_runs() -> None:
    """A wrong order leaves the graph unchanged."""
    ctx = context(GraphKind.BACKWARD)
    before = str(ctx.graph.module.graph)
    with pytest.raises(ConfigError, match="drop_grad_outputs"):
        rewrite(ctx.graph, session=SESSION, units=ctx.units, passes=(BACKWARD[0], BACKWARD[-1]))
    assert str(ctx.graph.module.graph) == before


def test_a_wrong_pass_is_caught_at_once() -> None:
    """Rules are asked after each pass; the complaint names graph, pass and rule."""
    ctx = context(GraphKind.BACKWARD)
    with pytest.raises(GraphInvariantError, match=r"graph 01.backward after lose_an_offload: rule 'each gradient is offloaded once'"):
        rewrite(ctx.graph, session=SESSION, units=ctx.units, passes=(*BACKWARD[:2], lose_an_offload))


def test_each_pass_leaves_a_record() -> None:
    """A record has names, notes, nodes added, rules checked and texts.

    Each pass starts from the text that the one before it ended with.
    """
    ctx = context(GraphKind.BACKWARD)
    record = rewrite(ctx.graph, session=SESSION, units=ctx.units)
    assert [one.name for one in record.passes] == [one.name for one in BACKWARD]
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


def test_a_node_knows_which_pass_made_it() -> None:
    """Each inserted node, and no captured one: the record has their notes."""
    ctx = context(GraphKind.BACKWARD)
    captured = {node.name for node in ctx.graph.module.graph.nodes}
    record = rewrite(ctx.graph, session=SESSION, units=ctx.units)
    makers = {"grad_offload": "insert_grad_offload", "cpu_step": "insert_steps", "gpu_step": "insert_steps", "reload": "insert_reload",
              "release": "insert_release", "backward_end": "insert_backward_end"}
    inserted = {name: of.made_by for name, of in record.nodes.items() if name not in captured}
    ops = {name: re.sub(r"(_default)?(_\d+)?$", "", name) for name in inserted}
    assert all(record.nodes[name].made_by == "" for name in captured)
    assert inserted == {name: makers[op] for name, op in ops.items()}
    assert set(ops.values()) == set(makers)


def test_nodes_of_one_chain_are_one_call() -> None:
    """The compiler is given one call for a unit's four nodes.

    Those whose chain a pass has parted stay as they are.
    """

    def between(module: fx.GraphModule, context: PassContext) -> None:
        first = module.graph.find_nodes(op="call_function", target=CPU_STEP)[0]
        with module.graph.inserting_after(first):
            double = module.graph.call_function(torch.ops.aten.mul.Tensor, (first, 2))
        first.replace_all_uses_with(double, delete_user_cb=lambda user: user is not double)

    def counted(*extra: Any) -> dict[str, int]:
        ctx = context(GraphKind.BACKWARD)
        rewrite(ctx.graph, session=SESSION, units=ctx.units, passes=(*DEFAULT_PASSES, *map(as_pass, extra)))
        ctx.graph.module.graph.lint()
        return Counter(str(node.target).split(".")[1] for node in ctx.graph.module.graph.nodes if node.target in ALL_OPS)

    chain = ("grad_offload", "cpu_step", "gpu_step", "reload")
    plain, parted = counted(), counted(between)
    assert plain["offload_and_step"] == 4
    assert not any(plain[op] for op in chain)
    assert parted["offload_and_step"] == 3
    assert all(parted[op] == 1 for op in chain)


def test_texts_are_dumped_in_the_order_of_the_story(tmp_path: Path) -> None:
    """The dump folder, sorted, goes through graphs and passes in order, before and after each."""
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
    for one in DEFAULT_PASSES:
        text = sys.modules[one.edit.__module__].__doc__ or ""
        assert "Before:" in text, one.name
        assert "After:" in text, one.name
