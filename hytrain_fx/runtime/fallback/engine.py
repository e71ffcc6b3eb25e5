"""The engine in plain torch, for machines without a C++ compiler and without a wheel.

It has the rules of csrc/engine.h, three Python threads, no build.

    engine="torch"       updates by `arithmetic.adamw_`, op by op: the native engine's bits at about
                         a thirtieth of its speed
    engine="deepspeed"   updates on the host by DeepSpeedCPUAdam, on the device by `adamw_` too

Rows of other optimizers bring their step with them (`CommitItem.step`), which updates whole
tensors.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hytrain_fx.errors import EngineError
from hytrain_fx.runtime.engine import (
    CommitItem,
    EarlyCounts,
    FinishTimes,
    GuessCounts,
    RowSpec,
    RowStates,
    Stage,
    TaskRecord,
    engine_error,
    forked_error,
)
from hytrain_fx.runtime.fallback.gradient_copies import GradientCopies
from hytrain_fx.runtime.fallback.host_updates import host_update
from hytrain_fx.runtime.fallback.lanes import Event, Lane
from hytrain_fx.runtime.fallback.pipeline import LaneRecord, Pipeline
from hytrain_fx.runtime.fallback.rows import Phase, Row, update_in_parts
from hytrain_fx.runtime.own_states import leaves
from hytrain_fx.runtime.scalars import UpdateScalars
from hytrain_fx.runtime.states.pieces import flat_alias

_LANE_OF = {Stage.D2H: Lane.D2H, Stage.GPU_UPDATE: Lane.UPDATE, Stage.H2D: Lane.H2D}


class TorchEngine:
    """Implements `Engine`.

    device         the model's: CPU or CUDA
    ring_bytes  device memory for gradients on their way to the host
    timeout_s      after which a wait is an EngineError
    adam           "deepspeed", or anything else for the op-by-op update

    Raises ConfigError where deepspeed is asked for and not installed, EngineError where its
    DeepSpeedCPUAdam cannot be had.
    """

    library_origin: str | None = None
    workers = 1
    can_stream = False
    splits_masters = False
    can_skip = False
    takes_copies = False
    can_begin_early = False

    def __init__(self, device: torch.device, ring_bytes: int, timeout_s: float, adam: str = "torch") -> None:
        update = host_update(adam)
        self.name = update.name
        self._pipeline = Pipeline(device, timeout_s, update)
        self._lanes = self._pipeline.lanes
        try:
            self._copies = GradientCopies(self._pipeline, ring_bytes)
        except BaseException:
            self._pipeline.stop()  # an engine that cannot be made keeps no threads
            raise
        self._closed = False
        self._pid = os.getpid()

    @contextmanager
    def _locked(self, *, failures: bool = True) -> Iterator[Pipeline]:
        if self._forked:
            raise forked_error()
        with self._pipeline.lock:
            if self._closed:
                raise EngineError("this engine is closed: the model was closed with hytrain_fx.close(); compile it again to train on")
            try:
                if failures:
                    self._pipeline.throw_if_failed()
                yield self._pipeline
            except EngineError as error:
                raise engine_error(str(error), [row.name for row in self._pipeline.rows]) from error.__cause__

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def _row(self, index: int) -> Row:
        rows = self._pipeline.rows
        if not 0 <= index < len(rows):
            raise EngineError(f"row {index} is not in the table of {len(rows)} rows")
        return rows[index]

    # ---- the table of rows ----

    @property
    def rows(self) -> int:
        return len(self._pipeline.rows)

    def add_row(self, spec: RowSpec) -> int:
        with self._locked(failures=False) as pipeline:
            pipeline.rows.append(Row.of(len(pipeline.rows), spec))
            return len(pipeline.rows) - 1

    def set_unit(self, row: int, unit: int) -> None:
        if self._forked:
            return
        with self._locked(failures=False):
            self._row(row).unit = unit

    def set_weight(self, row: int, weight: torch.Tensor) -> None:
        with self._locked(failures=False):
            self._row(row).set_weight(weight)

    def _finish_landing(self, row: int) -> None:
        """Wait for gradients on their way to the slot or back: its memory is about to change."""
        for event in (self._row(row).landing, self._copies.last_fetch):
            if event is not None:
                event.sync()

    def use_copy(self, row: int, copy: torch.Tensor) -> None:
        raise EngineError(f"the {self.name} engine keeps no 16-bit copies of fp32 weights")

    def place_on_host(self, row: int, states: RowStates) -> None:
        self._finish_landing(row)
        with self._locked(failures=False) as pipeline:
            pipeline.update.require_supported(row, states)
            self._row(row).place(states, on_host=True)

    def place_on_device(self, row: int, states: RowStates) -> None:
        self._finish_landing(row)
        with self._locked(failures=False):
            self._row(row).place(states, on_host=False)

    def place_streamed(self, row: int, states: RowStates) -> None:
        raise EngineError(f"the {self.name} engine does not stream optimizer states; use engine='native', or stream=0.0")

    def retire(self, row: int) -> None:
        with self._locked(failures=False):
            self._row(row).states = None

    def send_weight(self, row: int, on: bool) -> None:
        raise EngineError(f"the {self.name} engine does not stream optimizer states")

    def set_transit(self, ring_bytes: int, streams: bool) -> None: ...  # it never streams, so what it has stays

    # ---- called by the nodes of the backward graph ----

    def grad_offload(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        with self._locked():
            for row in rows:
                self._row(row).begin_gradient()
        # Not under the lock: it may wait for memory. Only the launching thread changes a row in
        # this phase.
        with torch.no_grad():
            for row, grad in zip(rows, grads, strict=True):
                self._copies.send(self._row(row), flat_alias(grad))

    def keep_grads(self, kept: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for out, grad in zip(kept, grads, strict=True):
                out.copy_(grad)

    def arm_cpu(self, rows: Sequence[int]) -> None:
        with self._locked(failures=False) as pipeline:
            for row in map(self._row, rows):
                if row.on_host:
                    row.armed_cpu = True
                    pipeline.queue_ready(row)

    def arm_gpu(self, rows: Sequence[int]) -> None:
        with self._locked(failures=False):
            on_device = [row for row in map(self._row, rows) if not row.on_host]
            event = self._lanes.record_compute() if on_device else None
            for row in on_device:
                row.ready = event

    def arm_reload(self, rows: Sequence[int]) -> None:
        with self._locked(failures=False) as pipeline:
            for row in map(self._row, rows):
                row.armed_reload = True
            pipeline.reload_cv.notify()

    def release(self, rows: Sequence[int]) -> None:
        event = self._lanes.record_compute()
        with self._locked(failures=False) as pipeline:
            for row in map(self._row, rows):
                row.released = event
            pipeline.reload_cv.notify()

    # ---- called by step() ----

    def commit(self, items: Sequence[CommitItem]) -> None:
        end = self._lanes.record_compute()
        with self._locked() as pipeline, torch.no_grad():
            rows = [self._row(item.row) for item in items]
            for row, item in zip(rows, items, strict=True):
                row.require_commit(item)
            arriving = self._copies.send_factors(items, end)
            for row, item in zip(rows, items, strict=True):
                if item.at_end or row.released is None:
                    row.released = end
                if row.on_host:
                    row.begin_update(item, _host_factors(item.factors, arriving))
                    pipeline.queue_ready(row)
                else:
                    self._update_on_device(row, item, end)
            pipeline.reload_cv.notify()

    def _update_on_device(self, row: Row, item: CommitItem, end: Event) -> None:
        assert item.grad is not None
        assert row.released is not None
        self._lanes.wait(Lane.UPDATE, end if item.at_end or row.ready is None else row.ready)
        self._lanes.wait(Lane.UPDATE, row.released)
        begin = self._lanes.record(Lane.UPDATE) if self._pipeline.recording else None
        row.begin_update(item)
        row.grad = flat_alias(item.grad)
        states, grad, weight, scalars, step = row.placed_states(), row.grad, row.weight if row.narrow else None, item.scalars, item.step
        if step is None:
            self._lanes.run(Lane.UPDATE, lambda: update_in_parts(states, grad, weight, scalars))
        else:
            row.replaced = None if states.own is None else tuple(leaves(states.own.entry))
            self._lanes.run(Lane.UPDATE, lambda: step(states, grad, (), weight))
        row.written = self._lanes.record(Lane.UPDATE)
        row.issued = len(row.chunks)
        if begin is not None:
            self._pipeline.lane_records.append(LaneRecord(Stage.GPU_UPDATE, row.index, 0, begin, row.written))

    def commit_early(self, rows: tuple[int, ...], scalars: UpdateScalars, workers: int) -> None:
        raise EngineError(f"the {self.name} engine begins no update before step()")

    def commit_unless(self, items: Sequence[CommitItem], skip: torch.Tensor) -> None:
        raise EngineError(f"the {self.name} engine cannot leave out a step that is committed")

    def skipped(self) -> bool:
        return False

    def knows_skipped(self) -> bool:
        return True

    # ---- called by the wait nodes, by eager reads, by close ----

    def wait(self, rows: Sequence[int]) -> None:
        if self._forked:
            return  # nothing is in flight: all was settled before the fork
        for row in rows:
            written, read = self._finish(row, reads=True)
            if written is not None:
                self._lanes.compute_wait(written)
            del read  # only now may the compute stream's allocator hand its memory out again

    def settle(self, rows: Sequence[int]) -> None:
        self.drain(rows)

    def drain(self, rows: Sequence[int]) -> None:
        if self._forked or self._pipeline.is_own_thread():
            return  # the garbage collector ran here and ends the model: `close` drains, from another thread
        for row in rows:
            written, read = self._finish(row)
            if written is not None:
                written.sync()
            del read

    def _finish(self, index: int, *, reads: bool = False) -> tuple[Event | None, object]:
        """Wait until the new weight of a pending row is on its way.

        Returns the event of its arrival, and what its update reads.

        Of a row that is not pending the event too: another thread may have come here first, and
        still wait for it. `reads`: the compute stream is about to read the weight, so a release
        before this point is not its last one.
        """
        with self._locked() as pipeline:
            row = self._row(index)
            if reads and row.phase is not Phase.PENDING:
                row.released = None
            if row.phase is not Phase.PENDING:
                return row.written, None
            chunks, commit = len(row.chunks), row.commit

            def is_over() -> bool:
                return row.phase is not Phase.PENDING or row.commit != commit

            def is_issued() -> bool:
                return is_over() or row.issued == chunks or pipeline.failure is not None

            if not pipeline.issued_cv.wait_for(is_issued, pipeline.timeout_s):
                raise EngineError(
                    f"row {index}: {row.issued} of {chunks} chunks of its new weight were on their way after {pipeline.timeout_s} s"
                )
            pipeline.throw_if_failed()
            if is_over():
                return row.written, None
            read = (row.grad, row.replaced)
            row.finish()
            return row.written, read

    def fetch(self, rows: Sequence[int], out: torch.Tensor) -> int:
        with self._locked():
            landed = [self._row(row).landed_gradient() for row in rows]
        arrival = self._copies.bring(landed, out)
        with self._locked(failures=False):
            return self._copies.note_fetch(arrival)

    def fetched(self, fetch: int) -> None:
        with self._locked(failures=False):
            arrival = self._copies.take_fetch(fetch)
        self._lanes.compute_wait(arrival)

    def landed(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._finish_landing(row)

    def discard(self, rows: Sequence[int]) -> None:
        if self._forked:
            return
        with self._locked(failures=False):
            for row in map(self._row, rows):
                if row.phase is Phase.GRAD:
                    row.phase = Phase.IDLE

    def pending(self, row: int) -> bool:
        with self._locked(failures=False):
            return self._row(row).phase is Phase.PENDING

    def issued(self, rows: Sequence[int]) -> bool:
        return not any(map(self.pending, rows))

    # ---- measurement, tests, the end ----

    def record(self, on: bool) -> None:
        with self._locked(failures=False) as pipeline:
            pipeline.recording = on

    def take_records(self) -> list[TaskRecord]:
        with self._locked(failures=False) as pipeline:
            lanes, done = pipeline.lane_records, [lane.end.done() for lane in pipeline.lane_records]
            pipeline.lane_records = [lane for lane, is_done in zip(lanes, done, strict=True) if not is_done]
            taken, pipeline.records = pipeline.records, []
        if any(done):
            self._lanes.take_epoch()
        return taken + [lane.timed() for lane, is_done in zip(lanes, done, strict=True) if is_done]

    def guess_counts(self) -> GuessCounts:
        return GuessCounts()  # it waits for the factors

    def early_counts(self) -> EarlyCounts:
        return EarlyCounts()

    def finish_times(self) -> FinishTimes:
        return FinishTimes()  # it streams nothing

    def cpu_update_us(self, row: int) -> float:
        with self._locked(failures=False):
            return self._row(row).last_busy_us

    def set_delay(self, stage: Stage, mean_us: float) -> None:
        with self._locked(failures=False) as pipeline:
            if stage in _LANE_OF:
                self._lanes.set_delay(_LANE_OF[stage], mean_us)
            else:
                pipeline.delay_us[stage] = mean_us

    def fail_next_update(self, row: int) -> None:
        with self._locked(failures=False) as pipeline:
            pipeline.fail_row = row

    def close(self) -> None:
        if self._pipeline.is_own_thread():
            threading.Thread(target=self._drain_and_close, daemon=True).start()
            return
        with self._pipeline.lock:
            if self._closed:
                return
            self._closed = True
        self._pipeline.stop()
        self._copies.clear()
        self._pipeline.rows = []

    def _drain_and_close(self) -> None:
        try:
            self.drain(range(len(self._pipeline.rows)))
        finally:
            self.close()


def _host_factors(factors: Iterable[float | torch.Tensor], arriving: dict[int, torch.Tensor]) -> tuple[float | torch.Tensor, ...]:
    return tuple(arriving[id(factor)] if isinstance(factor, torch.Tensor) else factor for factor in factors)
