"""`share`: a batch in the loop, as a part for the device and one for the CPU.

    for part in hytrain_fx.share(batch, model):
        loss = loss_fn(part.model(part.batch["x"]), part.batch["y"])     a mean over the part
        (part.weight * loss).backward()
    optimizer.step()

The device's part comes first: its work is launched, and runs while the loop trains the CPU's part
on its own thread. Then the CPU's gradients are added to the device's, as a second backward's are.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.gradients.on_host import add_in_slots
from hytrain_fx.runtime.affinity import threads_on
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.runtime.topology import read_topology
from hytrain_fx.runtime.training_threads import move_team, training_cpus
from hytrain_fx.session import open_share
from hytrain_fx.session.call_gate import CallGate
from hytrain_fx.session.session import Session
from hytrain_fx.sharing.batches import Weigh, counted, moved, part_of, require_even, sequences_of
from hytrain_fx.sharing.control import ShareControl, SharedStep
from hytrain_fx.sharing.cpu_copy import CpuCopy
from hytrain_fx.sharing.placing import SharePlacing
from hytrain_fx.sharing.spans import DeviceSpan
from hytrain_fx.torch_private.modules import compiled_call
from hytrain_fx.torch_private.tensors import without_torch_function

_CPU: Final = torch.device("cpu")
_MOST_STEPS_UNPLANNED: Final = 40  # a loop whose times cannot be measured has no plan to wait for
_MOST_PENDING: Final = 64  # batches of whose times the device has not told yet


@dataclass(frozen=True)
class BatchPart:
    """A part of a batch, and what to train it with.

    model    the compiled model, or its copy on the CPU: called in the same way
    batch    the part, in the batch's structure, on `device`
    weight   its share of the batch in a mean: `(part.weight * loss).backward()`. A loss that is a
             sum needs none
    device   where the part is trained
    """

    model: Any
    batch: Any
    weight: float
    device: torch.device


def share(batch: Any, model: nn.Module, *, weigh: Weigh | None = None) -> Iterator[BatchPart]:
    """The parts of a batch: the device's first, then the CPU's where it trains a share.

    How large that is `compile(..., cpu_share=...)` says. With 0 the batch comes whole, on the
    model's device, so the loop stays as it is. Run the loop to its end before `step()`: half of a
    batch is an error there, unless zero_grad() drops it. Let nothing in it wait for the device
    (`loss.item()`): the CPU's part would begin after the device's.

    batch   on the CPU: a tensor, or tuples, lists and dicts of tensors, all as long in dimension 0
    weigh   how much a part counts in the loss's mean, for batches with masks or labels that are
            left out; None: each sequence alike

    Raises UnsupportedError for a model that is not compiled, a batch that cannot be split or counts
    unevenly, and where a forward writes buffers.
    """
    gate = compiled_call(model) if isinstance(model, nn.Module) else None
    if not isinstance(gate, CallGate):
        raise UnsupportedError(f"this {type(model).__name__} is not compiled with hytrain_fx.compile()")
    return _shared(gate).parts(batch, model, weigh)


class SharedTraining:
    """What `share` keeps of one compiled model.

    control   decides how large the share is
    copy      the model on the CPU, None before it has trained
    cpus      of another socket than the GPU's, which the CPU's part is trained on; None: all
    """

    def __init__(self, session: Session) -> None:
        self._placing = SharePlacing(session.planning)
        self.control = ShareControl(session.config.cpu_share, self._placing.solved)
        self._session = weakref.ref(session)
        self.copy: CpuCopy | None = None
        self._pending: deque[tuple[DeviceSpan, SharedStep]] = deque(maxlen=_MOST_PENDING)
        self.cpus: frozenset[int] | None = None
        self._moved_for = 0  # threads of torch that were moved there
        self._last_begin_s: float | None = None

    def parts(self, batch: Any, model: nn.Module, weigh: Weigh | None) -> Iterator[BatchPart]:
        """The parts of one batch."""
        session = self._session()
        assert session is not None  # the model's gate has it
        device = session.table.device
        if session.config.cpu_share == 0 or not torch.is_grad_enabled():
            yield BatchPart(model, moved(batch, device), 1.0, device)
            return
        sequences = sequences_of(batch)
        self._learn(session)
        if not self.control.may_share:
            self.copy = None  # it may have memory for every weight
        by_cpu = self.control.by_cpu(sequences)
        lengths = [sequences - by_cpu, by_cpu]
        halves = [part_of(batch, 0, lengths[0]), part_of(batch, lengths[0], sequences)]
        if weigh is None and self.control.may_share:
            require_even(batch)
        weights = counted(halves, lengths, weigh) if by_cpu else [1.0, 0.0]
        if not all(weights):  # one of them counts nothing, and its mean would be 0 / 0
            halves, weights, by_cpu = [batch], [1.0, 0.0], 0
        if by_cpu:
            yield from self._in_two(session, model, halves, weights, lengths)
            return
        open_share.require_none(session, "share()")
        begin_s, span = time.perf_counter(), DeviceSpan(device)
        span.begin()
        yield BatchPart(model, moved(halves[0], device), weights[0], device)
        span.end()
        self._ended(begin_s, span, SharedStep(sequences, 0, 0.0, 0.0, 0.0, 0.0, 0.0))

    def _in_two(
        self, session: Session, model: nn.Module, halves: Sequence[Any], weights: Sequence[float], lengths: Sequence[int]
    ) -> Iterator[BatchPart]:
        """The device's part, then the CPU's, whose gradients are added. `lengths`: sequences."""
        device = session.table.device
        begin_s, span = time.perf_counter(), DeviceSpan(device)
        opened = open_share.begin(session)
        try:
            session.eager.follow_safely()
            written = session.eager.not_followed()  # not later: that is read on the device, after all that is launched
            span.begin()
            yield BatchPart(model, moved(halves[0], device), weights[0], device)
            span.end()
            ours = self._prepared(session, model, span, written)
            cpu_s = time.perf_counter()
            open_share.on_cpu(session, opened, ours.has_grads)
            with self._on_their_socket(session):
                yield BatchPart(ours.model, halves[1], weights[1], _CPU)
            done_s = time.perf_counter()
            open_share.require_both(session, opened)
            ours.require_unwritten(model)
            _join(session, ours)
            open_share.joined(opened)
        finally:
            open_share.left(opened)
        join_us = _us(done_s, time.perf_counter())
        self._ended(begin_s, span, SharedStep(sum(lengths), lengths[1], 0.0, _us(begin_s, cpu_s), _us(cpu_s, done_s), join_us, 0.0))

    def _ended(self, begin_s: float, span: DeviceSpan, step: SharedStep) -> None:
        self._pending.append((span, step))
        self._last_begin_s = begin_s

    def _prepared(self, session: Session, model: nn.Module, span: DeviceSpan, written: Collection[int]) -> CpuCopy:
        """The copy on the CPU, with the weights of the device's part and without gradients.

        `written`: rows that the loop has written to.
        """
        if self.copy is None:
            self.copy = CpuCopy(model, session.table, session.config.dynamic)
        deque(self.copy.take_grads(), maxlen=0)  # of a loop that ended in an error
        with session.turns.state, whole():
            session.drain()
            self.copy.refresh(model, session.states, span.begun, written)
        return self.copy

    @contextmanager
    def _on_their_socket(self, session: Session) -> Iterator[None]:
        """The calling thread and its team train on another socket than the GPU's, where they may.

        The team stays there. The calling thread, which launches the GPU's work, comes back.
        """
        threads = torch.get_num_threads()
        if self._moved_for != threads:
            topology = read_topology(session.table.device)
            self.cpus = None if topology is None else training_cpus(topology, session.engine.workers)
        if self.cpus is None:
            self._moved_for = threads
            yield
            return
        with threads_on(self.cpus):
            if self._moved_for != threads:
                move_team(self.cpus)
                self._moved_for = threads
            yield

    def _learn(self, session: Session) -> None:
        """Tell the controller of batches whose times are known by now, in their order."""
        if self._last_begin_s is not None and self._pending:
            span, step = self._pending[-1]
            self._pending[-1] = span, replace(step, step_us=_us(self._last_begin_s, time.perf_counter()))
            self._last_begin_s = None
        while self._pending and (device_us := self._pending[0][0].us()) is not None:
            _, step = self._pending.popleft()
            if not session.planning.awaits_times or session.steps_done > _MOST_STEPS_UNPLANNED + session.planning.steps_to_measure:
                self.control.saw(replace(step, device_us=device_us))
        if session.config.cpu_share == "auto":
            self._placing.hold(self.control.holds_states)


def _join(session: Session, ours: CpuCopy) -> None:
    """Add the copy's gradients to the device's, as those of a second backward.

    In the slots on the host, where they are; others on the device.
    """
    gradients, device = session.nodes.gradients, session.table.device
    with session.turns.state, whole(), torch.no_grad(), without_torch_function():
        rest = add_in_slots(gradients, session.states, session.engine, dict(ours.take_grads()))
        if rest:
            gradients.take_late(list(rest), [grad.to(device) for grad in rest.values()])


def _us(begin_s: float, end_s: float) -> float:
    return (end_s - begin_s) * 1e6


_OF_GATES: Final[weakref.WeakKeyDictionary[CallGate, SharedTraining]] = weakref.WeakKeyDictionary()


def _shared(gate: CallGate) -> SharedTraining:
    if gate not in _OF_GATES:
        _OF_GATES[gate] = SharedTraining(gate.session)
    return _OF_GATES[gate]


def training_of(session: Session) -> SharedTraining:
    """What `share`, which was called before, keeps of the model of this session."""
    return next(of for gate, of in _OF_GATES.items() if gate.session is session)


def share_in_words(session: Session) -> tuple[str, ...]:
    """What `explain` says of the CPU's share, in sentences; nothing where none is asked for."""
    if session.config.cpu_share == 0:
        return ()
    if all(gate.session is not session for gate in _OF_GATES):
        return ("cpu_share: no batch has gone through hytrain_fx.share(batch, model) yet",)
    of = training_of(session)
    moved_to = () if of.cpus is None else (f"the CPU's share is trained on {len(of.cpus)} logical CPUs of another socket than the GPU's",)
    return (of.control.in_words(), *moved_to)
