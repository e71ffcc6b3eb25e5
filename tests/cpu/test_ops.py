"""The operators: schemas, marks, sessions, what they call."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

import pytest
import torch

from hytrain_fx.errors import EngineError, UnsupportedError
from hytrain_fx.passes import ops
from hytrain_fx.passes.ops import NODES, NodeRegistry, StepNodes


class Calls:
    """A StepNodes that keeps what it was called with."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def grad_offload(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        self.seen.append(("grad_offload", list(rows), [tuple(g.shape) for g in grads]))

    def cpu_step(self, rows: Sequence[int]) -> None:
        self.seen.append(("cpu_step", list(rows)))

    def gpu_step(self, rows: Sequence[int]) -> None:
        self.seen.append(("gpu_step", list(rows)))

    def reload(self, rows: Sequence[int]) -> None:
        self.seen.append(("reload", list(rows)))

    def offload_and_step(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        self.seen.append(("offload_and_step", list(rows), [tuple(g.shape) for g in grads]))

    def release(self, rows: Sequence[int]) -> None:
        self.seen.append(("release", list(rows)))

    def backward_end(self, graph: int, rows: Sequence[int]) -> None:
        self.seen.append(("backward_end", graph, list(rows)))

    def wait(self, rows: Sequence[int]) -> None:
        self.seen.append(("wait", list(rows)))

    def fetch(self, rows: Sequence[int]) -> None:
        self.seen.append(("fetch", list(rows)))

    def let_go(self, rows: Sequence[int]) -> None:
        self.seen.append(("let_go", list(rows)))


@pytest.fixture
def session() -> Iterator[tuple[int, Calls]]:
    """An open session."""
    calls = Calls()
    number = NODES.register(calls)
    yield number, calls
    NODES.unregister(number)


def test_schemas_are_those_of_the_design() -> None:
    """The operators have the schemas that docs/design.md states."""
    assert {str(op._schema).partition("::")[2] for op in ops.ALL_OPS} == {
        "grad_offload(Tensor[] grads, int session, int[] rows) -> Tensor",
        "cpu_step(Tensor token, int session, int[] rows) -> Tensor",
        "gpu_step(Tensor token, int session, int[] rows) -> Tensor",
        "reload(Tensor token, int session, int[] rows) -> ()",
        "offload_and_step(Tensor[] grads, int session, int[] rows) -> Tensor",
        "release(Tensor[] readers, int session, int[] rows) -> ()",
        "backward_end(Tensor[] deps, int session, int graph, int[] rows) -> ()",
        "wait(Tensor(a!)[] weights, int session, int[] rows) -> ()",
        "fetch(Tensor(a!)[] weights, int session, Tensor[] after, int[] rows) -> ()",
        "let_go(Tensor[] readers, int session, int[] rows) -> ()",
    }


@pytest.mark.parametrize("op", sorted(ops.ALL_OPS, key=str), ids=lambda op: op.name().partition("::")[2])
def test_every_operator_is_kept_by_dead_code_elimination(op: torch._ops.OpOverload) -> None:
    """FX counts a node of each operator as impure, so that dead-code elimination keeps it."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(op, (x, 0, [0]))
    graph.output(())
    graph.eliminate_dead_code()
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [op]


@pytest.mark.parametrize("op", sorted(ops.ALL_OPS, key=str), ids=lambda op: op.name().partition("::")[2])
def test_every_operator_is_tagged(op: torch._ops.OpOverload) -> None:
    """No operator may be captured in a CUDA graph, and none asks Inductor for strides."""
    assert {torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout} <= set(op.tags)


def test_operators_call_the_nodes_of_their_session(session: tuple[int, Calls]) -> None:
    """Each operator makes one call with its rows, and tokens have no elements."""
    number, calls = session
    token = ops.GRAD_OFFLOAD([torch.ones(2, 3), torch.ones(4)], number, [5, 6])
    token = ops.GPU_STEP(ops.CPU_STEP(token, number, [5]), number, [6])
    ops.RELOAD(token, number, [5, 6])
    ops.RELEASE([torch.ones(1)], number, [7])
    ops.BACKWARD_END([token], number, 3, [8])
    ops.WAIT([torch.ones(2)], number, [9])
    ops.FETCH([torch.ones(2), torch.ones(3)], number, [token], [9])
    ops.LET_GO([torch.ones(1)], number, [9])
    assert token.numel() == 0
    assert calls.seen == [
        ("grad_offload", [5, 6], [(2, 3), (4,)]),
        ("cpu_step", [5]),
        ("gpu_step", [6]),
        ("reload", [5, 6]),
        ("release", [7]),
        ("backward_end", 3, [8]),
        ("wait", [9]),
        ("fetch", [9]),
        ("let_go", [9]),
    ]


def test_fake_and_real_operators_agree(session: tuple[int, Calls]) -> None:
    """torch's own checks pass for the operators that return a token.

    They test schema, fake kernel and mutation.
    """
    number, _ = session
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.GRAD_OFFLOAD, ([torch.ones(2, 3)], number, [0]), test_utils=utils)
    torch.library.opcheck(ops.CPU_STEP, (torch.ones(0), number, [0]), test_utils=utils)
    weights = [torch.ones(2)]
    torch.library.opcheck(ops.WAIT, (weights, number, [0]), test_utils=("test_faketensor",))
    torch.library.opcheck(ops.FETCH, (weights, number, [torch.ones(0)], [0]), test_utils=("test_faketensor",))


def test_sessions_count_from_zero() -> None:
    """Session numbers are 0, 1, 2... in registration order; a closed one is never reused."""
    registry = NodeRegistry()
    assert [registry.register(Calls()), registry.register(Calls())] == [0, 1]
    registry.unregister(1)
    assert registry.register(Calls()) == 2


def test_a_closed_and_an_unknown_session_are_told_apart() -> None:
    """The error says whether the session is closed or was never opened."""
    registry = NodeRegistry()
    number = registry.register(Calls())
    registry.unregister(number)
    with pytest.raises(EngineError, match=r"session 0, which is closed"):
        registry.find(0, [])
    with pytest.raises(EngineError, match=r"session 7, which was never opened"):
        registry.find(7, [])


def test_a_wait_on_a_copy_is_an_error() -> None:
    """A `wait` that gets anything but the parameter's own memory raises.

    Its readers would see an old weight.
    """
    weight, calls = torch.ones(3, 2), Calls()
    nodes: StepNodes = calls
    number = NODES.register(nodes, [weight])
    ops.WAIT([weight.view(3, 2)], number, [0])
    with pytest.raises(EngineError, match="another tensor than the parameter"):
        ops.WAIT([weight.clone()], number, [0])
    with pytest.raises(EngineError, match="copy of the parameter, made ahead of it by a layout change"):
        ops.WAIT([weight.t().contiguous().t()], number, [0])
    NODES.unregister(number)
    assert calls.seen == [("wait", [0])]


def test_a_second_import_under_another_name_is_refused() -> None:
    """A second copy of the module cannot define the operators again, and it says so.

    It makes no second registry.
    """
    spec = importlib.util.spec_from_file_location("hytrain_fx_again", ops.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(UnsupportedError, match="imported twice, now as 'hytrain_fx_again'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
