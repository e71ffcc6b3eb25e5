"""The three threads of the torch engine, each handing rows to the next under one lock.

    lander    the D2H event of a chunk has passed        -> landed
    worker    landed, committed, armed, factors known    -> updated    one grain at a time
    reloader  updated, armed, released                   -> issued     so many bytes in flight

Worker and reloader take the lowest unit first.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import torch

from hytrain_fx.errors import EngineError
from hytrain_fx.ir.limits import LONGEST_WAIT_S
from hytrain_fx.runtime.engine import Stage, TaskRecord
from hytrain_fx.runtime.fallback.host_updates import HostUpdate
from hytrain_fx.runtime.fallback.lanes import Event, Lane, copy, make_lanes, now_us, start_all
from hytrain_fx.runtime.fallback.rows import Landing, Phase, Row

Key = tuple[int, int, int]
"""Unit, row, chunk: the order in which work is due."""

# New weights on their way at once: enough to keep the link busy, few enough to let an urgent layer
# pass.
_RELOAD_BYTES_IN_FLIGHT = 24 << 20
_ASK_AGAIN_S = 2e-4  # whether a weight that is still being read has been released


@dataclass(frozen=True, slots=True)
class LaneRecord:
    """One task on a lane, timed when its events have passed."""

    stage: Stage
    row: int
    chunk: int
    begin: Event
    end: Event

    def timed(self) -> TaskRecord:
        """As a record of the engine; both events have passed."""
        return TaskRecord(self.stage, self.row, self.chunk, 0, self.begin.time_us(), self.end.time_us())


class Pipeline:
    """Rows, queues and threads.

    `lock` guards all of it but the contents of states, and may be taken twice by one thread.
    """

    def __init__(self, device: torch.device, timeout_s: float, update: HostUpdate) -> None:
        self.update = update
        self.lock = threading.RLock()
        self.landed_cv, self.work_cv, self.reload_cv, self.issued_cv = (threading.Condition(self.lock) for _ in range(4))
        self.rows: list[Row] = []
        self.landings: deque[Landing] = deque()
        self.ready: list[Key] = []  # a heap
        self.updated: list[Key] = []  # sorted
        self.records: list[TaskRecord] = []
        self.lane_records: list[LaneRecord] = []
        self.recording = False
        self.delay_us = dict.fromkeys((Stage.CPU_UPDATE, Stage.LANDING, Stage.ISSUE), 0.0)
        self.fail_row = -1
        self.failure: tuple[str, BaseException] | None = None
        self._stop = False
        self.timeout_s = min(timeout_s, LONGEST_WAIT_S)
        self.lanes = make_lanes(device, self.timeout_s, self.fail)
        loops = (("copy to the host", self._land), ("CPU update", self._work), ("copy to the device", self._reload))
        self._threads = [threading.Thread(target=self._guarded, args=loop, name=f"hytrain_fx-{loop[0]}", daemon=True) for loop in loops]
        start_all(self._threads, self.stop)

    def queue_ready(self, row: Row) -> None:
        """Hand the chunks of `row` that can be updated to the worker. The lock is held."""
        if row.phase is not Phase.PENDING or not row.armed_cpu or not row.factors_known:
            return
        for number in row.ready_chunks():
            row.chunks[number].queued = True
            heappush(self.ready, (row.unit, row.index, number))
            self.work_cv.notify()

    def fail(self, who: str, error: BaseException) -> None:
        """Keep the first failure for the next call of the launching thread."""
        with self.lock:
            self.failure = self.failure or (f"{who}: {error}", error)
            self.issued_cv.notify_all()

    def throw_if_failed(self) -> None:
        """Raises EngineError with the failed thread's error as its cause."""
        if self.failure is not None:
            raise EngineError(f"the engine has failed: {self.failure[0]}") from self.failure[1]

    def is_own_thread(self) -> bool:
        """Whether the calling thread is one of this pipeline or of its lanes."""
        ident = threading.get_ident()
        return ident in {thread.ident for thread in self._threads} or ident in self.lanes.thread_idents()

    def stop(self) -> None:
        """Join every thread; what was queued is not run any more, what is on a lane is."""
        with self.lock:
            self._stop = True
            for condition in (self.landed_cv, self.work_cv, self.reload_cv, self.issued_cv):
                condition.notify_all()
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join()
        self.lanes.close()

    def _guarded(self, who: str, loop: Callable[[], None]) -> None:
        torch.set_flush_denormal(False)  # a thread begins with the settings of the one that started it
        try:
            with torch.no_grad():
                loop()
        except BaseException as error:
            self.fail(who, error)

    # ---- lander ----

    def _land(self) -> None:
        while (landing := self._next_landing()) is not None:
            landing.event.sync()
            _sleep_us(self.delay_us[Stage.LANDING])
            with self.lock:
                self._landed(landing)

    def _next_landing(self) -> Landing | None:
        with self.lock:
            self.landed_cv.wait_for(lambda: self._stop or self.landings)
            return None if self._stop else self.landings.popleft()

    def _landed(self, landing: Landing) -> None:
        if landing.row < 0:
            for number in landing.waiting:
                self.rows[number].factors_known = True
                self.queue_ready(self.rows[number])
            return
        row = self.rows[landing.row]
        if landing.begin is not None:
            self.lane_records.append(LaneRecord(Stage.D2H, landing.row, landing.chunk, landing.begin, landing.event))
        if row.generation == landing.generation:  # else dropped by zero_grad() and begun again
            row.chunks[landing.chunk].landed = True
            self.queue_ready(row)

    # ---- worker ----

    def _work(self) -> None:
        while (key := self._next_update()) is not None:
            row = self.rows[key[1]]
            begin_us = now_us()
            _sleep_us(self.delay_us[Stage.CPU_UPDATE])
            if self.fail_row == row.index:
                raise RuntimeError(f"injected failure in row {row.index}")
            done = self._update_part(row, key[2]) if row.step is None else self._update_whole(row)
            end_us = now_us()
            with self.lock:
                row.busy_us += end_us - begin_us
                if self.recording:
                    self.records.append(TaskRecord(Stage.CPU_UPDATE, row.index, key[2], 0, begin_us, end_us))
                if not done:
                    heappush(self.ready, key)
                for number in done:
                    insort(self.updated, (row.unit, row.index, number))
                    self.reload_cv.notify()

    def _update_part(self, row: Row, number: int) -> Sequence[int]:
        """Update the next grain of a chunk; the chunk where it was the last."""
        chunk = row.chunks[number]
        end = min(chunk.updated_to + self.update.grain_params, chunk.end)
        part = row.placed_states().part(chunk.updated_to, end)
        self.update(part, row.scalars_with_factors())
        with self.lock:
            chunk.updated_to = end
        return () if end < chunk.end else (number,)

    def _update_whole(self, row: Row) -> Sequence[int]:
        """Update a row of another optimizer than Adam and AdamW; all its chunks."""
        states = row.placed_states()
        assert row.step is not None
        assert states.slot is not None
        row.step(states, states.slot, row.known_factors(), states.out)
        return range(len(row.chunks))

    def _next_update(self) -> Key | None:
        with self.lock:
            self.work_cv.wait_for(lambda: self._stop or (self.ready and self.failure is None))
            return None if self._stop else heappop(self.ready)

    # ---- reloader ----

    def _reload(self) -> None:
        in_flight: deque[tuple[Event, int]] = deque()
        flying_bytes = 0
        while (key := self._next_reload()) is not None:
            event, nbytes = self._issue(self.rows[key[1]], key[2])
            in_flight.append((event, nbytes))
            flying_bytes += nbytes
            while flying_bytes >= _RELOAD_BYTES_IN_FLIGHT:
                oldest, nbytes = in_flight.popleft()
                oldest.sync()
                flying_bytes -= nbytes

    def _next_reload(self) -> Key | None:
        with self.lock:
            while not self._stop:
                key = self._first_released()
                if key is not None:
                    self.updated.remove(key)
                    return key
                self.reload_cv.wait(_ASK_AGAIN_S if self.updated else None)
            return None

    def _first_released(self) -> Key | None:
        asked: Event | None = None
        answer = False
        for key in self.updated:
            row = self.rows[key[1]]
            if not row.armed_reload or row.released is None:
                continue
            if row.released is not asked:  # rows released together share the event
                asked, answer = row.released, row.released.done()
            if answer:
                return key
        return None

    def _issue(self, row: Row, number: int) -> tuple[Event, int]:
        chunk, states = row.chunks[number], row.placed_states()
        source = states.out if row.narrow else states.master
        assert source is not None
        part = source[chunk.begin : chunk.end]
        _sleep_us(self.delay_us[Stage.ISSUE])
        before = self.lanes.record(Lane.H2D) if self.recording else None
        copy(self.lanes, Lane.H2D, row.weight[chunk.begin : chunk.end], part)
        after = self.lanes.record(Lane.H2D)
        with self.lock:
            if before is not None:
                self.lane_records.append(LaneRecord(Stage.H2D, row.index, number, before, after))
            row.written = after
            row.issued += 1
            if row.issued == len(row.chunks):
                row.last_busy_us = row.busy_us
                self.issued_cv.notify_all()
        return after, part.nbytes


def _sleep_us(mean_us: float) -> None:
    if mean_us > 0:
        time.sleep(mean_us * 1e-6)
