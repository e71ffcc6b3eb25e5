"""What the torch engine knows of one row, and the steps from one phase to the next.

    IDLE --gradient--> GRAD --commit--> PENDING --wait--> IDLE
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import torch

from hytrain_fx.errors import DroppedNodeError, EngineError
from hytrain_fx.ir.limits import CHUNK_PARAMS
from hytrain_fx.runtime.engine import CommitItem, RowSpec, RowStates, RowStep
from hytrain_fx.runtime.fallback.lanes import Event
from hytrain_fx.runtime.scalars import UpdateScalars
from hytrain_fx.runtime.states.pieces import flat_alias
from hytrain_fx.runtime.states.slabs import padded_bytes


class Phase(Enum):
    """Where a row is in its step."""

    IDLE = auto()
    GRAD = auto()
    PENDING = auto()


@dataclass(slots=True)
class Chunk:
    """A range of one row's parameters: copied whole, updated from `begin` up to `updated_to`."""

    begin: int
    end: int
    updated_to: int = 0
    landed: bool = False
    queued: bool = False


@dataclass(slots=True, eq=False)
class Row:
    """One row. `weight` is flat.

    `factors` are host numbers, or 0-dim host tensors that a copy fills, known from `factors_known`
    on.
    """

    index: int
    unit: int
    weight: torch.Tensor
    chunks: list[Chunk]
    states: RowStates | None = None
    on_host: bool = False
    phase: Phase = Phase.IDLE
    generation: int = 0
    armed_cpu: bool = False
    armed_reload: bool = False
    landing: Event | None = None  # the gradient is in its slot
    ready: Event | None = None  # the gradient is made, for a row on the device
    released: Event | None = None  # the weight has been read for the last time
    written: Event | None = None  # the new weight is on the device
    commit: int = 0  # number of the last
    issued: int = 0  # chunks of the new weight that are on their way
    scalars: UpdateScalars | None = None
    step: RowStep | None = None  # in their place, of whole tensors
    factors: tuple[float | torch.Tensor, ...] = ()
    factors_known: bool = True
    grad: torch.Tensor | None = None  # what an update on the device reads
    replaced: object = None  # states that it may replace; the compute stream may have allocated them
    name: str = ""
    busy_us: float = 0.0
    last_busy_us: float = 0.0

    @classmethod
    def of(cls, index: int, spec: RowSpec) -> Row:
        """A row of the table, not placed yet."""
        ranges = ((begin, min(begin + CHUNK_PARAMS, spec.numel)) for begin in range(0, spec.numel, CHUNK_PARAMS))
        return cls(index, spec.unit, flat_alias(spec.weight), [Chunk(begin, end) for begin, end in ranges], name=spec.name)

    @property
    def narrow(self) -> bool:
        """Whether the weight is of 16 bits and comes back from `RowStates.out`.

        An fp32 weight comes from its master.
        """
        return self.weight.dtype != torch.float32

    def place(self, states: RowStates, *, on_host: bool) -> None:
        """Rest the states here from now on. Raises EngineError in the middle of a step."""
        if self.phase is not Phase.IDLE:
            raise EngineError(f"row {self.index} is moved while in use")
        self.generation += 1  # a dropped gradient of the old place may yet be noted as landed
        self.landing = None
        self.states = states.changed(flat_alias)
        self.on_host = on_host

    def set_weight(self, weight: torch.Tensor) -> None:
        """Write new weights to this memory from now on.

        Raises EngineError while an update is in flight.
        """
        if self.phase is Phase.PENDING:
            raise EngineError(f"row {self.index} is given other memory while its update is in flight")
        self.weight = flat_alias(weight)

    def placed_states(self) -> RowStates:
        """The states. Raises EngineError for a row that has none."""
        if self.states is None:
            raise EngineError(f"row {self.index} is not placed anywhere")
        return self.states

    def landed_gradient(self) -> tuple[Event, torch.Tensor]:
        """When the gradient is in its slot, and the slot.

        Raises EngineError where there is none.
        """
        slot = self.placed_states().slot
        if not self.on_host or self.landing is None or slot is None:
            raise EngineError(f"row {self.index} has no gradient to bring back")
        return self.landing, slot

    def begin_gradient(self) -> None:
        """A new gradient is about to be copied.

        Raises EngineError where the last update has not been waited for.
        """
        if self.states is None or not self.on_host:
            raise EngineError(f"row {self.index} offloads a gradient but is not placed on the host")
        if self.phase is Phase.PENDING:
            raise EngineError(f"row {self.index} has a new gradient while its last update is in flight: its wait node did not run")
        self.phase = Phase.GRAD
        self.generation += 1
        self.armed_cpu = self.armed_reload = False
        self.issued = 0
        for chunk in self.chunks:
            chunk.updated_to, chunk.landed, chunk.queued = chunk.begin, False, False

    def require_commit(self, item: CommitItem) -> None:
        """Raises EngineError where `item` cannot be committed.

        DroppedNodeError where a node before it did not run.
        """
        if self.phase is Phase.PENDING:
            raise EngineError(f"row {self.index} is committed while its last update is in flight")
        if not self.on_host:
            if item.grad is None:
                raise EngineError(f"row {self.index} is placed on the device and is committed without its gradient")
            if item.factors:
                raise EngineError(f"row {self.index} is placed on the device: factors must have been applied to its gradient")
            return
        if self.phase is not Phase.GRAD:
            raise EngineError(f"row {self.index} is committed without a gradient")
        for ran, name in ((self.armed_cpu, "cpu_step"), (self.armed_reload, "reload")):
            if not ran:
                raise DroppedNodeError(f"dropped node: row {self.index} was offloaded but its {name} node did not run")

    def begin_update(self, item: CommitItem, factors: tuple[float | torch.Tensor, ...] = ()) -> None:
        """Fix the hyper-parameters of the update."""
        self.phase = Phase.PENDING
        self.commit += 1
        self.scalars, self.step = item.scalars, item.step
        self.factors = factors
        self.factors_known = not any(isinstance(factor, torch.Tensor) for factor in factors)
        self.busy_us = 0.0

    def finish(self) -> None:
        """The new weight has been waited for."""
        self.phase = Phase.IDLE
        self.released = self.ready = self.grad = self.step = self.replaced = None

    def scalars_with_factors(self) -> UpdateScalars:
        """The scalars of the update, factors filled in; those must be known."""
        assert self.scalars is not None
        return replace(self.scalars, factors=self.known_factors()) if self.factors else self.scalars

    def known_factors(self) -> tuple[float, ...]:
        """The factors as numbers; they must be known."""
        return tuple(float(factor) for factor in self.factors)

    def ready_chunks(self) -> list[int]:
        """Chunks that an update can begin with, none of which is queued.

        One stands for all where whole tensors are updated.
        """
        if self.step is not None:
            return [0] if not self.chunks[0].queued and all(chunk.landed for chunk in self.chunks) else []
        return [number for number, chunk in enumerate(self.chunks) if chunk.landed and not chunk.queued]


@dataclass(frozen=True, slots=True)
class Landing:
    """Something on its way to the host.

    A chunk of a gradient, or with row -1 the factors of a commit.
    """

    event: Event
    row: int = -1
    chunk: int = 0
    generation: int = 0
    begin: Event | None = None
    keep: Sequence[torch.Tensor] = field(default=())  # memory that the copy reads
    waiting: Sequence[int] = ()  # rows whose updates need these factors


def places_in(memory: torch.Tensor, slots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Where in dense memory copies of flat `slots` go: one after the other, padded to 64 bytes.

    Raises EngineError if they do not fit.
    """
    places, found, end = flat_alias(memory).view(torch.uint8), [], 0
    for slot in slots:
        if end + slot.nbytes > places.numel():
            raise EngineError(f"gradients of {end + slot.nbytes} bytes or more do not fit in the {places.numel()} bytes given for them")
        found.append(places[end : end + slot.nbytes].view(slot.dtype))
        end += padded_bytes(slot.nbytes)
    return found


def update_in_parts(states: RowStates, grad: torch.Tensor, weight: torch.Tensor | None, scalars: UpdateScalars) -> None:
    """The update of states, gradient and weight of one length, a chunk at a time.

    Its temporaries take ten times a part's gradient.
    """
    for begin in range(0, grad.numel(), CHUNK_PARAMS):
        end = begin + CHUNK_PARAMS
        states.part(begin, end).update_(scalars, grad[begin:end], None if weight is None else weight[begin:end])
