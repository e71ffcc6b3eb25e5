"""The C++ engine, through ctypes: every call releases the GIL, and its threads never take it.

The library has no dependency on torch's binaries, so it builds in seconds and serves every torch
version.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import fields, replace

import torch

from hytrain_fx.errors import EngineError, HostMemoryError
from hytrain_fx.ir.limits import UPDATE_KERNELS
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
    staging_shape,
)
from hytrain_fx.runtime.launch_queue import places
from hytrain_fx.runtime.memory import available_host_bytes
from hytrain_fx.runtime.native import libraries
from hytrain_fx.runtime.native.structs import (
    FACTOR_CAPACITY,
    CEarlyCounts,
    CFinishTimes,
    CGuessCounts,
    COptions,
    CRowSpec,
    CShadowMemory,
    CStagingMemory,
    CTaskRecord,
    FactorTable,
    ScalarStructs,
    device_states,
    host_states,
    packed_commit,
    pointers,
)
from hytrain_fx.runtime.scalars import UpdateScalars
from hytrain_fx.runtime.states.slabs import HostSlab, pin_factors, slab_bytes
from hytrain_fx.runtime.topology import local_ranks
from hytrain_fx.torch_private.tensors import current_stream_of, property_reader

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# nothing is in flight in a child
_SETTLED_AT_FORK = ("wait", "settle", "drain", "discard", "set_unit", "send_weight", "issued")
_RECORD_CAPACITY = 1 << 16
_ARRAYS_KEPT = 4096
# Fetches under way at once: the next node's and one read by hand are two. Older ones were left by
# an error.
_FETCHES = 8
_bytes_of = property_reader("nbytes")
_log = logging.getLogger("hytrain_fx")


class NativeEngine:
    """Implements `Engine`.

    Raises EngineError where the library cannot be built or a worker has failed.

    worker_cores   a logical CPU for each worker to stay on; None: the system moves them as it likes
    shadow_bytes   host memory for new places of states, for updates on a guess; None: half of what
                   is available when it is first needed; 0: updates wait for their commit and
                   factors
    """

    name = "native"
    can_stream = True
    splits_masters = True
    can_skip = True
    takes_copies = True
    can_begin_early = True

    def __init__(
        self,
        device: torch.device,
        workers: int,
        ring_bytes: int,
        timeout_s: float,
        worker_cores: Sequence[int] | None = None,
        shadow_bytes: int | None = None,
    ) -> None:
        self.workers = workers
        self._device = device
        self._stream_handle = current_stream_of(device) if device.type == "cuda" else lambda: None
        chosen = libraries.library(libraries.SOURCES)
        self.library_origin: str | None = chosen.origin
        self._library = chosen.load()
        self._library.hytrain_error.restype = c_char_p
        self._ring = torch.empty(ring_bytes, dtype=torch.uint8, device=device)
        self._no_ring = torch.empty(0, dtype=torch.uint8, device=device)  # made now: torch may be tracing when this is closed
        self._factors = HostSlab(slab_bytes(2 * FACTOR_CAPACITY, torch.float32))
        pin_factors(self._factors, device)
        slots = self._factors.take(2 * FACTOR_CAPACITY, torch.float32)
        options = COptions(workers, -1, timeout_s, self._ring.data_ptr(), ring_bytes, slots.data_ptr(), FACTOR_CAPACITY)
        options.slots_unpinned = self._factors.unpinned is not None
        options.worker_cores = None if worker_cores is None else (c_int32 * workers)(*worker_cores)
        if device.type == "cuda":
            from hytrain_fx.runtime.native import cuda_module

            options.device_ordinal, options.queue_places = device.index, places()
            options.update_functions = (c_void_p * UPDATE_KERNELS)(*cuda_module.update_functions(device.index))
            options.gather_function = cuda_module.function(device.index, "gather.cu", "gather")
        self._handle = c_void_p()
        self._pid = os.getpid()
        self._rows: list[RowSpec] = []
        self._call("create", byref(options), byref(self._handle), with_handle=False)
        # The C++ side holds addresses only: these hold the memory.
        self._states: dict[int, RowStates] = {}
        self._staging: torch.Tensor | None = None
        self._shadow: HostSlab | None = None
        self._shadow_bytes = shadow_bytes
        self._shadow_was_asked_for = False
        # nodes pass the same rows in every step
        self._arrays: dict[tuple[int, ...], ctypes.Array[c_int32]] = {}
        # by commit: factors that the lane to the host may still read
        self._keep: deque[list[object]] = deque(maxlen=2)
        self._skips: dict[int, torch.Tensor] = {}
        self._scalar_structs = ScalarStructs()  # since the last commit
        self._skipped = False
        # rows with copies: dtype of the latest gradient
        self._slot_dtypes: dict[int, torch.dtype] = {}
        # by number: memory of gradients on their way that nobody has waited for
        self._fetching: dict[int, torch.Tensor] = {}

    def _call(self, name: str, *arguments: object, with_handle: bool = True) -> None:
        function = getattr(self._library, f"hytrain_{name}")
        if with_handle:
            if not self._handle:
                raise EngineError("this engine is closed: the model was closed with hytrain_fx.close(); compile it again to train on")
            if os.getpid() != self._pid:
                if name in _SETTLED_AT_FORK:
                    return
                raise forked_error()
            arguments = (self._handle, *arguments)
        if function(*arguments) != 0:
            raise engine_error(self._library.hytrain_error().decode(), [row.name for row in self._rows])

    def _rows_array(self, rows: Sequence[int]) -> ctypes.Array[c_int32]:
        key = tuple(rows)
        array = self._arrays.get(key)
        if array is None:
            if len(self._arrays) == _ARRAYS_KEPT:
                self._arrays.clear()
            array = self._arrays[key] = (c_int32 * len(key))(*key)
        return array

    def _stream(self) -> c_void_p:
        return c_void_p(self._stream_handle())

    @property
    def rows(self) -> int:
        return len(self._rows)

    def add_row(self, spec: RowSpec) -> int:
        self._rows.append(spec)
        self._call("add_row", byref(CRowSpec(spec.numel, spec.unit, _DTYPES[spec.weight.dtype], spec.weight.data_ptr())))
        return len(self._rows) - 1

    def set_unit(self, row: int, unit: int) -> None:
        self._call("set_unit", row, unit)

    def set_weight(self, row: int, weight: torch.Tensor) -> None:
        self._call("set_weight", row, c_void_p(weight.data_ptr()))
        self._rows[row] = replace(self._rows[row], weight=weight)

    def use_copy(self, row: int, copy: torch.Tensor) -> None:
        """From now on updates of this fp32 row write `copy`, bf16; the row must be idle.

        Its states must be placed again after this.
        """
        self._call("use_copy", row, c_void_p(copy.data_ptr()))
        self._rows[row] = replace(self._rows[row], weight=copy)
        self._slot_dtypes[row] = copy.dtype

    def place_on_host(self, row: int, states: RowStates) -> None:
        self._states[row] = states
        self._call("place_on_host", row, byref(host_states(states)))

    def place_on_device(self, row: int, states: RowStates) -> None:
        self._states[row] = states
        self._call("place_on_device", row, byref(device_states(states)))

    def place_streamed(self, row: int, states: RowStates) -> None:
        self._require_staging(staging_shape(states.master.numel(), states.table.tensors))
        self._states[row] = states
        self._call("place_streamed", row, byref(host_states(states)))

    def retire(self, row: int) -> None:
        self._states.pop(row, None)

    def send_weight(self, row: int, on: bool) -> None:
        self._call("send_weight", row, int(on))

    def _require_staging(self, needed: tuple[int, int, int]) -> None:
        """Staging slots of at least that shape; replaced only while no row is in flight."""
        present = (0, 0, 0) if self._staging is None else tuple(self._staging.shape)
        shape = tuple(map(max, needed, present))
        if shape == present:
            return
        staging = torch.empty(shape, dtype=torch.float32, device=self._device)
        if self._device.type == "cuda":
            # earlier kernels may still use this memory
            torch.cuda.current_stream(self._device).synchronize()
        self._call("set_staging", byref(CStagingMemory(staging.data_ptr(), shape[2], shape[1], shape[0])))
        self._staging = staging

    def set_transit(self, ring_bytes: int, streams: bool) -> None:
        if not streams and self._staging is not None:
            self._call("set_staging", byref(CStagingMemory(None, 0, 0, 0)))
            self._staging = None
        if ring_bytes != self._ring.nbytes:
            ring = torch.empty(ring_bytes, dtype=torch.uint8, device=self._device)
            self._call("set_ring", c_void_p(ring.data_ptr()), c_uint64(ring_bytes))
            self._ring = ring

    def grad_offload(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        for row, grad in zip(rows, grads, strict=True) if self._slot_dtypes else ():
            if self._slot_dtypes.get(row, grad.dtype) != grad.dtype:
                self._call("set_gradient_dtype", row, _DTYPES[grad.dtype])
                self._slot_dtypes[row] = grad.dtype
        self._call("grad_offload", self._rows_array(rows), pointers(grads), len(rows), self._stream())

    def keep_grads(self, kept: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        n = len(grads)
        self._call("keep_grads", pointers(kept), pointers(grads), (c_int64 * n)(*map(_bytes_of, grads)), n, self._stream())

    def arm_cpu(self, rows: Sequence[int]) -> None:
        self._call("arm_cpu", self._rows_array(rows), len(rows))

    def arm_gpu(self, rows: Sequence[int]) -> None:
        self._call("arm_gpu", self._rows_array(rows), len(rows), self._stream())

    def arm_reload(self, rows: Sequence[int]) -> None:
        self._call("arm_reload", self._rows_array(rows), len(rows))

    def release(self, rows: Sequence[int]) -> None:
        self._call("release", self._rows_array(rows), len(rows), self._stream())

    def commit(self, items: Sequence[CommitItem]) -> None:
        self._commit(items, None)

    def commit_unless(self, items: Sequence[CommitItem], skip: torch.Tensor) -> None:
        """`skip` is a 0-dim fp32 tensor on the device."""
        # An update on the device reads it when it runs, which is before the row's next commit.
        self._skips.update((item.row, skip) for item in items if item.grad is not None)
        self._commit(items, skip)

    def skipped(self) -> bool:
        if self._handle and os.getpid() == self._pid:
            self._call("skipped", byref(out := c_int()))
            self._skipped = bool(out.value)
        return self._skipped

    def knows_skipped(self) -> bool:
        out = c_int(1)
        if self._handle and os.getpid() == self._pid:
            self._call("knows_skipped", byref(out))
        return bool(out.value)

    def _commit(self, items: Sequence[CommitItem], skip: torch.Tensor | None) -> None:
        self._call("factor_slots", byref(slots := POINTER(c_float)()))
        factors = FactorTable(slots)
        packed = packed_commit(items, factors)
        skip_at = -1 if skip is None else factors.index(skip)
        sources = (c_void_p * max(1, len(factors.sources)))(*factors.sources)
        self._keep.append(factors.keep)
        self._scalar_structs = ScalarStructs()
        if factors.keep:
            self._make_shadow()
        self._call("commit", packed, len(items), sources, len(factors.sources), skip_at, self._stream())

    def _make_shadow(self) -> None:
        """Called once.

        Pages come as slots are first used. Where the system refuses the memory, no update begins on
        a guess.
        """
        if self._shadow_was_asked_for:
            return
        self._shadow_was_asked_for = True
        try:
            self._shadow = HostSlab(available_host_bytes() // (2 * local_ranks()) if self._shadow_bytes is None else self._shadow_bytes)
        except HostMemoryError as error:
            _log.warning("updates by the CPU wait for step() and for the factors of clipping and loss scaling, as there is no memory "
                         "for states beside the old ones: %s. Less is asked for with shadow_memory=BYTES", error)
            return
        base = self._shadow.take(self._shadow.nbytes, torch.uint8).data_ptr()
        arrays = max(states.table.tensors for states in self._states.values())
        self._call("set_shadow", byref(CShadowMemory(base, self._shadow.nbytes, arrays)))

    def guess_counts(self) -> GuessCounts:
        self._call("guess_counts", byref(out := CGuessCounts()))
        return GuessCounts(*(getattr(out, field.name) for field in fields(GuessCounts)))

    def early_counts(self) -> EarlyCounts:
        self._call("early_counts", byref(out := CEarlyCounts()))
        return EarlyCounts(*(getattr(out, field.name) for field in fields(EarlyCounts)))

    def finish_times(self) -> FinishTimes:
        self._call("finish_times", byref(out := CFinishTimes()))
        return FinishTimes(*(getattr(out, field.name) for field in fields(FinishTimes)))

    def commit_early(self, rows: tuple[int, ...], scalars: UpdateScalars, workers: int) -> None:
        self._make_shadow()
        self._call("commit_early", self._rows_array(rows), len(rows), byref(self._scalar_structs.of(scalars)), workers)

    def wait(self, rows: Sequence[int]) -> None:
        self._call("wait", self._rows_array(rows), len(rows), self._stream())

    def settle(self, rows: Sequence[int]) -> None:
        self._call("settle", self._rows_array(rows), len(rows))

    def drain(self, rows: Sequence[int]) -> None:
        self._call("drain", self._rows_array(rows), len(rows))

    def fetch(self, rows: Sequence[int], out: torch.Tensor) -> int:
        number = c_uint64()
        self._call("fetch", self._rows_array(rows), len(rows), c_void_p(out.data_ptr()), c_int64(out.nbytes), self._stream(), byref(number))
        # An error between here and `fetched` must not free memory that the lane writes to.
        self._fetching[number.value] = out
        if len(self._fetching) > _FETCHES:
            self.fetched(next(iter(self._fetching)))
        return number.value

    def fetched(self, fetch: int) -> None:
        self._call("fetched", c_uint64(fetch), self._stream())
        self._fetching.pop(fetch, None)

    def landed(self, rows: Sequence[int]) -> None:
        self._call("landed", self._rows_array(rows), len(rows))

    def discard(self, rows: Sequence[int]) -> None:
        self._call("discard", self._rows_array(rows), len(rows))

    def pending(self, row: int) -> bool:
        self._call("pending", row, byref(out := c_int()))
        return bool(out.value)

    def issued(self, rows: Sequence[int]) -> bool:
        self._call("issued", self._rows_array(rows), len(rows), byref(out := c_int()))
        return bool(out.value)

    def record(self, on: bool) -> None:
        self._call("record", int(on))

    def take_records(self) -> list[TaskRecord]:
        buffer, taken, records = (CTaskRecord * _RECORD_CAPACITY)(), c_int(_RECORD_CAPACITY), list[TaskRecord]()
        while taken.value == _RECORD_CAPACITY:
            self._call("take_records", buffer, _RECORD_CAPACITY, byref(taken))
            records += (TaskRecord(Stage(r.kind), r.row, r.chunk, r.worker, r.begin_us, r.end_us, r.workers) for r in buffer[: taken.value])
        return records

    def cpu_update_us(self, row: int) -> float:
        self._call("cpu_update_us", row, byref(out := c_double()))
        return out.value

    def set_delay(self, stage: Stage, mean_us: float) -> None:
        self._call("set_delay", int(stage), c_double(mean_us))

    def fail_next_update(self, row: int) -> None:
        self._call("fail_next_update", row)

    def fail_next_copy(self, row: int) -> None:
        """The copy of this row's next new weight to the device fails; tests only."""
        self._call("fail_next_copy", row)

    def fail_device_after(self, operations: int) -> None:
        """The device, a CPU, fails after so many more copies, events and updates; tests only."""
        self._call("fail_device_after", operations)

    def close(self) -> None:
        if self._handle:
            with suppress(EngineError):
                self.skipped()  # asked for later, of a closed engine
            self._call("destroy")
            self._handle = c_void_p()
            self._factors.unpin()
            self._rows, self._states = [], {}
            self._keep.clear()
            self._skips.clear()
            self._fetching.clear()
            # An optimizer that is kept keeps the states, and nothing else.
            self._ring, self._staging, self._shadow = self._no_ring, None, None
