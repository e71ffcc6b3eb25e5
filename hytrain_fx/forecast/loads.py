"""Work that a machine is measured by.

The native engine's update kernel on host memory, copies one way, and matrix products.

Each load repeats one piece of work in its own thread until told to stop, and counts what it
has done; `together` runs several at once.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hytrain_fx.errors import EngineError
from hytrain_fx.ir.limits import CHUNK_PARAMS, HALF_BYTES, TIMED_COPY_BYTES
from hytrain_fx.ir.states import ADAMW_DEFAULT, STATE_BYTES_PER_PARAM
from hytrain_fx.runtime.arithmetic import AdamScalars
from hytrain_fx.runtime.engine import RowStates
from hytrain_fx.runtime.native import libraries
from hytrain_fx.runtime.native.structs import c_states

_BF16 = 1  # Dtype of csrc/adamw.h
_GROUP = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_IN_FLIGHT = 4
_CALLS = 16
HOST_BYTES_PER_PARAM = STATE_BYTES_PER_PARAM + HALF_BYTES  # fp32 master and moments, one 16-bit slot


class Load(Protocol):
    """One piece of work; returns how much it did, in its own unit.

    `finish` waits for what is still under way.
    """

    def __call__(self) -> float: ...
    def finish(self) -> None: ...


@dataclass(frozen=True)
class Rate:
    """What a load did in how many seconds."""

    done: float
    seconds: float

    @property
    def per_s(self) -> float:
        """Its rate."""
        return self.done / self.seconds


class KernelUpdates:
    """AdamW on bf16 gradients and fp32 states, chunk after chunk, like one worker of the engine.

    Counts parameters.
    """

    def __init__(self, params: int) -> None:
        self._function = libraries.library(libraries.KERNEL_SOURCES).load().hytrain_fx_update_chunk
        self._scalars = AdamScalars.of(_GROUP, 10, decoupled=True, torch_cuda=True).c_struct
        master, *moments = (torch.rand(params).mul_(1e-3) for _ in range(3))
        self._states = RowStates(ADAMW_DEFAULT, master, tuple(moments))
        self._slot = torch.full((params,), 1e-3, dtype=torch.bfloat16)
        self._params, self._at = params, 0

    def __call__(self) -> float:
        """Update the next chunk.

        The slot takes the new weight and is the next gradient: bits do not change the time.
        """
        count = min(CHUNK_PARAMS, self._params - self._at)
        here = self._states.part(self._at, self._at + count)
        master, slot = ctypes.c_void_p(here.master.data_ptr()), ctypes.c_void_p(self._slot.data_ptr() + 2 * self._at)
        states = ctypes.byref(c_states(here))
        failed = self._function(slot, _BF16, master, states, slot, _BF16, ctypes.c_int64(count), ctypes.byref(self._scalars))
        if failed:
            raise EngineError(f"the update kernel refused its operands (it returned {failed})")
        self._at = (self._at + count) % self._params
        return float(count)

    def finish(self) -> None:
        """Nothing is left under way."""


class Copies:
    """Blocks of 16 MB from `source` to `target`, one after the other; counts bytes.

    A GPU has its own stream for them, with a few under way.
    """

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._pairs = list(zip(target.split(TIMED_COPY_BYTES), source.split(TIMED_COPY_BYTES), strict=True))
        self._number = 0
        self._device = next((tensor.device for tensor in (target, source) if tensor.is_cuda), None)
        self._stream = None if self._device is None else torch.cuda.Stream(self._device)
        self._events: list[torch.cuda.Event] = []

    def __call__(self) -> float:
        """Copy the next block, or put it on the stream."""
        target, source = self._pairs[self._number % len(self._pairs)]
        self._number += 1
        if self._stream is None:
            target.copy_(source)
            return float(target.nbytes)
        if len(self._events) == _IN_FLIGHT:
            oldest = self._events.pop(0)
            while not oldest.query():
                time.sleep(2e-5)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._events.append(torch.cuda.Event())
            self._events[-1].record(self._stream)
        return float(target.nbytes)

    def finish(self) -> None:
        """Wait for the last copies."""
        if self._stream is not None:
            self._stream.synchronize()


class Calls:
    """A function that does `amount` a call, on the device of torch's current stream.

    On a GPU a few calls are launched at once.
    """

    def __init__(self, function: Callable[[], object], amount: float, device: torch.device) -> None:
        self._function, self._amount, self._device = function, amount, device

    def __call__(self) -> float:
        """One call, on a GPU some, waited for."""
        calls = _CALLS if self._device.type == "cuda" else 1
        for _ in range(calls):
            self._function()
        self.finish()
        return calls * self._amount

    def finish(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def together(loads: Sequence[Load], seconds: float) -> list[Rate]:
    """What each load did while all ran for `seconds`, after one piece of each to warm up.

    Raises the first error of a load.
    """
    for load in loads:
        load()
        load.finish()
    stop, errors = threading.Event(), list[BaseException]()
    done, lasted = [0.0] * len(loads), [0.0] * len(loads)

    def repeat(at: int, load: Load) -> None:
        # counts for the calling thread
        torch.set_num_threads(1 if len(loads) > 1 else torch.get_num_threads())
        began_s = time.perf_counter()
        try:
            while not stop.is_set():
                done[at] += load()
            load.finish()
        except BaseException as error:  # the caller raises it below
            errors.append(error)
        lasted[at] = time.perf_counter() - began_s

    threads = [threading.Thread(target=repeat, args=pair) for pair in enumerate(loads)]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [Rate(*pair) for pair in zip(done, lasted, strict=True)]
