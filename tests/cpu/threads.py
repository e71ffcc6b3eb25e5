"""Threads of the library in this process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection
from pathlib import Path


def engine_threads() -> dict[int, str]:
    """The engine's threads, native and Python's: their names by their numbers in the system."""
    names = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended since
            names[int(task.name)] = (task / "comm").read_text().strip()
    names |= {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id}
    return {number: name for number, name in names.items() if name.startswith("hytrain")}


def threads_left(before: Collection[int] = ()) -> list[str]:
    """The names of the engine's threads that are not among `before`, after 10 s or once none is.

    One that was joined may still be listed for a moment.
    """
    deadline_s = time.monotonic() + 10
    while left := [name for number, name in engine_threads().items() if number not in before]:
        if time.monotonic() > deadline_s:
            break
        time.sleep(1e-3)
    return left
