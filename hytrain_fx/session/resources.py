"""What a session takes: memory by tier, time until full speed.

Told in the log `hytrain_fx` (level INFO) and kept for `explain`.

    before states are allocated or moved    the estimate is told
    states are allocated or moved           within the limits of the options; the engine is lent
                                            what they leave of the device's memory
    after the first full-speed step         the estimate is told beside what is in use, and the
                                            start-up by phase
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.config import Config
from hytrain_fx.ir.limits import FP32_BYTES
from hytrain_fx.ir.plan import PlacedPiece, Placement, whole_on_cpu
from hytrain_fx.ir.startup import Phase, StartupClock
from hytrain_fx.ir.states import Kernel
from hytrain_fx.loading.first_weights import FirstWeights
from hytrain_fx.runtime.energy import EnergyTotals, meter_of
from hytrain_fx.runtime.engine import Engine, RowStates
from hytrain_fx.runtime.launch import ring_bytes_for
from hytrain_fx.runtime.rank_errors import told_to_ranks
from hytrain_fx.runtime.ranks import Ranks
from hytrain_fx.runtime.states.memory_estimate import MemoryEstimate, MemoryInUse, RowSize, estimate_memory
from hytrain_fx.runtime.states.slabs import HostSlab, padded_bytes
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.session.startup_text import estimate_text, memory_table, startup_text
from hytrain_fx.weights.streamed_weights import StreamedWeights

_log = logging.getLogger("hytrain_fx")


@dataclass(frozen=True, slots=True)
class Tiers:
    """Bytes of states on each tier, and the share of the parameters by placement.

    On the host slots for gradients and new weights are included.
    """

    device_bytes: int
    host_bytes: int
    shares: Mapping[Placement, float]


class Resources:
    """Memory and time of one session: its optimizer states and the engine's ring.

    streamed   the session's weights that rest elsewhere, None where none are to
    """

    def __init__(
        self, states: StateStore, table: ParameterTable, engine: Engine, config: Config, clock: StartupClock
    ) -> None:
        self._clock = clock
        self._states = states
        self._device = table.device
        homes = ((table.parameters[row], table.homes[row]) for row in table.shards)
        self._elsewhere_bytes = sum(whole.nbytes - home.nbytes for whole, home in homes)  # of weights that other ranks update
        self._engine = engine
        self._limit_bytes = config.host_memory
        self._first = config.loader if isinstance(config.loader, FirstWeights) else None
        self._parameters = table.parameters
        self._shards = table.shards if config.shards else {}
        self._rests_on_host = config.on_host
        self.streamed: StreamedWeights | None = None
        self._ring_bytes = partial(ring_bytes_for, table.homes, config)
        self._makes_own = any(states.table(parameter).kernel is Kernel.NONE for parameter in range(len(table)))
        self._known: tuple[tuple[int, int, int], Tiers] | None = None
        self._energy: EnergyTotals | None = None

    # ---- taking it ----

    def allocate(self, where: Callable[[], Sequence[PlacedPiece]], ranks: Ranks | None) -> None:
        """Allocate all states where they are to rest, which is asked for here.

        ranks   of all of them none takes memory before each has asked: what a rank has taken, a
                later one would not find. They are to compare what they read of first weights, when
                all have

        Raises what `where` does, HostMemoryError, and what the source of first weights raises.
        """
        with told_to_ranks("compile()", lambda: ranks):
            placed = where()
        if ranks:
            ranks.tell("where states are to rest", ())
        self.announce(placed)
        compare = ranks if self.first_rows else None
        with self._clock.phase(Phase.MASTERS), told_to_ranks("its loader", lambda: compare):
            if self._first is not None:
                self._settle(self._first, placed)
            self._states.allocate(placed, self._limit_bytes, self._first_weight)
        self._lend(placed)
        self._clock.pinned_bytes, pinning_us = pinning_of(self._states.slabs)
        self._clock.reassign(Phase.MASTERS, Phase.HOST_MEMORY, pinning_us)

    def _settle(self, first: FirstWeights, placed: Sequence[PlacedPiece]) -> None:
        """Weights that rest on the device are there, or their shards, before masters are made."""
        waiting = whole_on_cpu(placed) if self._rests_on_host else set()
        for row in self.first_rows:
            if row in waiting and (row in self._shards or not self._shards):
                continue  # its home is its master
            if row in self._shards:
                self._states.shard_first(row, first(self._parameters[row]))
            else:
                first.settle(self._parameters[row])
                self._states.pieces.set_weight(row, self._parameters[row].detach())

    def _first_weight(self, row: int) -> torch.Tensor | None:
        number = self._states.pieces.parameter(row)
        if self._first is None or self._parameters[number] not in self._first or number in self._states.streamed:
            return None
        return self._states.pieces.memory(number, self._first(self._parameters[number]))

    @property
    def first_told(self) -> tuple[str, ...]:
        """What this rank has read of first weights, for the others to compare."""
        return self._first.told if self._first is not None else ()

    @property
    def first_rows(self) -> list[int]:
        """Rows of a weight that rests elsewhere, and that the parameter does not have."""
        first = self._first
        return [] if first is None else [row for row, parameter in enumerate(self._parameters) if parameter in first]

    def move(self, placed: Sequence[PlacedPiece]) -> None:
        """Move the states to where these pieces are to rest. Raises what `StateStore.move` does."""
        with self._clock.phase(Phase.MOVE):
            self._states.move(placed, self._limit_bytes)
        self._lend(placed)

    def _lend(self, placed: Sequence[PlacedPiece]) -> None:
        """What streaming does not need of the device's memory is lent to gradients on their way."""
        streams = _streams(placed)
        self._engine.set_transit(self._ring_bytes(streams), streams)

    # ---- telling of it ----

    def _sizes(self, placed: Sequence[PlacedPiece]) -> list[RowSize]:
        cut = {of.piece.parameter for of in placed if of.piece.begin}
        forms = ((of, self._states.form_of(of.piece)) for of in placed)
        return [RowSize(form.numel, form.dtype.itemsize, form.table, form.copied, form.out_bytes,
                        of.placement.updates_on_cpu and of.piece.parameter in cut) for of, form in forms]

    def estimate(self, placed: Sequence[PlacedPiece]) -> MemoryEstimate:
        """Bytes by tier under this placement."""
        placement = [of.placement for of in placed]
        ring_bytes = self._ring_bytes(_streams(placed))
        found = estimate_memory(self._sizes(placed), placement, ring_bytes=ring_bytes, pinned=self._device.type == "cuda")
        streamed_bytes, slot_bytes = self.streamed.under(placed) if self.streamed is not None else (0, 0)
        weights_bytes = found.weights_bytes + self._elsewhere_bytes - streamed_bytes
        return replace(found, weights_bytes=weights_bytes, weight_slots_bytes=slot_bytes)

    def announce(self, placed: Sequence[PlacedPiece]) -> None:
        """Say what states will take, before they are allocated or moved."""
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s", estimate_text(self.estimate(placed)))

    def in_use(self, shadow_bytes: int = 0) -> MemoryInUse:
        """What the tensors of the states take now, beside the estimate for their placement.

        `shadow_bytes`: as there.
        """
        placed = self._states.placed
        estimate, tiers = self.estimate(placed), self._tiers(placed)
        slabs = self._states.slabs
        away_bytes, slot_bytes = (self.streamed.away_bytes, self.streamed.units.slot_bytes) if self.streamed is not None else (0, 0)
        return MemoryInUse(
            device_states_bytes=tiers.device_bytes,
            host_bytes=tiers.host_bytes,
            ring_bytes=estimate.ring_bytes,
            device_peak_bytes=torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None,
            weights_bytes=sum(size.weight_bytes for size in self._sizes(placed)) + self._elsewhere_bytes - away_bytes,
            staging_bytes=estimate.staging_bytes,
            pinned_bytes=sum(slab.nbytes for slab in slabs if slab.pinning is not None),
            unpinned_bytes=sum(slab.nbytes for slab in slabs if slab.unpinned is not None),
            shadow_bytes=shadow_bytes,
            estimate=estimate,
            weight_slots_bytes=slot_bytes,
        )

    def tiers(self) -> Tiers:
        """The same sums for every step: looked up where no state has come, gone or moved."""
        made = sum(of.own is not None and of.own.entry is not None for _, of in self._states) if self._makes_own else 0
        key = (self._states.arrangement, len(self._states.copies), made)
        if self._known is None or self._known[0] != key:
            self._known = (key, self._tiers(self._states.placed))
        return self._known[1]

    def _tiers(self, placed: Sequence[PlacedPiece]) -> Tiers:
        rows = [(states, of) for (_, states), of in zip(self._states, placed, strict=True)]
        device_bytes = sum(nbytes for states, of in rows if of.placement.rests_on_device for nbytes in _sizes(states))
        device_bytes -= sum(size.weight_bytes for size, of in zip(self._sizes(placed), placed, strict=True)
                            if of.placement.rests_on_device and size.itemsize == FP32_BYTES)
        host_bytes = sum(padded_bytes(nbytes) for states, of in rows if not of.placement.rests_on_device for nbytes in _sizes(states))
        params = {place: sum(of.piece.numel for of in placed if of.placement is place) for place in Placement}
        return Tiers(device_bytes, host_bytes, {place: count / max(sum(params.values()), 1) for place, count in params.items()})

    def joules(self) -> dict[str, float]:
        """Energy by tier ("gpu", "cpu") since this was first asked.

        Without a tier that is not counted.
        """
        if self._energy is None:
            self._energy = EnergyTotals(meter_of(self._device))
        return self._energy.joules()

    def full_speed(self) -> None:
        """Say what start-up took and what is in use now."""
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s\n\n%s", startup_text(self._clock.report()), memory_table(self.in_use()).text())


def _streams(placed: Sequence[PlacedPiece]) -> bool:
    return any(of.placement.visits_device for of in placed)


def pinning_of(slabs: Iterable[HostSlab]) -> tuple[int, float]:
    """Bytes pinned and microseconds it took, over all batches that these slabs were pinned in."""
    batches = {id(slab.pinning): slab.pinning for slab in slabs if slab.pinning is not None}.values()
    return sum(batch.nbytes for batch in batches), sum(batch.populate_us + batch.register_us for batch in batches)


def _sizes(states: RowStates) -> list[int]:
    """Bytes of each piece of memory; the halves of a master are one."""
    master_bytes = states.master.nbytes + (0 if states.low is None else states.low.nbytes)
    others = (*states.states, states.slot, states.out)
    own_bytes = 0 if states.own is None else states.own.nbytes
    return [master_bytes, own_bytes, *(tensor.nbytes for tensor in others if tensor is not None)]
