"""What the inserted nodes do in one session: gradients into the engine, stand-ins into `.grad`, marks, counts.

    grad_offload   row on the host: gradient to the engine, `.grad` becomes a stand-in
                   row updated on the device, or `.grad` already a real tensor: gradient added to the real `.grad`
                   a gradient that autograd takes elsewhere (torch.autograd.grad): kept for the graph to return
                   one of several parts of a backward, behind an earlier gradient: see `grad_parts`
    all_run        every node that a backward graph was compiled with has run: otherwise the compiler has dropped it

This runs on the thread that launches the GPU's work, which must stay ahead of it: a unit's rows are handled at once where they are alike.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import nn

from hytrain_fx.cost_model.measure import Mark, StepMarks
from hytrain_fx.errors import DroppedNodeError, UnsupportedError
from hytrain_fx.grad_destinations import NOWHERE_ELSE, Elsewhere
from hytrain_fx.grad_parts import BackwardParts
from hytrain_fx.grad_rows import RowGroup, like_parameter, norm_of_each
from hytrain_fx.grad_sources import HeldGradient, Norm, RowGradient, StandIns
from hytrain_fx.grad_standin import GradStandIn
from hytrain_fx.grad_state import GradState
from hytrain_fx.parameters import ParameterTable
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.states import StateStore
from hytrain_fx.torch_private import get_grad, private_function, set_grad, without_torch_function

_foreach_copy_: Final = private_function("_foreach_copy_")


class SessionNodes:
    """Implements `ops.StepNodes` for one session."""

    def __init__(self, table: ParameterTable, engine: Engine, states: StateStore, marks: StepMarks) -> None:
        self.table = table
        self._forms = [(p.shape, p.stride(), p.dtype) for p in table.parameters]  # of gradients in slots, whatever becomes of the model
        self.runs: Counter[str] = Counter()  # how often each kind of node ran, in rows
        self.generation = [0] * len(table)
        self.consumed: set[int] = set()  # rows whose gradient was used by step() and whose slot is no longer it
        self.norms_wanted: set[Norm] = set()
        self.held: dict[int, torch.Tensor] = {}  # gradients that an update on the device still reads
        self.graph_rows: dict[int, frozenset[int]] = {}  # rows that each backward graph offloads
        self.unit_of: list[int] = [0] * len(table)
        self.standins = StandIns()
        self.parts = BackwardParts(self.end_sums)
        self.on_sent: Callable[[Sequence[int]], None] = _nobody_waits  # with rows whose gradients are on their way to their slots
        self._engine = engine
        self._states = states
        self._marks = marks
        self._groups: dict[tuple[int, ...], RowGroup] = {}
        self._offloaded: set[int] = set()
        self._own: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # real gradients made here, with their version
        self._fresh: dict[int, GradState] = {}  # stand-ins that autograd has not yet looked at in this backward
        self._elsewhere = NOWHERE_ELSE
        self._returned: dict[int, torch.Tensor] = {}
        self._slot_dtypes: dict[int, torch.dtype] = {}  # of gradients in slots, of rows with copies

    # ---- the nodes ----

    def grad_offload(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """Take the gradients of `rows`, in the parameters' shapes, from buffers that die after this call."""
        self._marks.mark(Mark.GRADS, self.unit_of[rows[0]])
        self._offloaded.update(rows)
        self.runs["grad_offload"] += len(rows)
        group = self._group(rows)
        group.place(self._states.placement)
        if self._elsewhere:
            rows, grads = self._keep_returned(rows, grads)
            group = self._group(rows)
            group.place(self._states.placement)
        again = self.parts.arrive(rows)
        with without_torch_function():
            if not self.parts.open and group.fits(grads) and all(grad is None for grad in map(get_grad, group.parameters)):
                self._take_first(group, grads)
            else:
                with torch.no_grad():
                    self._take_each(group, grads, again)

    def cpu_step(self, rows: Sequence[int]) -> None:
        """Arm the CPU update of rows placed on the host."""
        group = self._group(rows)
        if group.on_host:
            self._engine.arm_cpu(group.rows)
        self.runs["cpu_step"] += len(rows)

    def gpu_step(self, rows: Sequence[int]) -> None:
        """Arm the update on the device of rows placed there."""
        group = self._group(rows)
        if group.on_device:
            self._engine.arm_gpu(group.rows)
        self.runs["gpu_step"] += len(rows)

    def reload(self, rows: Sequence[int]) -> None:
        """Arm the copy of the new weights of rows placed on the host."""
        group = self._group(rows)
        if group.on_host:
            self._engine.arm_reload(group.rows)
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
        if self.held:
            self._let_go(rows)
        self._marks.mark(Mark.WAIT_END, unit)
        self.runs["wait"] += len(rows)

    # ---- around one run of a backward graph ----

    @contextmanager
    def all_run(self, graph: int) -> Iterator[None]:
        """Around one run of a compiled backward graph. Raises DroppedNodeError where it ends and fewer rows were counted than it offloads.

        Releases are not counted: `step()` makes up for one that is lost.
        """
        before = self.runs.copy()
        self._offloaded.clear()  # by a graph that ended in an error
        self._fresh.clear()
        yield
        rows = len(self.graph_rows[graph])
        for kind in ("grad_offload", "cpu_step", "gpu_step", "reload", "backward_end"):
            ran, expected = self.runs[kind] - before[kind], min(rows, 1) if kind == "backward_end" else rows
            if ran < expected:
                raise DroppedNodeError(
                    f"backward graph {graph} ran {kind} for {ran} rows, expected {expected}; an inserted node was dropped by the compiler: "
                    "please report this with the torch version"
                )

    @contextmanager
    def returning(self, elsewhere: Elsewhere) -> Iterator[dict[int, torch.Tensor]]:
        """Meanwhile these gradients do not go to `.grad`; gives those that the graph shall return, as they come."""
        self._elsewhere = elsewhere
        try:
            yield self._returned
        finally:
            self._elsewhere = NOWHERE_ELSE
            self._returned = {}

    # ---- gradients at hand ----

    def name(self, row: int) -> str:
        """The parameter's name."""
        return self.table.names[row]

    def fetch(self, row: int) -> torch.Tensor:
        """The gradient in the slot of `row`, brought back to the device."""
        shape, strides, dtype = self._forms[row]
        gradient = torch.empty_strided(shape, strides, dtype=self._slot_dtypes.get(row, dtype), device=self.table.device)
        self._engine.fetch(row, gradient)
        return gradient.to(dtype)  # one that came in bf16 is an fp32 one all the same

    def offload_real(self, row: int, grad: torch.Tensor) -> None:
        """Offload a real `.grad` at `step()`: it came from outside the graphs, or user code has changed it."""
        self._offload([row], [like_parameter(grad, self.table.parameters[row], copy=False)])
        self._engine.arm_cpu([row])
        self._engine.arm_reload([row])

    def is_eager(self, row: int) -> bool:
        """Whether the row's present `.grad` has a part that did not come from the graphs. Asked when autograd has added what it has."""
        state = self._fresh.pop(row, None)
        if state is not None:
            return state.real is not None  # added to a stand-in, it brings the real gradient back
        with without_torch_function():
            grad = get_grad(self.table.parameters[row])
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
        return like_parameter(grad, self.table.parameters[row], copy=not own)

    def hold(self, row: int, grad: torch.Tensor) -> None:
        """Keep `grad` until its update has run; where it is the row's `.grad`, user code finds a stand-in of it there instead."""
        self.held[row] = grad
        parameter = self.table.parameters[row]
        if get_grad(parameter) is grad:
            standin = self.standins.make(row, parameter, HeldGradient(self._engine, row, grad))
            self.standins.lend(row, standin)
            set_grad(parameter, standin)

    def let_go_of_all(self) -> None:
        """No update is running: nothing reads the gradients that are held."""
        self._let_go(list(self.held))

    def is_untouched(self, row: int, grad: torch.Tensor) -> bool:
        """Whether this real gradient was made by the graphs and not edited since."""
        made, version = self._own.get(row, (None, 0))
        return made is not None and made() is grad and version == grad._version

    def any_in_place(self) -> bool:
        """Whether a gradient that `step()` may yet take rests where the present placement has it: in a slot, or ready on the device."""
        with without_torch_function():
            found = [(row, grad) for row, grad in enumerate(map(get_grad, self.table.parameters)) if grad is not None]
            return any(is_in_slot(grad) if isinstance(grad, GradStandIn) else self.is_untouched(row, grad) for row, grad in found)

    def forget_forms(self) -> None:
        """Rows have got copies: their gradients come in another dtype."""
        self._groups.clear()

    def end_sums(self) -> None:
        """Add what came in a backward that has ended to the gradients that were there before it."""
        sums = dict(self.parts.open)
        self.parts.open.clear()
        with torch.no_grad(), without_torch_function():
            for row, of in sums.items():
                parameter = self.table.parameters[row]
                if parameter.grad is not None:
                    of.parts.add_(parameter.grad)
                parameter.grad = of.before
                self._take_late(row, of.parts)

    # ---- taking gradients ----

    def _take_late(self, row: int, grad: torch.Tensor) -> None:
        """A gradient that comes behind the nodes of its row."""
        group = self._group([row])
        group.place(self._states.placement)
        self._take_each(group, [grad], [row])
        self._own.pop(row, None)  # the events that the nodes have recorded do not cover it
        if group.on_host:
            self._engine.arm_cpu([row])
            self._engine.arm_reload([row])

    def _group(self, rows: Sequence[int]) -> RowGroup:
        key = tuple(rows)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = RowGroup.of(key, self.table, self._states.copies)
        return group

    def _keep_returned(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> tuple[list[int], list[torch.Tensor]]:
        """Copies of gradients that the graph shall return; the rows and gradients that go to `.grad` all the same."""
        of = self._elsewhere
        for row, grad in zip(rows, grads, strict=True):
            if row in of.returned:
                self._returned[row] = self._returned[row] + grad if row in self._returned else grad.clone()
        stay = [i for i, row in enumerate(rows) if row not in of.returned and row not in of.unwanted]
        return [rows[i] for i in stay], [grads[i] for i in stay]

    def _take_first(self, group: RowGroup, grads: Sequence[torch.Tensor]) -> None:
        """Gradients in the parameters' form, of rows that have none."""
        if not group.on_device:
            self._send(group.rows, group.parameters, grads)
            return
        self._keep_on_device(*group.picked(group.on_device, grads))
        if group.on_host:
            self._send(*group.picked(group.on_host, grads))

    def _take_each(self, group: RowGroup, grads: Sequence[torch.Tensor], again: Collection[int]) -> None:
        """Gradients of any form, added to what the rows have. `again`: rows whose `.grad` is of this backward."""
        new: list[int] = []
        given = list(grads)
        for i, row in enumerate(group.rows):
            self.require_strided(row, given[i])
            if row not in again and self._laid_aside(row, given[i]):
                continue
            given[i], is_new = self._add(row, given[i])
            if is_new:
                new.append(i)
        on_device = [i for i in new if i in group.on_device]
        if on_device:
            self._keep_on_device(*group.picked(on_device, given))
        on_host = [i for i in new if i in group.on_host]
        if on_host:
            laid_out = [like_parameter(g, p, copy=False) for g, p in zip(given, group.parameters, strict=True)]
            self._send(*group.picked(on_host, laid_out))

    def _laid_aside(self, row: int, grad: torch.Tensor) -> bool:
        """Whether this part waits for the end of the backward, because `.grad` is of an earlier one and more parts may come."""
        parameter = self.table.parameters[row]
        held = parameter.grad
        if held is None or not self.parts.may_get_more(row) or (isinstance(held, GradStandIn) and is_used(held)):
            return False
        self.parts.lay_aside(row, held, like_parameter(grad, parameter, copy=True))
        parameter.grad = None  # autograd puts there what comes from eager code
        return True

    def _add(self, row: int, grad: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Add a gradient to a real `.grad`, or to the one in the slot; the sum, and whether it has yet to be put somewhere."""
        parameter = self.table.parameters[row]
        if row in self.parts.open:
            self.parts.open[row].parts.add_(grad)
            return grad, False
        held = parameter.grad
        if isinstance(held, GradStandIn):
            if is_used(held):
                return grad, False  # step() has used it, so the sum cannot be known: `.grad` stays what says so to whoever asks
            if is_clean(held):
                return held.grad_state.source.fetch().add_(grad), True
            held = held.grad_state.materialize()
            parameter.grad = held
        if held is None:
            return grad, True
        ours = self.is_untouched(row, held)
        held.add_(grad)
        if ours:
            self._own[row] = (weakref.ref(held), held._version)
        return grad, False

    def _send(self, rows: Sequence[int], parameters: Sequence[nn.Parameter], grads: Sequence[torch.Tensor]) -> None:
        """Gradients in the parameters' form to their slots, stand-ins into `.grad`."""
        if not rows:
            return
        norms = [(norm, norm_of_each(grads, parameters, *norm)) for norm in self.norms_wanted]
        self._offload(rows, grads)
        make, fresh = self.standins.make, self._fresh
        for i, (row, parameter) in enumerate(zip(rows, parameters, strict=True)):
            own = {norm: values[i] for norm, values in norms} if norms else None
            parameter.grad = standin = make(row, parameter, RowGradient(self, row, own))
            fresh[row] = standin.grad_state
        self.on_sent(rows)

    def _offload(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        generation = self.generation
        for row in rows:
            generation[row] += 1
        if self.consumed:
            self.consumed.difference_update(rows)
        if self._states.copies:
            self._slot_dtypes.update((row, grad.dtype) for row, grad in zip(rows, grads, strict=True) if row in self._states.copies)
        self._engine.grad_offload(rows, grads)

    def _keep_on_device(self, rows: Sequence[int], parameters: Sequence[nn.Parameter], grads: Sequence[torch.Tensor]) -> None:
        """Copies into `.grad`, in one launch."""
        kept = list(map(torch.empty_like, parameters))
        _foreach_copy_(kept, grads)
        for row, parameter, grad in zip(rows, parameters, kept, strict=True):
            parameter.grad = grad
            self._own[row] = (weakref.ref(grad), grad._version)

    def _let_go(self, rows: Sequence[int]) -> None:
        with without_torch_function():
            for row in rows:
                if self.held.pop(row, None) is not None:
                    self.standins.end_loan(row)


def _nobody_waits(rows: Sequence[int]) -> None:
    return None


def is_in_slot(standin: GradStandIn) -> bool:
    """Whether the values are in the row's slot, so that an update on the host finds them there."""
    state = standin.grad_state
    return state.real is None and type(state.source) is RowGradient and state.source.is_live()


def is_used(standin: GradStandIn) -> bool:
    """Whether step() has used the gradient, so that its values are gone."""
    return standin.materialized is None and not standin.grad_state.source.is_live()


def is_clean(standin: GradStandIn) -> bool:
    """Whether the stand-in's values are those in the slot."""
    return standin.materialized is None and not standin.factors and not standin.zeroed
