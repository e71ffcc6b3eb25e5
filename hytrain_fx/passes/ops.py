"""The operators that the passes insert: schema, fake and real. `StepNodes` says what they do.

    backward   grad_offload(Tensor[] grads, int session, int[] rows) -> Tensor    a token: it has 0
                                                                 elements and orders what follows
               cpu_step(Tensor token, int session, int[] rows) -> Tensor
               gpu_step(Tensor token, int session, int[] rows) -> Tensor
               reload(Tensor token, int session, int[] rows) -> ()
               release(Tensor[] readers, int session, int[] rows) -> ()
               backward_end(Tensor[] deps, int session, int graph, int[] rows) -> ()
               offload_and_step(Tensor[] grads, int session, int[] rows) -> Tensor
                                                                 the first four in one (`one_call`)
               fetch(Tensor(a!)[] weights, int session, Tensor[] after, int[] rows) -> ()
    forward    wait(Tensor(a!)[] weights, int session, int[] rows) -> ()
               let_go(Tensor[] readers, int session, int[] rows) -> ()

`fetch` and `let_go` are there where weights are streamed.

All are marked as having side effects: without the mark Inductor drops an operator whose result is
not used, and training silently stops. Their layout is flexible: Inductor makes no copy for them, so
a gradient may come with any strides. Session numbers count up from 0 in each process, so that the
graphs of two runs of a script are equal and caches hit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch

from hytrain_fx.capture.instance_graphs import Running
from hytrain_fx.errors import EngineError, UnsupportedError

NAMESPACE = "hytrain_fx"


class StepNodes(Protocol):
    """What the operators call.

    Rows are integers of the session's parameter table. There is one call for each inserted node.
    """

    def grad_offload(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """Take each row's gradient (the parameter's shape, any strides).

        A row's second gradient of a backward is added.
        """

    def cpu_step(self, rows: Sequence[int]) -> None:
        """Arm the CPU update of the rows placed there."""

    def gpu_step(self, rows: Sequence[int]) -> None:
        """Arm the device update of the rows placed there."""

    def reload(self, rows: Sequence[int]) -> None:
        """Arm the copy of the new weights to the device."""

    def offload_and_step(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """The four above, in this order."""

    def release(self, rows: Sequence[int]) -> None:
        """Everything of this backward graph that reads these weights is in the stream.

        A later call for a row replaces it.
        """

    def backward_end(self, graph: int, rows: Sequence[int]) -> None:
        """The backward graph number `graph` is wholly in the stream; releases `rows`."""

    def wait(self, rows: Sequence[int]) -> None:
        """Return when work put in the stream from now on will read the new weights."""

    def fetch(self, rows: Sequence[int]) -> None:
        """Return when work put in the stream from now on finds these weights on the device."""

    def let_go(self, rows: Sequence[int]) -> None:
        """Everything of this forward graph that reads these weights is in the stream."""


class NodeRegistry:
    """Finds the `StepNodes` of a session number, which is baked in the graphs.

    And for which rows a node acts.
    """

    def __init__(self) -> None:
        self._sessions: dict[int, StepNodes] = {}
        self._running: dict[int, Running] = {}
        self._parameters: dict[int, Sequence[torch.Tensor]] = {}
        self._copies: dict[int, Mapping[int, torch.Tensor]] = {}
        self._opened = 0

    def register(
        self, nodes: StepNodes, parameters: Sequence[torch.Tensor] = (), copies: Mapping[int, torch.Tensor] = MappingProxyType({}),
        running: Running | None = None,
    ) -> int:
        """Open a session for `nodes` and return its number: 0, 1, 2... in the order of calls.

        With `parameters` (by row), each `wait` checks that it was given these or `copies`, and not
        tensors made of them ahead of it. `running` says for which set of parameters a graph runs
        that several share.
        """
        session = self._opened
        self._opened += 1
        self._sessions[session] = nodes
        self._parameters[session] = parameters
        self._copies[session] = copies
        self._running[session] = running or Running()
        return session

    def unregister(self, session: int) -> None:
        """Close a session; a node of one of its graphs that runs later is an EngineError."""
        self._sessions.pop(session, None)
        self._running.pop(session, None)
        self._parameters.pop(session, None)
        self._copies.pop(session, None)

    def check_uncopied(self, session: int, rows: Sequence[int], weights: Sequence[torch.Tensor]) -> None:
        """Raise EngineError where a `wait` holds a copy of a parameter: readers see old weights."""
        parameters, copies = self._parameters[session], self._copies[session]
        for row, weight in zip(rows, weights, strict=True) if parameters else ():
            if row in copies and weight.data_ptr() == copies[row].data_ptr():
                continue
            if weight is not parameters[row] and weight.data_ptr() != parameters[row].data_ptr():
                raise EngineError(_other_tensor(row, weight, parameters[row]))

    def find(self, session: int, named: Sequence[int]) -> tuple[StepNodes, Sequence[int]]:
        """The nodes of a session, and the rows that a node acts for which names these.

        Raises EngineError where it was never opened or is closed.
        """
        try:
            nodes, instance = self._sessions[session], self._running[session].instance
        except KeyError:
            raise self._unknown(session) from None
        return nodes, named if instance is None else instance.rows(named)

    def graph(self, session: int, named: int) -> int:
        """The number of the running graph, of an open session; its nodes say this one."""
        instance = self._running[session].instance
        return named if instance is None else instance.graph(named)

    def _unknown(self, session: int) -> EngineError:
        state = "is closed" if 0 <= session < self._opened else "was never opened in this process"
        return EngineError(
            f"a compiled graph called hytrain_fx session {session}, which {state}; open: {sorted(self._sessions)}. "
            "Compile the model again with hytrain_fx.compile"
        )


def _other_tensor(row: int, found: torch.Tensor, parameter: torch.Tensor) -> str:
    """What `wait` was given instead of the parameter, as far as its form shows."""
    shape = tuple(parameter.shape)
    if found.stride() != parameter.stride():
        return (f"the wait for row {row} (shape {shape}) was given a copy of the parameter, made ahead of it by a layout change of the "
                "compiler; compile with options={'layout_optimization': False} and report this with the torch version")
    return (f"a compiled graph was run with another tensor than the parameter that it was captured with (row {row}, shape {shape}): the "
            "parameter was replaced while the model ran, or where the model holds it besides its modules' parameters (in a list, a dict, a "
            "closure). Copy values into the parameter instead, or call hytrain_fx.close(model) and hytrain_fx.compile() again")


NODES = NodeRegistry()


def _grad_offload(grads: list[torch.Tensor], session: int, named: list[int]) -> torch.Tensor:
    nodes, rows = NODES.find(session, named)
    nodes.grad_offload(rows, grads)
    return grads[0].new_empty(0)


def _cpu_step(token: torch.Tensor, session: int, named: list[int]) -> torch.Tensor:
    nodes, rows = NODES.find(session, named)
    nodes.cpu_step(rows)
    return token.new_empty(0)


def _gpu_step(token: torch.Tensor, session: int, named: list[int]) -> torch.Tensor:
    nodes, rows = NODES.find(session, named)
    nodes.gpu_step(rows)
    return token.new_empty(0)


def _reload(token: torch.Tensor, session: int, named: list[int]) -> None:
    nodes, rows = NODES.find(session, named)
    nodes.reload(rows)


def _offload_and_step(grads: list[torch.Tensor], session: int, named: list[int]) -> torch.Tensor:
    nodes, rows = NODES.find(session, named)
    nodes.offload_and_step(rows, grads)
    return grads[0].new_empty(0)


def _release(readers: list[torch.Tensor], session: int, named: list[int]) -> None:
    nodes, rows = NODES.find(session, named)
    nodes.release(rows)


def _backward_end(deps: list[torch.Tensor], session: int, graph: int, named: list[int]) -> None:
    nodes, rows = NODES.find(session, named)
    nodes.backward_end(NODES.graph(session, graph), rows)


def _wait(weights: list[torch.Tensor], session: int, named: list[int]) -> None:
    nodes, rows = NODES.find(session, named)
    NODES.check_uncopied(session, rows, weights)
    nodes.wait(rows)


def _fetch(weights: list[torch.Tensor], session: int, after: list[torch.Tensor], named: list[int]) -> None:
    nodes, rows = NODES.find(session, named)
    nodes.fetch(rows)


def _let_go(readers: list[torch.Tensor], session: int, named: list[int]) -> None:
    nodes, rows = NODES.find(session, named)
    nodes.let_go(rows)


def _fake_token(of: torch.Tensor | list[torch.Tensor], session: int, rows: list[int]) -> torch.Tensor:
    return (of if isinstance(of, torch.Tensor) else of[0]).new_empty(0)


def _fake_nothing(*_: object) -> None:
    return None


def _define() -> torch.library.Library:
    try:
        library = torch.library.Library(NAMESPACE, "DEF")
    except RuntimeError as error:
        raise UnsupportedError(
            f"the operators of {NAMESPACE} are already defined in this process, so the package was imported twice, now as "
            f"{__name__!r}; import it under the one name 'hytrain_fx'"
        ) from error
    wanted = ("cudagraph_unsafe", "flexible_layout")
    tags = [getattr(torch.Tag, name) for name in wanted if hasattr(torch.Tag, name)]
    for schema, real, fake in _DEFINITIONS:
        name = schema.partition("(")[0]
        library.define(schema, tags=tags)
        library.impl(name, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
        torch.fx.node.has_side_effect(getattr(getattr(torch.ops, NAMESPACE), name).default)
    return library


_DEFINITIONS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("grad_offload(Tensor[] grads, int session, int[] rows) -> Tensor", _grad_offload, _fake_token),
    ("cpu_step(Tensor token, int session, int[] rows) -> Tensor", _cpu_step, _fake_token),
    ("gpu_step(Tensor token, int session, int[] rows) -> Tensor", _gpu_step, _fake_token),
    ("reload(Tensor token, int session, int[] rows) -> ()", _reload, _fake_nothing),
    ("offload_and_step(Tensor[] grads, int session, int[] rows) -> Tensor", _offload_and_step, _fake_token),
    ("release(Tensor[] readers, int session, int[] rows) -> ()", _release, _fake_nothing),
    ("backward_end(Tensor[] deps, int session, int graph, int[] rows) -> ()", _backward_end, _fake_nothing),
    ("wait(Tensor(a!)[] weights, int session, int[] rows) -> ()", _wait, _fake_nothing),
    ("fetch(Tensor(a!)[] weights, int session, Tensor[] after, int[] rows) -> ()", _fetch, _fake_nothing),
    ("let_go(Tensor[] readers, int session, int[] rows) -> ()", _let_go, _fake_nothing),
)
_LIBRARY = _define()  # the definitions live as long as this object

GRAD_OFFLOAD = torch.ops.hytrain_fx.grad_offload.default
CPU_STEP = torch.ops.hytrain_fx.cpu_step.default
GPU_STEP = torch.ops.hytrain_fx.gpu_step.default
RELOAD = torch.ops.hytrain_fx.reload.default
OFFLOAD_AND_STEP = torch.ops.hytrain_fx.offload_and_step.default
RELEASE = torch.ops.hytrain_fx.release.default
BACKWARD_END = torch.ops.hytrain_fx.backward_end.default
WAIT = torch.ops.hytrain_fx.wait.default
FETCH = torch.ops.hytrain_fx.fetch.default
LET_GO = torch.ops.hytrain_fx.let_go.default
FORWARD_OPS = frozenset({WAIT, LET_GO})
ALL_OPS = FORWARD_OPS | {GRAD_OFFLOAD, CPU_STEP, GPU_STEP, RELOAD, OFFLOAD_AND_STEP, RELEASE, BACKWARD_END, FETCH}
