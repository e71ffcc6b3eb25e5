"""In-order queues of copies and updates beside the compute stream.

The native engine has csrc/device.h for this.

    CPU    a lane is a thread with delays that a test can set; the compute stream is the calling
           thread
    CUDA   a lane is a stream; the compute stream is the caller's current one

So a race that a GPU would show is one that a CPU test can provoke.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch

from hytrain_fx.errors import EngineError


class Lane(IntEnum):
    """One queue: gradients out, weights in, updates on the device, gradients back."""

    D2H = 0
    H2D = 1
    UPDATE = 2
    FETCH = 3


class Event(Protocol):
    """A point in a lane or in the compute stream.

    `time_us` is for one that was done when its lanes last took their epoch.
    """

    def done(self) -> bool: ...
    def sync(self) -> None: ...
    def time_us(self) -> float: ...


class Lanes(Protocol):
    """The lanes of one device.

    `compute_wait` takes the stream that is to wait, by default the caller's.
    """

    def compute_stream(self) -> torch.cuda.Stream | None: ...
    def record_compute(self) -> Event: ...
    def compute_wait(self, event: Event, stream: torch.cuda.Stream | None = None) -> None: ...
    def record(self, lane: Lane) -> Event: ...
    def wait(self, lane: Lane, event: Event) -> None: ...
    def run(self, lane: Lane, task: Callable[[], object]) -> None: ...
    def set_delay(self, lane: Lane, mean_us: float) -> None: ...
    def take_epoch(self) -> None: ...  # it may wait for work of the device: not with the lock held
    def host_floats(self, count: int) -> torch.Tensor: ...
    def thread_idents(self) -> set[int]: ...
    def close(self) -> None: ...


def now_us() -> float:
    """Microseconds on the monotonic host clock."""
    return time.perf_counter() * 1e6


def copy(lanes: Lanes, lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
    """Queue an asynchronous copy; both tensors must live until it is done."""
    lanes.run(lane, partial(target.copy_, source, non_blocking=True))


def make_lanes(device: torch.device, timeout_s: float, on_failure: Callable[[str, Exception], None]) -> Lanes:
    """The lanes of `device`.

    `on_failure(who, error)` is called from the thread of a lane whose task raised.
    """
    return CudaLanes(device) if device.type == "cuda" else CpuLanes(timeout_s, on_failure)


class CpuEvent:
    """Fires on its lane's thread; a sync that outlasts the time-out is an EngineError."""

    __slots__ = ("_fired", "_time_us", "_timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self._fired = threading.Event()
        self._timeout_s = timeout_s
        self._time_us = 0.0

    def fire(self) -> None:
        self._time_us = now_us()
        self._fired.set()

    def done(self) -> bool:
        return self._fired.is_set()

    def sync(self) -> None:
        if not self._fired.wait(self._timeout_s):
            raise EngineError(f"a copy or an update was not done after {self._timeout_s} s; raise timeout_s if the machine is that slow")

    def time_us(self) -> float:
        return self._time_us


def start_all(threads: Sequence[threading.Thread], stop: Callable[[], None]) -> None:
    """Start these threads. Where the system refuses one, `stop` has to end those that run.

    Raises EngineError.
    """
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:
        stop()
        raise EngineError(
            f"the system refused the torch engine a thread ({error}); allow this process more threads (ulimit -u, the container's limit), "
            "or compile with engine=\"native\""
        ) from error


class _LaneThread(threading.Thread):
    """Runs tasks in order.

    A task that raises is reported and the next ones still run: their events must fire.
    """

    def __init__(self, lane: Lane, on_failure: Callable[[str, Exception], None]) -> None:
        super().__init__(name=f"hytrain_fx-{lane.name}", daemon=True)
        self.tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.mean_delay_us = 0.0
        self._on_failure = on_failure
        self._random = random.Random(12345)

    def delay(self) -> None:
        if self.mean_delay_us > 0:
            time.sleep(self._random.uniform(0, 2 * self.mean_delay_us) * 1e-6)

    def run(self) -> None:
        torch.set_flush_denormal(False)  # a thread begins with the settings of the one that started it
        with torch.no_grad():
            while (task := self.tasks.get()) is not None:
                try:
                    task()
                except Exception as error:
                    self._on_failure(self.name, error)


class CpuLanes:
    """Implements `Lanes` with one thread a lane."""

    def __init__(self, timeout_s: float, on_failure: Callable[[str, Exception], None]) -> None:
        self._timeout_s = timeout_s
        self._threads = [_LaneThread(lane, on_failure) for lane in Lane]
        start_all(self._threads, self.close)

    def compute_stream(self) -> None:
        return None

    def record_compute(self) -> Event:
        event = CpuEvent(self._timeout_s)
        event.fire()
        return event

    def compute_wait(self, event: Event, stream: torch.cuda.Stream | None = None) -> None:
        event.sync()

    def record(self, lane: Lane) -> Event:
        event = CpuEvent(self._timeout_s)
        self._threads[lane].tasks.put(event.fire)
        return event

    def wait(self, lane: Lane, event: Event) -> None:
        self._threads[lane].tasks.put(event.sync)

    def run(self, lane: Lane, task: Callable[[], object]) -> None:
        thread = self._threads[lane]

        def delayed() -> None:
            thread.delay()
            task()

        thread.tasks.put(delayed)

    def set_delay(self, lane: Lane, mean_us: float) -> None:
        self._threads[lane].mean_delay_us = mean_us

    def take_epoch(self) -> None:
        pass  # events are timed by the host

    def host_floats(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.float32, device="cpu")

    def thread_idents(self) -> set[int]:
        return {thread.ident for thread in self._threads if thread.ident is not None}

    def close(self) -> None:
        for thread in self._threads:
            thread.tasks.put(None)
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join()


_POLL_S = 20e-6


class _Epoch:
    """One time on both clocks, read again now and then.

    They drift apart, and the driver counts in floats.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)  # with no work, in no queue with others: reached at once
        self.event = torch.cuda.Event(enable_timing=True)
        self.at_us = 0.0

    def take(self) -> None:
        with torch.cuda.device(self._stream.device):
            self.event.record(self._stream)
            self.event.synchronize()
        self.at_us = now_us()


class _CudaEvent:
    """Its device is made the current one before it is asked for: else torch asks in the name of the
    thread's own device, and where the process has not used that, the driver makes a context there.
    """

    __slots__ = ("_device", "_epoch", "event")

    def __init__(self, stream: torch.cuda.Stream, epoch: _Epoch) -> None:
        # Not blocking=True: after such an event cuMemcpyDtoHAsync holds the launching thread back
        # (csrc/cuda_device.cpp).
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)
        self._device = stream.device
        self._epoch = epoch

    def done(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self.event.query())

    def sync(self) -> None:
        while not self.done():
            time.sleep(_POLL_S)  # synchronize() would spin, on a core of the worker

    def time_us(self) -> float:
        return self._epoch.at_us - 1e3 * float(self.event.elapsed_time(self._epoch.event))


class CudaLanes:
    """Implements `Lanes` with one stream a lane.

    Delays are left to spinning kernels of the test.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in Lane]
        self._epoch = _Epoch(device)

    def compute_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def record_compute(self) -> Event:
        return _CudaEvent(self.compute_stream(), self._epoch)

    def compute_wait(self, event: Event, stream: torch.cuda.Stream | None = None) -> None:
        (stream or self.compute_stream()).wait_event(_cuda(event))

    def record(self, lane: Lane) -> Event:
        return _CudaEvent(self._streams[lane], self._epoch)

    def wait(self, lane: Lane, event: Event) -> None:
        self._streams[lane].wait_event(_cuda(event))

    def run(self, lane: Lane, task: Callable[[], object]) -> None:
        with torch.no_grad(), torch.cuda.device(self._device), torch.cuda.stream(self._streams[lane]):
            task()

    def set_delay(self, lane: Lane, mean_us: float) -> None:
        pass

    def take_epoch(self) -> None:
        self._epoch.take()

    def host_floats(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.float32, device="cpu", pin_memory=True)

    def thread_idents(self) -> set[int]:
        return set()

    def close(self) -> None:
        for stream in self._streams:
            stream.synchronize()


def _cuda(event: Event) -> torch.cuda.Event:
    if not isinstance(event, _CudaEvent):
        raise EngineError(f"internal: a CUDA stream is to wait for a {type(event).__name__}")
    return event.event
