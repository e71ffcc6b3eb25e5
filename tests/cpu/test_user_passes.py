"""Passes that a user hands to `compile(..., passes=[...])`.

They run, are checked as ours are, and errors name them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters

import hytrain_fx
from hytrain_fx.errors import ConfigError, GraphInvariantError
from hytrain_fx.explain.graphs.inspection import Inspection
from hytrain_fx.passes.base import PassContext, PassContract
from hytrain_fx.passes.node_notes import note
from hytrain_fx.passes.ops import NODES

from .loops import compare, plain_loop
from .models import mlp
from .threads import engine_threads, threads_left

pytestmark = pytest.mark.inductor  # that nodes of a user's operators are still there after it is among the facts

RUNS: Counter[str] = Counter()
ATEN = torch.ops.aten


@torch.library.custom_op("user_passes::watch", mutates_args=())
def watch(x: torch.Tensor, unit: str) -> torch.Tensor:
    """Counts its runs by unit; gives what it was given."""
    RUNS[unit] += 1
    return x.clone()


torch.fx.node.has_side_effect(torch.ops.user_passes.watch.default)


@watch.register_fake
def _(x: torch.Tensor, unit: str) -> torch.Tensor:
    return torch.empty_like(x)


def watch_units(module: fx.GraphModule, context: PassContext) -> str:
    """A harmless pass: a matrix product of each unit goes through `watch`, then times 1.

    All its users take that result.
    """
    products = [node for node in module.graph.nodes if node.target in (ATEN.mm.default, ATEN.addmm.default) and not note(node).makes]
    of_unit = {note(node).unit: node for node in products}
    for unit, node in of_unit.items():
        users = [user for user in node.users if user.op != "output"]
        with module.graph.inserting_after(node):
            watched = module.graph.call_function(torch.ops.user_passes.watch.default, (node, f"{context.graph.kind} {unit}"))
        with module.graph.inserting_after(watched):
            same = module.graph.call_function(ATEN.mul.Tensor, (watched, 1))
        for user in users:
            user.replace_input_with(node, same)
    return f"{len(of_unit)} units are watched"


WATCHED = [hytrain_fx.DEFAULT_PASSES[0], watch_units, *hytrain_fx.DEFAULT_PASSES[1:]]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No compiled code and no count of another test."""
    torch._dynamo.reset()
    RUNS.clear()
    yield
    torch._dynamo.reset()


def test_training_keeps_the_bits_of_the_plain_loop() -> None:
    """A pass puts nodes of its own operator and of aten's into every graph; the bits stay.

    Each of its nodes runs once a step.
    """
    compare(mlp, plain_loop(4), passes=WATCHED)
    assert set(RUNS) == {*(f"forward {unit}" for unit in range(4)), *(f"backward {unit}" for unit in (1, 2))}
    assert set(RUNS.values()) == {4}


def test_compiled_graphs_are_not_taken_from_another_list_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's cache of graphs gives a graph back only for the same passes.

    The nodes of a pass run when it is in the list. Each training has the same session number, as in
    another run of a script; else no graph would be equal to a former one.
    """
    ran, hits = [], []
    for passes in (None, WATCHED, None, WATCHED):
        RUNS.clear()
        counters.clear()
        monkeypatch.setattr(NODES, "_opened", 4_000_000)
        train(1, passes=passes)
        ran.append(bool(RUNS))
        hits.append(counters["inductor"]["fxgraph_cache_hit"])
    assert ran == [False, True, False, True]
    assert hits[2:] == [2, 2], "no graph came from the cache: this test shows nothing"


def test_inspect_shows_who_made_a_node() -> None:
    """Text, JSON and HTML have the user's nodes with unit and pass, beside ours.

    They are counted by operator.
    """
    found = train(1, passes=WATCHED)
    assert found.counts()["user_passes.watch"] == found.counts()["aten.mul.Tensor"] == 6
    assert found["00.forward"].passes[1].added == {"user_passes.watch": 4, "aten.mul.Tensor": 4}
    assert "watch_units" in str(found)
    assert "4 units are watched" in str(found)
    assert found.annotated(0).count("made by watch_units") == found.diff().count("made by watch_units") - 4 == 8
    nodes = [node for graph in json.loads(found.to_json())["graphs"] for node in graph["nodes"]]
    assert Counter(node["made_by"] for node in nodes)["watch_units"] == 12
    assert {node["made_by"] for node in nodes if node["op"] == "cpu_step"} == {"insert_steps"}
    assert {*(layer for node in nodes if node["op"] == "user_passes.watch" for layer in node["layers"])} >= {"first", "last"}
    page = found.to_html()
    assert page.count("<td>watch_units</td>") == 12 + 2  # a node's row each; the pass itself in both graphs
    assert "made by watch_units</i>" in page


@dataclass(frozen=True)
class Colour:
    """A pass with an option and a fact of its own."""

    shade: str
    name: ClassVar[str] = "colour"
    contract: ClassVar[PassContract] = PassContract(gives=frozenset({"units are coloured"}))

    def __call__(self, module: fx.GraphModule, context: PassContext) -> list[str]:
        return [f"{len(context.units)} units are {self.shade}"]


@hytrain_fx.graph_pass(needs="units are coloured", kinds="forward")
def use_colours(module: fx.GraphModule, context: PassContext) -> None:
    """A pass that needs the other one's fact."""


def test_passes_state_what_they_need_and_give() -> None:
    """An object with options is a pass, and facts may be a user's own.

    A pass runs only on its kinds of graph.
    """
    found = train(1, passes=[*hytrain_fx.DEFAULT_PASSES, Colour("red"), use_colours])
    assert [record.name for record in found[0].passes] == ["annotate_units", "insert_waits", "colour", "use_colours"]
    assert [record.name for record in found[1].passes][-2:] == ["drop_grad_outputs", "colour"]
    assert found[0].passes[-2].notes == ("4 units are red",)
    assert found[0].passes[-1].notes == ()


def without(name: str) -> list[Any]:
    return [one for one in hytrain_fx.DEFAULT_PASSES if one.name != name]


def no_arguments() -> None:
    """No pass."""


REFUSED: dict[str, tuple[Any, str]] = {
    "no list": (Colour("red"), "option passes=.*None, or a list of passes"),
    "a number": ([*hytrain_fx.DEFAULT_PASSES, 3], "int is 3; expected a function of two arguments"),
    "a class": ([*hytrain_fx.DEFAULT_PASSES, Colour], "colour is <class .*; expected a function of two arguments"),
    "a function of nothing": ([*hytrain_fx.DEFAULT_PASSES, no_arguments], r"`def no_arguments\(module, context\)`"),
    "a function without a name": ([*hytrain_fx.DEFAULT_PASSES, lambda module, context: None], "no name .found '<lambda>'"),
    "only a user's": ([watch_units], "pass watch_units needs that nodes are annotated; before it come: no passes"),
    "without what a user's pass needs": ([*hytrain_fx.DEFAULT_PASSES, use_colours], "pass use_colours needs that units are coloured"),
    "twice the same fact": ([*hytrain_fx.DEFAULT_PASSES, Colour("a"), Colour("b")], "pass colour must not run when units are coloured"),
    "without waits": (without("insert_waits"), "for forward graphs no pass gives .* those given are annotate_units. Add insert_waits"),
    "without the end": (without("drop_grad_outputs"), "for backward graphs no pass gives .*Add drop_grad_outputs"),
    "without offloads": (without("insert_grad_offload"), "pass insert_steps needs that every managed gradient is offloaded"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_list_is_refused_at_compile(case: str) -> None:
    """Before anything is built, for every kind of graph at once; no thread is left."""
    passes, message = REFUSED[case]
    model, _ = mlp()
    threads = engine_threads()
    with pytest.raises(ConfigError, match=message):
        hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), passes=passes)
    assert threads_left(threads) == []


def test_a_decorator_names_kinds_that_there_are() -> None:
    """A kind of graph that does not exist is refused where it is written."""
    with pytest.raises(ConfigError, match="'sideways' is not a valid GraphKind; expected some of forward, backward, inference"):
        hytrain_fx.graph_pass(kinds="sideways")


def divides_by_zero(module: fx.GraphModule, context: PassContext) -> None:
    _ = 1 / 0


def uses_before_it_is_made(module: fx.GraphModule, context: PassContext) -> None:
    first, last = (list(module.graph.nodes)[place] for place in (0, -2))
    with module.graph.inserting_before(last):
        late = module.graph.call_function(ATEN.mul.Tensor, (first, 1))
    with module.graph.inserting_before(late):
        module.graph.call_function(ATEN.add.Tensor, (first, first)).update_arg(0, late)


def erases_a_wait_or_an_update(module: fx.GraphModule, context: PassContext) -> None:
    ours = [node for node in module.graph.nodes if str(node.target) in ("hytrain_fx.wait.default", "hytrain_fx.reload.default")]
    module.graph.erase_node(ours[0])


def calls_python(module: fx.GraphModule, context: PassContext) -> None:
    with module.graph.inserting_before(module.graph.output_node()):
        module.graph.call_function(print, ("hello",))


def breaks_shapes(module: fx.GraphModule, context: PassContext) -> None:
    first = next(node for node in module.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor))
    with module.graph.inserting_before(module.graph.output_node()):
        module.graph.call_function(ATEN.view.default, (first, [12345]))


def leaves_a_result_unused(module: fx.GraphModule, context: PassContext) -> None:
    first = next(node for node in module.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor))
    with module.graph.inserting_before(module.graph.output_node()):
        module.graph.call_function(ATEN.sign.default, (first,))


def adds_an_output(module: fx.GraphModule, context: PassContext) -> None:
    output = module.graph.output_node()
    output.args = ((*output.args[0], None),)  # type: ignore[misc]


def adds_an_input(module: fx.GraphModule, context: PassContext) -> None:
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        module.graph.placeholder("more")


def returns_the_module(module: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    return module


BROKEN: dict[Callable[..., Any], str] = {
    divides_by_zero: "ZeroDivisionError: division by zero",
    uses_before_it_is_made: "used before it has been defined",
    erases_a_wait_or_an_update: "rule '(one wait for each weight read|reloads follow their token)' does not hold",
    calls_python: "is a call_function of <built-in function print>, which Inductor cannot compile",
    breaks_shapes: "shape",
    leaves_a_result_unused: "nobody uses the result of node sign_default, so Inductor leaves it out",
    adds_an_output: r"it has \d+ outputs, expected the \d+ captured",
    adds_an_input: "its inputs are .*more",
    returns_the_module: "it returned GraphModule; expected None, a line of text or several",
}


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_pass_that_does_wrong_is_named(broken: Callable[..., Any], kind: str) -> None:
    """A pass that raises, leaves an invalid graph or breaks a rule is a GraphInvariantError.

    It comes at the first step, and the model can be closed.
    """
    wrong = hytrain_fx.graph_pass(kinds=kind)(broken)
    with pytest.raises(GraphInvariantError, match=rf"(?s)graph \d+\.{kind} after {broken.__name__}: .*{BROKEN[broken]}"):
        train(1, passes=[*hytrain_fx.DEFAULT_PASSES, wrong])


@hytrain_fx.graph_pass(kinds="backward")
def reads_a_weight(module: fx.GraphModule, context: PassContext) -> None:
    """Takes the sign of every weight that the backward reads."""
    for row in context.graph.held_rows:
        with module.graph.inserting_before(module.graph.output_node()):
            signs = module.graph.call_function(ATEN.sign.default, (context.graph.holders(row)[0],))
            module.graph.call_function(torch.ops.user_passes.watch.default, (signs, f"row {row}"))


@hytrain_fx.graph_pass(kinds="backward")
def replaces_products(module: fx.GraphModule, context: PassContext) -> None:
    """Another mm, times 1, is used instead of each mm."""
    for node in module.graph.find_nodes(op="call_function", target=ATEN.mm.default):
        if not note(node).makes:
            with module.graph.inserting_before(node):
                other = module.graph.call_function(ATEN.mm.default, node.args)
                other = module.graph.call_function(ATEN.mul.Tensor, (other, 1))
            node.replace_all_uses_with(other)


def test_what_a_pass_replaces_is_gone() -> None:
    """Captured nodes whose results are no longer used read no weight and hold up no release."""
    compare(mlp, plain_loop(2), passes=[hytrain_fx.DEFAULT_PASSES[0], replaces_products, *hytrain_fx.DEFAULT_PASSES[1:]])


def test_a_late_reader_of_a_weight_is_refused() -> None:
    """A node that reads a weight must come before the passes that release weights.

    After them it might read the next step's weight.
    """
    with pytest.raises(GraphInvariantError, match=r"after reads_a_weight: rule '(a release needs|the end comes)"):
        train(1, passes=[*hytrain_fx.DEFAULT_PASSES, reads_a_weight])
    compare(mlp, plain_loop(2), passes=[hytrain_fx.DEFAULT_PASSES[0], reads_a_weight, *hytrain_fx.DEFAULT_PASSES[1:]])


def train(steps: int, **options: Any) -> Inspection:
    """Train a small model; its graphs."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, batches = mlp()
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), **options)
    try:
        plain_loop(steps)(model, optimizer, batches)
        return hytrain_fx.inspect(model)
    finally:
        hytrain_fx.close(model)
