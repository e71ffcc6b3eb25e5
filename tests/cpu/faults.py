"""Faults of one kind, raised at one place after the other.

They are memory that the system refuses, engine calls that fail, threads, and disks.

    with Faults("device memory").counted() as places: loop()    every place that can fail, in order
    with Faults("device memory").at(place): loop()    the same loop, with the fault at one of them

A place is a line of the library and how often it was reached before; it is found by running the
loop, so a new line is a new place.
"""

from __future__ import annotations

import errno
import mmap
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.errors import EngineError
from hytrain_fx.runtime.native.engine import NativeEngine

_LIBRARY = str(Path(hytrain_fx.__file__).parent)


@dataclass(frozen=True, order=True)
class Place:
    """A line of the library that a fault of some kind can hit.

    call   the call of the loop during which it was reached
    line   file, line and what is called there
    nth    how often the line was reached before in this run of the loop
    """

    call: str
    line: str
    nth: int

    def __str__(self) -> str:
        return f"{self.call}: {self.line}" + (f", time {self.nth + 1}" if self.nth else "")


@dataclass(frozen=True)
class Kind:
    """What can fail.

    (owner, attribute) pairs that are called, and the error that such a call then raises.
    """

    name: str
    targets: tuple[tuple[Any, str], ...]
    error: Callable[[], BaseException]
    named: bool = False  # the first argument tells the calls of one function apart (the engine's)


def _no_device_memory() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")


def _no_host_memory() -> BaseException:
    return OSError(errno.ENOMEM, "Cannot allocate memory (injected)")


def _device_error() -> BaseException:
    return EngineError("CUDA error 719 (unspecified launch failure) (injected)")


def _no_thread() -> BaseException:
    return RuntimeError("can't start new thread (injected)")


def _disk_full() -> BaseException:
    return OSError(errno.ENOSPC, "No space left on device (injected)")


# Calls of the engine that do nothing on the device; what cannot be measured is another test's.
_MEASURING = ("early_counts", "guess_counts", "finish_times", "take_records", "cpu_update_us", "record", "set_delay", "pending", "issued",
              "destroy")
_FACTORIES = ("empty", "zeros", "empty_like", "zeros_like", "empty_strided", "full", "rand", "tensor", "where", "stack")
_METHODS = ("clone", "to", "float", "contiguous", "__add__")
KINDS = {
    kind.name: kind
    for kind in (
        Kind("device memory", (*((torch, name) for name in _FACTORIES), *((torch.Tensor, name) for name in _METHODS)), _no_device_memory),
        Kind("host memory", ((mmap, "mmap"),), _no_host_memory),
        Kind("engine call", ((NativeEngine, "_call"),), _device_error, named=True),
        Kind("thread", ((threading.Thread, "start"),), _no_thread),
        Kind("disk", ((Path, "write_text"), (Path, "open"), (Path, "mkdir")), _disk_full),
    )
}


class Faults:
    """Watches the library's calls of one kind and lets one of them fail."""

    def __init__(self, kind: str) -> None:
        self.kind = KINDS[kind]
        self.call = ""  # of the loop, set by it; nothing fails where it is empty
        self.raised = False
        self._reached: Counter[tuple[str, str]] = Counter()
        self._places: list[Place] = []
        self._fail_at: Place | None = None
        self._thread = threading.get_ident()

    @contextmanager
    def counted(self) -> Iterator[list[Place]]:
        """Notes every place that is reached inside; nothing fails."""
        self._places = []
        with self._watching(None):
            yield self._places

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """Fails once, where `place` is reached inside."""
        with self._watching(place):
            yield

    @contextmanager
    def _watching(self, place: Place | None) -> Iterator[None]:
        self._reached.clear()
        self._fail_at, self.raised = place, False
        with pytest.MonkeyPatch.context() as patched:
            for owner, name in self.kind.targets:
                patched.setattr(owner, name, self._watched(getattr(owner, name), name))
            yield

    def _watched(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not (self.kind.named and args[1] in _MEASURING):
                self._reach(f"{name} {args[1]}" if self.kind.named else name)
            return real(*args, **kwargs)

        return call

    def _reach(self, name: str) -> None:
        frame = sys._getframe(2)
        here = threading.get_ident() == self._thread
        if self.raised or not self.call or not here or not frame.f_code.co_filename.startswith(_LIBRARY):
            return
        line = f"{frame.f_code.co_filename[len(_LIBRARY) + 1 :]}:{frame.f_lineno} {name}"
        place = Place(self.call, line, self._reached[self.call, line])
        self._reached[self.call, line] += 1
        self._places.append(place)
        if place == self._fail_at:
            self.raised = True
            raise self.kind.error()
