"""What the inserted nodes do in one session: gradients into the engine, stand-ins into `.grad`, marks, counts.

    grad_offload   row on the host: gradient to the engine, `.grad` becomes a stand-in
                   row updated on the device, or `.grad` already a real tensor: gradient added to the real `.grad`
    all_run        every node that a backward graph was compiled with has run: otherwise the compiler has dropped it
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hytrain_fx.cost_model.measure import Mark, StepMarks
from hytrain_fx.errors import DroppedNodeError, GradientConsumedError, UnsupportedError
from hytrain_fx.grad_standin import GradStandIn
from hytrain_fx.ir.plan import Placement
from hytrain_fx.parameters import ParameterTable
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.states import StateStore
from hytrain_fx.torch_private import private_function, without_torch_function

# Order of a norm, and whether torch's foreach kernel computes it: on CUDA the two differ in the last bits.
Norm = tuple[float, bool]


class RowGradient:
    """Source of one stand-in: the gradient of `row` as its `generation`-th offload left it in the slot."""

    __slots__ = ("_generation", "_nodes", "_norms", "_row")

    def __init__(self, nodes: SessionNodes, row: int, norms: dict[Norm, torch.Tensor]) -> None:
        self._nodes = nodes
        self._row = row
        self._generation = nodes.generation[row]
        self._norms = norms

    def is_live(self) -> bool:
        """Whether the slot still holds this gradient."""
        return self._nodes.generation[self._row] == self._generation and self._row not in self._nodes.consumed

    def fetch(self) -> torch.Tensor:
        """The gradient as a new tensor on the device. Raises GradientConsumedError."""
        if not self.is_live():
            raise GradientConsumedError(
                f"the gradient of {self._nodes.table.names[self._row]} is gone: step() has used its host memory for the new weight, or a "
                "later backward() has taken it; read .grad between backward() and step(), and call zero_grad() before the next backward()"
            )
        return self._nodes.fetch(self._row)

    def norm(self, ord: float, foreach: bool) -> torch.Tensor | None:
        """The norm taken when the gradient was made (0-dim, on the device), handed out once; None if it was not asked for before."""
        return self._norms.pop((float(ord), foreach), None) if self.is_live() else None

    def note_norm_wanted(self, ord: float, foreach: bool) -> None:
        """Take this norm of every gradient from the next backward on."""
        self._nodes.norms_wanted.add((float(ord), foreach))


class HeldGradient:
    """Source of the stand-in that takes the place of a device row's `.grad` at `step()`: the update may be reading the tensor."""

    __slots__ = ("_engine", "_grad", "_row")

    def __init__(self, engine: Engine, row: int, grad: torch.Tensor) -> None:
        self._engine, self._row, self._grad = engine, row, grad

    def is_live(self) -> bool:
        """Always: the update only reads it."""
        return True

    def fetch(self) -> torch.Tensor:
        """A copy, made behind the update: what is written where the copy was may not overtake it."""
        self._engine.wait([self._row])
        return self._grad.clone(memory_format=torch.preserve_format)

    def norm(self, ord: float, foreach: bool) -> torch.Tensor | None:
        """None: not taken."""
        return None

    def note_norm_wanted(self, ord: float, foreach: bool) -> None:
        """Norms of real gradients are taken when asked for."""


class SessionNodes:
    """Implements `ops.StepNodes` for one session."""

    def __init__(self, table: ParameterTable, engine: Engine, states: StateStore, marks: StepMarks) -> None:
        self.table = table
        self.runs: Counter[str] = Counter()  # how often each kind of node ran, in rows
        self.generation = [0] * len(table)
        self.consumed: set[int] = set()  # rows whose gradient was used by step() and whose slot is no longer it
        self.norms_wanted: set[Norm] = set()
        self.held: dict[int, torch.Tensor] = {}  # gradients that an update on the device still reads
        self.graph_rows: dict[int, frozenset[int]] = {}  # rows that each backward graph offloads
        self.unit_of: list[int] = [0] * len(table)
        self._engine = engine
        self._states = states
        self._marks = marks
        self._offloaded: set[int] = set()
        self._own: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # real gradients made here, with their version

    def grad_offload(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """Take the gradients of `rows`, in the parameters' shapes, from buffers that die after this call."""
        self._marks.mark(Mark.GRADS, self.unit_of[rows[0]])
        with torch.no_grad(), without_torch_function():
            norms = self._norms(grads)
            fresh: list[tuple[int, torch.Tensor]] = []
            taken = [self._take(row, grad, fresh) for row, grad in zip(rows, grads, strict=True)]
            self._keep_on_device(fresh)
            self._offload([row for row, grad in zip(rows, taken, strict=True) if grad is not None], [g for g in taken if g is not None])
            for i, (row, grad) in enumerate(zip(rows, taken, strict=True)):
                if grad is not None:
                    own = {norm: values[i] for norm, values in norms.items()} if grad is grads[i] else self._norms_of(grad)
                    parameter = self.table.parameters[row]
                    parameter.grad = GradStandIn(parameter, RowGradient(self, row, own))
        self._offloaded.update(rows)
        self.runs["grad_offload"] += len(rows)

    @contextmanager
    def all_run(self, graph: int) -> Iterator[None]:
        """Around one run of a compiled backward graph. Raises DroppedNodeError where it ends and fewer rows were counted than it offloads.

        Releases are not counted: `step()` makes up for one that is lost.
        """
        before = self.runs.copy()
        self._offloaded.clear()  # by a graph that ended in an error
        yield
        rows = len(self.graph_rows[graph])
        for kind in ("grad_offload", "cpu_step", "gpu_step", "reload", "backward_end"):
            ran, expected = self.runs[kind] - before[kind], min(rows, 1) if kind == "backward_end" else rows
            if ran < expected:
                raise DroppedNodeError(
                    f"backward graph {graph} ran {kind} for {ran} rows, expected {expected}; an inserted node was dropped by the compiler: "
                    "please report this with the torch version"
                )

    def cpu_step(self, rows: Sequence[int]) -> None:
        """Arm the CPU update of rows placed on the host."""
        self._engine.arm_cpu(rows)
        self.runs["cpu_step"] += len(rows)

    def gpu_step(self, rows: Sequence[int]) -> None:
        """Arm the update on the device of rows placed there."""
        self._engine.arm_gpu(rows)
        self.runs["gpu_step"] += len(rows)

    def reload(self, rows: Sequence[int]) -> None:
        """Arm the copy of the new weights."""
        self._engine.arm_reload(rows)
        self.runs["reload"] += len(rows)

    def release(self, rows: Sequence[int]) -> None:
        """The compute stream has, at this point, read these weights for the last time."""
        self._engine.release(rows)
        self.runs["release"] += len(rows)

    def backward_end(self, graph: int, rows: Sequence[int]) -> None:
        """Release the rest and check the count. Raises DroppedNodeError."""
        missing = self.graph_rows.get(graph, frozenset()) - self._offloaded
        if missing:
            names = ", ".join(self.table.names[row] for row in sorted(missing)[:3])
            raise DroppedNodeError(
                f"backward graph {graph} ended but {len(missing)} of its gradients were never offloaded ({names}, ...); "
                "an inserted node was dropped by the compiler: please report this with the torch version"
            )
        self._offloaded -= self.graph_rows.get(graph, frozenset())
        if rows:
            self.release(rows)
        self._marks.mark(Mark.BACKWARD_END)
        self.runs["backward_end"] += 1

    def wait(self, rows: Sequence[int]) -> None:
        """Return when the compute stream will see the committed weights of `rows`."""
        unit = self.unit_of[rows[0]]
        self._marks.mark(Mark.WAIT_BEGIN, unit)
        self._engine.wait(rows)
        for row in rows:
            self.held.pop(row, None)
        self._marks.mark(Mark.WAIT_END, unit)
        self.runs["wait"] += len(rows)

    def fetch(self, row: int) -> torch.Tensor:
        """The gradient in the slot of `row`, brought back to the device."""
        gradient = torch.empty_like(self.table.parameters[row].detach())
        self._engine.fetch(row, gradient)
        return gradient

    def offload_real(self, row: int, grad: torch.Tensor) -> None:
        """Offload a real `.grad` at `step()`: it came from outside the graphs, or user code has changed it."""
        self._offload([row], [grad])
        self._engine.arm_cpu([row])
        self._engine.arm_reload([row])

    def is_eager(self, row: int) -> bool:
        """Whether the row's present `.grad` has a part that did not come from the graphs."""
        with without_torch_function():
            grad = self.table.parameters[row].grad
        if grad is None:
            return False
        return grad.materialized is not None if isinstance(grad, GradStandIn) else not self.is_untouched(row, grad)

    def require_strided(self, row: int, grad: torch.Tensor) -> None:
        """Raises UnsupportedError for a sparse gradient."""
        if grad.layout != torch.strided:
            raise UnsupportedError(
                f"the gradient of {self.table.names[row]} is sparse ({grad.layout}); torch's Adam and AdamW refuse it too: "
                "make the embedding with sparse=False"
            )

    def on_device(self, row: int, grad: torch.Tensor) -> torch.Tensor:
        """A real gradient in the parameter's order of memory, for an update to read later: a copy of a tensor that user code made."""
        made, _ = self._own.get(row, (None, 0))
        own = made is not None and made() is grad
        return _like_parameter(grad, self.table.parameters[row], copy=not own)

    def hold(self, row: int, grad: torch.Tensor) -> None:
        """Keep `grad` until its update has run; where it is the row's `.grad`, user code finds a stand-in of it there instead."""
        self.held[row] = grad
        parameter = self.table.parameters[row]
        if parameter.grad is grad:
            parameter.grad = GradStandIn(parameter, HeldGradient(self._engine, row, grad))

    def is_untouched(self, row: int, grad: torch.Tensor) -> bool:
        """Whether this real gradient was made by the graphs and not edited since."""
        made, version = self._own.get(row, (None, 0))
        return made is not None and made() is grad and version == grad._version

    def _take(self, row: int, grad: torch.Tensor, fresh: list[tuple[int, torch.Tensor]]) -> torch.Tensor | None:
        """Add one gradient to what the row has. Returns what is to go to the host, None where `.grad` is, or will be, a real tensor.

        The first gradient of a row on the device is put in `fresh`: copies of several tensors are one launch.
        """
        self.require_strided(row, grad)
        parameter = self.table.parameters[row]
        held = parameter.grad
        if isinstance(held, GradStandIn):
            if held.materialized is None and not held.grad_state.source.is_live():
                return None  # step() has used it, so the sum cannot be known: `.grad` stays what says so to whoever asks
            if is_clean(held):
                grad, held = held.grad_state.source.fetch().add_(grad), None
            else:
                held = held.grad_state.materialize()
                parameter.grad = held
        if held is not None:
            ours = self.is_untouched(row, held)
            held.add_(grad)
            if ours:
                self._own[row] = (weakref.ref(held), held._version)
        elif self._states.placement[row] is not Placement.CPU:
            fresh.append((row, grad))
        else:
            return grad
        return None

    def _keep_on_device(self, fresh: Sequence[tuple[int, torch.Tensor]]) -> None:
        if not fresh:
            return
        kept = [torch.empty_like(self.table.parameters[row].detach()) for row, _ in fresh]
        private_function("_foreach_copy_")(kept, [grad for _, grad in fresh])
        for (row, _), grad in zip(fresh, kept, strict=True):
            self.table.parameters[row].grad = grad
            self._own[row] = (weakref.ref(grad), grad._version)

    def _offload(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        if not rows:
            return
        for row in rows:
            self.generation[row] += 1
            self.consumed.discard(row)
        parameters = [self.table.parameters[row] for row in rows]
        self._engine.grad_offload(rows, [_like_parameter(g, p, copy=False) for g, p in zip(grads, parameters, strict=True)])

    def _norms(self, grads: Sequence[torch.Tensor]) -> dict[Norm, Sequence[torch.Tensor]]:
        return {(order, foreach): _norm_of_each(grads, order, foreach) for order, foreach in self.norms_wanted}

    def _norms_of(self, grad: torch.Tensor) -> dict[Norm, torch.Tensor]:
        return {norm: values[0] for norm, values in self._norms([grad]).items()}


def is_clean(standin: GradStandIn) -> bool:
    """Whether the stand-in's values are those in the slot."""
    return standin.materialized is None and not standin.factors and not standin.zeroed


def _norm_of_each(grads: Sequence[torch.Tensor], order: float, foreach: bool) -> Sequence[torch.Tensor]:
    if foreach:
        norms: Sequence[torch.Tensor] = private_function("_foreach_norm")(list(grads), order)
        return norms
    return [torch.linalg.vector_norm(grad, order) for grad in grads]


def _like_parameter(grad: torch.Tensor, parameter: torch.Tensor, *, copy: bool) -> torch.Tensor:
    """`grad` in the parameter's order of memory, so that flat ranges of both agree."""
    if not copy and grad.stride() == parameter.stride() and grad.dtype == parameter.dtype:
        return grad
    return torch.empty_like(parameter.detach()).copy_(grad)
